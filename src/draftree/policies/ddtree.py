"""DDTree: the prefixes of highest draft probability, up to a node budget (arXiv 2604.12989).

Where the drafts of different depths are independent, as a block drafter's are, a prefix's
probability is the product of its tokens', and the tree is the one with the most accepted drafts to
be expected. With any other drafter it is the same tree of its own products. It is found layer by
layer: what is not among the best so far never will be, nor is anything below it.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import rank_scores
from draftree.policies.base import Expand, Policy, append, fit, path_log_q
from draftree.tree import Bools, Floats, Ints, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class DDTree(Policy):
    """The likeliest prefixes.

    Among equally likely prefixes the shorter one is kept, then the one whose parent was drafted
    first.

    Attributes:
        nodes: number of nodes to verify, without the root (16 to 1,024 in the paper).
        depth: largest depth of a node; the drafter's block is a further bound.
    """

    nodes: int = knob(32, least=1)
    depth: int = knob(16, least=1, deepest=True)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        nodes, frontier = min(self.nodes, room.nodes), np.arange(tree.roots)
        while nodes and (frontier := room.expandable(tree, frontier, self.depth)).size:
            found, before = expand(tree, frontier, nodes), len(tree)
            score = path_log_q(tree, frontier, found)
            tree = append(tree, frontier, found, among_best(tree, frontier, score, nodes), score)
            frontier = np.arange(before, len(tree))
        return fit(tree, nodes)


def among_best(tree: Tree, frontier: Ints, score: Floats, nodes: int) -> Bools:
    """Return [F, K] whether a candidate is among the best nodes of its sequence so far.

    Args:
        tree: the tree drafted so far.
        frontier: [F] the candidates' parents.
        score: [F, K] the values to rank by.
        nodes: the number of best nodes of each sequence.
    """
    drafted = tree.score[tree.roots :]
    rows = np.concatenate((tree.row[tree.roots :], np.repeat(tree.row[frontier], score.shape[1])))
    order, place = rank_scores(rows, np.concatenate((drafted, score.ravel())))
    keep = np.zeros(len(rows), np.bool_)
    keep[order[place < nodes]] = True
    return keep[len(drafted) :].reshape(score.shape)
