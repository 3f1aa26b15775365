"""Building blocks of small draft networks, made of transformers' Llama modules.

Shapes: R slots, n tokens a slot, S slots, D hidden size.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftree.drafters.neural.native_drafter_layers import KernelLayer, run_native, usable
from draftree.errors import UnknownName
from draftree.models.architecture_checks import LENGTH_DEPENDENT_ROPE, cache_argument
from draftree.models.kv_cache import LayerShape
from draftree.models.native_layers import Angles
from draftree.models.rope_cache import RopeCache
from draftree.utils.files import Entries, as_user_error

Config = TypeVar("Config", LlamaConfig, Qwen3Config)
COPIED_ENTRIES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "initializer_range",
)
CACHE = str(cache_argument(inspect.signature(LlamaDecoderLayer.forward).parameters))
"""Name of the argument by which the layers of the installed transformers take the cache."""
USUAL_HEAD_SIZE = 64
"""Usual size of an attention head."""
IGNORED_FIELDS = (
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "draftree",
)
"""Entries of a published config that do not affect the network."""


def make_one_layer_config(config: PreTrainedConfig) -> LlamaConfig:
    """Return a Llama config of one layer with the sizes and rotary embedding of a target.

    The target may have any architecture.
    """
    values = {k: v for k in COPIED_ENTRIES if (v := getattr(config, k, None)) is not None}
    values.setdefault("intermediate_size", 4 * config.hidden_size)
    if "num_attention_heads" not in values:  # a target without attention
        heads = max(config.hidden_size // USUAL_HEAD_SIZE, 1)
        values |= {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": config.hidden_size // heads,
        }
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope.pop("partial_rotary_factor", None)  # Llama rotates all entries of a key
    theta = rope.get("rope_theta", 10000.0)
    plain = {
        "rope_type": "default",
        "rope_theta": theta if isinstance(theta, (int, float)) else 10000.0,
    }
    return of_values(
        values
        | {"rope_parameters": rope if rope.get("rope_type") in ("linear", "llama3") else plain}
    )


class ExplicitHeads(LlamaConfig):
    """A Llama config with an explicit head size.

    The hidden size then need not be a multiple of the number of heads.
    """

    def validate_architecture(self) -> None:
        """Accept any combination of hidden size and number of heads."""


def of_values(values: Mapping[str, Any], kind: type[Config] = LlamaConfig) -> Config:  # type: ignore[assignment]
    """Return a config with the values of a published checkpoint, by default a Llama config.

    Raises:
        UserError: transformers refuses the values, or does not know the rotary embedding or the
            activation.
    """
    known, said = (
        {k: v for k, v in values.items() if k not in IGNORED_FIELDS},
        Entries(values, "the drafter's config.json"),
    )
    for name in COPIED_ENTRIES[:-2]:
        said.get(name, float | None, None, least=0 if name == "rms_norm_eps" else 1)
    with as_user_error(f"the drafter's config.json is not a {kind.model_type} one"):
        explicit = kind is LlamaConfig and known.get("head_dim")
        chosen: Any = ExplicitHeads if explicit else kind
        config: Config = chosen(
            **{"num_hidden_layers": 1, **copy.deepcopy(known)}
        )  # transformers rewrites nested values
    rope: Any = config.rope_parameters
    Entries(rope, "the drafter's rope_parameters").get("rope_theta", float, 1.0, least=1e-6)
    for key, got, allowed in (
        ("rope type", rope["rope_type"], ("default", *ROPE_INIT_FUNCTIONS)),
        ("hidden_act", config.hidden_act, ACT2FN),
    ):
        if got not in allowed:
            raise UnknownName(f"{key} in the drafter's config.json", got, sorted(allowed))
    config._attn_implementation = "sdpa"
    return config


def export_config(config: LlamaConfig, architecture: str) -> dict[str, Any]:
    """Return the config in the form of published checkpoints.

    They store `rope_theta` in the rope parameters and separately.
    """
    rope: Any = config.rope_parameters
    values = {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version"}
    return values | {"architectures": [architecture], "rope_theta": rope["rope_theta"]}


def stored_shape(config: LlamaConfig | Qwen3Config) -> LayerShape:
    """Return the shape of the keys and values that a layer stores for a token."""
    heads, width = config.num_key_value_heads, config.head_dim
    assert heads is not None
    assert width is not None
    return LayerShape(heads, width, width)


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

        They have the dtype and device of `make_one_layer_config`.
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
