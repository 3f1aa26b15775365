"""Enumerate every outcome of a random run with its probability."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar, final

from torch import Tensor
from typing_extensions import override

from draftree.sampling.keyed_noise import Chance

Outcome = TypeVar("Outcome", bound=Hashable)


@final
class Branching(Chance):
    """Takes the branches it is told to, and the first one wherever it is told nothing.

    Args:
        script: which branch to take at each draw.

    Attributes:
        taken: the branch taken at each draw so far.
        widths: how many branches each had.
        probability: of all of them together.
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
    """Return the exact distribution of the results of `run`.

    `run` is called once for every sequence of branches.
    """
    found: dict[Outcome, float] = defaultdict(float)
    script: tuple[int, ...] | None = ()
    while script is not None:
        chance = Branching(script)
        found[run(chance)] += chance.probability
        script = _next(chance)
    return dict(found)


def _next(chance: Branching) -> tuple[int, ...] | None:
    """Return the script after the one just played, in depth-first order."""
    for at in reversed(range(len(chance.taken))):
        if chance.taken[at] + 1 < chance.widths[at]:
            return (*chance.taken[:at], chance.taken[at] + 1)
    return None
