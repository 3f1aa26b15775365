"""Single numbers, arrays and C++ have the same logarithm and exponential, and sums in units have no order."""

import math

import numpy as np
import pytest
import torch

from draftree.kernels.acceptance_calibration import values
from draftree.kernels.log_exp import exp as exp_of_array
from draftree.kernels.log_exp import log as log_of_array
from draftree.kernels.scalar_log_exp import LARGEST_EXPONENT, UNIT, exp, log, round_to_unit
from draftree.native import REFERENCES
from draftree.policies._device_yield import _sums


def test_single_numbers_have_the_bits_of_arrays() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate((rng.uniform(-700, 700, 2000), rng.normal(0, 1, 2000), [0.0, -700, 700]))
    assert np.array([exp(each) for each in x.tolist()]).tobytes() == exp_of_array(x).tobytes()
    positive = np.concatenate((np.exp(x), 1 + rng.normal(0, 1e-9, 100), [0.5**0.5, 1, 2**-1022]))
    assert (
        np.array([log(each) for each in positive.tolist()]).tobytes()
        == log_of_array(positive).tobytes()
    )


def test_the_ends() -> None:
    assert [exp(x) for x in (-math.inf, -701.0)] == [0, 0]
    assert exp(math.inf) == exp(1e9) == exp(LARGEST_EXPONENT)
    assert [log(x) for x in (0.0, math.inf, 1.0)] == [-math.inf, math.inf, 0]
    assert all(map(math.isnan, (exp(math.nan), log(math.nan), log(-1.0))))


@pytest.mark.parametrize("own", [False, True], ids=["native", "python"])
def test_values_are_made_of_these_functions(own: bool) -> None:
    """σ(w · x) of one candidate, alone after a root."""
    log_q, weights = np.array([[-1.25]]), np.array([[0.3, 0.9, 0.2, -0.1, 0.05]])
    given = (log_q, np.zeros((0, 0), np.int64), weights, np.array([0.7]), np.zeros(1, np.int64))
    function = REFERENCES["values"] if own else values
    found, _ = function(*given, np.zeros(1, np.int64), np.zeros(1), 1e-4)
    w = weights[0].tolist()
    x = w[0] + w[1] * -1.25 - w[2] * log(1 - exp(-1.25))
    x += w[3] * 0.7 + w[4] * 1
    assert found[0, 0] == log(1 / (1 + exp(-x)))


def test_sums_in_units_have_no_order() -> None:
    rng = np.random.default_rng(1)
    x = rng.exponential(1.0, 4000)
    rounded = np.array([round_to_unit(each) for each in x.tolist()])
    assert np.abs(rounded - x).max() <= UNIT / 2
    total = math.fsum(rounded.tolist())
    assert total != math.fsum(x.tolist())
    for _ in range(5):
        order = rng.permutation(len(x))
        assert _sums(torch.from_numpy(x[order]))[-1].item() == total
        assert np.cumsum(rounded[order])[-1] == rounded[order].sum() == total
