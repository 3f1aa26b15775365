"""Norms, rotations and gates in one call each: what the model gives, the same bits in any company; its own where not."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from architectures import fresh
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.fused_cpu_modules import replace_modules, replaced_kinds
from draftree.native import transformer_kernels
from draftree.native.transformer_kernels import DTYPES

pytestmark = pytest.mark.skipif(
    transformer_kernels.core is None, reason="there are no native kernels"
)
WIDTHS = (1, 2, 3, 7, 16, 33)


def replaced(module: nn.Module) -> nn.Module:
    """The module of draftree for another one."""
    whole = nn.ModuleList([module])
    replace_modules(whole)
    assert replaced_kinds(whole) == [type(module).__name__]
    assert list(whole[0].state_dict()) == list(module.state_dict())
    assert type(copy.deepcopy(whole)[0]) is type(module)
    return whole[0]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return (
        torch.empty(*shape).normal_(generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    )


def layer(kind: str, dtype: torch.dtype, width: int = 50) -> Any:
    if kind == "norm":
        module: Any = LlamaRMSNorm(width, 1e-5)
        nn.init.normal_(module.weight)
    else:
        config = fresh("llama").config
        config.hidden_size, config.intermediate_size = width, 71
        module = LlamaMLP(config)
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_a_layer_gives_what_its_own_gives_in_any_company(kind: str, dtype: torch.dtype) -> None:
    own = layer(kind, dtype)
    ours = replaced(own)
    rows = drawn(1, 40, 50, dtype=dtype) * 3
    wanted, eps = own(rows), torch.finfo(dtype).eps
    allowed = 2 * eps * wanted.abs().float() + 1e-6
    if kind == "gate":  # each number that is summed up may be rounded to a neighbour
        inner = own.act_fn(own.gate_proj(rows)) * own.up_proj(rows)
        allowed += eps * (inner.float().abs() @ own.down_proj.weight.float().abs().T)
    assert bool(((ours(rows) - wanted).float().abs() <= allowed).all())
    if kind == "norm":  # products round otherwise by width; these do not
        for n in WIDTHS:
            assert torch.equal(ours(rows[:, 3 : 3 + n]), ours(rows)[:, 3 : 3 + n])


def test_a_norm_is_as_close_to_float64_as_the_models_own() -> None:
    """Of wide rows the squares are many, and what is lost as they are added up shows."""
    for width in (64, 576, 4096):
        own = LlamaRMSNorm(width, 1e-6)
        ours, rows = replaced(own.requires_grad_(False)), drawn(200, width, dtype=torch.float32)
        exact = rows.double() * (rows.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        off, theirs = ((norm(rows) - exact).square().mean() for norm in (ours, own))
        assert off < theirs


def test_a_gate_keeps_bits_wherever_a_number_lies() -> None:
    for dtype in DTYPES:
        x, y = drawn(2000, dtype=dtype) * 8, drawn(1, 2000, dtype=dtype)[0]
        x[:4] = torch.tensor([200.0, -200.0, float("inf"), 0.0])

        def gated(start: int, end: int, x: Tensor = x, y: Tensor = y) -> Tensor:
            return transformer_kernels.swiglu(x[start:end].clone(), y[start:end].clone())

        whole, wanted = gated(0, 2000), nn.functional.silu(x) * y
        torch.testing.assert_close(whole, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert all(
            torch.equal(gated(at, at + n), whole[at : at + n])
            for at in (0, 5, 700)
            for n in (1, 15, 64, 513)
        )


def test_other_norms_are_not_replaced() -> None:
    class OtherRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * 1.01

    other = OtherRMSNorm(32, 1e-5)
    whole = nn.ModuleList([other])
    replace_modules(whole)
    assert whole[0] is other


@pytest.mark.parametrize("how", [{"kernels": "stock"}, {"dtype": torch.float64}])
def test_models_that_are_left_as_they_are(how: dict[str, Any]) -> None:
    model = fresh("llama").to(how.get("dtype", torch.float32))
    replace_modules(model, how.get("kernels"))
    assert not replaced_kinds(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmo2", "qwen3_moe"])
def test_a_model_writes_the_same_logits(name: str) -> None:
    own = fresh(name).to(torch.float32).requires_grad_(False)
    ours = copy.deepcopy(own)
    replace_modules(ours)
    decoders = CausalLM(own), CausalLM(ours)
    feed = ForwardBatch.chains(
        [torch.arange(3, 20).numpy()], torch.zeros(1, dtype=torch.long).numpy(), torch.device("cpu")
    )
    with torch.inference_mode():
        wanted, found = (d.forward(feed, d.new_cache(1, 20)).logits for d in decoders)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_go_through_the_models_own() -> None:
    model = fresh("llama").to(torch.float32)
    replace_modules(model)
    assert replaced_kinds(model)
    model(input_ids=torch.arange(5)[None]).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
