"""Attention whose rows do not depend on company: every sum runs over the keys in their order, in float32, one by one.

A query's scores, weights and sums are the same chain of operations whatever stands beside it: other queries, other rows, and
keys that are hidden from it, whose weight is exactly 0, so that z + 0 · v = z. Keys are taken in blocks, transposed, so that
lanes of the processor work on different keys (scores) or on different entries of a value (sums), and never share a sum.

Shapes: H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a value. Half-precision keys and
values come as the 16 bits of bfloat16.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from draftree.kernels.compiled import Array, Function

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
def _read(source: Array, place: Any, bits: Array, values: Array) -> None:
    """Puts a key or value that lies at a place into `values`, which shares its memory with `bits`."""
    at = np.uint64(place)
    if source.itemsize == 2:
        for e in range(len(bits)):
            bits[e] = np.uint32(source[at + np.uint64(e)]) << np.uint32(16)
    else:
        for e in range(len(values)):
            values[e] = source[at + np.uint64(e)]


@_part
def _add(weights: Array, rows: Array, sums: Array) -> None:
    """Adds rows, each times its weight, to the sums, one after the other; their number is a multiple of 4."""
    for r in range(0, len(weights), 4):
        w0, w1, w2, w3 = weights[r], weights[r + 1], weights[r + 2], weights[r + 3]
        for c in range(len(sums)):
            z = sums[c]
            z = z + w0 * rows[r, c]
            z = z + w1 * rows[r + 1, c]
            z = z + w2 * rows[r + 2, c]
            z = z + w3 * rows[r + 3, c]
            sums[c] = z


@_part
def _scores(query: Array, keys: Array, mask: Array, scale: Any, cap: Any, lowest: Any, found: Array, dots: Array) -> None:
    """The scores of a block of keys [D, KEYS] for one query; `HIDDEN` where the mask, which ends with the slots, hides one."""
    dots[:] = 0
    _add(query, keys, dots)
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
def _block(q: Array, k: Array, v: Array, mask: Array, sinks: Array, limits: Array, at: Array, out: Array) -> None:
    """Attention of some of a row's queries [H, n, D] with the heads of one group; see `_attend`.

    `at`: the group, heads of it, the first query, S; then entries of a key, where the group's first one lies, and how far the
    next one is; then the same three of values.
    """
    scale, cap, lowest = limits
    group, heads, first, slots, deep, key, next_key, wide, value, next_value = at
    count, blocks = min(QUERIES, q.shape[1] - first), (slots + KEYS - 1) // KEYS
    scores, sums = np.empty((count * heads, blocks * KEYS), np.float32), np.zeros((count * heads, wide), np.float32)
    totals, seen, dots = np.zeros(count * heads, np.float32), np.zeros(blocks, np.bool_), np.empty(KEYS, np.float32)
    keys, values = np.zeros((q.shape[2], KEYS), np.float32), np.zeros((KEYS, wide), np.float32)
    key_bits, value_bits, exponents = np.empty(deep, np.uint32), np.empty(wide, np.uint32), np.empty(KEYS, np.int32)
    one_key, one_value, powers = key_bits.view(np.float32), value_bits.view(np.float32), exponents.view(np.float32)
    for b in range(blocks):
        start, end = b * KEYS, min(slots, (b + 1) * KEYS)
        for h in range(len(mask)):
            for i in range(first, first + count):
                for j in range(start, end):
                    seen[b] = seen[b] or mask[h, i, j] > lowest
        if seen[b]:
            for j in range(start, end):
                _read(k, key + j * next_key, key_bits, one_key)
                for e in range(deep):
                    keys[e, j - start] = one_key[e]
            for r in range(count * heads):
                h, i = group * heads + r % heads, first + r // heads
                line = mask[h if len(mask) > 1 else 0, i, start:end]
                _scores(q[h, i], keys, line, scale, cap, lowest, scores[r, start : start + KEYS], dots)
    for r in range(count * heads):
        h, top = group * heads + r % heads, HIDDEN
        for b in range(blocks):
            if seen[b]:
                for j in range(b * KEYS, (b + 1) * KEYS):
                    top = scores[r, j] if scores[r, j] > top else top
        if top > HIDDEN:
            if len(sinks):
                top = max(top, sinks[h])
                totals[r] = np.exp(sinks[h] - top)
            _weigh(scores[r], seen, top, exponents, powers)
        else:  # sees nothing: weighs nothing
            scores[r] = 0
    for b in range(blocks):
        if seen[b]:
            start, end = b * KEYS, min(slots, (b + 1) * KEYS)
            for j in range(start, end):
                _read(v, value + j * next_value, value_bits, one_value)
                for e in range(wide):
                    values[j - start, e] = one_value[e]
            for r in range(count * heads):
                weights = scores[r, start : start + KEYS]
                _add(weights, values, sums[r])
                for j in range(KEYS):
                    totals[r] += weights[j]
    for r in range(count * heads):
        total = totals[r] if totals[r] > 0 else np.float32(1)
        for e in range(wide):
            out[first + r // heads, group * heads + r % heads, e] = sums[r, e] / total


def _attend(
    q: Array, k: Array, v: Array, mask: Array, sinks: Array, limits: Array, memory: Array, out: Array, begin: int, end: int
) -> None:
    """Attention of some parts of a pass: a part is a row, a group of heads, and `QUERIES` queries.

    Args:
        q: [B, H, n, D], D a multiple of 4.
        k: the memory of keys, flat.
        v: that of values.
        mask: [B or 1, H or 1, n, S] what is added to the scores.
        sinks: [H] a score that takes weight and has no value; empty for none.
        limits: the scale of scores; the bound ± within which tanh holds them, 0 for none; the mask of a hidden key, at most.
        memory: [2, 5] of keys and values: groups, entries of one, of which a key's last may be missing, and how far apart rows,
            groups and slots lie.
        out: [B, n, H, W] is written.
        begin: the first part.
        end: the part behind the last.
    """
    parts, groups = (q.shape[2] + QUERIES - 1) // QUERIES, memory[0, 0]
    at = np.empty(10, np.int64)
    for place in range(begin, end):
        row, group = place // parts // groups, place // parts % groups
        at[:4] = group, q.shape[1] // groups, place % parts * QUERIES, mask.shape[3]
        for i in range(2):
            _, entries, by_row, by_group, by_slot = memory[i]
            at[4 + 3 * i], at[5 + 3 * i], at[6 + 3 * i] = entries, row * by_row + group * by_group, by_slot
        _block(q[row], k, v, mask[row if len(mask) > 1 else 0], sinks, limits, at, out[row])


@cache
def attend() -> Any:
    """The compiled function."""
    kind: Any = types  # untyped, as much of numba is
    real, line, bits, whole = kind.float32, kind.float32[::1], kind.uint16[::1], kind.int64
    four = real[:, :, :, ::1]
    signatures = [kind.void(four, each, each, four, line, line, whole[:, ::1], four, whole, whole) for each in (bits, line)]
    machine: Any = njit(signatures, fastmath=EXACT, nogil=True, cache=True)
    return machine(_attend)
