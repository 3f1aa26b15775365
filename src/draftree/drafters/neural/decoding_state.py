"""The state of a transformer drafter for a batch of sequences, within a step and between steps.

Shapes: R slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from draftree.drafters.base import replace_slots, select_slots
from draftree.models.kv_cache import SlotCache
from draftree.target.target import HiddenStates
from draftree.tree import AcceptResult, Ints, Tree

NO_TOKENS = np.zeros(0, np.int64)
SPARE_SLOTS = 256
"""Number of slots that a new cache has in addition to the prompt, so that it seldom grows."""


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
