"""Prefixes of prompts that requests share: nothing changes but what is read."""

from typing import Any

import numpy as np
import pytest
import torch

from draftree.engine import Engine
from draftree.models.causal_lm import CausalLM
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.pct import PCT
from draftree.registry import part
from draftree.request import Request
from draftree.scheduling.handle import Handle
from draftree.scheduling.prefix_cache import PrefixStore
from draftree.target.target import HiddenStates, Target
from draftree.testing.fakes import tiny_target
from hybrids import hybrid
from selection import one_in

VOCAB = 61
DRAFTERS = ("edd", "eagle3", "glide", "suffix:session=false", "lm", "dflash", "medusa", "hydra")


def engine_of(drafter: str, target: Target, **limits: int) -> Engine:
    name, _, session = drafter.partition(":")
    method = part("drafter", name)(**({"session": False} if session else {}))
    torch.manual_seed(0)
    engine = Engine(target, method.example(target), EAGLE2(nodes=6, depth=3))
    engine.set_limits(**limits)
    return engine


def requests_of(count: int, seed: int = 0) -> list[Request]:
    """Return requests whose prompts begin alike, in groups and in groups of groups."""
    draws = np.random.default_rng(seed)
    first = draws.integers(0, VOCAB, 9).tolist()
    seconds = [draws.integers(0, VOCAB, 6).tolist() for _ in range(2)]
    return [
        Request(
            [*first, *seconds[i % 2], *draws.integers(0, VOCAB, draws.integers(0, 6)).tolist()],
            8,
            number=i,
        )
        for i in range(count)
    ]


def figures(handle: Handle) -> tuple[Any, ...]:
    return handle.result().tokens, handle.stats.steps, handle.stats.drafted, handle.stats.accepted


@pytest.mark.parametrize(("drafter", "chunk"), one_in(2, DRAFTERS, [4, 512]))
def test_texts_and_drafts_are_those_without_sharing(drafter: str, chunk: int) -> None:
    target, requests = tiny_target(40), requests_of(8)
    sharing = engine_of(drafter, target, max_sequences=3, max_batch_tokens=chunk, prefix_block=3)
    reading = engine_of(
        drafter, target, max_sequences=3, max_batch_tokens=chunk, max_prefix_tokens=0
    )
    shared, alone = (
        [engine.submit(request) for request in requests] for engine in (sharing, reading)
    )
    assert [figures(handle) for handle in shared] == [figures(handle) for handle in alone]
    assert sum(handle.stats.cached_tokens for handle in shared) > 4 * 9
    assert all(handle.stats.cached_tokens == 0 for handle in alone)
    again = sharing.submit(requests[0])
    assert figures(again) == figures(shared[0])
    assert again.stats.cached_tokens == (len(requests[0].prompt) - 1) // 3 * 3


def test_preempted_requests_find_their_own_prompts_again() -> None:
    target, requests = tiny_target(40), requests_of(6)
    engine = engine_of("edd", target, max_sequences=4, max_cache_tokens=70, prefix_block=3)
    handles = [engine.submit(request) for request in requests]
    texts = [handle.result().tokens for handle in handles]
    assert sum(handle.stats.preemptions for handle in handles) > 0
    assert texts == [engine.plain([request]).tokens[0] for request in requests]


def test_running_sequences_come_first_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    target, requests = tiny_target(40), requests_of(6)
    engine = engine_of("edd", target, max_sequences=2, max_cache_tokens=60, prefix_block=3)
    store = engine.scheduler._prefixes
    handles = [engine.submit(request) for request in requests]
    while not all(handle.finished for handle in handles):
        engine.step()
        assert engine.scheduler.cache_tokens + store.tokens <= 60
    assert store.tokens > 0
    engine.forget()
    assert store.tokens == 0
    assert engine.submit(requests[0]).result().tokens == handles[0].result().tokens


def test_layers_with_a_state_share_nothing() -> None:
    target = Target(CausalLM(hybrid("qwen3_next")), "qwen3_next")
    engine = Engine(target, part("drafter", "suffix")(session=False).example(target), PCT())
    engine.set_limits(max_sequences=2, prefix_block=2)
    request = Request([3, 4, 5, 6, 7, 8], 6)
    for _ in range(2):
        handle = engine.submit(request)
        assert handle.result().tokens == engine.plain([request]).tokens[0]
        assert handle.cached_tokens == 0


def filled(store: PrefixStore, target: Target, prompt: list[int]) -> None:
    cache = target.new_cache(1, len(prompt))
    text = np.array(prompt, np.int64)
    store.store(
        prompt,
        cache,
        0,
        target.prefill(cache, [text], part("drafter", "edd")().example(target).needs).hidden_states,
    )


def test_the_leaf_that_was_used_longest_ago_is_dropped_first() -> None:
    target, store = tiny_target(40), PrefixStore(2)
    for prompt in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 9]):
        filled(store, target, prompt)
    assert store.tokens == 10
    assert len(store.find([1, 2, 3, 4, 0])) == 2
    store.shrink(8)
    assert [
        len(store.find([*prompt, 0])) for prompt in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 9])
    ] == [2, 1, 2]
    store.shrink(4)
    assert [len(store.find([*prompt, 0])) for prompt in ([1, 2, 3, 4], [7, 8, 9, 9])] == [0, 2]
    store.shrink(0)
    assert store.tokens == 0


def test_restored_blocks_hold_what_was_read() -> None:
    target = tiny_target(40)
    store = PrefixStore(3)
    prompt = [4, 8, 15, 16, 23, 42, 7, 1]
    filled(store, target, prompt)
    needs = part("drafter", "edd")().example(target).needs
    whole = target.new_cache(1, 8)
    read: HiddenStates = target.prefill(whole, [np.array(prompt, np.int64)], needs).hidden_states
    partial = store.begin(prompt, target)
    assert partial is not None
    cache, (hidden_states,) = partial.cache, partial.hidden_states
    assert cache.lengths.tolist() == [6]
    assert hidden_states.tokens.tolist() == prompt[:6]
    assert hidden_states.positions.tolist() == list(range(6))
    for layer in needs.hidden:
        assert torch.equal(hidden_states.hidden[layer], read.hidden[layer][:6])
    for layer in range(len(cache.shapes)):
        for mine, theirs in zip(cache.layer(layer), whole.layer(layer), strict=True):
            assert torch.equal(mine[:, :, :6], theirs[:, :, :6])
