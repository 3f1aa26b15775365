"""A target that has written its text before: drafters and policies are judged along it without a pass of the model.

What is decoded is the same step by step, τ and the work of every step with it; seconds mean nothing. Of the logits only the
chosen token is true, and that only after nodes which stand on the text: no walk comes to another one. That holds above
temperature 0 too, as `match` chooses by noise that does not depend on the draft.
"""

from collections.abc import Mapping, Sequence
from typing import Self, final

import numpy as np
import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.evaluation.driven import Text
from draftree.models.cache import SlotCache
from draftree.models.target import Needs, Probes, Taps, Target, Verified
from draftree.tree import Ints, Tree, Verdict

CERTAIN = 1e4
"""The logit of the text's next token beside others of 0, more than any noise or penalty makes up for."""


@final
class Replayed(Target):
    """Stands in for a target while one text is written again, greedily or, with the seed that it was sampled with, by `match`.

    Args:
        target: wrote it.
        text: prompt and answer.
        hidden: for each entry 0 … L of `hidden_states` that a drafter will read, [T, D] along the text.
        cache: holds the keys and values of the text, for drafters that read them; all that is replayed shares it.
    """

    def __init__(self, target: Target, text: Text, hidden: Mapping[int, Tensor], cache: SlotCache) -> None:
        super().__init__(target.decoder, target.name, target.tokenizer, target.loading)
        self._hidden, self._cache, self._tokens = hidden, cache, text.tokens

    @classmethod
    def along(cls, target: Target, text: Text, layers: Sequence[int]) -> Self:
        """Reads a text in one pass.

        Args:
            target: wrote it.
            text: prompt and answer.
            layers: entries of `hidden_states` that drafters will read, negative ones counted from the end.
        """
        cache = target.new_cache(1, len(text.tokens))
        needs = Needs(tuple({target.decoder.hidden_index(layer) for layer in layers}))
        return cls(target, text, target.prefill(cache, [text.tokens], needs).taps.hidden, cache)

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """The text's own cache, with nothing committed."""
        self._cache.truncate(np.zeros(rows, np.int64))
        return self._cache

    def prefill(self, cache: SlotCache, prompts: Sequence[Ints], needs: Needs, rows: Ints | None = None) -> Verified:
        positions = np.arange(len(prompts[0]))
        cache.lengths[0] = len(positions)
        return Verified(self._after(positions[-1:]), self._taps(cache, positions, prompts[0], needs))

    def verify(self, cache: SlotCache, tree: Tree, needs: Needs, probes: Probes | None = None) -> Verified:
        if probes is not None:
            raise UserError("the drafter sends probes, which need a pass of the target: its texts cannot be replayed")
        positions = cache.lengths[0] + tree.depth
        return Verified(self._after(positions), self._taps(cache, positions, tree.tokens, needs))

    def commit(self, cache: SlotCache, tree: Tree, verdict: Verdict) -> None:
        cache.lengths[0] += len(verdict.kept(0))

    def _taps(self, cache: SlotCache, positions: Ints, tokens: Ints, needs: Needs) -> Taps:
        at = torch.from_numpy(self._inside(positions)).to(cache.device)
        hidden = {layer: self._hidden[self.decoder.hidden_index(layer)][at] for layer in needs.hidden}
        return Taps(hidden, np.zeros(len(positions), np.int64), positions, tokens, cache)

    def _after(self, positions: Ints) -> Tensor:
        """[N, V] logits in which the text's next token stands out."""
        following = np.append(self._tokens[1:], 0)[self._inside(positions)]
        return torch.zeros(len(positions), self.decoder.vocab).scatter_(1, torch.from_numpy(following)[:, None], CERTAIN)

    def _inside(self, positions: Ints) -> Ints:
        return np.minimum(positions, len(self._tokens) - 1)
