"""A target that replays recorded texts, so that policies are compared without model passes.

What is decoded is the same step by step, τ and the work of every step with it; seconds mean
nothing. Of the logits only the chosen token is true, and that only after nodes which stand on the
text: no walk comes to another one. That holds above temperature 0 too, as `match` chooses by noise
that does not depend on the draft.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.errors import UserError
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.models.forward_batch import Chunk
from draftree.models.kv_cache import SlotCache
from draftree.target.target import HiddenStateSpec, Probes, Target, VerificationResult
from draftree.tree import AcceptResult, Ints, Tree

NEXT_TOKEN_LOGIT = 1e4
"""Logit of the text's next token. All other logits are 0. The value exceeds any noise or
penalty."""


@final
class ReplayTarget(Target):
    """Replace a target while one recorded text is generated again, without passes of the model.

    The text is reproduced by greedy decoding or, with the seed of the original sampling, by the
    acceptor `match`.

    Args:
        recording: recording with exactly one text.
    """

    def __init__(self, recording: Recording) -> None:
        target = recording.target
        super().__init__(target.decoder, target.name, target.tokenizer, target.loading)
        self._recording, (self._text,) = recording, recording.texts

    @classmethod
    def along(cls, target: Target, text: TokenText, layers: Sequence[int]) -> Self:
        """Record a text in one pass of the target, and return a replay of it.

        Args:
            target: the target that generated it.
            text: the text, with prompt and answer.
            layers: entries of `hidden_states` that drafters will read; negative numbers count from
                the end.
        """
        return cls(Recording.of(target, [text], layers))

    @override
    def new_cache(self, rows: int, slots: int) -> SlotCache:
        return self._recording.new_cache(rows, slots)

    @override
    def prefill(
        self,
        cache: SlotCache,
        prompts: Sequence[Ints],
        needs: HiddenStateSpec,
        rows: Ints | None = None,
        more: int = 0,
    ) -> VerificationResult:
        found = self._recording.prefill(cache, prompts, needs)
        return replace(found, packed=self._after(np.array([len(prompts[0]) - 1])))

    @override
    def verify(
        self,
        cache: SlotCache,
        tree: Tree,
        needs: HiddenStateSpec,
        probes: Probes | None = None,
        chunks: Sequence[Chunk] = (),
    ) -> VerificationResult:
        assert not chunks, "one recorded text is written at a time"
        if probes is not None:
            raise UserError(
                "the drafter uses probes, which need a pass of the target: it cannot be replayed"
            )
        if needs.top:
            raise UserError(
                "the drafter reads rejected nodes, which needs a pass of the target: it cannot be replayed"
            )
        positions = cache.lengths[0] + tree.depth
        hidden_states = self._recording.hidden_states(
            cache, tree.row, positions, tree.tokens, needs
        )
        return VerificationResult(self._after(positions), hidden_states)

    @override
    def commit(self, cache: SlotCache, tree: Tree, verdict: AcceptResult) -> None:
        self._recording.commit(cache, tree, verdict)

    def _after(self, positions: Ints) -> Tensor:
        """Return [N, V] logits that strongly favour the text's next token after each position."""
        following = np.append(self._text.tokens[1:], 0)[
            np.minimum(positions, len(self._text.tokens) - 1)
        ]
        return torch.zeros(len(positions), self.decoder.vocab).scatter_(
            1, torch.from_numpy(following)[:, None], NEXT_TOKEN_LOGIT
        )
