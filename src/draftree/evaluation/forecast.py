"""How long work on some texts will take at most, said before it begins."""

from collections.abc import Sequence
from typing import Any

from draftree.cost_estimate import learnt_costs
from draftree.drafters.base import Drafter
from draftree.models.target import Target
from draftree.request import Request


def plain_seconds(target: Target, drafter: Drafter[Any], requests: Sequence[Request]) -> float:
    """Return the seconds in which plain decoding writes texts one after another, each in its full length.

    The costs are those that this machine has learnt of the target, or an estimate where it has learnt none. Texts that end
    earlier, batches and drafters take less.

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
