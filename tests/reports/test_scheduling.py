"""Requests that are submitted, wait, run, make room for others, and are cancelled."""

import gc
import weakref
from typing import Any

import pytest
import torch

from draftree.engine import Engine, generate_plain
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.scheduling.handle import Handle
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import tiny_target
from reports import report
from reports.engines import asked, knowing, plainly, whole

KIND = "Batching and scheduling"


def engine(target: Target, name: str = "suffix") -> Engine:
    """Return an engine with a drafter of a method."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = build("drafter", name).example(target)
    return Engine(target, drafter, EAGLE2(nodes=6, depth=3, width=2), costs=COSTS)


def requests(count: int) -> list[Request]:
    """Return requests of different lengths, every second of them sampled."""
    return [
        Request(
            [(5 * i + j % 3) % 61 for j in range(4 + i)],
            14 + i,
            number=i,
            sampling=Sampling(float(i % 2), seed=3),
        )
        for i in range(count)
    ]


def ids(handle: Handle) -> list[int]:
    """Return the tokens of a request that has ended."""
    return [token.id for token in handle.tokens()]


def finish(made: Engine) -> None:
    """Run all steps."""
    while made.scheduler.num_unfinished:
        made.step()


@report(
    "vllm-project/vllm#49620",
    KIND,
    "Tokens of a step that was under way came back after their request had been pushed out.",
)
@report(
    "vllm-project/vllm#48245",
    KIND,
    "Counts of tokens that were expected fell below zero when a request was pushed out.",
)
@pytest.mark.parametrize("name", ["suffix", "eagle", "edd"])
def test_texts_survive_being_pushed_out(name: str) -> None:
    target = tiny_target(context=64)
    made = engine(target, name)
    made.set_limits(max_cache_tokens=45, max_sequences=4)
    handles = [made.submit(r) for r in requests(6)]
    finish(made)
    assert any(h.entry.preemptions for h in handles)
    for handle, request in zip(handles, requests(6), strict=True):
        assert ids(handle) == generate_plain(target, [request]).tokens[0]


@report(
    "vllm-project/vllm#30916",
    KIND,
    "After a request was pushed out its old drafts and the state of its grammar no longer agreed.",
)
def test_options_count_from_the_first_prompt_after_a_request_was_pushed_out(target: Target) -> None:
    """What was written becomes part of the prompt that is read again; penalties, limits and grammars must not notice."""
    options: list[dict[str, Any]] = [
        {"frequency_penalty": 1.5}, {"min_new_tokens": 20, "ignore_eos": False},
        {"regex": "(ab|ba){9,11}c", "ignore_eos": False},
        {"presence_penalty": 2.0, "temperature": 1.0, "seed": 3}, {"no_repeat_ngram_size": 2}, {"logprobs": 2},
    ]  # fmt: skip
    made = engine(target)
    made.set_limits(max_cache_tokens=40, max_sequences=3)
    given = [asked(target, "abc"[: 1 + i % 3], number=i, **each) for i, each in enumerate(options)]
    handles = [made.submit(request) for request in given]
    finish(made)
    assert sum(h.entry.preemptions for h in handles) > 1
    for handle, request in zip(handles, given, strict=True):
        assert ids(handle) == generate_plain(target, [request]).tokens[0]


@report(
    "sgl-project/sglang#37103", KIND, "Memory of requests that were cancelled was never given back."
)
def test_cancelled_requests_leave_nothing_behind() -> None:
    target = tiny_target(context=64)
    made = engine(target)
    made.set_limits(max_sequences=2)
    kept = []
    for i in range(8):
        handles = [made.submit(r) for r in requests(3)]
        for _ in range(i % 4):
            made.step()
        for handle in handles:
            made.cancel(handle)
        kept += [weakref.ref(h) for h in handles]
        made.step()
        del handles, handle
    finish(made)
    gc.collect()
    assert made.scheduler.cache_tokens == made.scheduler.running == made.scheduler.waiting == 0
    assert not [ref for ref in kept if ref() is not None]
    assert made.write(requests(1)[:1]).tokens == generate_plain(target, requests(1)).tokens


@report(
    "eugr/llama-benchy#11",
    KIND,
    "Pieces of a stream were counted as tokens, although a step may bring several.",
)
def test_tokens_are_counted_and_not_steps(target: Target) -> None:
    made = knowing(target, [whole(target)])
    handle = made.submit(asked(target))
    told: list[Any] = []
    while made.scheduler.num_unfinished:
        told += made.step()
    count = sum(len(update.tokens) for update in told)
    assert count == len(ids(handle)) == len(plainly(target))
    assert len(told) < count, "a step brings several tokens"


@report(
    "vllm-project/vllm#14645",
    KIND,
    "Draft lengths were read in another order than the batch's, and tokens leaked into other answers.",
)
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_waiting_requests_run_in_any_number_of_slots(limit: int) -> None:
    target = tiny_target(context=64)
    made = engine(target)
    made.set_limits(max_sequences=limit)
    handles = [made.submit(r) for r in requests(7)]
    finish(made)
    assert [ids(h) for h in handles] == [generate_plain(target, [r]).tokens[0] for r in requests(7)]
