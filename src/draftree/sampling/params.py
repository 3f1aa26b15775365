"""Sampling parameters: temperature, truncation, seed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from typing_extensions import override

from draftree.sampling.param_fields import Choice
from draftree.sampling.warpers import make_reproducible
from draftree.utils.validated_dataclass import is_list_of, knob, optional


@dataclass(frozen=True)
class Sampling(Choice):
    """Settings that turn the target's logits into the distribution p, and the sampling seed.

    Attributes:
        temperature: 0 for greedy decoding, else a divisor of the logits.
        top_k: number of the likeliest tokens that are kept; 0 keeps all.
        top_p: the least total probability of the likeliest tokens that are kept; 1 keeps all.
        min_p: the least probability of a kept token, relative to that of the likeliest token; 0
            keeps all.
        typical_p: the least total probability of the most typical tokens that are kept; 1 keeps
            all.
        seed: seed of the keyed noise, 0 … 2⁶⁴ − 1.
        warpers: processors that turn logits into p, instead of the options above.

    Raises:
        UserError: a value is out of its range.
    """

    warpers: tuple[LogitsProcessor, ...] | None = knob(
        None,
        rule=("none, or logits processors", optional(lambda value: is_list_of(value, callable))),
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for f in fields(Choice):  # transformers requires Python numbers
            object.__setattr__(
                self, f.name, (int if f.type is int else float)(getattr(self, f.name))
            )

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return self.temperature == 0

    @property
    def knobs(self) -> Self:
        """Return a copy without seed and warpers, which differ from call to call."""
        return replace(self, seed=0, warpers=None)

    @cached_property
    def processors(self) -> Sequence[LogitsProcessor]:
        """Return transformers' warpers in the order of `generate`, after `make_reproducible`.

        Greedy decoding has none.
        """
        if self.greedy:
            return ()
        if self.warpers is not None:
            return make_reproducible(self.warpers)
        steps: list[
            tuple[Any, Any, Any]
        ] = [  # a warper, its value, and the one that changes nothing
            (TemperatureLogitsWarper, self.temperature, 1),
            (TopKLogitsWarper, self.top_k, 0),
            (TopPLogitsWarper, self.top_p, 1),
            (MinPLogitsWarper, self.min_p, 0),
            (TypicalLogitsWarper, self.typical_p, 1),
        ]
        return make_reproducible(
            [warper(value) for warper, value, nothing in steps if value != nothing]
        )


GREEDY = Sampling()
"""Greedy decoding, which always chooses the likeliest token."""
