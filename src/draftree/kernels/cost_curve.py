"""Piecewise linear curves of costs, in C++ or NumPy.

Shapes: W points of a curve, N numbers of tokens.
"""

from typing import Any

import numpy as np

from draftree.native import Array, native

Curve = tuple[Array, Array]
"""A piecewise linear curve: [W] points in ascending order, and [W] the values there."""


@native
def height(at: Array, seconds: Array, t: float) -> Any:
    """Return the value of a piecewise linear curve at `t`.

    The curve is constant before the first point. After the last point it continues linearly, but
    does not fall.

    Args:
        at: [W] the curve's points, ascending.
        seconds: [W] the values at these points.
        t: the point of interest.
    """
    last = len(at) - 1
    if last == 0 or t <= at[0]:
        return seconds[0]
    i = last
    while at[i - 1] > t:
        i -= 1
    slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1])
    if t >= at[last]:
        return seconds[last] + max(slope, 0.0) * (t - at[last])
    return seconds[i - 1] + slope * (t - at[i - 1])


@native
def between(at: Array, seconds: Array, tokens: Array) -> Array:
    """Return the values [N] of a cost curve at several numbers of tokens; see `height`.

    Args:
        at: [W] the numbers of tokens at the curve's points, ascending.
        seconds: [W] the seconds at these points.
        tokens: [N] the numbers of tokens of interest.
    """
    found = np.empty(len(tokens))
    for n, t in enumerate(tokens):
        found[n] = height(at, seconds, t)
    return found
