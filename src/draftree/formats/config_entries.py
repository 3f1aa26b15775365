"""Known entries of drafters' configs by layout: used, ignored, or refused."""

import json
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from draftree.errors import DraftreeWarning, UserError, format_value

Values = tuple[Any, ...]
OFF_VALUES: Values = (None, False, 0, "", [], {})
"""Values of an entry that is switched off."""
NEUTRAL_FACTORS: Values = (None, 1)
"""Values of a factor that has no effect."""
FULL = "full_attention"


@final
@dataclass(frozen=True)
class Table:
    """Describe how each config entry of a layout is treated.

    Attributes:
        used: entries that are read.
        harmless: entries that do not affect the network's computation.
        refused: entries of unsupported networks, each with the values that have no effect.
        defaults: a config with the layout's default values, which are harmless.
        strict: whether an unknown entry that is true is refused, and not only named in a warning.
    """

    used: Set[str]
    harmless: Set[str]
    refused: Mapping[str, Values]
    defaults: PreTrainedConfig | None = None
    strict: bool = False

    def check(self, values: Mapping[str, Any], where: Path | str, method: str) -> None:
        """Refuse entries of a network that draftree cannot compute, and warn of unknown entries.

        Args:
            values: the entries of the config, by name.
            where: the file or folder that contains them.
            method: the drafter that opens it.

        Raises:
            UserError: an entry changes the network's computation in a way that is not supported;
                the message names it.
        """
        for name in sorted(values.keys() & self.refused.keys()):
            _refuse(name, values[name], self.refused[name], where, method)
        unknown = sorted(values.keys() - self.used - self.harmless - self.refused.keys())
        if self.strict:
            for name in unknown:
                if values[name] is True:
                    _refuse(name, True, (False,), where, method)
        if odd := [name for name in unknown if not self._is_default(name, values[name])]:
            named = ", ".join(f"{name} {_format_json(values[name])}" for name in odd)
            told = f"'{where}' has entries that draftree does not know and does not use: {named}"
            warnings.warn(told, DraftreeWarning, stacklevel=3)

    def check_layer(self, values: Mapping[str, Any], where: Path | str, method: str) -> None:
        """Check the entries of a layer that must not have a sliding window.

        Raises:
            UserError: the layer has a sliding window, or another entry is refused; the message
                names it.
        """
        types = values.get("layer_types") or []
        if not isinstance(types, list) or any(kind != FULL for kind in types):
            got = f"'{where}' has layer_types {format_value(types)}, allowed is {FULL}"
            raise UserError(f"{got}: '{method}' has no layers of other types here")
        switched = values.get("use_sliding_window") is not None or types
        self.check(
            {k: v for k, v in values.items() if k != "sliding_window" or not switched},
            where,
            method,
        )

    def _is_default(self, name: str, value: Any) -> bool:
        known = {} if self.defaults is None else vars(self.defaults)
        return value in OFF_VALUES or (name in known and value == known[name])


def _refuse(name: str, value: Any, allowed: Values, where: Path | str, method: str) -> None:
    if value not in allowed:
        plain = " or ".join(_format_json(one) for one in allowed if one is not None) or "null"
        told = f"'{where}' has {name} {_format_json(value)}, allowed is {plain}"
        raise UserError(f"{told}: that is not the architecture of '{method}'")


def _format_json(value: Any) -> str:
    """Return a value in JSON notation; lists, objects and strings are shortened."""
    return (
        json.dumps(value)
        if isinstance(value, bool | int | float | None)
        else format_value(value).strip("'")
    )


SIZE_ENTRIES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    }
)
LAYER_ENTRIES = SIZE_ENTRIES | {
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "initializer_range",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "draftree",
}
"""Entries of a decoder layer that every layout uses.

Whether there are biases is read from the tensors.
"""
DESCRIPTION_ENTRIES = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "base_model_name_or_path",
        "target_model_type",
        "num_target_layers",
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
    }
)
"""Entries that describe a checkpoint, such as names, versions and the dtype.

The dtype is read from the tensors instead.
"""
HARMLESS_ENTRIES = DESCRIPTION_ENTRIES | {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "tie_word_embeddings",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    "attention_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "classifier_dropout",
    "pretraining_tp",
    "id2label",
    "label2id",
    "problem_type",
    "is_encoder_decoder",
    "is_decoder",
    "add_cross_attention",
    "max_window_layers",
    "num_anchors",
    "embed_requires_grad",
    "topk_w",
    "topk",
    "loss_decay_gamma",
    "loss_type",
    "gradient_checkpointing",
    "torchscript",
    "generation_config",
}
"""Entries for training, for generation and for transformers itself.

Whether tensors are tied or trained is read from the tensors.
"""
SWITCHES = (
    # Norms in other places
    "layernorms",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "post_norm",
    "use_post_norm",
    "sandwich_norm",
    "use_sandwich_norm",
    "apply_residual_connection_post_layernorm",
    "norm_after_attention",
    # Attention parallel to the feed-forward layer
    "use_parallel_residual",
    "parallel_residual",
    "parallel_attn",
    # Attention sinks, scaled embeddings, other positions
    "attention_sink",
    "attention_sinks",
    "use_attention_sinks",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
    "scale_embeddings",
    "scale_embedding",
    "rope_interleave",
    "rope_interleaved",
    "rotary_interleaved",
    "alibi",
    "use_alibi",
)
NUMBERS = (
    # Soft caps and attention sinks
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_softcapping",
    "logits_soft_cap",
    "num_attention_sinks",
    "sink_size",
    "attention_sink_size",
    "num_sink_tokens",
    # Layers without rope, chunks, experts, compressed keys
    "no_rope_layer_interval",
    "nope_layer_interval",
    "attention_chunk_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "kv_lora_rank",
    "q_lora_rank",
)
FACTORS = (
    # Scales of embeddings, attention, residuals and logits
    "embedding_multiplier",
    "embedding_scale",
    "embed_scale",
    "scale_emb",
    "residual_multiplier",
    "residual_scale",
    "scale_depth",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "key_multiplier",
    # A part of each head that is rotated
    "partial_rotary_factor",
    "rotary_pct",
)
OPTIONAL_ENTRIES = (
    "attention_multiplier",
    "query_pre_attn_scalar",
    "attention_scale",
    "mup_width_scale",
    "dim_model_base",
    "clip_qkv",
    "no_rope_layers",
)
NETWORKS: Mapping[str, Values] = {
    **dict.fromkeys(SWITCHES, (None, False)),
    **dict.fromkeys(NUMBERS, (None, 0)),
    **dict.fromkeys(FACTORS, NEUTRAL_FACTORS),
    **dict.fromkeys(OPTIONAL_ENTRIES, (None,)),
}
"""Entries of networks that no drafter supports, with the values that have no effect."""
QK_NORMS = ("qk_norm", "use_qk_norm", "qk_layernorm")
"""Entries for norms of queries and keys, which Llama layers never have and Qwen3 layers always."""
LLAMA = Table(
    LAYER_ENTRIES | {"layer_types", "use_sliding_window"},
    HARMLESS_ENTRIES,
    {**NETWORKS, **dict.fromkeys(QK_NORMS, (None, False)), "use_sliding_window": (None, False)},
    LlamaConfig(),
)
"""Entries of a Llama layer."""
EAGLE_ENTRIES = {
    "bias",
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "fusion_bias",
}
EAGLE = Table(LLAMA.used | EAGLE_ENTRIES, LLAMA.harmless, LLAMA.refused, LLAMA.defaults)
"""Entries of EAGLE and EAGLE-3 in the original layout."""
PEAGLE = Table(
    EAGLE.used | {"mask_token_id", "ptd_token_id", "pard_token", "num_depths"},
    EAGLE.harmless,
    EAGLE.refused,
    EAGLE.defaults,
)
"""Entries of P-EAGLE in a flat config."""
SPECULATORS = Table(
    EAGLE_ENTRIES
    | {"transformer_layer_config", "mask_token_id", "ptd_token_id", "pard_token", "draftree"},
    HARMLESS_ENTRIES,
    NETWORKS,
    strict=True,
)
"""Entries of the layout of speculators, without the entries of its nested layer config."""
FLAT_GLIDE = Table(
    LLAMA.used | {"block_size", "large_hidden_size", "large_num_attention_heads", "large_head_dim"},
    LLAMA.harmless,
    {**LLAMA.refused, "use_remap": (None, False)},
    LLAMA.defaults,
)
QWEN3 = Table(
    LAYER_ENTRIES | {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"},
    HARMLESS_ENTRIES - {"max_window_layers"},
    {**NETWORKS, **dict.fromkeys(QK_NORMS, (None, True))},
    Qwen3Config(),
)
"""Entries of a Qwen3 layer."""
BLOCK_ENTRIES = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "sample_from_anchor",
    "projector_type",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "causal_head",
    "is_causal",
    "causal",
    "sliding_window_non_causal",
    "draft_vocab_size",
    "target_hidden_size",
}
FLAT_BLOCK_DRAFTER = Table(
    QWEN3.used | BLOCK_ENTRIES | {"dflash_config"}, QWEN3.harmless, QWEN3.refused, QWEN3.defaults
)
"""Entries of DFlash, DSpark and JetSpec in a flat config, where some of them may be nested."""
SPECULATED_BLOCKS = Table(
    BLOCK_ENTRIES | {"transformer_layer_config", "draftree"}, HARMLESS_ENTRIES, NETWORKS
)
"""Entries of block drafters in the layout of speculators, without the nested layer config."""
MEDUSA = Table(
    {
        "medusa_num_heads",
        "medusa_num_layers",
        "num_heads",
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "truncated_vocab_size",
        "original_lm_head",
        "medusa_fc_bias",
        "draftree",
    },
    HARMLESS_ENTRIES | {"max_paths", "version", "medusa_choices"},
    {},
)
HYDRA = Table(
    {
        "hydra_num_heads",
        "hydra_num_layers",
        "hydra_head_arch",
        "grounded_heads",
        "hidden_state_offset",
        "draftree",
    },
    HARMLESS_ENTRIES | {"dropout_rate", "hydra_choices"},
    {
        "grounded_heads": (None, True),
        "hidden_state_offset": (None, 0),
        "hydra_head_arch": (None, "prefix-mlp", "mlp"),
    },
)
