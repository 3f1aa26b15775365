"""Layout of a drafter's pass over the frontier's nodes.

Shapes: R slots, n tokens of a padded pass, N tokens of a packed pass, F frontier nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.neural.decoding_state import NO_TOKENS, Decoding
from draftree.kernels.pass_layout import draft_pass_layout
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import InputTensors
from draftree.tree import Ints, Tree
from draftree.utils.hardware import to_device

Pick = Callable[[Tensor, InputTensors], Tensor]
"""A function `pick(results, inputs)` that selects the results of the frontier's nodes [R, F, …].

`results` [R, n, …] are those of all tokens of a pass, and `inputs` are the inputs of the pass.
"""


@dataclass(frozen=True)
class StepLayout:
    """The places of a frontier's nodes in one pass.

    Attributes:
        feed: the forward batch, which contains the frontier nodes of each sequence. In the first
            pass of a step, the pending tokens of the sequence come before them.
        rows: [F] the slot of each frontier node.
        columns: [F] the column of each frontier node in its slot.
        fed: for each slot, the nodes that have been read in this step after the pass.
    """

    feed: ForwardBatch
    rows: Ints
    columns: Ints
    fed: tuple[Ints, ...]

    @property
    def packed_places(self) -> Ints:
        """Return [F] the index of each frontier node among the N tokens of a packed pass."""
        return self.feed.firsts[self.rows] + self.columns

    @property
    def padded_places(self) -> Ints:
        """Return [F] the index of each frontier node among the R n tokens of a padded pass."""
        return self.rows * self.feed.width + self.columns

    def pick(self, out: Tensor) -> Tensor:
        """Select the frontier's part [F, …] of the output [R, n, …] of a padded pass."""
        if len(out) == 1:  # frontier nodes follow the pending tokens in order
            return out[0, self.columns[0] : self.columns[-1] + 1]
        return out[to_device(self.rows, out.device), to_device(self.columns, out.device)]


def lay_out(state: Decoding, tree: Tree, frontier: Ints, device: torch.device) -> StepLayout:
    """Return a pass over the frontier's nodes.

    Each node sees the committed tokens of its sequence, and those nodes of its path that were read.

    Args:
        state: the drafter's state.
        tree: the tree so far.
        frontier: [F] nodes that have not been read in this step.
        device: the device of the pass.
    """
    cache, owner = state.cache, tree.row[frontier]
    rows = [frontier[owner == r] for r in range(cache.rows)] if cache.rows > 1 else [frontier]
    parts = []
    starts = cache.lengths.copy()
    columns = np.empty(len(frontier), np.int64)
    for r, nodes in enumerate(rows):
        before, base = state.fed[r], int(cache.lengths[r])
        pending = (
            state.pending[r] if before.size or nodes.size else NO_TOKENS
        )  # a sequence without drafts takes no slots
        waiting = 0 if before.size else len(pending)  # the first pass of a step reads them
        parts.append(
            draft_pass_layout(pending, before, nodes, base, tree.tokens, tree.depth, tree.parents)
        )
        starts[r] += len(pending) + len(before) if before.size else 0
        columns[owner == r] = waiting + np.arange(len(nodes))
    tokens, positions, visible, scratch = zip(*parts, strict=True)
    feed = ForwardBatch.from_sequences(tokens, positions, starts, visible, scratch, device)
    feed = feed.with_width(cache.ladder.width(feed.width))  # as in captured passes
    fed = tuple(np.concatenate(pair) for pair in zip(state.fed, rows, strict=True))
    return StepLayout(feed, owner, columns, fed)
