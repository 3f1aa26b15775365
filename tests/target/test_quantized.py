"""Targets whose checkpoints are quantised: served and drafted for, or refused by the name of their method."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaForCausalLM

from draftree import Target, UserError, load
from draftree.cost_estimate import target_size
from draftree.drafters.base import Trainable
from draftree.drafters.eagle import EAGLE
from draftree.drafters.eagle3 import EAGLE3
from draftree.drafters.edd import EDD
from draftree.drafters.medusa import Medusa
from draftree.models.architecture_checks import refuse_unsupported
from draftree.request import Request
from draftree.target import quantization_support
from draftree.target.quantization_support import count_parameters, refuse_missing_packages
from folders import target_folder

Command = Callable[..., tuple[int, str, str]]
IDS = [5, 9, 60, 61, 9, 60, 61, 17]
BLOCK = 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))


def quantised(home: Path, said: Any) -> Path:
    """A target's folder whose config says how its weights are quantised."""
    target_folder(home)
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return home


def in_fp8(home: Path) -> dict[str, Tensor]:
    """Write a target in blocks of FP8, as DeepSeek's and Qwen's are published; return the weights that it stands for."""
    quantised(home, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(home / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "_proj." in name:
            blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name] = numbers.flatten(2).flatten(0, 1)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = (numbers.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
    save_file(stored, home / "model.safetensors", metadata={"format": "pt"})
    return meant


def is_exact(target: Target, drafter: Any = "pld") -> None:
    """Assert that drafting changes nothing of what transformers' own greedy decoding writes."""
    written = load(target, drafter, "pct:ratio=0.1").write([Request(IDS, 24)]).tokens[0]
    model: Any = target.decoder.model
    plain = model.generate(torch.tensor([IDS]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    assert written == plain[0, len(IDS) :].tolist()


def test_fp8_is_read_by_its_scales(tmp_path: Path) -> None:
    """On a CPU transformers makes numbers of it; without its scales they would be others."""
    meant = in_fp8(tmp_path / "fp8")
    target = Target.load(str(tmp_path / "fp8"), torch.float32)
    for name, weight in target.decoder.model.state_dict().items():
        torch.testing.assert_close(weight, meant[name])
    is_exact(target)
    is_exact(target, EAGLE3().example(target))


REFUSED = {
    "bitsandbytes, 4 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "bitsandbytes",
        "bitsandbytes",
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32}, "awq", "gptqmodel"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq", "gptqmodel optimum"),
    "torchao": (
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
        "torchao",
        "torchao",
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors"},
        "compressed-tensors",
        "compressed-tensors",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_missing_packages_are_named_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Command, case: str
) -> None:
    said, method, packages = REFUSED[case]
    missing = [name.replace("-", "_") for name in packages.split()]
    present = lambda name: None if name in missing else object()
    monkeypatch.setattr(quantization_support, "find_spec", present)
    home = quantised(tmp_path / "target", said)
    status, _, err = draftree("generate", "x", "--target", home, "--drafter", "pld")
    assert (status, err.count("\n")) == (2, 1)
    assert f"the weights of target '{home}' are quantised by {method}, which needs" in err
    assert err.endswith(f": pip install {packages}\n")


def test_fp8_on_a_gpu_needs_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quantization_support,
        "find_spec",
        lambda name: None if name == "kernels" else object(),
    )
    in_fp8(tmp_path / "fp8")
    config = Target.load(str(tmp_path / "fp8")).decoder.config
    config.quantization_config = {"quant_method": "fp8"}
    refuse_missing_packages("t", config, torch.device("cpu"))
    with pytest.raises(UserError, match=r"quantised by fp8, .*: pip install kernels$"):
        refuse_missing_packages("t", config, torch.device("cuda"))


@pytest.mark.parametrize("method", ["modelopt", None, {"a": 1}])
def test_weights_of_an_unknown_method_are_not_taken_for_plain_ones(
    tmp_path: Path, method: Any
) -> None:
    """transformers says so in a log, and goes on with the stored numbers."""
    home = quantised(tmp_path / "target", {"quant_method": method, "bits": 8})
    with pytest.raises(
        UserError, match=r"are quantised by .*, allowed are .*awq.*bitsandbytes.*fp8.*gptq"
    ):
        Target.load(str(home))


WHOLE = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"input_activations": {"dynamic": True, "strategy": "tensor"}}
        },
    },
    "torchao": {
        "quant_method": "torchao",
        "quant_type": {
            "default": {
                "_type": "Float8DynamicActivationFloat8WeightConfig",
                "_data": {"granularity": [{"_type": "PerTensor", "_data": {}}]},
            }
        },
    },
}
APART = {
    "bitsandbytes": {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "llm_int8_threshold": 0.0,
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"input_activations": {"dynamic": True, "strategy": "token"}},
            "group_1": {"input_activations": {"dynamic": False, "strategy": "tensor"}},
            "group_2": {"input_activations": None},
        },
    },
    "torchao": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
    },
}


@pytest.mark.parametrize("method", WHOLE)
def test_scales_of_a_whole_pass_are_refused(tmp_path: Path, method: str) -> None:
    """A token's logits would depend on the tree beside it."""
    config = LlamaForCausalLM.from_pretrained(target_folder(tmp_path / "t")).config
    config.quantization_config = APART[method]
    refuse_unsupported(config, LlamaForCausalLM)
    config.quantization_config = WHOLE[method]
    with pytest.raises(
        UserError, match=r"LlamaForCausalLM .* is not supported: its .* (all tokens of a pass)"
    ):
        refuse_unsupported(config, LlamaForCausalLM)


class PackedLinear(nn.Module):
    """A layer as GPTQ's and AWQ's kernels have it: four bits a weight, eight in an integer, in buffers."""

    qweight: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        scales = layer.weight.abs().amax(1, keepdim=True) / 7
        numbers = (layer.weight / scales).round().long() + 8
        places = 4 * torch.arange(8)
        packed = (numbers.unflatten(1, (-1, 8)) << places).sum(2)
        self.register_buffer("qweight", packed.to(torch.int32))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (self.qweight[..., None].long() >> 4 * torch.arange(8)) & 15
        return linear(x, (numbers.flatten(1) - 8) * self.scales, self.bias)


@torch.no_grad()
def packed(folder: Path, head: bool) -> Target:
    """A target whose layers are packed, and its head, too, where that is asked for."""
    model = LlamaForCausalLM.from_pretrained(target_folder(folder), dtype=torch.float64)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (head or name != "lm_head"):
            model.set_submodule(name, PackedLinear(module))
    return Target.of(model.requires_grad_(False).eval())


METHODS = {
    "eagle": EAGLE(),
    "eagle3": EAGLE3(),
    "edd": EDD(),
    "edd, shared": EDD(shared=True),
    "medusa": Medusa(heads=2),
}


@pytest.mark.parametrize("name", METHODS)
def test_drafters_work_over_packed_layers(tmp_path: Path, name: str) -> None:
    target = packed(tmp_path / "t", head=False)
    drafter: Trainable[Any] = METHODS[name].example(target)
    is_exact(target, drafter)


def test_a_packed_head_serves_drafters_that_read_no_rows_of_it(tmp_path: Path) -> None:
    target = packed(tmp_path / "t", head=True)
    assert target.decoder.vocab == 260
    is_exact(target)
    is_exact(target, EAGLE().example(target))
    with pytest.raises(UserError, match="the LM head of the LlamaForCausalLM is quantised"):
        EDD().example(target)


def test_packed_weights_count_in_the_estimate_of_costs(tmp_path: Path) -> None:
    plain, few = (target_size(packed(tmp_path / str(head), head).decoder) for head in (False, True))
    layers = 4 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 48 * 32)
    assert plain.weights == pytest.approx(layers + 260 * 32, rel=0.1)
    assert few.weights == pytest.approx(plain.weights, rel=0.1)
    assert few.bytes == pytest.approx((layers + 260 * 32) / 2, rel=0.1)


def test_packed_weights_count_in_the_size_by_which_a_tree_is_chosen(tmp_path: Path) -> None:
    target = packed(tmp_path / "t", head=True)
    whole = count_parameters(LlamaForCausalLM.from_pretrained(tmp_path / "t"))
    model: Any = target.decoder.model
    assert count_parameters(model) == whole
    model.config.quantization_config = {"bits": 8}
    assert count_parameters(model) < 0.7 * whole
    before = count_parameters(model) - 32
    model.model.norm.weight = nn.Parameter(
        torch.zeros(500, 1, dtype=torch.uint8), requires_grad=False
    )
    assert count_parameters(model) == before + 1000
