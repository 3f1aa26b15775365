"""Attention whose rows do not depend on company: every sum runs over the keys in their order, in float32, one by one.

A query's scores, weights and sums are the same chain of operations whatever stands beside it: other queries, other rows, and
keys that are hidden from it, whose weight is exactly 0, so that z + 0 · v = z. Keys are taken in blocks, transposed, so that
lanes of the processor work on different keys (scores) or on different entries of a value (sums), and never share a sum.

Shapes: B rows, H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a value. Keys and values are
read in words of 64 bits, which hold four numbers of bfloat16 or two of float32.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from draftree.kernels.compiled import Array, Function
from draftree.kernels.memory import UPPER, pointer, read, write

KEYS, QUERIES = 64, 32
"""Slots and queries that are worked on at a time."""
HIDDEN = np.float32(-3e38)
"""A score that no key has: its weight is 0."""
LEAST = np.float32(-126.0)
"""Exponents of 2 below are taken for none."""
LOG2E = np.float32(1.4426950408889634)
P1, P2, P3, P4, P5, P6 = (
    np.float32(c) for c in (0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530)
)
"""2^y on [−½, ½] as 1 + P1 y + … + P6 y⁶, to some 10⁻⁷."""
EXACT = {"contract", "nsz", "arcp", "nnan"}
"""What the compiler may do: fuse a product with a sum, but never sum in another order."""


def _part(function: Function) -> Function:
    """Compiles a function into those that call it."""
    machine: Any = njit(fastmath=EXACT, nogil=True, inline="always")(function)
    same: Function = machine
    return same


@_part
def _turn(source: Array, place: Any, step: Any, half: Any, words: Array, bits: Array) -> None:
    """Reads keys and lays them across.

    Args:
        source: the memory in words of 64 bits, which hold 4 numbers of bfloat16 or 2 of float32.
        place: the word that the first key begins with.
        step: words from one key to the next.
        half: whether numbers are bfloat16's.
        words: [words of a key, keys] is written.
        bits: [numbers of a key, keys] is written, as float32's bits.
    """
    for j in range(words.shape[1]):
        at = np.uint64(place + j * step)
        for w in range(words.shape[0]):
            words[w, j] = source[at + np.uint64(w)]
    for w in range(words.shape[0]):
        for j in range(words.shape[1]):
            low, high = np.uint32(words[w, j]), np.uint32(words[w, j] >> np.uint64(32))
            if half:
                bits[4 * w, j], bits[4 * w + 1, j] = low << np.uint32(16), low & UPPER
                bits[4 * w + 2, j], bits[4 * w + 3, j] = high << np.uint32(16), high & UPPER
            else:
                bits[2 * w, j], bits[2 * w + 1, j] = low, high


@_part
def _read(source: Array, place: Any, half: Any, bits: Array) -> None:
    """Reads a value that begins at a word, as float32's bits."""
    if half:
        numbers, at = source.view(np.uint16), np.uint64(4 * place)
        for e in range(len(bits)):
            bits[e] = np.uint32(numbers[at + np.uint64(e)]) << np.uint32(16)
    else:
        reals, at = source.view(np.uint32), np.uint64(2 * place)
        for e in range(len(bits)):
            bits[e] = reals[at + np.uint64(e)]


@_part
def _add(one: Array, other: Array, rows: Array, sums: Array, others: Array, total: Any, rest: Any) -> tuple[Any, Any]:
    """Adds rows, each times its weight, to the sums of two queries, one after the other; their number is a multiple of 4.

    Returns:
        The totals so far of either's weights, with these added likewise.
    """
    for r in range(0, len(one), 4):
        a0, a1, a2, a3 = one[r], one[r + 1], one[r + 2], one[r + 3]
        b0, b1, b2, b3 = other[r], other[r + 1], other[r + 2], other[r + 3]
        total = total + a0 + a1 + a2 + a3
        rest = rest + b0 + b1 + b2 + b3
        for c in range(len(sums)):
            r0, r1, r2, r3 = rows[r, c], rows[r + 1, c], rows[r + 2, c], rows[r + 3, c]
            z = sums[c]
            z = z + a0 * r0
            z = z + a1 * r1
            z = z + a2 * r2
            sums[c] = z + a3 * r3
            z = others[c]
            z = z + b0 * r0
            z = z + b1 * r1
            z = z + b2 * r2
            others[c] = z + b3 * r3
    return total, rest


@_part
def _score(dots: Array, mask: Array, scale: Any, cap: Any, lowest: Any, found: Array) -> None:
    """Turns a query's products with keys into scores; `HIDDEN` where the mask, which ends with the slots, hides one."""
    by = scale
    if cap > 0:
        for j in range(KEYS):
            dots[j] = cap * np.tanh(dots[j] * scale / cap)
        by = np.float32(1.0)
    for j in range(len(mask)):
        found[j] = dots[j] * by + mask[j] if mask[j] > lowest else HIDDEN
    found[len(mask) :] = HIDDEN


@_part
def _weigh(row: Array, seen: Array, top: Any, bits: Array, powers: Array) -> None:
    """Turns the scores of one query into their exponentials, those of hidden keys into 0."""
    for b in range(len(seen)):
        if seen[b]:
            block = row[b * KEYS : (b + 1) * KEYS]
            for j in range(KEYS):
                x = (block[j] - top) * LOG2E
                none = x < LEAST
                x = LEAST if none else x
                whole = np.floor(x + np.float32(0.5))
                y = x - whole
                p = P6 * y + P5
                p = p * y + P4
                p = p * y + P3
                p = p * y + P2
                p = p * y + P1
                p = p * y + np.float32(1)
                bits[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
                block[j] = np.float32(0) if none else p
            for j in range(KEYS):
                block[j] *= powers[j]


@_part
def _any(mask: Array, start: Any, end: Any, lowest: Any) -> Any:
    """True where one of some queries [1 or heads, queries, S] sees one of some slots."""
    for h in range(len(mask)):
        for i in range(mask.shape[1]):
            for j in range(start, end):
                if mask[h, i, j] > lowest:
                    return True
    return False


@_part
def _find(q: Array, k: Array, mask: Array, limits: Any, half: Any, of: Any, seen: Array, scores: Array) -> None:
    """The scores of some queries; see `_block`."""
    scale, cap, lowest = limits
    deep, key, step = of
    slots, heads, count = mask.shape[2], len(q) // mask.shape[1], len(q)
    words, bits = np.zeros((deep, KEYS), np.uint64), np.zeros((q.shape[1], KEYS), np.uint32)
    keys, dots = bits.view(np.float32), np.empty((2, KEYS), np.float32)
    for b in range(len(seen)):
        start, end = b * KEYS, min(slots, (b + 1) * KEYS)
        seen[b] = _any(mask, start, end, lowest)
        if seen[b]:
            _turn(k, key + start * step, step, half, words[:, : end - start], bits)
            for r in range(0, count, 2):
                s, dots[:] = min(r + 1, count - 1), 0  # the last query may have no partner but itself
                _add(q[r], q[s], keys, dots[0], dots[1], dots[0, 0], dots[1, 0])
                one = mask[r % heads if len(mask) > 1 else 0, r // heads, start:end]
                other = mask[s % heads if len(mask) > 1 else 0, s // heads, start:end]
                _score(dots[0], one, scale, cap, lowest, scores[r, start : start + KEYS])
                _score(dots[1], other, scale, cap, lowest, scores[r + 1, start : start + KEYS])
    scores[count:] = 0


@_part
def _block(q: Array, k: Array, v: Array, mask: Array, sinks: Array, limits: Any, half: Any, keyed: Any, valued: Any) -> Array:
    """Attention of some of a row's queries with the heads of one group, two at a time.

    Args:
        q: [count, D], the heads of a query one after the other; D a multiple of 4.
        k: the memory of keys, in words.
        v: that of values.
        mask: [1 or heads, queries, S] what is added to the scores.
        sinks: [heads] a score that takes weight and has no value; empty for none.
        limits: the scale of scores; the bound ± within which tanh holds them, 0 for none; the mask of a hidden key, at most.
        half: whether keys and values are bfloat16's.
        keyed: of keys: words of one, the word that the first one begins with, words to the next one.
        valued: of values.

    Returns:
        [count, W], and more behind that is nothing.
    """
    count, heads, slots = len(q), len(q) // mask.shape[1], mask.shape[2]
    words, value, step = valued
    wide, blocks = words * (4 if half else 2), (slots + KEYS - 1) // KEYS
    scores, sums = np.empty((count + 1, blocks * KEYS), np.float32), np.zeros((count + 1, wide), np.float32)
    totals, seen, exponents = np.zeros(count + 1, np.float32), np.zeros(blocks, np.bool_), np.empty(KEYS, np.int32)
    _find(q, k, mask, limits, half, keyed, seen, scores)
    for r in range(count):
        top = HIDDEN
        for b in range(blocks):
            if seen[b]:
                for j in range(b * KEYS, (b + 1) * KEYS):
                    top = scores[r, j] if scores[r, j] > top else top
        if top > HIDDEN:
            if len(sinks):
                top = max(top, sinks[r % heads])
                totals[r] = np.exp(sinks[r % heads] - top)
            _weigh(scores[r], seen, top, exponents, exponents.view(np.float32))
        else:  # sees nothing: weighs nothing
            scores[r] = 0
    bits = np.zeros((KEYS, wide), np.uint32)
    values = bits.view(np.float32)
    for b in range(blocks):
        if seen[b]:
            start, end = b * KEYS, min(slots, (b + 1) * KEYS)
            for j in range(start, end):
                _read(v, value + j * step, half, bits[j - start])
            for r in range(0, count, 2):
                one, other = scores[r, start : start + KEYS], scores[r + 1, start : start + KEYS]
                totals[r], totals[r + 1] = _add(one, other, values, sums[r], sums[r + 1], totals[r], totals[r + 1])
    for r in range(count):
        total = totals[r] if totals[r] > 0 else np.float32(1)
        for e in range(wide):
            sums[r, e] = sums[r, e] / total
    return sums


def _attend(
    sizes: Any, queries: Any, keys: Any, values: Any, masks: Any, sinks: Array, limits: Any, out: int, begin: int, end: int
) -> None:
    """Attention of some parts of a pass: a part is a row, a group of heads, and `QUERIES` queries.

    Args:
        sizes: H, G, n, S, D, W.
        queries: their address, whether they are bfloat16's, and how many numbers rows, heads and queries lie apart.
        keys: their address, whether they are bfloat16's, words of one, and how many words rows, groups and slots lie apart.
        values: likewise.
        masks: what is added to the scores: as queries, 0 where one serves all rows or heads, and how many heads there are.
        sinks: [H] a score that takes weight and has no value; empty for none.
        limits: the scale of scores; the bound ± within which tanh holds them, 0 for none; the mask of a hidden key, at most.
        out: the address of [B, n, H, W], of the queries' dtype.
        begin: the first part.
        end: the part behind the last.
    """
    all_heads, groups, n, slots, width, wide = sizes
    heads, parts, half, several = all_heads // groups, (n + QUERIES - 1) // QUERIES, keys[1] > 0, masks[5] > 1
    size, of_mask = (2 if queries[1] else 4), (2 if masks[1] else 4)
    k, v = carray(pointer(keys[0]), (1 << 48,), np.uint64), carray(pointer(values[0]), (1 << 48,), np.uint64)
    for place in range(begin, end):
        row, group, first = place // parts // groups, place // parts % groups, place % parts * QUERIES
        count = min(QUERIES, n - first)
        bits, mask = np.zeros((count * heads, (width + 3) // 4 * 4), np.uint32), np.empty((masks[5], count, slots), np.uint32)
        if several:
            mask = mask[:heads]
        for i in range(count):
            for h in range(heads):
                at = row * queries[2] + (group * heads + h) * queries[3] + (first + i) * queries[4]
                read(queries[0] + at * size, queries[1] > 0, bits[i * heads + h, :width])
            for h in range(len(mask)):
                at = row * masks[2] + (group * heads + h if several else 0) * masks[3] + (first + i) * masks[4]
                read(masks[0] + at * of_mask, masks[1] > 0, mask[h, i])
        keyed = keys[2], row * keys[3] + group * keys[4], keys[5]
        valued = values[2], row * values[3] + group * values[4], values[5]
        own = sinks[group * heads : (group + 1) * heads] if len(sinks) else sinks
        sums = _block(bits.view(np.float32), k, v, mask.view(np.float32), own, limits, half, keyed, valued)
        for i in range(count):
            for h in range(heads):
                at = ((row * n + first + i) * all_heads + group * heads + h) * wide
                write(sums[i * heads + h, :wide].view(np.uint32), queries[1] > 0, out + at * size)


@cache
def attend() -> Any:
    """The compiled function."""
    kind: Any = types  # untyped, as much of numba is
    whole, several, real = kind.int64, kind.UniTuple, kind.float32
    layouts = (several(whole, 6), several(whole, 5), *(several(whole, 6),) * 3)
    signature = kind.void(*layouts, real[::1], several(real, 3), whole, whole, whole)
    machine: Any = njit(signature, fastmath=EXACT, nogil=True, cache=True)
    return machine(_attend)
