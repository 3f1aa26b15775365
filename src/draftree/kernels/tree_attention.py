"""Attention under a tree's mask on a GPU, in Triton: the heads that share a key-value head are rows of one product.

SDPA with a mask copies keys and values for each head that shares them, and reads them as often; here a block of them is read
once for all heads of a group and all queries, and softmax goes along (Dao, FlashAttention-2, 2023, algorithm 1).

Shapes: B rows, H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a value.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, SLOTS = 64, 64
"""Queries, each counted once for every head of a group, and slots that a block has at most."""
SMALL = 16
"""The least side of a product."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, mask, out,
    q_row, q_head, q_query, k_row, k_head, k_slot, v_row, v_head, v_slot, m_row, m_head, m_query,
    scale, lowest, n, slots, groups, width, wide,
    HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A block of the rows of one group; row r is head r % HEADS of query r // HEADS."""
    row, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    rows = tl.program_id(0) * M + tl.arange(0, M)
    head, query, there = group * HEADS + rows % HEADS, rows // HEADS, rows < n * HEADS
    d, w = tl.arange(0, D), tl.arange(0, W)
    place = q + row * q_row + head * q_head + query * q_query
    queries = tl.load(place[:, None] + d[None, :], mask=there[:, None] & (d < width)[None, :], other=0.0)
    top = tl.full((M,), -float("inf"), tl.float32)
    total, sums = tl.full((M,), 0, tl.float32), tl.full((M, W), 0, tl.float32)
    for start in range(0, slots, N):
        at = start + tl.arange(0, N)
        within = at < slots
        keys = tl.load(
            k + row * k_row + group * k_head + at[None, :] * k_slot + d[:, None],
            mask=within[None, :] & (d < width)[:, None], other=0.0,
        )  # fmt: skip
        hidden = tl.load(
            mask + row * m_row + head[:, None] * m_head + query[:, None] * m_query + at[None, :],
            mask=there[:, None] & within[None, :], other=lowest,
        ).to(tl.float32)  # fmt: skip
        scores = tl.dot(queries, keys, input_precision="ieee") * scale + hidden
        scores = tl.where(hidden > lowest / 2, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # until a row sees something
        weights, before = tl.exp(scores - base[:, None]), tl.exp(top - base)
        values = tl.load(
            v + row * v_row + group * v_head + at[:, None] * v_slot + w[None, :],
            mask=within[:, None] & (w < wide)[None, :], other=0.0,
        )  # fmt: skip
        total = total * before + tl.sum(weights, 1)
        sums = sums * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher
    found = sums / tl.where(total > 0, total, 1.0)[:, None]  # what sees nothing weighs nothing
    to = out + ((row * n + query) * (groups * HEADS) + head) * wide
    tl.store(to[:, None] + w[None, :], found, mask=there[:, None] & (w < wide)[None, :])


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of a pass over a tree.

    Args:
        query: [B, H, n, D]; in every tensor the last entries lie beside each other.
        key: [B, G, S, D].
        value: [B, G, S, W].
        mask: [B or 1, H or 1, n, S] added to the scores; the lowest number of its dtype hides a slot.
        scale: of the scores.

    Returns:
        [B, n, H, W]; 0 for a query that sees nothing.
    """
    (rows, all_heads, n, width), (_, groups, slots, wide) = query.shape, value.shape
    heads, out = all_heads // groups, query.new_empty(rows, n, all_heads, wide)
    by_row, by_head, by_query, _ = mask.stride()
    side = max(SMALL, min(ROWS, triton.next_power_of_2(n * heads)))
    kernel: Any = _attend
    kernel[triton.cdiv(n * heads, side), rows * groups](
        query, key, value, mask, out,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        by_row * (len(mask) > 1), by_head * (mask.shape[1] > 1), by_query,
        scale, torch.finfo(mask.dtype).min, n, slots, groups, width, wide,
        HEADS=heads, M=side, N=SLOTS, D=max(SMALL, triton.next_power_of_2(width)), W=max(SMALL, triton.next_power_of_2(wide)),
    )  # fmt: skip
    return out
