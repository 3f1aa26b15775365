"""Logarithm and exponential of single float64 numbers, with the bits of `log_exp` and of C++.

The C library's functions differ between systems in the last place. With these the trees of
`yield` are the same everywhere, on the host and on a device.
"""

import math

from draftree.kernels.log_exp import LN2, ROUNDING, exp_series, log_series

SQRT_HALF = math.sqrt(0.5)
LARGEST_EXPONENT = 700.0
"""The exponential of a number below minus this is 0, of one above it that of this."""
UNIT_ROUNDING = 1.5 * 2.0**12
"""A number that rounds to a multiple of `UNIT` when it is added and subtracted again."""
UNIT = 2.0**-40


def exp(x: float) -> float:
    """Return eˣ, with x limited to at most `LARGEST_EXPONENT`.

    The result is 0 if x is below −`LARGEST_EXPONENT`, and NaN if x is NaN.
    """
    if math.isnan(x):
        return math.nan
    if x < -LARGEST_EXPONENT:
        return 0.0
    x = min(x, LARGEST_EXPONENT)
    k = x * (1.0 / LN2) + ROUNDING - ROUNDING
    return math.ldexp(exp_series(x - k * LN2), int(k))


def log(x: float) -> float:
    """Return the natural logarithm of a normal number; −∞ for 0, NaN for what is below 0."""
    if not 0 < x < math.inf:
        return x if x > 0 or math.isnan(x) else -math.inf if x == 0 else math.nan
    m, power = math.frexp(x)
    if m < SQRT_HALF:
        m, power = 2 * m, power - 1
    series: float = log_series(m)
    return power * LN2 + series


def round_to_unit(x: float) -> float:
    """Return x rounded to a multiple of `UNIT`, for |x| < 2048.

    Sums of such numbers below 8,192 are exact. They do not depend on the order of their terms, so
    that a parallel sum on a device has the same bits.
    """
    return x + UNIT_ROUNDING - UNIT_ROUNDING
