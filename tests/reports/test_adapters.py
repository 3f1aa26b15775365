"""Adapters under drafts: the text is the adapted model's, the drafter has none of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftree import UserError, speculate
from draftree.drafters._from_objects import LoadedModel
from draftree.engine import Engine, generate_plain, load
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from reports import report
from reports.engines import LENGTH, asked, plainly

KIND = "Adapters"
PROMPT = [60, 61, 62, 60, 61, 62, 60]
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def adapted(folder: Path, modules: tuple[str, ...] = ("q_proj", "up_proj"), seed: int = 2) -> Any:
    """Return the model of a folder under a LoRA that changes what it writes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = peft.LoraConfig(
        r=4, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config).train(False)


@pytest.fixture(scope="module")
def lora(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved LoRA for `folder`."""
    out = tmp_path_factory.mktemp("lora")
    adapted(folder).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def merged(folder: Path, lora: Path) -> Target:
    """The target with the LoRA in its weights."""
    return Target.load(str(folder), torch.float64, adapter=str(lora))


def greedy(model: Any, count: int = LENGTH) -> list[int]:
    """Return what a model writes by its own `generate`."""
    ids = torch.tensor([PROMPT])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return found[0, len(PROMPT) :].tolist()


def fresh(target: Target, name: str) -> Engine:
    """Return an engine with a drafter of random weights, made for a target."""
    torch.manual_seed(0)
    return Engine(
        target,
        build("drafter", name).example(target),
        EAGLE2(nodes=8, depth=3, width=2),
        costs=COSTS,
    )


@report(
    "vllm-project/vllm#26679", KIND, "With a LoRA and EAGLE-3 the text was not the adapted model's."
)
@pytest.mark.parametrize("name", ["eagle3", "edd", "medusa", "suffix"])
def test_the_text_is_the_adapted_models(name: str, folder: Path, merged: Target) -> None:
    request = Request(PROMPT, LENGTH)
    wanted = greedy(adapted(folder))
    assert fresh(merged, name).write([request]).tokens == [wanted]
    assert wanted != greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))


@report("NVIDIA/TensorRT-LLM#12617", KIND, "N-gram drafts failed beside a LoRA.")
@report(
    "vllm-project/vllm#4872", KIND, "With LoRA enabled n-gram drafts ended in an error of shapes."
)
@pytest.mark.parametrize("drafter", ["pld", "lookahead"])
def test_retrieval_drafts_beside_an_adapter(drafter: str, merged: Target) -> None:
    requests = [
        Request(PROMPT, LENGTH),
        Request([70, 70, 70, 70], 9, sampling=Sampling(1.0, seed=2)),
    ]
    found = load(merged, drafter, "chain:length=5", costs=COSTS).write(requests)
    assert found.tokens == [generate_plain(merged, [r]).tokens[0] for r in requests]
    assert any(s.nodes > 1 for s in found.stats.steps)


@report(
    "vllm-project/vllm#11966",
    KIND,
    "The target's adapter was loaded into the draft model, whose sizes are others.",
)
@report(
    "sgl-project/sglang#34337",
    KIND,
    "The draft model loaded the target's adapters, and the start failed.",
)
def test_the_draft_model_gets_no_adapter(folder: Path, merged: Target, target: Target) -> None:
    """The base model drafts for the adapted one: it is right where both agree, and only there."""
    drafter: Any = load(merged, LoadedModel(target)).drafter
    small = drafter.small.decoder.model
    before = copy.deepcopy(small.state_dict())
    engine = Engine(merged, drafter, build("policy", "chain:length=3"), costs=COSTS)
    found = engine.write([Request(PROMPT, LENGTH)])
    assert found.tokens == generate_plain(merged, [Request(PROMPT, LENGTH)]).tokens
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert not any("lora" in name for name, _ in small.named_parameters())
    assert found.stats.acceptance_length < 4, "the base model is no double of the adapted one"


@report(
    "vllm-project/vllm#21068",
    KIND,
    "Adapters were mapped to requests, and not to the several tokens of a request that are verified.",
)
@report(
    "sgl-project/sglang#12903",
    KIND,
    "Sequences were taken to have one token a step, and the adapter was applied to the wrong tokens.",
)
def test_a_live_adapter_reaches_every_verified_token(folder: Path) -> None:
    model = adapted(folder)
    for drafter in ("pld", "suffix"):
        hook = speculate(drafter, "chain:length=5", costs=COSTS)
        ids = torch.tensor([PROMPT])
        given: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": LENGTH,
            "do_sample": False,
        }
        found = model.generate(input_ids=ids, custom_generate=hook, eos_token_id=None, **given)
        assert found[0, len(PROMPT) :].tolist() == greedy(model)


@report(
    "predibase/lorax#570",
    KIND,
    "The mask of an adapter on the head had the wrong size with drafts.",
)
def test_an_adapter_on_the_head_is_merged(folder: Path, tmp_path: Path) -> None:
    adapted(folder, ("lm_head", "down_proj")).save_pretrained(tmp_path, save_embedding_layers=False)
    target = Target.load(str(folder), torch.float64, adapter=str(tmp_path))
    found = load(target, "suffix", "chain:length=4", costs=COSTS).write([Request(PROMPT, LENGTH)])
    assert found.tokens[0] == greedy(adapted(folder, ("lm_head", "down_proj")))


@report("sgl-project/sglang#12726", KIND, "A LoRA with drafts failed at the start.")
def test_an_adapter_and_a_quantised_target_are_not_mixed(
    folder: Path, lora: Path, target: Target
) -> None:
    with pytest.raises(UserError, match="adapter and quantize are given, allowed is one of them"):
        load(str(folder), "pld", adapter=str(lora), quantize="int4")
    assert plainly(target) == generate_plain(target, [asked(target)]).tokens[0], (
        "the base's text is as before"
    )
