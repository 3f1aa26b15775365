"""What a layer does between its matrix products, a call each where torch takes six to twelve: norms, rotations, gates.

Every row, and of rotations and gates every number, is the same chain of operations whatever stands beside it, so that its bits
do not depend on the width of a pass. Numbers are rounded to bfloat16 where torch rounds them.

Shapes: n rows, D entries of a row, H heads.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from draftree.kernels import lanes
from draftree.kernels.lanes import LANES, half_squared, real_squared
from draftree.kernels.memory import as_real, number, part, put, settled

LOG2E, MOST = np.float32(lanes.LOG2E), np.float32(lanes.MOST)
P6, P5, P4, P3, P2, P1 = (np.float32(c) for c in lanes.POWER[:-1])


@part
def normed(row: Any, weight: Any, to: Any, width: Any, epsilon: Any, half: Any) -> None:
    """Divides a row by the root of its mean square, rounds it, and multiplies by a weight; see `_norm`.

    Squares are added up in float64: in float32 long sums lose twice as much as torch's own norm does.
    """
    vectors = width // LANES
    total = half_squared(row, vectors) if half else real_squared(row, vectors)
    for e in range(vectors * LANES, width):
        x = number(row, e, half)
        total += np.float64(x * x)
    by = np.float32(1 / np.sqrt(total / width + epsilon))
    for e in range(width):
        put(to, e, number(weight, e, half) * settled(number(row, e, half) * by, half), half)


def _norm(source: int, weight: int, out: int, rows: int, width: int, epsilon: Any, half: bool) -> None:
    """Divides rows [n, D] by the root of their mean square, rounds them, and multiplies by a weight [D].

    Args:
        source: the address of the rows, which lie one behind the other.
        weight: that of the weight.
        out: where the results go, likewise.
        rows: n.
        width: D.
        epsilon: added to the mean square, a float32.
        half: whether all numbers are bfloat16's, else float32's.
    """
    size = width * (2 if half else 4)
    for r in range(rows):
        normed(source + r * size, weight, out + r * size, width, epsilon, half)


def _turn(source: int, cosines: int, sines: int, out: int, rows: int, heads: int, width: int, half: bool) -> None:
    """Rotates each head's halves [n, H, D] against each other by a row's angles [n, D].

    Args:
        source: the address of the heads, which lie one behind the other.
        cosines: of the angles, those of a row one behind the other.
        sines: likewise.
        out: where the results go, as the source.
        rows: n.
        heads: H.
        width: D, even.
        half: whether all numbers are bfloat16's, else float32's.
    """
    size, middle = width * (2 if half else 4), width // 2
    for r in range(rows):
        cosine, sine = cosines + r * size, sines + r * size
        for h in range(heads):
            row, to = source + (r * heads + h) * size, out + (r * heads + h) * size
            for e in range(middle):
                f = e + middle
                x, y = number(row, e, half), number(row, f, half)
                one, other = settled(x * number(cosine, e, half), half), settled(y * number(cosine, f, half), half)
                put(to, e, one + settled(-y * number(sine, e, half), half), half)
                put(to, f, other + settled(x * number(sine, f, half), half), half)


@part
def sigmoid_times(x: Any, source: Any, half: Any) -> Any:
    """x · sigmoid(x), rounded, times another number."""
    z = x * -LOG2E
    z = MOST if z > MOST else (-MOST if z < -MOST else z)
    whole = np.floor(z + np.float32(0.5))
    f = z - whole
    p = P6 * f + P5
    p = p * f + P4
    p = p * f + P3
    p = p * f + P2
    p = p * f + P1
    p = p * f + np.float32(1)
    power = as_real(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))
    return settled(x / (np.float32(1) + p * power), half) * source


def _gate(gate: int, source: int, out: int, count: int, half: bool) -> None:
    """Multiplies numbers by x · sigmoid(x) of others.

    Args:
        gate: the address of the x.
        source: that of what is multiplied.
        out: where the results go.
        count: the numbers.
        half: whether all numbers are bfloat16's, else float32's.
    """
    for e in range(count):
        put(out, e, sigmoid_times(number(gate, e, half), number(source, e, half), half), half)


@cache
def kernels() -> tuple[Any, Any, Any]:
    """The compiled functions: norm, turn, gate."""
    kind: Any = types
    whole, yes = kind.int64, kind.boolean
    signatures = (
        (_norm, kind.void(whole, whole, whole, whole, whole, kind.float32, yes)),
        (_turn, kind.void(whole, whole, whole, whole, whole, whole, whole, yes)),
        (_gate, kind.void(whole, whole, whole, whole, yes)),
    )
    how: Any = {"nogil": True, "cache": True, "error_model": "numpy"}  # divisions that are checked for 0 take no lanes
    made: list[Any] = [njit(signature, **how)(function) for function, signature in signatures]
    return made[0], made[1], made[2]
