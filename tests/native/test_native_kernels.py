"""The native kernels against NumPy in float64, for each variant that this processor can run, with all lengths of tails.

Bounds come from the operations: a float32 sum of k products, each rounded, errs by less than (k +
2) units of the sum of their sizes; a rounded result by half a unit of itself.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.models.invariant_attention import _in_float64, _native
from draftree.native import transformer_kernels
from draftree.native.transformer_kernels import address, code_of

pytestmark = pytest.mark.skipif(
    transformer_kernels.core is None, reason="the native kernels were not built"
)
DTYPES = transformer_kernels.DTYPES
UNIT = torch.finfo(torch.float32).eps / 2


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def layer_of(packed: Tensor, weight: Tensor, bias: Tensor | None, code: int) -> Any:
    return transformer_kernels.core.Linear(
        transformer_kernels.address(packed),
        transformer_kernels.address(bias),
        weight.shape[1],
        weight.shape[0],
        code,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 7, 16, 31, 33, 64, 129, 200])
def test_linear_with_every_tail(variant: str, dtype: torch.dtype, outputs: int) -> None:
    half = torch.finfo(dtype).eps / 2
    for inputs in (1, 2, 3, 17, 32, 63, 130):
        weight = drawn(1, outputs, inputs, dtype=dtype)
        bias = drawn(2, outputs, dtype=dtype)
        rows = drawn(3, 41, inputs, dtype=dtype)
        packed = transformer_kernels.pack(weight)
        for added in (None, bias):
            made = transformer_kernels.linear(
                layer_of(packed, weight, added, transformer_kernels.code_of(dtype)), rows
            )
            wanted = torch.nn.functional.linear(
                rows.double(), weight.double(), None if added is None else added.double()
            )
            largest = torch.nn.functional.linear(
                rows.double().abs(),
                weight.double().abs(),
                None if added is None else added.double().abs(),
            )
            assert (
                (made - wanted).abs()
                <= (inputs + 2) * UNIT * largest + half * (1 + half) * wanted.abs()
            ).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8, None])
def test_a_token_has_the_same_bits_at_every_width(
    variant: str, dtype: torch.dtype, bits: int | None
) -> None:
    weight, rows = drawn(1, 80, 96, dtype=dtype), drawn(2, 300, 96, dtype=dtype)
    if bits == 8:
        packed, code = transformer_kernels.pack_int8(weight), transformer_kernels.INT8
    elif bits == 4:
        numbers, scales = torch.randint(0, 16, (80, 96)), drawn(3, 3, 80, 2, dtype=torch.bfloat16)
        packed, code = transformer_kernels.pack_int4(numbers, scales), transformer_kernels.INT4
    else:
        packed, code = transformer_kernels.pack(weight), transformer_kernels.code_of(dtype)
    layer = layer_of(packed, weight, None, code)
    whole = transformer_kernels.linear(layer, rows)
    for n in range(1, 20):
        assert torch.equal(transformer_kernels.linear(layer, rows[:n]), whole[:n])
        assert torch.equal(transformer_kernels.linear(layer, rows[300 - n :]), whole[300 - n :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 8, 33, 80])
def test_four_bits(variant: str, dtype: torch.dtype, outputs: int) -> None:
    """Activations are rounded to 127 steps of the largest of their group; everything else is exact up to float32's sums."""
    numbers, scales = (
        torch.randint(0, 16, (outputs, 96), generator=torch.Generator().manual_seed(0)),
        drawn(1, 3, outputs, 2, dtype=torch.bfloat16),
    )
    rows = drawn(2, 11, 96, dtype=dtype)
    packed = transformer_kernels.pack_int4(numbers, scales)
    made = transformer_kernels.linear(
        layer_of(packed, numbers, None, transformer_kernels.INT4), rows
    )
    step, middle = (scales[:, :, i].double().T.repeat_interleave(32, 1) for i in (0, 1))
    weight = step * (numbers - 8) + middle
    groups = rows.double().unflatten(1, (3, 32))
    units = groups.abs().amax(2, keepdim=True) / 127
    rounded = (torch.round(groups / units) * units).flatten(1)
    wanted, sizes = rounded @ weight.T, rounded.abs() @ (step.abs() * 8 + middle.abs()).T
    ties = (
        units.expand_as(groups).flatten(1) @ weight.abs().T
    ) * 0.02  # numbers that float32 rounds the other way
    bound = 20 * UNIT * sizes + torch.finfo(dtype).eps * wanted.abs() + ties
    assert ((made - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 8, 33, 80])
def test_eight_bits(variant: str, dtype: torch.dtype, outputs: int) -> None:
    """Weights and activations are rounded to 127 steps of the largest of their group.

    Everything else is exact up to float32's sums. The largest products do not overflow.
    """
    weight, rows = drawn(1, outputs, 96, dtype=dtype), drawn(2, 11, 96, dtype=dtype)
    weight[0], rows[0] = 3, 2
    rows[1] = -2
    weight[outputs // 2, 32:64] = 0
    packed = transformer_kernels.pack_int8(weight)
    made = transformer_kernels.linear(
        layer_of(packed, weight, None, transformer_kernels.INT8), rows
    )

    def round_to_steps(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = values.double().unflatten(1, (3, 32))
        units = groups.abs().amax(2, keepdim=True) / 127
        whole = torch.round(groups / units.clamp_min(torch.finfo(torch.float64).tiny))
        return (whole * units).flatten(1), units.expand_as(groups).flatten(1)

    (weights, steps), (inputs, units) = round_to_steps(weight), round_to_steps(rows)
    # Numbers so near the middle of two steps that float32 may round them the other way.
    near = [
        ((values.double() / unit.clamp_min(1e-300)) % 1 - 0.5).abs() < 2e-5
        for values, unit in ((weight, steps), (rows, units))
    ]
    ties = (units * near[1]) @ weights.abs().T + inputs.abs() @ (steps * near[0]).T
    wanted, sizes = inputs @ weights.T, inputs.abs() @ weights.abs().T
    bound = 20 * UNIT * sizes + torch.finfo(dtype).eps * wanted.abs() + ties
    assert ((made - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_rounded_products_of_numbers_that_are_not_finite_are_nan(
    variant: str, dtype: torch.dtype, broken: float
) -> None:
    weight, rows = drawn(1, 40, 96, dtype=dtype), drawn(2, 11, 96, dtype=dtype)
    numbers = torch.randint(0, 16, (40, 96), generator=torch.Generator().manual_seed(0))
    scales = drawn(1, 3, 40, 2, dtype=torch.bfloat16)
    rows[4] = broken
    rows[7, 50] = broken
    for code, packed in (
        (transformer_kernels.INT8, transformer_kernels.pack_int8(weight)),
        (transformer_kernels.INT4, transformer_kernels.pack_int4(numbers, scales)),
    ):
        made = transformer_kernels.linear(layer_of(packed, weight, None, code), rows)
        assert made.isnan().all(dim=1).nonzero().flatten().tolist() == [4, 7]
        assert made.isnan().any(dim=1).sum() == 2
    weight[5, 40] = broken
    packed = transformer_kernels.pack_int8(weight)
    layer = layer_of(packed, weight, None, transformer_kernels.INT8)
    made = transformer_kernels.linear(layer, rows[:4])
    assert made.isnan().all(dim=0).nonzero().flatten().tolist() == [5]
    assert made.isnan().sum() == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 50, 576])
def test_norms_gates_and_rotations(variant: str, dtype: torch.dtype, width: int) -> None:
    x = drawn(1, 5, width, dtype=dtype)
    weight = drawn(2, width, dtype=dtype)
    eps = torch.finfo(dtype).eps
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    single = 4 * torch.finfo(torch.float32).eps
    smallest = (
        torch.finfo(dtype).tiny * eps
    )  # results below the normal numbers are rounded to multiples of it
    bound = (1.1 * eps + single) * exact.abs() + smallest * (1 + weight.abs())
    assert ((transformer_kernels.rms_norm(x, weight, 1e-5) - exact).abs() <= bound).all()
    up = drawn(3, 5, width, dtype=dtype)
    exact = torch.nn.functional.silu(x.double()) * up.double()
    assert (
        (transformer_kernels.swiglu(x, up) - exact).abs()
        <= (1.1 * eps + single) * exact.abs() + smallest * (1 + up.abs())
    ).all()
    if width % 2 == 0:
        heads, angles = drawn(4, 5, 3, width, dtype=dtype), drawn(5, 2, 5, width, dtype=dtype)
        turned = torch.cat((-heads[..., width // 2 :], heads[..., : width // 2]), -1)
        wanted = heads * angles[0][:, None] + turned * angles[1][:, None]
        found = torch.empty_like(heads)
        places = (address(each) for each in (heads, *angles, found))
        transformer_kernels.core.rotate(code_of(dtype), *places, *heads.shape)
        assert torch.equal(found, wanted)


def test_special_numbers_of_float16(variant: str) -> None:
    """All numbers of float16 survive the way through float32, times one and two; the latter makes some infinite."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = numbers[numbers.isfinite()]
    for value in (1.0, 2.0):
        weight = torch.full((1, 1), value, dtype=torch.float16)
        packed = transformer_kernels.pack(weight)
        made = transformer_kernels.linear(
            layer_of(packed, weight, None, transformer_kernels.code_of(torch.float16)),
            finite[:, None],
        )[:, 0]
        assert torch.equal(made, finite * value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_attention_with_every_tail(variant: str, dtype: torch.dtype, cap: float) -> None:
    """A weight errs by its score's error and by exp's; sums err as those of linear layers do.

    Where values are multiplied as pairs of bfloat16, weights are rounded to it, too.
    """
    half = torch.finfo(dtype).eps / 2
    rounded = half if variant in ("avx512_bf16", "amx") and dtype is torch.bfloat16 else 0.0
    for slots, dim, wide, typed in (
        (1, 1, 1, True),
        (17, 3, 31, False),
        (32, 64, 64, True),
        (63, 33, 40, True),
        (97, 80, 7, False),
    ):
        n = min(slots, 5)
        q = drawn(1, 2, 6, n, dim, dtype=dtype)
        k = drawn(2, 2, 2, slots, dim, dtype=dtype)
        v = drawn(3, 2, 2, slots, wide, dtype=dtype)
        seen = torch.from_numpy(np.random.default_rng(4).random((2, 1, n, slots)) < 0.5)
        lowest = torch.finfo(dtype if typed else torch.float32).min
        mask = torch.zeros(seen.shape, dtype=dtype if typed else torch.float32).masked_fill(
            ~seen, lowest
        )
        scale, sinks = dim**-0.5, drawn(5, 6)
        made = _native(q, k, v, mask, scale, cap, sinks)
        wanted = _in_float64(q, k, v, mask, scale, cap, sinks)
        sizes = _in_float64(q, k, v.abs(), mask, scale, cap, sinks)
        largest = scale * (q.double().abs().amax() * k.double().abs().amax()).item() * dim
        error = (
            (dim + 8) * UNIT * largest + 4 * UNIT * largest + 4e-7
        )  # of a score, of exp's argument, of exp
        assert (
            (made - wanted).abs()
            <= (2 * error + 2 * (slots + 4) * UNIT + rounded) * sizes * (1 + half)
            + half * wanted.abs()
        ).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_with_hidden_slots_and_other_queries(
    variant: str, dtype: torch.dtype
) -> None:
    q, k, v = (drawn(seed, 1, 4, 80, 32, dtype=dtype) for seed in (1, 2, 3))
    q = q[:, :, :9]
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(1, 1, 9, 80, dtype=dtype)
    mask[..., 3::7] = lowest
    kept = [i for i in range(80) if i % 7 != 3]
    whole = _native(q, k, v, mask, 0.2, 0.0, None)
    assert torch.equal(_native(q[:, :, 4:5], k, v, mask[:, :, 4:5], 0.2, 0.0, None), whole[:, 4:5])
    assert torch.equal(
        _native(q, k[:, :, kept], v[:, :, kept], mask[..., kept], 0.2, 0.0, None), whole
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_for_any_number_of_queries(
    variant: str, dtype: torch.dtype
) -> None:
    """Vectors hold slots for a few queries, else queries; several parts of 64 rows among them."""
    slots, n = 150, 45
    q = drawn(1, 1, 6, n, 40, dtype=dtype)
    k, v = (drawn(seed, 1, 2, slots, 40, dtype=dtype) for seed in (2, 3))
    hidden = torch.from_numpy(np.random.default_rng(4).random((1, 1, n, slots)) < 0.3)
    hidden[..., :64] = False
    hidden[..., 96:128] = True
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    whole = _native(q, k, v, mask, 0.2, 0.0, None)
    for first, last in ((0, 1), (3, 5), (7, 12), (20, 41)):
        part = _native(q[:, :, first:last], k, v, mask[:, :, first:last], 0.2, 0.0, None)
        assert torch.equal(part, whole[:, first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_for_all_queries_is_read_once(variant: str, dtype: torch.dtype) -> None:
    q, k, v = (drawn(seed, 2, 4, 20, 32, dtype=dtype) for seed in (1, 2, 3))
    mask = torch.zeros(1, 1, 1, 20, dtype=dtype)
    mask[..., 12:] = torch.finfo(dtype).min
    found = _native(q, k, v, mask, 0.2, 0.0, None)
    wanted = _native(q, k, v, mask.expand(2, 4, 20, 20).contiguous(), 0.2, 0.0, None)
    assert torch.equal(found, wanted)
