"""What drafters that are transformers share: a cache of committed tokens, and the nodes fed so far behind them.

Shapes: R rows, F frontier nodes, V vocabulary, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftree.cache import SlotCache
from draftree.decoder import Decoder, Feed
from draftree.sampling import Drawing, drawn
from draftree.target import Needs, Target
from draftree.tree import Candidates, Ints, Tree, Verdict

SPARE = 256
"""Slots a new cache has beside the prompt's, so that it seldom grows."""
NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Decoding:
    """A transformer drafter's state.

    Attributes:
        cache: its keys and values; the tensors are shared between the states of one text.
        pending: for each row, committed tokens behind the cached ones, not fed yet.
        fed: for each row, the nodes fed in this step, in the order of their scratch slots (behind the pending ones).
    """

    cache: SlotCache
    pending: tuple[Ints, ...]
    fed: tuple[Ints, ...]

    @classmethod
    def empty(cls, cache: SlotCache) -> "Decoding":
        """Nothing pending, nothing fed."""
        return cls(cache, (NOTHING,) * cache.rows, (NOTHING,) * cache.rows)


@dataclass(frozen=True)
class Layout:
    """Where a frontier's nodes lie in one pass.

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
def feed(decoder: Decoder, state: Decoding, tree: Tree, frontier: Ints) -> tuple[Tensor, Decoding]:
    """Logits [F, V] after the frontier's nodes; each sees its row's committed tokens and its own path."""
    layout = lay_out(state, tree, frontier, decoder.device)
    logits = layout.pick(decoder.forward(state.cache, layout.feed))
    return logits, replace(state, fed=layout.fed)


@torch.inference_mode()
def keep_path(state: Decoding, tree: Tree, verdict: Verdict) -> Decoding:
    """Commits what was fed of each accepted path; the rest of the path waits for the next step."""
    cache, pending = state.cache, list(state.pending)
    for root in range(tree.roots):
        row = int(tree.row[root])
        nodes, before = verdict.kept(root), state.fed[row]
        done = np.flatnonzero(np.isin(before, tree.number[nodes]))  # a node is fed after its parent
        if before.size:
            waited = len(state.pending[row])
            cache.keep(row, cache.lengths[row] + np.concatenate((np.arange(waited), waited + done)))
            pending[row] = tree.tokens[nodes[len(done) :]]
        else:
            pending[row] = np.concatenate((state.pending[row], tree.tokens[nodes]))
    return Decoding(cache, tuple(pending), (NOTHING,) * cache.rows)


def rewind(state: Decoding, lengths: Ints) -> Decoding:
    """The state with at most `lengths[r]` committed tokens in the cache, nothing pending."""
    state.cache.truncate(lengths)
    return Decoding.empty(state.cache)


def read(small: Target, prompts: Sequence[Ints], state: Decoding | None) -> Decoding:
    """The state of a language model that has read the prompts, going on from what an earlier state has cached."""
    state = state or Decoding.empty(small.new_cache(len(prompts), max(map(len, prompts)) + SPARE))
    if max(map(len, prompts)) >= small.decoder.context:  # it never gets to draft: see `propose`
        rest = tuple(p[n:] for p, n in zip(prompts, state.cache.lengths.tolist(), strict=True))
        return replace(state, pending=rest)
    if any(len(p) > n for p, n in zip(prompts, state.cache.lengths.tolist(), strict=True)):
        small.prefill(state.cache, prompts, Needs())
    return state


def no_candidates(nodes: int, k: int) -> Candidates:
    """Nothing after any of the nodes."""
    return Candidates(np.zeros((nodes, k), np.int64), np.full((nodes, k), -np.inf))


def propose(
    decoder: Decoder, state: Decoding, tree: Tree, frontier: Ints, k: int, drawing: Drawing
) -> tuple[Candidates, Decoding]:
    """Candidates after the frontier's nodes; nothing beyond the context the drafter itself knows."""
    waiting = np.array([len(p) for p in state.pending])
    if int((state.cache.lengths + waiting)[tree.row[frontier]].max() + tree.depth[frontier].max()) >= decoder.context:
        return no_candidates(len(frontier), k), state
    logits, state = feed(decoder, state, tree, frontier)
    return drawn(logits, k, drawing, tree.row[frontier], tree.depth[frontier]), state
