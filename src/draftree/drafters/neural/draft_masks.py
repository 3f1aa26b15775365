"""Attention masks of draft networks, in training and in decoding.

Shapes: B batch, T tokens, R slots, n tokens or pairs of a pass, S slots of the cache.
"""

import numpy as np
import torch
from torch import Tensor

from draftree.models.forward_batch import ForwardBatch
from draftree.tree import Ints


def block_starts(tokens: int, block: int, phase: int) -> Tensor:
    """Return [T] the first position of each token's block; the first block may be shorter.

    Args:
        tokens: T, the number of tokens.
        block: number of tokens in a block.
        phase: number of tokens by which the first block is shortened, 0 … block − 1.
    """
    place = torch.arange(tokens) + phase
    return (place - place % block - phase).clamp(min=0)


def dual_block(tokens: int, block: int, phase: int, window: int | None = None) -> Tensor:
    """Return EDD's dual-block mask [T, 2T] (EDD + PCT, section 3.1, eq. 3, figure 3a).

    Token i of a block [s, e) sees the hidden states h_k for k < s (the soft prompt) and the tokens
    t_k for s ≤ k ≤ i. Decoding needs this mask: the root is the first token of a block, and the
    target has not computed its hidden state yet.
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

    Token j sees the target's keys and values of all blocks before its own. The first token of a
    block is the root, and the target has read only the tokens before the root. Tokens of the first
    block see no keys.
    """
    return torch.arange(tokens)[None, :] < block_starts(tokens, block, phase)[:, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive form of a mask `visible` [B, 1, T, keys].

    It is 0 where the mask is True, and the lowest finite number elsewhere.
    """
    nothing = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return nothing.masked_fill(~visible, torch.finfo(dtype).min)


def causal_pairs(at: Tensor, level: int) -> Tensor:
    """Return the mask [n, n] of a level's pairs at positions `at` [n].

    A pair sees itself and earlier pairs. The first `level` pairs do not exist; they see only each
    other.
    """
    return (at[None, :] <= at[:, None]) & ((at[None, :] >= level) | (at[:, None] < level))


def hide_first_pairs(mask: Tensor, feed: ForwardBatch, committed: Ints, level: int) -> None:
    """Hide the first `level` pairs (feature, next token) of each text from later pairs, in place.

    Level k of a network has no keys and values for the first k pairs; see `feature_drafter.py`.

    Args:
        mask: [R, 1, n, S] the additive mask that is changed.
        feed: the pass, with n tokens of each of R texts.
        committed: [R] the number of committed tokens in each text.
        level: the level k, which is also the number of pairs to hide.
    """
    for r, scratch in enumerate(feed.scratch_positions):
        early = np.flatnonzero(np.concatenate((np.arange(committed[r]), scratch)) < level)
        late = np.flatnonzero(feed.padded_positions[r] >= level)
        mask[r, 0, late[:, None], early] = torch.finfo(mask.dtype).min
