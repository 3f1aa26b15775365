"""Order of the samples in a training run; it is drawn anew for each epoch."""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from draftree.tree import Ints

KEPT_EPOCHS = 2
"""Number of epochs whose order is kept: a step may reach into the next epoch."""


@final
@dataclass(frozen=True)
class SampleOrder:
    """Choose the samples of each step.

    Attributes:
        lengths: [N] numbers of tokens of the samples.
        batch_size: number of samples in a step.
        group_by_length: number of steps among which samples are sorted by length, so that the
            samples of a step have similar lengths; 0 to leave them in random order.
        seed: seed of the order.
    """

    lengths: Ints
    batch_size: int
    group_by_length: int
    seed: int
    _drawn: dict[int, Ints] = field(default_factory=dict, repr=False)

    def of_step(self, step: int) -> list[int]:
        """Return the numbers of the samples of a step, 0 … N − 1."""
        count = len(self.lengths)
        at = step * self.batch_size + np.arange(self.batch_size)
        return [int(self._order(i // count)[i % count]) for i in at.tolist()]

    def _order(self, epoch: int) -> Ints:
        """Return the order [N] of an epoch."""
        if epoch not in self._drawn:
            while len(self._drawn) >= KEPT_EPOCHS:
                del self._drawn[min(self._drawn)]
            self._drawn[epoch] = self._draw(epoch)
        return self._drawn[epoch]

    def _draw(self, epoch: int) -> Ints:
        draw = np.random.default_rng([self.seed, 1, epoch])
        order: Ints = draw.permutation(len(self.lengths))
        if not self.group_by_length:
            return order
        size = self.batch_size
        begin = -epoch * len(order) % size  # these complete the last step of the epoch before
        whole = begin + (len(order) - begin) // size * size
        for start in range(begin, whole, self.group_by_length * size):
            part = order[start : min(start + self.group_by_length * size, whole)]
            by_length = part[np.argsort(self.lengths[part], kind="stable")].reshape(-1, size)
            part[:] = draw.permutation(by_length).ravel()
        return order
