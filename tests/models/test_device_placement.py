"""Targets that accelerate has spread over devices, or offloaded: the same texts, or refused by the name of the option."""

from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM

from devices import MARK, WithoutFloat64
from draftree import Request, Sampling, Target, UserError, load
from draftree.drafters.base import Method
from draftree.drafters.eagle import EAGLE
from draftree.drafters.eagle3 import EAGLE3
from draftree.drafters.edd import EDD
from draftree.drafters.glide import GLIDE
from draftree.drafters.medusa import Medusa
from draftree.drafters.pld import PLD
from draftree.evaluation.provenance import fingerprint
from draftree.target import target as target_module
from draftree.testing import tiny_target
from folders import target_folder
from selection import one_in

IDS = [5, 9, 50, 51, 9, 50, 51, 17]
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
PLACES = {f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)} | dict.fromkeys(
    PARTS, "cpu"
)
ON_DISK = {
    "half of the layers": PLACES,
    "all but the embedding": PLACES | {"lm_head": "disk"},
    "all": {"": "disk"},
}
METHODS: dict[str, Method] = {
    "pld": PLD(),
    "eagle": EAGLE(),
    "eagle3": EAGLE3(),
    "edd, shared": EDD(shared=True, draft_vocab=40),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


def written(target: Target, drafter: Any, policy: str = "eagle2:nodes=8") -> Any:
    requests = [
        Request(ids, 12, sampling=Sampling(temperature=t))
        for ids, t in ((IDS, 0.0), (IDS[:3], 1.0))
    ]
    return load(target, drafter, policy).write(requests).tokens


def drafted(target: Target, method: Method) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return written(target, method.example(target))


@pytest.mark.parametrize(("where", "name"), one_in(2, list(ON_DISK), list(METHODS)))
def test_offloaded_layers_write_the_same(folder: str, where: str, name: str) -> None:
    whole = Target.load(folder, torch.float64)
    target = Target.load(folder, torch.float64, device_map=ON_DISK[where])
    assert any(p.is_meta for p in target.decoder.model.parameters())
    if name in ("eagle3", "edd, shared") and where != "half of the layers":
        with pytest.raises(UserError, match="the LM head of the LlamaForCausalLM is offloaded"):
            METHODS[name].example(target)  # whose rows it reads
        return
    assert target.decoder.device == torch.device("cpu")
    assert drafted(target, METHODS[name]) == drafted(whole, METHODS[name])


def test_offloaded_weights_have_a_hash(folder: str) -> None:
    target = Target.load(folder, torch.float64, device_map=ON_DISK["half of the layers"])
    assert len(fingerprint(target.decoder.model)) == 16


def test_a_model_that_was_offloaded_is_served(folder: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, device_map=PLACES, dtype=torch.float64
    )
    assert drafted(Target.of(model), EAGLE3()) == drafted(
        Target.load(folder, torch.float64), EAGLE3()
    )


def test_a_model_without_weights_is_refused(folder: str) -> None:
    config = Target.load(folder).decoder.config
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="has no weights"):
        Target.of(model.eval())


REFUSED = {
    "adapter": "x",
    "exactness": "bits",
    "compile": True,
    "kernels": "packed",
    "attn_implementation": "draftree",
    "quantize": "int4",
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_need_one_device_are_refused(folder: str, option: str) -> None:
    dtype = torch.bfloat16 if option == "quantize" else torch.float32
    told = "is given and device_map spreads the target over cpu, disk or host memory, allowed with it is one device"
    with pytest.raises(UserError, match=f"{option}.*{told}"):
        Target.load(folder, dtype, device_map=PLACES, **{option: REFUSED[option]})


def test_a_drafter_that_reads_rows_of_an_offloaded_head_is_refused(folder: str) -> None:
    target = Target.load(folder, torch.float64, device_map=ON_DISK["all but the embedding"])
    with pytest.raises(UserError, match="the LM head of the LlamaForCausalLM is offloaded"):
        Medusa(heads=2).example(target)


@pytest.mark.parametrize("place", ["cuda", "cuda:1", "xpu"])
def test_weights_go_straight_to_a_device(
    monkeypatch: pytest.MonkeyPatch, folder: str, place: str
) -> None:
    """With a device map, transformers reads each tensor to where it belongs; `to` would move a copy of all."""
    seen = list[Any]()
    real = AutoModelForCausalLM.from_pretrained

    def loaded(*args: Any, device_map: Any = None, **given: Any) -> Any:
        seen.append(device_map)
        return real(*args, **given)

    monkeypatch.setattr(
        target_module, "resolve_device", lambda device: torch.device(device or "cpu")
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    Target.load(folder, torch.float32, place)
    assert seen == [{"": torch.device(place)}]
    Target.load(folder, torch.float32, "cpu")
    assert seen[1:] == [None]


def over_two_devices() -> Target:
    """A target whose last two layers and head are on a second device, which is pretended, by accelerate's own hooks."""
    model: Any = tiny_target().decoder.model.float()
    second = {"model.layers.2", "model.layers.3", "lm_head"}
    for name, module in model.named_modules():
        if any(name == part or name.startswith(f"{part}.") for part in second):
            for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                setattr(each, MARK, True)
    for name in PLACES:
        device = torch.device("mps:0" if name in second else "cpu")
        add_hook_to_module(
            model.get_submodule(name), AlignDevicesHook(device, skip_keys="past_key_values")
        )
    add_hook_to_module(
        model,
        AlignDevicesHook(torch.device("cpu"), io_same_device=True, skip_keys="past_key_values"),
    )
    return Target.of(model)


@pytest.mark.parametrize("name", METHODS)
def test_layers_on_a_second_device_write_the_same(name: str) -> None:
    own = tiny_target()
    own.decoder.model.float()
    alone = drafted(Target.of(own.decoder.model), METHODS[name])
    with WithoutFloat64():
        target = over_two_devices()
        shapes = target.decoder.shapes
        assert [shape.device for shape in shapes] == [
            None,
            None,
            torch.device("mps:0"),
            torch.device("mps:0"),
        ]
        cache = target.new_cache(2, 8)
        assert [cache.layer(i)[0].device.type for i in range(4)] == ["cpu", "cpu", "mps", "mps"]
        assert drafted(target, METHODS[name]) == alone


def test_a_drafter_that_reads_keys_on_another_device_is_refused() -> None:
    with WithoutFloat64():
        target = over_two_devices()
        drafter = GLIDE(kv_layer=3).example(target)
        with pytest.raises(
            UserError, match="reads keys and values of layer 3, which device_map puts on mps:0"
        ):
            load(target, drafter)
