"""What was retrieved, as it is: every continuation a drafter finds, the likeliest nodes of their trie (REST, section 3.2)."""

from dataclasses import dataclass
from typing import final

import numpy as np

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, append, best, fit, path_log_q, top
from draftree.tree import Candidates, Ints, Tree


@final
@dataclass(frozen=True)
class Trie(Layered):
    """All that the drafter finds, cut to the nodes of the largest value (the product of q along the path).

    Where q is the share of continuations that go on with a token, a node's value is the share of all that begin with its
    path, so that the trie is pruned by frequency, as REST prunes it.

    Attributes:
        nodes: drafted nodes of a row at most (64 in REST).
    """

    nodes: int = 64

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError(f"trie: nodes is {self.nodes}, allowed is at least 1")

    @property
    def candidates(self) -> int:
        return self.nodes

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        score = path_log_q(tree, frontier, candidates)
        grown = append(tree, frontier, candidates, top(tree, frontier, score, self.nodes), score)
        # What is not among the best nodes now never will be, nor anything below it: values only fall along a path.
        kept = best(grown, np.arange(grown.roots, len(grown)), self.nodes)
        return grown, np.sort(kept[kept >= len(tree)])

    def finish(self, tree: Tree, costs: Costs) -> Tree:
        return fit(tree, self.nodes)
