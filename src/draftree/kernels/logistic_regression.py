"""One Newton step of logistic regression over few examples.

Shapes: M examples, X features.
"""

import numpy as np

from draftree.kernels.scalar_log_exp import exp
from draftree.native import Array, native


@native
def newton(
    weights: Array,
    information: Array,
    prior: float,
    x: Array,
    true: Array,
    forgetting: float,
    least: float,
) -> tuple[Array, Array]:
    """Update a logistic regression by one Newton step on examples.

    Args:
        weights: [X] weights before the step.
        information: [X, X] information matrix before the step, which is the curvature of all
            earlier examples.
        prior: the diagonal value towards which the information decays.
        x: [M, X] features of the examples.
        true: [M] whether each example is positive.
        forgetting: the share of the information that is forgotten.
        least: the least weight of an example.

    Returns:
        The weights [X] and the information matrix [X, X] after the step.
    """
    width = len(weights)
    known, step = (1 - forgetting) * information, np.zeros(width)
    for a in range(width):
        known[a, a] += forgetting * prior
    for m in range(len(x)):
        logit = 0.0
        for a in range(width):
            logit += weights[a] * x[m, a]
        p = 1 / (1 + exp(-logit))
        curvature = max(p * (1 - p), least)
        for a in range(width):
            step[a] += x[m, a] * (true[m] - p)
            for b in range(width):
                known[a, b] += curvature * x[m, a] * x[m, b]
    lower = np.zeros((width, width))  # known is L Lᵀ, and the step solves known · y = step
    for a in range(width):
        for b in range(a + 1):
            rest = known[a, b]
            for c in range(b):
                rest -= lower[a, c] * lower[b, c]
            lower[a, b] = np.sqrt(rest) if a == b else rest / lower[b, b]
    for a in range(width):
        for b in range(a):
            step[a] -= lower[a, b] * step[b]
        step[a] /= lower[a, a]
    for a in range(width - 1, -1, -1):
        for b in range(a + 1, width):
            step[a] -= lower[b, a] * step[b]
        step[a] /= lower[a, a]
    return weights + step, known
