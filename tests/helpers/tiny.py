"""A tiny random model of every causal language model that transformers knows, from the defaults of its own config.

Sizes are shrunk by the names of their fields, in the configs inside a config too. Where that does
not fit, `SPECIAL` says what does.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from architectures import VOCAB, WINDOW, random
from hybrids import FAMILIES

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
LAYERS = 4
HEADS = 4
WIDE = 32
DEEP = 48
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS // 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), WIDE),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "dense_intermediate_size"), DEEP
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        WIDE // 2,
    ),
    **dict.fromkeys(("expert_ffn_hidden_size", "hidden_size_per_layer_input"), WIDE // 2),
    **dict.fromkeys(
        ("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
        WIDE // HEADS,
    ),
    **dict.fromkeys(
        ("kv_channels", "query_pre_attn_scalar", "index_head_dim", "dim_model_base"), WIDE // HEADS
    ),
    **dict.fromkeys(("qk_head_dim", "kv_lora_rank", "q_lora_rank"), 2 * WIDE // HEADS),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "zero_expert_num",
        ),
        4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "local_attention"), WINDOW),
    **dict.fromkeys(("rotary_dim",), 4),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("pad_token_id", "sep_token_id", "cls_token_id", "eod_token_id"), 0),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HEAD = {"head_dim": WIDE // HEADS}
PER_LAYER = {"per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}}}
SPECIAL: Mapping[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "bailing_hybrid": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4_text": PER_LAYER,
    "gemma4_unified_text": PER_LAYER,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD,
    "ministral": HEAD,
    "moshi": {
        "sliding_window": 128
    },  # all its context, as by default: its cache forgets what lies before, its mask does not
    "nemotron": {**HEAD, "num_key_value_heads": HEADS // 2},
    **{
        kind: {**values, "vocab_size": VOCAB, "eos_token_id": 2}
        for kind, values in FAMILIES.items()
    },
}
"""What is different where the sizes above do not fit."""

SINGLE = ("xglm",)


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that have to change for it to be tiny."""
    told, layers = (
        config.to_dict(),
        {v for k, v in config.to_dict().items() if SIZES.get(k) == LAYERS},
    )
    found: dict[str, Any] = {}
    for name, value in told.items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            found[name] = type(inner)(**shrunk(inner)).to_dict()
        elif name in SIZES and value is not None:
            found[name] = SIZES[name]
        elif (
            isinstance(value, list) and len(value) in layers
        ):  # one entry for each layer: all kinds in turn
            kinds = list(dict.fromkeys(value))
            found[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    if "kv_lora_rank" in told:  # latent attention has as many heads of either sort
        found["num_key_value_heads"] = HEADS
    return found | SPECIAL.get(config.model_type, {})


def tiny(model_type: str) -> PreTrainedModel:
    """A random model of a type, in float64 unless its own code knows none."""
    config = CONFIG_MAPPING[model_type]()
    made = random(type(config)(**shrunk(config)), experts_implementation="eager")
    return made.float() if model_type in SINGLE else made
