"""Caches after rejections, cuts and earlier requests: nothing of one text may reach another."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftree.batch import SequenceBatch
from draftree.data.prompts import encode
from draftree.drafters._from_objects import LoadedModel
from draftree.engine import Engine, generate_plain, load
from draftree.loop import Components, State, admit, step
from draftree.models.causal_lm import CausalLM
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.vct import VCT
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import tiny_target
from hybrids import OneByOne, hybrid
from reports import report
from reports.engines import LENGTH, PROMPT, asked, knowing, plainly, whole

KIND = "Caches and later requests"
RETRIEVAL = ("pld", "suffix", "lookahead")
NEURAL = ("edd", "eagle", "eagle3", "medusa", "glide", "vdm")


def fresh(target: Target, name: str) -> Engine:
    """Return an engine with a drafter of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build("drafter", name).example(target)
    return Engine(target, drafter, EAGLE2(nodes=8, depth=3, width=2), costs=COSTS)


@report(
    "antirez/ds4#1000",
    KIND,
    "Tokens that were accepted after a stop stayed in the session, and the next request was conditioned on them.",
)
def test_what_was_accepted_after_the_end_is_forgotten(target: Target) -> None:
    engine = knowing(target, [whole(target)])
    beyond = 0
    wanted = plainly(target)
    for end in (4, 9):
        eos = frozenset({wanted[end]})
        first = engine.write([replace(asked(target), eos=eos)])
        beyond += sum(s.accepted + 1 for s in first.stats.steps) + 1 > len(first.tokens[0])
        for tail in ("", "cab"):
            prompt = [*asked(target).prompt, *first.tokens[0], *encode(target.tokenizer, tail)]
            assert engine.write([asked(target, prompt)]).tokens[0] == plainly(target, prompt)
            engine.write([replace(asked(target), eos=eos)])
    assert beyond


@report(
    "google-ai-edge/LiteRT-LM#3439",
    KIND,
    "The token that ends an answer never entered the cache, and later turns missed it.",
)
@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 5}, {"stop": "a"}], ids=str)
def test_later_turns_see_the_end_of_earlier_ones(talking: Target, options: dict[str, Any]) -> None:
    def turns(engine: Engine, forget: bool) -> list[list[int]]:
        chat, found = engine.conversation(**{"max_new_tokens": 12, **options}), []
        for said in ("a", "bc", "d"):
            if forget:
                engine.forget()
            found.append(chat.say(said).tokens)
        return found

    kept = turns(load(talking, "pld", "chain", costs=COSTS), False)
    assert kept == turns(load(talking, "pld", "chain", costs=COSTS), True)


@report(
    "ggml-org/llama.cpp#27852",
    KIND,
    "The n-gram cache of a slot was not begun anew for a shorter second prompt, and acceptance fell.",
)
@report("ggml-org/llama.cpp#19231", KIND, "Drafting worked for the first request alone.")
@pytest.mark.parametrize("drafter", ["pld", "lookahead"])
def test_later_requests_are_drafted_as_well_as_the_first(drafter: str) -> None:
    target = tiny_target(context=120)
    short = Request([7, 5, 9, 7, 5, 9, 7, 5], 30)
    first = load(target, drafter, "chain:length=5", costs=COSTS).write([short])
    engine = load(target, drafter, "chain:length=5", costs=COSTS)
    engine.write([Request(np.random.default_rng(0).integers(3, 60, 64).tolist(), 20)])
    for _ in range(2):
        again = engine.write([short])
        assert again.tokens == first.tokens
        assert again.stats.acceptance_length >= first.stats.acceptance_length * 0.999
    assert first.stats.acceptance_length > 1


@report(
    "openvinotoolkit/openvino.genai#3675",
    KIND,
    "The state of a drafter had the length of the last prompt, and the second prompt failed.",
)
@pytest.mark.parametrize("name", NEURAL)
def test_prompts_of_any_length_follow_one_another(name: str) -> None:
    target = tiny_target(context=96)
    engine = fresh(target, name)
    for length in (12, 3, 30, 1, 7):
        request = Request([(11 * i + length) % 61 for i in range(length)], 8)
        found, new = engine.write([request]), fresh(target, name).write([request])
        assert found.tokens == new.tokens == generate_plain(target, [request]).tokens
        assert found.stats.steps == new.stats.steps


@report(
    "NVIDIA/TensorRT-LLM#2263",
    KIND,
    "Lookahead was wrong after its first call, and differed from call to call.",
)
def test_lookahead_is_the_same_at_every_call() -> None:
    target = tiny_target(context=96)
    engine = load(target, "lookahead", "chain:length=4", costs=COSTS)
    requests = [Request(p, 10) for p in ([7, 5, 9, 7, 5], [3, 4], [8, 8, 8, 8, 8, 8])]
    alone = [generate_plain(target, [r]).tokens[0] for r in requests]
    for _ in range(2):
        assert [engine.write([r]).tokens[0] for r in requests] == alone
        assert engine.write(requests).tokens == alone


@report(
    "JustVugg/colibri#678",
    KIND,
    "A cancel in mid-text was not honoured, or left a slot that nobody could use.",
)
def test_a_text_may_be_left_at_any_token(target: Target) -> None:
    engine, wanted = knowing(target, [whole(target)]), plainly(target)
    for after in (1, 3, 6):
        stream = engine.stream(PROMPT, max_new_tokens=LENGTH, ignore_eos=True)
        assert [next(stream).id for _ in range(after)] == wanted[:after]
        stream.close()
        assert engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).tokens == wanted

    async def cancelled() -> None:
        task = asyncio.create_task(engine.acomplete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())

    def interrupting(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.write([asked(target)], on_tokens=interrupting)
    assert engine.complete(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).tokens == wanted


@report(
    "lablup/mlxcel#994",
    KIND,
    "The cache of the draft model was rewound too far after a rejection, and drafts got worse and worse.",
)
@pytest.mark.parametrize("policy", [Chain(4), VCT(2, 3)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_is_always_right(policy: Any, temperature: float) -> None:
    target = tiny_target(context=120)
    engine = Engine(
        target, load(target, LoadedModel(tiny_target(context=120))).drafter, policy, costs=COSTS
    )
    found = engine.write([Request([5, 6, 7], 90, sampling=Sampling(temperature, seed=1))])
    assert all(s.accepted == s.depth for s in found.stats.steps)


@report(
    "vllm-project/vllm#39273",
    KIND,
    "On hybrid models a step without drafts after an accepted one read a stale state.",
)
@report(
    "ml-explore/mlx-lm#1109",
    KIND,
    "Rejected drafts stayed in recurrent states, which cannot be trimmed, and spoiled what followed.",
)
@report(
    "ml-explore/mlx-lm#1446",
    KIND,
    "A target with recurrent layers was refused because its cache cannot be trimmed.",
)
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "bamba"])
@pytest.mark.parametrize("drafter", ["pld", "suffix"])
def test_recurrent_states_hold_what_was_accepted(family: str, drafter: str) -> None:
    target = Target(CausalLM(hybrid(family)), family)
    engine = load(target, drafter, "chain:length=4", costs=COSTS)
    prompt = [5, 9, 7, 11, 5, 9, 7, 11, 5]
    wanted = OneByOne(target.decoder.model, prompt).write(12)
    assert engine.write([Request(prompt, 12)]).tokens[0] == wanted
    on = [*prompt, *wanted[:5]]
    assert engine.write([Request(on, 7)]).tokens[0] == wanted[5:], "also gone on from"


@report(
    "ml-explore/mlx-lm#1528",
    KIND,
    "Closing a text early near its limit rewound the caches by a count of an earlier step.",
)
def test_a_text_that_is_closed_near_its_limit_leaves_exact_caches(target: Target) -> None:
    engine, wanted = knowing(target, [whole(target)]), plainly(target)
    for limit in range(5, 13):
        rows, steps = engine.begin([asked(target, max_new_tokens=limit)])
        while len(rows.written[0]) < limit - 2:
            next(steps)
        steps.close()
        prompt = [*asked(target).prompt, *wanted[: limit - 3]]
        assert (
            engine.write([asked(target, prompt, max_new_tokens=6)]).tokens[0]
            == wanted[limit - 3 :][:6]
        )


@report(
    "lmstudio-ai/mlx-engine#91",
    KIND,
    "The record of cached tokens was not cleared with the cache when a draft model was added.",
)
def test_what_is_forgotten_is_read_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, read = knowing(target, [whole(target)]), list[int]()
    prefill = type(target).prefill

    def watched(self: Target, cache: Any, texts: Any, *more: Any) -> Any:
        read.append(sum(map(len, texts)) - int(cache.lengths.sum()))
        return prefill(self, cache, texts, *more)

    monkeypatch.setattr(type(target), "prefill", watched)
    engine.write([asked(target)])
    engine.write([asked(target)])
    engine.forget()
    assert engine.write([asked(target)]).tokens[0] == plainly(target)
    assert read[0] == read[2] > read[1]


@report(
    "ml-explore/mlx-examples#1155",
    KIND,
    "A prompt cache could not be used with a draft model: it had the layers of the target alone.",
)
@report(
    "vllm-project/vllm#17137",
    KIND,
    "A prefix from the cache lacked the drafter's part of its last block.",
)
@pytest.mark.parametrize("name", ["lm", *NEURAL])
def test_a_cached_prefix_is_one_for_the_drafter_too(name: str) -> None:
    """The second prompt begins with the first one's text; drafts and text are those of an engine that read all of it."""
    target = tiny_target(context=96)
    engine = fresh(target, name)
    first = engine.write([Request([5, 6, 7, 8, 9, 10, 11, 12], 10)]).tokens[0]
    for prompt in ([5, 6, 7, 8, 9, 10, 11, 12, *first, 3, 4], [5, 6, 7, 8, 30], [5, 6]):
        request = Request(prompt, 10)
        found, new = engine.write([request]), fresh(target, name).write([request])
        assert found.tokens == new.tokens
        assert found.stats.steps == new.stats.steps


@report(
    "snowflakedb/ArcticInference#176",
    KIND,
    "The suffix cache kept every request, and memory grew without bound.",
)
def test_what_a_drafter_remembers_is_bounded() -> None:
    target = tiny_target(context=40)
    engine = load(target, "suffix:memory=60", "chain:length=4", costs=COSTS)
    sizes = []
    for i in range(20):
        request = Request([3 + i % 50, 5, 9], 6)
        assert engine.write([request]).tokens == generate_plain(target, [request]).tokens
        sizes.append(len(engine.carried.memory.tokens))
    assert 30 < max(sizes) <= 60


@report(
    "vllm-project/vllm#31944",
    KIND,
    "A request that sat out some steps was resumed with the drafts of before.",
)
def test_a_sequence_that_waits_is_not_resumed_with_old_drafts(target: Target) -> None:
    """Another sequence is admitted and released between two steps of the first one."""
    wanted = plainly(target)
    engine = knowing(target, [whole(target)])
    rows = SequenceBatch(target.new_cache(2, 80))
    parts = Components(target, engine.drafter, engine.policy, build("acceptor", "greedy"), COSTS)
    _, state = admit(parts, rows, [asked(target)], State())
    while rows.live.size:
        _, state = step(parts, rows, state)
        if rows.live.size and len(rows.free):
            before = list(rows.written[0])
            _, state = admit(parts, rows, [asked(target, "zz", max_new_tokens=1)], state)
            assert rows.written[0] == before
            rows.leave(1)
    assert rows.written[0] == wanted
