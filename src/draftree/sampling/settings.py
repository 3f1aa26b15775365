"""How tokens are chosen: temperature, truncation, penalties."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftree.boundary.arguments import COUNT, Rule, check, optional, real, several, whole

SHARE: Rule = "a number in (0, 1]", lambda v: real(v) and 0 < v <= 1
RULES: dict[str, Rule] = {
    "temperature": ("a finite number of at least 0", lambda v: real(v) and v >= 0),
    "top_k": COUNT,
    "top_p": SHARE,
    "min_p": ("a number in [0, 1]", lambda v: real(v) and 0 <= v <= 1),
    "typical_p": SHARE,
    "seed": ("a whole number in 0 … 2⁶⁴ − 1", lambda v: whole(v, 0, 2**64 - 1)),
}
"""What a setting may be, in words and as a test."""


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become p, and the seed of the draws.

    Attributes:
        temperature: 0 for greedy decoding, else a divisor of the logits.
        top_k: how many of the likeliest tokens are kept; 0 keeps all.
        top_p: the least mass of likeliest tokens that is kept; 1 keeps all.
        min_p: the least probability kept, relative to the likeliest token; 0 keeps all.
        typical_p: the least mass of the most typical tokens that is kept; 1 keeps all.
        seed: seed of the keyed noise, 0 … 2⁶⁴ − 1.
        warpers: what makes p of the logits, instead of what the knobs above stand for.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    warpers: tuple[LogitsProcessor, ...] | None = None

    def __post_init__(self) -> None:
        check(self, RULES | {"warpers": ("none, or logits processors", optional(lambda v: several(v, callable)))})
        for name in RULES:  # transformers' processors take Python's own numbers alone
            kind = int if name in ("top_k", "seed") else float
            object.__setattr__(self, name, kind(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def knobs(self) -> Self:
        """The same without what differs from call to call."""
        return replace(self, seed=0, warpers=None)

    @cached_property
    def processors(self) -> Sequence[LogitsProcessor]:
        """Hugging Face's own processors, in the order `generate` applies them; none for greedy decoding."""
        if self.greedy:
            return ()
        if self.warpers is not None:
            return self.warpers
        steps: list[LogitsProcessor] = []
        if self.temperature != 1:
            steps.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            steps.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            steps.append(MinPLogitsWarper(self.min_p))
        if self.typical_p < 1:
            steps.append(TypicalLogitsWarper(self.typical_p))
        return tuple(steps)


GREEDY = Sampling()
"""The likeliest token every time."""
