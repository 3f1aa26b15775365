"""Estimate how long a run will take, from learnt or estimated costs."""

import math
from collections.abc import Sequence
from typing import Any

from draftree.cost_estimate import learnt_costs
from draftree.drafters.base import Drafter
from draftree.request import Request
from draftree.target.target import Target

TIMED_PASSES = 12
"""Estimated time for reading the contexts and for one round of timed passes and draft steps. The
unit is one pass over 128 tokens of each sequence."""
BACKWARD_FACTOR = 3.0
"""Time of a drafter's training step divided by the time of its forward pass. The backward pass is
assumed to take twice the time of the forward pass."""


def plain_seconds(target: Target, drafter: Drafter[Any], requests: Sequence[Request]) -> float:
    """Estimate the seconds of plain decoding for texts one after another, at full length.

    The costs of a pass are learnt on this machine or estimated. Texts that end earlier, batches and
    drafts reduce the time.

    Args:
        target: target that generates the texts.
        drafter: any drafter for the target; the costs are looked up with it.
        requests: the requests whose texts would be generated.
    """
    costs = learnt_costs(target, drafter)
    seconds = 0.0
    for request in requests:
        context = len(request.prompt) + request.max_new_tokens // 2
        seconds += request.max_new_tokens * costs.at(context, 1).token
    return seconds


def batched_seconds(
    target: Target, drafter: Drafter[Any], texts: int, tokens: int, batch: int = 1
) -> float:
    """Estimate the seconds of plain decoding for texts in batches, each at full length.

    Args:
        target: target that generates the texts.
        drafter: any drafter for the target; the costs are looked up with it.
        texts: number of texts.
        tokens: number of tokens in each text.
        batch: number of texts in a batch.
    """
    costs = learnt_costs(target, drafter).at(tokens, 1)
    return math.ceil(texts / batch) * tokens * costs.target_seconds(min(batch, texts))


def timed_seconds(
    target: Target, drafter: Drafter[Any], rows: Sequence[int], seconds: float
) -> float:
    """Estimate the seconds that timing passes over different numbers of tokens takes.

    Args:
        target: target whose passes are timed.
        drafter: drafter whose draft steps are timed.
        rows: batch sizes for which passes are timed.
        seconds: seconds that each batch size takes with a fast model.
    """
    costs = learnt_costs(target, drafter).at(1, 1)
    wide = sum(costs.target_seconds(128 * several) for several in rows)
    return len(rows) * seconds + 2 * TIMED_PASSES * wide


def training_seconds(
    target: Target, drafter: Drafter[Any], tokens: int, epochs: float, read_once: bool
) -> float:
    """Estimate the seconds of training a drafter.

    Methods that unroll several draft steps take longer.

    Args:
        target: target whose hidden states the drafter learns from.
        drafter: drafter that is trained.
        tokens: number of tokens in all samples.
        epochs: number of passes over the samples.
        read_once: whether the target reads the samples only once instead of in each epoch.
    """
    costs = learnt_costs(target, drafter).at(128, 1)
    reading, learning = (
        costs.target_seconds(128) / 128,
        BACKWARD_FACTOR * costs.draft_seconds(32) / 32,
    )
    return tokens * (reading * (1 if read_once else epochs) + learning * epochs)
