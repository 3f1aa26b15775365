"""Decoder layers of the Llama kind, several in one call, or one in two: up to what it stores, and from its attention on.

Every number is rounded where transformers rounds it, sums alone go another way: each is one chain of operations, whatever
else is in the pass, so that a token has the same bits in a prompt, in a step of its own, in a tree and in a batch. Threads
take columns of the products, and queries of the attention.

Shapes: R rows, n tokens of each, N tokens of all, G key-value heads, each shared by `heads` queries' heads, D entries of a
head, S slots, H entries of a hidden state, I entries between the two products of a feed-forward layer. All dtypes are one,
bfloat16 or float32. A weight [E, K] lies in blocks of 32 of the E, in each of them word after word of all 32, or, in four bits,
group after group (`models/tiled.py`).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from draftree.kernels.attending import QUERIES, ZERO, attended
from draftree.kernels.lanes import COLUMNS, added, gated
from draftree.kernels.memory import as_real, entry, number, part, put, put_real, put_word, real, settled
from draftree.kernels.rows import norms
from draftree.kernels.team import FIRST, meet, member, share
from draftree.kernels.tiles import AHEAD, BYTES, FEW, GROUP, OF_GROUP, ROWS, SHORT, fours, pairs, reals

PASS = 11
"""The entry from `FIRST` on where what a pass is about begins."""
MANY = 4
"""Chunks of queries for each thread from which on they are dealt out one by one."""


@part
def _single(p: Any, at: Any) -> Any:
    """An entry's lower half, a float32."""
    return as_real(np.uint32(entry(p, at)))


_normed = part(norms)


@part
def _bytes(deep: Any, half: Any, four: Any) -> Any:
    """Of a block of a weight whose rows have so many entries."""
    return deep // GROUP * OF_GROUP if four else (deep // 2 if half else deep) * BYTES


@part
def _summed(x: Any, step: Any, rows: Any, deep: Any, out: Any) -> None:
    """The sum of each group of rows of bfloat16, for weights of four bits."""
    for r in range(rows):
        for g in range(deep // GROUP):
            total = ZERO
            for e in range(g * GROUP, (g + 1) * GROUP):
                total += number(x + r * step, e, True)
            put_real(out, r * (deep // GROUP) + g, total)


@part
def _even(tokens: Any) -> Any:
    """How many rows are multiplied at a time: as nearly the same number as can be, eight at most."""
    lots = (tokens + ROWS - 1) // ROWS
    return (tokens + lots - 1) // lots


@part
def _product(
    x: Any,
    of_groups: Any,
    first: Any,
    tokens: Any,
    deep: Any,
    w: Any,
    following: Any,
    out: Any,
    step: Any,
    half: Any,
    four: Any,
) -> Any:
    """[m, 32] sums, as float32, of up to eight rows from the first on by a block of a weight; says how many rows.

    Over eight rows and fewer memory takes longer than the products, and what comes right behind is asked for. Of more the first
    two lots ask for the block that comes next, each for a half of it, so that memory never rests.

    Args:
        x: the address of all rows, of so many entries.
        of_groups: that of the sums of their groups.
        first: of the rows, of so many tokens.
        following: the address of the block that comes next.
        step: bytes from one row of sums to the next.
    """
    several = _even(tokens)
    m, wide = min(several, tokens - first), deep * (2 if half else 4)
    each, block = (OF_GROUP if four else BYTES), _bytes(deep, half, four)
    soon, soon_step = w, 0
    if tokens <= ROWS:
        soon, soon_step = w + (SHORT if m <= FEW and not four else AHEAD), each
    elif first < 2 * several:
        soon, soon_step = following + first // several * (block // 2), each // 2
    rows = x + first * wide
    if four:
        sums = deep // GROUP
        fours(rows, wide, of_groups + first * sums * 4, sums * 4, w, OF_GROUP, sums, out, step, soon, soon_step, m)
    elif half:
        pairs(rows, wide, 0, 0, w, BYTES, deep // 2, out, step, soon, soon_step, m)
    else:
        reals(rows, wide, 0, 0, w, BYTES, deep, out, step, soon, soon_step, m)
    return m


@part
def _biased(sums: Any, rows: Any, step: Any, count: Any, bias: Any, at: Any, half: Any) -> None:
    """Adds to rows of sums what is added to a layer's columns, if anything is."""
    if bias:
        for r in range(rows):
            for e in range(count):
                put_real(sums + r * step, e, real(sums + r * step, e) + number(bias, at + e, half))


@part
def _head(sums: Any, width: Any, weight: Any, epsilon: Any, half: Any) -> None:
    """A head's entries, normed where its model does that."""
    total = np.float64(0)
    for e in range(width):
        put_real(sums, e, settled(real(sums, e), half))
        total += np.float64(real(sums, e) * real(sums, e))
    by = np.float32(1 / np.sqrt(total / width + epsilon))
    for e in range(width):
        put_real(sums, e, settled(number(weight, e, half) * settled(real(sums, e) * by, half), half))


@part
def _rotated(sums: Any, width: Any, cosine: Any, sine: Any, out: Any, half: Any) -> None:
    """A head's halves, rotated against each other by an angle."""
    middle = width // 2
    for e in range(middle):
        f = e + middle
        x, y = settled(real(sums, e), half), settled(real(sums, f), half)
        one, other = settled(x * number(cosine, e, half), half), settled(y * number(cosine, f, half), half)
        put(out, e, one + settled(-y * number(sine, e, half), half), half)
        put(out, f, other + settled(x * number(sine, f, half), half), half)


@part
def _stored(d: Any, of: Any, x: Any, k: Any, v: Any, thread: Any, threads: Any, half: Any, four: Any) -> None:
    """Norm, queries, keys and values of a layer, and their rotation.

    Args:
        d: the address of what a pass is about (`_layers`).
        of: that of a layer's weights.
        x: [R, n, H] before the layer.
        k: the layer's keys.
        v: its values.
    """
    cosines, sines, places, q, starts = entry(d, 0), entry(d, 1), entry(d, 2), entry(d, 3), entry(d, 4)
    row_keys, group_keys, of_keys = entry(d, 5), entry(d, 6), entry(d, 7)
    row_values, group_values, of_values = entry(d, 8), entry(d, 9), entry(d, 10)
    rows, n, groups, heads, width, deep = entry(d, 11), entry(d, 12), entry(d, 13), entry(d, 14), entry(d, 15), entry(d, 16)
    own, epsilon = entry(d, 17) + thread * entry(d, 18), _single(of, 0)
    weight, w, bias, q_norm, k_norm = entry(of, 1), entry(of, 2), entry(of, 3), entry(of, 4), entry(of, 5)
    size, all_heads, tokens = (2 if half else 4), groups * heads, rows * n
    block, wide, of_groups, ready = _bytes(deep, half, four), width * 4, own + tokens * deep * size, x
    if weight:  # else what goes in is normed
        _normed(x, weight, own, tokens, deep, epsilon, half)
        ready = own
    if four:
        _summed(ready, deep * size, tokens, deep, of_groups)
    sums = of_groups + (tokens * deep // GROUP * 4 if four else 0)
    blocks = width // COLUMNS
    begin, end = share(all_heads + 2 * groups, thread, threads)
    for unit in range(begin, end):
        for first in range(0, tokens, _even(tokens)):
            m = min(_even(tokens), tokens - first)
            for b in range(blocks):
                at_block = w + (unit * blocks + b) * block
                after = at_block + blocks * block
                _product(ready, of_groups, first, tokens, deep, at_block, after, sums + b * BYTES, wide, half, four)
            _biased(sums, m, wide, width, bias, unit * width, half)
            for i in range(m):
                row, at, mine = (first + i) // n, (first + i) % n, sums + i * wide
                angle, slot = entry(places, row * n + at) * width * size, at + (entry(starts, row) if starts else 0)
                if unit < all_heads:
                    to = q + (((row * groups + unit // heads) * n + at) * heads + unit % heads) * width * size
                    if q_norm:
                        _head(mine, width, q_norm, epsilon, half)
                    _rotated(mine, width, cosines + angle, sines + angle, to, half)
                elif unit < all_heads + groups:
                    to = k + row * row_keys + (unit - all_heads) * group_keys + slot * of_keys
                    if k_norm:
                        _head(mine, width, k_norm, epsilon, half)
                    _rotated(mine, width, cosines + angle, sines + angle, to, half)
                else:
                    to = v + row * row_values + (unit - all_heads - groups) * group_values + slot * of_values
                    for e in range(width):
                        put(to, e, real(mine, e), half)


@part
def _added(
    x: Any, w: Any, bias: Any, before: Any, out: Any, sizes: Any, own: Any, thread: Any, threads: Any, half: Any, four: Any
) -> None:
    """A thread's blocks of what a linear layer makes of rows, added to what went before and rounded twice, as torch does.

    Args:
        sizes: N, and the entries of a row after and before.
    """
    (tokens, wide, deep), size = sizes, (2 if half else 4)
    block, tile = _bytes(deep, half, four), own + (tokens * deep // GROUP * 4 if four else 0)
    begin, end = share(wide // COLUMNS, thread, threads)
    if four:
        _summed(x, deep * 2, tokens, deep, own)
    for b in range(begin, end):
        for first in range(0, tokens, _even(tokens)):
            m = _product(x, own, first, tokens, deep, w + b * block, w + (b + 1) * block, tile, BYTES, half, four)
            _biased(tile, m, BYTES, COLUMNS, bias, b * COLUMNS, half)
            for i in range(m):
                at = ((first + i) * wide + b * COLUMNS) * size
                added(tile + i * BYTES, before + at, out + at, half)


@part
def _gated(
    x: Any, gates: Any, ups: Any, biases: Any, out: Any, sizes: Any, own: Any, thread: Any, threads: Any, half: Any, four: Any
) -> None:
    """A thread's blocks of the product of a gate and what it lets through; sizes as above."""
    (tokens, wide, deep), size = sizes, (2 if half else 4)
    block, tile = _bytes(deep, half, four), own + (tokens * deep // GROUP * 4 if four else 0)
    begin, end = share(wide // COLUMNS, thread, threads)
    other = tile + ROWS * BYTES
    if four:
        _summed(x, deep * 2, tokens, deep, own)
    for b in range(begin, end):
        for first in range(0, tokens, _even(tokens)):
            at, next_one = b * block, (b + 1) * block
            _product(x, own, first, tokens, deep, gates + at, gates + next_one, tile, BYTES, half, four)
            m = _product(x, own, first, tokens, deep, ups + at, ups + next_one, other, BYTES, half, four)
            _biased(tile, m, BYTES, COLUMNS, biases[0], b * COLUMNS, half)
            _biased(other, m, BYTES, COLUMNS, biases[1], b * COLUMNS, half)
            for i in range(m):
                gated(tile + i * BYTES, other + i * BYTES, out + ((first + i) * wide + b * COLUMNS) * size, half)


@part
def _finished(
    d: Any, of: Any, x: Any, k: Any, v: Any, out: Any, table: Any, thread: Any, threads: Any, half: Any, four: Any
) -> None:
    """Attention, what it is added to, norm and feed-forward layer; `out` is [R, n, H] behind the layer."""
    q, of_keys, of_values = entry(d, 3), entry(d, 7), entry(d, 10)
    row_keys, group_keys, row_values, group_values = entry(d, 5), entry(d, 6), entry(d, 8), entry(d, 9)
    rows, n, groups, heads, width = entry(d, 11), entry(d, 12), entry(d, 13), entry(d, 14), entry(d, 15)
    own = entry(d, 17) + thread * entry(d, 18)
    mask, row_mask, of_mask, slots = entry(d, 19), entry(d, 20), entry(d, 21), entry(d, 22)
    scale, lowest = _single(d, 23), _single(d, 24)
    deep, inner, after, act, hidden = entry(d, 25), entry(d, 26), entry(d, 27), entry(d, 28), entry(d, 29)
    epsilon, o, o_bias, weight = _single(of, 6), entry(of, 7), entry(of, 8), entry(of, 9)
    gates, gate_bias = entry(of, 10), entry(of, 11)
    ups, up_bias, downs, down_bias = entry(of, 12), entry(of, 13), entry(of, 14), entry(of, 15)
    size, tokens, step = (2 if half else 4), rows * n, groups * heads * width * (2 if half else 4)
    chunks = (n + QUERIES - 1) // QUERIES
    spread = rows * groups * chunks >= MANY * threads
    at, end = (thread, rows * groups * chunks) if spread else share(rows * groups * n, thread, threads)
    last = -1  # whose keys lie turned in the thread's memory
    while at < end:
        if spread:  # prompts: the later queries see more, so threads take turns
            unit, i = at // chunks, at % chunks * QUERIES
            count, at = min(n - i, QUERIES), at + threads
        else:
            unit, i = at // n, at % n
            count = min(end - at, n - i, QUERIES)
            at += count
        row, group = unit // groups, unit % groups
        if spread and unit != last:
            for b in range((slots + COLUMNS - 1) // COLUMNS):
                put_word(own, b, np.uint32(0))
            last = unit
        attended(
            q + (unit * n + i) * heads * width * size, k + row * row_keys + group * group_keys,
            v + row * row_values + group * group_values, of_keys, of_values, mask + row * row_mask + i * of_mask, of_mask,
            count, heads, width, slots, scale, lowest, own, spread,
            after + (row * n + i) * step + group * heads * width * size, step, half,
        )  # fmt: skip
    meet(table, threads)
    _added(after, o, o_bias, x, hidden, (tokens, deep, groups * heads * width), own, thread, threads, half, four)
    meet(table, threads)
    _normed(hidden, weight, own, tokens, deep, epsilon, half)
    behind, biases = own + tokens * deep * size, (gate_bias, up_bias)
    _gated(own, gates, ups, biases, act, (tokens, inner, deep), behind, thread, threads, half, four)
    meet(table, threads)
    _added(act, downs, down_bias, hidden, out, (tokens, deep, inner), own, thread, threads, half, four)


@part
def _columns(p: Any, thread: Any, threads: Any, half: Any) -> None:
    """A linear layer of rows: their address, the weight, what is added, where sums go, how many rows, of how many entries, and
    how many are made of each, and the first thread's own memory and the bytes to the next one's.
    """
    x, w, bias, out = entry(p, 0), entry(p, 1), entry(p, 2), entry(p, 3)
    tokens, deep, wide = entry(p, 4), entry(p, 5), entry(p, 6)
    own, block = entry(p, 7) + thread * entry(p, 8), _bytes(deep, half, False)
    begin, end = share((wide + COLUMNS - 1) // COLUMNS, thread, threads)
    for b in range(begin, end):
        for first in range(0, tokens, _even(tokens)):
            columns = min(COLUMNS, wide - b * COLUMNS)
            m = _product(x, 0, first, tokens, deep, w + b * block, w + (b + 1) * block, own, BYTES, half, False)
            for i in range(m):
                for e in range(columns):
                    value, at = real(own + i * BYTES, e), b * COLUMNS + e
                    put(out, (first + i) * wide + at, value + number(bias, at, half) if bias else value, half)


@part
def _behind(x: Any, p: Any, table: Any, thread: Any, threads: Any, half: Any) -> None:
    """The norm behind the layers, and the head; `p` as `_columns` reads it, whose rows are made here, and the norm's weight."""
    to, tokens, deep, size = entry(p, 0), entry(p, 4), entry(p, 5), (2 if half else 4)
    begin, end = share(tokens, thread, threads)
    at = begin * deep * size
    _normed(x + at, entry(p, 9), to + at, end - begin, deep, _single(p, 10), half)
    meet(table, threads)
    _columns(p, thread, threads, half)


@part
def _layers(table: Any, half: Any, four: Any) -> None:
    """Layers one after the other, or a part of one, and the head behind them.

    A table has, from `FIRST` on: which parts, 1 and 2 added up; how many layers; what the first one reads; the address of the
    addresses where each layer's output goes; the first layer's keys and values, and how many bytes lie to the next one's; the
    address of the addresses of the layers' weights; what the first one's output is added to; 0 or the address of what is behind
    the layers (`_behind`); and what the pass is about.
    """
    thread, threads = member(table)
    p, d = table + 8 * FIRST, table + 8 * (FIRST + PASS)
    parts, count, x, outs = entry(p, 0), entry(p, 1), entry(p, 2), entry(p, 3)
    k, of_k, v, of_v = entry(p, 4), entry(p, 5), entry(p, 6), entry(p, 7)
    weights, before, behind = entry(p, 8), entry(p, 9), entry(p, 10)
    for i in range(count):
        of, to = entry(weights, i), entry(outs, i)
        if parts & 1:
            _stored(d, of, x, k + i * of_k, v + i * of_v, thread, threads, half, four)
        if parts == 3:
            meet(table, threads)
        if parts & 2:
            _finished(d, of, before, k + i * of_k, v + i * of_v, to, table, thread, threads, half, four)
        if i + 1 < count or behind:
            meet(table, threads)
        x = before = to
    if behind:
        _behind(x, behind, table, thread, threads, half)


def _real_layers(table: int) -> None:
    _layers(table, False, False)


def _half_layers(table: int) -> None:
    _layers(table, True, False)


def _four_layers(table: int) -> None:
    _layers(table, True, True)


def _real_columns(table: int) -> None:
    thread, threads = member(table)
    _columns(table + 8 * FIRST, thread, threads, False)


def _half_columns(table: int) -> None:
    thread, threads = member(table)
    _columns(table + 8 * FIRST, thread, threads, True)


@cache
def _code(function: Any) -> Any:
    """The machine code of a function of a table's address."""
    kind: Any = types
    return cfunc(kind.void(kind.int64), cache=True, error_model="numpy")(function)


def layers(half: bool, four: bool = False) -> int:
    """The address of the code of layers; `half` for bfloat16, `four` for weights in four bits."""
    return int(_code(_four_layers if four else _half_layers if half else _real_layers).address)


def columns(half: bool) -> int:
    """That of one linear layer."""
    return int(_code(_half_columns if half else _real_columns).address)
