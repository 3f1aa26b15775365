"""Apple's `mps`, which has no float64: texts are the CPU's, on a device that is pretended; what cannot be is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from devices import WithoutFloat64, moved
from draftree import Request, Sampling, Target, UserError, load
from draftree.doctor import faults
from draftree.drafters.base import Method
from draftree.drafters.eagle3 import EAGLE3
from draftree.drafters.edd import EDD
from draftree.drafters.medusa import Medusa
from draftree.drafters.pld import PLD
from draftree.target.attention_strength import measure_attention
from draftree.testing import tiny_target

METHODS: dict[str, Method] = {
    "pld": PLD(),
    "eagle3": EAGLE3(),
    "edd": EDD(),
    "medusa": Medusa(heads=2),
}
PROMPTS = [1, 2, 3, 4, 5], [7, 8, 9]
CASES = [
    ("pld", "chain", None, 1.0),
    ("eagle3", "eagle2", None, 0.0),
    ("eagle3", "eagle2:nodes=8", None, 1.0),
    ("eagle3", "chain", "rejection", 1.0),
    ("edd", "yield", None, 0.0),
    ("edd", "static", "multiround", 1.0),
    ("medusa", "eagle2:nodes=8", None, 1.0),
]


def target(here: bool, dtype: torch.dtype = torch.float32) -> Target:
    model: Any = tiny_target().decoder.model.to(dtype)
    return Target.of(model if here else moved(model))


def written(
    here: bool, case: tuple[str, str, str | None, float], dtype: torch.dtype = torch.float32
) -> Any:
    """What is written on the CPU, or on the pretended device, and how many tokens were accepted."""
    name, policy, acceptor, temperature = case
    t = target(here, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        engine = load(t, METHODS[name].example(t), policy, acceptor)
    sampling = Sampling(temperature=temperature)
    found = engine.write([Request(prompt, 6, sampling=sampling) for prompt in PROMPTS])
    return found.tokens, found.stats.steps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_are_those_of_a_cpu(case: tuple[str, str, str | None, float]) -> None:
    with WithoutFloat64():
        found = written(False, case)
    assert found[0] == written(True, case)[0]


def test_float16_works() -> None:
    case = ("eagle3", "eagle2:nodes=8", None, 1.0)
    with WithoutFloat64():
        found = written(False, case, torch.float16)
    assert found == written(True, case, torch.float16)


def test_the_strength_of_attention_is_measured_there() -> None:
    texts = [np.arange(12) % 61]
    own = measure_attention(target(True).decoder, texts)
    with WithoutFloat64():
        found = measure_attention(target(False).decoder, texts)
    assert [a.output for a in found] == pytest.approx([a.output for a in own], rel=1e-4)
    assert [a.entropy for a in found] == pytest.approx([a.entropy for a in own], rel=1e-4)


def test_bits_are_refused() -> None:
    with WithoutFloat64():
        model: Any = target(False).decoder.model
        with pytest.raises(
            UserError, match="exactness is 'bits', and the target on 'mps', which lacks the float64"
        ):
            Target.of(model, exactness="bits")
        model.set_attn_implementation("draftree")
        with pytest.raises(
            UserError,
            match="'draftree' sums in float64, which 'mps' lacks: allowed there is sdpa or eager",
        ):
            load(Target.of(model), "pld").write([Request(PROMPTS[0], 2)])


def test_float64_is_refused(tmp_path: Any) -> None:
    from folders import target_folder

    folder = str(target_folder(tmp_path / "t"))
    with (
        WithoutFloat64(),
        pytest.raises(UserError, match="dtype is float64 and device 'mps', which lacks it"),
    ):
        Target.load(folder, "float64", "mps")


def test_the_pretended_device_notices() -> None:
    with WithoutFloat64() as device:
        there = torch.zeros(3, device="mps")
        assert there.device == device.device
        assert not there.is_cpu
        assert there.view(1, 3).device == device.device
        assert there.cpu().device.type == "cpu"
        for wrong in (
            there.double,
            lambda: torch.zeros(3, dtype=torch.float64, device="mps"),
            there.numpy,
        ):
            with pytest.raises(TypeError):
                wrong()
        with pytest.raises(RuntimeError, match="on mps:0 and on cpu"):
            there + torch.zeros(3)
        here = torch.zeros(3)
        here.copy_(there)
        here.to("mps")
        assert here.is_cpu


def test_rotary_bases_are_compared_on_the_host() -> None:
    """As `doctor` compares a drafter's with the target's."""
    target: Any = tiny_target()
    target.decoder.model.float()
    drafts: Any = EAGLE3().example(target)
    drafts.model.float()
    for module in faults.rotary_modules(drafts.model, drafts).values():
        faults.rotary_frequencies(module)[1:] *= 0.5
    nothing: Any = None
    found = []
    for there in (False, True):
        if there:
            moved(drafts.model)
            moved(target.decoder.stack)
        with WithoutFloat64():
            alternatives = faults._rope_alternatives(target, drafts, nothing)
            found.append([(each.cause, each.change) for each in alternatives])
    assert found[0] == found[1]
    assert found[0]
