"""Pearson's χ² tests of token frequencies: p-value and power.

Shapes: V outcomes (tokens), B bins.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from draftree.tree import Floats, Ints

MIN_EXPECTED_COUNT = 10.0
"""Least expected count of a bin. With smaller counts the statistic does not follow the χ²
distribution, so rarer outcomes share a bin."""


class ChiSquare(NamedTuple):
    """Store the result of a χ² test.

    Attributes:
        statistic: value of χ².
        dof: degrees of freedom, the number of bins minus one.
        p_value: probability of a statistic of at least this size if the hypothesis is true.
    """

    statistic: float
    dof: int
    p_value: float


def pool_outcomes(expected: Floats) -> Ints:
    """Return [V] the bin of each outcome.

    Each bin expects a count of at least `MIN_EXPECTED_COUNT`. The rarest outcomes share bins.
    `expected` [V] are the expected counts of the outcomes.
    """
    bins = np.zeros(len(expected), np.int64)
    last = 0
    mass = 0.0
    order = np.argsort(expected, kind="stable")
    for i in order.tolist():
        if mass >= MIN_EXPECTED_COUNT:
            last, mass = last + 1, 0.0
        bins[i], mass = last, mass + float(expected[i])
    if mass < MIN_EXPECTED_COUNT and last > 0:
        bins[bins == last] = last - 1
    return bins


def critical_value(dof: int, level: float) -> float:
    """Return the value that χ² with `dof` degrees of freedom exceeds with probability `level`."""
    return float(stats.chi2.isf(level, dof))


def power(noncentrality: float, dof: int, level: float) -> float:
    """Return the power of a χ² test: the probability that it detects a given error.

    For n draws with wrong probabilities p′ instead of p, `noncentrality` is Σ (n p′ − n p)² / (n
    p). The statistic then follows the non-central χ² distribution. `level` is the p-value below
    which the test fails.
    """
    return float(stats.ncx2.sf(critical_value(dof, level), dof, noncentrality))


def detectable_distance(n: int, dof: int, level: float = 1e-3, sure: float = 0.99) -> float:
    """Return the total variation distance that a test of n draws detects with probability `sure`.

    The result holds for errors of any shape. `dof` are the degrees of freedom, and `level` is the
    p-value below which the test fails.

    By the Cauchy–Schwarz inequality, an error of total variation t between bins has a
    non-centrality of at least 4 n t².
    """
    # By Chebyshev's inequality the power is above `sure` from here on.
    enough = 2 * (critical_value(dof, level) + dof) + 20 / (1 - sure)
    noncentrality = optimize.brentq(lambda x: power(x, dof, level) - sure, 0.0, enough, xtol=1e-12)
    return math.sqrt(noncentrality / (4 * n))
