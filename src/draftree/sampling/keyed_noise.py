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

MAX_CACHED_PLACES = 64
"""Number of places whose noise is cached.

Drafter and target use the same places, and the last places of a step are the first of the next
step.
"""
MAX_CACHED_STREAMS = 1024
"""Number of requests whose random streams are cached."""
Place = tuple[int, int, int, int, int]
"""The five words from which the noise of a place is computed.

They are the two words of the generator's key and the last three words of its counter.
"""


class RandomSource(ABC):
    """Define the source of an acceptor's randomness.

    It has few methods, so that tests can enumerate all outcomes.
    """

    @abstractmethod
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        """Sample a token from a distribution for a place in a text.

        Args:
            p: [V] the distribution.
            row: the slot of the sequence.
            depth: the number of tokens from the root to the place.
        """

    def choose(self, scores: Tensor, row: int, depth: int) -> int:
        """Sample a token from softmax(scores [V]) for a place; −1 if it is not a distribution."""
        p = torch.softmax(scores.cpu().double(), dim=-1)
        return self.categorical(p, row, depth) if bool(p.isfinite().all()) else -1

    @abstractmethod
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        """Return True with probability p, for a place in a text.

        Args:
            p: the probability.
            row: the slot of the sequence.
            depth: the number of tokens from the root to the place.
            index: distinguishes several calls for the same place.
        """


@final
class Keyed(RandomSource):
    """Generate noise that is a function of seed, request, call, kind of use, position and token.

    It does not depend on drafts (docs/explanation/exactness.md). The target's token is
    argmax(log p + g). The Gumbel noise g comes from the counter-based generator Philox. Plain and
    speculative decoding with one seed therefore generate the same text.

    All other uses of noise are also keyed by the position of the step's root, so that each step
    gets new noise. Block verification needs this. It looks at drafts without accepting them, and
    would be biased if the next step drafted the same position with the same noise. Drafts that are
    sampled also have a `kind` for each node of a depth (`draft_sampling`).

    Args:
        seeds: the seed of each sequence, or one for all.
        requests: [R] the request number of each sequence.
        positions: [R] the position of the root in each sequence.
        calls: [R] the number of the call with the same seed. Rules by rejection need drafts that do
            not depend on the noise that accepts them. A drafter that remembers the text of an
            earlier call with the same noise would violate this.
    """

    def __init__(
        self, seeds: int | Sequence[int], requests: Ints, positions: Ints, calls: Ints | None = None
    ) -> None:
        self._seeds = [seeds] * len(requests) if isinstance(seeds, int) else seeds
        self._requests, self._positions = requests, positions
        self._calls = np.zeros(len(requests), np.int64) if calls is None else calls

    def gumbel(self, row: int, depth: int, n: int, kind: int = 0) -> Floats:
        """Return the noise [n] of a place; `kind` distinguishes its uses.

        Kind 0 samples the target's own token.
        """
        place = self._place(row, depth, kind)
        return _cached_gumbel(place, n) if kind == 0 else _gumbel(place, n)

    def places(self, depths: int) -> Ints:
        """Return the words from which the noise of the target's tokens is computed, [R, depths, 5].

        The last axis contains the five words of a `Place`: one depth of one sequence.

        Args:
            depths: the number of depths of each sequence, beginning with the root's depth 0.
        """
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
        self, rows: Ints, depths: Ints, n: int, device: torch.device, kind: int | Ints = 0
    ) -> Tensor:
        """Return Gumbel noise [M, n] for M places on a device, without waiting for the device.

        It has the same bits as `gumbel`.

        Args:
            rows: [M] the slot of each place's sequence.
            depths: [M] the number of tokens from the root to each place.
            n: the number of tokens, usually V.
            device: the device of the result.
            kind: the use of the noise, or [M] one for each place; 0 samples the target's own
                tokens.
        """
        asked = np.stack((rows, depths, np.broadcast_to(kind, len(rows))), axis=1)
        if devices.on_host(device):
            made = [self.gumbel(row, depth, n, use) for row, depth, use in asked.tolist()]
            return torch.from_numpy(np.stack(made) if made else np.empty((0, n))).to(device)
        places, which = np.unique(asked, axis=0, return_inverse=True)
        words = [self._place(row, depth, use) for row, depth, use in places.tolist()]
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
        )  # 53 bits, so that it is never rounded to 1


@lru_cache(MAX_CACHED_STREAMS)
def _stream(seed: int, request: int, kind: int, call: int) -> tuple[int, int, int]:
    """Return three pseudo-random words for one seed, request, use of noise and call.

    All places of such a combination share them.
    """
    words = philox.philox(
        (request & philox.WORD, request >> 32 & philox.WORD, kind, call),
        (seed & philox.WORD, seed >> 32),
    )
    return words[0], words[1], words[2]


def _gumbel(place: Place, n: int) -> Floats:
    return philox.gumbel(np.array(place, np.uint32), n)


@lru_cache(MAX_CACHED_PLACES)
def _cached_gumbel(place: Place, n: int) -> Floats:
    """Return the target's noise for a place as a cached, read-only array."""
    noise = _gumbel(place, n)
    noise.flags.writeable = False
    return noise
