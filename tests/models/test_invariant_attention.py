"""Attention `draftree`: near what eager attention gives, and for each query the very same bits alone and in any company."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from architectures import VOCAB, fresh
from draftree import Request, Target, UserError, load
from draftree.models.invariant_attention import EXACT, _in_float64, exact_attention
from folders import target_folder

LAYER: Any = SimpleNamespace(is_causal=True)
DTYPES = (torch.float32, torch.bfloat16)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def hidden(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "values", "more"),
    [
        (32, 32, {}),
        (30, 24, {"scaling": 0.3}),
        (32, 32, {"softcap": 4.0}),
        (32, 32, {"s_aux": torch.tensor([-1.0, 0.0, 3.0, 0.5, 40.0, 1.0])}),
        (192, 128, {"position_bias": drawn(9, 1, 6, 40, 150)}),
    ],
)
def test_invariant_attention_is_near_eager_attention(
    dtype: torch.dtype, width: int, values: int, more: dict[str, Any]
) -> None:
    q, k, v = (
        drawn(i, 2, heads, n, w, dtype=dtype)
        for i, (heads, n, w) in enumerate([(6, 40, width), (2, 150, width), (2, 150, values)])
    )
    mask = torch.zeros(2, 1, 40, 150, dtype=dtype).masked_fill_(
        drawn(5, 2, 1, 40, 150) > 0.5, hidden(dtype)
    )
    found, none = exact_attention(LAYER, q, k, v, mask, **more)
    assert none is None
    assert found.dtype == dtype
    bias = more.get("position_bias", torch.zeros(1))
    wanted = _in_float64(
        q,
        k,
        v,
        mask + bias.to(dtype),
        more.get("scaling", width**-0.5),
        more.get("softcap", 0.0),
        more.get("s_aux"),
    )
    step = torch.finfo(dtype).eps
    assert float((found.double() - wanted).abs().max()) < (
        20 * step if dtype == torch.float32 else step * float(wanted.abs().max())
    )


def test_float64_inside_is_eager_attention() -> None:
    q, k, v = (
        drawn(i, 2, h, n, 16, dtype=torch.float64)
        for i, (h, n) in enumerate([(4, 5), (2, 9), (2, 9)])
    )
    found, _ = exact_attention(LAYER, q, k, v)
    keys, theirs = (t.repeat_interleave(2, 1) for t in (k, v))
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, keys, theirs, seen).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    low, _ = exact_attention(LAYER, q.float(), k.float(), v.float(), seen[None, None])
    torch.testing.assert_close(low.double(), wanted, rtol=0, atol=1e-6)


@examples(max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 200),
    st.integers(1, 70),
    st.integers(0, 40),
    st.integers(0, 90),
    st.integers(0, 2**32 - 1),
)
def test_a_querys_bits_do_not_depend_on_company(
    dtype: torch.dtype, length: int, width: int, gaps: int, behind: int, seed: int
) -> None:
    """A query alone over the keys it sees, and among others, with gaps between the slots, slots behind, and another row."""
    rng = np.random.default_rng(seed)
    q = drawn(seed, 2, 4, width, 16, dtype=dtype)
    k = drawn(seed + 1, 2, 2, length, 16, dtype=dtype)
    v = drawn(seed + 2, 2, 2, length, 16, dtype=dtype)
    seen = rng.random((width, length)) < 0.6
    seen[:, 0] = True
    slots = np.sort(rng.choice(length + gaps, length, replace=False))
    wide_k, wide_v = (
        drawn(seed + 3 + i, 2, 2, length + gaps + behind, 16, dtype=dtype) * 50 for i in range(2)
    )
    wide_k[:, :, slots], wide_v[:, :, slots] = k, v
    mask = torch.full((1, 1, width, length + gaps + behind), hidden(dtype), dtype=dtype)
    at = np.ix_([0], [0], range(width), slots)
    mask[at] = torch.from_numpy(np.where(seen, 0.0, hidden(dtype))).to(dtype)[None, None]
    whole, _ = exact_attention(LAYER, q, wide_k, wide_v, mask)
    for i in rng.choice(width, min(width, 3), replace=False):
        at = torch.from_numpy(np.flatnonzero(seen[i]))
        for row in range(2):
            alone, _ = exact_attention(
                LAYER,
                q[row : row + 1, :, i : i + 1],
                k[row : row + 1, :, at],
                v[row : row + 1, :, at],
            )
            assert torch.equal(alone[0, 0], whole[row, i])


def test_query_without_keys_gives_no_nan_and_dropout_is_refused() -> None:
    q = drawn(0, 1, 2, 3, 8)
    for dtype in (*DTYPES, torch.float64):
        one = q.to(dtype)
        mask = torch.full((1, 1, 3, 3), hidden(dtype), dtype=dtype)
        assert not exact_attention(LAYER, one, one, one, mask)[0].any()
    with pytest.raises(UserError, match=r"dropout 0\.1"):
        exact_attention(LAYER, q, q, q, dropout=0.1)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "gemma3", "mistral-sliding", "phi3-sliding", "gpt_neox", "mixtral-sliding"],
)
def test_models_read_with_it(name: str) -> None:
    """Windows, soft caps and grouped heads: as with eager attention, and alone as among rows that are padded on the left."""
    model, eager = fresh(name).float(), fresh(name)
    model.set_attn_implementation(EXACT)
    eager.set_attn_implementation("eager")
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB, (1, 11)))
    with torch.no_grad():
        wanted, found = eager(ids).logits, model(ids).logits
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    padded = torch.nn.functional.pad(torch.cat((ids, ids.flip(1))), (4, 0))
    mask = (torch.arange(15) >= 4).long().expand(2, -1)
    beside: Any = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    alone: Any = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )  # type: ignore[operator]
    assert beside[0, 15:].tolist()[: alone.shape[1] - 11] == alone[0, 11:].tolist()
    engine = load(model, drafter="suffix", policy="yield")
    assert (
        engine.write([Request(ids[0].tolist(), 8, engine.eos)]).tokens[0] == alone[0, 11:].tolist()
    )


def test_a_target_is_loaded_with_it_by_name(tmp_path: Path) -> None:
    target_folder(tmp_path)
    target = Target.load(str(tmp_path), attn_implementation=EXACT)
    assert target.decoder.config._attn_implementation == EXACT
    with pytest.raises(UserError, match="sdpa or eager or grouped or draftree"):
        Target.load(str(tmp_path), attn_implementation="flash_attention_2")
