"""The vanilla candidate tree: fixed width, fixed depth (EDD + PCT, section 4.1, baseline 1)."""

from dataclasses import dataclass
from typing import final

import numpy as np

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, append
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class VCT(Layered):
    """Every node has the same number of children down to a fixed depth.

    Attributes:
        width: children of a node.
        depth: layers.
    """

    width: int = 3
    depth: int = 5

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1:
            raise UserError(f"vct: got width={self.width}, depth={self.depth}; allowed are at least 1")

    @property
    def candidates(self) -> int:
        return self.width

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        grown = append(tree, frontier, candidates)
        new = np.arange(len(tree), len(grown))
        return grown, new[grown.depth[new] < self.depth]
