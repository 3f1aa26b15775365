"""Pearson's χ² tests of token frequencies: p-value and power.

Shapes: V outcomes (tokens), B bins.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from draftree.errors import UserError
from draftree.tree import Floats, Ints

LEAST = 10.0
"""The least expectation of a bin: with less the statistic is not distributed as χ² is. Rarer
outcomes are put together."""


class ChiSquare(NamedTuple):
    """Store the outcome of a χ² test.

    Attributes:
        statistic: χ²; ∞ where an impossible outcome occurred.
        dof: degrees of freedom, the number of bins minus one.
        p_value: probability of at least so large a statistic if the frequencies are right.
    """

    statistic: float
    dof: int
    p_value: float


def two_sample(counts_a: ArrayLike, counts_b: ArrayLike) -> ChiSquare:
    """Run Pearson's test that two samples come from the same distribution.

    Args:
        counts_a: [V] frequency of each outcome in one sample.
        counts_b: [V] frequency in the other.
    """
    a, b = np.asarray(counts_a, np.float64), np.asarray(counts_b, np.float64)
    share = a.sum() / (a.sum() + b.sum())
    # Given how often an outcome came in both together, which sample it came in says all; so bins
    # may be chosen by the sum.
    bins = pooled((a + b) * min(share, 1 - share))
    found = _scipy().stats.chi2_contingency(
        [np.bincount(bins, a), np.bincount(bins, b)], correction=False
    )
    return ChiSquare(float(found.statistic), int(found.dof), float(found.pvalue))


def pooled(expected: Floats) -> Ints:
    """Return the bin of each outcome [V], so that each bin expects at least `LEAST`.

    The rarest outcomes share bins.
    """
    bins = np.zeros(len(expected), np.int64)
    last = 0
    mass = 0.0
    order = np.argsort(expected, kind="stable")
    for i in order.tolist():
        if mass >= LEAST:
            last, mass = last + 1, 0.0
        bins[i], mass = last, mass + float(expected[i])
    if mass < LEAST and last > 0:
        bins[bins == last] = last - 1
    return bins


def critical(dof: int, level: float) -> float:
    """Return the statistic that χ² exceeds with a probability.

    Raises:
        UserError: scipy is not installed.
    """
    return float(_scipy().stats.chi2.isf(level, dof))


def power(noncentrality: float, dof: int, level: float) -> float:
    """Return the power of a χ² test at a level, given the noncentrality of the error.

    Frequencies that are wrong have Σ (n p′ − n p)² / (n p) = `noncentrality`. The statistic is then
    non-central χ².
    """
    return float(_scipy().stats.ncx2.sf(critical(dof, level), dof, noncentrality))


def detectable(n: int, dof: int, level: float = 1e-3, sure: float = 0.99) -> float:
    """Return the total variation distance that a test of n draws detects with given certainty.

    It holds for an error of any shape.

    By Cauchy and Schwarz an error of total variation t, measured between bins, has a non-centrality
    of at least 4 n t².
    """
    # By Chebyshev's inequality the power is above `sure` from here on.
    enough = 2 * (critical(dof, level) + dof) + 20 / (1 - sure)
    noncentrality = _scipy().optimize.brentq(
        lambda x: power(x, dof, level) - sure, 0.0, enough, xtol=1e-12
    )
    return math.sqrt(noncentrality / (4 * n))


def _scipy() -> Any:
    """Return the package scipy, with the parts used here.

    Raises:
        UserError: it is not installed.
    """
    try:
        import scipy.optimize
        import scipy.stats
    except ModuleNotFoundError as error:
        raise UserError(
            "the test of frequencies needs the package 'scipy': pip install 'draftree[doctor]'"
        ) from error
    return scipy
