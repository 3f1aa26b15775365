"""Float functions that return infinity or NaN, as in C, where Python raises an error."""

import math


def exp(x: float) -> float:
    """Return eˣ."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: float) -> float:
    """Return the natural logarithm."""
    if x > 0:
        return math.log(x)
    return -math.inf if x == 0 else math.nan


def log1p(x: float) -> float:
    """Return the natural logarithm of 1 + x."""
    if x > -1:
        return math.log1p(x)
    return -math.inf if x == -1 else math.nan
