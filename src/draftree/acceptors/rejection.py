"""Acceptance by rejection along a chain of draws (Leviathan et al. 2022, section 2.3; Chen et al. 2023, Theorem 1).

A draft x of q is kept with probability min(1, p(x)/q(x)); the first that is not is replaced by a token of the residual
norm(max(0, p − q)), which is exactly what p has and the kept drafts lack.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from draftree.acceptors.base import Acceptor, proposal, ratio, residual
from draftree.sampling import Chance, Distributions
from draftree.tree import Draw, Tree, Verdict


@final
@dataclass(frozen=True)
class Rejection(Acceptor):
    """Exact in distribution for chains that are drawn from q; of siblings only the first is looked at.

    It promises less than `match`: another drafter, policy or neighbour gives another text for the same seed.
    """

    exact_for: ClassVar[frozenset[Draw]] = frozenset({Draw.POINT, Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT})
    survives_pruning: ClassVar[bool] = False
    greedy: ClassVar[bool] = False

    @property
    def draw(self) -> Draw:
        return Draw.WITH_REPLACEMENT

    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        paths, bonus = [], []
        for root in range(tree.roots):
            path, row = [root], int(tree.row[root])
            while True:
                node, here = path[-1], p(path[-1])
                child = next(iter(tree.children(node).tolist()), None)
                if child is None:
                    break
                q = proposal(tree, child, len(here))
                if not chance.bernoulli(min(1.0, ratio(here, q, int(tree.tokens[child]))), row, int(tree.depth[node])):
                    here = residual(here, q)
                    break
                path.append(child)
            paths.append(np.array(path[1:], np.int64))
            bonus.append(chance.categorical(here, row, int(tree.depth[path[-1]])))
        return Verdict(tuple(paths), np.array(bonus, np.int64))
