"""TALON: keep the nodes nearly as likely as the best one of their layer (arXiv 2601.07353).

The tree of a confident drafter becomes deep and narrow, that of an unsure one shallow and wide. The
first layer always has the same width, because a small drafter that is confident of a wrong token
would otherwise leave no alternative (section 5.2.2).
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import rank_scores
from draftree.policies.base import Expand, Policy, append, path_log_q
from draftree.tree import Bools, Floats, Ints, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class TALON(Policy):
    """Layers gated by confidence, under a budget of nodes.

    Attributes:
        nodes: N, the number of nodes to verify, without the root (60 in the paper).
        width: K, the number of nodes in the first layer (10 in EAGLE-3's trees, with which the
            paper compares).
        mu: μ, the smallest path probability of a node, as a fraction of the largest one in its
            layer (0.03 in the paper).
        depth: largest depth of a node. In the paper only the budget bounds the depth.
    """

    nodes: int = knob(60, least=1)
    width: int = knob(10, least=1)
    mu: float = knob(0.03, above=0, most=1)
    depth: int = knob(16, least=1, deepest=True)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        nodes, frontier = min(self.nodes, room.nodes), np.arange(tree.roots)
        while (frontier := room.expandable(tree, frontier, self.depth)).size:
            left = nodes - (np.bincount(tree.row) - 1)[tree.row[frontier]]
            frontier, left = frontier[left > 0], left[left > 0]
            if not frontier.size:
                break
            first = tree.depth[frontier[0]] == 0
            found = expand(tree, frontier, self.width if first else int(left.max()))
            score, before = path_log_q(tree, frontier, found), len(tree)
            tree = append(
                tree,
                frontier,
                found,
                _gate_candidates(tree.row[frontier], score, left, 0.0 if first else self.mu),
                score,
            )
            frontier = np.arange(before, len(tree))
        return tree


def _gate_candidates(rows: Ints, score: Floats, left: Ints, mu: float) -> Bools:
    """Return [F, K] whether a candidate of a layer is kept (eq. 4).

    The best candidates of each sequence are kept, as many as its budget still allows.

    Args:
        rows: [F] the sequences of the parents.
        score: [F, K] log path probabilities.
        left: [F] the number of nodes that the budget of each parent's sequence still allows.
        mu: μ; with 0 all candidates pass.
    """
    best = np.full(int(rows.max()) + 1, -np.inf)
    np.maximum.at(best, rows, score.max(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        near = score >= (np.log(mu) + best)[rows][:, None]
    order, place = rank_scores(
        np.repeat(rows, score.shape[1]), np.where(near, score, -np.inf).ravel()
    )
    kept = np.zeros(score.size, np.bool_)
    kept[order[place < np.repeat(left, score.shape[1])[order]]] = True
    found: Bools = kept.reshape(score.shape) & near
    return found
