"""Batch-invariant attention, registered in transformers as `draftree`.

The output of a query depends on the query, and on the visible keys and values in their order. It
does not depend on the width of the pass, on the slots of the keys, on hidden slots between them, on
other rows, padding, or the cut of a prompt. On a CPU, native kernels guarantee this by construction
(`native/`). Elsewhere sums are computed in float64 and rounded once; another order then gives
another rounding with a probability of about 10⁻¹³ an element in bfloat16.

Shapes: B rows, H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a
value.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from draftree.errors import UserError
from draftree.models.backend_names import EXACT
from draftree.native import cpu_threads, transformer_kernels
from draftree.native.transformer_kernels import address
from draftree.utils.hardware import has_float64

MAX_SINGLE_THREAD_OPERATIONS = 2_000_000
"""Number of operations up to which one thread is as fast as several.

A slot of a group counts 64, and each slot that a query sees counts about 10.
"""


def exact_attention(  # noqa: PLR0913  the signature of transformers' attention functions
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute batch-invariant attention.

    transformers calls it with the signature of its attention functions.

    Args:
        module: the attention layer.
        query: [B, H, n, D] queries.
        key: [B, G, S, D] keys.
        value: [B, G, S, W] values.
        attention_mask: [B or 1, H or 1, n, ≥ S] added to the scores, or boolean with True at
            visible slots; by default causal.
        dropout: must be 0, because the function has no gradients.
        scaling: the factor of the scores; by default 1/√D.
        softcap: the bound to which tanh limits the scores.
        s_aux: [H] scores of attention sinks.
        position_bias: added to the scores, in the same shape as the mask.
        is_causal: whether queries without a mask see no later slots.

    Returns:
        The output [B, n, H, W], and None in place of attention weights.

    Raises:
        UserError: dropout is not 0, or the device has no float64.
    """
    if dropout:
        raise UserError(
            f"attention '{EXACT}' has dropout {dropout}, allowed is 0: it is for decoding"
        )
    if not has_float64(query.device):
        told = f"attention '{EXACT}' sums in float64, which '{query.device.type}' lacks"
        raise UserError(f"{told}: allowed there is sdpa or eager")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask = to_additive_mask(query, key.shape[2], attention_mask, position_bias, causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = _native if supports_native_attention(query, key, value) else _in_float64
    return how(query, key, value, mask, scale, softcap or 0.0, s_aux).to(query.dtype), None


def supports_native_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether native kernels compute the attention of some queries."""
    given = (query, key, value)
    return (
        transformer_kernels.core is not None
        and query.dtype in transformer_kernels.DTYPES
        and all(t.device.type == "cpu" and t.dtype is query.dtype for t in given)
        and not any(t.requires_grad for t in given)
    )


def to_additive_mask(
    query: Tensor, slots: int, mask: Tensor | None, bias: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Return a mask in additive form [B or 1, H or 1, n, S]."""
    n = query.shape[2]
    if mask is None and n == 1:  # it sees all slots
        mask = torch.zeros(1, 1, 1, slots, dtype=query.dtype, device=query.device)
    elif mask is None:
        mask = torch.ones(n, slots, dtype=torch.bool, device=query.device).tril(
            slots - n if causal else slots
        )[None, None]
    mask = mask[..., :slots]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    return mask if bias is None else mask + bias[..., :slots].to(mask.dtype)


def _native(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    (rows, heads, n, width), (_, groups, slots, wide) = q.shape, v.shape
    q, k, v, mask = map(
        _with_adjacent_entries,
        (q, k, v, mask if mask.dtype in transformer_kernels.DTYPES else mask.float()),
    )
    out, it = torch.empty(rows, n, heads, wide, dtype=q.dtype), transformer_kernels.core.Attention()
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    it.sequences = rows
    it.groups = groups
    it.heads = heads // groups
    it.tokens = n
    it.slots = slots
    it.key_dim, it.value_dim, it.dtype, it.mask_dtype = (
        width,
        wide,
        transformer_kernels.code_of(q.dtype),
        transformer_kernels.code_of(mask.dtype),
    )
    it.queries = address(q)
    it.query_strides = q.stride()[:3]
    it.mask = address(mask)
    it.keys = address(k)
    it.key_strides = k.stride()[:3]
    it.values = address(v)
    it.value_strides = v.stride()[:3]
    it.mask_strides = tuple(
        stride * (size > 1) for stride, size in zip(mask.stride()[:3], mask.shape[:3], strict=True)
    )
    it.sinks = address(sinks)
    it.scale = scale
    it.cap = cap
    it.hidden_below, it.outputs = torch.finfo(mask.dtype).min / 2, address(out)
    many = rows * slots * (64 * groups + 10 * heads * n) > MAX_SINGLE_THREAD_OPERATIONS
    transformer_kernels.core.attend(it, cpu_threads.thread_count() if many else 1)
    return out


def _with_adjacent_entries(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _in_float64(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    rows, heads, n, _ = q.shape
    together = (
        rows,
        k.shape[1],
        heads // k.shape[1] * n,
        -1,
    )  # the queries that share a key-value head
    scores = (q.double().reshape(together) @ k.double().transpose(-1, -2)).reshape(
        rows, heads, n, -1
    ) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores + mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().reshape(1, -1, 1, 1).expand(rows, -1, n, 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., : k.shape[2]]  # a fully masked query gets zeros
    return (
        (weights.reshape(together) @ v.double())
        .reshape(rows, heads, n, -1)
        .transpose(1, 2)
        .contiguous()
    )


def register() -> None:
    """Register batch-invariant attention in transformers, so that any model accepts its name."""
    AttentionInterface.register(EXACT, exact_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(EXACT, eager_mask)
