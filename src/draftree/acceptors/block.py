"""Block verification: accept a sampled chain as a whole (Sun et al. 2024, Algorithm 2).

When drafts are judged token by token, everything after the first rejected one is lost. Here the
probability that a prefix of the chain is kept depends on all its tokens together: the expected
acceptance length is never shorter, and the best possible (Theorem 2 there).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from torch import Tensor
from typing_extensions import override

from draftree.acceptors.base import UNCOUPLED, Acceptor, proposal, ratio, residual
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Ints, Tree


@final
@dataclass(frozen=True)
class Block(Acceptor):
    """Exact in distribution for chains that are drawn from q; of siblings only the first is looked at.

    The guarantee is weaker than that of `match`: for the same seed, the text depends on the
    drafter, the policy and the other sequences of the batch.
    """

    exact_for: ClassVar[frozenset[Draw]] = UNCOUPLED
    greedy: ClassVar[bool] = False
    chains: ClassVar[bool] = True
    draw: ClassVar[Draw] = Draw.WITH_REPLACEMENT
    looks_ahead: ClassVar[bool] = True

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        found = [self._chain(tree, root, p, chance) for root in range(tree.roots)]
        return AcceptResult(
            tuple(path for path, _ in found), np.array([token for _, token in found], np.int64)
        )

    def _chain(
        self, tree: Tree, root: int, p: Distributions, chance: RandomSource
    ) -> tuple[Ints, int]:
        row, chain = int(tree.row[root]), [root]
        while (children := tree.children(chain[-1])).size:
            chain.append(int(children[0]))
        # Each prefix of the chain is tested separately, and the longest that passes is kept.
        weight = 1.0
        length = 0
        of_kept = 1.0
        for i, node in enumerate(chain[1:], start=1):
            here, token = p(chain[i - 1]), int(tree.tokens[node])
            weight = min(1.0, weight * ratio(here, proposal(tree, node, len(here)), token))
            if weight == 0:  # and so it stays
                break
            if chance.bernoulli(_prefix_acceptance(tree, chain, i, p, weight), row, i - 1):
                length, of_kept = i, weight
        bonus = _block_residual(tree, chain, length, p, of_kept)
        return np.array(chain[1 : length + 1], np.int64), chance.categorical(bonus, row, length)


def _prefix_acceptance(
    tree: Tree, chain: list[int], i: int, p: Distributions, weight: float
) -> float:
    """Return h_i, the probability that a chain's first i drafts are kept (Algorithm 2, eq. 4)."""
    if i == len(chain) - 1:
        return weight
    here = p(chain[i])
    rest = float((weight * here - proposal(tree, chain[i + 1], len(here))).clamp(min=0).sum())
    return rest / (rest + 1 - weight) if rest > 0 else float(weight == 1)


def _block_residual(
    tree: Tree, chain: list[int], i: int, p: Distributions, weight: float
) -> Tensor:
    """Return the distribution [V] of the token after the first i drafts (Algorithm 2, eq. 3)."""
    here = p(chain[i])
    return (
        here
        if i == len(chain) - 1
        else residual(here, proposal(tree, chain[i + 1], len(here)), weight)
    )
