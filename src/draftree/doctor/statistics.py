"""Tests of whether tokens come with the frequencies they should: Pearson's χ², its p-value and its power.

Shapes: V outcomes (tokens), B bins.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from draftree.errors import UserError
from draftree.tree import Floats, Ints

LEAST = 10.0
"""What a bin must have to expect: with fewer the statistic is not distributed as χ² is. Rarer outcomes are put together."""


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
    return ChiSquare(statistic, len(both) - 1, survival(statistic, len(both) - 1))


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
    """How probable it is that χ² is larger than a statistic.

    Raises:
        UserError: scipy is not installed.
    """
    return float(_scipy().stats.chi2.sf(statistic, dof)) if dof > 0 else 1.0


def critical(dof: int, level: float) -> float:
    """The statistic that χ² exceeds with a probability."""
    return float(_scipy().stats.chi2.isf(level, dof))


def power(noncentrality: float, dof: int, level: float) -> float:
    """How probably a test rejects at a level where the frequencies are wrong by Σ (n p′ − n p)² / (n p) = `noncentrality`.

    The statistic is then non-central χ².
    """
    return float(_scipy().stats.ncx2.sf(critical(dof, level), dof, noncentrality))


def detectable(n: int, dof: int, level: float = 1e-3, sure: float = 0.99) -> float:
    """The total variation distance that a test of n draws finds at least so surely, whatever shape the error has.

    By Cauchy and Schwarz an error of total variation t, measured between bins, has a non-centrality of at least 4 n t².
    """
    enough = 2 * (critical(dof, level) + dof) + 20 / (
        1 - sure
    )  # Chebyshev's inequality: from here on the power is above `sure`
    noncentrality = _scipy().optimize.brentq(lambda x: power(x, dof, level) - sure, 0.0, enough, xtol=1e-12)
    return math.sqrt(noncentrality / (4 * n))


def _scipy() -> Any:
    """The package, with the parts used here.

    Raises:
        UserError: it is not installed.
    """
    try:
        import scipy.optimize
        import scipy.stats
    except ModuleNotFoundError as error:
        raise UserError("the test of frequencies needs the package 'scipy': pip install 'draftree[doctor]'") from error
    return scipy
