"""draftree changes nothing of transformers, of its classes, or of a model that was handed in."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import draftree
from architectures import fresh
from draftree import Request, Target
from draftree.engine import Engine
from draftree.models.causal_lm import CausalLM
from draftree.registry import build
from draftree.target.kernel_choice import choose_kernels
from draftree.target.load_options import Loading
from folders import target_folder
from hybrids import FAMILIES, hybrid

MODELING = (
    "llama",
    "qwen3",
    "gemma2",
    "mixtral",
    "qwen3_next",
    "bamba",
    "jamba",
    "lfm2",
    "kimi_linear",
)


def attributes(owner: Any) -> dict[str, int]:
    """The attributes of a module or class, by identity."""
    own = {"_can_set_attn_implementation_cached_value"}  # in which transformers keeps an answer
    return {name: id(value) for name, value in vars(owner).items() if name not in own}


def library() -> dict[str, dict[str, int]]:
    """Those of transformers' modeling modules that are imported, and of their classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and ".modeling_" in name:
            found[name] = attributes(module)
            kinds = (
                v
                for v in list(vars(module).values())
                if isinstance(v, type) and issubclass(v, nn.Module)
            )
            found |= {f"{kind.__module__}.{kind.__qualname__}": attributes(kind) for kind in kinds}
    return found


def parts(model: PreTrainedModel) -> dict[str, Any]:
    """The instance attributes of each module of a model, by identity, and its weights' versions."""
    found: dict[str, Any] = {name: attributes(m) for name, m in model.named_modules()}
    for name, module in model.named_modules():
        hooks = [value for key, value in vars(module).items() if key.endswith("_hooks")]
        found[f"{name} inside"] = [attributes_of(module), [len(h) for h in hooks if h is not None]]
    return found | {name: (id(p), p._version) for name, p in model.named_parameters()}


def attributes_of(module: nn.Module) -> list[tuple[str, int]]:
    """The weights, buffers and parts of a module, by identity."""
    held = (module._parameters, module._buffers, module._modules)
    return [(name, id(value)) for each in held for name, value in each.items()]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Modeling modules, before anything of draftree has seen a model of theirs in this test."""
    for name in MODELING:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


WAYS: dict[str, Callable[[PreTrainedModel], Target]] = {
    "as it is": lambda model: Target.of(model),
    "bits": lambda model: Target.of(model, exactness="bits"),
    "native": lambda model: native(model),
}


def native(model: PreTrainedModel) -> Target:
    """A target on native kernels, if there are any."""
    decoder = CausalLM(model)
    decoder.use_native_kernels()
    return Target(decoder, "native")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_model_that_is_handed_in_stays_as_it_was(name: str, way: str) -> None:
    model = fresh(name, layers=2).to(torch.bfloat16).eval().requires_grad_(False)
    before, whole = parts(model), library()
    target = WAYS[way](model)
    engine = Engine(target, build("drafter", "suffix").open(target), build("policy", "chain"))
    engine.write([Request([3, 9, 4, 9, 4], 6)])
    assert parts(model) == before
    assert library() == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_with_states_stay_as_they_were(name: str) -> None:
    model = hybrid(name, torch.float32).eval().requires_grad_(False)
    before, whole = parts(model), library()
    engine = draftree.load(model, "suffix", "chain")
    engine.write([Request([3, 9, 4, 9, 4], 6)])
    assert parts(model) == before
    assert library() == whole


def test_loading_changes_nothing_of_transformers(tmp_path: Any) -> None:
    folder = target_folder(tmp_path)
    whole = library()
    for options in ({}, {"kernels": "packed"}, {"kernels": "native"}, {"exactness": "bits"}):
        target = Target.load(str(folder), "float32", **options)
        choose_kernels(target.decoder, Loading(compile=True))
        assert not [
            name for name, m in target.decoder.model.named_modules() if "forward" in vars(m)
        ]
    assert library() == whole
