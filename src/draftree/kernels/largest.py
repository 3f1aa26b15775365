"""The likeliest token of logits in bfloat16, found without widening them, thirty-two at a time."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from draftree.kernels.compiled import Array, compiled
from draftree.kernels.lanes import BIT, PLACE, Code

WIDE = 32
"""Numbers of a vector."""
SIZE, INFINITE, LEAST = np.int16(0x7FFF), 0x7F80, -0x8000
"""The bits of a number without its sign; infinity's, those of what is no number being above; and less than all."""
_NUMBER = ir.IntType(16)
_NUMBERS = ir.VectorType(_NUMBER, WIDE)


def _known(value: int) -> Any:
    return ir.Constant(_NUMBERS, [value] * WIDE)


def _ordered(code: Code, place: Any) -> tuple[Any, Any]:
    """A vector's numbers as whole ones of the same order, and without their signs."""
    bits = code.at(place, _NUMBERS)
    size = code.b.and_(bits, _known(int(SIZE)))
    negative = code.b.icmp_signed("<", bits, _known(0))
    return code.b.select(negative, code.b.sub(_known(0), size), size), size


def _larger(code: Code, one: Any, other: Any) -> Any:
    return code.b.select(code.b.icmp_signed(">", one, other), one, other)


def _over(code: Code, row: Any, count: Any, starts: list[Any], body: Any) -> list[Any]:
    """What a body makes, vector by vector, of what it made before; it also says whether to go on."""
    b, before = code.b, code.b.block
    loop, behind = b.append_basic_block("vectors"), b.append_basic_block("behind")
    b.branch(loop)
    b.position_at_end(loop)
    i, states = b.phi(PLACE), [b.phi(start.type) for start in starts]
    made: list[Any]
    made, on = body(b.add(row, b.mul(i, PLACE(2 * WIDE))), i, states)
    after = b.add(i, PLACE(1))
    for phi, first, last in zip([i, *states], [PLACE(0), *starts], [after, *made], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, loop)
    b.cbranch(b.and_(on, b.icmp_signed("<", after, count)), loop, behind)
    b.position_at_end(behind)
    return made


def _most(typing: Any, row: Any, count: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(builder)

        def body(place: Any, i: Any, states: list[Any]) -> tuple[list[Any], Any]:
            here, size = _ordered(code, place)
            return [_larger(code, here, states[0]), _larger(code, size, states[1])], BIT(1)

        for_all = _over(code, args[0], args[1], [_known(LEAST), _known(0)], body)
        for apart in (16, 8, 4, 2, 1):
            turned = ir.Constant(ir.VectorType(ir.IntType(32), WIDE), [(i + apart) % WIDE for i in range(WIDE)])
            for_all = [_larger(code, v, builder.shuffle_vector(v, v, turned)) for v in for_all]
        best, size = (builder.extract_element(v, ir.IntType(32)(0)) for v in for_all)
        return builder.or_(builder.shl(builder.sext(best, PLACE), PLACE(16)), builder.zext(size, PLACE))

    kinds: Any = types
    return kinds.int64(kinds.int64, kinds.int64), made


def _first(typing: Any, row: Any, count: Any, best: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(builder)
        wanted = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), builder.trunc(args[2], _NUMBER), ir.IntType(32)(0))
        wanted = builder.shuffle_vector(wanted, wanted, ir.Constant(ir.VectorType(ir.IntType(32), WIDE), [0] * WIDE))

        def body(place: Any, i: Any, states: list[Any]) -> tuple[list[Any], Any]:
            there = builder.bitcast(builder.icmp_signed("==", _ordered(code, place)[0], wanted), ir.IntType(WIDE))
            return [i], builder.icmp_unsigned("==", there, ir.IntType(WIDE)(0))

        return _over(code, args[0], args[1], [PLACE(0)], body)[0]

    kinds: Any = types
    return kinds.int64(kinds.int64, kinds.int64, kinds.int64), made


_most_of: Any = intrinsic(_most)
"""Of a row's vectors the largest number as a whole one, times 2¹⁶, and the largest without its sign."""
_first_of: Any = intrinsic(_first)
"""The first of a row's vectors with a number that is another one, or the last."""


@compiled
def largest(address: Any, bits: Any) -> Array:
    """[N] where the largest number of each row stands, the first of equals; −1 where it is infinite, or one is no number.

    Args:
        address: of the rows.
        bits: [N, V] of bfloat16, as int16.
    """
    rows, width = bits.shape
    vectors, found = width // WIDE, np.full(rows, -1)
    for r in range(rows):
        row, best, most, last = address + 2 * r * width, LEAST, 0, LEAST
        if vectors:
            both = _most_of(row, vectors)
            best, most = both >> 16, both & 0xFFFF
        for i in range(vectors * WIDE, width):
            size: Any = np.int64(bits[r, i] & SIZE)
            last, most = max(last, size if bits[r, i] >= 0 else -size), max(most, size)
        begin = _first_of(row, vectors, best) * WIDE if vectors and best >= last else vectors * WIDE
        best = max(best, last)
        if most > INFINITE or abs(best) >= INFINITE:
            continue
        for i in range(begin, width):
            size = np.int64(bits[r, i] & SIZE)
            if (size if bits[r, i] >= 0 else -size) == best:
                found[r] = i
                break
    return found


@compiled
def likeliest(values: Array, k: int) -> tuple[Array, Array]:
    """Where the k largest of each row [F, V] stand [F, K], falling, the first of equals first; and they, as float64.

    What is no number is larger than all, wherever it stands.
    """
    rows, width = values.shape
    k = min(k, width)
    places, found = np.empty((rows, k), np.int64), np.empty((rows, k))
    for f in range(rows):
        count, least = 0, values.dtype.type(-np.inf)
        for i in range(width):
            value = values[f, i]
            if count == k and (value <= least or least != least):
                continue
            nothing = value != value
            count = min(count + 1, k)
            at = count - 1
            while at and (value > found[f, at - 1] or (nothing and found[f, at - 1] == found[f, at - 1])):
                found[f, at], places[f, at] = found[f, at - 1], places[f, at - 1]
                at -= 1
            found[f, at], places[f, at] = value, i
            least = values.dtype.type(found[f, k - 1]) if count == k else least
    return places, found
