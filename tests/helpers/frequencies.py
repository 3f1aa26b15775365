"""Pearson's χ² test of goodness of fit, for texts whose law is known."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import chi2

from chi_square import ChiSquare, pool_outcomes


def goodness(counts: ArrayLike, p: ArrayLike) -> ChiSquare:
    """Whether outcomes were drawn from p.

    Args:
        counts: [V] how often each came.
        p: [V] its probability.
    """
    found, expected = np.asarray(counts, np.float64), np.asarray(p, np.float64)
    expected = expected * (found.sum() / expected.sum())
    if (found[expected == 0] > 0).any():
        return ChiSquare(math.inf, max(int((expected > 0).sum()) - 1, 0), 0.0)
    bins = pool_outcomes(expected)
    found, expected = np.bincount(bins, found), np.bincount(bins, expected)
    statistic = float(((found - expected) ** 2 / np.where(expected > 0, expected, 1)).sum())
    dof = len(expected) - 1
    return ChiSquare(statistic, dof, float(chi2.sf(statistic, dof)) if dof else 1.0)
