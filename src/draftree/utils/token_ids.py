"""Convert lists, arrays and tensors to rows of token ids."""

from contextlib import suppress
from operator import index
from typing import Any

import numpy as np
import torch

from draftree.utils.validated_dataclass import is_list_of


def row_of_ids(value: Any) -> list[int] | None:
    """Return the ids of a list, or of a one-dimensional array or tensor.

    Return None if the value is not a flat list of integers.
    """
    with suppress(RuntimeError, TypeError):  # a tensor without values; not integers
        items = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
        return list(map(_id, items)) if is_list_of(items, lambda _: True) else None
    return None


def _id(value: Any) -> int:
    flag = value.dtype is torch.bool if isinstance(value, torch.Tensor) else isinstance(value, bool)
    if flag or (
        isinstance(value, torch.Tensor) and value.ndim
    ):  # torch converts a list of one id to an id
        raise TypeError
    return index(value)
