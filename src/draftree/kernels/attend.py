"""Attention whose rows do not depend on company: every sum runs over the keys in their order, in float32, one by one.

A query's scores, weights and sums are the same chain of operations whatever stands beside it: other queries, other rows, and
keys that are hidden from it, whose weight is exactly 0, so that z + 0 · v = z. Keys are taken in blocks, transposed, so that
lanes of the processor work on different keys (scores) or on different entries of a value (sums), and never share a sum.

Shapes: H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a value. Keys and values come in
words of 64 bits, which hold four numbers of bfloat16 or two of float32.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from draftree.kernels.compiled import Array, Function

KEYS, QUERIES = 64, 32
"""Slots and queries that are worked on at a time."""
UPPER = np.uint32(0xFFFF0000)
"""The half of a word of 32 bits that a number of bfloat16 fills."""
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
def _any(mask: Array, first: Any, last: Any, start: Any, end: Any, lowest: Any) -> Any:
    """True where one of some queries sees one of some slots."""
    for h in range(len(mask)):
        for i in range(first, last):
            for j in range(start, end):
                if mask[h, i, j] > lowest:
                    return True
    return False


@_part
def _find(q: Array, k: Array, mask: Array, limits: Array, at: Array, of: Array, seen: Array, scores: Array) -> None:
    """The scores of some queries; see `_block`."""
    scale, cap, lowest = limits
    first, count, heads, group, half, slots = at
    deep, key, step = of
    words, bits = np.zeros((deep, KEYS), np.uint64), np.zeros((q.shape[2], KEYS), np.uint32)
    keys, dots = bits.view(np.float32), np.empty((2, KEYS), np.float32)
    for b in range(len(seen)):
        start, end = b * KEYS, min(slots, (b + 1) * KEYS)
        seen[b] = _any(mask, first, first + count // heads, start, end, lowest)
        if seen[b]:
            _turn(k, key + start * step, step, half, words[:, : end - start], bits)
            for r in range(0, count, 2):
                s, dots[:] = min(r + 1, count - 1), 0  # the last query may have no partner but itself
                h, i, o, u = group * heads + r % heads, first + r // heads, group * heads + s % heads, first + s // heads
                _add(q[h, i], q[o, u], keys, dots[0], dots[1], dots[0, 0], dots[1, 0])
                one, other = mask[h if len(mask) > 1 else 0, i, start:end], mask[o if len(mask) > 1 else 0, u, start:end]
                _score(dots[0], one, scale, cap, lowest, scores[r, start : start + KEYS])
                _score(dots[1], other, scale, cap, lowest, scores[r + 1, start : start + KEYS])
    scores[count:] = 0


@_part
def _block(q: Array, k: Array, v: Array, mask: Array, sinks: Array, limits: Array, at: Array, of: Array, out: Array) -> None:
    """Attention of some of a row's queries [H, n, D] with the heads of one group, two at a time; see `_attend`.

    Args:
        at: [6] the first query, how many there are with each head counted, heads of the group, the group, whether numbers are
            bfloat16's, S.
        of: [2, 3] of keys and values: words of one, the word that the group's first one begins with, words to the next one.
    """
    first, count, heads, group, half, slots = at
    _, value, step = of[1]
    wide, blocks = out.shape[2], (slots + KEYS - 1) // KEYS
    scores, sums = np.empty((count + 1, blocks * KEYS), np.float32), np.zeros((count + 1, wide), np.float32)
    totals, seen, exponents = np.zeros(count + 1, np.float32), np.zeros(blocks, np.bool_), np.empty(KEYS, np.int32)
    _find(q, k, mask, limits, at, of[0], seen, scores)
    for r in range(count):
        h, top = group * heads + r % heads, HIDDEN
        for b in range(blocks):
            if seen[b]:
                for j in range(b * KEYS, (b + 1) * KEYS):
                    top = scores[r, j] if scores[r, j] > top else top
        if top > HIDDEN:
            if len(sinks):
                top = max(top, sinks[h])
                totals[r] = np.exp(sinks[h] - top)
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
            out[first + r // heads, group * heads + r % heads, e] = sums[r, e] / total


def _attend(
    q: Array, k: Array, v: Array, mask: Array, sinks: Array, limits: Array, memory: Array, out: Array, begin: int, end: int
) -> None:
    """Attention of some parts of a pass: a part is a row, a group of heads, and `QUERIES` queries.

    Args:
        q: [B, H, n, D], D a multiple of 4.
        k: the memory of keys, flat, in words of 64 bits.
        v: that of values.
        mask: [B or 1, H or 1, n, S] what is added to the scores.
        sinks: [H] a score that takes weight and has no value; empty for none.
        limits: the scale of scores; the bound ± within which tanh holds them, 0 for none; the mask of a hidden key, at most.
        memory: [2, 6] of keys and values: whether they are bfloat16's, groups, words of one, and how many words apart rows,
            groups and slots lie.
        out: [B, n, H, W] is written.
        begin: the first part.
        end: the part behind the last.
    """
    half, groups = memory[0, :2]
    heads, parts = q.shape[1] // groups, (q.shape[2] + QUERIES - 1) // QUERIES
    at, of = np.empty(6, np.int64), np.empty((2, 3), np.int64)
    for place in range(begin, end):
        row, group, first = place // parts // groups, place // parts % groups, place % parts * QUERIES
        at[:3] = first, min(QUERIES, q.shape[2] - first) * heads, heads
        at[3:] = group, half, mask.shape[3]
        for i in range(2):
            _, _, words, by_row, by_group, by_slot = memory[i]
            of[i, 0], of[i, 1], of[i, 2] = words, row * by_row + group * by_group, by_slot
        _block(q[row], k, v, mask[row if len(mask) > 1 else 0], sinks, limits, at, of, out[row])


@cache
def attend() -> Any:
    """The compiled function."""
    kind: Any = types  # untyped, as much of numba is
    line, words, whole, four = kind.float32[::1], kind.uint64[::1], kind.int64, kind.float32[:, :, :, ::1]
    signature = kind.void(four, words, words, four, line, line, whole[:, ::1], four, whole, whole)
    machine: Any = njit(signature, fastmath=EXACT, nogil=True, cache=True)
    return machine(_attend)
