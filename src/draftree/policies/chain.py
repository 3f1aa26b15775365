"""A chain of the drafter's likeliest tokens (Leviathan et al. 2022)."""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from draftree.policies._device_growth import DeviceGrowth
from draftree.policies.base import Layered, append
from draftree.tree import Candidates, Ints, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class Chain(Layered):
    """A fixed number of tokens in a row.

    The shape does not depend on the drawn tokens. If the budget is smaller than the chain, its
    first tokens are kept, because no token has a larger value than the token before it.

    Attributes:
        length: number of tokens.
    """

    candidates: ClassVar[int] = 1
    prunes_on_draws: ClassVar[bool] = False
    length: int = knob(5, least=1, deepest=True)

    @property
    @override
    def plan(self) -> DeviceGrowth:
        return DeviceGrowth(self.length, 1)

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        return append(tree, frontier, candidates)
