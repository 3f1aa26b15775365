"""The likeliest nodes of the trie of retrieved continuations (REST, section 3.2)."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.policies.base import Expand, Policy, append, best, fit, path_log_q, top
from draftree.tree import Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class Trie(Policy):
    """All that the drafter finds, cut to the nodes of the largest value (the product of q along the path).

    If q is the fraction of retrieved continuations that continue with a token, then a node's value
    is the fraction of continuations that begin with its path. The trie is then pruned by frequency,
    as in REST. It is not a `Layered` policy, because it drafts more nodes than it verifies.

    Attributes:
        nodes: largest number of drafted nodes of a sequence (64 in REST).
    """

    nodes: int = knob(64, least=1)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        nodes = min(self.nodes, room.nodes)
        frontier = np.arange(tree.roots if nodes else 0)
        while (frontier := room.expandable(tree, frontier)).size:
            before, found = len(tree), expand(tree, frontier, nodes)
            score = path_log_q(tree, frontier, found)
            tree = append(tree, frontier, found, top(tree, frontier, score, nodes), score)
            # What is not among the best nodes now never will be, nor anything below it: values only
            # fall along a path.
            kept = best(tree, np.arange(tree.roots, len(tree)), nodes)
            frontier = np.sort(kept[kept >= before])
        return fit(tree, nodes)
