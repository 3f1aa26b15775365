"""Make the configs of small draft networks, and read and write them in the form of checkpoints."""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftree.errors import UnknownName
from draftree.models.kv_cache import LayerShape
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
