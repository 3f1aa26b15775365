"""The norm behind a network's layers and its head, in one call with layers that are machine code.

Shapes: R rows, n tokens of each, D hidden size, V tokens that the head tells of.
"""

from array import array
from typing import Any, final

import torch
from torch import Tensor

from draftree.models.between import epsilon_of
from draftree.models.linears import laid
from draftree.models.tiled import Tiled, place, single


@final
class Ending:
    """A norm and a head for one pass.

    Args:
        weight: [D] of the norm.
        epsilon: what it adds to a mean square.
        head: multiplies what it gives.

    Attributes:
        states: [R, n, D] what the norm gave, once the pass was made.
        logits: [R, n, V].
    """

    def __init__(self, weight: Tensor, epsilon: float, head: Any) -> None:
        self._weight, self._epsilon, self._head = weight, epsilon, head

    def told(self, x: Tensor, own: tuple[int, int]) -> "array[int]":
        """The entries of `kernels/layer.py`'s table for a pass over x [R, n, D]; makes room for what comes."""
        (rows, n, deep), head = x.shape, self._head
        self.states, self.logits = torch.empty_like(x), x.new_empty(rows, n, head.wide)
        places = place(self.states), place(head.tiles), place(head.bias), place(self.logits)
        return array("q", (*places, rows * n, deep, head.wide, *own, place(self._weight), single(self._epsilon)))


def ending(norm: Any, head: Any, like: Tensor) -> Ending | None:
    """A norm and a linear layer behind it, if both are computed by code of ours at present and nobody looks at what they do."""
    by, epsilon = laid(head), epsilon_of(norm)
    if by is None or by.kind is not Tiled or epsilon is None or norm.weight.dtype is not like.dtype:
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (norm, head)) or not by.of(head.weight, head.bias):
        return None
    return Ending(norm.weight, epsilon, by.multiply)
