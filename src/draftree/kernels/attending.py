"""Attention of a few queries with the heads of a group, for compiled layers: keys and values are matrices like weights.

A query's scores, weights and sums are the same chains of operations whatever stands beside it: other queries, other slots, and
keys that are hidden from it, whose weight is exactly 0, so that z + 0 · v = z.

Shapes: rows are queries, each with all heads of the group; D entries of a head, S slots.
"""

from typing import Any

import numpy as np

from draftree.kernels.memory import as_real, number, part, put, put_real, put_word, real, word
from draftree.kernels.rows import LOG2E, P1, P2, P3, P4, P5, P6
from draftree.kernels.tiles import BYTES, COLUMNS, ROWS, mixed_onward, pairs, reals, reals_onward

QUERIES = 8
"""Queries that are worked on at a time."""
HIDDEN, LEAST = np.float32(-3e38), np.float32(-126.0)
"""A score that no key has, and exponents of 2 below which a weight is 0."""
ZERO = np.float32(0)


@part
def multiply(x: Any, step: Any, w: Any, words: Any, out: Any, out_step: Any, n: Any, half: Any) -> None:
    """[n, 32] sums, as float32: rows by a block of a matrix."""
    for first in range(0, n, ROWS):
        m = min(ROWS, n - first)
        if half:
            pairs(x + first * step, step, 0, 0, w, BYTES, words, out + first * out_step, out_step, m)
        else:
            reals(x + first * step, step, 0, 0, w, BYTES, words, out + first * out_step, out_step, m)


@part
def _sees(mask: Any, step: Any, start: Any, end: Any, count: Any, lowest: Any, half: Any) -> Any:
    """Whether one of some queries sees one of some slots."""
    for i in range(count):
        for j in range(start, end):
            if number(mask + i * step, j, half) > lowest:
                return True
    return False


@part
def _scored(scores: Any, mask: Any, keys: Any, scale: Any, lowest: Any, half: Any) -> None:
    """A query's products with a block's keys, of which there are so many, as scores."""
    for j in range(keys):
        hidden = number(mask, j, half)
        put_real(scores, j, real(scores, j) * scale + hidden if hidden > lowest else HIDDEN)
    for j in range(keys, COLUMNS):
        put_real(scores, j, HIDDEN)


@part
def _weighed(scores: Any, count: Any, top: Any) -> None:
    """Scores as their exponentials."""
    for j in range(count):
        x = (real(scores, j) - top) * LOG2E
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
        power = as_real(np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)))
        put_real(scores, j, ZERO if none else p * power)


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
def _total(weights: Any, step: Any, rows: Any, slots: Any, totals: Any) -> None:
    """Each row's sum, from the first slot to the last; four rows at a time, as a sum waits for the one before."""
    for r in range(0, rows, 4):
        a = weights + r * step
        b, c, d = (
            weights + min(r + 1, rows - 1) * step,
            weights + min(r + 2, rows - 1) * step,
            weights + min(r + 3, rows - 1) * step,
        )
        s, t, u, v = ZERO, ZERO, ZERO, ZERO
        for j in range(slots):
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
                        mixed_onward(of_rows, step, 0, 0, column, of_values, keys, to, width * 4, m)
                    else:
                        reals_onward(of_rows, step, 0, 0, column, of_values, keys, to, width * 4, m)


@part
def attended(
    q: Any, k: Any, v: Any, of_keys: Any, of_values: Any, mask: Any, of_mask: Any, count: Any, heads: Any, width: Any,
    slots: Any, scale: Any, lowest: Any, own: Any, out: Any, out_step: Any, half: Any,
) -> None:  # fmt: skip
    """Attention of some queries of a row with the heads of one group.

    Args:
        q: [count, heads, D].
        k: the first slot's key; `of_keys` bytes lie between two.
        v: its value, likewise.
        mask: [count, S] what is added to the scores, `of_mask` bytes apart.
        own: memory of this thread's.
        out: the first query's place; `out_step` bytes lie between two.
    """
    size, rows, blocks = (2 if half else 4), count * heads, (slots + COLUMNS - 1) // COLUMNS
    words, step = (width // 2 if half else width), blocks * BYTES
    seen, turned = own, own + blocks * 4
    scores = turned + width * BYTES
    sums, totals = scores + rows * step, scores + rows * (step + width * 4)
    for b in range(blocks):
        start, end = b * COLUMNS, min(slots, (b + 1) * COLUMNS)
        sees = _sees(mask, of_mask, start, end, count, lowest, half)
        put_word(seen, b, np.uint32(1 if sees else 0))
        if sees:
            _turned(k + start * of_keys, of_keys, end - start, words, turned)
            multiply(q, width * size, turned, words, scores + b * BYTES, step, rows, half)
        for r in range(rows):
            if sees:
                _scored(
                    scores + r * step + b * BYTES,
                    mask + (r // heads) * of_mask + start * size,
                    end - start,
                    scale,
                    lowest,
                    half,
                )
            else:
                for j in range(COLUMNS):
                    put_real(scores + r * step, start + j, HIDDEN)
    for r in range(rows):
        top = HIDDEN
        for j in range(blocks * COLUMNS):
            top = max(top, real(scores + r * step, j))
        _weighed(scores + r * step, blocks * COLUMNS, top if top > HIDDEN else ZERO)  # what sees nothing weighs nothing
        for e in range(width):
            put_real(sums, r * width + e, ZERO)
    _total(scores, step, rows, blocks * COLUMNS, totals)
    _gathered(scores, step, rows, seen, blocks, slots, v, of_values, sums, width, half)
    for r in range(rows):
        total = real(totals, r)
        by = np.float32(1) / total if total > ZERO else ZERO
        for e in range(width):
            put(out + (r // heads) * out_step, (r % heads) * width + e, real(sums, r * width + e) * by, half)
