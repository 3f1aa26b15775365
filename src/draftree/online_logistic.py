"""Online logistic regression: one Newton step per batch of examples.

Shapes: M examples, X features.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from draftree.kernels.logistic import newton
from draftree.tree import Bools, Floats

FORGETTING = 0.001
"""Share of the knowledge that a step forgets, so that a text of another kind is learnt."""
CURVATURE = 0.05
"""The least weight of an example. The curvature a(1 − a) of an example that was predicted with
certainty is near 0, and dividing a step by it would move the weights far off when the prediction is
wrong.
"""


@dataclass(frozen=True)
class Logistic:
    """P(true | x) = σ(w · x), by recursive Newton steps around a prior.

    Attributes:
        weights: [X].
        information: [X, X] the curvature of all that was learnt, the prior's included.
        prior: number of examples of unit curvature that the first weights count for.
    """

    weights: Floats
    information: Floats
    prior: float

    @classmethod
    def around(cls, *weights: float, prior: float) -> Self:
        """Return a calibration that has learnt nothing yet."""
        return cls(np.array(weights, np.float64), prior * np.eye(len(weights)), prior)

    def __call__(self, x: Floats) -> Floats:
        """Return the probabilities […] of examples […, X]."""
        probability: Floats = 1 / (1 + np.exp(-(x @ self.weights)))
        return probability

    def learn(self, x: Floats, true: Bools) -> Self:
        """Return the regression after the examples [M, X] of a step, true or not [M]."""
        found = newton(
            self.weights,
            self.information,
            self.prior,
            np.ascontiguousarray(x),
            true,
            FORGETTING,
            CURVATURE,
        )
        return type(self)(found[0], found[1], self.prior)
