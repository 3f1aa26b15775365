"""Memory that the recurrent states of a target take."""

from collections.abc import Iterator

import numpy as np

from draftree.doctor.finding import Finding
from draftree.models.recurrent import state_cache
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import Tree


def state_findings(target: Target) -> Iterator[Finding]:
    """Yield findings on the bytes of a sequence's recurrent states and of a node's state update.

    Nothing is yielded for a target without recurrent states.
    """
    cache = target.new_cache(1, 8)
    if cache.states is None:
        return
    target.prefill(cache, [np.array([1, 2])], HiddenStateSpec())
    target.verify(cache, Tree.from_roots(np.zeros(1, np.int64), np.array([3])), HiddenStateSpec())
    state, stash = cache.states.bytes_of_row, cache.states.bytes_of_slot
    bound = (
        f"at most {state_cache.SNAPSHOTS} a row, and {state_cache.BYTES / 2**20:,.0f} MiB for all"
    )
    yield Finding(
        "state",
        state,
        "ok",
        f"{state / 2**20:,.1f} MiB of state a sequence, and as much a snapshot: {bound}",
    )
    yield Finding(
        "stash",
        stash,
        "ok",
        f"{stash / 2**10:,.1f} KiB of what a node would do to it, while it is verified",
    )
