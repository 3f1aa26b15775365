"""A cache of rotary cos/sin tables, which transformers' modules recompute in every pass."""

from typing import Any, final

import torch
from torch import Tensor, nn

POSITIONS = 1024
"""Number of positions for which cosines and sines are computed at first."""


@final
class RopeCache:
    """Cache rotary cosines and sines of positions.

    Args:
        module: the rotary embedding; its frequencies `inv_freq` must not depend on a text's length.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._known = module, dict[torch.dtype, tuple[Tensor, Tensor]]()
        self._frequencies: Any = None

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [R, n, D] at positions [R, n] on a CPU, in `like`'s dtype."""
        at = positions.reshape(-1)
        known = self.cos_sin(like, int(positions.numpy().max()))
        cosines, sines = (t.index_select(0, at).view(*positions.shape, -1) for t in known)
        return cosines, sines

    def cos_sin(self, like: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [P, D] of positions 0 to P − 1, where P is more than `last`."""
        frequencies: Any = self._module._buffers.get("inv_freq")
        if frequencies is not self._frequencies:  # they may be replaced in a trial
            self._known.clear()
            self._frequencies = frequencies
        known = self._known.get(like.dtype)
        if known is None or last >= len(known[0]):
            with torch.inference_mode(False), torch.no_grad():
                every = torch.arange(max(POSITIONS, 2 * last))[None]
                cosines, sines = self._module(like.new_empty(1), every)
            known = cosines[0].contiguous(), sines[0].contiguous()
            self._known[like.dtype] = known
        return known
