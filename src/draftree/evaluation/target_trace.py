"""A recording of a target along texts: its tokens, hidden states, keys and values.

Shapes: R texts, T tokens of all texts, M places, N nodes, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from draftree.models.hf_runner import UNNORMED
from draftree.models.kv_cache import SlotCache
from draftree.target.target import (
    LAST,
    HiddenStates,
    HiddenStateSpec,
    Probes,
    Target,
    VerificationResult,
)
from draftree.tree import AcceptResult, Ints, Tree


@dataclass(frozen=True)
class TokenText:
    """Store one text: its token ids, and the number of prompt tokens `start`, at least 1."""

    tokens: Ints
    start: int


@dataclass(frozen=True)
class Recording:
    """Replay the hidden states, keys and values that a target computed for given texts.

    No pass of the target is run: all results come from one recorded pass over the texts. Drafters
    that use probes need the target itself.

    Attributes:
        target: the target that was recorded.
        texts: [R] the recorded texts.
        hidden: hidden states [T, D] of all tokens, one text after the other, by index into
            `hidden_states`.
        cache: cache with the texts' keys and values; all replays share it.
        given: maps an index to the index whose states are returned instead, to test a drafter with
            wrong layers.
        later: each token gets the states of the token `later` positions after it, to test a drafter
            with wrong positions. The shift never leads beyond the tokens that the target has read.
    """

    target: Target
    texts: tuple[TokenText, ...]
    hidden: Mapping[int, Tensor]
    cache: SlotCache
    given: Mapping[int, int] = field(default_factory=dict)
    later: int = 0

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, texts: Sequence[TokenText], layers: Sequence[int] = ()) -> Self:
        """Record all texts in one pass of the target.

        `layers` are entries of `hidden_states`. The last entry is always recorded.
        """
        index = target.decoder.hidden_index
        needs = HiddenStateSpec(
            hidden=tuple(dict.fromkeys(u if u == UNNORMED else index(u) for u in (*layers, LAST)))
        )
        cache = target.new_cache(len(texts), max(len(t.tokens) for t in texts))
        hidden_states = target.prefill(cache, [t.tokens for t in texts], needs).hidden_states
        return cls(
            target,
            tuple(texts),
            {index(layer): h for layer, h in hidden_states.hidden.items()},
            cache,
        )

    @cached_property
    def _begins(self) -> Ints:
        """Return [R] the index of each text's first token in the packed tensors."""
        return np.cumsum([0, *(len(t.tokens) for t in self.texts[:-1])])

    @cached_property
    def _lasts(self) -> Ints:
        """Return [R] the position of each text's last token."""
        return np.array([len(t.tokens) - 1 for t in self.texts], np.int64)

    def after(self, rows: Ints, positions: Ints) -> Tensor:
        """Return [M, V] logits after the given positions; beyond a text's end, those at its end."""
        decoder = self.target.decoder
        at = torch.from_numpy(self._begins[rows] + np.minimum(positions, self._lasts[rows])).to(
            decoder.device
        )
        return decoder.head(self.hidden[decoder.hidden_index(LAST)][at])

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """Return the recorded cache with no committed tokens."""
        self.cache.truncate(np.zeros(rows, np.int64))
        return self.cache

    def prefill(
        self, cache: SlotCache, prompts: Sequence[Ints], needs: HiddenStateSpec
    ) -> VerificationResult:
        """Return the recorded hidden states of prompts, without logits; see `Target.prefill`."""
        rows = np.concatenate([np.full(len(p), r) for r, p in enumerate(prompts)])
        positions = np.concatenate([np.arange(len(p)) for p in prompts])
        cache.lengths[:] = [len(p) for p in prompts]
        return VerificationResult(
            torch.empty(0),
            self.hidden_states(cache, rows, positions, np.concatenate(list(prompts)), needs),
        )

    def verify(
        self, cache: SlotCache, tree: Tree, needs: HiddenStateSpec, probes: Probes | None = None
    ) -> VerificationResult:
        """Return the recorded outputs at a tree's positions; see `Target.verify`."""
        positions = cache.lengths[tree.row] + tree.depth
        return VerificationResult(
            self.after(tree.row, positions),
            self.hidden_states(cache, tree.row, positions, tree.tokens, needs),
        )

    def commit(self, cache: SlotCache, tree: Tree, verdict: AcceptResult) -> None:
        """Advance in the texts by the accepted tokens; see `Target.commit`."""
        for root in range(tree.roots):
            cache.lengths[tree.row[root]] += len(verdict.committed_nodes(root))

    def hidden_states(
        self, cache: SlotCache, rows: Ints, positions: Ints, tokens: Ints, needs: HiddenStateSpec
    ) -> HiddenStates:
        """Return the recorded hidden states at the given positions of the given texts.

        Positions after the end of a text get the hidden states of its last token.
        """
        last = {r: int(positions[rows == r].max()) for r in np.unique(rows).tolist()}
        ends = np.minimum(np.array([last[r] for r in rows.tolist()]), self._lasts[rows])
        at = torch.from_numpy(self._begins[rows] + np.clip(positions + self.later, 0, ends)).to(
            cache.device
        )
        index = {layer: self.target.decoder.hidden_index(layer) for layer in needs.hidden}
        hidden = {layer: self.hidden[self.given.get(i, i)][at] for layer, i in index.items()}
        return HiddenStates(hidden, rows, positions, tokens, cache)
