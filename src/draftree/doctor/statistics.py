"""Tests of whether tokens come with the frequencies they should: Pearson's χ², its p-value and its power.

Shapes: V outcomes (tokens), B bins.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from draftree.tree import Floats, Ints

LEAST = 10.0
"""What a bin must have to expect: with fewer the statistic is not distributed as χ² is. Rarer outcomes are put together."""
TERMS = 12.0
"""How many standard deviations of its Poisson weights a non-central χ² is summed over."""


class ChiSquare(NamedTuple):
    """What a test found.

    Attributes:
        statistic: χ²; ∞ where something came that cannot come.
        dof: degrees of freedom, one less than there are bins.
        p_value: how probable at least so large a statistic is where the frequencies are as they should be.
    """

    statistic: float
    dof: int
    p_value: float


def goodness(counts: ArrayLike, p: ArrayLike, least: float = LEAST) -> ChiSquare:
    """Whether outcomes were drawn from p.

    Args:
        counts: [V] how often each came.
        p: [V] its probability.
        least: outcomes that are expected less often share a bin with others.
    """
    found, expected = np.asarray(counts, np.float64), np.asarray(p, np.float64)
    expected = expected * (found.sum() / expected.sum())
    if (found[expected == 0] > 0).any():
        return ChiSquare(math.inf, max(int((expected > 0).sum()) - 1, 0), 0.0)
    bins = pooled(expected, least)
    found, expected = _summed(found, bins), _summed(expected, bins)
    statistic = float(((found - expected) ** 2 / np.where(expected > 0, expected, 1)).sum())
    return _tested(statistic, len(expected) - 1)


def two_sample(counts_a: ArrayLike, counts_b: ArrayLike, least: float = LEAST) -> ChiSquare:
    """Whether two samples were drawn from one distribution, whatever it is.

    Args:
        counts_a: [V] how often each outcome came in one sample.
        counts_b: [V] how often in the other.
        least: outcomes that are expected less often in the smaller sample share a bin with others.
    """
    a, b = np.asarray(counts_a, np.float64), np.asarray(counts_b, np.float64)
    share = a.sum() / (a.sum() + b.sum())
    # Given how often an outcome came in both together, which sample it came in says all; so bins may be chosen by the sum.
    bins = pooled((a + b) * min(share, 1 - share), least)
    a, both = _summed(a, bins), _summed(a + b, bins)
    variance = both * share * (1 - share)
    statistic = float(((a - both * share) ** 2 / np.where(variance > 0, variance, 1)).sum())
    return _tested(statistic, len(both) - 1)


def pooled(expected: Floats, least: float = LEAST) -> Ints:
    """[V] the bin of each outcome, so that each bin expects `least` together: the rarest share theirs."""
    bins, last, mass, order = np.zeros(len(expected), np.int64), 0, 0.0, np.argsort(expected, kind="stable")
    for i in order.tolist():
        if mass >= least:
            last, mass = last + 1, 0.0
        bins[i], mass = last, mass + float(expected[i])
    if mass < least and last > 0:
        bins[bins == last] = last - 1
    return bins


def _summed(values: Floats, bins: Ints) -> Floats:
    """[B] the sum of each bin."""
    return np.bincount(bins, values).astype(np.float64)


def survival(statistic: float, dof: int) -> float:
    """How probable it is that χ² is larger than a statistic."""
    return _upper([dof / 2], statistic / 2)[0] if dof > 0 else 1.0


def critical(dof: int, level: float) -> float:
    """The statistic that χ² exceeds with a probability."""
    return _root(lambda x: survival(x, dof) - level)


def power(noncentrality: float, dof: int, level: float) -> float:
    """How probably a test rejects at a level where the frequencies are wrong by Σ (n p′ − n p)² / (n p) = `noncentrality`.

    The statistic is then non-central χ²: a mixture of central ones by Poisson weights.
    """
    half = noncentrality / 2
    width = TERMS * (math.sqrt(half) + 1)
    terms = np.arange(max(0, math.floor(half - width)), math.ceil(half + width) + 1)
    factorial = torch.lgamma(torch.from_numpy(terms + 1.0)).numpy()
    weight = np.exp(terms * math.log(half) - half - factorial) if half else terms == 0
    return float(weight @ np.array(_upper((dof / 2 + terms).tolist(), critical(dof, level) / 2)))


def detectable(n: int, dof: int, level: float = 1e-3, sure: float = 0.99) -> float:
    """The total variation distance that a test of n draws finds at least so surely, whatever shape the error has.

    By Cauchy and Schwarz an error of total variation t, measured between bins, has a non-centrality of at least 4 n t².
    """
    return math.sqrt(_root(lambda x: sure - power(x, dof, level)) / (4 * n))


def _tested(statistic: float, dof: int) -> ChiSquare:
    return ChiSquare(statistic, dof, survival(statistic, dof))


def _upper(shapes: Sequence[float], x: float) -> list[float]:
    """The regularised upper incomplete gamma function Q(shape, x) of each shape."""
    a = torch.tensor(shapes, dtype=torch.float64)
    found: list[float] = torch.special.gammaincc(a, torch.full_like(a, x)).tolist()
    return found


def _root(falling: Callable[[float], float]) -> float:
    """Where a falling function of a number above 0 is 0, by bisection."""
    low, high = 0.0, 1.0
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
