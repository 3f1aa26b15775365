"""Logistic regression that learns one step at a time, beside the same step in numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.online_logistic import CURVATURE, FORGETTING_RATE, Logistic


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 20))
def test_step_is_newtons(seed: int, width: int, examples: int) -> None:
    rng, known = np.random.default_rng(seed), Logistic.around(*np.linspace(-1, 1, width), prior=3.0)
    for _ in range(3):
        x, true = rng.normal(size=(examples, width)), rng.random(examples) < 0.3
        p = known(x)
        curvature = np.maximum(p * (1 - p), CURVATURE)
        kept = (1 - FORGETTING_RATE) * known.information + FORGETTING_RATE * 3.0 * np.eye(width)
        information = kept + (x * curvature[:, None]).T @ x
        weights = known.weights + np.linalg.solve(information, x.T @ (true - p))
        known = known.learn(x, true)
        assert known.information == pytest.approx(information)
        assert known.weights == pytest.approx(weights)


def test_newton_step_is_bounded_by_curvature() -> None:
    sure = Logistic.around(800.0, prior=1.0).learn(np.ones((1, 1)), np.array([False]))
    assert sure.weights.tolist() == pytest.approx([800 - 1 / (1 + CURVATURE)])


def test_weights_converge_to_the_true_ones() -> None:
    rng, known = np.random.default_rng(0), Logistic.around(0.0, 0.0, prior=1.0)
    for _ in range(300):
        x = np.stack((np.ones(8), rng.normal(size=8)), axis=-1)
        known = known.learn(x, rng.random(8) < 1 / (1 + np.exp(-(0.5 - 2 * x[:, 1]))))
    assert known.weights == pytest.approx([0.5, -2.0], abs=0.4)
