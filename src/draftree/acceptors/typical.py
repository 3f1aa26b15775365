"""Typical acceptance: accept tokens that are likely enough (Medusa, section 2.3.1); changes the distribution.

It is lossy: the text is not the target's. What is likely enough falls with the target's entropy: a
child x is kept where p(x) > min(ε, δ · exp(−H(p))). Of the paths that are kept whole the longest is
taken, of equally long ones the likeliest.

The official code keeps ε as `posterior_threshold` (0.09) and δ as `posterior_alpha` (0.3), takes H
from log(p + 1e-5), and chooses the bonus greedily in its default setting; here the bonus is drawn
from p.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from typing_extensions import override

from draftree.acceptors.base import Acceptor
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Tree
from draftree.utils.validated_dataclass import knob

TINY = 1e-5
"""Constant that is added to p in the logarithm of the entropy, as in the official code."""


@final
@dataclass(frozen=True)
class Typical(Acceptor):
    """Not exact, never a default, and every output it touches says so.

    Attributes:
        epsilon: ε, the target's probability of a draft above which the draft is always accepted.
        delta: δ, the factor of exp(−H(p)) in the bound that depends on the entropy.
    """

    exact_for: ClassVar[frozenset[Draw]] = frozenset()
    greedy: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True
    lossy: ClassVar[bool] = True

    epsilon: float = knob(0.09, above=0, most=1)
    delta: float = knob(0.3, above=0)

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        paths, bonus = [], []
        for root in range(tree.roots):
            kept = {
                root: 0.0
            }  # node → log p of its path, in the tree's order, so that a parent comes before its children
            enough = {root: self._enough(p(root))}
            for node in tree.of_row(int(tree.row[root]))[1:].tolist():
                parent = int(tree.parents[node])
                if parent not in kept:
                    continue
                if parent not in enough:
                    enough[parent] = self._enough(p(parent))
                probability = float(p(parent)[int(tree.tokens[node])])
                if probability > enough[parent]:
                    kept[node] = kept[parent] + float(np.log(probability))
            last = max(kept, key=lambda node: (int(tree.depth[node]), kept[node]))
            paths.append(tree.path(last)[1:])
            bonus.append(chance.categorical(p(last), int(tree.row[root]), int(tree.depth[last])))
        return AcceptResult(tuple(paths), np.array(bonus, np.int64), lossy=True)

    def _enough(self, p: torch.Tensor) -> float:
        entropy = -float((p * torch.log(p + TINY)).sum())
        return min(self.epsilon, self.delta * float(np.exp(-entropy)))
