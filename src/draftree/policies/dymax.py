"""DyMax: a chain that stops before a token the drafter is not sure of (the baseline of C2T's Table 3).

C2T names the criterion and the threshold, no more (section 5.5, Table 3). As in its own chain mode (algorithm 1), the
token below the threshold is not verified: it was drafted, and is dropped.
"""

from dataclasses import dataclass
from typing import final

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, added, append, log
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class DyMax(Layered):
    """The likeliest tokens in a row, while each is likely enough after the one before it.

    Attributes:
        threshold: a token of smaller q ends the chain, and is not verified (0.3 in the paper).
        length: tokens at most (10 in the paper).
    """

    threshold: float = 0.3
    length: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UserError(f"dymax: threshold is {self.threshold}, allowed is a number in [0, 1]")
        if self.length < 1:
            raise UserError(f"dymax: length is {self.length}, allowed is at least 1")

    @property
    def deepest(self) -> int:
        return self.length

    @property
    def candidates(self) -> int:
        return 1

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        grown = append(tree, frontier, candidates, candidates.log_q >= log(self.threshold))
        return grown, added(tree, grown, self.length)
