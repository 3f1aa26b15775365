"""Estimate how long a run will take, from learnt or estimated costs."""

import math
from collections.abc import Sequence
from typing import Any

from draftree.cost_estimate import learnt_costs
from draftree.drafters.base import Drafter
from draftree.request import Request
from draftree.target.target import Target

TIMED = 12
"""Estimated time of reading the contexts and one round of passes and draft steps, in passes over
128 tokens of a sequence."""
BACKWARD = 3.0
"""A training step of a drafter over its forward pass: the backward pass takes twice as long as
that."""


def plain_seconds(target: Target, drafter: Drafter[Any], requests: Sequence[Request]) -> float:
    """Return the seconds of plain decoding for texts one after another, at full length.

    The costs are those learnt on this machine, or an estimate. Texts that end earlier, batches and
    drafters take less.

    Args:
        target: the target.
        drafter: any drafter for it.
        requests: the texts.
    """
    costs = learnt_costs(target, drafter)
    seconds = 0.0
    for request in requests:
        context = len(request.prompt) + request.max_new_tokens // 2
        seconds += request.max_new_tokens * costs.at(context, 1).token
    return seconds


def written_seconds(
    target: Target, drafter: Drafter[Any], texts: int, tokens: int, batch: int = 1
) -> float:
    """Return the seconds of plain decoding for texts in batches, each at full length.

    Args:
        target: the target.
        drafter: any drafter for it.
        texts: number of texts.
        tokens: tokens of each.
        batch: size of a batch.
    """
    costs = learnt_costs(target, drafter).at(tokens, 1)
    return math.ceil(texts / batch) * tokens * costs.target_seconds(min(batch, texts))


def timed_seconds(
    target: Target, drafter: Drafter[Any], rows: Sequence[int], seconds: float
) -> float:
    """Return the seconds in which passes of all widths are timed.

    Args:
        target: target whose passes are timed.
        drafter: drafter whose draft steps are timed.
        rows: the batch sizes.
        seconds: seconds for each batch size with a fast model.
    """
    costs = learnt_costs(target, drafter).at(1, 1)
    wide = sum(costs.target_seconds(128 * several) for several in rows)
    return len(rows) * seconds + 2 * TIMED * wide


def training_seconds(
    target: Target, drafter: Drafter[Any], tokens: int, epochs: float, read_once: bool
) -> float:
    """Estimate the seconds of a training; methods that unroll several steps take longer.

    Args:
        target: target whose hidden states are learnt from.
        drafter: drafter that is trained.
        tokens: tokens of all samples.
        epochs: passes over the samples.
        read_once: whether the target reads the samples once, and not in each epoch.
    """
    costs = learnt_costs(target, drafter).at(128, 1)
    reading, learning = costs.target_seconds(128) / 128, BACKWARD * costs.draft_seconds(32) / 32
    return tokens * (reading * (1 if read_once else epochs) + learning * epochs)
