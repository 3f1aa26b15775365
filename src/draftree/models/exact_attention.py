"""Attention that gives a query the same bits alone and in company, by the name `draftree` in transformers.

The output of a query depends on the query, and on the keys and values that it sees in their order. It does not depend on the
width of the pass, on the slots that keys lie in or on hidden ones between them, on other rows, padding, or the cut of a prompt.
On a CPU, for float32 and bfloat16, that holds by construction (`kernels/attend.py`). Elsewhere sums are taken in float64 and
rounded once: there another order gives another rounding with a probability of some 10⁻¹³ an element in bfloat16.

Shapes: B rows, H query heads, G key-value heads, n queries, S slots, D and W entries of a key and a value.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from draftree.errors import UserError
from draftree.models.sources import EXACT

NONE: NDArray[Any] = np.zeros(0, np.float32)
FEW = 2_000_000
"""Operations below which one thread is as fast as several: 64 for each slot of a group, some 10 for each that a query sees."""


def exact_attention(
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
    """Attention as transformers calls it.

    Args:
        module: the layer.
        query: [B, H, n, D].
        key: [B, G, S, D].
        value: [B, G, S, W].
        attention_mask: [B or 1, H or 1, n, ≥ S] added to the scores, or true where a slot is seen; by default causal.
        dropout: 0, as nothing is trained through it.
        scaling: of the scores; by default 1/√D.
        softcap: scores are held within ± this by tanh.
        s_aux: [H] scores of attention sinks.
        position_bias: added to the scores, as a mask.
        is_causal: whether queries without a mask see no later slots.

    Returns:
        [B, n, H, W], and no weights.

    Raises:
        UserError: dropout is asked for.
    """
    if dropout:
        raise UserError(f"attention '{EXACT}' has dropout {dropout}, allowed is 0: it is for decoding")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask = additive(query, key.shape[2], attention_mask, position_bias, causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    compiled = query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16) and not query.requires_grad
    how = _compiled if compiled else _in_float64
    return how(query, key, value, mask, scale, softcap or 0.0, s_aux).to(query.dtype), None


def additive(query: Tensor, slots: int, mask: Tensor | None, bias: Tensor | None = None, causal: bool = True) -> Tensor:
    """[B or 1, H or 1, n, S] what is added to the scores."""
    n = query.shape[2]
    if mask is None and n == 1:  # which sees all
        mask = torch.zeros(1, 1, 1, slots)
    elif mask is None:
        mask = torch.ones(n, slots, dtype=torch.bool, device=query.device).tril(slots - n if causal else slots)[None, None]
    mask = mask[..., :slots]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask if bias is None else mask + bias[..., :slots].to(mask.dtype)


def _compiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None) -> Tensor:
    from draftree.kernels.attend import QUERIES, attend  # numba takes half a second to import

    (rows, heads, n, width), (_, groups, slots, _), wide = q.shape, k.shape, v.shape[3]
    q, mask = _rows(q), _rows(mask)
    (_keys, of_keys), (values, of_values) = _memory(k), _memory(v)  # which have to live until they are read
    found = torch.empty(rows, n, heads, values.shape[3], dtype=q.dtype)
    by_row, by_head, by_query, _ = mask.stride()
    of_mask = mask.data_ptr(), _half(mask), by_row * (len(mask) > 1), by_head * (mask.shape[1] > 1), by_query, mask.shape[1]
    of_queries = q.data_ptr(), _half(q), *q.stride()[:3]
    sink = NONE if sinks is None else sinks.detach().float().contiguous().numpy()
    sizes, limits = (heads, groups, n, slots, width, values.shape[3]), (scale, cap, torch.finfo(mask.dtype).min / 2)
    work = partial(attend(), sizes, of_queries, of_keys, of_values, of_mask, sink, limits, found.data_ptr())
    parts = rows * groups * -(-n // QUERIES)
    many = rows * slots * (64 * groups + 10 * heads * n) > FEW
    threads = min(torch.get_num_threads(), parts) if many else 1
    first, *rest = itertools.pairwise(parts * i // threads for i in range(threads + 1))
    others = [_workers(threads).submit(work, *part) for part in rest]
    work(*first)
    for other in others:
        other.result()
    return found if found.shape[3] == wide else found[..., :wide]


def _half(tensor: Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)


def _rows(tensor: Tensor) -> Tensor:
    """A tensor of bfloat16 or float32 whose last entries lie beside each other."""
    tensor = tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.float()
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _memory(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Keys or values that lie in words, and where each is found."""
    word = 8 // tensor.element_size()  # numbers of one
    if tensor.stride(3) != 1 or any(n % word for n in (tensor.shape[3], tensor.storage_offset(), *tensor.stride()[:3])):
        tensor = pad(tensor, (0, -tensor.shape[3] % word)).contiguous()
    by_row, by_group, by_slot, _ = tensor.stride()
    words = tensor.shape[3] // word, by_row // word, by_group // word, by_slot // word
    return tensor, (tensor.data_ptr(), _half(tensor), *words)


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="draftree attention")


def _in_float64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None) -> Tensor:
    rows, heads, n, _ = q.shape
    together = (rows, k.shape[1], heads // k.shape[1] * n, -1)  # the queries that share a key-value head
    scores = (q.double().reshape(together) @ k.double().transpose(-1, -2)).reshape(rows, heads, n, -1) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores + mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().reshape(1, -1, 1, 1).expand(rows, -1, n, 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., : k.shape[2]]  # what sees nothing weighs nothing
    return (weights.reshape(together) @ v.double()).reshape(rows, heads, n, -1).transpose(1, 2).contiguous()


def register() -> None:
    """Makes this attention known to transformers, so that any model takes it by its name."""
    AttentionInterface.register(EXACT, exact_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(EXACT, eager_mask)
