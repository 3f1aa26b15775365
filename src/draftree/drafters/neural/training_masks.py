"""Attention masks of training forwards; they equal the visibility in decoding.

Shapes: T tokens.
"""

import numpy as np
import torch
from torch import Tensor

from draftree.models.forward_batch import ForwardBatch
from draftree.tree import Ints


def block_starts(tokens: int, block: int, phase: int) -> Tensor:
    """Return the first position s [T] of each token's block; the first block may be short.

    Args:
        tokens: T.
        block: length of a block.
        phase: how many tokens the first block lacks, 0 … block − 1.
    """
    place = torch.arange(tokens) + phase
    return (place - place % block - phase).clamp(min=0)


def dual_block(tokens: int, block: int, phase: int, window: int | None = None) -> Tensor:
    """Return EDD's dual-block mask [T, 2T] (EDD + PCT, section 3.1, eq. 3, figure 3a).

    Token i of a block [s, e) sees the hidden states h_k for k < s (the soft prompt) and the tokens
    t_k for s ≤ k ≤ i. This is the mask that inference needs: the root is the block's first token,
    and its own h does not exist before the target has read it.
    """
    at = torch.arange(tokens)
    start = block_starts(tokens, block, phase)
    soft = at[None, :] < start[:, None]
    text = (at[None, :] >= start[:, None]) & (at[None, :] <= at[:, None])
    if window is not None:  # the drafter's layer has a sliding window
        near = at[:, None] - at[None, :] < window
        soft, text = soft & near, text & near
    return torch.cat((soft, text), dim=1)


def earlier_blocks(tokens: int, block: int, phase: int) -> Tensor:
    """Return GLIDE's block-wise mask [T, T] (GliDe + CaPE, section 4.1, block(j) > block(k)).

    Token j sees the target's keys and values of the blocks before its own: a block's first token is
    the root, and the target has read the tokens before it. The first block sees nothing.
    """
    return torch.arange(tokens)[None, :] < block_starts(tokens, block, phase)[:, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where visible [B, 1, T, keys], and the lowest finite number elsewhere."""
    nothing = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return nothing.masked_fill(~visible, torch.finfo(dtype).min)


def causal_pairs(at: Tensor, level: int) -> Tensor:
    """Return the mask [n, n] of a level's pairs at positions `at`.

    A pair sees itself and those before it. The first `level` pairs do not exist; they see only each
    other.
    """
    return (at[None, :] <= at[:, None]) & ((at[None, :] >= level) | (at[:, None] < level))


def hide_first_pairs(mask: Tensor, feed: ForwardBatch, committed: Ints, level: int) -> None:
    """Hide the first `level` pairs of the text from the later ones, in a mask [R, 1, n, S]."""
    for r, scratch in enumerate(feed.scratch_positions):
        early = np.flatnonzero(np.concatenate((np.arange(committed[r]), scratch)) < level)
        late = np.flatnonzero(feed.padded_positions[r] >= level)
        mask[r, 0, late[:, None], early] = torch.finfo(mask.dtype).min
