"""Weights laid out for another kernel give what torch's own gives, are forgotten when they change, are chosen by the clock."""

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftree import Request, Target
from draftree.engine import Engine
from draftree.evaluation.provenance import provenance
from draftree.models.causal_lm import CausalLM
from draftree.models.cpu_linear import (
    KernelLinear,
    Packed,
    is_onednn_faster,
    packable,
    packed_shapes,
    use_kernels,
)
from draftree.models.fused_cpu_modules import replaced_kinds
from draftree.registry import build
from draftree.target.kernel_choice import choose_kernels
from draftree.target.load_options import Loading
from draftree.utils import hardware
from folders import resident, target_folder
from hybrids import hybrid

pytestmark = pytest.mark.skipif(
    not packable(torch.zeros(2, 2), None), reason="this torch has no oneDNN"
)


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 33, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_kernels_multiply_alike(bias: bool, dtype: torch.dtype) -> None:
    one = layer(bias, dtype)
    if not packable(one.weight, one.bias):
        pytest.skip("this processor's oneDNN does not multiply it")
    for shape in ((1, 48), (7, 48), (2, 5, 48), (0, 48)):
        rows = torch.randn(shape, dtype=dtype)
        wanted = one(rows)
        ours = KernelLinear(one, Packed)
        torch.testing.assert_close(ours(rows), wanted)
        torch.testing.assert_close(ours(rows.transpose(0, 1).contiguous().transpose(0, 1)), wanted)


def packed(one: nn.Linear) -> KernelLinear:
    """A layer as oneDNN's kernel computes it."""
    return KernelLinear(one, Packed)


def test_a_copy_is_a_layer_of_torch_that_may_learn() -> None:
    one, rows = packed(layer()), torch.randn(3, 48)
    other, wanted = copy.deepcopy(one).requires_grad_(), one(rows)
    assert type(other) is nn.Linear
    other(rows).sum().backward()
    assert other.weight.grad is not None
    with torch.no_grad():
        other.weight -= other.weight.grad
        torch.testing.assert_close(other(rows), rows @ other.weight.T + other.bias)
    assert torch.equal(one(rows), wanted)


def test_weights_and_names_stay_those_of_the_model() -> None:
    model = nn.Sequential(layer(), layer())
    model[1].weight = model[0].weight
    before, state = dict(model.named_parameters()), model.state_dict()
    use_kernels(model, "packed")
    assert all(isinstance(m, KernelLinear) for m in model)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)


def test_gradients_flow_through_rows() -> None:
    one, rows = packed(layer()), torch.randn(3, 48, requires_grad=True)
    one(rows).sum().backward()
    torch.testing.assert_close(rows.grad, one.weight.sum(0).expand(3, -1))


@pytest.mark.parametrize(("own", "ours", "packed"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_kernel_is_taken_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: float, ours: float, packed: bool
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    big, small = (nn.Linear(256, n, bias=False).requires_grad_(False) for n in (256, 8))
    calls: list[int] = []

    def interleaved(works: Sequence[Callable[[], object]], *_: object) -> tuple[float, float]:
        calls.append(len(works))
        return own, ours

    monkeypatch.setattr(hardware, "time_interleaved", interleaved)
    for _ in range(2):
        model = nn.Sequential(copy.deepcopy(big), small, copy.deepcopy(big))
        use_kernels(model)
        assert [isinstance(m, KernelLinear) for m in model] == [packed, False, packed]
    assert calls == [2]
    assert packed_shapes(model) == ["256x256"] * packed


def test_both_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    assert is_onednn_faster([layer()]) == is_onednn_faster([layer()])
    (kept,) = tmp_path.rglob("*.json")
    assert json.loads(kept.read_text())["packed"] > 0


def test_other_layers_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(
        Own(4, 4), nn.Linear(4, 4).double(), nn.Embedding(4, 4), nn.Linear(4, 4, device="meta")
    )
    use_kernels(model, "packed")
    use_kernels(model[1].float(), "stock")
    assert not any(isinstance(m, KernelLinear) for m in model)


@pytest.mark.parametrize("exactness", ["bits", "ties"])
def test_a_target_writes_the_same_by_either(tmp_path: Path, exactness: str) -> None:
    folder, texts = target_folder(tmp_path), {}
    prompts = [list(range(3, 3 + n)) for n in (5, 9)]
    for kernels in ("stock", "packed"):
        target = Target.load(str(folder), "float32", kernels=kernels, exactness=exactness)
        engine = Engine(target, build("drafter", "suffix").open(target), build("policy", "pct"))
        requests = [Request(prompt, 24) for prompt in prompts]
        texts[kernels] = engine.write(requests, reuse=False).tokens
        assert texts[kernels] == engine.plain(requests).tokens
        shapes, said = packed_shapes(target.decoder.model), provenance(target, 0)["target"]
        assert said.get("packed", []) == shapes
        assert bool(shapes) == (kernels == "packed")
    assert texts["stock"] == texts["packed"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux alone")
@pytest.mark.parametrize("looked_up", [False, True])
def test_a_packed_weight_that_lies_in_a_file_is_in_memory_once(
    looked_up: bool, tmp_path: Path
) -> None:
    path, drawn = tmp_path / "weights", torch.randn(1024, 1024)
    save_file({"weight": drawn}, path)
    one = nn.Linear(1024, 1024, bias=False, device="meta").requires_grad_(False)
    one.weight = nn.Parameter(load_file(path)["weight"], requires_grad=False)
    table = nn.Embedding(1024, 1024, device="meta")
    table.weight = one.weight if looked_up else nn.Parameter(torch.ones(1024, 1024))
    assert torch.equal(one.weight, drawn)
    if resident(path) < 4000:
        pytest.skip("this version of safetensors reads files otherwise")
    use_kernels(both := nn.ModuleList([one, table]), "packed")
    rows = torch.randn(2, 1024)
    assert torch.equal(both[0](rows), Packed(drawn)(rows))
    assert (resident(path) > 4000) == looked_up, "an embedding's rows are read in every pass"
    assert torch.equal(one.weight, drawn), "read again"


def test_passes_of_a_recurrent_model_use_the_kernels_that_are_recorded() -> None:
    decoder = CausalLM(hybrid("falcon_h1", torch.float32))
    choose_kernels(decoder, Loading(kernels="packed"))
    target, used = Target(decoder, "x"), list[int]()
    for module in decoder.hf.model.modules():
        if isinstance(module, KernelLinear):
            module.register_forward_hook(lambda *_: used.append(1))
    Engine(target, build("drafter", "suffix").open(target), build("policy", "chain")).plain(
        [Request([3, 4, 5], 2)]
    )
    assert used
    assert provenance(target, 0)["target"]["packed"] == packed_shapes(decoder.hf.model)
    assert replaced_kinds(decoder.hf.model)
