"""The parts of a Llama-like decoder layer, by their names in transformers."""

from typing import Any

import torch
from torch import Tensor, nn

CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The submodules of a Llama layer."""
ATTENTION = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
"""The first linear layers of an attention: separate, or fused as in Phi-3."""
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""The submodules of a gated feed-forward layer."""
FUSED = {"gate_up_proj", "down_proj", "activation_fn"}
"""The submodules of a gated feed-forward layer whose first two linear layers are fused."""
STACK = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""The submodules of a transformer."""


def child_names(module: nn.Module) -> set[str]:
    """Return the names of a module's children without dropout, which has no effect in decoding."""
    return {name for name, part in module.named_children() if not isinstance(part, nn.Dropout)}


def first_linears(part: Any) -> list[Any]:
    """Return the linear layers that read the input of an attention or feed-forward layer."""
    known = (*ATTENTION, ("gate_proj", "up_proj"), ("gate_up_proj",))
    return next(
        ([getattr(part, n) for n in names] for names in known if hasattr(part, names[0])), []
    )


def linears(layer: Any) -> list[Any] | None:
    """Return the linear layers of a Llama layer; None if the module has another structure.

    An attention with parameters of its own, such as attention sinks, is another structure.

    Args:
        layer: a module whose attention and feed-forward layer are `self_attn` and `mlp`.
    """
    attention, mlp = layer.self_attn, layer.mlp
    inner = child_names(attention) - {"q_norm", "k_norm"}
    known = [{*names, "o_proj"} for names in ATTENTION]
    own = [*attention.parameters(recurse=False)]
    if inner not in known or own or child_names(mlp) not in (GATED, FUSED):
        return None
    return [*first_linears(attention), attention.o_proj, *first_linears(mlp), mlp.down_proj]


def is_rms_norm(norm: Any) -> bool:
    """Return whether a norm has the parts of RMSNorm: one weight, and an ε."""
    return [name for name, _ in norm.named_parameters()] == ["weight"] and epsilon(norm) != 0


def norms(layer: Any) -> list[Any]:
    """Return the norms of a Llama layer, those of a drafter's features and of heads included."""
    places = (
        (layer, ("input_layernorm", "post_attention_layernorm", "hidden_norm")),
        (layer.self_attn, ("q_norm", "k_norm")),
    )
    found = [getattr(part, name, None) for part, names in places for name in names]
    return [norm for norm in found if norm is not None]


def epsilon(norm: Any) -> float:
    """Return the ε that a norm adds to the mean square, also of a norm that a kernel computes."""
    own = vars(getattr(norm, "replaced_module", norm))
    return float(own.get("variance_epsilon", own.get("eps", 0.0)))


def module_kind(module: nn.Module) -> str:
    """Return a text that is equal for modules that compute the same with other weights.

    It contains the plain attributes of all submodules, such as `use_rope` of SmolLM3's attention,
    which `repr` does not show. The index of a layer makes no difference.
    """
    plain = [
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str | None) and key != "layer_idx"
    ]
    return f"{module!r} {plain}"


def causal_mask(n: int, like: Tensor) -> Tensor:
    """Return the causal additive mask [1, 1, n, n], with the dtype and device of `like`."""
    lowest = torch.finfo(like.dtype).min
    return torch.full((1, 1, n, n), lowest, dtype=like.dtype, device=like.device).triu(1)
