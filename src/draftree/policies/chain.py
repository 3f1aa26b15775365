"""A chain of the likeliest tokens (Leviathan et al. 2022; the draft of EDD's Table 1)."""

from dataclasses import dataclass
from typing import final

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, added, append
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class Chain(Layered):
    """A fixed number of tokens in a row.

    Its shape does not depend on what was drawn: no token is worth more than the one before it, so that where there is no
    room for all the first ones stay.

    Attributes:
        length: how many.
    """

    length: int = 5

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"chain: length is {self.length}, allowed is at least 1")

    @property
    def prunes_on_draws(self) -> bool:
        return False

    @property
    def deepest(self) -> int:
        return self.length

    @property
    def candidates(self) -> int:
        return 1

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        grown = append(tree, frontier, candidates)
        return grown, added(tree, grown, self.length)
