"""CaPE: a chain with more alternatives where the drafter is less confident (GliDe + CaPE, section 4.2).

Alternatives are leaves: they come out of the chain's own draft steps and cost no further ones.

Shapes: F frontier nodes, K candidates.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.errors import UserError
from draftree.kernels.score_ranking import rank_scores
from draftree.policies.base import Layered, append, fit
from draftree.tree import Bools, Candidates, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob

PAPER = "7/0.3/5/0.6/3/0.8/1"
"""The function S(p) of section 4.2.

It is 7 for p in (0, 0.3], 5 in (0.3, 0.6], 3 in (0.6, 0.8], and 1 in (0.8, 1].
"""
OFFICIAL = np.array([7, 7, 7, 5, 5, 5, 3, 3, 1, 1, 1, 1])
"""Number of alternatives in the official code, indexed by ⌊10 p⌋.

The token of the chain is not included here; the official code counts it too.
"""


@final
@dataclass(frozen=True)
class CAPE(Layered):
    """Confidence-aware proposal expansion.

    Attributes:
        length: number of tokens of the chain. The paper verifies at most 32 tokens (section 5.1),
            which are 4 draft steps with up to 8 tokens, as in the official code. Its γ = 5 is that
            of GLIDE without CaPE.
        max_nodes: the largest number of drafted nodes to verify. If more are drafted, the tokens of
            the chain are kept first, because everything below a removed token is lost. Alternatives
            are then kept in order of value, among equals those drafted first. The paper needs no
            such rule.
        bins: the number of alternatives as a function of confidence p. `paper` is the function of
            the paper. `official` differs only at p = 0.3, 0.6 and 0.8, where it gives the smaller
            number. Otherwise a list of numbers with the edges between them; at an edge, the number
            before it applies. The paper's list is 7/0.3/5/0.6/3/0.8/1.
        sets: a fixed number of alternatives for any confidence; the ablation in the paper has 4
            (section 5.4).

    These numbers do not include the token of the chain. EDD + PCT (section 4.1) compares with CaPE
    and calls 7, 5, 3 and 1 the "expansion width of each layer", which may include it:
    `bins=6/0.3/4/0.6/2/0.8/0`. If drafts are conditioned on the target's noise (`match` above
    temperature 0), p comes from the conditioned q, for which the paper did not choose its edges.
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
        """Return the edges [B − 1] and the numbers of alternatives [B].

        For `official` there are no edges, and the numbers are indexed by ⌊10 p⌋.
        """
        if self.bins == "official":
            return np.zeros(0), OFFICIAL
        return _parse_bins(PAPER if self.bins == "paper" else self.bins)

    @property
    @override
    def candidates(self) -> int:
        return 1 + (int(self._bins[1].max()) if self.sets is None else self.sets)

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        log_q = (
            candidates.log_q
        )  # candidates are in draw order, which may differ from order by likelihood
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
        """Return the number of children [F] of nodes whose most likely child has probability p [F].

        The most likely child is included.
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
    """Return [N] whether a node is on a chain: a root, or the most likely child of a node.

    Among equally likely children the first one is taken.
    """
    order, place = rank_scores(tree.parents, tree.log_q)
    chain = tree.parents < 0
    chain[order[place == 0]] = True
    return chain


def _parse_bins(bins: str) -> tuple[Floats, Ints]:
    """Parse CaPE's map from confidence to the number of alternatives.

    Args:
        bins: text of the form `count/edge/count/…/count`, as in `7/0.3/5/0.6/3`.

    Returns:
        The edges [B − 1], rising within (0, 1), and the number of alternatives in each bin [B].

    Raises:
        UserError: the text does not have this form, the edges do not rise within (0, 1), or a count
            is negative.
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
