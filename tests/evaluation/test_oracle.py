"""The oracle knows the text, and divides it at least cost; formulas say how much could be won."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation import oracle
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.metrics import Stats, Step
from draftree.policies.chain import Chain
from draftree.request import Request
from draftree.testing.fakes import Always, Never, Sometimes, tiny_target

COSTS = Costs({1: 0.3}, {1: 1.0, 8: 2.0})


def text(prompt: list[int], tokens: int) -> tuple[TokenText, list[int]]:
    target = tiny_target()
    written = Engine(target, Never([[]], 61), Chain()).plain([Request(prompt, tokens)]).tokens[0]
    return TokenText(np.array([*prompt, *written], np.int64), len(prompt)), [*prompt, *written]


@pytest.mark.parametrize(
    ("script", "known"), [(Always, lambda n: min(n, oracle.MAX_REACH)), (Never, lambda n: 0)]
)
def test_perfect_drafter_reaches_the_end_and_a_wrong_one_accepts_nothing(script, known) -> None:
    target, (one, plan) = tiny_target(), text([3, 1, 4], 30)
    (reach,), _ = oracle.correct_tokens(target, script([plan], 61), [one])
    assert reach.tolist() == [known(n) for n in range(29, 0, -1)]


def test_a_recording_gives_the_reach_of_the_target() -> None:
    target = tiny_target()
    texts, plans = zip(*(text(p, n) for p, n in (([3, 1, 4], 20), ([7, 2], 12))), strict=True)
    live, _ = oracle.correct_tokens(target, Sometimes(plans, 61), texts)
    replayed, _ = oracle.correct_tokens(Recording.of(target, texts), Sometimes(plans, 61), texts)
    assert [r.tolist() for r in live] == [r.tolist() for r in replayed]
    assert [len(r) for r in live] == [19, 11]
    assert len({*live[0].tolist()}) > 2


@given(reach=st.lists(st.integers(0, 6), min_size=1, max_size=9), step=st.floats(0.05, 1.5))
def test_no_division_of_a_text_is_cheaper(reach: list[int], step: float) -> None:
    costs, count = Costs({1: step}, {1: 1.0, 8: 2.0}), len(reach)
    found = oracle.fastest_division(np.array(reach), 5, costs)
    price = lambda depths: sum(
        d * costs.draft_seconds(1) + costs.target_seconds(1 + d) for d in depths
    )
    every = [
        depths
        for steps in range(1, count + 1)
        for depths in itertools.product(range(7), repeat=steps)
        if sum(depths) + steps == count and all(d <= reach[sum(depths[:i]) + i] for i, d in enumerate(depths))
    ] if count <= 6 else []  # fmt: skip
    assert sum(found.depths) + len(found.depths) == count
    assert found.seconds == pytest.approx(price(found.depths))
    assert found.seconds <= found.plain + 1e-12 == pytest.approx(count)
    assert all(found.seconds <= price(depths) + 1e-9 for depths in every)


def test_a_further_pass_that_does_not_pay_is_not_made() -> None:
    dear, cheap = Costs({1: 2.0}, {1: 1.0, 8: 1.1}), Costs({1: 0.01}, {1: 1.0, 8: 1.1})
    assert set(oracle.fastest_division(np.full(12, 9), 0, dear).depths) == {0}
    assert max(oracle.fastest_division(np.full(12, 9), 0, cheap).depths) == 9


def test_an_oracle_s_row_is_priced_again_from_its_log() -> None:
    reach = [np.array([3, 2, 1, 0, 1, 0]), np.array([], np.int64), np.array([0, 0])]
    log = oracle.encode_reach("d", 0.0, [4, 9, 2], reach)
    row = oracle.row(log, COSTS, 0, overlap=0.8)
    divisions = [
        oracle.fastest_division(r, s, COSTS) for r, s in zip(reach, [4, 9, 2], strict=True)
    ]
    assert row["counted_speedup"] == pytest.approx(
        sum(d.plain for d in divisions) / sum(d.seconds for d in divisions)
    )
    assert row["acceptance_length"] == pytest.approx(8 / sum(len(d.depths) for d in divisions))
    assert oracle.row(row, COSTS, 0, 0.8) == row
    with pytest.raises(UserError, match="do not match each other"):
        oracle.row(log | {"lengths": [6, 0, 1]}, COSTS, 0)


def test_leviathan_s_formula() -> None:
    a, c = 0.8, 0.05
    table = [(1 - a ** (g + 1)) / ((1 - a) * (g * c + 1)) for g in range(65)]
    assert oracle.leviathan(a, c) == pytest.approx(max(table))
    assert oracle.leviathan(0.0, c) == 1
    assert oracle.leviathan(1.0, 0.0, 9) == 10
    assert oracle.free_passes(3.0, 4.0, 0.25) == 1.5


def test_depth_d_reached_in_two_to_the_minus_d_of_the_steps() -> None:
    """τ = Σ 2^−d to depth 8 = 2 − 2^−8, and every position's acceptance one half, whatever the order of the steps."""
    steps = [Step(next(d for d in range(9) if d == 8 or (n >> d) & 1), 8, 8) for n in range(256)]
    stats = Stats(steps=steps)
    reached = [sum(s.accepted >= d for s in steps) / 256 for d in range(9)]
    assert reached == [2.0**-d for d in range(9)]
    assert stats.acceptance_length == pytest.approx(2 - 2**-8, abs=1e-12)
    assert stats.alpha == pytest.approx((2 - 2**-8) / 8, abs=1e-12)
    assert [reached[d + 1] / reached[d] for d in range(8)] == [0.5] * 8
    assert math.fsum(reached) == pytest.approx(stats.acceptance_length, abs=1e-12)
