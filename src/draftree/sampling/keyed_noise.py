"""Counter-based random numbers, keyed by seed, request and position."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.kernels import philox
from draftree.sampling import devices
from draftree.sampling.distributions import likeliest
from draftree.tree import Floats, Ints
from draftree.utils.hardware import to_device

KEPT = 64
"""Number of places whose noise is cached.

Drafter and target use the same places, and the last of a step are the first of the next one.
"""
REQUESTS = 1024
"""Number of requests whose streams are cached."""
Place = tuple[int, int, int, int, int]
"""The words that the noise of a place is computed from.

They are two words of the generator's key and the last three of its counter.
"""


class Chance(ABC):
    """The source of an acceptor's randomness; with few methods, tests can branch on outcomes."""

    @abstractmethod
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        """Draw a token from distribution p [V] for the place `depth` tokens after a root."""

    def choose(self, scores: Tensor, row: int, depth: int) -> int:
        """Draw a token from softmax(scores [V]) for a place; −1 if that is not finite."""
        p = torch.softmax(scores.cpu().double(), dim=-1)
        return self.categorical(p, row, depth) if bool(p.isfinite().all()) else -1

    @abstractmethod
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        """Return True with probability p; `index` distinguishes several draws for one place."""


@final
class Keyed(Chance):
    """Draw noise that depends on seed, request, position and token alone.

    What was drafted does not matter (DESIGN, Exactness).

    A token is argmax(log p + g) with Gumbel noise g from the counter-based generator Philox, so
    plain and speculative decoding of one seed write the same text.

    Every other use of noise is keyed by the step's root too, so that it is fresh in every step: a
    rule that has looked at drafts it did not accept (block verification) would be wrong if the same
    place were drafted with the same noise again.

    Args:
        seeds: each row's seed, or one for all.
        requests: [R] each row's request number.
        positions: [R] the position in its sequence of each row's root.
        calls: [R] which of several calls of one seed each row is. Rules by rejection need drafts
            that do not depend on the noise that judges them, and a drafter that remembers what an
            earlier call wrote with the same noise does.
    """

    def __init__(
        self, seeds: int | Sequence[int], requests: Ints, positions: Ints, calls: Ints | None = None
    ) -> None:
        self._seeds = [seeds] * len(requests) if isinstance(seeds, int) else seeds
        self._requests, self._positions = requests, positions
        self._calls = np.zeros(len(requests), np.int64) if calls is None else calls

    def gumbel(self, row: int, depth: int, n: int, kind: int = 0) -> Floats:
        """Return the noise [n] of a place; `kind` distinguishes its uses.

        Kind 0 is the target's own choice of a token.
        """
        place = self._place(row, depth, kind)
        return _kept(place, n) if kind == 0 else _gumbel(place, n)

    def places(self, depths: int) -> Ints:
        """Return the words [R, D, 5] of the target's noise for each sequence and depth."""
        rows = range(len(self._requests))
        found = [[self._place(row, depth, 0) for depth in range(depths)] for row in rows]
        return np.array(found, np.int64).reshape(len(rows), depths, 5)

    def _place(self, row: int, depth: int, kind: int) -> Place:
        root = int(self._positions[row])
        first, second, last = _stream(
            self._seeds[row], int(self._requests[row]), kind, int(self._calls[row])
        )
        return first, second, root + depth + 1, root + 1 if kind else 0, last

    def gumbel_of(
        self, rows: Ints, depths: Ints, n: int, device: torch.device, kind: int = 0
    ) -> Tensor:
        """Return the noise [M, n] of several places on a device, without waiting for it.

        It has the same bits as the host's.
        """
        if devices.on_host(device):
            made = [
                self.gumbel(row, depth, n, kind)
                for row, depth in zip(rows.tolist(), depths.tolist(), strict=True)
            ]
            return torch.from_numpy(np.stack(made) if made else np.empty((0, n))).to(device)
        places, which = np.unique(np.stack((rows, depths), axis=1), axis=0, return_inverse=True)
        words = [self._place(row, depth, kind) for row, depth in places.tolist()]
        sent = to_device(
            np.concatenate((np.ravel(words), np.ravel(which))).astype(np.int64), device
        )
        table = philox.gumbel_on_device(sent[: 5 * len(words)].view(-1, 5), n)
        return table if len(words) == len(rows) == 1 else table[sent[5 * len(words) :]]

    @override
    def choose(self, scores: Tensor, row: int, depth: int) -> int:
        if not devices.on_host(scores.device):
            noise = self.gumbel_of(np.array([row]), np.array([depth]), len(scores), scores.device)
            return int(likeliest(scores.double() + noise[0]))
        scores = (
            scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        ).cpu()
        chosen = scores.numpy() + self.gumbel(row, depth, len(scores))
        token = int(chosen.argmax())
        return token if np.isfinite(chosen[token]) else -1

    @override
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(p.numpy()) + self.gumbel(row, depth, len(p))))

    @override
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        first, second, *others = self._place(row, depth, 1)
        low, high, *_ = philox.philox((index, *others), (first, second))
        return bool(
            (high << 32 | low >> 11 << 11) * 2.0**-64 < p
        )  # 53 bits, which no float rounds up to 1


@lru_cache(REQUESTS)
def _stream(seed: int, request: int, kind: int, call: int) -> tuple[int, int, int]:
    """Return the words of a place that all places of one use share; they are pseudo-random."""
    words = philox.philox(
        (request & philox.WORD, request >> 32 & philox.WORD, kind, call),
        (seed & philox.WORD, seed >> 32),
    )
    return words[0], words[1], words[2]


def _gumbel(place: Place, n: int) -> Floats:
    return philox.gumbel(np.array(place, np.uint32), n)


@lru_cache(KEPT)
def _kept(place: Place, n: int) -> Floats:
    """Return the target's noise for a place; the array is cached and read-only."""
    noise = _gumbel(place, n)
    noise.flags.writeable = False
    return noise
