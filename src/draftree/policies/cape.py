"""CaPE: a chain whose every token has the more alternatives beside it, the less sure the drafter is (GliDe + CaPE, 4.2).

Alternatives are leaves: they come out of the chain's own draft steps and cost no further ones.

Shapes: F frontier nodes, K candidates.
"""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from draftree.costs import Costs
from draftree.errors import UserError
from draftree.policies.base import Layered, append, fit
from draftree.tree import Candidates, Floats, Ints, Tree

EDGES = 0.3, 0.6, 0.8
"""Where S(p) falls (section 4.2)."""
CHILDREN = np.array([8, 6, 4, 2])
"""Children of a node between the edges: the chain's token and S(p) = 7, 5, 3, 1 others."""
OFFICIAL = np.array([8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 2])
"""Children by ⌊10 p⌋ in the official code."""


@final
@dataclass(frozen=True)
class CAPE(Layered):
    """Confidence-aware proposal expansion.

    Attributes:
        length: of the chain (γ; 5 in the paper, 4 in the official code).
        max_nodes: drafted nodes to verify; beyond, the best by value are kept (32 in the paper).
        bins: how many children a confidence gives. The official code differs from the paper only at the edges
            p = 0.3, 0.6, 0.8, where it takes the smaller number.
    """

    length: int = 5
    max_nodes: int = 32
    bins: Literal["paper", "official"] = "paper"

    def __post_init__(self) -> None:
        if self.length < 1 or self.max_nodes < 1:
            raise UserError(f"cape: got length={self.length}, max_nodes={self.max_nodes}; allowed are at least 1")

    @property
    def candidates(self) -> int:
        return int(CHILDREN.max())

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        log_q = candidates.log_q  # whoever drafts: its order is draw order, which need not be by likelihood
        rank = np.argsort(np.argsort(-log_q, axis=1, kind="stable"), axis=1)
        wanted = rank < self.children(np.exp(log_q.max(axis=1)))[:, None]
        grown = append(tree, frontier, candidates, lambda _: wanted)
        chain = (rank == 0)[wanted & (log_q > -np.inf)]
        new = np.arange(len(tree), len(grown))[chain]
        return grown, new[grown.depth[new] < self.length]

    def finish(self, tree: Tree, costs: Costs) -> Tree:
        return fit(tree, self.max_nodes)

    def children(self, p: Floats) -> Ints:
        """[F] how many children a node has whose likeliest child has probability p [F], that child included."""
        if self.bins == "official":
            return OFFICIAL[(10 * p).astype(np.int64)]
        return CHILDREN[np.searchsorted(EDGES, p)]
