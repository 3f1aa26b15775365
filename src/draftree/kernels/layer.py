"""A decoder layer of the Llama kind as two calls: up to what it stores of a token, and from its attention on.

Every number is rounded where transformers rounds it, sums alone go another way: each is one chain of operations, whatever
else is in the pass, so that a token has the same bits in a prompt, in a step of its own, in a tree and in a batch. Threads
take columns of the products, and queries of the attention.

Shapes: R rows, n tokens of each, N tokens of all, G key-value heads, each shared by `heads` queries' heads, D entries of a
head, S slots, H entries of a hidden state, I entries between the two products of a feed-forward layer. All dtypes are one,
bfloat16 or float32. A weight [E, K] lies in blocks of 32 of the E, in each of them word after word of all 32 (`packed`).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from draftree.kernels.memory import as_real, entry, number, part, put, put_real, put_word, real, settled, word
from draftree.kernels.rows import LOG2E, P1, P2, P3, P4, P5, P6, normed, sigmoid_times
from draftree.kernels.team import FIRST, meet, member, share
from draftree.kernels.tiles import BYTES, COLUMNS, ROWS, mixed_onward, pairs, reals, reals_onward

QUERIES = 8
"""Queries that are worked on at a time."""
HIDDEN, LEAST = np.float32(-3e38), np.float32(-126.0)
"""A score that no key has, and exponents of 2 below which a weight is 0."""
ZERO = np.float32(0)


@part
def _single(p: Any, at: Any) -> Any:
    """An entry's lower half, a float32."""
    return as_real(np.uint32(entry(p, at)))


@part
def _multiply(x: Any, step: Any, w: Any, words: Any, out: Any, out_step: Any, n: Any, half: Any) -> None:
    """[n, 32] sums, as float32: rows by a block of a weight."""
    for first in range(0, n, ROWS):
        m = min(ROWS, n - first)
        if half:
            pairs(x + first * step, step, w, BYTES, words, out + first * out_step, out_step, m)
        else:
            reals(x + first * step, step, w, BYTES, words, out + first * out_step, out_step, m)


@part
def _normed(x: Any, weight: Any, out: Any, rows: Any, width: Any, epsilon: Any, half: Any) -> None:
    """Rows divided by the roots of their mean squares, and weighted."""
    size = width * (2 if half else 4)
    for r in range(rows):
        normed(x + r * size, weight, out + r * size, width, epsilon, half)


@part
def _biased(sums: Any, count: Any, bias: Any, at: Any, half: Any) -> None:
    """Sums with what is added to a layer's columns, rounded."""
    for e in range(count):
        value = real(sums, e)
        put_real(sums, e, settled(value + number(bias, at + e, half) if bias else value, half))


@part
def _head(sums: Any, width: Any, weight: Any, epsilon: Any, half: Any) -> None:
    """A head's entries, normed where its model does that."""
    total = ZERO
    for e in range(width):
        total += real(sums, e) * real(sums, e)
    by = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
    for e in range(width):
        put_real(sums, e, settled(number(weight, e, half) * settled(real(sums, e) * by, half), half))


@part
def _rotated(sums: Any, width: Any, cosine: Any, sine: Any, out: Any, half: Any) -> None:
    """A head's halves, rotated against each other by an angle."""
    middle = width // 2
    for e in range(middle):
        f = e + middle
        x, y = real(sums, e), real(sums, f)
        one, other = settled(x * number(cosine, e, half), half), settled(y * number(cosine, f, half), half)
        put(out, e, one + settled(-y * number(sine, e, half), half), half)
        put(out, f, other + settled(x * number(sine, f, half), half), half)


@part
def _stored(p: Any, thread: Any, threads: Any, half: Any) -> None:
    """Norm, queries, keys and values of a layer, and their rotation."""
    x, weight, w, bias, q_norm, k_norm = entry(p, 0), entry(p, 1), entry(p, 2), entry(p, 3), entry(p, 4), entry(p, 5)
    cosines, sines, turns, q, k, v = entry(p, 6), entry(p, 7), entry(p, 8), entry(p, 9), entry(p, 10), entry(p, 11)
    rows, n, groups, heads, width, deep = entry(p, 12), entry(p, 13), entry(p, 14), entry(p, 15), entry(p, 16), entry(p, 17)
    epsilon, own = _single(p, 18), entry(p, 19) + thread * entry(p, 20)
    size, all_heads, tokens = (2 if half else 4), groups * heads, rows * n
    words, wide, sums, ready = (deep // 2 if half else deep), width * 4, own + tokens * deep * size, x
    if weight:  # else what goes in is normed
        _normed(x, weight, own, tokens, deep, epsilon, half)
        ready = own
    begin, end = share(all_heads + 2 * groups, thread, threads)
    for unit in range(begin, end):
        for first in range(0, tokens, ROWS):
            m = min(ROWS, tokens - first)
            for b in range(width // COLUMNS):
                block = w + (unit * (width // COLUMNS) + b) * words * BYTES
                _multiply(ready + first * deep * size, deep * size, block, words, sums + b * BYTES, wide, m, half)
            for i in range(m):
                row, at, mine = (first + i) // n, (first + i) % n, sums + i * wide
                _biased(mine, width, bias, unit * width, half)
                angle = (row * turns + at) * width * size
                if unit < all_heads:
                    to = q + (((row * groups + unit // heads) * n + at) * heads + unit % heads) * width * size
                    if q_norm:
                        _head(mine, width, q_norm, epsilon, half)
                    _rotated(mine, width, cosines + angle, sines + angle, to, half)
                elif unit < all_heads + groups:
                    to = k + ((row * groups + unit - all_heads) * n + at) * width * size
                    if k_norm:
                        _head(mine, width, k_norm, epsilon, half)
                    _rotated(mine, width, cosines + angle, sines + angle, to, half)
                else:
                    to = v + ((row * groups + unit - all_heads - groups) * n + at) * width * size
                    for e in range(width):
                        put(to, e, real(mine, e), half)


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
                        mixed_onward(of_rows, step, column, of_values, keys, to, width * 4, m)
                    else:
                        reals_onward(of_rows, step, column, of_values, keys, to, width * 4, m)


@part
def _attended(
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
            _multiply(q, width * size, turned, words, scores + b * BYTES, step, rows, half)
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


@part
def _added(
    x: Any, step: Any, w: Any, bias: Any, before: Any, out: Any, sizes: Any, own: Any, begin: Any, end: Any, half: Any
) -> None:
    """Some blocks of what a linear layer makes of rows, added to what went into it and rounded twice, as torch does."""
    tokens, wide, words = sizes
    for b in range(begin, end):
        for first in range(0, tokens, ROWS):
            m = min(ROWS, tokens - first)
            _multiply(x + first * step, step, w + b * words * BYTES, words, own, BYTES, m, half)
            for i in range(m):
                _biased(own + i * BYTES, COLUMNS, bias, b * COLUMNS, half)
                at = (first + i) * wide + b * COLUMNS
                for e in range(COLUMNS):
                    put(out, at + e, number(before, at + e, half) + real(own + i * BYTES, e), half)


@part
def _gated(
    x: Any, step: Any, gates: Any, ups: Any, biases: Any, out: Any, sizes: Any, own: Any, begin: Any, end: Any, half: Any
) -> None:
    """Some blocks of the product of a gate and what it lets through."""
    tokens, wide, words = sizes
    other = own + ROWS * BYTES
    for b in range(begin, end):
        for first in range(0, tokens, ROWS):
            m = min(ROWS, tokens - first)
            _multiply(x + first * step, step, gates + b * words * BYTES, words, own, BYTES, m, half)
            _multiply(x + first * step, step, ups + b * words * BYTES, words, other, BYTES, m, half)
            for i in range(m):
                _biased(own + i * BYTES, COLUMNS, biases[0], b * COLUMNS, half)
                _biased(other + i * BYTES, COLUMNS, biases[1], b * COLUMNS, half)
                for e in range(COLUMNS):
                    made = sigmoid_times(real(own + i * BYTES, e), real(other + i * BYTES, e), half)
                    put(out, (first + i) * wide + b * COLUMNS + e, made, half)


@part
def _finished(p: Any, table: Any, thread: Any, threads: Any, half: Any) -> None:
    """Attention, what it is added to, norm and feed-forward layer."""
    x, q, k, v, mask = entry(p, 0), entry(p, 1), entry(p, 2), entry(p, 3), entry(p, 4)
    rows, n, groups, heads, width = entry(p, 5), entry(p, 6), entry(p, 7), entry(p, 8), entry(p, 9)
    deep, inner, slots, row_mask, of_mask = entry(p, 10), entry(p, 11), entry(p, 12), entry(p, 13), entry(p, 14)
    scale, lowest, epsilon = _single(p, 15), _single(p, 16), _single(p, 17)
    own, after, act, hidden, out = entry(p, 18) + thread * entry(p, 19), entry(p, 20), entry(p, 21), entry(p, 22), entry(p, 23)
    row_keys, group_keys, of_keys = entry(p, 24), entry(p, 25), entry(p, 26)
    row_values, group_values, of_values = entry(p, 27), entry(p, 28), entry(p, 29)
    o, o_bias, weight, gates, gate_bias = entry(p, 30), entry(p, 31), entry(p, 32), entry(p, 33), entry(p, 34)
    ups, up_bias, downs, down_bias = entry(p, 35), entry(p, 36), entry(p, 37), entry(p, 38)
    size, tokens, step = (2 if half else 4), rows * n, groups * heads * width * (2 if half else 4)
    at, end = share(rows * groups * n, thread, threads)
    while at < end:
        row, group, i = at // (groups * n), at // n % groups, at % n
        count = min(end - at, n - i, QUERIES)
        _attended(
            q + at * heads * width * size, k + row * row_keys + group * group_keys, v + row * row_values + group * group_values,
            of_keys, of_values, mask + row * row_mask + i * of_mask, of_mask, count, heads, width, slots, scale, lowest, own,
            after + (row * n + i) * step + group * heads * width * size, step, half,
        )  # fmt: skip
        at += count
    meet(table, threads)
    per = 2 if half else 1
    begin, stop = share(deep // COLUMNS, thread, threads)
    _added(after, step, o, o_bias, x, hidden, (tokens, deep, groups * heads * width // per), own, begin, stop, half)
    meet(table, threads)
    _normed(hidden, weight, own, tokens, deep, epsilon, half)
    behind = own + tokens * deep * size
    first, last = share(inner // COLUMNS, thread, threads)
    _gated(own, deep * size, gates, ups, (gate_bias, up_bias), act, (tokens, inner, deep // per), behind, first, last, half)
    meet(table, threads)
    _added(act, inner * size, downs, down_bias, hidden, out, (tokens, deep, inner // per), own, begin, stop, half)


@part
def _columns(p: Any, thread: Any, threads: Any, half: Any) -> None:
    """A linear layer of rows."""
    x, w, bias, out, tokens, deep, wide = (
        entry(p, 0),
        entry(p, 1),
        entry(p, 2),
        entry(p, 3),
        entry(p, 4),
        entry(p, 5),
        entry(p, 6),
    )
    own, size = entry(p, 7) + thread * entry(p, 8), (2 if half else 4)
    words = deep // (2 if half else 1)
    begin, end = share((wide + COLUMNS - 1) // COLUMNS, thread, threads)
    for b in range(begin, end):
        for first in range(0, tokens, ROWS):
            m, columns = min(ROWS, tokens - first), min(COLUMNS, wide - b * COLUMNS)
            _multiply(x + first * deep * size, deep * size, w + b * words * BYTES, words, own, BYTES, m, half)
            for i in range(m):
                for e in range(columns):
                    value, at = real(own + i * BYTES, e), b * COLUMNS + e
                    put(out, (first + i) * wide + at, value + number(bias, at, half) if bias else value, half)


def _half_stored(table: int) -> None:
    thread, threads = member(table)
    _stored(table + 8 * FIRST, thread, threads, True)


def _real_stored(table: int) -> None:
    thread, threads = member(table)
    _stored(table + 8 * FIRST, thread, threads, False)


def _half_finished(table: int) -> None:
    thread, threads = member(table)
    _finished(table + 8 * FIRST, table, thread, threads, True)


def _real_finished(table: int) -> None:
    thread, threads = member(table)
    _finished(table + 8 * FIRST, table, thread, threads, False)


def _half_columns(table: int) -> None:
    thread, threads = member(table)
    _columns(table + 8 * FIRST, thread, threads, True)


def _real_columns(table: int) -> None:
    thread, threads = member(table)
    _columns(table + 8 * FIRST, thread, threads, False)


@cache
def codes(half: bool) -> tuple[int, int, int]:
    """The addresses of the compiled functions of tables: up to what is stored; from the attention on; one linear layer."""
    kind: Any = types
    functions = (_half_stored, _half_finished, _half_columns) if half else (_real_stored, _real_finished, _real_columns)
    made: list[Any] = [cfunc(kind.void(kind.int64), cache=True, error_model="numpy")(function) for function in functions]
    a, b, c = (each.address for each in made)
    _KEPT.extend(made)
    return a, b, c


_KEPT: list[Any] = []
"""What must live as long as its addresses are used."""
