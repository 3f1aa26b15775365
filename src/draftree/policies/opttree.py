"""OPT-Tree: the tree with the largest expected acceptance under a node budget (arXiv 2406.17276).

A path's value, the product of q along it, estimates the probability that it is accepted, and so Σ
value the number of accepted tokens. The n best of all nodes are the tree of n nodes with the
largest Σ value, and they are connected, because no node is worth more than its parent. Layers are
drafted until one adds too little to that sum.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.node_selection import nodes_that_pay
from draftree.policies.base import Expand, Policy, append, fit, path_log_q, top
from draftree.tree import Floats, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class OPTTree(Policy):
    """The best nodes under a budget, drafted as deep as it pays.

    It is not a `Layered` policy, because it drafts more nodes than it verifies. The official code
    examines the gain of a layer only after the next layer has been drafted, and expands all n best
    nodes of a layer. Here the gain is examined at once, and only nodes among the best so far are
    expanded, because descendants of other nodes cannot be among the best.

    Attributes:
        nodes: number of nodes to verify, without the root, and number of candidates after each node
            (50 in the official code).
        threshold: the smallest increase of Σ value by a layer after which another layer is drafted
            (0.5 in the official code). By default it is sₐ/sₜ, the time of a draft step divided by
            that of a target pass, as measured on this machine.
        max_depth: largest depth of a node (10 in the official code).
    """

    nodes: int = knob(50, least=1)
    threshold: float | None = knob(None, least=0)
    max_depth: int = knob(10, least=1, deepest=True)

    @property
    @override
    def reads_costs(self) -> bool:
        return self.threshold is None

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        nodes = min(self.nodes, room.nodes)
        least = costs.ratio if self.threshold is None else self.threshold
        frontier = np.arange(tree.roots if nodes else 0)
        worth: Floats = np.zeros(len(room.depth))  # [R] Σ value of each row's best nodes so far
        while (frontier := room.expandable(tree, frontier, self.max_depth)).size:
            before, candidates = len(tree), expand(tree, frontier, nodes)
            score = path_log_q(tree, frontier, candidates)
            tree = append(tree, frontier, candidates, top(tree, frontier, score, nodes), score)
            frontier, worth = nodes_that_pay(
                tree.score, tree.row, tree.roots, before, nodes, worth, float(least)
            )
        return fit(tree, nodes)
