"""The vanilla candidate tree: fixed width, fixed depth (EDD + PCT, section 4.1, baseline 1)."""

from dataclasses import dataclass
from typing import final

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, added, append, path_log_q, top
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class VCT(Layered):
    """Every node has the same number of children down to a fixed depth; layers can be capped.

    Attributes:
        width: children of a node (3 in the paper).
        depth: layers (5 in the paper).
        layer_top: nodes of a layer and row at most: the best by value (the product of q along the path), of equals those
            with the lower numbers; the others are neither verified nor expanded. No cap by default, as in the paper,
            where 3 + 9 + … + 243 = 363 nodes are verified.
    """

    width: int = 3
    depth: int = 5
    layer_top: int | None = None

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1:
            raise UserError(f"vct: got width={self.width}, depth={self.depth}; allowed are at least 1")
        if self.layer_top is not None and self.layer_top < 1:
            raise UserError(f"vct: layer_top is {self.layer_top}, allowed is none or at least 1")

    @property
    def prunes_on_draws(self) -> bool:
        return self.layer_top is not None

    @property
    def deepest(self) -> int:
        return self.depth

    @property
    def candidates(self) -> int:
        return self.width

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        score = path_log_q(tree, frontier, candidates)
        kept = None if self.layer_top is None else top(tree, frontier, score, self.layer_top)
        grown = append(tree, frontier, candidates, kept)
        return grown, added(tree, grown, self.depth)
