"""The state of a transformer drafter within a step, and the inputs of its next pass.

Shapes: R slots, F frontier nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.base import replace_slots, select_slots
from draftree.kernels.tree_layout import draft_pass_layout
from draftree.models.forward_batch import ForwardBatch
from draftree.models.graph_capture import InputTensors
from draftree.models.kv_cache import SlotCache
from draftree.target.target import HiddenStates
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.hardware import to_device

NO_TOKENS = np.zeros(0, np.int64)
SPARE_SLOTS = 256
"""Number of slots that a new cache has in addition to the prompt, so that it seldom grows."""

Pick = Callable[[Tensor, InputTensors], Tensor]
"""A function `pick(results, inputs)` that selects the results of the frontier's nodes [R, F, …].

`results` [R, n, …] are those of all tokens of a pass, and `inputs` are the inputs of the pass.
"""


@dataclass(frozen=True)
class Decoding:
    """A transformer drafter's state.

    Attributes:
        cache: the keys and values. The states of one text share its tensors.
        pending: for each slot, the committed tokens after the cached ones, which the network has
            not read.
        fed: for each slot, the nodes that the network has read in this step, in the order of their
            scratch slots, which follow those of the pending tokens.
        unread: hidden states of committed tokens that have not been read, for a drafter that caches
            values computed from them.
    """

    cache: SlotCache
    pending: tuple[Ints, ...]
    fed: tuple[Ints, ...]
    unread: tuple[HiddenStates, ...] = ()

    @classmethod
    def empty(cls, cache: SlotCache) -> "Decoding":
        """Return a state in which no tokens are pending and no nodes have been read."""
        return cls(cache, (NO_TOKENS,) * cache.rows, (NO_TOKENS,) * cache.rows)


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


@torch.inference_mode()
def keep_path(state: Decoding, tree: Tree, verdict: AcceptResult, again: bool = False) -> Decoding:
    """Commit the nodes of each accepted path that were read; other tokens wait for the next step.

    With `again`, all tokens of the path are read again in the next step.
    """
    cache, pending = state.cache, list(state.pending)
    for root in range(tree.roots):
        row = int(tree.row[root])
        nodes, before = verdict.committed_nodes(root), state.fed[row]
        done = (
            NO_TOKENS if again else np.flatnonzero(np.isin(before, tree.number[nodes]))
        )  # a node is read after its parent
        if before.size:
            waited = len(state.pending[row])
            cache.keep(row, cache.lengths[row] + np.concatenate((np.arange(waited), waited + done)))
            pending[row] = tree.tokens[nodes[len(done) :]]
        else:
            pending[row] = np.concatenate((state.pending[row], tree.tokens[nodes]))
    return Decoding(cache, tuple(pending), (NO_TOKENS,) * cache.rows)


def rewind(state: Decoding, lengths: Ints, rows: Ints | None) -> Decoding:
    """Truncate the cache in place, and return the state at the beginning of a step.

    No nodes have been read in it, and it has no unread hidden states.

    Args:
        state: the drafter's state.
        lengths: [R] the largest number of committed tokens that the cache keeps of each sequence.
        rows: the sequences whose pending tokens are dropped; None for all.
    """
    state.cache.truncate(lengths)
    empty = Decoding.empty(state.cache)
    return replace(empty, pending=replace_slots(state.pending, rows, empty.pending))


def select_sequences(state: Decoding, rows: Ints, cache: SlotCache) -> Decoding:
    """Return the state with sequences moved to other slots, see `Drafter.select`."""
    empty, pending = (
        Decoding.empty(state.cache.copy_sequences(rows, SPARE_SLOTS)),
        select_slots(state.pending, rows, NO_TOKENS),
    )
    return replace(empty, pending=pending, unread=move_unread(state.unread, rows, cache))


def move_unread(
    unread: Sequence[HiddenStates], rows: Ints, cache: SlotCache
) -> tuple[HiddenStates, ...]:
    """Return the unread hidden states after sequences have moved, see `Drafter.select`."""
    return tuple(
        hidden_states for every in unread if len((hidden_states := every.select(rows, cache)).rows)
    )


def truncate_unread(unread: Sequence[HiddenStates], lengths: Ints) -> tuple[HiddenStates, ...]:
    """Return the unread hidden states of tokens before position `lengths[r]` of each sequence."""
    return tuple(
        hidden_states for every in unread if len((hidden_states := every.before(lengths)).rows)
    )


def no_candidates(nodes: int, k: int) -> Candidates:
    """Return the candidates of nodes that have none."""
    return Candidates(np.zeros((nodes, k), np.int64), np.full((nodes, k), -np.inf))
