"""The parts of a Llama-like decoder layer, by their names in transformers."""

from typing import Any

import torch
from torch import Tensor, nn

CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The parts of a layer."""
ATTENTION = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
"""The first linear layers of an attention: apart, or fused as Phi-3 has them."""
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""The parts of a gated feed-forward layer."""
FUSED = {"gate_up_proj", "down_proj", "activation_fn"}
"""Those of one whose first two linear layers are fused."""
STACK = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""The parts of a transformer around its layers."""
CLOSE, SUMS = 4.0, 64.0
"""How far a layer's output may be from the model's own, as a share of what the layer adds. `CLOSE`
is in units of the layer's precision, `SUMS` in those of float32, as sums of thousands of terms are
taken in another order."""


def child_names(module: nn.Module) -> set[str]:
    """Return the names of a module's parts without dropout, which does nothing in decoding."""
    return {name for name, part in module.named_children() if not isinstance(part, nn.Dropout)}


def first_linears(part: Any) -> list[Any]:
    """Return the linear layers that an attention or a feed-forward layer begins with."""
    known = (*ATTENTION, ("gate_proj", "up_proj"), ("gate_up_proj",))
    return next(
        ([getattr(part, n) for n in names] for names in known if hasattr(part, names[0])), []
    )


def linears(layer: Any) -> list[Any] | None:
    """Return the linear layers of a layer of the Llama kind; None for another one.

    Args:
        layer: a module whose attention and feed-forward layer are `self_attn` and `mlp`.
    """
    attention, mlp = layer.self_attn, layer.mlp
    inner = child_names(attention) - {"q_norm", "k_norm"}
    known = [{*names, "o_proj"} for names in ATTENTION]
    if inner not in known or child_names(mlp) not in (GATED, FUSED):
        return None
    return [*first_linears(attention), attention.o_proj, *first_linears(mlp), mlp.down_proj]


def epsilon(norm: Any) -> float:
    """Return the ε that a norm adds to a mean square."""
    return float(vars(norm).get("variance_epsilon", vars(norm).get("eps", 0.0)))


def differs_by_rounding(found: Tensor, wanted: Tensor, before: Tensor) -> bool:
    """Return whether a layer's output differs from the model's own by rounding alone.

    Args:
        found: [R, n, H] the output.
        wanted: [R, n, H] the model's own.
        before: [R, n, H] the layer's input, in the layer's precision.
    """
    apart = (found.float() - wanted.float()).norm() / (wanted - before).float().norm()
    allowed = CLOSE * torch.finfo(before.dtype).eps + SUMS * torch.finfo(torch.float32).eps
    return bool(apart < allowed)
