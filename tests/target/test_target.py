"""The target against stock transformers: what it says of a node is what a model says that is fed the node's path."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from architectures import CONFIGS, CROSSING, SOME, VOCAB, fresh, model, target
from draftree.drafters.edd import EDD
from draftree.drafters.lm import LM
from draftree.drafters.neural.layer_stack import CACHE
from draftree.drafters.vdm import VDM
from draftree.engine import Engine, load
from draftree.models.causal_lm import CausalLM
from draftree.models.kv_cache import SlotCache
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.request import Request
from draftree.target import target as target_module
from draftree.target.target import HiddenStateSpec, Probes, Target, VerificationResult
from draftree.tree import AcceptResult, Ints, Tree
from draftree.weights import demo_folder
from forests import (
    NOISE,
    after,
    after_paths,
    attach,
    chain,
    from_roots,
    full_forest,
    grown,
    random_forest,
    some_verdict,
    texts,
    worst,
)
from selection import one_in

NOTHING = HiddenStateSpec()


def filled(
    target: Target, committed: list[Ints], needs: HiddenStateSpec = NOTHING
) -> tuple[SlotCache, VerificationResult]:
    """A cache that holds the texts, and what the prefill said."""
    cache = target.new_cache(len(committed), 8)  # small, so that it has to grow
    return cache, target.prefill(cache, committed, needs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(9,), (3, 14, 8)], ids=["one row", "three rows"])
def test_every_node_equals_its_path(name: str, lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(name))
    t, committed = target(name), texts(lengths, rng)
    rows = len(lengths)
    cache, read = filled(t, committed)
    assert worst(read.logits, torch.stack([after(model(name), c)[-1] for c in committed])) < NOISE
    for tree in (
        from_roots(rows, rng),
        chain(rows, 8, rng),
        full_forest(rows, rng),
        random_forest(rows, 14, rng),
    ):
        verified = t.verify(cache, tree, NOTHING)
        assert worst(verified.logits, after_paths(model(name), committed, tree)) < NOISE
        assert cache.lengths.tolist() == list(lengths)  # nothing is committed by looking


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(SOME),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    nodes=st.integers(0, 14),
    reach=st.integers(1, 12),
)
def test_any_forest_after_any_texts(
    seed: int, name: str, lengths: list[int], nodes: int, reach: int
) -> None:
    rng = np.random.default_rng(seed)
    t, committed = target(name), texts(lengths, rng)
    cache, _ = filled(t, committed)
    for _ in range(2):
        tree = random_forest(len(lengths), nodes, rng, reach)
        assert (
            worst(t.verify(cache, tree, NOTHING).logits, after_paths(model(name), committed, tree))
            < NOISE
        )
        verdict = some_verdict(tree, rng)
        t.commit(cache, tree, verdict)
        committed = grown(committed, tree, verdict)
        assert cache.lengths.tolist() == [len(c) for c in committed]


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_chain_equals_one_token_at_a_time(name: str) -> None:
    rng = np.random.default_rng(1)
    t, (text,) = target(name), texts([11], rng)
    tree = chain(1, 5, rng)
    cache, _ = filled(t, [text])
    stock = model(name)
    past = DynamicCache(config=stock.config)
    stock(input_ids=torch.tensor([text.tolist()]), use_cache=True, **{CACHE: past})
    steps = [
        stock(input_ids=torch.tensor([[t]]), use_cache=True, **{CACHE: past}).logits[0, -1]
        for t in tree.tokens
    ]
    assert worst(t.verify(cache, tree, NOTHING).logits, torch.stack(steps)) < NOISE


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(9,), (3, 14, 8)], ids=["one row", "three rows"])
def test_after_a_commit_the_cache_is_that_of_a_prefill(name: str, lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    t, committed = target(name), texts(lengths, rng)
    cache, _ = filled(t, committed)
    for tree in (full_forest(len(lengths), rng, width=3), random_forest(len(lengths), 12, rng)):
        t.verify(cache, tree, NOTHING)
        verdict = some_verdict(tree, rng)
        t.commit(cache, tree, verdict)
        committed = grown(committed, tree, verdict)
        assert same_contents(t, cache, committed)
    tree = random_forest(
        len(lengths), 8, rng
    )  # and what is verified next sees nothing of what was rejected
    assert (
        worst(t.verify(cache, tree, NOTHING).logits, after_paths(model(name), committed, tree))
        < NOISE
    )


def same_contents(t: Target, cache: SlotCache, committed: list[Ints]) -> bool:
    """Whether the cache holds these texts, as a new cache that read them does."""
    new, _ = filled(t, committed)
    assert cache.lengths.tolist() == new.lengths.tolist() == [len(c) for c in committed]
    for layer in range(len(cache.shapes)):
        for ours, theirs in zip(cache.layer(layer), new.layer(layer), strict=True):
            for row, text in enumerate(committed):
                if worst(ours[row, :, : len(text)], theirs[row, :, : len(text)]) > NOISE:
                    return False
    return True


def test_a_path_with_gaps_is_committed_in_order() -> None:
    """The accepted nodes lie apart and behind rejected ones, another row's among them."""
    rng = np.random.default_rng(3)
    t, committed = target("llama"), texts([4, 7], rng)
    cache, _ = filled(t, committed)
    #                          2  3  4  5  6  7  8  9  10
    tree = attach(
        from_roots(2, rng), [0, 1, 0, 1, 4, 5, 4, 8, 5], rng.integers(3, VOCAB, 9).tolist()
    )
    t.verify(cache, tree, NOTHING)
    verdict = AcceptResult((np.array([4, 8, 9]), np.array([5, 10])), np.array([5, 5]))
    t.commit(cache, tree, verdict)
    assert same_contents(t, cache, grown(committed, tree, verdict))


def test_rows_that_have_ended_are_left_as_they_are() -> None:
    rng = np.random.default_rng(4)
    t, committed = target("mistral-sliding"), texts([6, 3, 9], rng)
    cache, _ = filled(t, committed)
    for live in ([0, 2], [2]):
        tree = Tree.from_roots(np.array(live), rng.integers(3, VOCAB, len(live)))
        tree = attach(tree, [0, len(live) - 1, 0], [4, 5, 6])
        assert (
            worst(
                t.verify(cache, tree, NOTHING).logits,
                after_paths(model("mistral-sliding"), committed, tree),
            )
            < NOISE
        )
        verdict = some_verdict(tree, rng)
        t.commit(cache, tree, verdict)
        committed = grown(committed, tree, verdict)
        assert same_contents(t, cache, committed)


@pytest.mark.parametrize("name", [*SOME, *CROSSING])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_prompt_read_in_parts_equals_one_pass(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    t, committed = target(name), texts([21, 5, 12], rng)
    needs = HiddenStateSpec(hidden=(0, 2, -1))
    _, whole = filled(t, committed, needs)
    monkeypatch.setattr(target_module, "CHUNK", chunk)
    cache, parts = filled(t, committed, needs)
    assert worst(parts.logits, whole.logits) < NOISE
    assert same_contents(t, cache, committed)
    order = np.lexsort((parts.hidden_states.positions, parts.hidden_states.rows))
    ordered = parts.hidden_states.take(order)
    for field in ("rows", "positions", "tokens"):
        assert np.array_equal(getattr(ordered, field), getattr(whole.hidden_states, field))
    for layer in needs.hidden:
        assert worst(ordered.hidden[layer], whole.hidden_states.hidden[layer]) < NOISE
    assert np.array_equal(order, np.arange(len(order)))  # row by row, as a drafter expects them


@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_prompt_goes_on_from_the_prefix_it_shares(name: str) -> None:
    rng = np.random.default_rng(6)
    t, first = target(name), texts([12, 8], rng)
    cache, _ = filled(t, first)
    tree = random_forest(2, 6, rng)
    t.verify(cache, tree, NOTHING)  # leaves its traces behind the committed tokens
    second = [
        np.concatenate((first[0][:7], [3, 4, 5])),
        np.concatenate((first[1][:2], rng.integers(3, VOCAB, 9))),
    ]
    cache.truncate(np.array([7, 2]))
    verified = t.prefill(cache, second, NOTHING)
    assert verified.hidden_states.positions.tolist() == [7, 8, 9, *range(2, 11)]
    assert (
        worst(verified.logits, torch.stack([after(model(name), text)[-1] for text in second]))
        < NOISE
    )
    assert same_contents(t, cache, second)


@pytest.mark.parametrize("method", [EDD(), VDM()], ids=["edd", "vdm"])
@pytest.mark.parametrize("name", SOME)
def test_an_engine_reuses_a_prefix_and_writes_the_same(
    name: str, method: EDD | VDM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    t = target(name)
    (text,) = texts([10], rng)
    engine = Engine(t, method.example(t), VCT(width=2, depth=3))
    first = Request(text.tolist(), max_new_tokens=8)
    wrote = engine.write([first]).tokens[0]
    follow_up = Request([*text.tolist(), *wrote[:5], 7, 8, 9], max_new_tokens=8)
    read: list[int] = []
    prefill = Target.prefill

    def counted(
        self: Target,
        cache: SlotCache,
        prompts: list[Ints],
        needs: HiddenStateSpec,
        rows: Ints | None = None,
    ) -> VerificationResult:
        verified = prefill(self, cache, prompts, needs, rows)
        if self is t:
            read.append(len(verified.hidden_states.tokens))
        return verified

    monkeypatch.setattr(Target, "prefill", counted)
    again = engine.write([follow_up]).tokens
    assert read == [3]
    assert (
        again == engine.write([follow_up], reuse=False).tokens == engine.plain([follow_up]).tokens
    )
    assert read == [3, 18, 18]


def hidden_states(name: str, ids: Sequence[int] | Ints) -> tuple[torch.Tensor, ...]:
    """What transformers says they are."""
    out = model(name)(
        input_ids=torch.tensor([list(map(int, ids))]), output_hidden_states=True, use_cache=False
    )
    states: tuple[torch.Tensor, ...] = out.hidden_states
    return states


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("layers", [(0, 1, -4, -1), (2,)], ids=str)
@torch.inference_mode()
def test_taps_are_transformers_hidden_states(name: str, layers: tuple[int, ...]) -> None:
    rng = np.random.default_rng(8)
    t, committed = target(name), texts([7, 12, 4], rng)
    cache, read = filled(t, committed, HiddenStateSpec(hidden=layers))
    stock = [hidden_states(name, text) for text in committed]
    tree = random_forest(3, 11, rng)
    verified = t.verify(cache, tree, HiddenStateSpec(hidden=layers))
    for layer in layers:
        assert (
            worst(
                read.hidden_states.hidden[layer], torch.cat([states[layer][0] for states in stock])
            )
            < NOISE
        )
        for node in range(len(tree)):
            ids = [*committed[tree.row[node]], *tree.tokens[tree.path(node)]]
            assert (
                worst(
                    verified.hidden_states.hidden[layer][node],
                    hidden_states(name, ids)[layer][0, -1],
                )
                < NOISE
            )
    assert verified.hidden_states.positions.tolist() == [
        len(committed[r]) + d for r, d in zip(tree.row, tree.depth, strict=True)
    ]
    kept = verified.hidden_states.take(np.array([4, 0]))
    assert kept.tokens.tolist() == tree.tokens[[4, 0]].tolist()
    assert torch.equal(kept.hidden[layers[0]], verified.hidden_states.hidden[layers[0]][[4, 0]])


@pytest.mark.parametrize("name", [*SOME, *CROSSING])
@pytest.mark.parametrize("rows", [1, 3])
def test_probes_are_answered_and_leave_nothing(name: str, rows: int) -> None:
    """Two probes a row that follow the root, the second behind the first, and one that sees the root alone."""
    rng = np.random.default_rng(9)
    t, committed = target(name), texts([6, 3, 9][:rows], rng)
    cache, _ = filled(t, committed)
    tree = random_forest(rows, 6, rng, reach=3)
    row = np.tile(np.arange(rows), 3)  # the rows' probes lie mixed
    kind = np.repeat(np.arange(3), rows)
    visible = (row[:, None] == row[None, :]) & np.array(
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]], np.bool_
    )[np.ix_(kind, kind)]
    lengths = np.array([len(c) for c in committed])
    probes = Probes(
        rng.integers(3, VOCAB, 3 * rows), row, lengths[row] + np.array([1, 2, 1])[kind], visible
    )
    verified = t.verify(cache, tree, NOTHING, probes)
    assert verified.hidden_states.probe_logits is not None
    assert worst(verified.logits, after_paths(model(name), committed, tree)) < NOISE
    for i in range(3 * rows):
        root = [*committed[row[i]], tree.tokens[row[i]]]
        before = [probes.tokens[i - rows]] if kind[i] == 1 else []
        assert (
            worst(
                verified.hidden_states.probe_logits[i],
                after(model(name), [*root, *before, probes.tokens[i]])[-1],
            )
            < NOISE
        )
    verdict = some_verdict(tree, rng)
    t.commit(cache, tree, verdict)
    committed = grown(committed, tree, verdict)
    assert same_contents(t, cache, committed)
    tree = random_forest(rows, 4, rng, reach=2)
    assert (
        worst(t.verify(cache, tree, NOTHING).logits, after_paths(model(name), committed, tree))
        < NOISE
    )


@pytest.mark.parametrize(
    ("name", "rooms"),
    [
        ("llama", {0: 127, 120: 7, 127: 0}),
        ("dynamic", {0: 15, 15: 0, 16: 0, 40: 0}),
        ("longrope", {0: 15, 15: 0, 16: 47, 63: 0}),
    ],
)
def test_a_tree_ends_with_the_context_and_at_a_change_of_rope(
    name: str, rooms: dict[int, int]
) -> None:
    assert {position: target(name).depth_room(position) for position in rooms} == rooms


@pytest.mark.parametrize("name", CROSSING)
@torch.inference_mode()
def test_plain_decoding_across_a_change_of_rope_is_stock_decoding(name: str) -> None:
    """Token by token with a stock cache, on a model that has read nothing else; ours has read something long before.

    A text of `longrope` is read anew where it grows beyond the switch, as transformers' `generate`
    does.
    """
    rng = np.random.default_rng(10)
    for length in (9, 16, 17, 24):
        (prompt,) = texts([length], rng)
        stock = fresh(name)
        past = DynamicCache(config=stock.config)
        ids, wrote = torch.tensor([prompt.tolist()]), []
        for _ in range(14):
            logits = stock(input_ids=ids, use_cache=True, **{CACHE: past}).logits[0, -1]
            wrote.append(int(logits.argmax()))
            ids = torch.tensor([wrote[-1:]])
            if name == "longrope" and length + len(wrote) == 17:
                past, ids = (
                    DynamicCache(config=stock.config),
                    torch.tensor([[*prompt.tolist(), *wrote]]),
                )
        engine = Engine(target(name), LM().example(target(name)), Chain())
        engine.plain([Request([3] * 40, max_new_tokens=2)])
        assert engine.plain([Request(prompt.tolist(), max_new_tokens=14)]).tokens == [wrote]


@pytest.mark.parametrize(
    ("name", "method"),
    one_in(2, list(CROSSING), [EDD(), VDM()]),
    ids=lambda value: value if isinstance(value, str) else value.kind(),
)
def test_generation_across_a_change_of_rope_equals_plain_decoding(
    name: str, method: EDD | VDM
) -> None:
    rng = np.random.default_rng(11)
    t = target(name)
    engine = Engine(t, method.example(t), VCT(width=2, depth=4))
    requests = [Request(text.tolist(), max_new_tokens=14) for text in texts([5, 14, 24, 10], rng)]
    alone = [engine.plain([request]).tokens[0] for request in requests]
    assert [engine.write([request]).tokens[0] for request in requests] == alone
    assert engine.plain(requests).tokens == alone  # whatever the neighbours' lengths
    assert engine.write(requests).tokens == alone


@pytest.mark.parametrize("name", CROSSING)
def test_rows_of_a_batch_keep_their_own_frequencies(name: str) -> None:
    rng = np.random.default_rng(12)
    committed = texts([9, 22, 15], rng)
    t = target(name)
    cache, read = filled(t, committed)
    tree = from_roots(3, rng)
    together = t.verify(cache, tree, NOTHING).logits
    for row, text in enumerate(committed):
        single, one = filled(Target(CausalLM(fresh(name))), [text])
        assert worst(read.logits[row], one.logits[0]) < NOISE
        root = Tree.from_roots(np.array([0]), tree.tokens[[row]])
        assert worst(together[row], t.verify(single, root, NOTHING).logits[0]) < NOISE


@pytest.mark.parametrize("name", CROSSING)
def test_probes_do_not_carry_a_tree_across_a_change_of_rope(name: str) -> None:
    rng = np.random.default_rng(13)
    t, committed = target(name), texts([14], rng)
    cache, _ = filled(t, committed)
    tree = chain(1, 1, rng)
    probes = Probes(
        np.array([5, 6]), np.zeros(2, np.int64), np.array([16, 17]), np.eye(2, dtype=np.bool_)
    )
    assert (
        worst(t.verify(cache, tree, NOTHING, probes).logits, t.verify(cache, tree, NOTHING).logits)
        < NOISE
    )


def test_a_model_is_left_as_it_was_found() -> None:
    """No hook stays behind, and a `dynamic` rope has forgotten what it read."""
    t = Target(CausalLM(fresh("dynamic")))
    before = after(t.decoder.model, range(3, 12))
    filled(t, [np.arange(3, 33)], HiddenStateSpec(hidden=(1, -1)))
    assert all(
        not m._forward_hooks and not m._forward_pre_hooks
        for m in t.decoder.stack.modules()
        if hasattr(m, "rope_type")
    )
    assert torch.equal(after(t.decoder.model, range(3, 12)), before)


def test_no_bar_of_transformers_appears_while_weights_are_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A user's own hook is set again, and the user's own models show their bars."""
    seen = list[str]()

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seen.append(options.get("desc", ""))
        return factory(*args, **options)

    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    before = logging.set_tqdm_hook(hook)
    try:
        load("demo", drafter="vdm")
        assert not seen
        AutoModelForCausalLM.from_pretrained(demo_folder())
    finally:
        logging.set_tqdm_hook(before)
        if not shown:
            logging.disable_progress_bar()
    assert "Loading weights" in seen
    assert capsys.readouterr().err.count("Loading weights: 100%") == 1
