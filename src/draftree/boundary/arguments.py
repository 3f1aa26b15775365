"""Whether what was given is what is allowed: numbers, texts and ids, of whatever library they come."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf, isfinite
from numbers import Integral, Real
from operator import index
from typing import Any

import numpy as np
import torch

from draftree.errors import UserError, shown

Rule = tuple[str, Callable[[Any], bool]]
"""What a value may be, in words and as a test."""


def whole(value: Any, least: float = 0, most: float = inf) -> bool:
    """Whether it is a whole number in a range; true and false are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def real(value: Any) -> bool:
    """Whether it is a finite number; true and false are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    with suppress(OverflowError):  # a whole number beyond all floats
        return isfinite(value)
    return False


def unicode(value: Any) -> bool:
    """Whether it is a text that can be encoded: half a surrogate pair cannot."""
    with suppress(UnicodeEncodeError):
        return isinstance(value, str) and bool(value.encode() or True)
    return False


def text(value: Any) -> bool:
    """Whether it is a text of at least one character."""
    return unicode(value) and bool(value)


def several(values: Any, fine: Callable[[Any], bool]) -> bool:
    """Whether it is a list of what is fine; a text, or bytes, is no list."""
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray) and all(map(fine, values))


def optional(fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The test that lets None pass, too."""
    return lambda value: value is None or fine(value)


def row_of_ids(value: Any) -> list[int] | None:
    """The ids in a list, or in an array or tensor of one dimension; None where it is no row of whole numbers."""
    with suppress(RuntimeError, TypeError):  # of a tensor without values; of what is no whole number
        items = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
        return list(map(_id, items)) if several(items, lambda _: True) else None
    return None


def _id(value: Any) -> int:
    flag = value.dtype is torch.bool if isinstance(value, torch.Tensor) else isinstance(value, bool)
    if flag or (isinstance(value, torch.Tensor) and value.ndim):  # torch takes a row of one id for an id
        raise TypeError
    return index(value)


def check(of: object, rules: Mapping[str, Rule]) -> None:
    """Refuses an object with an attribute that its rule does not allow.

    Raises:
        UserError: it says what was got and what is allowed.
    """
    for name, (allowed, fine) in rules.items():
        if not fine(value := getattr(of, name)):
            raise UserError(f"{name} is {shown(value)}, allowed is {allowed}")


FLAG: Rule = "true or false", lambda value: isinstance(value, bool)
COUNT: Rule = "a whole number of at least 0", whole
