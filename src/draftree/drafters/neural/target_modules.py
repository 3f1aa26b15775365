"""The embedding and the LM head of the target, as modules of a draft network.

Shapes: R rows, n tokens, D hidden size, V vocabulary, V′ draft vocabulary.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from draftree.drafters.neural.draft_vocabulary import (
    most_frequent_tokens,
    offsets,
    vocabulary_from_offsets,
)
from draftree.models.accelerate_dispatch import move_to_device
from draftree.target.target import Target
from draftree.tree import DraftVocab, Ints


@final
class TargetEmbedding(nn.Module):
    """A module that calls the target's embedding and has no weights.

    Args:
        target: the target.
        like: returns a tensor that has the dtype and device of the result.
    """

    def __init__(self, target: Target, like: Callable[[], Tensor]) -> None:
        super().__init__()
        self._target, self._like = target, like

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [R, n, D] of tokens [R, n]."""
        decoder, like = self._target.decoder, self._like()
        embedded = decoder.embed(move_to_device(tokens, decoder.device))
        return move_to_device(embedded, like.device).to(like.dtype)


@final
class TargetHead(nn.Module):
    """A module that computes the target's LM head, for a draft vocabulary or for all tokens.

    It has no weights except the map `d2t` from V′ to V.

    Args:
        target: the target.
        size: V′, the size of the draft vocabulary; 0 for all tokens.
        raw: whether to omit computations that the target applies to its logits, such as scaling.
            The network that contains this module then does them.

    Attributes:
        d2t: [V′] differences between the target's ids and 0 … V′ − 1, as in EAGLE-3's checkpoints;
            None for the whole vocabulary.
    """

    d2t: Tensor | None

    def __init__(self, target: Target, size: int = 0, raw: bool = False) -> None:
        super().__init__()
        self._target, self._raw = target, raw
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long) if size else None)
        self._rows: Callable[[Tensor], Tensor] | None = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._rows = None  # of another map

    @property
    def weight(self) -> Tensor:
        """Return the target's weight [V, D], from whose shape callers read the vocabulary size."""
        return self._target.decoder.head_weight

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the draft vocabulary; None if all tokens can be drafted."""
        return vocabulary_from_offsets(self.d2t, self._target)

    def fit_vocabulary(self, counts: Ints) -> None:
        """Choose the tokens with the highest counts [V] as the draft vocabulary."""
        if self.d2t is not None:
            self.d2t.copy_(offsets(torch.from_numpy(most_frequent_tokens(counts, len(self.d2t)))))
            self._rows = None

    def forward(self, states: Tensor) -> Tensor:
        """Return logits […, V′] in the target's dtype.

        The input […, D] is in the space of the output of the target's final norm.
        """
        if self._rows is None:
            part = self.draft_vocabulary
            self._rows = self._target.decoder.head_for(
                None if part is None else part.ids, self._raw, for_drafts=True
            )
        decoder = self._target.decoder
        logits = self._rows(move_to_device(states, decoder.device).to(decoder.dtype))
        return move_to_device(logits, states.device)
