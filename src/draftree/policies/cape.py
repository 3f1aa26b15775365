"""CaPE: a chain whose every token has the more alternatives beside it, the less sure the drafter is (GliDe + CaPE, 4.2).

Alternatives are leaves: they come out of the chain's own draft steps and cost no further ones.

Shapes: F frontier nodes, K candidates.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from typing_extensions import override

from draftree.costs.curves import Costs
from draftree.errors import UserError
from draftree.kernels.tree_growth import ranked
from draftree.policies.base import Layered, append, fit
from draftree.tree import Bools, Candidates, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob

PAPER = "7/0.3/5/0.6/3/0.8/1"
"""S(p) of section 4.2: 7 for p in (0, 0.3], 5 in (0.3, 0.6], 3 in (0.6, 0.8], 1 in (0.8, 1]."""
OFFICIAL = np.array([7, 7, 7, 5, 5, 5, 3, 3, 1, 1, 1, 1])
"""S(p) by ⌊10 p⌋ in the official code, which also counts the chain's token."""


@final
@dataclass(frozen=True)
class CAPE(Layered):
    """Confidence-aware proposal expansion.

    Attributes:
        length: tokens of the chain. The paper verifies 32 tokens at most (section 5.1), which are 4
            steps of up to 8, as in the official code; its γ = 5 is that of GLIDE alone.
        max_nodes: the most drafted nodes to verify. If there are more, the chain is kept before all
            alternatives, because everything below a removed token is lost. Alternatives are kept by
            value, of equals those drafted first. The paper needs no such rule.
        bins: the number of alternatives by confidence: `paper`; `official`, which differs only at
            the edges p = 0.3, 0.6, 0.8, where it takes the smaller number; or sizes with the edges
            between them, where an edge belongs to the size before it. The paper's are
            7/0.3/5/0.6/3/0.8/1.
        sets: the same number of alternatives whatever the confidence; 4 is the paper's ablation
            (section 5.4).

    Sizes do not count the chain's own token. EDD + PCT (section 4.1), which compares with CaPE,
    calls 7, 5, 3 and 1 the "expansion width of each layer", which may count it:
    `bins=6/0.3/4/0.6/2/0.8/0`. Where drafts know the target's noise (`match` above temperature 0),
    confidence is that of q given the noise, of which the paper's edges were not chosen.
    """

    length: int = knob(4, least=1, deepest=True)
    max_nodes: int = knob(32, least=1)
    bins: str = "paper"
    sets: int | None = knob(None, least=0)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sets is not None and self.bins != "paper":
            raise UserError(
                f"cape: sets is {self.sets} and bins is '{self.bins}', allowed is one of them"
            )
        _ = self._bins  # a mistake is reported at once

    @cached_property
    def _bins(self) -> tuple[Floats, Ints]:
        """Return edges and sizes; the official bins use ⌊10 p⌋ and no edges."""
        if self.bins == "official":
            return np.zeros(0), OFFICIAL
        return _parsed(PAPER if self.bins == "paper" else self.bins)

    @property
    @override
    def candidates(self) -> int:
        return 1 + (int(self._bins[1].max()) if self.sets is None else self.sets)

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        log_q = (
            candidates.log_q
        )  # whatever the drafter: its order is draw order, which need not be by likelihood
        rank = np.argsort(np.argsort(-log_q, axis=1, kind="stable"), axis=1)
        return append(
            tree, frontier, candidates, rank < self.children(np.exp(log_q.max(axis=1)))[:, None]
        )

    @override
    def expandable(self, tree: Tree, nodes: Ints, costs: Costs) -> Ints:
        return nodes[_chain(tree)[nodes]]

    @override
    def finish(self, tree: Tree) -> Tree:
        return fit(tree, self.max_nodes, np.where(_chain(tree), 1.0, tree.score))

    def children(self, p: Floats) -> Ints:
        """Return the number of children [F] of nodes whose likeliest child has probability p [F].

        The likeliest child is counted too.
        """
        if self.sets is not None:
            return np.full(len(p), 1 + self.sets)
        edges, sizes = self._bins
        return (
            1
            + sizes[
                (10 * p).astype(np.int64) if self.bins == "official" else np.searchsorted(edges, p)
            ]
        )


def _chain(tree: Tree) -> Bools:
    """Return [N] True at the nodes of the chains: the roots, and the likeliest child of each node.

    Of equally likely children the first is taken.
    """
    order, place = ranked(tree.parents, tree.log_q)
    chain = tree.parents < 0
    chain[order[place == 0]] = True
    return chain


def _parsed(bins: str) -> tuple[Floats, Ints]:
    """Return the edges [B − 1] and the sizes [B] of bins written as size/edge/size/…/size.

    Raises:
        UserError: the bins are not written so.
    """
    parts = bins.split("/")
    try:
        sizes, edges = [int(part) for part in parts[::2]], [float(part) for part in parts[1::2]]
        rising = all(a < b for a, b in zip([0.0, *edges], [*edges, 1.0], strict=True))
    except ValueError:
        rising = False
    if not rising or len(parts) % 2 == 0 or min(sizes) < 0:
        allowed = "allowed are paper, official, or sizes with rising edges between them, as in 7/0.3/5/0.6/3"
        raise UserError(f"cape: bins is '{bins}', {allowed}")
    return np.array(edges), np.array(sizes)
