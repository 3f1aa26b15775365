"""Rotary angles that are looked up, where transformers' modules make them anew in every pass."""

from typing import Any, final

import torch
from torch import Tensor, nn

POSITIONS = 1024
"""So many are known to begin with."""


@final
class Angles:
    """Cosines and sines of positions.

    Args:
        module: makes them of its frequencies `inv_freq`, which depend on no text's length.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._known = module, dict[torch.dtype, tuple[Tensor, Tensor]]()
        self._of: tuple[Any, int] = None, 0

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, n, width] at positions [R, n], in the dtype of a tensor; all of them lie on a CPU."""
        at = positions.reshape(-1)
        known = self.known(like, int(positions.numpy().max()))
        cosines, sines = (t.index_select(0, at).view(*positions.shape, -1) for t in known)
        return cosines, sines

    def known(self, like: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, width] of positions 0, 1, … up to the last one at least, in the dtype of a tensor."""
        frequencies: Any = self._module._buffers.get("inv_freq")
        of = frequencies, 0 if frequencies is None or frequencies.is_inference() else frequencies._version
        if of[0] is not self._of[0] or of[1] != self._of[1]:  # whoever tries others puts them there
            self._known.clear()
            self._of = of
        known = self._known.get(like.dtype)
        if known is None or last >= len(known[0]):
            with torch.inference_mode(False), torch.no_grad():
                cosines, sines = self._module(like.new_empty(1), torch.arange(max(POSITIONS, 2 * last))[None])
            known = self._known[like.dtype] = cosines[0].contiguous(), sines[0].contiguous()
        return known
