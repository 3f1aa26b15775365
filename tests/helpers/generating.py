"""What the tests of `generate` share: prompts, and processors and criteria of a user's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from architectures import VOCAB

PAD, EOS = 0, 2
TEXTS = (
    torch.tensor([7, 5, 9, 5, 9, 11]),
    torch.tensor([3, 8, 8]),
    torch.tensor([12, 5, 9, 30, 31]),
)
Options = dict[str, Any]


def padded(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Prompts of several lengths, padded on the left."""
    n = max(map(len, texts))
    ids = torch.stack([torch.cat((torch.full((n - len(t),), PAD), t)) for t in texts])
    mask = torch.stack([(torch.arange(n) >= n - len(t)).long() for t in texts])
    return {"input_ids": ids, "attention_mask": mask}


def plans(prompted: Mapping[str, Tensor], sequences: Tensor) -> list[list[int]]:
    """What the model has read of each row, and what was written behind it."""
    mask = (
        prompted["attention_mask"].repeat_interleave(
            len(sequences) // len(prompted["attention_mask"]), 0
        )
        != 0
    )
    kept = torch.nn.functional.pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=True)
    return [ids[keep].tolist() for ids, keep in zip(sequences, kept, strict=True)]


def worst(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of two tuples of scores; infinities must be at the same places."""
    assert len(one) == len(other)
    a, b = torch.stack(list(one)), torch.stack(list(other))
    assert a.dtype == b.dtype
    assert torch.equal(a.isinf(), b.isinf())
    return float((a - b)[~a.isinf()].abs().max())


class Shifting(LogitsProcessor):
    """Forbids another token at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, (7 * self.calls + torch.arange(30)) % VOCAB] = -torch.inf
        return scores


class Rowwise(LogitsProcessor):
    """Favours other tokens in every row, by the whole text as it is shown."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        liked = (input_ids.sum(1) + 13 * torch.arange(len(scores))) % VOCAB
        return scores.scatter_add(
            1, liked[:, None], torch.full((len(scores), 1), 6.0, dtype=scores.dtype)
        )


class Divisible(StoppingCriteria):
    """Ends a text where the sum of its ids, padding and prompt too, divides by a number."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids + 1).sum(1) % self.by == 0


class Counting(StoppingCriteria):
    """Ends all texts at a call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.calls -= 1
        return self.calls == 0


def trie(batch: int, ids: Tensor) -> list[int]:
    """Tokens allowed in a row after its text; asked about a text that cannot stand in that row, it fails."""
    start = {0: 7, 1: 3, 2: 12}
    assert start[batch] == next(i for i in ids.tolist() if i != PAD)
    return [(int(ids[-1]) * 5 + batch + i) % VOCAB for i in range(12)]


class Forcing(LogitsProcessor):
    """Forces a token after every even one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 9] = torch.where(input_ids[:, -1] % 2 == 0, torch.inf, scores[:, 9])
        return scores


class Forbidding(LogitsProcessor):
    """Forbids every token behind a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, -torch.inf)
