"""Enumerate every outcome of a random run with its probability."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar, final

from torch import Tensor
from typing_extensions import override

from draftree.sampling.keyed_noise import RandomSource

Outcome = TypeVar("Outcome", bound=Hashable)


@final
class Branching(RandomSource):
    """Take prescribed branches at random draws, and the first branch at all further draws.

    A branch is one possible outcome of a draw.

    Args:
        script: number of the branch to take at each draw.

    Attributes:
        taken: number of the branch that was taken at each draw so far.
        widths: number of branches at each draw so far.
        probability: joint probability of all branches that were taken.
    """

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self._script = script
        self.taken: list[int] = []
        self.widths: list[int] = []
        self.probability = 1.0

    def _branch(self, p: list[float]) -> int:
        at = len(self.taken)
        branch = self._script[at] if at < len(self._script) else 0
        self.taken.append(branch)
        self.widths.append(len(p))
        self.probability *= p[branch]
        return branch

    @override
    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        possible = [(token, x) for token, x in enumerate(p.tolist()) if x > 0]
        return possible[self._branch([x for _, x in possible])][0]

    @override
    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        possible = [(answer, x) for answer, x in ((True, p), (False, 1 - p)) if x > 0]
        return possible[self._branch([x for _, x in possible])][0]


def outcomes(run: Callable[[Branching], Outcome]) -> dict[Outcome, float]:
    """Return the exact distribution of the results of `run`, as a dict {result: probability}.

    `run` is called once for every possible sequence of branches.
    """
    found: dict[Outcome, float] = defaultdict(float)
    script: tuple[int, ...] | None = ()
    while script is not None:
        chance = Branching(script)
        found[run(chance)] += chance.probability
        script = _next(chance)
    return dict(found)


def _next(chance: Branching) -> tuple[int, ...] | None:
    """Return the next script in depth-first order; None after the last one."""
    for at in reversed(range(len(chance.taken))):
        if chance.taken[at] + 1 < chance.widths[at]:
            return (*chance.taken[:at], chance.taken[at] + 1)
    return None
