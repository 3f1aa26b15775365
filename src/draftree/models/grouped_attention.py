"""Grouped-query attention without copies of keys and values; `grouped` in transformers.

transformers' own `sdpa` copies keys and values for each such head whenever a mask is given, as for
the tokens of a tree: for the heads of Llama 3 it writes and reads four times the size of the cache.
Here the queries of a group are put one after the other, and only their mask, which is small for
trees, is repeated. Both use torch's scaled dot product.

Shapes: B rows, H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a
value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from draftree.errors import UserError
from draftree.models.backend_names import GROUPED

MAX_GROUPED_TOKENS = 256
"""The most queries per sequence that are grouped; a prompt's mask would exceed keys and values."""


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of grouped heads without copies of keys and values.

    transformers calls it with the signature of its attention functions. Any pass other than a draft
    tree over grouped heads is left to transformers' `sdpa`.

    Args:
        module: the attention layer.
        query: [B, H, n, D] queries.
        key: [B, G, S, D] keys.
        value: [B, G, S, W] values.
        attention_mask: [B or 1, H or 1, n, ≥ S] added to the scores, or boolean with True at
            visible slots.
        dropout: as in `sdpa`.
        scaling: the factor of the scores; by default 1/√D.
        position_bias: as in `sdpa`.
        others: as in `sdpa`.

    Returns:
        The output [B, n, H, W], and None in place of attention weights.

    Raises:
        UserError: the layer has attention sinks, which neither this function nor `sdpa` computes.
    """
    if others.get("s_aux") is not None:
        told = f"{type(module).__name__} has attention sinks, which 'grouped' does not compute"
        raise UserError(f"{told}: allowed attn_implementation is eager or draftree")
    (_, heads, n, _), (_, groups, slots, _) = query.shape, value.shape
    each, mask = heads // groups, attention_mask
    if (
        mask is None
        or position_bias is not None
        or others.get("softcap") is not None
        or each == 1
        or n > MAX_GROUPED_TOKENS
    ):
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, position_bias=position_bias, **others
        )
    mask = mask[..., :slots]
    mask = (
        mask.repeat(1, 1, each, 1)
        if mask.shape[1] == 1
        else mask.reshape(-1, groups, each * n, slots)
    )
    return attend_by_group(query, key, value, mask, scaling, dropout).contiguous(), None


def attend_by_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention output [B, n, H, W] of grouped heads, as a view of other strides.

    Args:
        query: [B, H, n, D] queries.
        key: [B, G, S, D] keys.
        value: [B, G, S, W] values.
        mask: [B or 1, G or 1, H/G · n, S] the mask of the queries of a group, one after the other.
        scaling: the factor of the scores; by default 1/√D.
        dropout: as in `sdpa`.
    """
    (rows, heads, n, width), groups = query.shape, key.shape[1]
    together = query.reshape(rows, groups, heads // groups * n, width)
    out = scaled_dot_product_attention(together, key, value, mask, dropout, scale=scaling)
    return out.reshape(rows, heads, n, -1).transpose(1, 2)


def register_grouped() -> None:
    """Register grouped attention in transformers, so that any model accepts it by its name."""
    AttentionInterface.register(GROUPED, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, sdpa_mask)
