"""The network of GLIDE: Llama layers with cross-attention to the target's KV cache.

Shapes: B batch, n tokens a slot in one pass, S target slots, D hidden size, V vocabulary, H
key-value heads of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    repeat_kv,
    rotate_half,
)

from draftree.drafters.neural.layer_stack import CACHE
from draftree.models.invariant_attention import exact_attention, supports_native_attention
from draftree.models.model_config import LENGTH_DEPENDENT_ROPE
from draftree.target.target import Target

OFFICIAL_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""Rotary embedding of queries in the official code, whatever that of the target's keys is."""


@dataclass(frozen=True)
class View:
    """The target layer that a draft layer reads.

    Attributes:
        layer: the number of the target layer, from 0.
        heads: number of query heads.
        key: size of a key.
        value: size of a value.
        rotary: config of the rotary embedding of queries. Its head size is the number of rotated
            entries of a key. None if keys are not rotated.
    """

    layer: int
    heads: int
    key: int
    value: int
    rotary: LlamaConfig | None

    @classmethod
    def of(cls, target: Target, layer: int, variant: str) -> Self:
        """Return the view of a target layer.

        Queries get the rotary embedding of the layer's keys, as far as the config describes it.
        """
        config, shape = target.decoder.config, target.decoder.shapes[layer]
        rope = dict(OFFICIAL_ROPE) if variant == "official" else _rope(config, layer)
        share = 1.0 if rope is None else float(rope.pop("partial_rotary_factor", 1.0))
        heads = int(config.num_attention_heads)
        turned = int(shape.key * share) // 2 * 2
        rotary = None
        if rope is not None and turned:
            rotary = LlamaConfig(
                hidden_size=heads * turned,
                num_attention_heads=heads,
                head_dim=turned,
                max_position_embeddings=min(target.decoder.context, 2**20),
                rope_parameters=cast(Any, rope),
            )
        return cls(layer, heads, shape.key, shape.value, rotary)


def _rope(config: PreTrainedConfig, layer: int) -> dict[str, Any] | None:
    """Return the rope parameters of a target layer; None without a rotary embedding.

    If the frequencies depend on the length of the text, those of a short text are returned.
    """
    said = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None)
    rope = dict(said.get(types[layer], said) if types else said)
    if "rope_theta" not in rope:
        return None
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        return {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope} | {
            "rope_type": "default"
        }
    return rope


@dataclass(frozen=True)
class Glimpse:
    """The target's keys and values that one pass reads.

    Attributes:
        kv: for each draft layer, keys and values [B, H, S, width].
        visible: [B or 1, 1, n, S] whether a query sees a key.
    """

    kv: Sequence[tuple[Tensor, Tensor]]
    visible: Tensor


@final
class CrossAttention(nn.Module):
    """Attention of the draft model's queries to the cached keys and values of a target layer.

    It computes no keys and values.
    """

    def __init__(self, config: LlamaConfig, view: View) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.hidden_size, view.heads * view.key, bias=False)
        self.o_proj = nn.Linear(view.heads * view.value, config.hidden_size, bias=False)
        self.look_at(view)

    def look_at(self, view: View) -> None:
        """Read another target layer from now on; its keys and values must have the same sizes."""
        self.view = view
        self.rotary = None if view.rotary is None else LlamaRotaryEmbedding(view.rotary)

    def forward(
        self, states: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor], visible: Tensor
    ) -> Tensor:
        """Return the attention's output [B, n, D], which is zero for a query that sees no key."""
        queries = (
            self.q_proj(states).unflatten(-1, (self.view.heads, self.view.key)).transpose(1, 2)
        )
        queries = self._rotate(queries, positions)
        keys, values = (t.to(queries.dtype) for t in kv)
        if supports_native_attention(queries, keys, values):
            mixed, _ = exact_attention(self, queries, keys, values, visible)
        else:
            keys, values = (repeat_kv(t, self.view.heads // t.shape[1]) for t in (keys, values))
            # A softmax over nothing would be NaN, in the gradient too.
            some = visible.any(-1, keepdim=True)
            mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=visible | ~some)
            mixed = (mixed * some).transpose(1, 2)
        out: Tensor = self.o_proj(mixed.flatten(2).to(states.dtype))
        return out

    def _rotate(self, queries: Tensor, positions: Tensor) -> Tensor:
        if self.rotary is None:
            return queries
        cos, sin = (t[:, None] for t in self.rotary(queries, positions))
        turned, rest = queries[..., : cos.shape[-1]], queries[..., cos.shape[-1] :]
        return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


@final
class GlimpseLayer(LlamaDecoderLayer):
    """A Llama layer with cross-attention after its self-attention.

    The cross-attention reads the residual stream without a norm, as in the official code.
    """

    def __init__(self, config: LlamaConfig, index: int, view: View | None) -> None:
        super().__init__(config, index)
        self.cross_attn = None if view is None else CrossAttention(config, view)
        self.index = index

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output [B, n, D] for hidden states [B, n, D].

        The model is called with the argument `glimpse`, a `Glimpse`, which transformers passes to
        this layer.
        """
        states, glimpse = hidden_states, kwargs.get("glimpse")
        own, _ = self.self_attn(
            self.input_layernorm(states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **{CACHE: kwargs.get(CACHE)},
        )
        states = states + own
        if self.cross_attn is not None and glimpse is not None:
            states = states + self.cross_attn(
                states, position_ids, glimpse.kv[self.index], glimpse.visible
            )
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


@final
class GlimpseModel(LlamaForCausalLM):
    """The network of GLIDE, with the tensor names of the official code."""

    _tied_weights_keys = {}  # noqa: RUF012  (whatever a config says, embedding and LM head are two)

    def __init__(self, config: LlamaConfig, views: Sequence[View | None]) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(
            [GlimpseLayer(config, i, view) for i, view in enumerate(views)]
        )
        cast(Any, self).post_init()  # untyped, as much of transformers is
