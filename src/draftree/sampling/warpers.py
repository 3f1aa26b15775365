"""Logits warpers of transformers with the same results on every device.

On a GPU, PyTorch divides by a number by multiplying with its reciprocal. It sums a softmax or a
cumulative sum in an order that differs between devices, and for sums between runs. Here quotients
are of tensors, and probabilities are added up as integers.

Shapes: R texts, V vocabulary. Warpers are called with ids that they do not look at and scores
[R, V], or […, V].
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from typing_extensions import override

from draftree.kernels.log_exp import exp
from draftree.sampling import devices
from draftree.tree import Bools, Floats

LARGEST_WEIGHT = 2.0**43
"""The integer weight of the likeliest token; a million tokens of this weight fit into an int64."""
NEGLIGIBLE = -40.0
"""Log probability, relative to the likeliest token's, from which on the integer weight is 0."""


@final
class Temperature(TemperatureLogitsWarper):
    """Divide scores by the temperature."""

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / scores.new_full((1,), self.temperature)


@final
class MinP(MinPLogitsWarper):
    """Remove tokens whose probability is below a share of the likeliest token's.

    The differences of scores are compared.
    """

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        exact = (scores.cpu() if devices.on_host(scores.device) else scores).double()
        unlikely = exact - exact.amax(dim=-1, keepdim=True) < math.log(self.min_p)
        return scores.masked_fill(unlikely.to(scores.device), self.filter_value)


@final
class TopP(TopPLogitsWarper):
    """Remove the least likely tokens that have at most probability 1 − p together.

    Probabilities are integer multiples of 2⁻⁴³ of the likeliest token's. Of equal ones the higher
    id is removed first.
    """

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if devices.on_host(scores.device):
            rows = scores.cpu().double().flatten(0, -2).numpy()
            mask = torch.from_numpy(np.stack([self._of_one(row) for row in rows])).view(
                scores.shape
            )
            return scores.masked_fill(mask.to(scores.device), self.filter_value)
        return scores.masked_fill(self.unlikely(scores), self.filter_value)

    def unlikely(self, scores: Tensor) -> Tensor:
        """Return […, V] True at tokens that are removed, without waiting for the device.

        Nothing is removed if the largest score is not finite.
        """
        best = scores.amax(dim=-1, keepdim=True)
        distance = (scores.double() - best.double()).masked_fill(~best.isfinite(), 0.0)
        weights = (exp(distance.clamp(min=NEGLIGIBLE)) * LARGEST_WEIGHT).long()
        total = weights.sum(dim=-1, keepdim=True)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        weights = weights.gather(-1, order)
        out = (
            total - weights.cumsum(dim=-1) + weights <= (total.double() * (1.0 - self.top_p)).long()
        )
        out[..., : self.min_tokens_to_keep] = False
        unlikely: Tensor = out.scatter(-1, order, out) & best.isfinite()
        return unlikely

    def _of_one(self, scores: Floats) -> Bools:
        """Return [V] True at the tokens that are removed from one distribution, on the host.

        Tokens that are certainly removed need not be sorted.
        """
        best, out = scores.max(), np.zeros(len(scores), np.bool_)
        if not np.isfinite(best):
            return out
        weights = (exp(np.maximum(scores - best, NEGLIGIBLE)) * LARGEST_WEIGHT).astype(np.int64)
        total = weights.sum()
        limit = int(np.float64(total) * (1.0 - self.top_p))
        likely = weights > limit // len(scores)  # the others have at most the limit together
        least = (
            scores[likely].min() if np.count_nonzero(likely) >= self.min_tokens_to_keep else -np.inf
        )
        some = np.flatnonzero(scores >= least)
        order = some[np.argsort(-scores[some], kind="stable")]
        gone = total - np.cumsum(weights[order]) + weights[order] <= limit
        gone[: self.min_tokens_to_keep] = False
        out[scores < least] = True
        out[order[gone]] = True
        return out


@final
class Typical(TypicalLogitsWarper):
    """Remove the least typical tokens, on the host.

    It is computed there because it sums values that are sorted by a function of all scores.
    """

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        there: Tensor = super().__call__(input_ids.cpu(), scores.cpu())
        return there.to(scores.device)


REPRODUCIBLE_WARPERS: dict[type, Callable[[Any], LogitsProcessor]] = {
    TemperatureLogitsWarper: lambda step: Temperature(step.temperature),
    TopPLogitsWarper: lambda step: TopP(step.top_p, step.filter_value, step.min_tokens_to_keep),
    TypicalLogitsWarper: lambda step: Typical(
        step.mass, step.filter_value, step.min_tokens_to_keep
    ),
    MinPLogitsWarper: lambda step: (
        MinP(step.min_p, step.filter_value) if step.min_p and step.min_tokens_to_keep == 1 else step
    ),
}
"""Replacements of transformers' warpers with the same results on every device."""
WARPERS: frozenset[type] = frozenset((Temperature, TopKLogitsWarper, TopP, MinP))
"""Warpers that process any number of texts at once, and never wait for the device."""


def make_reproducible(steps: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Return warpers after replacing each that has a counterpart in `REPRODUCIBLE_WARPERS`."""
    return tuple(
        REPRODUCIBLE_WARPERS[type(step)](step) if type(step) in REPRODUCIBLE_WARPERS else step
        for step in steps
    )


def apply_warpers(logits: Tensor, steps: Sequence[LogitsProcessor]) -> Tensor:
    """Return logits […, V] after warpers, in float32 unless they are float64.

    Without warpers they are returned unchanged.
    """
    if not steps:
        return logits
    scores = logits if logits.dtype is torch.float64 else logits.float()
    nobody = torch.zeros(
        (len(logits), 0), dtype=torch.int64, device=logits.device
    )  # no warper reads the text
    for step in steps:
        scores = step(nobody, scores)
    return scores
