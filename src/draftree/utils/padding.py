"""Padding of tensors."""

from torch import Tensor
from torch.nn.functional import pad


def pad_end(values: Tensor, dim: int, count: int, value: float = 0) -> Tensor:
    """Append `count` entries of a constant value to the end of a dimension."""
    later = values.dim() - 1 - dim % values.dim()
    return pad(values, (*(0, 0) * later, 0, count), value=value)
