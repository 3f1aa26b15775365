"""Targets with rounded weights, and heads that are tied or apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drafting import after_all
from draftree import UserError
from draftree.doctor import forward_parity
from draftree.drafters._from_objects import LoadedModel
from draftree.engine import Engine, generate_plain, load
from draftree.models.int4_linear import Int4Linear
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from reports import report
from selection import one_in

KIND = "Quantised targets and heads"
NEURAL = ("edd", "eagle", "eagle3", "medusa", "glide", "vdm", "mtp", "dflash:block=4")
REQUEST = Request([60, 61, 62, 60, 61, 62, 60], 16)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Target:
    """The target of `folder` with weights of four bits."""
    return Target.load(str(folder), quantize="int4")


def engine(target: Target, name: str) -> Engine:
    """Return an engine with a drafter of random weights."""
    torch.manual_seed(0)
    return Engine(
        target,
        build("drafter", name).example(target),
        EAGLE2(nodes=8, depth=3, width=2),
        costs=COSTS,
    )


@report("vllm-project/vllm#26590", KIND, "A drafter took the target's quantisation for its own.")
@report(
    "vllm-project/vllm#47828",
    KIND,
    "Layers for further tokens were built with the target's quantisation, while their weights were not rounded.",
)
@report(
    "vllm-project/vllm#37667",
    KIND,
    "Unrounded draft layers of a rounded checkpoint kept random weights, and no draft was accepted.",
)
@report(
    "vllm-project/vllm#41745",
    KIND,
    "A draft model in full precision was given the packed shapes of its rounded target.",
)
@pytest.mark.parametrize("name", NEURAL)
def test_a_drafter_of_a_rounded_target_is_not_rounded(name: str, rounded: Target) -> None:
    made = engine(rounded, name)
    drafter: Any = made.drafter
    own = {id(m) for m in rounded.decoder.model.modules()}
    assert any(isinstance(m, Int4Linear) for m in rounded.decoder.model.modules())
    assert not [
        m for m in drafter.model.modules() if isinstance(m, Int4Linear) and id(m) not in own
    ]
    assert made.write([REQUEST]).tokens == generate_plain(rounded, [REQUEST]).tokens


@report(
    "vllm-project/vllm#9534",
    KIND,
    "With a rounded base all tokens but the first were the same sign, and no draft was accepted.",
)
@report("NVIDIA/TensorRT-LLM#7842", KIND, "A drafter beside a rounded target ended the process.")
def test_a_rounded_target_is_drafted_for_by_its_double(rounded: Target, folder: Path) -> None:
    double = load(rounded, LoadedModel(Target.load(str(folder), quantize="int4"))).drafter
    found = Engine(rounded, double, build("policy", "chain:length=3"), costs=COSTS).write([REQUEST])
    assert found.tokens == generate_plain(rounded, [REQUEST]).tokens
    assert len(set(found.tokens[0])) > 4
    assert all(s.accepted == s.depth for s in found.stats.steps)


@report(
    "sgl-project/sglang#3824",
    KIND,
    "A drafter in bfloat16 beside a target in eight bits failed, as dtypes did not match.",
)
@report(
    "vllm-project/vllm#21177",
    KIND,
    "Queries and keys of the drafter had other dtypes beside a cache in eight bits.",
)
@report(
    "vllm-project/vllm#24505", KIND, "The drafter's cache had the dtype of the rounded target's."
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    one_in(
        2,
        ["eagle", "eagle3", "edd", "medusa"],
        [torch.float64, torch.float32, torch.bfloat16],
    ),
)
def test_a_drafter_of_any_dtype_serves_a_target_of_any(
    name: str, dtype: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    build("drafter", name).fresh(Target.load(str(folder), torch.float32)).save(tmp_path / "drafter")
    target = (
        Target.load(str(folder), dtype, exactness="bits")
        if dtype is torch.bfloat16
        else Target.load(str(folder), dtype)
    )
    made = load(target, str(tmp_path / "drafter"), "chain:length=3", costs=COSTS)
    assert made.write([REQUEST]).tokens == generate_plain(target, [REQUEST]).tokens


@report(
    "vllm-project/vllm#28435",
    KIND,
    "Rounded weights of a drafter's fusing layer could not be read.",
)
@report(
    "vllm-project/vllm#37280",
    KIND,
    "A rounded head of a drafter was not expected, and could not be loaded.",
)
@pytest.mark.parametrize(
    "packed",
    ["fc.weight_packed", "lm_head.weight_scale", "midlayer.self_attn.q_proj.weight_packed"],
)
def test_rounded_weights_of_a_drafter_are_named(packed: str, folder: Path, tmp_path: Path) -> None:
    target = Target.load(str(folder), torch.float32)
    torch.manual_seed(0)
    build("drafter", "eagle3").fresh(target).save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[packed] = torch.zeros(4, dtype=torch.int32)
    save_file(tensors, file)
    with pytest.raises(UserError, match=packed):
        build("drafter", str(tmp_path)).open(target)


@report(
    "huggingface/transformers#42612",
    KIND,
    "A head that is stored apart was overwritten where the config ties it to the embedding.",
)
@pytest.mark.parametrize("drafter", ["pld", "edd", "eagle3", "medusa"])
def test_a_head_stored_apart_is_read_as_transformers_reads_it(drafter: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=71, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=96, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[7, 5, 9, 7, 5]])
    wanted = stock.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False
    )[0, 5:].tolist()
    target = Target.load(str(tmp_path), torch.float32)
    assert engine(target, drafter).write([Request([7, 5, 9, 7, 5], 14)]).tokens == [wanted]


@report(
    "sgl-project/SpecForge#831",
    KIND,
    "Training read the packed head of a rounded target as if it were the head itself.",
)
@report(
    "vllm-project/vllm-ascend#6914",
    KIND,
    "Drafts of a drafter from before the rounding were hardly accepted, as what it reads was rotated.",
)
@pytest.mark.parametrize("name", ["edd", "eagle3", "medusa"])
def test_the_head_that_a_drafter_learns_from_is_the_rounded_targets(
    name: str, rounded: Target
) -> None:
    """What a drafter learns from are the target's own logits, and these are the ones that it decodes by."""
    torch.manual_seed(0)
    drafter: Any = build("drafter", name).example(rounded)
    tokens = np.random.default_rng(0).integers(4, 250, (1, 10))
    batch = forward_parity.batch_of(rounded, drafter, tokens)
    logits = after_all(batch)[0]
    for end in (3, 7, 10):
        ids = tokens[0, :end].tolist()
        found = generate_plain(rounded, [Request(ids, 1)]).tokens[0][0]
        top = logits[end - 1].topk(2).values
        assert int(logits[end - 1].argmax()) == found or float(top[0] - top[1]) < 0.1
    assert torch.isfinite(drafter.loss(batch))


@report(
    "vllm-project/vllm#18290",
    KIND,
    "Rounded weights of a drafter were not prepared after they were read.",
)
def test_sampled_texts_of_a_rounded_target_are_plain_decodings(rounded: Target) -> None:
    requests = [
        Request([60 + i, 61, 60 + i, 61], 14, number=i, sampling=Sampling(0.9, top_p=0.9, seed=3))
        for i in range(3)
    ]
    found = load(rounded, "suffix", "chain:length=4", costs=COSTS).write(requests)
    assert found.tokens == [generate_plain(rounded, [r]).tokens[0] for r in requests]
