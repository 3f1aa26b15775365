"""Rotary angles that are looked up, where transformers' modules make them anew in every pass."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

POSITIONS = 1024
"""So many are known to begin with."""


@final
class Angles:
    """Cosines and sines of positions, whose frequencies depend on nothing else.

    Args:
        made: makes them, of a tensor that says dtype and device, and positions [R, n].
    """

    def __init__(self, made: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._made, self._known = made, dict[torch.dtype, tuple[Tensor, Tensor]]()

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, n, width] at positions [R, n], in the dtype of a tensor on a CPU."""
        last, known = int(positions.max()), self._known.get(like.dtype)
        if known is None or last >= len(known[0]):
            with torch.inference_mode(False), torch.no_grad():
                cosines, sines = self._made(like.new_empty(1), torch.arange(max(POSITIONS, 2 * last))[None])
            known = self._known[like.dtype] = cosines[0].contiguous(), sines[0].contiguous()
        at = positions.reshape(-1)
        cosines, sines = (t.index_select(0, at).view(*positions.shape, -1) for t in known)
        return cosines, sines
