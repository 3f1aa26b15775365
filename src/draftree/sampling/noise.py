"""Counter-based random numbers: each draw by the place where it is made, not by the order of draws."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import final

import numpy as np
from torch import Tensor

from draftree.tree import Floats, Ints

CALL = 2**32
"""An upper bound on the kinds of noise of one call."""
KEPT = 64
"""Places whose noise is kept: drafter and target ask for the same ones, and a step's last are the next one's first."""


class Chance(ABC):
    """The source of an acceptor's randomness: two methods, so that a test can branch over every outcome."""

    @abstractmethod
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        """A token of distribution p [V], drawn for the place `depth` tokens behind sequence `row`'s root."""

    @abstractmethod
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        """True with probability p, for the same place; `index` tells apart several questions about it."""


@final
class Keyed(Chance):
    """Noise that depends on (seed, request, position, token) alone, whatever was drafted (DESIGN, Exactness).

    A token is argmax(log p + g) with Gumbel noise g from the counter-based generator Philox, so plain and
    speculative decoding of one seed write the same text.

    Every other use of noise is keyed by the step's root too, so that it is fresh in every step: a rule that has looked at
    drafts it did not accept (block verification) would be wrong if the same place were drafted with the same noise again.

    Args:
        seeds: each row's seed, or one for all.
        requests: [R] each row's request number.
        positions: [R] the position in its sequence of each row's root.
        calls: [R] which of several calls of one seed each row is. Rules by rejection need drafts that do not depend on the
            noise that judges them, and a drafter that remembers what an earlier call wrote with the same noise does.
    """

    def __init__(self, seeds: int | Sequence[int], requests: Ints, positions: Ints, calls: Ints | None = None) -> None:
        self._seeds = [seeds] * len(requests) if isinstance(seeds, int) else seeds
        self._requests, self._positions = requests, positions
        self._calls = np.zeros(len(requests), np.int64) if calls is None else calls

    def uniform(self, row: int, depth: int, kind: int, n: int) -> Floats:
        """[n] numbers in [0, 1) for one place; `kind` tells apart its uses, 0 being the target's own choice of a token."""
        root = int(self._positions[row])
        step = root + 1 if kind else 0
        return _uniform(self._seeds[row], int(self._requests[row]), step, root + depth + 1, kind + self._kinds(row), n)

    def gumbel(self, row: int, depth: int, n: int) -> Floats:
        """[n] the noise that the target's token for a place is drawn with."""
        place = int(self._positions[row]) + depth + 1
        return _choosing(self._seeds[row], int(self._requests[row]), place, self._kinds(row), n)

    def _kinds(self, row: int) -> int:
        return int(self._calls[row]) * CALL

    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(p.numpy()) + self.gumbel(row, depth, len(p))))

    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        return bool(self.uniform(row, depth, 1, index + 1)[index] < p)


def _uniform(seed: int, request: int, step: int, place: int, kind: int, n: int) -> Floats:
    key = np.array([seed, request], np.uint64)  # a list of large seeds would be read as floats
    generator = np.random.Philox(key=key, counter=[0, step, place, kind])
    return np.random.Generator(generator).random(n)


@lru_cache(KEPT)
def _choosing(seed: int, request: int, place: int, kind: int, n: int) -> Floats:
    """The target's noise for a place; one array serves all that ask, so nobody may change it."""
    noise = gumbel(_uniform(seed, request, 0, place, kind, n))
    noise.flags.writeable = False
    return noise


def gumbel(uniform: Floats) -> Floats:
    """Gumbel noise from numbers in [0, 1)."""
    with np.errstate(divide="ignore"):
        noise: Floats = -np.log(-np.log(uniform))
    return noise
