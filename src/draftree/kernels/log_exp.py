"""Logarithm and exponential of float64 with the same bits on every device.

The functions of libraries and devices differ in the last place. These consist of sums, products and
quotients and of operations on integers, each a separate operation. IEEE 754 fixes the result of
each, and separate operations of NumPy or kernels of PyTorch are never fused; the versions in C++
are compiled without fusing.

Both take NumPy arrays and PyTorch tensors.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

MANTISSA = 52
"""Number of fraction bits of a float64."""
ROOT = 0x3FE6A09E667F3BCD
"""The bit pattern of √½."""
ROUNDING = 1.5 * 2.0**MANTISSA
"""A number that rounds to the nearest integer when it is added and subtracted again."""
WHOLE = 0x4338000000000000
"""The bit pattern of `ROUNDING`; adding an integer to the float adds it to the bits too."""
BIAS = 1023
"""The exponent field of 1.0."""
LN2 = 0.6931471805599453
LOG_TERMS = 9
"""Terms of the logarithm's series after the first; the rest is below 10⁻¹⁶ of the result."""
EXP_TERMS = 12
"""Terms of the exponential's series after the first; the rest is below 2 · 10⁻¹⁶ of the result."""


def _dtypes(x: Any) -> tuple[Any, Any]:
    return (torch.int64, torch.float64) if isinstance(x, Tensor) else (np.int64, np.float64)


def log(x: Any) -> Any:
    """Return the natural logarithm of positive normal float64 numbers.

    With x = 2ᵏ m and √½ ≤ m < √2 the result is k ln 2 + 2 artanh s for s = (m − 1) / (m + 1), |s| <
    0.172. The error is at most 2 units in the last place, near 1 as well.
    """
    ints, floats = _dtypes(x)
    bits = x.view(ints)
    power = (bits - ROOT) >> MANTISSA
    m = (bits - (power << MANTISSA)).view(floats)
    return ((power + WHOLE).view(floats) - ROUNDING) * LN2 + log_series(m)


def log_series(m: Any) -> Any:
    """Return ln m for √½ ≤ m < √2; m may be a single float, too."""
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (1.0 / (2 * LOG_TERMS + 1))
    for n in range(LOG_TERMS - 1, 0, -1):
        series = z * (series + 1.0 / (2 * n + 1))
    twice = s + s
    return twice + twice * series


def exp(x: Any) -> Any:
    """Return eˣ of float64 numbers from −700 to 700.

    With x = k ln 2 + r and |r| ≤ ½ ln 2 the result is 2ᵏ eʳ. The relative error is below |k| ·
    10⁻¹⁶ + 10⁻¹⁵.
    """
    ints, floats = _dtypes(x)
    shifted = x * (1.0 / LN2) + ROUNDING
    r = x - (shifted - ROUNDING) * LN2
    return exp_series(r) * (((shifted.view(ints) - WHOLE) + BIAS) << MANTISSA).view(floats)


def exp_series(r: Any) -> Any:
    """Return eʳ for |r| ≤ ½ ln 2; r may be a single float, too."""
    series = r * (1.0 / EXP_TERMS) + 1.0
    for n in range(EXP_TERMS - 1, 0, -1):
        series = series * (r * (1.0 / n)) + 1.0
    return series
