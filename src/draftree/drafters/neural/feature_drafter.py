"""Base class of drafters that extrapolate the target's hidden states: EAGLE, EAGLE-3, MTP.

They read pairs (f_t, x_{t+1}) at position t: the target's feature (hidden state) of token t, and
the token that follows it. The output of pair t approximates the target's feature of x_{t+1}. It is
fed back as a feature where the true one is not known yet. After N committed tokens there are N
pairs, the last one with the root. Drafted pairs never enter the cache of true pairs. True pairs are
fed when a sequence is drafted for, so a step that drafts nothing costs no pass.

A network may have levels (DeepSeek-V3, section 2.2): level k reads, instead of f_t, the output of
level k − 1 for the pair before, so that it predicts one token further. A node is computed by level
min(depth, last). The last level is fed its own outputs where the draft goes on. Each level has keys
and values of its own, and level k has none for the first k pairs of a text.

Shapes: R slots, n tokens a slot, N committed tokens or nodes, F frontier nodes, M nodes fed, B batch,
T tokens, D hidden size, K levels, V vocabulary, S slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from typing_extensions import override

from draftree.drafters.base import Batch, Trainable, replace_slots
from draftree.drafters.neural.decoding_state import (
    NO_TOKENS,
    SPARE_SLOTS,
    Decoding,
    move_unread,
    rewind,
    select_sequences,
    truncate_unread,
)
from draftree.drafters.neural.draft_masks import (
    additive,
    block_starts,
    causal_pairs,
    hide_first_pairs,
)
from draftree.drafters.neural.draft_vocabulary import expand_logits
from draftree.drafters.neural.feature_drafter_on_device import (
    PairLayers,
    PairPasses,
    known_features,
)
from draftree.drafters.neural.feature_model_interface import PairNet
from draftree.drafters.neural.frontier_layout import StepLayout, lay_out
from draftree.drafters.neural.rotary import Rotary
from draftree.kernels.pass_layout import unfed_nodes
from draftree.models.forward_batch import ForwardBatch
from draftree.models.kv_cache import LayerShape, SlotCache
from draftree.models.one_pass_caches import capture_first_kv
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.target.target import CHUNK, HiddenStates
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from draftree.utils.hardware import to_device
from draftree.utils.profiler import in_phase

MAX_PENDING_PAIRS = 8
"""Largest number of a sequence's pairs that a draft step reads together with the root.

If more pairs are waiting, they are read before the step, without logits.
"""


@dataclass(frozen=True)
class PairState:
    """A pair drafter's state.

    Attributes:
        decoding: the cache of true pairs. `pending` contains the tokens x_{t+1} of pairs that have
            not been read, except that of the root. `fed` contains the nodes that were read in this
            step, the root of a sequence first. The root's pair is a true pair, too.
        features: the features that each level reads, which come from the target or from the level
            before. They are stored as the keys of a cache with one head, in slot t for pair t.
        nodes: [M] the nodes of all sequences in the order in which they were read in this step.
        outputs: [M, K D] the outputs of all levels after each of these nodes.
        unread: the target's hidden states of committed tokens that are not in `features` yet.
    """

    decoding: Decoding
    features: SlotCache
    nodes: Ints
    outputs: Tensor
    unread: tuple[HiddenStates, ...] = ()

    def places(self, count: int) -> Ints:
        """Return [N] the index in `outputs` of each of a tree's `count` nodes.

        It is −1 for a node that has not been read.
        """
        found = np.full(count, -1)
        found[self.nodes] = np.arange(len(self.nodes))
        return found


class PairReader(Trainable[PairState]):
    """Base class of drafters that read true pairs, when a sequence is drafted for."""

    model: PairNet

    @cached_property
    def _rotates_alike(self) -> bool:
        """Return whether a token's rotary embedding is independent of the length of the text."""
        return all(part.fixed for part in self.model.modules() if isinstance(part, Rotary))

    def _empty(self, rows: int, slots: int) -> PairState:
        dtype, device = self._like.dtype, self._like.device
        levels = self.model.levels
        shapes = (self.model.shape,) * (self.model.depth * levels)
        cache = SlotCache(shapes, rows, dtype, device, ladder=self.capture.ladder)
        shape = LayerShape(1, self.model.width, 0)
        features = SlotCache((shape,) * levels, rows, dtype, device, ladder=self.capture.ladder)
        cache.reserve(slots)
        features.reserve(slots)
        return _drop_step(Decoding.empty(cache), features)

    @torch.inference_mode()
    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: PairState | None = None,
        rows: Ints | None = None,
    ) -> PairState:
        state = state or self._empty(len(prompts), max(map(len, prompts)) + SPARE_SLOTS)
        rest = [
            p[n + 1 :] for p, n in zip(prompts, state.decoding.cache.lengths.tolist(), strict=True)
        ]
        waiting = replace(state.decoding, pending=replace_slots(state.decoding.pending, rows, rest))
        return _drop_step(waiting, state.features, (*state.unread, hidden_states))

    def _remember(self, state: PairState, hidden_states: HiddenStates) -> None:
        """Store the true features of newly committed tokens."""
        new = self.model.fuse(
            {layer: h.to(state.features.dtype) for layer, h in hidden_states.hidden.items()}
        )
        state.features.insert(
            0, hidden_states.rows, hidden_states.positions, new[None], new.new_zeros(1, len(new), 0)
        )

    def _read(self, state: PairState, tokens: Sequence[Ints], rows: Ints, ends: int = 1) -> Tensor:
        """Read pairs after the cached ones; their keys and values are written to scratch slots.

        Args:
            state: the state. Sequences that get tokens must not have read nodes in this step.
            tokens: the tokens x_{t+1} of each sequence's pairs; empty for sequences that do not
                change.
            rows: [F] the slots for which outputs are returned.
            ends: the number of last pairs for which outputs are returned.

        Returns:
            [F, ends, K D] the outputs after the last pairs of each of these sequences. Entries
            without a pair are undefined.
        """
        cache, (pending, fed) = state.decoding.cache, (state.decoding.pending, state.decoding.fed)
        begin = cache.lengths + np.array(
            [len(f) and len(p) + len(f) for p, f in zip(pending, fed, strict=True)]
        )
        counts = np.array([len(t) for t in tokens])
        wanted, last = (
            to_device(rows, cache.device),
            state.outputs.new_zeros(len(rows), ends, state.outputs.shape[1]),
        )
        for at in range(0, int(counts.max()), CHUNK):
            feed, sizes = _true_pair_batch(
                cache, [t[at : at + CHUNK] for t in tokens], begin + np.minimum(at, counts)
            )
            out = self._pass_true(cache, feed, state.features, sizes)
            column = counts[rows][:, None] - at - ends + np.arange(ends)
            here = to_device((column >= 0) & (column < sizes[rows][:, None]), out.device)
            found = out[wanted[:, None], to_device(column.clip(0, out.shape[1] - 1), out.device)]
            last = torch.where(here[..., None], found, last)
        return last

    def _pass_true(
        self, cache: SlotCache, feed: ForwardBatch, features: SlotCache, sizes: Ints
    ) -> Tensor:
        """Return the outputs [R, n, K D] of all levels for true pairs.

        `sizes` [R] are the numbers of pairs. The output of each level is stored as input of the
        next.
        """
        outs = [self._pass(cache, feed, known_features(features, feed.padded_positions))[0]]
        for level in range(1, self.model.levels):
            features.reserve(int(feed.padded_positions.max()) + 2)
            rows, columns = np.nonzero(np.arange(feed.width) < sizes[:, None])
            at = [
                to_device(a, cache.device)
                for a in (rows, columns, feed.padded_positions[rows, columns] + 1)
            ]
            features.layer(level)[0][at[0], 0, at[2]] = outs[-1][at[0], at[1]]
            outs.append(
                self._pass(
                    cache, feed, known_features(features, feed.padded_positions, level), level
                )[0]
            )
        return torch.cat(outs, dim=-1)

    @in_phase("model")
    def _pass(
        self,
        cache: SlotCache,
        feed: ForwardBatch,
        features: Tensor,
        level: int = 0,
        selected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return a level's outputs [R, n, D] for pairs, twice.

        With `selected` [M], indices of pairs from 0 to R n − 1, return the outputs [M, D] and the
        logits [M, V′] of these pairs.
        """
        mask = cache.mask(feed)
        if level:
            hide_first_pairs(mask, feed, cache.lengths, level)
            cache = cache.shift_layers(level * self.model.depth)
        positions = to_device(feed.padded_positions, features.device)
        given = feed.padded_tokens, features, positions, mask, cache.writer(feed.starts, feed.width)
        if selected is not None:
            return self.model.with_logits(*given, selected)
        out: Tensor = self.model.at(level)(*given)
        return out, out

    @torch.inference_mode()
    def commit(
        self, state: PairState, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> PairState:
        """Store the accepted tokens; they are read only when the sequence is drafted for again.

        The target's features replace those that were drafted.
        """
        cache = state.decoding.cache
        pending = list(state.decoding.pending)
        fed = state.decoding.fed
        for root in range(tree.roots):
            row = int(tree.row[root])
            if fed[row].size:
                cache.keep(row, cache.lengths[row] + np.arange(len(pending[row]) + 1))
                pending[row] = tree.tokens[verdict.paths[root]]
            else:
                pending[row] = np.concatenate(
                    (pending[row], tree.tokens[verdict.committed_nodes(root)])
                )
        waiting = Decoding(cache, tuple(pending), (NO_TOKENS,) * cache.rows)
        outputs = state.outputs[:0] if len(state.nodes) else state.outputs
        return PairState(
            waiting, state.features, NO_TOKENS, outputs, (*state.unread, hidden_states)
        )

    @torch.inference_mode()
    def flush(self, state: PairState) -> PairState:
        """Store the features of newly committed tokens, and read pending pairs if there are many.

        The pairs of all sequences are read into the cache if one of them has more than
        `MAX_PENDING_PAIRS`; fewer are read by the next draft step. Within a step none are read.
        """
        if state.unread:
            self._remember(state, HiddenStates.concatenate(state.unread))
            state = replace(state, unread=())
        cache, pending = state.decoding.cache, state.decoding.pending
        if len(state.nodes):
            return state
        known = state.features.lengths - 1  # number of pairs, without the root's
        cache.truncate(
            np.maximum(known - [len(p) for p in pending], 0)
        )  # this function may have been called with the same state before
        if max(map(len, pending)) <= MAX_PENDING_PAIRS:
            return state
        if self.model.levels * self.model.depth == 1:
            for row, tokens in enumerate(pending):
                self._store(cache, state.features, row, tokens)
        else:
            self._read(state, pending, np.arange(cache.rows))
            for row, tokens in enumerate(pending):
                cache.keep(row, cache.lengths[row] + np.arange(len(tokens)))
        return _drop_step(Decoding.empty(cache), state.features)

    @in_phase("model")
    def _store(self, cache: SlotCache, features: SlotCache, row: int, tokens: Ints) -> None:
        """Cache the keys and values of the next pairs of a sequence, for tokens [n].

        For a network with a single layer, no other results of these pairs are needed later.
        """
        if not len(tokens):
            return
        begin = int(cache.lengths[row])
        slots = np.arange(begin, begin + len(tokens))
        known = features.layer(0)[0][row, 0, None, begin : begin + len(tokens)]
        ids, positions = (to_device(a, cache.device)[None] for a in (tokens, slots))
        nothing = known.new_zeros(1, 1, 1, 1)  # a mask that is not read
        keys, values = capture_first_kv(
            lambda stored: self.model(ids, known, positions, nothing, stored)
        )
        cache.insert(0, np.full(len(tokens), row), slots, keys[0], values[0])

    @override
    def truncate(self, state: PairState, lengths: Ints, rows: Ints | None = None) -> PairState:
        state.features.truncate(lengths)
        # The last pair contains the token after the cut, which may change.
        waiting = rewind(state.decoding, np.maximum(lengths - 1, 0), rows)
        return _drop_step(waiting, state.features, truncate_unread(state.unread, lengths))

    @override
    def select(self, state: PairState, rows: Ints, cache: SlotCache) -> PairState:
        decoding, features = (
            select_sequences(state.decoding, rows, cache),
            state.features.copy_sequences(rows, SPARE_SLOTS),
        )
        return _drop_step(decoding, features, move_unread(state.unread, rows, cache))

    def _train_pass(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: Cache,
        level: int = 0,
    ) -> Tensor:
        mask = additive(visible[None, None].to(features.device), features.dtype)
        positions = positions.to(features.device).expand(len(tokens), -1)
        out: Tensor = self.model.at(level)(tokens, features, positions, mask, cache)
        return out

    def _features(self, batch: Batch) -> Tensor:
        """Return the true features [B, T, D] in the dtype of the draft network."""
        return self.model.fuse({layer: h.to(self._like.dtype) for layer, h in batch.hidden.items()})


class PairDrafter(PairReader):
    """Drafts by using the output after a pair as the feature of the next pair."""

    @torch.inference_mode()
    @override
    def expand(
        self, state: PairState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, PairState]:
        if state.unread or not len(state.nodes):
            state = self.flush(state)
        new, places = unfed_nodes(tree.parents, frontier, state.nodes)
        logits, alike = None, np.array_equal(new, np.sort(frontier))
        new = frontier if alike else new  # in frontier order, so that logits need no reordering
        while new.size:  # one pass, unless the frontier's paths were not expanded before
            parents = tree.parents[new]
            roots = parents < 0
            ready = roots if roots.any() else places[parents] >= 0
            feed = self._feed_roots if roots.any() else self._feed
            state, logits = feed(state, tree, new[ready], places)
            alike = alike and bool(ready.all())
            new = new[~ready]
            places = state.places(len(tree))
        if logits is None or not alike:
            out = state.outputs.index_select(0, to_device(places[frontier], state.outputs.device))
            logits = self._logits(out, tree.depth[frontier])
        return draw_candidates(
            logits,
            k,
            drawing,
            tree.row[frontier],
            tree.depth[frontier],
            self.model.draft_vocabulary,
        ), state

    @torch.inference_mode()
    @override
    def layers(self, state: PairState, roots: Tree, depth: Ints) -> PairLayers | None:
        if self.model.levels > 1 or not self._rotates_alike:
            return None
        state = self.flush(state)
        passes = PairPasses(self.model, self.capture, self.recorded_weights, state.features)
        return PairLayers(
            passes, lambda decoding: replace(state, decoding=decoding), state.decoding, roots, depth
        )

    def _logits(self, out: Tensor, depths: Ints) -> Tensor:
        """Return the logits [F, V′] for the outputs [F, K D] of nodes.

        They are computed by the level that belongs to the node's depth.
        """
        if self.model.levels == 1:
            return self.model.logits(out)
        levels = np.minimum(depths, self.model.levels - 1)
        kinds = np.unique(levels).tolist()
        each = [to_device(np.flatnonzero(levels == level), out.device) for level in kinds]
        outs = out.chunk(self.model.levels, dim=-1)
        parts = [
            self.model.at(k).logits(outs[k][mine]) for k, mine in zip(kinds, each, strict=True)
        ]
        return torch.cat(parts)[torch.cat(each).argsort()]

    def _feed_roots(
        self, state: PairState, tree: Tree, roots: Ints, places: Ints
    ) -> tuple[PairState, Tensor | None]:
        """Read the waiting true pairs of some sequences, the root's last; return state and logits.

        The logits are those after the roots, or None if they have not been computed.
        """
        rows, pending = tree.row[roots], state.decoding.pending
        if self.model.levels == 1 and max(map(len, pending)) < CHUNK:
            layout = lay_out(state.decoding, tree, roots, state.outputs.device)
            return self._run_unlevelled_pass(
                state, layout, roots, known_features(state.features, layout.feed.padded_positions)
            )
        tokens, fed = [NO_TOKENS] * state.decoding.cache.rows, list(state.decoding.fed)
        for root, row in zip(roots.tolist(), rows.tolist(), strict=True):
            tokens[row], fed[row] = np.append(pending[row], tree.tokens[root]), np.array([root])
        return _append_fed_nodes(
            state, tuple(fed), roots, self._read(state, tokens, rows)[:, 0]
        ), None

    def _feed(
        self, state: PairState, tree: Tree, nodes: Ints, places: Ints
    ) -> tuple[PairState, Tensor | None]:
        """Read drafted nodes, each paired with the output after its parent.

        `places` [N] gives the index of each node's output. Return the state, and the logits after
        the nodes or None if they have not been computed.
        """
        device = state.outputs.device
        levels = self.model.levels
        depths = tree.depth[nodes]
        layout = lay_out(state.decoding, tree, nodes, device)
        outputs, each = state.outputs.view(-1, self.model.width), []
        for level in range(levels):
            if level < min(int(depths.min()), levels - 1):  # no deeper node uses it
                each.append(outputs.new_zeros(len(nodes), self.model.width))
                continue
            read = places[tree.parents[nodes]] * levels + np.where(
                depths <= level, level - 1, level
            )
            index = np.zeros(
                layout.feed.padded_positions.shape, np.int64
            )  # padding may have any feature
            index[layout.rows, layout.columns] = read
            flat = outputs.index_select(0, to_device(index.reshape(-1), device))
            features = flat.view(*index.shape, -1)
            if levels == 1:
                return self._run_unlevelled_pass(state, layout, nodes, features)
            each.append(
                layout.pick(self._pass(state.decoding.cache, layout.feed, features, level)[0])
            )
        return _append_fed_nodes(state, layout.fed, nodes, torch.cat(each, dim=-1)), None

    def _run_unlevelled_pass(
        self, state: PairState, layout: StepLayout, nodes: Ints, features: Tensor
    ) -> tuple[PairState, Tensor]:
        """Run one pass of a network that uses the same weights at each draft depth.

        Args:
            state: the drafter's state.
            layout: the arrangement of the tokens in the pass.
            nodes: indices of the nodes to read.
            features: the features that are paired with the tokens of the pass.

        Returns:
            The new state, and the logits [F, V′] after the nodes.
        """
        out, logits = self._pass(
            state.decoding.cache, layout.feed, features, selected=layout.padded_places
        )
        return _append_fed_nodes(state, layout.fed, nodes, out), logits

    @override
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        rows, count = batch.tokens.shape
        cuts = sorted(
            {max(int(s), 1) for s in block_starts(count, block, phase)}
        )  # there is no pair before the first token
        ends = [*cuts[1:], count]
        last = self.model.levels - 1
        at = torch.arange(1, count)
        features = self._features(batch)
        fed, made = features[:, :-1], []
        for level in range(last + 1):
            cache = DynamicCache()
            out = self._train_pass(
                batch.tokens[:, 1:], fed, at - 1, causal_pairs(at - 1, level), cache, level
            )
            made.append(
                nn.functional.pad(out, (0, 0, 1, 0)).to(features.dtype)
            )  # autocast returns a narrower dtype than that of the features
            fed = made[-1][:, :-1]
        states = made[last]
        owner, depth = (
            torch.zeros(count - 1, dtype=torch.long),
            torch.zeros(count - 1, dtype=torch.long),
        )
        true = torch.where(at > last, at, count)
        for d in range(last + 1, block):
            mine = torch.tensor(
                [s for s, e in zip(cuts, ends, strict=True) if s + d < e], dtype=torch.long
            )
            if not len(mine):
                break
            owner, depth = torch.cat((owner, mine)), torch.cat((depth, torch.full((len(mine),), d)))
            true = torch.cat(
                (true, torch.full((len(mine),), count))
            )  # no pair sees drafted pairs of other blocks
            visible = true[None, :] <= mine[:, None] + last
            visible |= (depth[None, :] > 0) & (owner[None, :] == mine[:, None])
            out = self._train_pass(
                batch.tokens[:, mine + d],
                states[:, mine + d - 1],
                mine + d - 1,
                visible,
                cache,
                last,
            )
            states[:, mine + d] = out.to(states.dtype)
        begun = (
            torch.searchsorted(torch.tensor(cuts), torch.arange(count), right=True)
            .sub(1)
            .clamp(min=0)
        )
        depths = (torch.arange(count) - torch.tensor(cuts)[begun]).clamp(min=0).repeat(rows).numpy()
        logits = self._logits(torch.cat(made, dim=-1).flatten(0, 1), depths).unflatten(
            0, (rows, count)
        )
        return expand_logits(logits, self.model.draft_vocabulary)

    def training_time_test(
        self, batch: Batch, features: Tensor, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the outputs of training passes that read the drafter's own features.

        The outputs of pass j equal those of decoding j steps after the last true feature. This is
        the training-time test of EAGLE-3 and the alignment of HASS. In pass j, every pair reads the
        output of pass j − 1 for the pair before. It sees the true pairs up to j places before
        itself, and drafted pairs after those. If the network has levels, the first passes are those
        of the levels, and each sees the pairs of its own pass.

        Args:
            batch: the texts.
            features: [B, T, D] the target's features, with or without noise.
            steps: the number of passes.

        Yields:
            The outputs [B, T, D] of a pass, and [T] whether a token has an output.
        """
        count = batch.tokens.shape[1]
        at = torch.arange(count - 1, device=features.device)
        fed = features[:, :-1]
        cache = DynamicCache()
        for j in range(steps):
            level = min(j, self.model.levels - 1)
            past = j - level  # passes of the level before
            if not past:
                cache = DynamicCache()
            before = (at[None, :] <= at[:, None] - past) | (
                (at[None, :] == at[:, None]) & (past > at[:, None])
            )
            places = [before & causal_pairs(at, level)]
            places += [at[None, :] == at[:, None] - past + i for i in range(1, past + 1)]
            out = self._train_pass(
                batch.tokens[:, 1:], fed, at, torch.cat(places, dim=1), cache, level
            )
            yield nn.functional.pad(out, (0, 0, 1, 0)), torch.arange(count, device=out.device) > j
            fed = nn.functional.pad(out[:, :-1], (0, 0, 1, 0))


def _true_pair_batch(
    cache: SlotCache, tokens: Sequence[Ints], starts: Ints
) -> tuple[ForwardBatch, Ints]:
    """Return the forward batch of each sequence's tokens, and the numbers of tokens [R].

    The tokens follow the entries of the sequence's cache before `starts` [R].
    """
    sizes = np.array([len(t) for t in tokens])
    rows = list(zip(cache.lengths.tolist(), starts.tolist(), sizes.tolist(), strict=True))
    places = [np.arange(start, start + n) for _, start, n in rows]
    visible = [
        np.tri(n, start - length + n, start - length, dtype=np.bool_) for length, start, n in rows
    ]
    scratch = [np.arange(length, start + n) for length, start, n in rows]
    return ForwardBatch.from_sequences(
        tokens, places, starts, visible, scratch, cache.device
    ), sizes


def _drop_step(
    decoding: Decoding, features: SlotCache, unread: tuple[HiddenStates, ...] = ()
) -> PairState:
    """Return the state of a step before anything is drafted."""
    known = features.layer(0)[0]
    return PairState(
        decoding,
        features,
        NO_TOKENS,
        known.new_zeros(0, len(features.shapes) * known.shape[-1]),
        unread,
    )


def _append_fed_nodes(
    state: PairState, fed: tuple[Ints, ...], nodes: Ints, outputs: Tensor
) -> PairState:
    """Return the state after further nodes [F] have been read, with their outputs [F, K D]."""
    before = state.decoding
    return PairState(
        Decoding(before.cache, before.pending, fed, before.unread),
        state.features,
        np.concatenate((state.nodes, nodes)),
        torch.cat((state.outputs, outputs)),
    )
