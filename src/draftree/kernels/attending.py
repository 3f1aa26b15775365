"""Attention of a few queries with the heads of a group, for compiled layers: keys and values are matrices like weights.

A query's scores, weights and sums are the same chains of operations whatever stands beside it: other queries, other slots, and
keys that are hidden from it, whose weight is exactly 0, so that z + 0 · v = z.

Shapes: rows are queries, each with all heads of the group; D entries of a head, S slots.
"""

from typing import Any

import numpy as np

from draftree.kernels.lanes import COLUMNS, HIDDEN, scored, sees, weighed
from draftree.kernels.memory import part, put, put_real, put_word, real, word
from draftree.kernels.tiles import BYTES, ROWS, mixed_onward, pairs, reals, reals_onward

QUERIES = 8
"""Queries that are worked on at a time."""
HIDDEN_SCORE = np.float32(HIDDEN)
ZERO = np.float32(0)


@part
def multiply(x: Any, step: Any, w: Any, words: Any, out: Any, out_step: Any, n: Any, half: Any) -> None:
    """[n, 32] sums, as float32: rows by a block of a matrix."""
    for first in range(0, n, ROWS):
        m = min(ROWS, n - first)
        if half:
            pairs(x + first * step, step, 0, 0, w, BYTES, words, out + first * out_step, out_step, w, BYTES, m)
        else:
            reals(x + first * step, step, 0, 0, w, BYTES, words, out + first * out_step, out_step, w, BYTES, m)


@part
def _any_sees(mask: Any, step: Any, start: Any, keys: Any, count: Any, lowest: Any, half: Any) -> Any:
    """Whether one of some queries sees one of so many slots."""
    i, first = 0, mask + start * (2 if half else 4)
    while i < count and not sees(first + i * step, keys, lowest, half):
        i += 1
    return i < count


@part
def _turned(keys: Any, step: Any, count: Any, words: Any, out: Any) -> None:
    """Words of a block's keys, of which there are so many, lying as a weight's do."""
    for j in range(COLUMNS):
        if j < count:
            for i in range(words):
                put_word(out, i * COLUMNS + j, word(keys + j * step, i))
        else:
            for i in range(words):
                put_word(out, i * COLUMNS + j, np.uint32(0))


@part
def _total(weights: Any, step: Any, rows: Any, seen: Any, blocks: Any, totals: Any) -> None:
    """Each row's sum, from the first slot to the last; four rows at a time, as a sum waits for the one before."""
    for r in range(0, rows, 4):
        last = rows - 1
        a, b = weights + r * step, weights + min(r + 1, last) * step
        c, d = weights + min(r + 2, last) * step, weights + min(r + 3, last) * step
        s, t, u, v = ZERO, ZERO, ZERO, ZERO
        for block in range(blocks):
            if word(seen, block) > 0:
                for j in range(block * COLUMNS, (block + 1) * COLUMNS):
                    s, t, u, v = s + real(a, j), t + real(b, j), u + real(c, j), v + real(d, j)
        put_real(totals, r, s)
        put_real(totals, r + 1, t)
        put_real(totals, r + 2, u)
        put_real(totals, r + 3, v)


@part
def _gathered(
    weights: Any,
    step: Any,
    rows: Any,
    seen: Any,
    blocks: Any,
    slots: Any,
    v: Any,
    of_values: Any,
    sums: Any,
    width: Any,
    half: Any,
) -> None:
    """The values of the blocks that are seen, each times its weight, added to the sums of each row."""
    for b in range(blocks):
        if word(seen, b) > 0:
            keys, values = min(slots - b * COLUMNS, COLUMNS), v + b * COLUMNS * of_values
            for e in range(0, width, COLUMNS):
                for first in range(0, rows, ROWS):
                    m, of_rows = min(ROWS, rows - first), weights + first * step + b * BYTES
                    column, to = values + e * (2 if half else 4), sums + (first * width + e) * 4
                    if half:
                        mixed_onward(of_rows, step, 0, 0, column, of_values, keys, to, width * 4, 0, 0, m)
                    else:
                        reals_onward(of_rows, step, 0, 0, column, of_values, keys, to, width * 4, 0, 0, m)


@part
def attended(
    q: Any, k: Any, v: Any, of_keys: Any, of_values: Any, mask: Any, of_mask: Any, count: Any, heads: Any, width: Any,
    slots: Any, scale: Any, lowest: Any, own: Any, keep: Any, out: Any, out_step: Any, half: Any,
) -> None:  # fmt: skip
    """Attention of some queries of a row with the heads of one group.

    Args:
        q: [count, heads, D].
        k: the first slot's key; `of_keys` bytes lie between two.
        v: its value, likewise.
        mask: [count, S] what is added to the scores, `of_mask` bytes apart.
        own: memory of this thread's, which begins with a word for each block of keys: 0 where it has to be turned.
        keep: whether turned keys are kept there for the next queries.
        out: the first query's place; `out_step` bytes lie between two.
    """
    size, rows, blocks = (2 if half else 4), count * heads, (slots + COLUMNS - 1) // COLUMNS
    words, step = (width // 2 if half else width), blocks * BYTES
    there, seen, turned = own, own + blocks * 4, own + blocks * 8
    scores = turned + (blocks if keep else 1) * words * BYTES
    sums, totals = scores + rows * step, scores + rows * (step + width * 4)
    for r in range(rows):
        put_real(totals, r, HIDDEN_SCORE)
    for b in range(blocks):
        start, keys = b * COLUMNS, min(slots - b * COLUMNS, COLUMNS)
        any_sees = _any_sees(mask, of_mask, start, keys, count, lowest, half)
        put_word(seen, b, np.uint32(1 if any_sees else 0))
        if any_sees:
            lying = turned + (b * words * BYTES if keep else 0)
            if not keep or word(there, b) == 0:
                _turned(k + start * of_keys, of_keys, keys, words, lying)
                put_word(there, b, np.uint32(1))
            multiply(q, width * size, lying, words, scores + b * BYTES, step, rows, half)
            for r in range(rows):
                hiding = mask + (r // heads) * of_mask + start * size
                top = scored(scores + r * step + b * BYTES, hiding, keys, scale, lowest, half)
                put_real(totals, r, max(real(totals, r), top))
    for r in range(rows):
        top = real(totals, r)
        top = top if top > HIDDEN_SCORE else ZERO  # what sees nothing weighs nothing
        for b in range(blocks):
            if word(seen, b) > 0:
                weighed(scores + r * step + b * BYTES, top)
        for e in range(width):
            put_real(sums, r * width + e, ZERO)
    _total(scores, step, rows, seen, blocks, totals)
    _gathered(scores, step, rows, seen, blocks, slots, v, of_values, sums, width, half)
    for r in range(rows):
        total = real(totals, r)
        by = np.float32(1) / total if total > ZERO else ZERO
        for e in range(width):
            put(out + (r // heads) * out_step, (r % heads) * width + e, real(sums, r * width + e) * by, half)
