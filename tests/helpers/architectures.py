"""Tiny random models of the architectures draftree promises to drive, in float64.

Windows are 5 tokens, so that they bite within a test's texts; heads are grouped (4 queries on 2
keys) where the architecture groups them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draftree.models.causal_lm import CausalLM
from draftree.target.target import Target

WINDOW = 5
VOCAB = 71
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **ENDS,
}
MIXED = ["sliding_attention", "full_attention"] * 2


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """A config's rope of a kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "attn_implementation": "eager",
}
EXPERTS = {
    "experts_implementation": "eager",
    "num_experts_per_tok": 2,
}  # the grouped product knows no float64

CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3-rope": ("llama", {"tie_word_embeddings": True, **LLAMA3}),
    "llama-linear-rope": ("llama", rope("linear", factor=2.0)),
    "llama-eager-yarn": ("llama", {"attn_implementation": "eager", **YARN}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "layer_types": MIXED,
        },
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": MIXED}),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED[::-1]},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3-sliding": ("phi3", {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", {}),
    "gpt_neox": ("gpt_neox", {"hidden_act": "gelu", "use_parallel_residual": True}),
    "mixtral-sliding": ("mixtral", {**EXPERTS, "sliding_window": WINDOW, "num_local_experts": 3}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
}
"""Name of the variant: `model_type`, and what differs from `SIZES`."""

ROUTED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "gpt_oss",
        {
            **EXPERTS,
            **rope("default"),
            "attn_implementation": "eager",
            "num_local_experts": 4,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **EXPERTS,
            "num_local_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
        },
    ),
}
"""Further ones whose experts have biases or groups, for what depends on experts."""

SCALED = "granite"
"""A model that scales its embeddings outside the embedding module."""

SOME = ("llama", "mistral-sliding", "gemma2", "qwen3", "gpt_neox")
"""Enough of them for what does not depend much on the architecture."""

CROSSING: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"max_position_embeddings": 16, **rope("dynamic", factor=4.0)}),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            **rope(
                "longrope",
                factor=4.0,
                short_factor=[1.0] * 4,
                long_factor=[1.5, 2.0, 3.0, 4.0],
                original_max_position_embeddings=16,
            ),
        },
    ),
}
"""Models whose rotary frequencies change where a text grows beyond 16 tokens."""


def build(model_type: str, changes: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random model, its weights large enough for distributions that differ from token to token."""
    values = {**SIZES, **changes}
    how = {
        k: values.pop(k) for k in ("attn_implementation", "experts_implementation") if k in values
    }
    return random(AutoConfig.for_model(model_type, **values), seed, **how)


def random(config: PreTrainedConfig, seed: int = 0, **how: Any) -> PreTrainedModel:
    """A model of a config, see `build`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, **how
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.15)
                else:  # norms and biases that are all ones or zeros would hide where they are applied
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def fresh(name: str, seed: int = 0, layers: int | None = None) -> PreTrainedModel:
    """A new model of a named variant, or of its first layers."""
    model_type, changes = {**CONFIGS, **CROSSING, **ROUTED}[name]
    if layers is not None:
        kinds = {"layer_types": changes["layer_types"][:layers]} if "layer_types" in changes else {}
        changes = {**changes, "num_hidden_layers": layers, **kinds}
    return build(model_type, changes, seed)


@cache
def model(name: str) -> PreTrainedModel:
    """A variant's model, built once for all tests, which only read it."""
    return fresh(name)


def target(name: str) -> Target:
    """A variant as a target."""
    return Target(CausalLM(model(name)), name)
