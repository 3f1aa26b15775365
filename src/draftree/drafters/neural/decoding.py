"""What a drafter that is a transformer has read of a step, and how the nodes of the next pass lie behind it.

Shapes: R rows, F frontier nodes, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.base import put
from draftree.models.cache import SlotCache
from draftree.models.feed import DeviceFeed, Feed
from draftree.models.target import Taps
from draftree.models.unseen import Layers
from draftree.tree import Candidates, Ints, Tree, Verdict

NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Decoding:
    """A transformer drafter's state.

    Attributes:
        cache: its keys and values; the tensors are shared between the states of one text.
        pending: for each row, committed tokens behind the cached ones, not fed yet.
        fed: for each row, the nodes fed in this step, in the order of their scratch slots (behind the pending ones).
        unread: what the target made of committed tokens, of a drafter that caches something of that, not read yet.
    """

    cache: SlotCache
    pending: tuple[Ints, ...]
    fed: tuple[Ints, ...]
    unread: tuple[Taps, ...] = ()

    @classmethod
    def empty(cls, cache: SlotCache) -> "Decoding":
        """Nothing pending, nothing fed."""
        return cls(cache, (NOTHING,) * cache.rows, (NOTHING,) * cache.rows)


@dataclass(frozen=True)
class Layout:
    """The places of a frontier's nodes in one pass.

    Attributes:
        feed: of each row its pending tokens, if this is the step's first pass, and its nodes of the frontier.
        rows: [F] the row of each frontier node.
        columns: [F] its column there.
        fed: the nodes fed in this step once the pass is done.
    """

    feed: Feed
    rows: Ints
    columns: Ints
    fed: tuple[Ints, ...]

    def pick(self, out: Tensor) -> Tensor:
        """[F, …] of what a pass gave, [R, n, …]."""
        if len(out) == 1:  # the frontier stands behind the pending tokens, in its own order
            return out[0, self.columns[0] : self.columns[-1] + 1]
        return out[torch.from_numpy(self.rows).to(out.device), torch.from_numpy(self.columns).to(out.device)]


def lay_out(state: Decoding, tree: Tree, frontier: Ints, device: torch.device) -> Layout:
    """A pass over the frontier's nodes; each sees its row's committed tokens and those of its path that were fed.

    Args:
        state: of the drafter.
        tree: what was drafted so far.
        frontier: [F] nodes, none of them fed before in this step.
        device: of the pass.
    """
    cache, owner = state.cache, tree.row[frontier]
    rows = [frontier[owner == r] for r in range(cache.rows)] if cache.rows > 1 else [frontier]
    tokens, positions, visible, scratch, starts = [], [], [], [], cache.lengths.copy()
    columns = np.empty(len(frontier), np.int64)
    for r, nodes in enumerate(rows):
        before, base = state.fed[r], int(cache.lengths[r])
        pending = state.pending[r] if before.size or nodes.size else NOTHING  # a row not drafted for takes no slots
        waiting = NOTHING if before.size else pending  # the first pass of a step takes them along
        places = np.concatenate((before, nodes))
        depths = base + len(pending) + tree.depth[places]  # the root stands right behind the committed tokens
        seen = np.ones((len(waiting) + len(nodes), len(pending) + len(places)), np.bool_)
        seen[: len(waiting), :] = np.tri(len(waiting), seen.shape[1], dtype=np.bool_)
        seen[len(waiting) :, len(pending) :] = tree.ancestors[np.ix_(nodes, places)]
        tokens.append(np.concatenate((waiting, tree.tokens[nodes])))
        positions.append(np.concatenate((base + np.arange(len(waiting)), depths[len(before) :])))
        scratch.append(np.concatenate((base + np.arange(len(pending)), depths)))
        visible.append(seen)
        starts[r] += len(pending) + len(before) if before.size else 0
        columns[owner == r] = len(waiting) + np.arange(len(nodes))
    feed = Feed.packed(tokens, positions, starts, visible, scratch, device)
    fed = tuple(np.concatenate(pair) for pair in zip(state.fed, rows, strict=True))
    return Layout(feed, owner, columns, fed)


@torch.inference_mode()
def keep_path(state: Decoding, tree: Tree, verdict: Verdict, again: bool = False) -> Decoding:
    """Commits what was fed of each accepted path; the rest of it waits for the next step, and all of it to be read `again`."""
    cache, pending = state.cache, list(state.pending)
    for root in range(tree.roots):
        row = int(tree.row[root])
        nodes, before = verdict.kept(root), state.fed[row]
        done = NOTHING if again else np.flatnonzero(np.isin(before, tree.number[nodes]))  # a node is fed after its parent
        if before.size:
            waited = len(state.pending[row])
            cache.keep(row, cache.lengths[row] + np.concatenate((np.arange(waited), waited + done)))
            pending[row] = tree.tokens[nodes[len(done) :]]
        else:
            pending[row] = np.concatenate((state.pending[row], tree.tokens[nodes]))
    return Decoding(cache, tuple(pending), (NOTHING,) * cache.rows)


def rewind(state: Decoding, lengths: Ints, rows: Ints | None) -> Decoding:
    """The state with at most `lengths[r]` committed tokens of some rows in the cache, nothing pending there."""
    state.cache.truncate(lengths)
    empty = Decoding.empty(state.cache)
    return replace(empty, pending=put(state.pending, rows, empty.pending))


def no_candidates(nodes: int, k: int) -> Candidates:
    """Nothing after any of the nodes."""
    return Candidates(np.zeros((nodes, k), np.int64), np.full((nodes, k), -np.inf))


@final
class CachedLayers(Layers):
    """Passes of a transformer over layers that the host does not see; where their nodes lie it knows beforehand.

    Args:
        state: of the drafter, with nothing put off.
        roots: of the step.
        depth: [R] how deep each row's tree may be; a row where that is nothing is not drafted for.
        context: positions that the transformer knows.
        device: of the passes.
        read: logits [R, n, V] of a pass.
        ids: [V] of the tokens that these are of; none for all.
    """

    def __init__(
        self,
        state: Decoding,
        roots: Tree,
        depth: Ints,
        context: int,
        device: torch.device,
        read: Callable[[Feed | DeviceFeed], Tensor],
        ids: Tensor | None,
    ) -> None:
        self._state, self._roots, self._read, self.device, self.ids = state, roots, read, device, ids
        self._live, self._last, self._depth = depth > 0, context - 1, 0
        self._begin = state.cache.lengths + np.array([len(p) for p in state.pending], np.int64)  # where each root lies
        self._positions = int((self._begin + depth)[self._live].max())
        self._first = torch.from_numpy(self._begin).to(device)
        self._places = self._first[:, None]  # of all nodes that have been fed

    @property
    def positions(self) -> int:
        """How many positions are needed."""
        return self._positions

    def first(self) -> Tensor:
        mine = np.flatnonzero(self._live[self._roots.row])
        layout = lay_out(self._state, self._roots, mine, self.device)
        rows = torch.from_numpy(layout.rows).to(self.device)
        logits = layout.pick(self._read(layout.feed))
        return logits.new_zeros(len(self._live), logits.shape[-1]).index_copy(0, rows, logits)[:, None]

    def below(self, tokens: Tensor, seen: Tensor) -> Tensor:
        before, self._depth = self._places.shape[1], self._depth + 1
        here = (self._first[:, None] + self._depth).clamp(max=self._last)  # padding may lie anywhere
        self._places = torch.cat((self._places, here.expand(-1, tokens.shape[1])), dim=1)
        places = self._places[:, before:]
        return self._read(DeviceFeed(tokens, places, self._begin + before, seen, self._places, self._first))

    def state(self, fed: Sequence[Ints]) -> Decoding:
        numbers = np.concatenate(fed, axis=1)
        return replace(self._state, fed=tuple(n if live else NOTHING for n, live in zip(numbers, self._live, strict=True)))
