"""Initialise the layers of a small draft network, and run them one after the other.

Shapes: R slots, n tokens a slot, S slots, D hidden size.
"""

import inspect
from collections.abc import Iterable

from torch import Tensor, nn
from transformers import Cache, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftree.drafters.neural.native_drafter_layers import KernelLayer, run_native, usable
from draftree.models.model_config import cache_argument

CACHE = str(cache_argument(inspect.signature(LlamaDecoderLayer.forward).parameters))
"""Name of the argument by which the layers of the installed transformers take the cache."""


def initialise(module: nn.Module, config: LlamaConfig | Qwen3Config) -> None:
    """Initialise the weights of a new network at random, as transformers does for Llama."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=config.initializer_range)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


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
