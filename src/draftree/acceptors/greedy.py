"""Greedy acceptance: follow the target's likeliest token while it is in the tree (EDD + PCT, eq. 1)."""

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from draftree.acceptors.base import Acceptor, follow, walk
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Tree


@final
@dataclass(frozen=True)
class Greedy(Acceptor):
    """Accept the drafted tokens that greedy decoding would choose; any tree gives the same text."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True
    sampling: ClassVar[bool] = False

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        return walk(tree, p.argmax) if p.known is None else follow(tree, p.known)
