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
from draftree.tree import Floats

Array = NDArray[Any]
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
    mask = _mask(query, key.shape[2], attention_mask, position_bias, causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    compiled = query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16) and not query.requires_grad
    how = _compiled if compiled else _in_float64
    return how(query, key, value, mask, scale, softcap or 0.0, s_aux).to(query.dtype), None


def _mask(query: Tensor, slots: int, mask: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor:
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

    (rows, heads, n, width), (_, groups, slots, _) = q.shape, k.shape
    found = np.empty((rows, n, heads, v.shape[3]), np.float32)
    limits = np.array([scale, cap, torch.finfo(mask.dtype).min / 2], np.float32)
    sink = np.zeros(0, np.float32) if sinks is None else _numbers(sinks)
    queries = _numbers(q if width % 4 == 0 else pad(q, (0, -width % 4)))
    (keys, of_keys), (values, of_values) = _memory(k), _memory(v)
    work = partial(attend(), queries, keys, values, _numbers(mask), sink, limits, np.array([of_keys, of_values]), found)
    parts = rows * groups * -(-n // QUERIES)
    many = rows * slots * (64 * groups + 10 * heads * n) > FEW
    threads = min(torch.get_num_threads(), parts) if many else 1
    first, *rest = itertools.pairwise(parts * i // threads for i in range(threads + 1))
    others = [_workers(threads).submit(work, *part) for part in rest]
    work(*first)
    for other in others:
        other.result()
    return torch.from_numpy(found)


def _numbers(tensor: Tensor) -> Floats:
    found: Floats = tensor.detach().float().contiguous().numpy()
    return found


def _memory(tensor: Tensor) -> tuple[Array, list[int]]:
    """The words of keys or values as they lie in memory, and where each is found there."""
    word = 8 // tensor.element_size()  # numbers of one
    if tensor.stride(3) != 1 or any(n % word for n in (tensor.shape[3], tensor.storage_offset(), *tensor.stride()[:3])):
        tensor = pad(tensor, (0, -tensor.shape[3] % word)).contiguous()
    (rows, groups, slots, entries), (by_row, by_group, by_slot, _) = tensor.shape, tensor.stride()
    span = (rows - 1) * by_row + (groups - 1) * by_group + (slots - 1) * by_slot + entries
    flat: Array = tensor.detach().as_strided((span,), (1,)).view(torch.int64).numpy().view(np.uint64)
    half = int(tensor.dtype == torch.bfloat16)
    return flat, [half, groups, entries // word, by_row // word, by_group // word, by_slot // word]


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
