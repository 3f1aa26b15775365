"""The norm after a network's layers and its head, in one call with native layers.

Shapes: R sequences, n tokens of each, D hidden size, V tokens of the head.
"""

from typing import Any, final

import torch
from torch import Tensor

from draftree.models.between import epsilon_of
from draftree.models.linears import laid
from draftree.models.native_linear import NativeLinear
from draftree.native import dense
from draftree.native.dense import address


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

    def add_to(self, given: Any, x: Tensor) -> None:
        """Add norm and head to the kernels' pass over x [R, n, D], and make room for what comes."""
        (rows, n, _), head = x.shape, self._head
        self.states, self.logits = torch.empty_like(x), x.new_empty(rows, n, head.wide)
        given.final_norm, given.head = dense.core.Norm(address(self._weight), self._epsilon), head.record
        given.final_states, given.logits = address(self.states), address(self.logits)


def ending(norm: Any, head: Any, like: Tensor) -> Ending | None:
    """A norm and a linear layer behind it, if both are computed by code of ours at present and nobody looks at what they do."""
    by, epsilon = laid(head), epsilon_of(norm)
    if by is None or by.kind is not NativeLinear or epsilon is None or norm.weight.dtype is not like.dtype:
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (norm, head)) or not by.of(head.weight, head.bias):
        return None
    return Ending(norm.weight, epsilon, by.multiply)
