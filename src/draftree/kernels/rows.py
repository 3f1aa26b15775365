"""What a layer does between its matrix products, a call each where torch takes six to twelve: norms, rotations, gates.

Every row, and of rotations and gates every number, is the same chain of operations whatever stands beside it, so that its bits
do not depend on the width of a pass. Numbers are rounded to bfloat16 where torch rounds them.

Shapes: n rows, D entries of a row, H heads.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types

from draftree.kernels.lanes import LONG, LONGS, PLACE, REAL, REALS, Code, of_vectors
from draftree.kernels.memory import NOTHING


def _norm(code: Code, half: bool, row: Any, weight: Any, out: Any, width: Any, epsilon: Any) -> None:
    b = code.b

    def square(first: Any, there: Any, total: Any) -> Any:
        x = code.some(row, first, there, half)
        return b.fadd(total, b.fpext(b.fmul(x, x), LONGS))

    mean = b.fdiv(code.added(code.each(width, square)), b.sitofp(width, LONG))
    root = b.call(code.function("llvm.sqrt.f64", ir.FunctionType(LONG, [LONG])), [b.fadd(mean, b.fpext(epsilon, LONG))])
    by = code.all(b.fptrunc(b.fdiv(LONG(1), root), REAL), REALS)

    def scale(first: Any, there: Any, total: Any) -> Any:
        x = code.rounded(b.fmul(code.some(row, first, there, half), by), half)
        code.keep(b.fmul(code.some(weight, first, there, half), x), out, first, there, half)
        return total

    code.each(width, scale)


def _turn(code: Code, half: bool, row: Any, cosine: Any, sine: Any, out: Any, width: Any) -> None:
    b, middle = code.b, code.b.lshr(width, PLACE(1))

    def turn(first: Any, there: Any, total: Any) -> Any:
        places = first, b.add(first, middle)
        (x, y), cosines, sines = ([code.some(at, e, there, half) for e in places] for at in (row, cosine, sine))
        for e, own, cos, other, sin in zip(places, (x, y), cosines, (b.fneg(y), x), sines, strict=True):
            one, two = (code.rounded(b.fmul(*pair), half) for pair in ((own, cos), (other, sin)))
            code.keep(b.fadd(one, two), out, e, there, half)
        return total

    code.each(middle, turn)


def _gate(code: Code, half: bool, gate: Any, source: Any, out: Any, count: Any) -> None:
    def open_(first: Any, there: Any, total: Any) -> Any:
        x, other = (code.some(place, first, there, half) for place in (gate, source))
        code.keep(code.gated(x, other, half), out, first, there, half)
        return total

    code.each(count, open_)


_normed = of_vectors(NOTHING, "aaaarh", _norm)
"""Divides a row by the root of its mean square, rounds it, and multiplies by a weight; see `norms`.

Squares are added up in float64: in float32 long sums lose twice as much as torch's own norm does.
"""
_turned, _gated = of_vectors(NOTHING, "aaaaah", _turn), of_vectors(NOTHING, "aaaah", _gate)


def norms(source: int, weight: int, out: int, rows: int, width: int, epsilon: Any, half: bool) -> None:
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
        _normed(source + r * size, weight, out + r * size, width, epsilon, half)


def _turns(source: int, cosines: int, sines: int, out: int, rows: int, heads: int, width: int, half: bool) -> None:
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
    size = width * (2 if half else 4)
    for h in range(rows * heads):
        angle = h // heads * size
        _turned(source + h * size, cosines + angle, sines + angle, out + h * size, width, half)


def _gates(gate: int, source: int, out: int, count: int, half: bool) -> None:
    """Multiplies numbers by x · sigmoid(x) of others.

    Args:
        gate: the address of the x.
        source: that of what is multiplied.
        out: where the results go.
        count: the numbers.
        half: whether all numbers are bfloat16's, else float32's.
    """
    _gated(gate, source, out, count, half)


@cache
def kernels() -> tuple[Any, Any, Any]:
    """The compiled functions: norm, turn, gate."""
    kind: Any = types
    whole, yes = kind.int64, kind.boolean
    signatures = (
        (norms, kind.void(whole, whole, whole, whole, whole, kind.float32, yes)),
        (_turns, kind.void(whole, whole, whole, whole, whole, whole, whole, yes)),
        (_gates, kind.void(whole, whole, whole, whole, yes)),
    )
    made: list[Any] = [njit(signature, nogil=True, cache=True)(function) for function, signature in signatures]
    return made[0], made[1], made[2]
