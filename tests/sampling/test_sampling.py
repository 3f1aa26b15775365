"""Distributions, the keyed noise, draws of the drafters, and the ranges of a request's knobs."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from draftree.errors import NotANumber, UserError
from draftree.sampling import draft_sampling
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import EXTRA_TOP_K, Drawing, draw_candidates, top_k
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.sampling.warpers import MinP, Temperature, TopP
from draftree.tree import Draw, Ints

ZERO = np.zeros(1, np.int64)


def keyed(seed: int = 0, request: int = 0, position: int = 0) -> Keyed:
    return Keyed(seed, np.array([request]), np.array([position]))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


# Knobs.


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_a_knob_out_of_its_range_is_told_with_what_is_allowed(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"^{name} is {value}, allowed is "):
        Sampling(**wrong)


def test_knobs_at_their_bounds_are_allowed() -> None:
    Sampling(temperature=0.0, top_k=0, top_p=1e-9, min_p=1.0, seed=2**64 - 1)
    assert Sampling().greedy
    assert not Sampling(temperature=0.1).greedy


def test_processors_are_those_of_transformers_in_its_order() -> None:
    assert Sampling(top_k=3, top_p=0.5).processors == (), "greedy decoding reads the raw logits"
    assert Sampling(temperature=1.0).processors == ()
    kinds = [type(p) for p in Sampling(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1).processors]
    assert kinds == [Temperature, TopKLogitsWarper, TopP, MinP]


# p.


def test_p_is_processed_lazily_with_the_nodes_own_text() -> None:
    class Banning(LogitsProcessor):
        """Forbids every token of the text."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            asked.append(input_ids[0].tolist())
            return scores.index_fill(1, input_ids[0], -torch.inf)

    asked: list[list[int]] = []
    texts = {0: [3], 1: [3, 1]}
    p = Distributions(
        torch.tensor([[0.0, 0, 0, 9], [5.0, 9, 0, 0]]), lambda _: (Banning(),), texts.__getitem__
    )
    assert asked == []
    assert p(1).tolist() == pytest.approx([1 / (1 + np.exp(-5)), 0, 1 / (1 + np.exp(5)), 0])
    assert p(1).dtype == torch.float64
    assert p.argmax(0) == 0
    assert p(1).tolist() == p(1).tolist()
    assert asked == [[3, 1], [3]], "a processor is asked once for a node"


def test_the_lower_token_wins_a_tie() -> None:
    p = Distributions(torch.tensor([[0.0, 2, 2, 1]]))
    assert p.argmax(0) == 1
    assert (
        Distributions(
            torch.zeros(1, 4), lambda _: (TemperatureLogitsWarper(0.5),), lambda _: [0]
        ).argmax(0)
        == 0
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    p = Distributions(logits)
    p.raise_if_invalid(np.array([0, 2]))  # a drafted token that is not accepted does not matter
    with pytest.raises(NotANumber, match="not finite"):
        p.raise_if_invalid(np.arange(3))
    with pytest.raises(NotANumber, match="not finite"):
        p(1)


def test_a_row_without_any_finite_logit_is_refused_and_some_forbidden_tokens_are_not() -> None:
    with pytest.raises(NotANumber):
        Distributions(torch.full((1, 3), -torch.inf)).raise_if_invalid(np.array([0]))
    assert Distributions(torch.tensor([[-torch.inf, 0.0]]))(0).tolist() == [0, 1]


class Scripted(LogitsProcessor):
    """Have a script for texts of up to two tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + {1: 0.0, 2: 1.0}[input_ids.shape[1]]


def test_a_processor_that_fails_after_the_end_of_a_text_does_not_matter() -> None:
    p = Distributions(torch.eye(3), lambda _: (Scripted(),), lambda node: range(node + 1))
    assert [p.argmax(node) for node in range(3)] == [0, 1, 2]
    p.raise_if_invalid(np.array([0, 1]))
    with pytest.raises(KeyError):
        p.raise_if_invalid(np.array([2]))


# Keyed noise.


def test_noise_depends_on_seed_request_position_and_use_alone() -> None:
    base = keyed(5, 2, 10).gumbel(0, 0, 6)
    assert keyed(5, 2, 7).gumbel(0, 3, 6).tolist() == base.tolist(), (
        "the same place, seen from an earlier root"
    )
    together = Keyed(5, np.array([9, 2, 4]), np.array([1, 10, 3]))
    assert together.gumbel(1, 0, 6).tolist() == base.tolist(), "whatever stands beside it"
    assert keyed(5, 2, 10).gumbel(0, 0, 3).tolist() == base[:3].tolist()
    others = [
        k.gumbel(0, 0, 6)
        for k in (keyed(6, 2, 10), keyed(5, 3, 10), keyed(5, 2, 11), keyed(5, 2 + 2**32, 10))
    ]
    called = Keyed(5, np.array([2]), np.array([10]), np.array([1])).gumbel(0, 0, 6)
    uses = [
        k.gumbel(0, 10 - root, 6, kind)
        for kind in (1, 2)
        for root in (9, 10)
        for k in (keyed(5, 2, root),)
    ]
    assert len({tuple(d.tolist()) for d in (base, called, *uses, *others)}) == 10


@pytest.mark.parametrize("seed", [1, 2**32, 2**53 + 1, 2**63 + 1, 2**64 - 1])
def test_every_seed_gives_its_own_noise(seed: int) -> None:
    assert keyed(seed, 3).gumbel(0, 0, 4).tolist() != keyed(seed - 1, 3).gumbel(0, 0, 4).tolist()


@pytest.mark.parametrize("change", ["seed", "request", "position", "kind", "token"])
def test_noise_of_neighbours_is_independent(change: str) -> None:
    """Of 20,000 pairs that differ in one thing, no more are both large than chance makes."""
    n, names = 20_000, ("seed", "request", "position")
    one: dict[str, int] = dict.fromkeys(names, 7)
    other = one | ({change: 8} if change in names else {})
    a = keyed(**one).gumbel(0, 0, n + 1, 2)
    b = keyed(**other).gumbel(0, 0, n + 1, 3 if change == "kind" else 2)
    pairs = (a[:-1], a[1:]) if change == "token" else (a[:-1], b[:-1])
    quarter = -np.log(np.log(4 / 3))  # one in four is larger
    both = np.mean((pairs[0] > quarter) & (pairs[1] > quarter))
    assert abs(both - 1 / 16) < 4 * np.sqrt(15 / 16**2 / n)
    assert abs(np.corrcoef(*pairs)[0, 1]) < 4 / np.sqrt(n)


@pytest.mark.parametrize("kind", [Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT])
def test_draws_below_siblings_are_independent(kind: Draw) -> None:
    """`Traversal` judges what is drawn below one sibling before the next sibling."""
    texts = 4_000
    rows, depths = np.repeat(np.arange(texts), 2), np.ones(2 * texts, np.int64)
    noise = Keyed(0, np.arange(texts), np.zeros(texts, np.int64))
    drawing = Drawing(kind, [Sampling(temperature=1.0)] * texts, noise)
    found = draw_candidates(torch.zeros(2 * texts, 2), 1, drawing, rows, depths)
    equal = np.mean(found.tokens[::2, 0] == found.tokens[1::2, 0])
    assert abs(equal - 1 / 2) < 4 * np.sqrt(1 / 4 / texts)


def test_categorical_draws_from_p() -> None:
    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    draws = [keyed(1, 0, at).categorical(p, 0, 0) for at in range(4000)]
    counts = np.bincount(draws, minlength=5)
    assert counts[1] == 0
    assert chi_square(counts[p > 0], 4000 * p[p > 0].numpy()) < 16.3, (
        "chance of more: one in a thousand"
    )


def test_bernoulli_is_true_with_probability_p() -> None:
    draws = [keyed(1, 0, at).bernoulli(0.3, 0, 0) for at in range(4000)]
    assert abs(sum(draws) - 1200) < 3.3 * (4000 * 0.3 * 0.7) ** 0.5
    assert not keyed().bernoulli(0.0, 0, 0)
    assert keyed().bernoulli(1.0, 0, 0)


# The drafters' draws.


def test_top_k_gives_the_lower_index_first() -> None:
    values = torch.tensor([[1.0, 3, 3, 2, 3], [5.0, 1, 1, 1, 1]])
    index, found = top_k(values, 4)
    assert index.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    assert found.tolist() == [[3, 3, 3, 2], [5, 1, 1, 1]]


def test_top_k_breaks_a_tie_at_its_boundary() -> None:
    values = torch.zeros(1, 300)
    values[0, 200] = 1.0
    for k in (1, 2, 5, 299, 300):
        assert top_k(values, k)[0][0].tolist() == [200, *range(300)][:k] if k < 202 else True
    assert top_k(torch.zeros(2, 300), 3)[0].tolist() == [[0, 1, 2]] * 2


def test_top_k_takes_one_transfer_unless_many_values_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[int] = []
    stock = Tensor.cpu
    monkeypatch.setattr(draft_sampling, "on_host", lambda values: False)
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(1) or stock(self))
    values = torch.randperm(500, generator=torch.Generator().manual_seed(0)).view(2, 250).float()
    for ties, wanted in ((1, 1), (2, 1), (EXTRA_TOP_K, 1), (EXTRA_TOP_K + 1, 2), (60, 2)):
        transfers.clear()
        tied = values.clone()
        tied[1, 7 : 7 + ties] = 1000.0
        assert top_k(tied, 1)[0].tolist() == [[int(values[0].argmax())], [7]]
        assert len(transfers) == wanted


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("width", [6, 40])
@given(st.data(), st.integers(1, 6))
def test_top_k_is_a_stable_sort(width: int, host: bool, data: st.DataObject, k: int) -> None:
    """Over widths that hold fewer and more values than are asked for, where they are chosen on the host and where not."""
    rows = data.draw(
        st.lists(
            st.lists(st.integers(-2, 2), min_size=width, max_size=width), min_size=1, max_size=3
        )
    )
    with patch.object(draft_sampling, "on_host", lambda values: host):
        index, found = top_k(torch.tensor(rows, dtype=torch.float32), k)
    order = np.argsort(-np.array(rows), axis=1, kind="stable")[:, :k]
    assert index.tolist() == order.tolist()
    assert found.tolist() == np.take_along_axis(np.array(rows), order, axis=1).tolist()


def test_point_draws_are_the_likeliest_with_their_log_q() -> None:
    q = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]])
    found = draw_candidates(q.log(), 2, Drawing(), np.array([0, 1]), np.array([0, 0]))
    assert found.tokens.tolist() == [[1, 2], [0, 2]]
    assert np.exp(found.log_q) == pytest.approx(np.array([[0.6, 0.3], [0.4, 0.4]]), abs=1e-6)
    assert found.draw is Draw.POINT
    assert draw_candidates(
        q.log(), 9, Drawing(), np.array([0, 1]), np.array([0, 0])
    ).tokens.shape == (2, 3)


def sampled(kind: Draw, k: int, temperature: float, logits: Tensor, places: int) -> Ints:
    """[places, k] draws, each for a request of its own."""
    noise = Keyed(4, np.arange(places), np.full(places, 7))
    drawing = Drawing(kind, [Sampling(temperature)] * places, noise)
    found = draw_candidates(
        logits.expand(places, -1), k, drawing, np.arange(places), np.zeros(places, np.int64)
    )
    log_q = torch.log_softmax(logits.double() / temperature, -1).numpy()
    assert found.draw is kind
    assert np.allclose(found.log_q, log_q[found.tokens])
    return found.tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "kind", [Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT], ids=lambda k: k.value
)
def test_sampled_draws_have_the_frequencies_of_q(kind: Draw, temperature: float) -> None:
    logits, n = torch.tensor([0.5, 0.05, 0.3, 0.15]).log(), 4000
    q = torch.softmax(logits / temperature, -1).double().numpy()
    tokens = sampled(kind, 2, temperature, logits, n)
    assert chi_square(np.bincount(tokens[:, 0], minlength=4), n * q) < 16.3
    if kind is Draw.WITH_REPLACEMENT:
        pairs = np.outer(q, q)
    else:
        assert (tokens[:, 0] != tokens[:, 1]).all()
        pairs = q[:, None] * q / (1 - q[:, None])
        np.fill_diagonal(pairs, 0.0)
    counts = np.zeros((4, 4))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    likely = pairs > 1e-3
    assert counts[pairs == 0].sum() == 0
    assert chi_square(counts[likely], n * pairs[likely]) < 37.7, (
        "chance of more with 15 degrees: one in a thousand"
    )


def test_all_tokens_without_replacement_are_a_permutation() -> None:
    tokens = sampled(
        Draw.WITHOUT_REPLACEMENT,
        6,
        1.0,
        torch.randn(6, generator=torch.Generator().manual_seed(0)),
        50,
    )
    assert (np.sort(tokens, axis=1) == np.arange(6)).all()


def test_sampled_draws_are_fresh_in_every_step_and_not_the_targets_own() -> None:
    logits = torch.zeros(1, 50)
    drawing: Callable[[Keyed], Drawing] = lambda noise: Drawing(
        Draw.WITHOUT_REPLACEMENT, [Sampling(1.0)], noise
    )
    one = draw_candidates(logits, 4, drawing(keyed(1, 2, 9)), ZERO, ZERO).tokens
    assert (
        one.tolist()
        == draw_candidates(logits, 4, drawing(keyed(1, 2, 9)), ZERO, ZERO).tokens.tolist()
    )
    later = "a rule may have looked at drafts it did not accept: the same place is drafted anew with other noise"
    assert (
        one.tolist()
        != draw_candidates(logits, 4, drawing(keyed(1, 2, 6)), ZERO, ZERO + 3).tokens.tolist()
    ), later
    assert (
        one.tolist()
        != draw_candidates(logits, 4, drawing(keyed(1, 2, 6)), ZERO, ZERO).tokens.tolist()
    )
    p = torch.full((50,), 0.02, dtype=torch.float64)
    draft = lambda noise: draw_candidates(logits, 1, drawing(noise), ZERO, ZERO).tokens[0, 0]
    same = [
        noise.categorical(p, 0, 0) == draft(noise) for noise in (keyed(1, n, 9) for n in range(200))
    ]
    assert sum(same) < 20, "draft and target draw independently: one in fifty agrees"


def test_a_temperature_too_small_for_the_dtype_is_told() -> None:
    steps = Sampling(temperature=1e-44).processors
    p = Distributions(torch.tensor([[3.0, 1.0, -2.0]]), lambda _: steps, lambda _: [0])
    with pytest.raises(
        NotANumber, match="processor Temperature makes the best score inf after 1 tokens"
    ):
        p(0), p.raise_if_invalid(np.array([0]))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 515])
def test_the_likeliest_of_half_precision_is_numpys(size: int) -> None:
    """The first of equals, +0 and −0 among them; none where a number is NaN, of either sign, or the largest is infinite."""
    draw = np.random.default_rng(size)
    for _ in range(200):
        logits = torch.from_numpy(
            draw.normal(size=(3, size)) * draw.choice([0, 1e-40, 1, 100])
        ).bfloat16()
        for odd in (float("nan"), float("inf"), -float("inf"), -0.0):
            if draw.random() < 0.2:
                logits[draw.integers(3), draw.integers(size)] = odd
        if draw.random() < 0.2:
            logits.view(torch.int16)[0, draw.integers(size)] = -64  # NaN with a sign
        wide = logits.float().numpy()
        best = wide.argmax(axis=-1)
        wanted = np.where(
            np.isfinite(np.take_along_axis(wide, best[:, None], -1)[:, 0]), best, -1
        ).tolist()
        p = Distributions(logits)
        for node, token in enumerate(wanted):
            if token < 0:
                with pytest.raises(NotANumber):
                    p.raise_if_invalid(np.array([node]))
            else:
                assert p.argmax(node) == token
