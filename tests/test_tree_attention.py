"""The Triton kernel of tree attention beside the reference, in Triton's interpreter where there is no GPU."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":  # read when torch imports triton: too late here
    pytest.skip("without a GPU Triton's interpreter is needed: TRITON_INTERPRET=1", allow_module_level=True)

from draftree.kernels.tree_attention import SLOTS, tree_attention
from draftree.models.exact_attention import _in_float64

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies the bits of bfloat16, not its numbers."""


def compared(draw: np.random.Generator, group: int, width: int, dtype: torch.dtype, hidden: bool = False) -> None:
    """A random forest's mask: rows of different lengths, each token sees what is committed and some of the tokens before it."""
    rows, groups, n = (int(draw.integers(1, top)) for top in (3, 3, 20))
    lengths = draw.integers(0, 2 * SLOTS + 9, rows)
    slots = int(lengths.max()) + n
    mask = torch.full((rows, 1, n, slots), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
    for r, length in enumerate(lengths.tolist()):
        seen = torch.from_numpy((draw.random((n, n)) < 0.4) | np.eye(n, dtype=bool)).tril()
        mask[r, 0, :, :length] = 0
        mask[r, 0, :, length : length + n].masked_fill_(seen.to(DEVICE), 0)
    if hidden:
        mask[0, 0, 0] = torch.finfo(dtype).min

    def drawn(heads: int, count: int) -> Tensor:  # as they lie in a pass: queries turned, slots cut from more
        whole = torch.from_numpy(draw.normal(size=(rows, count + 5, heads, width))).to(DEVICE, dtype)
        return whole.transpose(1, 2)[:, :, :count]

    q, k, v = drawn(groups * group, n), drawn(groups, slots), drawn(groups, slots)
    found, wanted = tree_attention(q, k, v, mask, width**-0.5), _in_float64(q, k, v, mask, width**-0.5, 0.0, None)
    assert found.dtype is dtype
    near = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_it_is_the_reference_under_random_masks(group: int, width: int) -> None:
    draw = np.random.default_rng(group * width)
    for _ in range(34):  # 204 in all
        compared(draw, group, width, torch.float32)


@pytest.mark.parametrize("width", [40, 64])
def test_half_precision_and_other_widths(width: int) -> None:
    compared(np.random.default_rng(width), 3, width, HALF)


def test_what_sees_nothing_weighs_nothing() -> None:
    compared(np.random.default_rng(3), 2, 64, torch.float32, hidden=True)


def test_a_mask_for_each_head() -> None:
    draw = np.random.default_rng(5)
    q, k, v = (torch.from_numpy(draw.normal(size=(1, h, m, 64))).float().to(DEVICE) for h, m in ((6, 5), (2, 33), (2, 33)))
    mask = torch.from_numpy(draw.normal(size=(1, 6, 5, 33))).float().to(DEVICE)
    torch.testing.assert_close(
        tree_attention(q, k, v, mask, 0.1).double(), _in_float64(q, k, v, mask, 0.1, 0.0, None), rtol=2e-5, atol=2e-5
    )
