"""EDD: what it is trained as is what it decodes as."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from architectures import fresh, target
from drafting import perturbed
from draftree.data.samples import Sample
from draftree.doctor import forward_parity
from draftree.drafters import edd
from draftree.drafters.base import Batch
from draftree.drafters.edd import EDD, EDDDrafter
from draftree.drafters.neural.draft_masks import additive, block_starts, dual_block
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.registry import build
from draftree.sampling.draft_sampling import Drawing
from draftree.target.attention_strength import Attending
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from draftree.training.teacher import Teacher
from draftree.tree import AcceptResult, Tree
from forests import NOISE, texts, worst

NAMES = ("llama", "qwen3", "gemma2", "gpt_neox", "mistral-sliding")


def drafter_of(t: Target, **knobs: Any) -> EDDDrafter:
    return perturbed(EDD(**{"hidden_layer": -3} | knobs), t)  # type: ignore[return-value]


def both(
    name: str, rows: int, count: int, block: int, phase: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the training forward and of decoding, from the first block behind the text's first token on."""
    t = target(name)
    tokens = np.stack(texts([count] * rows, np.random.default_rng(seed)))
    return forward_parity.log_probs_of_both(t, drafter_of(t), tokens, block, phase)


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_sees_a_leaked_root(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that shows the root its own hidden state, which decoding does not have yet, is told apart."""
    monkeypatch.setattr(edd, "dual_block", leaked)
    trained, steps = both(name, 1, 17, 4, 1, seed=0)
    assert worst(steps, trained) > 1e-3


def leaked(tokens: int, block: int, phase: int, window: int | None = None) -> Tensor:
    mask = dual_block(tokens, block, phase, window)
    mask[torch.arange(tokens), block_starts(tokens, block, phase)] = True
    return mask


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 24),
    cut=st.integers(1, 9).flatmap(
        lambda block: st.tuples(st.just(block), st.integers(0, block - 1))
    ),
    window=st.none() | st.integers(1, 8),
)
def test_the_dual_block_mask_is_its_rule(
    tokens: int, cut: tuple[int, int], window: int | None
) -> None:
    """Input i of a block [s, e) sees h_k for k < s, and t_k for s ≤ k ≤ i."""
    block, phase = cut
    edges = [0, *range(block - phase, tokens, block), tokens]
    rule = np.zeros((tokens, 2 * tokens), np.bool_)
    for s, e in pairwise(edges):
        for i in range(s, e):
            for k in range(tokens):
                near = window is None or i - k < window
                rule[i, k] = k < s and near
                rule[i, tokens + k] = s <= k <= i and near
    mask = dual_block(tokens, block, phase, window)
    assert np.array_equal(mask.numpy(), rule)
    starts = block_starts(tokens, block, phase)
    assert not mask[torch.arange(tokens), starts].any()  # the root's own h
    for i, s in enumerate(starts.tolist()):
        assert int(mask[i].sum()) == (
            i + 1 if window is None else min(i + 1, window)
        )  # every position once
        assert s <= i


def test_an_additive_mask_is_zero_where_visible() -> None:
    mask = additive(torch.tensor([[[[True, False]]]]), torch.float32)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.flatten().tolist() == [0.0, torch.finfo(torch.float32).min]


# What is drawn in training.


def drawn(
    drafter: EDDDrafter, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """Block length and phase of every sample, as the mask is asked for them."""
    found: list[tuple[int, int]] = []

    def noted(tokens: int, block: int, phase: int, window: int | None = None) -> Tensor:
        found.append((block, phase))
        return dual_block(tokens, block, phase, window)

    monkeypatch.setattr(edd, "dual_block", noted)
    with torch.no_grad():
        for batch in batches:
            drafter.loss(batch)
    return found


def teacher(drafter: EDDDrafter, seed: int = 0) -> Teacher:
    rows = texts([14] * 6, np.random.default_rng(0))
    return Teacher(
        target("llama"), drafter.needs, [Sample(row, np.arange(14) > 0) for row in rows], seed
    )


def test_a_step_draws_one_block_length_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """EDD + PCT, section 3.1: "different block lengths for the division at each step"; the phase is each sample's own."""
    drafter = drafter_of(target("llama"), phase="random")
    steps = [
        drawn(drafter, [teacher(drafter).batch(range(6), step)], monkeypatch) for step in range(40)
    ]
    assert all(len({block for block, _ in step}) == 1 for step in steps)
    assert {step[0][0] for step in steps} == set(range(5, 11))
    assert {phase for step in steps for _, phase in step} == set(range(10))
    assert all(0 <= phase < block for step in steps for block, phase in step)
    assert max(len({phase for _, phase in step}) for step in steps) > 2


def test_block_length_does_not_depend_on_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 16: it follows from seed and step, whichever samples a process or micro-batch has."""
    drafter = drafter_of(target("llama"), phase="random")
    for step in range(8):
        whole = drawn(drafter, [teacher(drafter).batch(range(6), step)], monkeypatch)
        for cuts in ([range(3), range(3, 6)], [[i] for i in range(6)], [range(1), range(1, 6)]):
            assert (
                drawn(drafter, [teacher(drafter).batch(part, step) for part in cuts], monkeypatch)
                == whole
            )
    lengths = lambda seed: [
        drawn(drafter, [teacher(drafter, seed).batch([0], s)], monkeypatch)[0][0] for s in range(12)
    ]
    assert lengths(0) == lengths(0) != lengths(1)


def test_a_phase_that_is_named_is_every_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With phase 0 blocks begin at multiples of their length, as in the paper."""
    drafter = drafter_of(target("llama"), phase=0, max_block=7)
    found = [
        pair
        for step in range(12)
        for pair in drawn(drafter, [teacher(drafter).batch(range(3), step)], monkeypatch)
    ]
    assert {phase for _, phase in found} == {0}
    assert {block for block, _ in found} == {5, 6, 7}
    assert build("drafter", "edd").phase == 0
    assert build("drafter", "edd:phase=random").phase == "random"
    with pytest.raises(
        UserError, match=r"edd: phase is 5, allowed are random and 0 … 4 \(min_block − 1\)"
    ):
        EDD(phase=5)
    with pytest.raises(UserError, match="phase is 'half', allowed is a whole number or random"):
        build("drafter", "edd:phase=half")


# The layer that is read.


@pytest.mark.parametrize(
    ("outputs", "entry"),
    [
        ([9.0, 0.01] * 12, 21),  # of the demo's 24 layers: the paper's own, the output of layer 20
        ([9.0] * 32, 29),
        ([0.5, 0.5, 0.01, 0.01, 0.01, 0.5, 0.5, 0.5], 2),
        ([0.01] * 8, 5),
        ([0.5, 0.5], 1),
    ],
)
def test_auto_is_the_highest_living_layer_from_the_papers_down(
    outputs: list[float], entry: int
) -> None:
    assert EDD.living([Attending(output, 0.5) for output in outputs]) == entry


def test_auto_is_settled_by_the_texts_and_saved(tmp_path: Path) -> None:
    copy = fresh("qwen3")
    copy.model.layers[0].self_attn.o_proj.weight.data.zero_()  # type: ignore[union-attr, operator]
    for dead, entry in ((False, 1), (True, 1)):  # of 4 layers, only the lowest is 4 from the end
        t = Target(CausalLM(copy if dead else fresh("qwen3")), "qwen3")
        drafter = EDD(hidden_layer="auto").fresh(t)
        with pytest.raises(UserError, match="hidden_layer is 'auto', allowed is a number"):
            _ = drafter.needs
        assert drafter.resolve_auto(texts([12] * 3, np.random.default_rng(0))) == {
            "hidden_layer": entry
        }
        assert drafter.needs.hidden == (entry,)
        assert drafter.knobs == EDD(hidden_layer="auto"), (
            "as it was asked for, so that the same command goes on"
        )
    drafter.model.double()
    trained, steps = forward_parity.log_probs_of_both(
        t, drafter, np.stack(texts([14], np.random.default_rng(1))), 5, 2
    )
    assert worst(steps, trained) < NOISE
    drafter.save(tmp_path / "a")
    opened = build("drafter", str(tmp_path / "a")).open(t)
    assert opened.knobs.hidden_layer == entry
    assert EDD().fresh(t).resolve_auto(texts([12], np.random.default_rng(0))) == {}


def test_committed_tokens_are_read_at_the_next_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    drafter = EDD().example(target)
    assert isinstance(drafter, EDDDrafter)
    prompt, root = np.arange(5), np.array([3])
    cache = target.new_cache(1, 32)
    state = drafter.start(
        [prompt], root, target.prefill(cache, [prompt], drafter.needs).hidden_states
    )
    read, keys_and_values = [], drafter.decoder.keys_and_values
    monkeypatch.setattr(
        drafter.decoder,
        "keys_and_values",
        lambda h, at: read.append(h.shape[1]) or keys_and_values(h, at),
    )
    eager = drafter.start(
        [prompt],
        root,
        target.prefill(target.new_cache(1, 32), [prompt], drafter.needs).hidden_states,
    )
    read.clear()
    for token in (3, 1, 4):
        tree = Tree.from_roots(np.arange(1), np.array([token]))
        verdict = AcceptResult((np.zeros(0, np.int64),), np.array([9]))
        hidden_states = target.verify(cache, tree, drafter.needs).hidden_states
        target.commit(cache, tree, verdict)
        state = drafter.commit(state, tree, verdict, hidden_states)
        assert not read, "a step that drafts nothing costs no pass"
        eager = drafter.flush(drafter.commit(eager, tree, verdict, hidden_states))
        read.clear()
    tree = Tree.from_roots(np.arange(1), np.array([9]))
    (late, _), (early, _) = (
        drafter.expand(s, tree, np.arange(1), 4, Drawing()) for s in (state, eager)
    )
    assert read == [8], "prompt and steps, all in one pass"
    assert (late.tokens == early.tokens).all()
    assert np.allclose(late.log_q, early.log_q, atol=1e-4)
