"""Published checkpoint layouts, written to folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from architectures import VOCAB

D, INNER, HEADS, KEYS, WIDTH, DRAFT = 32, 48, 4, 2, 8, 23
"""D, the MLP's width, heads, key heads, a head's width, V′."""


LLAMA = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 1,
         "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
         "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip


VERIFIER = {"name_or_path": "meta-llama/x", "architectures": ["LlamaForCausalLM"]}


Tensors = dict[str, Tensor]


Shapes = dict[str, tuple[int, ...]]


def layer(begin: str, width: int, size: int = D) -> Shapes:
    """A layer whose attention reads `width`, without the norms before it."""
    return {
        f"{begin}self_attn.q_proj.weight": (HEADS * WIDTH, width), f"{begin}self_attn.k_proj.weight": (KEYS * WIDTH, width),
        f"{begin}self_attn.v_proj.weight": (KEYS * WIDTH, width), f"{begin}self_attn.o_proj.weight": (size, HEADS * WIDTH),
        f"{begin}mlp.gate_proj.weight": (INNER, size), f"{begin}mlp.up_proj.weight": (INNER, size),
        f"{begin}mlp.down_proj.weight": (size, INNER), f"{begin}post_attention_layernorm.weight": (size,),
    }  # fmt: skip


FUSING = {"fc.weight": (D, 2 * D), "fc.bias": (D,)}


BIASES = {
    f"layers.0.self_attn.{n}_proj.bias": (h * WIDTH,)
    for n, h in (("q", HEADS), ("k", KEYS), ("v", KEYS))
}


EMBED = {"embed_tokens.weight": (VOCAB, D)}


FIRST = {"fc.weight": (D, 2 * D), **layer("layers.0.", D)}


def third(begin: str = "midlayer.", draft: int = DRAFT, size: int = D) -> Shapes:
    """EAGLE-3's, without its maps."""
    norms = {f"{begin}{n}.weight": (size,) for n in ("hidden_norm", "input_layernorm")}
    whole = {"fc.weight": (size, 3 * D), "norm.weight": (size,), "lm_head.weight": (draft, size)}
    return whole | norms | layer(begin, 2 * size, size)


def drawn(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float16) -> Tensors:
    rng = torch.Generator().manual_seed(7)
    return {
        k: (0.2 * torch.randn(s, generator=rng) + ("norm" in k)).to(dtype)
        for k, s in shapes.items()
    }


def maps(draft: int = DRAFT) -> Tensors:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:draft].sort().values
    return {
        "d2t": ids - torch.arange(draft),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }


def stored(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, file: str = "model.safetensors"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


def nested(method: str, **flags: Any) -> dict[str, Any]:
    """A config of speculators."""
    how = {"algorithm": method, "default_proposal_method": "greedy", "verifier": VERIFIER, "proposal_methods": [
        {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}]}  # fmt: skip
    return {"speculators_model_type": method, "speculators_version": "0.1.0", "architectures": ["X"], "speculators_config": how,
            "transformer_layer_config": LLAMA, **flags}  # fmt: skip


def sharded(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    stored(folder, config, {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[:5],
        "model-00002-of-00002.safetensors": names[5:],
    }
    for part, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, folder / part)
    places = {k: part for part, keys in parts.items() for k in keys}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return folder


def spoken(tensors: Tensors, method: str) -> Tensors:
    """Tensors of an original layout as speculators calls them."""
    if method == "eagle3":
        return {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    return {
        k.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): v
        for k, v in tensors.items()
    }


QWEN2 = {**LLAMA, "model_type": "qwen2", "qkv_bias": True}


MORE3 = {"draft_vocab_size": DRAFT}


IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


LAST3 = {"draft_vocab_size": VOCAB}


OWN3 = {
    **LLAMA,
    "hidden_size": 16,
    "head_dim": WIDTH,
    "target_hidden_size": D,
    "draft_vocab_size": DRAFT,
}


LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}


SPEC3 = nested("eagle3", draft_vocab_size=DRAFT, norm_before_residual=True, target_hidden_size=None, norm_before_fc=False,
               embed_requires_grad=True, eagle_aux_hidden_state_layer_ids=None)  # fmt: skip


LAYOUTS: dict[str, tuple[str, dict[str, Any], Tensors, str]] = {
    "eagle, official": ("eagle", LLAMA, drawn(FUSING | FIRST | EMBED, torch.float32), "pytorch_model.bin"),
    "eagle, safetensors": ("eagle", {**LLAMA, **LINEAR, "bias": True}, drawn(FUSING | FIRST), "model.safetensors"),
    "eagle, no bias": ("eagle", {**LLAMA, "bias": False}, drawn(FIRST | EMBED, torch.bfloat16), "pytorch_model.bin"),
    "eagle, qwen2": ("eagle", QWEN2, drawn(FUSING | FIRST | BIASES), "model.safetensors"),
    "hass": ("eagle", {**LLAMA, "bias": False, "topk_w": 1}, drawn(FIRST | EMBED), "pytorch_model.bin"),
    "eagle3, reduced": ("eagle3", {**LLAMA, **MORE3}, drawn(third()) | maps(), "pytorch_model.bin"),
    "eagle3, layers": ("eagle3", {**LLAMA, **MORE3, **IDS}, drawn(third()) | maps(), "model.safetensors"),
    "eagle3, full": ("eagle3", {**LLAMA, **LAST3}, drawn(third(draft=VOCAB)), "pytorch_model.bin"),
    "eagle3, full with maps": ("eagle3", {**LLAMA, **LAST3}, drawn(third(draft=VOCAB)) | maps(VOCAB), "model.safetensors"),
    "eagle3, own width": (
        "eagle3", OWN3, drawn(third(size=16) | {"embed_tokens.weight": (VOCAB, 16)}) | maps(), "model.safetensors"),
    "eagle3, sharded": ("eagle3", {**LLAMA, **MORE3}, drawn(third(), torch.bfloat16) | maps(), "shards"),
    "speculators eagle": (
        "eagle", nested("eagle", fusion_bias=True), spoken(drawn(FUSING | FIRST), "eagle"), "model.safetensors"),
    "speculators hass": (
        "eagle", nested("eagle", layernorms=False), spoken(drawn(FIRST, torch.bfloat16), "eagle"), "model.safetensors"),
    "speculators eagle3": ("eagle3", SPEC3, drawn(third("layers.0.")) | maps(), "model.safetensors"),
    "speculators eagle3, embedding": ("eagle3", {**SPEC3, **IDS}, drawn(third("layers.0.") | EMBED) | maps(), "shards"),
    "speculators eagle3, full": (
        "eagle3", nested("eagle3", draft_vocab_size=VOCAB), drawn(third("layers.0.", VOCAB)), "model.safetensors"),
}  # fmt: skip


def there(name: str, folder: Path) -> tuple[Path, str, Tensors]:
    """A layout's folder, method and tensors."""
    method, config, tensors, file = LAYOUTS[name]
    path = (
        sharded(folder, config, tensors)
        if file == "shards"
        else stored(folder, config, tensors, file)
    )
    return path, method, tensors
