"""How long work will take, said before it begins: by the costs that this machine has learnt, or an estimate of them."""

import math
from collections.abc import Sequence
from typing import Any

from draftree.cost_estimate import learnt_costs
from draftree.drafters.base import Drafter
from draftree.models.target import Target
from draftree.request import Request

TIMED = 12
"""Passes over 128 tokens of a row that reading the contexts and one round of passes and draft steps
amount to."""
BACKWARD = 3.0
"""A training step of a drafter over its forward pass: the backward pass takes twice as long as
that."""


def plain_seconds(target: Target, drafter: Drafter[Any], requests: Sequence[Request]) -> float:
    """Return the seconds that plain decoding takes for texts one after another, at full length.

    The costs are those that this machine has learnt of the target, or an estimate where it has
    learnt none. Texts that end earlier, batches and drafters take less.

    Args:
        target: that writes.
        drafter: any one of it.
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
    """Return the seconds in which plain decoding writes texts in batches, each in its full length.

    Args:
        target: that writes.
        drafter: any one of it.
        texts: how many.
        tokens: of each.
        batch: texts that are written at a time.
    """
    costs = learnt_costs(target, drafter).at(tokens, 1)
    return math.ceil(texts / batch) * tokens * costs.target_seconds(min(batch, texts))


def timed_seconds(
    target: Target, drafter: Drafter[Any], rows: Sequence[int], seconds: float
) -> float:
    """Return the seconds in which passes of all widths are timed.

    Args:
        target: whose passes are timed.
        drafter: whose draft steps are.
        rows: the batch sizes.
        seconds: what a fast model takes for each of them.
    """
    costs = learnt_costs(target, drafter).at(1, 1)
    wide = sum(costs.target_seconds(128 * several) for several in rows)
    return len(rows) * seconds + 2 * TIMED * wide


def training_seconds(
    target: Target, drafter: Drafter[Any], tokens: int, epochs: float, read_once: bool
) -> float:
    """Return about how long a training takes; methods that unroll several steps take longer.

    Args:
        target: whose hidden states are learnt from.
        drafter: that is trained.
        tokens: of all samples.
        epochs: passes over them.
        read_once: whether the target reads them once, and not in each epoch.
    """
    costs = learnt_costs(target, drafter).at(128, 1)
    reading, learning = costs.target_seconds(128) / 128, BACKWARD * costs.draft_seconds(32) / 32
    return tokens * (reading * (1 if read_once else epochs) + learning * epochs)
