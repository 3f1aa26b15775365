"""What drafters share that go on from the target's features: EAGLE, EAGLE-3, MTP.

They read pairs (f_t, x_{t+1}) at position t: what the target made of token t, and the token that follows it. The output of
pair t stands for the target's feature of x_{t+1}, and is fed back as a feature where the true one is not known yet.
After N committed tokens there are N pairs, the last one with the root; what was drafted never enters their cache.

Shapes: R rows, n tokens a row, N committed tokens, F frontier nodes, B batch, T tokens, D hidden size, V vocabulary, S slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from draftree.cache import LayerShape, SlotCache
from draftree.decoder import Feed, additive_mask
from draftree.drafters._decoding import NOTHING, SPARE, Decoding, lay_out
from draftree.drafters._layers import Growing
from draftree.drafters.base import Batch, Trainable
from draftree.sampling import Drawing, drawn
from draftree.target import CHUNK, Taps
from draftree.training.masks import additive, block_starts
from draftree.tree import Candidates, Ints, Tree, Verdict


class PairNet(nn.Module, ABC):
    """A network over pairs."""

    @property
    @abstractmethod
    def shape(self) -> LayerShape:
        """What its layer stores for a pair."""

    @property
    @abstractmethod
    def width(self) -> int:
        """D of the features it is fed."""

    @abstractmethod
    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """The features […, D] of the target's hidden states […, D′] of the layers needed."""

    @abstractmethod
    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """The output [R, n, D] of pairs: tokens [R, n], features [R, n, D], positions [R, n], additive mask [R, 1, n, S]."""

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """Draft logits […, V] in the target's vocabulary of outputs […, D]."""


@dataclass(frozen=True)
class Pairs:
    """A pair drafter's state.

    Attributes:
        decoding: the cache of pairs, nothing pending; fed are the drafted nodes.
        features: of the committed tokens, as keys of one head.
        outputs: for each row, [1 + fed, D] the output after the root and after each fed node.
    """

    decoding: Decoding
    features: SlotCache
    outputs: tuple[Tensor, ...]

    @property
    def places(self) -> list[dict[int, int]]:
        """For each row, which of its outputs is a fed node's; the root's is the first."""
        return [{node: i for i, node in enumerate(nodes.tolist(), 1)} for nodes in self.decoding.fed]


class PairDrafter(Trainable[Pairs]):
    """Drafts with a network over pairs."""

    model: PairNet

    @property
    def _place(self) -> Tensor:
        return next(self.model.parameters())

    def _empty(self, rows: int, slots: int) -> Pairs:
        dtype, device = self._place.dtype, self._place.device
        cache = SlotCache((self.model.shape,), rows, dtype, device)
        features = SlotCache((LayerShape(1, self.model.width, 0),), rows, dtype, device)
        cache.reserve(slots)
        features.reserve(slots)
        return Pairs(Decoding.empty(cache), features, self._nothing(rows))

    def _nothing(self, rows: int) -> tuple[Tensor, ...]:
        return (self._place.new_zeros(0, self.model.width),) * rows

    @torch.inference_mode()
    def start(self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: Pairs | None = None) -> Pairs:
        state = state or self._empty(len(prompts), max(map(len, prompts)) + SPARE)
        self._remember(state, taps)
        lengths = state.decoding.cache.lengths.tolist()
        return self._read(state, [np.append(p[n + 1 :], r) for p, n, r in zip(prompts, lengths, roots.tolist(), strict=True)])

    def _remember(self, state: Pairs, taps: Taps) -> None:
        """Keeps the true features of newly committed tokens."""
        new = self.model.fuse({layer: h.to(self._place.dtype) for layer, h in taps.hidden.items()})
        state.features.insert(0, taps.rows, taps.positions, new[None], new.new_zeros(1, len(new), 0))

    def _read(self, state: Pairs, tokens: Sequence[Ints]) -> Pairs:
        """Feeds the pairs of newly committed tokens, x_{t+1} of each row; the last one's output is the one after the root."""
        cache, outputs = state.decoding.cache, list(state.outputs)
        for at in range(0, max(map(len, tokens)), CHUNK):
            part = [t[at : at + CHUNK] for t in tokens]
            feed = Feed.chains(part, cache.lengths.copy(), self._place.device)
            given = state.features.layer(0)[0]
            features = given.new_zeros(*feed.tokens.shape, self.model.width)
            for r, ids in enumerate(part):
                begin = int(cache.lengths[r])
                features[r, : len(ids)] = given[r, 0, begin : begin + len(ids)]
            out = self._pass(cache, feed, features)
            for r, ids in enumerate(part):
                if len(ids):
                    cache.keep(r, cache.lengths[r] + np.arange(len(ids)))
                    outputs[r] = out[r, len(ids) - 1][None]
        return Pairs(Decoding.empty(cache), state.features, tuple(outputs))

    def _pass(self, cache: SlotCache, feed: Feed, features: Tensor) -> Tensor:
        mask = additive_mask(feed, cache.lengths, self._place.dtype).to(self._place.device)
        positions = torch.from_numpy(feed.positions).to(self._place.device)
        out: Tensor = self.model(feed.tokens, features, positions, mask, cache.writer(feed.starts, feed.tokens.shape[1]))
        return out

    @torch.inference_mode()
    def expand(self, state: Pairs, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, Pairs]:
        fed = state.places
        new = np.array([n for n in frontier.tolist() if tree.depth[n] and n not in fed[tree.row[n]]], np.int64)
        if new.size:
            state = self._feed(state, tree, new, fed)
            fed = state.places
        out = torch.stack([state.outputs[tree.row[n]][fed[tree.row[n]].get(n, 0)] for n in frontier.tolist()])
        return drawn(self.model.logits(out), k, drawing, tree.row[frontier], tree.depth[frontier]), state

    def _feed(self, state: Pairs, tree: Tree, nodes: Ints, fed: list[dict[int, int]]) -> Pairs:
        """Feeds drafted nodes, each paired with the output after its parent."""
        layout = lay_out(state.decoding, tree, nodes, self._place.device, shift=-1)
        features = self._place.new_zeros(*layout.feed.tokens.shape, self.model.width)
        for row, column, node in zip(layout.rows.tolist(), layout.columns.tolist(), nodes.tolist(), strict=True):
            features[row, column] = state.outputs[row][fed[row].get(int(tree.parents[node]), 0)]
        out = self._pass(state.decoding.cache, layout.feed, features)
        outputs = tuple(
            torch.cat((old, out[r, layout.columns[layout.rows == r]])) if (layout.rows == r).any() else old
            for r, old in enumerate(state.outputs)
        )
        return replace(state, decoding=replace(state.decoding, fed=layout.fed), outputs=outputs)

    @torch.inference_mode()
    def commit(self, state: Pairs, tree: Tree, verdict: Verdict, taps: Taps) -> Pairs:
        self._remember(state, taps)  # true features take the place of what was drafted
        tokens = [NOTHING] * state.decoding.cache.rows
        for root in range(tree.roots):
            tokens[int(tree.row[root])] = np.append(tree.tokens[verdict.paths[root]], verdict.bonus[root])
        return self._read(state, tokens)

    def truncate(self, state: Pairs, lengths: Ints) -> Pairs:
        cache = state.decoding.cache
        cache.truncate(np.maximum(lengths - 1, 0))  # the pair of the last token kept has a token that may change
        state.features.truncate(lengths)
        return Pairs(Decoding.empty(cache), state.features, self._nothing(cache.rows))

    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        rows, count = batch.tokens.shape
        cuts = sorted({max(int(s), 1) for s in block_starts(count, block, phase)})  # no pair stands before the first token
        ends = [*cuts[1:], count]
        cache, at = Growing(), torch.arange(1, count)
        features = self.model.fuse({k: h.to(self._place.dtype) for k, h in batch.hidden.items()})
        out = self._train_pass(batch.tokens[:, 1:], features[:, :-1], at - 1, at[None, :] <= at[:, None], cache)
        states = features.new_zeros(rows, count, self.model.width)
        states[:, cuts] = out[:, [s - 1 for s in cuts]].to(states.dtype)  # autocast's outputs are narrower than features
        owner, depth = torch.zeros(count - 1, dtype=torch.long), torch.zeros(count - 1, dtype=torch.long)
        true = at.clone()
        for d in range(1, block):
            mine = torch.tensor([s for s, e in zip(cuts, ends, strict=True) if s + d < e], dtype=torch.long)
            if not len(mine):
                break
            owner, depth = torch.cat((owner, mine)), torch.cat((depth, torch.full((len(mine),), d)))
            true = torch.cat((true, torch.full((len(mine),), count)))  # drafted pairs are nobody's history
            visible = (true[None, :] <= mine[:, None]) | ((depth[None, :] > 0) & (owner[None, :] == mine[:, None]))
            out = self._train_pass(batch.tokens[:, mine + d], states[:, mine + d - 1], mine + d - 1, visible, cache)
            states[:, mine + d] = out.to(states.dtype)
        return self.model.logits(states)

    def _train_pass(self, tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor, cache: Cache) -> Tensor:
        mask = additive(visible[None, None].to(features.device), features.dtype)
        out: Tensor = self.model(tokens, features, positions.to(features.device).expand(len(tokens), -1), mask, cache)
        return out

    def aligned(self, batch: Batch, features: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs after each token as decoding has them 0, 1, … steps behind the last true feature.

        This is the training-time test of EAGLE-3 and the alignment of HASS: in pass j every pair is fed the output that
        pass j − 1 gave for the pair before, and sees true pairs up to j before its own and, from there on, drafted ones.

        Args:
            batch: the texts.
            features: [B, T, D] the target's, with noise or without.
            steps: how many passes.

        Yields:
            [B, T, D] outputs, and [T] whether a token has one.
        """
        count = batch.tokens.shape[1]
        cache, at = Growing(), torch.arange(count - 1, device=features.device)
        fed = features[:, :-1]
        for j in range(steps):
            places = [(at[None, :] <= at[:, None] - j) | ((at[None, :] == at[:, None]) & (j > at[:, None]))]
            places += [at[None, :] == at[:, None] - j + i for i in range(1, j + 1)]
            out = self._train_pass(batch.tokens[:, 1:], fed, at, torch.cat(places, dim=1), cache)
            yield nn.functional.pad(out, (0, 0, 1, 0)), torch.arange(count, device=out.device) > j
            fed = nn.functional.pad(out[:, :-1], (0, 0, 1, 0))
