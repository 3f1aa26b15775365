"""Rejection sampling among several sampled siblings, one after the other (SpecInfer).

With replacement (SpecInfer, Miao et al. 2023, Algorithm 2 and Theorem 4.2): sibling x is kept with
probability min(1, p(x)/q(x)), else p becomes norm(max(0, p − q)) for the next one. Without
replacement (EAGLE-1, Li et al. 2024, Appendix A.2; Yang et al. 2024, Algorithm 1): the same, and q
loses x and is normalised, because the next sibling was drawn so. What p has become when all are
rejected is what the bonus is drawn from.
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
class MultiRound(Acceptor):
    """Exact in distribution for trees whose siblings are drawn from q and kept whatever was drawn.

    The guarantee is weaker than that of `match`: for the same seed, the text depends on the
    drafter, the policy and the other sequences of the batch.

    Attributes:
        replacement: whether siblings are drawn with replacement, as in SpecInfer, or without, as in
            EAGLE-1.
    """

    exact_for: ClassVar[frozenset[Draw]] = UNCOUPLED
    greedy: ClassVar[bool] = False

    replacement: bool = False

    @property
    @override
    def draw(self) -> Draw:
        return Draw.WITH_REPLACEMENT if self.replacement else Draw.WITHOUT_REPLACEMENT

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        return descend(
            tree,
            lambda node: find_accepted_sibling(
                tree, tree.children(node), node, p(node), chance, self.replacement
            ),
        )
