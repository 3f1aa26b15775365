"""One pass verifies trees and reads chunks of prompts of other sequences: each gets what it would get in passes of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_scheduler import DRAFTERS, VOCAB, Raises, alone, engine_of, requests_of, texts

from draftree.costs.step_costs import Costs
from draftree.drafting.step import Drafting
from draftree.engine import Engine
from draftree.kernels.node_table import NodeTable
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import Chunk, ForwardBatch
from draftree.models.kv_cache import SlotCache
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import part
from draftree.request import Request
from draftree.scheduling.handle import Handle
from draftree.target.target import HiddenStateSpec, Probes, Read, Target, VerificationResult
from draftree.testing.fakes import tiny_target
from draftree.tree import Ints, Tree
from hybrids import hybrid
from selection import one_in

NEEDS = HiddenStateSpec((0, 2, -1), top=3)
PROMPTS = [
    np.array(p)
    for p in ([3, 9, 4, 1, 7], [8, 2, 6, 5, 11, 30, 12], [20, 21, 22, 23, 24], [40, 41, 42, 43, 44])
]
"""The first and the third are running, and the others are read; two tokens of each had been read
before."""


@pytest.fixture(scope="module", params=["float64", "float32, native", "bfloat16, native"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target by transformers' layers, and two by native kernels."""
    if request.param == "float64":
        return tiny_target(120)
    made = tiny_target(120, compiled=True)
    if request.param.startswith("float32"):
        return made
    folder = tmp_path_factory.mktemp("bfloat16")
    made.decoder.model.bfloat16().save_pretrained(folder)
    return Target.load(str(folder), "bfloat16", compile=True, exactness="bits")


def trees() -> Tree:
    """Return a tree below each of two running sequences."""
    tokens, parents = np.array([17, 18, 31, 32, 33, 34, 35]), np.array([-1, -1, 0, 0, 1, 2, 4])
    depth, row = np.array([0, 0, 1, 1, 1, 2, 2]), np.array([0, 2, 0, 0, 2, 0, 2])
    zeros, source = np.zeros(7), np.where(parents < 0, -1, 0)
    numbers, minus = np.arange(7), np.full(7, -1)
    return Tree(NodeTable(tokens, parents, depth, row, zeros, zeros, source, zeros, numbers, minus))


def before(target: Target) -> SlotCache:
    """Return a cache that holds the prompts of running sequences, and the beginnings of those that are read."""
    cache = target.new_cache(4, 8)
    target.prefill(
        cache, [p if r in (0, 2) else p[:2] for r, p in enumerate(PROMPTS)], HiddenStateSpec()
    )
    return cache


CHUNKS = (Chunk(1, PROMPTS[1][2:5], False), Chunk(3, PROMPTS[3][2:], True))


def shared(target: Target, probes: Probes | None = None) -> tuple[SlotCache, VerificationResult]:
    cache = before(target)
    return cache, target.verify(cache, trees(), NEEDS, probes, CHUNKS)


def same(mine: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two results are equal: bit for bit, but for rounding in float64."""
    if mine.dtype is torch.float64:
        return mine.shape == wanted.shape and torch.allclose(mine, wanted, rtol=0, atol=1e-9)
    return torch.equal(mine, wanted)


def check(target: Target) -> None:
    """Assert that a shared pass gives what passes of their own give."""
    (cache, found), apart = shared(target), before(target)
    alone = target.verify(apart, trees(), NEEDS)
    assert same(found.logits, alone.logits), "logits of nodes"
    assert found.hidden_states.top is not None
    assert alone.hidden_states.top is not None
    assert torch.equal(found.hidden_states.top, alone.hidden_states.top), (
        "likeliest tokens of nodes"
    )
    assert all(
        same(found.hidden_states.hidden[layer], alone.hidden_states.hidden[layer])
        for layer in NEEDS.hidden
    ), "features of nodes"
    read = found.read
    assert read is not None
    parts = list[VerificationResult]()
    for chunk in CHUNKS:
        text = np.concatenate((PROMPTS[chunk.sequence][:2], chunk.tokens))
        parts.append(target.prefill(apart, [text], NEEDS, np.array([chunk.sequence])))
    assert same(read.logits, parts[1].logits), "logits after a prompt"
    for layer in NEEDS.hidden:
        assert same(
            read.hidden_states.hidden[layer],
            torch.cat([p.hidden_states.hidden[layer] for p in parts]),
        ), "features of prompts"
    for column in ("rows", "positions", "tokens"):
        assert getattr(read.hidden_states, column).tolist() == [
            x for p in parts for x in getattr(p.hidden_states, column).tolist()
        ]
    assert cache.lengths.tolist() == apart.lengths.tolist() == [5, 5, 5, 5]
    for layer in target.decoder.keyed_layers:
        for mine, theirs in zip(cache.layer(layer), apart.layer(layer), strict=True):
            for row, length in enumerate(cache.lengths.tolist()):
                assert same(mine[row, :, :length], theirs[row, :, :length]), (
                    f"keys or values of layer {layer}"
                )


def test_a_shared_pass_gives_what_passes_of_their_own_give(target: Target) -> None:
    check(target)


def test_a_pass_over_prompts_alone_gives_the_same(target: Target) -> None:
    (_, found), cache = shared(target), before(target)
    read = target.read(cache, NEEDS, CHUNKS)
    assert found.read is not None
    assert same(read.logits, found.read.logits)
    assert all(
        same(read.hidden_states.hidden[layer], found.read.hidden_states.hidden[layer])
        for layer in NEEDS.hidden
    )
    assert cache.lengths.tolist() == [5, 5, 5, 5]


def test_probes_ride_along(target: Target) -> None:
    probes = Probes(
        np.array([50, 51, 52]), np.array([2, 0, 2]), np.array([6, 6, 7]), np.eye(3, dtype=np.bool_)
    )
    _, found = shared(target, probes)
    alone = target.verify(before(target), trees(), NEEDS, probes)
    assert same(found.logits, alone.logits)
    assert found.hidden_states.probe_logits is not None
    assert alone.hidden_states.probe_logits is not None
    assert same(found.hidden_states.probe_logits, alone.hidden_states.probe_logits)
    assert found.read is not None
    assert same(found.read.logits, shared(target)[1].read.logits)  # type: ignore[union-attr]


Beside = Callable[[ForwardBatch, Sequence[Chunk]], tuple[ForwardBatch, Ints]]


def neighbours(batch: ForwardBatch) -> ForwardBatch:
    """Let the chunks of two sequences see each the other one's text."""
    tokens = batch.tokens.clone()
    tokens[batch.of(1)], tokens[batch.of(3)] = batch.tokens[batch.of(3)], batch.tokens[batch.of(1)]
    return replace(batch, tokens=tokens)


def not_causal(batch: ForwardBatch) -> ForwardBatch:
    """Let the tokens of a chunk see those after them."""
    return replace(
        batch, visible=[np.ones_like(v) if r == 1 else v for r, v in enumerate(batch.visible)]
    )


def swapped(batch: ForwardBatch) -> ForwardBatch:
    """Let a sequence read the last token of another one's chunk."""
    tokens = batch.tokens.clone()
    tokens[batch.of(3)][-1:] = batch.tokens[batch.of(1)][-1:]
    return replace(batch, tokens=tokens)


def moved(batch: ForwardBatch) -> ForwardBatch:
    """Give a chunk the positions of one that begins a text."""
    positions = batch.positions.copy()
    positions[batch.of(1)] -= 2
    return replace(batch, positions=positions)


@pytest.mark.parametrize("mistake", [neighbours, not_causal, swapped, moved])
def test_a_mistake_in_the_batch_is_noticed(
    target: Target, mistake: Callable[[ForwardBatch], ForwardBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: Beside = ForwardBatch.beside

    def wrong(batch: ForwardBatch, chunks: Sequence[Chunk]) -> tuple[ForwardBatch, Ints]:
        whole, own = beside(batch, chunks)
        return mistake(whole), own

    monkeypatch.setattr(ForwardBatch, "beside", wrong)
    with pytest.raises(AssertionError):
        check(target)


def others_features(read: Read) -> Read:
    """Hand each token's features to its neighbour."""
    hidden = {layer: h.roll(1, 0) for layer, h in read.hidden_states.hidden.items()}
    return replace(read, hidden_states=replace(read.hidden_states, hidden=hidden))


def others_logits(read: Read) -> Read:
    """Take logits after another token."""
    return replace(read, logits=read.logits.roll(1, -1))


@pytest.mark.parametrize("mistake", [others_features, others_logits])
def test_a_mistake_in_what_was_read_is_noticed(
    target: Target, mistake: Callable[[Read], Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = Target._run_pass

    def wrong(*given: Any) -> tuple[Any, Read | None]:
        out, read = passed(*given)
        return out, None if read is None else mistake(read)

    monkeypatch.setattr(Target, "_run_pass", wrong)
    with pytest.raises(AssertionError):
        check(target)


def written(engine: Engine, requests: Sequence[Request], seed: int = 1) -> list[Handle]:
    """Submit requests at random steps, and run to the end."""
    waiting = list(requests)
    handles = list[Handle]()
    draws = np.random.default_rng(seed)
    while waiting or engine.scheduler.num_unfinished:
        for _ in range(draws.integers(0, 3)):
            if waiting:
                handles.append(engine.submit(waiting.pop(0)))
        engine.step()
    return handles


@pytest.mark.parametrize("drafter", one_in(2, DRAFTERS))
def test_requests_whose_prompts_share_passes_get_the_texts_they_get_alone(drafter: str) -> None:
    engine, requests = (
        engine_of(drafter, max_sequences=3, max_batch_tokens=7, share_passes=True),
        requests_of(9),
    )
    assert texts(written(engine, requests)) == alone(engine, requests)
    assert engine.scheduler.shared_passes > 3


@pytest.mark.parametrize("drafter", ["edd", "eagle3", "suffix"])
def test_texts_of_native_targets_have_the_bits_that_they_have_alone(
    target: Target, drafter: str
) -> None:
    torch.manual_seed(0)
    engine = Engine(target, part("drafter", drafter)().example(target), EAGLE2())
    engine.set_limits(
        max_sequences=4,
        max_batch_tokens=9,
        prefix_block=4,
        share_passes=None if target.packs else True,
    )
    requests = [
        *requests_of(6, seed=3, longest=30),
        *(replace(r, number=9) for r in requests_of(6, seed=3, longest=9)),
    ]
    handles = written(engine, requests)
    assert texts(handles) == alone(engine, requests)
    assert engine.scheduler.shared_passes > 5
    assert any(handle.cached_tokens for handle in handles)


def test_mistakes_change_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: Beside = ForwardBatch.beside

    def wrong(batch: ForwardBatch, chunks: Sequence[Chunk]) -> tuple[ForwardBatch, Ints]:
        whole, own = beside(batch, chunks)
        tokens = whole.tokens.clone()
        for (
            chunk
        ) in chunks:  # each begins with the first token of the pass, which is another sequence's
            tokens[whole.of(chunk.sequence)][:1] = whole.tokens[0]
        return replace(whole, tokens=tokens), own

    engine, requests = (
        engine_of("suffix", max_sequences=3, max_batch_tokens=7, share_passes=True),
        requests_of(9),
    )
    wanted = alone(engine, requests)
    monkeypatch.setattr(ForwardBatch, "beside", wrong)
    assert texts(written(engine, requests)) != wanted


def test_preempted_and_cancelled_prompts_leave_the_others_as_they_are() -> None:
    limits = {
        "max_sequences": 5,
        "max_cache_tokens": 50,
        "max_batch_tokens": 5,
        "share_passes": True,
    }
    engine, requests = engine_of("edd", **limits), requests_of(24, seed=4, longest=25)
    wanted, draws = alone(engine, requests), np.random.default_rng(2)
    waiting = list(requests)
    handles = list[Handle]()
    cancelled = set[int]()
    while waiting or engine.scheduler.num_unfinished:
        if waiting and draws.random() < 0.5:
            handles.append(engine.submit(waiting.pop(0)))
        engine.step()
        assert engine.scheduler.cache_tokens <= 50
        reading = [i for i, handle in enumerate(handles) if handle.status == "reading"]
        if reading and draws.random() < 0.2:
            engine.cancel(handles[reading[0]])
            cancelled.add(reading[0])
    for number, handle in enumerate(handles):
        tokens = handle.result().tokens
        assert tokens == wanted[number][: len(tokens)]
        assert (number in cancelled) or len(tokens) == len(wanted[number])
    assert len(cancelled) > 2
    assert sum(handle.stats.preemptions for handle in handles) > 2


@pytest.mark.parametrize("length", [3, 6])
def test_a_request_that_raises_ends_alone(length: int) -> None:
    engine, requests = engine_of(max_sequences=3, share_passes=True), requests_of(6)
    wanted = alone(engine, requests)
    handles = [engine.submit(request) for request in requests]
    engine.step()
    bad = engine.submit(Request([1, 2, 3], 9, processors=(Raises(length),)))
    assert texts(handles) == wanted
    with pytest.raises(RuntimeError, match="a fault of the user's own"):
        bad.result()
    assert bad.status == "failed"


def test_a_drafter_that_cannot_move_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("pld", max_sequences=4, max_batch_tokens=4, share_passes=True)
    monkeypatch.setattr(type(engine.drafter), "select", lambda *_: None)
    requests, handles = requests_of(6, longest=20), list[Handle]()
    for request in requests:
        handles.append(engine.submit(request))
        engine.step()
    assert texts(handles) == alone(engine, requests)


def test_prompts_that_come_one_by_one_move_to_larger_batches_before_any_is_written() -> None:
    engine = engine_of(
        "suffix", max_sequences=4, max_batch_tokens=4, context=120, share_passes=True
    )
    handles = [engine.submit(Request([5, 6, 7], 9))]
    texts(handles)  # so that there is something to be remembered
    for seed in range(3):
        handles.append(
            engine.submit(Request([(seed + 7 * i) % VOCAB for i in range(20 - 6 * seed)], 9))
        )
        engine.step()
    assert texts(handles) == alone(engine, [handle.request for handle in handles])


def test_a_long_prompt_is_read_in_the_passes_of_running_sequences() -> None:
    engine = engine_of(max_sequences=2, max_batch_tokens=4, context=120, share_passes=True)
    short = engine.submit(Request([5, 6, 7], 60))
    engine.step()
    long, steps = engine.submit(Request([(7 * i) % VOCAB for i in range(40)], 5)), 0
    while long.status != "running":
        updates = engine.step()
        assert short.finished or any(update.handle is short for update in updates)
        steps += 1
    assert steps == 10
    assert engine.scheduler.shared_passes >= 9
    assert texts([short, long]) == alone(engine, [short.request, long.request])


def test_targets_that_cannot_share_read_prompts_apart() -> None:
    state = Target(CausalLM(hybrid("qwen3_next")), "state")
    assert not state.reads_beside
    assert tiny_target().reads_beside
    assert not tiny_target().packs
    assert tiny_target(compiled=True).packs
    engine = engine_of(max_sequences=2, max_batch_tokens=4)
    texts(written(engine, requests_of(4)))
    assert engine.scheduler.shared_passes == 0, (
        "padded passes are not shared unless that is asked for"
    )


def test_costs_beside_a_chunk_are_what_nodes_add_to_a_wider_pass() -> None:
    costs = Costs({1: 0.1}, {1: 1.0, 4: 1.0, 8: 3.0})
    wider = costs.beside(4, costs.token)
    assert wider.token == costs.token
    assert wider.target_seconds(4) == pytest.approx(1.0 + 3.0 - 1.5)
    assert costs.beside(4, 0.25).token == 0.25, "a token saves less where later batches are larger"
    assert costs.beside(4, 0.25).target_seconds(4) == pytest.approx(0.25 + 3.0 - 1.5)
    flat = Costs({1: 0.1}, {1: 1.0, 4: 4.0, 8: 4.0}).beside(4, 1.0)
    assert flat.target_seconds(2) == pytest.approx(1.0 + 3 / 4), "at least the average before"
    falling = Costs({1: 0.1}, {1: 3.0, 2: 0.5, 3: 0.1})
    assert falling.beside(1, 0.2).target_seconds(3) == pytest.approx(0.1), "costs stay above 0"


def test_drafting_refuses_chunks_in_recorded_passes() -> None:
    drafting: Any = Drafting.__new__(Drafting)
    with pytest.raises(AssertionError, match="read no prompts"):
        drafting.verify(None, object(), None, CHUNKS)
