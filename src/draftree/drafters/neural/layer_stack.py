"""Run the layers of a small draft network one after the other, with their rotary embedding.

Shapes: R slots, n tokens a slot, S slots, D hidden size.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftree.drafters.neural.native_drafter_layers import KernelLayer, run_native, usable
from draftree.models.model_config import LENGTH_DEPENDENT_ROPE, cache_argument
from draftree.models.native_layers import Angles
from draftree.models.rope_cache import RopeCache

CACHE = str(cache_argument(inspect.signature(LlamaDecoderLayer.forward).parameters))
"""Name of the argument by which the layers of the installed transformers take the cache."""


def initialise(module: nn.Module, config: LlamaConfig | Qwen3Config) -> None:
    """Initialise the weights of a new network at random, as transformers does for Llama."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=config.initializer_range)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


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


def apply_layers(
    layers: Iterable[nn.Module],
    x: Tensor,
    rotated: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: Cache | None,
) -> Tensor:
    """Return the output [R, n, D] of layers that are applied one after the other.

    Args:
        layers: the layers, at least one.
        x: [R, n, D] the input of the first layer.
        rotated: cosines and sines of the positions.
        mask: [R, 1, n, S] the additive attention mask.
        cache: the KV cache, if there is one.
    """
    every = list(layers)
    natives = [layer for layer in every if isinstance(layer, KernelLayer)]
    if len(natives) == len(every) and usable(natives[0].native, mask, x, *rotated):
        index = int(natives[0].self_attn.layer_idx)
        return run_native([layer.native for layer in natives], index, x, rotated, mask, cache)
    for layer in every:
        x = layer(x, attention_mask=mask, position_embeddings=rotated, **{CACHE: cache})
    return x
