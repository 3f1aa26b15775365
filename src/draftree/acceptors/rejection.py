"""Rejection sampling along a chain (Leviathan et al. 2022, section 2.3; Chen et al. 2023, Theorem 1).

A draft x of q is kept with probability min(1, p(x)/q(x)); the first that is not is replaced by a
token of the residual norm(max(0, p − q)), which is exactly what p has and the kept drafts lack.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from draftree.acceptors.base import UNCOUPLED, Acceptor, descend, find_accepted_sibling
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Tree


@final
@dataclass(frozen=True)
class Rejection(Acceptor):
    """Exact in distribution for chains that are drawn from q; of siblings only the first is looked at.

    The guarantee is weaker than that of `match`: for the same seed, the text depends on the
    drafter, the policy and the other sequences of the batch.
    """

    exact_for: ClassVar[frozenset[Draw]] = UNCOUPLED
    greedy: ClassVar[bool] = False
    chains: ClassVar[bool] = True
    draw: ClassVar[Draw] = Draw.WITH_REPLACEMENT

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        return descend(
            tree,
            lambda node: find_accepted_sibling(
                tree, tree.children(node)[:1], node, p(node), chance
            ),
        )
