"""Continuous batching: whatever runs beside it, and whatever happens to it, a text is the one that its request gets alone."""

import gc
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from draftree.costs.step_costs import Costs
from draftree.drafting.step import RECENT
from draftree.engine import Engine, load
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.base import Policy
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.pct import PCT
from draftree.registry import build, names, part
from draftree.request import Request
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.scheduling.handle import Entry, Handle
from draftree.scheduling.prefix_cache import PrefixStore
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from hybrids import hybrid
from selection import one_in

SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=9, seed=8),
    Sampling(1.3, top_p=0.9, seed=5),
)
DRAFTERS = (
    "edd",
    "eagle3",
    "suffix",
    "lm",
    "dflash",
    "medusa",
    "hydra",
    "glide",
    "lookahead",
    "pld",
    "token_recycling",
)
VOCAB = 61


class OnlyOdd(LogitsProcessor):
    """Forbid even tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 0, -torch.inf)


def engine_of(
    drafter: str = "edd", policy: Policy = PCT(), context: int = 40, **limits: int
) -> Engine:
    target = tiny_target(context)
    torch.manual_seed(0)
    name, _, session = drafter.partition(":session=")
    method = part("drafter", name)(**({"session": False} if session else {}))
    engine = Engine(target, method.example(target), policy)
    engine.set_limits(**limits)
    return engine


def requests_of(count: int, seed: int = 0, longest: int = 14) -> list[Request]:
    """Return requests of mixed lengths: greedy, sampled, constrained, some that end early."""
    draws = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prompt = draws.integers(0, VOCAB, draws.integers(1, 12)).tolist()
        request = Request(
            prompt,
            int(draws.integers(1, longest)),
            number=i,
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
        )
        if i % 5 == 1:
            request = replace(request, processors=(OnlyOdd(),), guides=(OnlyOdd(),))
        if i % 3 == 2:
            request = replace(request, eos=frozenset(draws.integers(0, VOCAB, 6).tolist()))
        found.append(request)
    return found


def alone(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [engine.plain([request]).tokens[0] for request in requests]


def texts(handles: Sequence[Handle]) -> list[list[int]]:
    return [handle.result().tokens for handle in handles]


def test_a_step_whose_text_ends_inside_the_accepted_path_is_counted() -> None:
    engine, request = engine_of("suffix:session=false", Chain()), Request([5, 9, 5, 9, 5, 9], 12)
    text = engine.plain([request]).tokens[0]
    for eos in set(text):
        ends = replace(request, eos=frozenset({eos}))
        handle = engine.submit(ends)
        handle.result()
        counted = engine.write([ends]).stats.steps
        assert (handle.stats.steps, handle.stats.accepted) == (
            len(counted),
            sum(step.accepted for step in counted),
        )


@pytest.mark.parametrize("drafter", one_in(2, DRAFTERS))
def test_requests_that_join_at_random_steps_get_the_texts_they_get_alone(drafter: str) -> None:
    engine, requests = engine_of(drafter, max_sequences=3, max_batch_tokens=7), requests_of(9)
    waiting = list(requests)
    handles = list[Handle]()
    draws = np.random.default_rng(1)
    while waiting or engine.scheduler.num_unfinished:
        for _ in range(draws.integers(0, 3)):
            if waiting:
                handles.append(engine.submit(waiting.pop(0)))
        engine.step()
    assert texts(handles) == alone(engine, requests)


def test_preempted_requests_get_the_texts_they_get_alone() -> None:
    engine, requests = engine_of(max_sequences=4, max_cache_tokens=40), requests_of(12, longest=25)
    handles = [engine.submit(request) for request in requests]
    while engine.scheduler.num_unfinished:
        engine.step()
        assert engine.scheduler.cache_tokens <= 40
    assert texts(handles) == alone(engine, requests)
    assert sum(handle.stats.preemptions for handle in handles) > 3


def test_preemption_and_cancelling_at_random_leave_the_other_texts_as_they_are() -> None:
    engine, requests = (
        engine_of("suffix", max_sequences=5, max_cache_tokens=60, max_batch_tokens=5),
        requests_of(24, seed=4),
    )
    draws, wanted = np.random.default_rng(2), alone(engine_of("suffix"), requests)
    order = draws.permutation(len(requests)).tolist()
    handles, cancelled = dict[int, Handle](), set[int]()
    while order or engine.scheduler.num_unfinished:
        if order and draws.random() < 0.5:
            number = order.pop()
            handles[number] = engine.submit(requests[number])
        engine.step()
        if draws.random() < 0.25:
            number = int(draws.choice(list(handles))) if handles else -1
            if number >= 0 and not handles[number].finished:
                engine.cancel(handles[number])
                cancelled.add(number)
    for number, handle in handles.items():
        tokens = handle.result().tokens
        assert handle.status == ("cancelled" if number in cancelled else "finished")
        assert tokens == wanted[number][: len(tokens)]
        assert number in cancelled or len(tokens) == len(wanted[number])
    assert len(cancelled) > 3


@pytest.mark.parametrize(
    ("drafter", "policy"),
    one_in(
        2, ["edd", "eagle3", "lm", "dflash", "suffix:session=false"], [PCT(), EAGLE2(), Chain()]
    ),
    ids=str,
)
def test_neighbours_change_neither_the_steps_nor_the_drafts_of_a_sequence(
    drafter: str, policy: Policy
) -> None:
    name, _, session = drafter.partition(":")
    target, requests = tiny_target(), requests_of(6, seed=3)
    method = part("drafter", name)(**({"session": False} if session else {}))
    torch.manual_seed(0)
    made = method.example(target)

    def figures(handle: Handle) -> tuple[Any, ...]:
        return (
            handle.result().tokens,
            handle.stats.steps,
            handle.stats.drafted,
            handle.stats.accepted,
        )

    costs = Costs({1: 0.1}, {1: 1.0})
    together = Engine(target, made, policy, costs=costs)
    handles = [together.submit(request) for request in requests]
    each = [
        figures(Engine(target, made, policy, costs=costs).submit(request)) for request in requests
    ]
    assert [figures(handle) for handle in handles] == each


def test_a_cancelled_request_frees_its_slot_within_one_step() -> None:
    engine = engine_of(max_sequences=1)
    first, second = (engine.submit(Request([5, 6, n], 20)) for n in (7, 8))
    engine.step()
    engine.step()
    assert (first.status, second.status) == ("running", "waiting")
    engine.cancel(first)
    updates = engine.step()
    assert (first.status, second.status) == ("cancelled", "running")
    assert [update.handle for update in updates] == [first, second]
    written = first.result().tokens
    assert 0 < len(written) < 20
    assert written == alone(engine, [first.request])[0][: len(written)]
    engine.cancel(first)
    assert second.result().tokens == alone(engine, [second.request])[0]


def test_a_request_that_waits_is_cancelled_at_once() -> None:
    engine = engine_of(max_sequences=1)
    handles = [engine.submit(Request([5, 6], 9)) for _ in range(2)]
    engine.cancel(handles[1])
    assert handles[1].finished
    assert list(handles[1].tokens()) == []
    assert len(handles[0].result().tokens) == 9


def test_running_sequences_go_on_while_a_long_prompt_is_read() -> None:
    engine = engine_of(policy=Chain(), max_sequences=2, max_batch_tokens=4, context=80)
    short = engine.submit(Request([5, 6, 7], 20))
    engine.step()
    long = engine.submit(Request(list(range(40)), 5))
    got = []
    while long.status != "running":
        got.append([len(update.tokens) for update in engine.step() if update.handle is short])
    assert len(got) == 10
    assert all(n for n in got[:3])
    assert texts([short, long]) == alone(engine, [short.request, long.request])


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    engine = engine_of(max_sequences=2, max_batch_tokens=8, context=80)
    long, short = engine.submit(Request(list(range(60)), 5)), engine.submit(Request([5, 6, 7], 5))
    engine.step()
    assert (long.status, short.status) == ("reading", "running")
    assert texts([long, short]) == alone(engine, [long.request, short.request])


def test_updates_and_handles_tell_the_same_tokens() -> None:
    engine = engine_of(max_sequences=2)
    handles = [engine.submit(request) for request in requests_of(5)]
    got: dict[int, list[int]] = {handle.id: [] for handle in handles}
    assert [handle.id for handle in handles] == sorted(got)
    while updates := engine.step():
        for update in updates:
            got[update.handle.id] += [token.id for token in update.tokens]
            assert update.emitted is not None
            assert update.emitted.tokens == [token.id for token in update.tokens]
    assert engine.step() == []
    for handle in handles:
        assert [token.id for token in handle.poll()] == got[handle.id] == handle.result().tokens
        assert handle.poll() == []
        assert (
            handle.stats.tokens
            == len(got[handle.id])
            <= handle.stats.accepted + handle.stats.steps + 1
        )
        assert 0 <= handle.stats.waited <= handle.stats.first_token <= handle.stats.seconds


def test_unservable_requests_are_refused_at_submission() -> None:
    engine = engine_of(max_cache_tokens=20)
    engine.submit(Request([1, 2], 18))
    with pytest.raises(
        UserError,
        match="4 tokens of prompt and 17 new ones need 21 cache tokens, allowed is at most max_ca",
    ):
        engine.submit(Request([1, 2, 3, 4], 17))
    with pytest.raises(
        UserError, match="the prompt has 41 tokens, allowed are at most the target's context of 40"
    ):
        engine.submit(Request([1] * 41, 1))
    with pytest.raises(UserError, match="temperature is given with a Request"):
        engine.submit(Request([1], 1), temperature=1.0)
    with pytest.raises(UserError, match="1 requests are unfinished"):
        engine.set_limits(max_sequences=2)
    with pytest.raises(
        UserError,
        match=r"unknown limit of the scheduler 'max_sequence'.*did you mean 'max_sequences'",
    ):
        engine.set_limits(max_sequence=2)
    with pytest.raises(UserError, match="max_sequences is 0"):
        engine.set_limits(max_num_seqs=0)
    assert engine.scheduler.num_unfinished == 1


def test_the_drafter_keeps_what_it_has_learnt() -> None:
    engine, request = engine_of("suffix"), Request([1, 2, 3], 12)
    first, again = (engine.submit(request) for _ in range(2))
    texts([first, again])
    later = engine.submit(request)
    assert later.result().tokens == first.result().tokens
    assert later.stats.accepted > first.stats.accepted
    assert engine.write([request]).stats.acceptance_length > first.stats.acceptance_length


def test_calls_after_each_other_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that remembers drafts the last text, which must not be tested with the same draws."""
    engine = replace(engine_of("suffix", Chain(2)), acceptor=build("acceptor", "multiround"))
    request, numbers = Request([1, 2, 3], 5, sampling=Sampling(1.0, seed=4)), list[int]()
    made = Keyed.__init__

    def note(self: Keyed, seeds: Any, requests: Any, positions: Any, calls: Any = None) -> None:
        numbers.append(int(calls[0]))
        made(self, seeds, requests, positions, calls)

    monkeypatch.setattr(Keyed, "__init__", note)
    found = list[set[int]]()
    for again in range(6):
        numbers.clear()
        if again in (1, 4):
            engine.write([request])
        else:
            engine.submit(request).result()
        found.append(set(numbers))
        if again == 2:
            engine.set_limits(max_sequences=2)
    assert all(len(one) == 1 for one in found)
    assert len(set.union(*found)) == 6


def test_a_submitted_text_says_that_it_is_lossy() -> None:
    for acceptor, lossy in (("typical", True), ("match", False)):
        engine = replace(engine_of("suffix"), acceptor=build("acceptor", acceptor))
        request = Request([1, 2, 3], 12, sampling=Sampling(1.0, seed=4))
        stats = engine.submit(request).result().stats
        alone = engine.write([request]).stats
        assert (stats.lossy, stats.acceptor, stats.draw) == (lossy, acceptor, alone.draw)
        assert stats.deepest == alone.deepest
        assert not engine.submit(replace(request, max_new_tokens=1)).result().stats.lossy


def test_prompts_of_old_weights_are_forgotten() -> None:
    engine = engine_of(prefix_block=2)
    request = Request(list(range(1, 10)), 6)
    first = engine.submit(request).result().tokens
    model = engine.target.decoder.model
    model.train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.5)
    handle = engine.submit(request)
    with pytest.warns(UserWarning, match="training mode"):
        second = handle.result().tokens
    assert handle.cached_tokens == 0
    assert second == engine.plain([request]).tokens[0] != first


def test_the_next_tree_is_planned_from_recent_steps() -> None:
    engine = engine_of("suffix")
    engine.submit(Request([1, 2, 1, 2, 1], 24))
    kept = list[int]()
    while engine.step():
        if engine.scheduler.batch is not None:
            kept.append(len(engine.scheduler.batch[1].stats.work))
    assert max(kept) > 1
    assert max(kept) <= RECENT


def test_a_waiting_request_may_be_cancelled_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the queue and its first request, another thread may have emptied it."""
    engine = engine_of(max_sequences=2)
    running = engine.submit(Request([1, 2, 3], 12))
    engine.step()
    waiting = engine.submit(Request([4, 5], 3))
    counted = type(engine.scheduler).running.fget
    assert counted is not None

    def cancel_and_count(scheduler: Any) -> int:
        if sys._getframe(1).f_code.co_name == "_admit":
            engine.cancel(waiting)
        return int(counted(scheduler))

    monkeypatch.setattr(type(engine.scheduler), "running", property(cancel_and_count))
    assert running.result().tokens == engine.plain([running.request]).tokens[0]
    assert waiting.status == "cancelled"


def test_a_request_whose_beginning_fails_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(max_sequences=2)
    running = engine.submit(Request([1, 2, 3], 12))
    engine.step()
    begin = PrefixStore.begin

    def fail(self: PrefixStore, prompt: Any, target: Target) -> Any:
        if list(prompt) == [4, 5]:
            raise RuntimeError("no memory")
        return begin(self, prompt, target)

    monkeypatch.setattr(PrefixStore, "begin", fail)
    bad = engine.submit(Request([4, 5], 3))
    assert running.result().tokens == engine.plain([running.request]).tokens[0]
    assert (running.status, bad.status) == ("finished", "failed")


class Raises(LogitsProcessor):
    """Raise an exception once a text is long enough."""

    def __init__(
        self, length: int, error: BaseException = RuntimeError("a fault of the user's own")
    ) -> None:
        self._length, self._error = length, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self._length:
            raise self._error
        return scores


@pytest.mark.parametrize("length", [3, 6, 9])
def test_a_request_that_raises_ends_alone(length: int) -> None:
    engine, requests = engine_of(max_sequences=3), requests_of(6)
    wanted = alone(engine, requests)
    handles = [engine.submit(request) for request in requests]
    engine.step()
    bad = engine.submit(Request([1, 2, 3], 9, processors=(Raises(length),)))
    assert texts(handles) == wanted
    with pytest.raises(RuntimeError, match="a fault of the user's own"):
        bad.result()
    assert bad.status == "failed"
    written = [token.id for token in bad.poll()]
    assert 0 <= length - 3 - len(written) < 4, (
        "what the failing step accepted before is lost, and no more"
    )
    assert written == alone(engine, [replace(bad.request, processors=())])[0][: len(written)]


def test_an_interrupted_step_loses_no_request() -> None:
    engine, requests = engine_of(max_sequences=3), requests_of(6)
    handles = [engine.submit(request) for request in requests]
    stop = engine.submit(Request([1, 2, 3], 9, processors=(Raises(6, KeyboardInterrupt()),)))
    for _ in range(40):
        try:
            engine.step()
        except KeyboardInterrupt:
            engine.cancel(stop)
    assert stop.status == "cancelled"
    assert texts(handles) == alone(engine, requests)


def test_threads_submit_cancel_and_read_while_others_step() -> None:
    engine, requests = engine_of("suffix", max_sequences=3), requests_of(24)
    wanted = alone(engine, requests)

    def ask(number: int) -> list[int]:
        handle = engine.submit(requests[number])
        if number % 6 == 5:
            time.sleep(0.01)
            engine.cancel(handle)
        return [token.id for token in handle.tokens()]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(len(requests))))
    for number, tokens in enumerate(found):
        assert tokens == wanted[number][: len(tokens)]
        assert number % 6 == 5 or len(tokens) == len(wanted[number])
    assert (
        engine.scheduler.num_unfinished == engine.scheduler.running == engine.scheduler.waiting == 0
    )


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load("demo")


def test_texts_and_their_pieces_are_those_of_complete(demo: Engine) -> None:
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"temperature": 0.8, "seed": 5, "max_new_tokens": 9},
        {"regex": "[a-f ]{6,9}", "max_new_tokens": 20},
        {"stop": "e", "max_new_tokens": 20, "logprobs": 2},
    ]
    engine = Engine(demo.target, demo.drafter, demo.policy)
    handles = [engine.submit("def f(x):", **options) for options in asked]
    for handle, options in zip(handles, asked, strict=True):
        mine, theirs = handle.result(), demo.complete("def f(x):", **options)
        assert (mine.text, mine.tokens, mine.ending, mine.stop) == (
            theirs.text,
            theirs.tokens,
            theirs.ending,
            theirs.stop,
        )
        assert [each.token for each in mine.logprobs] == [each.token for each in theirs.logprobs]
        assert "".join(mine.pieces) == mine.text
    two = [
        engine.submit("a", number=n, temperature=1.0, max_new_tokens=5).result().tokens
        for n in range(2)
    ]
    assert two == [
        each.tokens for each in demo.complete("a", n=2, temperature=1.0, max_new_tokens=5)
    ]
    with pytest.raises(UserError, match="n is 2, allowed is 1 here"):
        engine.submit("a", n=2)
    with pytest.raises(UserError, match="there is a list of 2 prompts"):
        engine.submit(["a", "b"])


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_targets_that_keep_states(family: str) -> None:
    target = Target(CausalLM(hybrid(family)), family)
    engine = Engine(target, part("drafter", "suffix")().example(target), PCT())
    engine.set_limits(max_sequences=3, max_cache_tokens=42, max_batch_tokens=6)
    requests = [
        replace(request, processors=(), guides=()) for request in requests_of(8, seed=6, longest=20)
    ]
    handles = [engine.submit(request) for request in requests]
    assert texts(handles) == alone(engine, requests)
    assert sum(handle.stats.preemptions for handle in handles) > 0


@pytest.mark.long
def test_a_thousand_requests_in_random_order_are_served_in_flat_memory() -> None:
    engine, requests = (
        engine_of("suffix:session=false", max_sequences=8, max_cache_tokens=160),
        requests_of(1000),
    )
    wanted, draws = alone(engine, requests), np.random.default_rng(0)
    order, running = draws.permutation(len(requests)).tolist(), dict[int, Handle]()
    served, peaks = 0, dict[int, int]()
    while order or engine.scheduler.num_unfinished:
        few = int(draws.integers(0, 4)) if len(running) < 24 else 0
        running |= {number: engine.submit(requests[number]) for number in order[:few]}
        order = order[few:]
        engine.step()
        for number in [number for number, handle in running.items() if handle.finished]:
            assert running.pop(number).result().tokens == wanted[number]
            served += 1
            if served in (100, 1000):
                peaks[served] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                gc.collect()
                entries = [each for each in gc.get_objects() if type(each) is Entry]
                mine = set(map(id, requests))  # engines of other tests may be alive
                assert sum(id(each.submitted) in mine for each in entries) <= len(running)
                del entries
    assert served == 1000
    assert not running
    assert peaks[1000] <= 1.05 * peaks[100]


def test_the_batch_has_as_many_rows_as_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = engine_of(policy=Chain(), max_sequences=4), list[int]()
    verify = engine.target.verify
    monkeypatch.setattr(
        engine.target, "verify", lambda *args: rows.append(args[0].rows) or verify(*args)
    )
    handles = [engine.submit(Request([5, 6, n], 30 if n == 0 else 4)) for n in range(3)]
    texts(handles)
    assert rows[0] == 3
    assert rows[-1] == 1
    later = [engine.submit(Request([5, 6, n], 25)) for n in range(2)]
    engine.step()
    rows.clear()
    later += [engine.submit(Request([8, 6, n], 9)) for n in range(2)]
    texts(later)
    assert set(rows) >= {2, 4}
    monkeypatch.undo()
    assert texts([*handles, *later]) == alone(
        engine, [handle.request for handle in [*handles, *later]]
    )


@pytest.mark.parametrize("drafter", one_in(2, names("drafter")))
def test_every_drafter_goes_on_where_rows_are_moved(drafter: str) -> None:
    target = tiny_target()
    torch.manual_seed(0)
    made, requests = part("drafter", drafter)().example(target), requests_of(4, seed=5, longest=20)
    costs = Costs({1: 0.1}, {1: 1.0})

    def figures(moves: bool) -> list[tuple[int, int, int]]:
        engine = Engine(target, made, EAGLE2(), costs=costs)
        handles = [engine.submit(request) for request in requests]
        for step in range(60):
            engine.step()
            batch = engine.scheduler.batch
            if moves and batch is not None and engine.scheduler._batch.running:
                engine.scheduler._batch.resize(len(engine.scheduler._batch.running) + step % 2)
        assert engine.scheduler._batch.movable, "the drafter has no select"
        return [(h.stats.steps, h.stats.drafted, h.stats.accepted) for h in handles if h.result()]

    assert figures(moves=True) == figures(moves=False)


def test_sequences_of_a_drafter_that_cannot_move_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of("pld", max_sequences=4)
    monkeypatch.setattr(type(engine.drafter), "select", lambda *_: None)
    requests, handles = requests_of(6, longest=20), list[Handle]()
    for request in requests:
        handles.append(engine.submit(request))
        engine.step()
    assert texts(handles) == alone(engine, requests)
    assert sum(handle.stats.preemptions for handle in handles) == 1
