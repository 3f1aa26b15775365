"""Tiny random models that fold the text into a state, and what they are compared with."""

import copy
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftree.models.model_config import cache_argument

VOCAB = 97
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96}
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    **ENDS,
}
LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
}
CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
STATES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "expand": 2,
    "state_size": 8,
    "conv_kernel": 4,
    **ENDS,
}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "qwen3_5_text": {**BASE, **GDN, **LINEAR},
    "qwen3_5_moe_text": {**BASE, **GDN, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**BASE, **GDN, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**BASE, **{k: v for k, v in GDN.items() if k != "head_dim"}, **LINEAR},
    "kimi_linear": {
        **BASE,
        **LINEAR,
        **ROUTED,
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "kv_lora_rank": 16,
    },
    "lfm2": {**BASE, **CONV, "block_multiple_of": 16},
    "lfm2_moe": {**BASE, **CONV, **EXPERTS, "num_dense_layers": 1},
    "bamba": {**BASE, **MAMBA2, "attn_layer_indices": [2]},
    "falcon_h1": {**BASE, **MAMBA2, "mamba_d_ssm": 64, "num_hidden_layers": 3},
    "nemotron_h": {
        **BASE,
        **ROUTED,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "moe_shared_expert_intermediate_size": 16,
    },
    "granitemoehybrid": {
        **BASE,
        **MAMBA2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "zamba2": {
        **BASE,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_expand": 2,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_shared_attention_adapter": False,
        "use_mem_rope": True,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "mamba2": {**STATES, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "jamba": {
        **BASE,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 100,
        "expert_layer_offset": 99,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    "mamba": {**STATES, "time_step_rank": 4},
    "falcon_mamba": {**STATES, "time_step_rank": 4},
}
"""By `model_type`, what differs from the type's own config."""
RULES = {
    "delta": "qwen3_5_text",
    "channels": "kimi_linear",
    "ssd": "bamba",
    "s6": "jamba",
    "conv": "lfm2",
}
"""A family of each rule."""
CLAMPED = ("nemotron_h", "zamba2")
"""Those whose step is bounded through a prompt and not in decoding."""


def config(family: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    return AutoConfig.for_model(family, **{**FAMILIES[family], **changes})


def hybrid(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A model whose weights are livelier than those it is initialised with, so that its states matter."""
    torch.manual_seed(seed)
    how = {"experts_implementation": "eager", "attn_implementation": "eager"}
    built: Any = AutoModelForCausalLM.from_config(config(family, **changes), **how)
    built = built.to(dtype).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(seed + 1)
    for name, weight in built.named_parameters():
        drawn = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(dtype)
        if weight.dim() >= 2:
            weight.copy_(drawn if "embed" in name else drawn * 1.5 / weight.shape[-1] ** 0.5)
        elif "A_log" in name or "dt_bias" in name:
            weight.add_(0.3 * drawn - (1.0 if "dt_bias" in name else 0.5))
    model: PreTrainedModel = built
    return model


class _Torch64(types.ModuleType):
    """torch, but what is called float32 there is float64 here."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Inside, transformers computes states and norms in float64 throughout, so that what differs is algebra, not rounding."""
    ours, patch = _Torch64("torch"), pytest.MonkeyPatch()
    for module in {sys.modules[type(m).__module__] for m in model.modules()}:
        if module.__name__.startswith("transformers.models") and vars(module).get("torch") is torch:
            patch.setattr(module, "torch", ours)
    patch.setattr(Tensor, "float", Tensor.double)
    try:
        yield
    finally:
        patch.undo()


class OneByOne:
    """Stock decoding: a prompt in one pass, then a token a pass, in transformers' own cache.

    Args:
        model: as it is.
        prompt: read at once.

    Attributes:
        logits: after the last token read.
        cache: transformers' own.
        length: tokens read.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        takes = inspect.signature(type(model).forward).parameters
        self._key = str(cache_argument(takes))
        self._model, self._places = model, "position_ids" in takes
        self.cache: Any = None
        self.length = 0
        self._read(prompt)

    def _read(self, tokens: Sequence[int]) -> None:
        at = torch.arange(self.length, self.length + len(tokens))[None]
        given = (
            {"position_ids": at} if self._places else {}
        )  # Bamba counts from zero where they are not given
        with torch.inference_mode():
            ids = torch.tensor([list(map(int, tokens))])
            model: Any = self._model
            out = model(input_ids=ids, use_cache=True, **{self._key: self.cache}, **given)
        self.cache = getattr(out, self._key)
        self.logits = out.logits[0, -1]
        self.length = self.length + len(tokens)

    def after(self, tokens: Sequence[int]) -> "OneByOne":
        """Another one that has read further tokens, one by one; this one is left as it is."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        for token in tokens:
            other._read([token])
        return other

    def write(self, count: int) -> list[int]:
        """The likeliest tokens, one by one."""
        written: list[int] = []
        while len(written) < count:
            written.append(int(self.logits.argmax()))
            self._read(written[-1:])
        return written
