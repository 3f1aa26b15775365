"""The tree of EAGLE-2: the likeliest nodes of each layer are expanded, then the best of all are kept (section 4).

A node's value is the product of draft confidences along its path. Shallow nodes that were not expanded may be worth
more than deep ones that were, so all candidates are ranked once more at the end (section 4.2).
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Expand, Policy, Room, append, fit
from draftree.tree import Ints, Tree


@final
@dataclass(frozen=True)
class EAGLE2(Policy):
    """Expand the best of each layer, then rank all.

    It drafts several times the nodes it verifies, so it is not layered: those stop once they have drafted what there is
    room to verify.

    Attributes:
        total: nodes to verify, the root included (60 in the official code, for 7B and 8B targets).
        depth: layers drafted behind the first, so that the tree is at most depth + 1 deep.
        top_k: nodes expanded in a layer, and candidates after each.
    """

    total: int = 60
    depth: int = 5
    top_k: int = 10

    def __post_init__(self) -> None:
        if self.total < 2 or self.depth < 0 or self.top_k < 1:
            got = f"total={self.total}, depth={self.depth}, top_k={self.top_k}"
            raise UserError(f"eagle2: got {got}; allowed are at least 2, 0 and 1")

    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        layer = np.arange(tree.roots)
        for _ in range(self.depth + 1):
            frontier = _best(tree, layer[tree.depth[layer] < room.depth[tree.row[layer]]], self.top_k)
            if not frontier.size:
                break
            before = len(tree)
            tree = append(tree, frontier, expand(tree, frontier, self.top_k))
            layer = np.arange(before, len(tree))
        # A child whose q is 1 is worth as much as its parent, which has the lower number and so is kept before it. The
        # official code leaves the order of equal nodes open, and hangs a child kept without its parent on another node.
        return fit(tree, min(self.total - 1, room.nodes))


def _best(tree: Tree, nodes: Ints, k: int) -> Ints:
    """The k best of each row by score, best first; the lower number wins ties.

    The frontier's order is that of its children's numbers, by which ties in the next layer and at the end are decided.
    """
    nodes = nodes[np.lexsort((-tree.score[nodes], tree.row[nodes]))]
    rows = tree.row[nodes]
    place = np.arange(nodes.size) - np.searchsorted(rows, rows)
    return nodes[place < k]
