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
STEP = 1 << 20
"""An eighth of a number, more or less, as bits."""


def _small(code: Code, source: Any, first: Any, there: Any, most: Any) -> tuple[Any, Any]:
    """The sizes of a vector's numbers, and which of them are not above one."""
    sizes = code.b.and_(code.b.bitcast(code.some(source, first, there, False), WORDS), words(ALL))
    small = code.b.icmp_signed("<=", sizes, code.all(code.b.trunc(most, WORD), WORDS))
    return sizes, small if there is None else code.b.and_(small, there)


def _count(code: Code, source: Any, count: Any, most: Any) -> Any:
    def counted(first: Any, there: Any, counts: Any) -> Any:
        return code.b.sub(counts, code.b.sext(_small(code, source, first, there, most)[1], WORDS))

    return code.b.sext(code.folded(code.each(count, counted, words(0)), code.b.add), PLACE)


def _keep(code: Code, source: Any, count: Any, most: Any, out: Any) -> Any:
    b, flags = code.b, ir.IntType(LANES)
    compress = code.function("llvm.experimental.vector.compress.v16i32", ir.FunctionType(WORDS, [WORDS, BITS, WORDS]))
    ones = code.function("llvm.ctpop.i16", ir.FunctionType(flags, [flags]))

    def keep(first: Any, there: Any, kept: Any) -> Any:
        sizes, small = _small(code, source, first, there, most)
        code.write(b.call(compress, [sizes, small, words(0)]), b.add(out, b.mul(kept, PLACE(4))))
        return b.add(kept, b.zext(b.call(ones, [b.bitcast(small, flags)]), PLACE))

    return code.each(count, keep, PLACE(0))


counted: Any = of_vectors(WHOLE, "aaa", _count)
"""How many of consecutive numbers have a size that is not above one (address, how many they are, the bits of that one)."""
keep: Any = of_vectors(WHOLE, "aaaa", _keep)
"""Copies the sizes of consecutive numbers, those that are not above one, in their order, and says how many they are.

Its arguments: the numbers' address, how many they are, the bits of that one, and where to, with room for 16 more; there they
may lie, too.
"""


@compiled
def _least(bits: Array, top: int, guess: int, kept: Array) -> tuple[int, int]:
    """Copies the `top` least sizes of numbers [V], without those equal to the last; says how many, and below what they lie.

    Bounds are looked for from a guess on in growing steps, then between two by halves and by interpolation in turns: counting
    is done sixteen numbers at a time, and sorting is not. What turns out to be too large is left out of further counts.

    Args:
        bits: [V] the numbers' bits, whose order is theirs but for the sign.
        top: how many, at most V.
        guess: where to begin.
        kept: [V + 16] where they are copied to.
    """
    low, high, below, above, row, to = -1, INFINITE, 0, len(bits), bits, kept.ctypes.data
    middle, step, halving = guess, STEP, False
    while high - low > 1:
        middle = min(max(middle, low + 1), high - 1)
        count = counted(row.ctypes.data, len(row), middle)
        if count == top:
            high = middle + 1
            break
        if count > top:
            high, above = middle, count
            if 4 * above < 3 * len(row):
                row = kept[: keep(row.ctypes.data, len(row), middle, to)]
        else:
            low, below = middle, count
        if low < 0 or high == INFINITE:
            middle, step = (high - step if low < 0 else low + step), 2 * step
        else:
            share = 0.5 if halving else (top - below) / (above - below)
            middle, halving = low + int((high - low) * share), not halving
    return keep(row.ctypes.data, len(row), high - 1, to), high


@compiled
def entropies(bits: Array, top: int) -> Array:
    """[F] entropy in nats, Σ −q log q over the `top` likeliest tokens of each distribution.

    Args:
        bits: [F, V] log q, as the bits of float32.
        top: how many tokens.
    """
    rows, width = bits.shape
    limit = np.array([math.log(width)], np.float32).view(np.int32)[0]  # where all are alike
    found, kept = np.empty(rows), np.empty(width + COLUMNS, np.int32)
    weights = np.empty(min(top, width) + COLUMNS, np.float32)
    numbers, place = kept.view(np.float32), weights.ctypes.data
    for f in range(rows):
        if top < width:
            count, limit = _least(bits[f], top, int(limit), kept)
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
