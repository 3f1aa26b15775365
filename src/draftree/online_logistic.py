"""Online logistic regression: one Newton step per batch of examples.

Shapes: M examples, X features.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from draftree.kernels.logistic_regression import newton
from draftree.tree import Bools, Floats

FORGETTING_RATE = 0.001
"""Fraction of the information that each step forgets, to adapt to another kind of text."""
CURVATURE = 0.05
"""The smallest weight of an example.

The curvature a(1 − a) of an example that was predicted with certainty is near 0. If the prediction
is wrong, division by it would move the weights too far.
"""


@dataclass(frozen=True)
class Logistic:
    """A logistic regression P(true | x) = σ(w · x), learnt by Newton steps around a prior.

    Attributes:
        weights: [X] w.
        information: [X, X] the curvature of all examples learnt, including the prior.
        prior: number of examples of unit curvature that the initial weights count for.
    """

    weights: Floats
    information: Floats
    prior: float

    @classmethod
    def around(cls, *weights: float, prior: float) -> Self:
        """Return a regression with the given initial weights, which has learnt nothing yet."""
        return cls(np.array(weights, np.float64), prior * np.eye(len(weights)), prior)

    def __call__(self, x: Floats) -> Floats:
        """Return the probabilities […] of examples […, X]."""
        probability: Floats = 1 / (1 + np.exp(-(x @ self.weights)))
        return probability

    def learn(self, x: Floats, true: Bools) -> Self:
        """Return the regression after learning examples x [M, X] with labels `true` [M]."""
        found = newton(
            self.weights,
            self.information,
            self.prior,
            np.ascontiguousarray(x),
            true,
            FORGETTING_RATE,
            CURVATURE,
        )
        return type(self)(found[0], found[1], self.prior)
