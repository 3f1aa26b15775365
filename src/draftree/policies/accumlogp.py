"""JetSpec's tree: expand the likeliest node with all its children until the tree is full (arXiv 2606.18394).

Siblings take their place in the tree whether they are good or not, so it is not the tree of the
likeliest prefixes, which is `ddtree`. Which nodes are expanded follows from scores alone, as no
child is likelier than its parent. So candidates are requested layer by layer: a block drafter needs
one pass, and another drafter one pass for each layer.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import rank_scores
from draftree.policies.base import Expand, Policy, append
from draftree.tree import Bools, Ints, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class AccumLogP(Policy):
    """Whole families, the likeliest parent first.

    Among equally likely parents the shallower one is expanded first, then the one whose own parent
    was drafted first.

    Attributes:
        budget: number of nodes to verify, including the root (128 and 256 in the paper). Only some
            children of the last expanded node may fit.
        width: number of children of an expanded node.
        depth: largest depth of a node; the drafter's block is a further bound.
    """

    budget: int = knob(33, least=2)
    width: int = knob(7, least=1)
    depth: int = knob(16, least=1, deepest=True)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        nodes, rows = min(self.budget - 1, room.nodes), len(room.depth)
        expanded, parents = np.zeros(len(tree), np.bool_), np.full(rows, -(-nodes // self.width))
        while True:
            able = room.expandable(tree, np.arange(len(tree)), self.depth)
            order, place = rank_scores(tree.row[able], tree.score[able])
            popped = able[order[place < parents[tree.row[able[order]]]]]
            frontier = np.sort(popped[~expanded[popped]])
            if frontier.size:
                tree = append(tree, frontier, expand(tree, frontier, self.width))
                expanded = np.append(expanded, np.zeros(len(tree) - len(expanded), np.bool_))
                expanded[frontier] = True
                continue
            kept = _families(tree, popped, nodes)
            lacking = np.bincount(tree.row[kept], minlength=rows) <= nodes
            lacking &= np.bincount(tree.row[able[~expanded[able]]], minlength=rows) > 0
            if not lacking.any():
                return tree.select(kept)
            parents += lacking  # some nodes had fewer children


def _families(tree: Tree, popped: Ints, nodes: int) -> Bools:
    """Return for each node whether it is verified: roots are, and children of popped nodes.

    In each sequence, children are taken in the order in which their parents were popped, until the
    budget of `nodes` is used up.
    """
    turn = np.full(len(tree), len(tree))
    turn[popped] = np.arange(len(popped))
    children = np.arange(tree.roots, len(tree))
    children = children[turn[tree.parents[children]] < len(tree)]
    order, place = rank_scores(tree.row[children], -turn[tree.parents[children]].astype(np.float64))
    keep = np.arange(len(tree)) < tree.roots
    keep[children[order[place < nodes]]] = True
    return keep
