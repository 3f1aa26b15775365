"""The pruned candidate tree: a node is expanded only where that saves time (EDD + PCT, section 3.2).

A node's value is the product of draft confidences along its path, which estimates its probability of acceptance. By
eq. 5 a further draft step below it costs sₐ and saves value · sₜ, so nodes with value < sₐ/sₜ are not expanded; leaves
below a threshold are not worth their place in the verification.
"""

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, append
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class PCT(Layered):
    """Pruned candidate tree.

    Attributes:
        width: candidates after each expanded node (5 in the paper).
        max_depth: deepest layer (10 in the paper).
        leaf_threshold: leaves of a smaller value are removed (0.01 in the paper).
        ratio: sₐ/sₜ; measured on this machine by default.
    """

    width: int = 5
    max_depth: int = 10
    leaf_threshold: float = 0.01
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.width < 1 or self.max_depth < 0:
            raise UserError(f"pct: got width={self.width}, max_depth={self.max_depth}; allowed are at least 1 and 0")
        if not 0 <= self.leaf_threshold <= 1:
            raise UserError(f"pct: leaf_threshold is {self.leaf_threshold}, allowed is a number in [0, 1]")
        if self.ratio is not None and not self.ratio >= 0:
            raise UserError(f"pct: ratio is {self.ratio}, allowed is a number of at least 0")

    @property
    def reads_costs(self) -> bool:
        return self.ratio is None

    @property
    def candidates(self) -> int:
        return self.width

    def first(self, tree: Tree, costs: Costs) -> Ints:
        return self._expandable(tree, np.arange(tree.roots), costs)

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        # A value never exceeds its parent's, so a node below the leaf threshold has only such nodes below it: leaving
        # it out now is the same as removing its leaves, and theirs, at the end.
        leaf = _log(self.leaf_threshold)
        grown = append(tree, frontier, candidates, lambda score: score >= leaf)
        return grown, self._expandable(grown, np.arange(len(tree), len(grown)), costs)

    def _expandable(self, tree: Tree, nodes: Ints, costs: Costs) -> Ints:
        """Those of the nodes whose value is at least sₐ/sₜ (eq. 5); a root's is 1."""
        ratio = costs.ratio if self.ratio is None else self.ratio
        return nodes[(tree.score[nodes] >= _log(ratio)) & (tree.depth[nodes] < self.max_depth)]


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
