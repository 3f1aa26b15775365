"""Of a product of parameters some cases run in every suite; the others are marked `long`."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def one_in(count: int, *factors: Sequence[Any]) -> list[Any]:
    """Return the product of some parameters as cases of `parametrize`, most of them marked `long`.

    A case whose indices add up to a multiple of `count` is not marked. Each value is in such a
    case, and any two values of different parameters meet in one, if a third parameter has `count`
    values or more.

    Args:
        count: how many cases there are for each one that is not marked.
        factors: the values of each parameter.
    """
    return [
        pytest.param(
            *(value for _, value in case),
            marks=pytest.mark.long if sum(i for i, _ in case) % count else (),
        )
        for case in itertools.product(*map(enumerate, factors))
    ]
