"""The likeliest nodes of the trie of all continuations that a drafter finds (REST, section 3.2)."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from typing_extensions import override

from draftree.costs.curves import Costs
from draftree.policies.base import Expand, Policy, append, best, fit, path_log_q, top
from draftree.tree import Room, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class Trie(Policy):
    """All that the drafter finds, cut to the nodes of the largest value (the product of q along the path).

    Where q is the share of continuations that go on with a token, a node's value is the share of
    all that begin with its path, so that the trie is pruned by frequency, as REST prunes it. It
    drafts more than it verifies, so it is not layered.

    Attributes:
        nodes: drafted nodes of a row at most (64 in REST).
    """

    nodes: int = knob(64, least=1)

    @override
    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
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
