"""Logits processors that transformers lacks.

Each is a function of a text and its scores alone: it keeps nothing from call to call and leaves its
input as it is. So it is right at every node of a tree, in whatever order the nodes are visited, as
long as it is shown the node's own text.

Shapes: R texts, n ids of a text, V vocabulary. What a processor is shown is ids [R, n] with scores
[R, V].
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from typing_extensions import override


class WrappedProcessor(LogitsProcessor):
    """A processor that calls another processor, for a text or batch other than the current one.

    Attributes:
        inner: the other processor, whose name is used in messages.
    """

    inner: LogitsProcessor


def processor_name(processor: LogitsProcessor) -> str:
    """Return the name of a processor's class for messages."""
    while isinstance(processor, WrappedProcessor):
        processor = processor.inner
    return type(processor).__name__


class _Penalty(LogitsProcessor):
    """Subtract from logits by the number of times that tokens occur in the response.

    Args:
        penalty: the penalty; a negative one favours tokens that have occurred.
        start: number of ids before the response, which are padding and prompt; they are not
            counted.
    """

    def __init__(self, penalty: float, start: int) -> None:
        self._penalty, self._start = penalty, start

    def _occurrences(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the number of occurrences [R, V] of each token in the response.

        The result has the dtype of the scores.
        """
        response = input_ids[:, self._start :]
        return torch.zeros_like(scores).scatter_add_(
            1, response, torch.ones_like(response, dtype=scores.dtype)
        )


@final
class FrequencyPenalty(_Penalty):
    """Subtract `penalty` from a token's logit for each of its occurrences in the response.

    This is OpenAI's `frequency_penalty`.
    """

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - self._penalty * self._occurrences(input_ids, scores)


@final
class PresencePenalty(_Penalty):
    """Subtract `penalty` from the logit of every token that occurs in the response.

    This is OpenAI's `presence_penalty`.
    """

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - self._penalty * (self._occurrences(input_ids, scores) > 0)


TENSORS: frozenset[type] = frozenset(
    (
        FrequencyPenalty,
        PresencePenalty,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )
)
"""Processors that depend only on a text and its scores, and never wait for the device."""


@final
class ForcedBeginning(LogitsProcessor):
    """Force the response to begin with given tokens; later tokens are free.

    Args:
        tokens: the ids with which the response begins.
        start: number of ids before the response, which are padding and prompt.
    """

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self._tokens, self._start = list(tokens), start

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self._at(input_ids.shape[1])
        if token is None:
            return scores
        # 0 and not the token's own score, as transformers' forced tokens: an earlier processor may
        # have forbidden it.
        return torch.full_like(scores, -torch.inf).index_fill(
            1, torch.tensor([token], device=scores.device), 0.0
        )

    def forced_token(self, ids: Sequence[int]) -> int | None:
        """Return the token that must come after a text, or None if any may."""
        return self._at(len(ids))

    def _at(self, length: int) -> int | None:
        place = length - self._start
        return self._tokens[place] if 0 <= place < len(self._tokens) else None
