"""What drafters share that are a row of heads, one for each depth, on the target's last hidden state: Medusa, Hydra.

Shapes: R rows, F frontier nodes, K candidates, B batch, T tokens, M learnt positions, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from draftree.drafters.base import Batch
from draftree.drafters.neural.losses import before
from draftree.drafters.neural.masks import block_starts
from draftree.models.target import Target
from draftree.sampling.drawing import Drawing, drawn
from draftree.tree import Candidates, Ints


class ResBlock(nn.Module):
    """x + SiLU(W x + b); with conditions beside x, a linear map of all of them takes the place of the first x.

    W begins as zero, so that only the bias is added at first, as in the official codes.

    Args:
        width: D, of the output.
        conditions: how many vectors [D] stand beside x in the input.
    """

    def __init__(self, width: int, conditions: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + conditions) * width, width)
        self.res_connection = nn.Linear((1 + conditions) * width, width) if conditions else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[…, (1 + conditions) · D] → […, D]."""
        out: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return out


def lm_head(target: Target, bias: bool) -> nn.Linear:
    """A float32 linear layer [V, D] that begins as the target's LM head; its bias begins as the head's, or as zero."""
    theirs = target.decoder.model.get_output_embeddings()
    head = nn.Linear(theirs.weight.shape[1], theirs.weight.shape[0], bias=bias)
    with torch.no_grad():
        head.weight.copy_(theirs.weight)
        if bias:
            head.bias.zero_() if theirs.bias is None else head.bias.copy_(theirs.bias)
    return head


def newest(rows: Ints, values: Tensor, old: Tensor) -> Tensor:
    """[R, D]: each row's last one of values [T, D] of `rows` [T]; rows that have none keep the old one."""
    present, from_end = np.unique(rows[::-1], return_index=True)
    found = old.clone()
    found[torch.from_numpy(present).to(old.device)] = values[torch.from_numpy(len(rows) - 1 - from_end).to(old.device)]
    return found


def offered(logits: Tensor, heads: int, k: int, drawing: Drawing, rows: Ints, depths: Ints) -> Candidates:
    """Candidates of logits [F, V]; none after nodes so deep that there is no head."""
    found = drawn(logits, k, drawing, rows, depths)
    beyond = (depths >= heads)[:, None]
    return replace(found, tokens=np.where(beyond, 0, found.tokens), log_q=np.where(beyond, -np.inf, found.log_q))


def by_depth(count: int, block: int, phase: int, heads: int) -> Iterator[tuple[int, Tensor]]:
    """For each depth that has a head, the first positions s of the blocks that reach it; their heads read position s − 1.

    A block that begins the text has nothing before it and is left out: decoding begins behind a prompt.

    Args:
        count: T.
        block: length of a block.
        phase: how many tokens the first one lacks.
        heads: how many there are.
    """
    start, at = block_starts(count, block, phase), torch.arange(count)
    for depth in range(min(heads, block)):
        yield depth, start[(at - start == depth) & (start > 0)]


def teacher(whole: Tensor, batch: Batch, distance: int) -> Tensor:
    """The target's logits for the learnt tokens that stand `distance` behind a position of the text.

    Args:
        whole: [M, V] its logits for all learnt tokens, `batch.target(before(batch.learn))`.
        batch: the text.
        distance: at least 1.
    """
    reached = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) >= distance - 1
    return whole[reached.expand_as(batch.learn)[before(batch.learn)]]
