"""The entropy of distributions over their likeliest tokens, as machine code.

Shapes: F distributions, V tokens.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir

from draftree.kernels.compiled import Array, compiled
from draftree.kernels.lanes import BITS, COLUMNS, LANES, PLACE, WORD, WORDS, Code, of_vectors, weighed, words
from draftree.kernels.memory import WHOLE
from draftree.kernels.tiles import BYTES

NEGLIGIBLE = np.float32(87)
"""Probabilities below e⁻⁸⁷ are no normal numbers of float32, and are taken for this."""
INFINITE, ALL = 0x7F800000, 0x7FFFFFFF
"""The bits of infinity, and all but the sign's, which are more than those of any number."""
SIZE = np.int32(ALL)


def _keep(code: Code, source: Any, count: Any, edge: Any, out: Any) -> Any:
    b, flags = code.b, ir.IntType(LANES)
    compress = code.function("llvm.experimental.vector.compress.v16i32", ir.FunctionType(WORDS, [WORDS, BITS, WORDS]))
    ones = code.function("llvm.ctpop.i16", ir.FunctionType(flags, [flags]))
    most = code.all(b.trunc(edge, WORD), WORDS)

    def keep(first: Any, there: Any, kept: Any) -> Any:
        x = b.and_(b.bitcast(code.some(source, first, there, False), WORDS), words(ALL))
        small = b.icmp_signed("<=", x, most)
        small = small if there is None else b.and_(small, there)
        code.write(b.call(compress, [x, small, words(0)]), b.add(out, b.mul(kept, PLACE(4))))
        return b.add(kept, b.zext(b.call(ones, [b.bitcast(small, flags)]), PLACE))

    return code.each(count, keep, PLACE(0))


keep: Any = of_vectors(WHOLE, "aaaa", _keep)
"""Copies the sizes of consecutive numbers, those that are not above one, in their order, and says how many they are.

Its arguments: the numbers' address, how many they are, the bits of that one, and where to, with room for 16 more; there they
may lie, too.
"""


@compiled
def _least(bits: Array, top: int, guess: int, kept: Array) -> tuple[int, int]:
    """Copies the `top` least sizes of numbers [V], without those equal to the last; says how many, and below what they lie.

    Counts are halved and interpolated by turns, as counting is done sixteen numbers at a time and sorting is not; what turns
    out to be too large is left out of the counts that follow.

    Args:
        bits: [V] the numbers' bits, whose order is theirs but for the sign.
        top: how many, at most V.
        guess: where to begin, what another distribution's lie below; −1 for none.
        kept: [V + 16] where they are copied to.
    """
    low, high, below, above, halving, row, to = -1, INFINITE, 0, len(bits), True, bits, kept.ctypes.data
    while high - low > 1:
        middle = low + (high - low) // 2
        if low < guess < high:
            middle, guess = guess, -1
        elif not halving:
            middle = min(max(low + int((high - low) * ((top - below) / (above - below))), low + 1), high - 1)
        halving, edge, count = not halving, np.int32(middle), np.int32(0)  # of 32 bits, as what is compared
        for i in range(len(row)):
            count += np.int32((row[i] & SIZE) <= edge)
        if count == top:
            high = middle + 1
            break
        if count > top:
            high, above = middle, int(count)
            if 4 * above < 3 * len(row):
                row = kept[: keep(row.ctypes.data, len(row), middle, to)]
        else:
            low, below = middle, int(count)
    return keep(row.ctypes.data, len(row), high - 1, to), high


@compiled
def entropies(bits: Array, top: int) -> Array:
    """[F] entropy in nats, Σ −q log q over the `top` likeliest tokens of each distribution.

    Args:
        bits: [F, V] log q, as the bits of float32.
        top: how many tokens.
    """
    (rows, width), limit = bits.shape, -1
    found, kept, weights = np.empty(rows), np.empty(width + COLUMNS, np.int32), np.empty(width + COLUMNS, np.float32)
    numbers, place = kept.view(np.float32), weights.ctypes.data
    for f in range(rows):
        if top < width:
            count, limit = _least(bits[f], top, limit - 1, kept)
        else:
            count, limit = keep(bits[f].ctypes.data, width, ALL, kept.ctypes.data), ALL
        for i in range(count, count + COLUMNS):
            numbers[i] = NEGLIGIBLE
        for i in range(count + COLUMNS):
            numbers[i] = min(numbers[i], NEGLIGIBLE)
            weights[i] = -numbers[i]
        for b in range(count // COLUMNS + 1):
            weighed(place + b * BYTES, np.float32(0))
        sums = np.zeros(LANES)
        for begin in range(0, count, LANES):
            for j in range(LANES):
                sums[j] += numbers[begin + j] * weights[begin + j]
        total = sums.sum()
        if count < top < width:  # the rest are all alike
            edge = np.float64(np.array([limit], np.int32).view(np.float32)[0])
            total += (top - count) * edge * math.exp(-edge) if edge < NEGLIGIBLE else 0.0
        found[f] = total
    return found
