"""Rotary embedding of draft networks.

Shapes: R slots, n tokens a slot.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftree.models.model_config import LENGTH_DEPENDENT_ROPE
from draftree.models.native_layers import Angles
from draftree.models.rope_cache import RopeCache


class Rotary(nn.Module):
    """Rotary frequencies that stay in float32 if the network is converted to half precision.

    Attributes:
        fixed: whether the frequencies are independent of the length of a text.
    """

    def __init__(self, config: LlamaConfig | Qwen3Config) -> None:
        super().__init__()
        self._embedding: nn.Module = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # Qwen3's is the same
        self._angles = RopeCache(self._embedding)
        rope: Any = config.rope_parameters
        self.fixed = rope["rope_type"] not in LENGTH_DEPENDENT_ROPE

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        self._embedding.to(fn(torch.zeros(1)).device)  # no other dtype
        return self

    def tables(self, like: Tensor, positions: Tensor) -> Angles | None:
        """Return cosines and sines by position for native layers, and each token's index into them.

        Return None if the frequencies depend on the length of a text.

        Args:
            like: a tensor with the dtype that the cosines and sines get.
            positions: [R, n] the positions of the tokens, on the CPU.
        """
        if not self.fixed:
            return None
        places = positions.numpy().reshape(-1)
        return Angles(*self._angles.cos_sin(like, int(places.max(initial=0))), places)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [R, n, width] for positions [R, n].

        They have the dtype and device of `like`.
        """
        if self.fixed and like.is_cpu and not torch.is_grad_enabled():
            return self._angles(like, positions)
        self._embedding.to(
            like.device
        )  # otherwise transformers copies the frequencies in every pass
        if self.fixed:
            cos, sin = self._embedding(like, positions)
            return cos, sin
        rows = []
        for row in positions.split(
            1
        ):  # frequencies depend on the longest sequence that the module has seen
            self._embedding(like, torch.zeros_like(row[:, :1]))
            rows.append(self._embedding(like, row))
        cosines, sines = zip(*rows, strict=True)
        return torch.cat(cosines), torch.cat(sines)
