"""The end of the context, of the target's and of a drafter's, and windows of attention."""

import pytest
import torch

from architectures import model
from architectures import target as architecture
from draftree import UserError, speculate
from draftree.drafters._from_objects import LoadedModel
from draftree.engine import generate_plain, load
from draftree.policies.chain import Chain
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import tiny_target
from reports import report
from reports.engines import knowing

KIND = "Contexts and windows"


def prompt(length: int) -> list[int]:
    """Return a prompt that repeats itself, so that retrieval drafts."""
    return [(7, 5, 9, 11, 30)[i % 5] for i in range(length)]


@report(
    "vllm-project/vllm#57941",
    KIND,
    "A draft model with a shorter context than the target's drafted beyond it, into memory that was not its own.",
)
@report(
    "vllm-project/vllm#24662",
    KIND,
    "A draft model was asked beyond its own context, and memory was read that was not there.",
)
@pytest.mark.parametrize("length", [4, 20, 24, 25, 50])
def test_a_draft_model_with_a_shorter_context_stops_drafting(length: int) -> None:
    target = tiny_target(context=96)
    engine = load(target, LoadedModel(tiny_target(context=24)), "chain:length=5")
    request = Request(prompt(length), 40)
    found = engine.write([request])
    assert found.tokens == generate_plain(target, [request]).tokens
    assert any(s.nodes for s in found.stats.steps) == (length < 24)


@report(
    "NVIDIA/TensorRT-LLM#16826",
    KIND,
    "Retrieval drafts near the longest sequence killed the executor.",
)
@report(
    "predibase/lorax#474",
    KIND,
    "Drafts up to the last position of a model ended in an assertion of the device.",
)
@pytest.mark.parametrize("drafter", ["suffix", "pld", "lookahead"])
def test_a_prompt_near_the_context_is_written_to_its_end(drafter: str) -> None:
    target = tiny_target(context=64)
    engine = load(target, drafter, "chain:length=8")
    for length in range(58, 65):
        request = Request(prompt(length), 20)
        rows, steps = engine.begin([request])
        endings = [e.ending for events in steps for e in events if e.ending]
        assert rows.written == generate_plain(target, [request]).tokens
        assert endings == ["context"]
        assert len(rows.written[0]) == 64 - length + 1
    with pytest.raises(
        UserError, match="the prompt has 65 tokens, allowed are at most the target's context of 64"
    ):
        engine.write([Request(prompt(65), 1)])


@report(
    "vllm-project/vllm#53812",
    KIND,
    "A padded step at the end of the context wrote one token more than the context holds.",
)
@report(
    "ggml-org/llama.cpp#26478",
    KIND,
    "At a boundary of the cache positions were skipped, and drafting failed.",
)
@pytest.mark.parametrize("room", [0, 1, 2, 5, 6])
def test_trees_end_where_the_context_ends(room: int) -> None:
    """Sequences of a batch reach the context at different steps, in the middle of an accepted path."""
    target = tiny_target(context=40)
    requests = [Request(prompt(40 - room - i), 30) for i in (0, 3, 9)]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    engine = knowing(
        target, [[*r.prompt, *t] for r, t in zip(requests, alone, strict=True)], Chain(6)
    )
    found = engine.write(requests)
    assert found.tokens == alone
    assert [len(r.prompt) + len(t) for r, t in zip(requests, found.tokens, strict=True)] == [
        41,
        41,
        41,
    ]


@report(
    "ml-explore/mlx-swift-lm#505",
    KIND,
    "Drafting died where a text crossed the window of the model's attention.",
)
@report(
    "huggingface/transformers#48280",
    KIND,
    "Drafts beyond a sliding window got a mask that was too narrow for the cache.",
)
@report(
    "ml-explore/mlx-lm#1427",
    KIND,
    "A full rotating cache could not give up rejected drafts, and the text went another way.",
)
@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3", "qwen2-mixed"])
@pytest.mark.parametrize("drafter", ["pld", "double"])
def test_texts_cross_the_window(name: str, drafter: str) -> None:
    served = model(name)
    hook = speculate(
        LoadedModel(served) if drafter == "double" else drafter, "chain:length=6", costs=COSTS
    )
    for length in (3, 13):
        given = {
            "inputs": torch.tensor([prompt(length)]),
            "max_new_tokens": 24,
            "do_sample": False,
            "eos_token_id": None,
        }
        assert torch.equal(served.generate(custom_generate=hook, **given), served.generate(**given))


@report(
    "ggml-org/llama.cpp#10547",
    KIND,
    "A draft model failed in the last positions of the context of a long request.",
)
def test_a_draft_model_goes_on_to_the_last_position() -> None:
    target = tiny_target(context=48)
    engine = load(
        target, LoadedModel(tiny_target(context=48, seed=1)), "chain:length=4", costs=COSTS
    )
    found = engine.write([Request(prompt(20), 60)])
    assert found.tokens == generate_plain(target, [Request(prompt(20), 60)]).tokens
    assert len(found.tokens[0]) == 29
    assert all(s.accepted == s.depth for s in found.stats.steps), "its double is right to the end"


@report(
    "vllm-project/vllm-ascend#2280",
    KIND,
    "N-gram drafts at a temperature above 0 failed once an answer was longer than some length.",
)
@pytest.mark.parametrize("drafter", ["pld", "suffix", "lookahead"])
def test_long_sampled_answers_go_on_to_the_context(drafter: str) -> None:
    target = tiny_target(context=80)
    request = Request(prompt(10), 200, sampling=Sampling(0.7, top_p=0.9, seed=1))
    found = load(target, drafter, "chain:length=5", costs=COSTS).write([request])
    assert found.tokens == generate_plain(target, [request]).tokens
    assert len(found.tokens[0]) == 71


@report(
    "vllm-project/vllm#5302",
    KIND,
    "A largest batch that was small beside the number of drafts stopped the engine.",
)
@pytest.mark.parametrize("count", [1, 2])
def test_drafts_may_outnumber_sequences(count: int) -> None:
    target: Target = architecture("llama")
    requests = [Request(prompt(5 + i), 20) for i in range(count)]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    engine = knowing(
        target, [[*r.prompt, *t] for r, t in zip(requests, alone, strict=True)], Chain(16)
    )
    assert engine.write(requests).tokens == alone
