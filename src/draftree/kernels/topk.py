"""The likeliest token of logits in bfloat16, and the k likeliest in float32 or float64.

Shapes: N rows, F distributions, V tokens, K likeliest ones.
"""

import numpy as np

from draftree.native import Array, native

SIZE, INFINITE = np.int16(0x7FFF), 0x7F80
"""The bit mask that removes the sign of a bfloat16 number.

`INFINITE` is the bit pattern of infinity. The patterns of all finite numbers are lower.
"""


@native
def largest(bits: Array) -> Array:
    """Return the index [N] of the largest number in each vector; the first of equal ones.

    It is −1 if that number is infinite or if a number of the vector is NaN.

    Args:
        bits: [N, V] bfloat16 as int16.
    """
    sizes = bits & SIZE
    ordered = np.where(bits < 0, -sizes, sizes)
    at = ordered.argmax(axis=1)
    best = np.take_along_axis(ordered, at[:, None], axis=1)[:, 0]
    return np.where((sizes.max(axis=1) > INFINITE) | (np.abs(best) >= INFINITE), -1, at)


@native
def likeliest(values: Array, k: int) -> tuple[Array, Array]:
    """Return the indices [F, K] of the k largest values of vectors [F, V], and these values.

    They are in falling order. Of equal values the lower index comes first, and NaN counts as larger
    than any number. The values are float64.
    """
    order = np.argsort(np.where(np.isnan(values), -np.inf, -values), axis=1, kind="stable")
    nothing = np.take_along_axis(np.isnan(values), order, axis=1)
    order = np.take_along_axis(order, np.argsort(~nothing, axis=1, kind="stable"), axis=1)[:, :k]
    return order, np.take_along_axis(values, order, axis=1).astype(np.float64)
