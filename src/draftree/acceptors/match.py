"""Acceptance by matching: sample the target's token at each node, and follow it while it is a child.

One draw is used for both questions, "is a child accepted?" and "what comes instead?", so nothing
about how the tree was made can change the distribution. With keyed noise (`sampling.Keyed`) the
text is the one plain decoding writes for the same seed (docs/explanation/exactness.md).

Drafters may use the same noise: with the children of a node the likeliest by log q + g, a draft is
accepted wherever q = p. That is the Gumbel coupling, whose acceptance per token is at least (1 −
TV) / (1 + TV) for the total variation TV between p and q, where no rule can have more than 1 − TV
(Daliri et al. 2024, "Coupling without communication").
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from typing_extensions import override

from draftree.acceptors.base import Acceptor, follow, walk
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Tree


@final
@dataclass(frozen=True)
class Match(Acceptor):
    """Draw the target's token after each node, and go on to the child with that token.

    It is exact for any tree at any temperature, and the default for sampling.

    Attributes:
        coupled: whether drafters draw candidates with the noise of the target's own draw. Otherwise
            they propose the most likely tokens.
    """

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True

    coupled: bool = True

    @property
    @override
    def draw(self) -> Draw:
        return Draw.COUPLED if self.coupled else Draw.POINT

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        if p.known is not None:
            return follow(tree, p.known)

        def choose(node: int) -> int:
            if p.greedy(node):
                return p.argmax(node)
            return p.sample_token(
                node, partial(chance.choose, row=int(tree.row[node]), depth=int(tree.depth[node]))
            )

        return walk(tree, choose)
