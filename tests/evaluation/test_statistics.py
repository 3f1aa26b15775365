"""χ² tests: known values, pooling, and that the level and the power are what they are said to be."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from chi_square import critical_value, detectable_distance, pool_outcomes, power
from draftree.evaluation import bootstrap
from frequencies import goodness


@pytest.mark.parametrize(
    ("dof", "level", "statistic"),
    [
        (1, 0.05, 3.841459),
        (1, 0.001, 10.827566),
        (10, 0.05, 18.307038),
        (10, 0.001, 29.588298),
        (100, 0.01, 135.806723),
    ],
)
def test_the_statistic_of_a_level_is_that_of_the_tables(
    dof: int, level: float, statistic: float
) -> None:
    assert critical_value(dof, level) == pytest.approx(statistic, abs=1e-5)


def test_goodness_is_pearsons() -> None:
    """A die thrown 60 times: (25 + 4 + 4 + 1 + 0 + 0 ...) / 10."""
    found = goodness([5, 8, 9, 8, 10, 20], [1 / 6] * 6)
    assert found.statistic == pytest.approx((25 + 4 + 1 + 4 + 0 + 100) / 10)
    assert found.dof == 5
    assert found.p_value == pytest.approx(0.0199, abs=1e-4)


def test_impossible_outcomes_are_rejected_at_once() -> None:
    assert goodness([50, 49, 1], [0.5, 0.5, 0]) == (math.inf, 1, 0.0)
    assert goodness([50, 50, 0], [0.5, 0.5, 0]) == (0.0, 1, 1.0)


def test_rare_outcomes_share_a_bin() -> None:
    assert pool_outcomes(np.array([1.0, 20, 3, 30, 8, 2])).tolist() == [0, 1, 0, 2, 0, 0]
    assert pool_outcomes(np.array([1.0, 20, 4])).tolist() == [0, 0, 0]
    assert pool_outcomes(np.array([1.0, 2, 3])).tolist() == [0, 0, 0]
    assert goodness([1, 2, 3], [1 / 3] * 3).dof == 0
    assert goodness([1, 2, 3], [1 / 3] * 3).p_value == 1


def test_level_and_power_are_those_of_many_tests() -> None:
    generator, n = np.random.default_rng(2), 600
    p = np.array([0.3, 0.25, 0.15, 0.1, 0.1, 0.05, 0.03, 0.02])
    wrong = p + np.array([0.05, -0.05, 0.02, -0.02, 0, 0, 0, 0])
    noncentrality = n * float(((wrong - p) ** 2 / p).sum())
    found = np.mean([goodness(c, p).p_value < 0.01 for c in generator.multinomial(n, wrong, 4000)])
    assert found == pytest.approx(power(noncentrality, 7, 0.01), abs=0.03)
    assert 0.2 < found < 0.8
    false = np.mean([goodness(c, p).p_value < 0.05 for c in generator.multinomial(n, p, 4000)])
    assert false == pytest.approx(0.05, abs=0.012)


def test_power_without_an_error_is_the_level() -> None:
    assert power(0.0, 12, 1e-3) == pytest.approx(1e-3)
    assert power(1e-9, 12, 1e-3) == pytest.approx(1e-3)
    assert power(4 * 50_000 * detectable_distance(50_000, 30) ** 2, 30, 1e-3) == pytest.approx(0.99)


def texts(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and accepted drafts of toy texts, whose drafts hang on how predictable the text is."""
    steps, level = rng.integers(20, 60, count), rng.beta(4, 4, count)
    return steps, np.array(
        [
            np.minimum(rng.geometric(1 - 0.95 * p, n) - 1, 8).sum()
            for p, n in zip(level, steps, strict=True)
        ]
    )


def coverage(
    runs: int, interval: Callable[[np.ndarray, np.ndarray, int], Sequence[float]]
) -> float:
    """How often an interval of τ of 20 toy texts holds that of all texts."""
    rng = np.random.default_rng(4)
    steps, accepted = texts(rng, 40_000)
    truth, held = 1 + accepted.sum() / steps.sum(), 0
    for seed in range(runs):
        steps, accepted = texts(rng, 20)
        low, high = interval(accepted + steps, steps, seed)
        held += low <= truth <= high
    return held / runs


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    drawn = lambda seed: bootstrap.samples(20, seed)
    held = coverage(
        400, lambda tokens, steps, seed: bootstrap.ratio_bounds([tokens], [steps], drawn(seed))
    )
    plain = coverage(
        400,
        lambda tokens, steps, seed: bootstrap.bounds(bootstrap.rate(tokens, steps, drawn(seed))),
    )
    assert held >= 0.92
    assert plain < held, "quantiles of the samples alone are too narrow"


@pytest.mark.long
def test_bca_falls_short_where_bootstrap_t_holds() -> None:
    """Which is why intervals are bootstrap-t: 91 % and 94 % of 1,500 samples of 20 texts."""
    figure = lambda tokens, steps, axis=-1: tokens.sum(axis) / steps.sum(axis)
    bca = lambda *asked: (
        stats.bootstrap(
            asked[:2], figure, paired=True, n_resamples=1999, rng=asked[2]
        ).confidence_interval
    )
    assert coverage(1500, bca) < 0.92
    assert (
        coverage(
            1500, lambda t, s, seed: bootstrap.ratio_bounds([t], [s], bootstrap.samples(20, seed))
        )
        >= 0.93
    )


def test_an_interval_holds_one_just_where_p_says_so() -> None:
    rng = np.random.default_rng(1)
    for i in range(60):
        a = rng.gamma(4, 1, 6 if i % 3 == 0 else 15)
        found = bootstrap.ratio(
            [a], [a * rng.normal(1 + 0.02 * (i % 5), 0.05, len(a))], bootstrap.samples(len(a), i)
        )
        assert (found.p >= 0.05) == (found.low <= 1 <= found.high) or abs(found.p - 0.05) < 0.003


def test_holms_p_values() -> None:
    """Holm 1979, by hand: .01 · 4, .02 · 3, and .04 · 2 and .03 · 2 of which the larger stands for both."""
    several = [bootstrap.Ratio(0.5, 0.4, 0.6, p) for p in (0.04, 0.01, 0.03, 0.02)]
    assert [r.p for r in bootstrap.holm(several)] == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert [r.verdict for r in bootstrap.holm(several)] == [
        "not told apart",
        "faster",
        "not told apart",
        "not told apart",
    ]
    assert [r.p for r in bootstrap.holm(several[:1])] == [0.04]
    assert several[0].inverse == bootstrap.Ratio(2.0, 1 / 0.6, 2.5, 0.04)
    assert several[0].inverse.verdict == "slower"


def test_intervals_of_few_or_equal_texts_are_quantiles() -> None:
    few, chosen = np.array([3, 5, 4]), bootstrap.samples(3, 0)
    assert bootstrap.ratio_bounds([few], [few * 2], chosen) == pytest.approx([0.5, 0.5])
    assert bootstrap.ratio_bounds([few], [np.ones(3)], chosen) == pytest.approx(
        bootstrap.bounds(few[chosen].mean(-1))
    )
    same = np.full(12, 7)
    assert bootstrap.ratio_bounds([same], [np.ones(12)], bootstrap.samples(12, 0)) == pytest.approx(
        [7, 7]
    )


@pytest.mark.parametrize("seconds", [0.1, 0.7, 4.514285714285714])
def test_the_ratio_of_equal_prompts_is_certain(seconds: float) -> None:
    """Rounding leaves samples a standard error where that of the prompts is 0."""
    prompts = bootstrap.MIN_PROMPTS
    columns = [np.full(prompts, x) for x in (14.0, 13.0, seconds, 14.0)]
    found = bootstrap.ratio(columns[:2], columns[2:], bootstrap.samples(prompts, 0))
    assert [found.low, found.high] == pytest.approx([13 / seconds] * 2)


def test_equal_methods_are_not_told_apart_by_few_prompts() -> None:
    """Two methods alike in truth, 10 % noise a prompt: below 8 prompts nothing is said, then little more than the level."""
    rng, apart = np.random.default_rng(3), {3: 0, 8: 0, 20: 0}
    for prompts, trial in itertools.product(apart, range(60)):
        each = [
            {"tokens": [100.0] * prompts, "steps": (40 * rng.normal(1, 0.1, prompts)).tolist()}
            for _ in range(2)
        ]
        found = bootstrap.paired_ratio(
            {"per_prompt": each[0]}, {"per_prompt": each[1]}, "steps", trial
        )
        apart[prompts] += found.verdict in ("faster", "slower")
        assert (found.verdict == bootstrap.TOO_FEW) == (prompts < bootstrap.MIN_PROMPTS)
    assert apart[3] == 0
    assert max(apart.values()) <= 10
