"""Acceptance by matching: at each node the target draws its token, and the walk goes on while that token is a child.

One draw is used for both questions, "is a child accepted?" and "what comes instead?", so nothing about how the tree
was made can change the distribution. With keyed noise (`sampling.Keyed`) the text is the one plain decoding writes
for the same seed (DESIGN, Exactness).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from draftree.acceptors.base import Acceptor, walk
from draftree.sampling import Chance, Distributions
from draftree.tree import Draw, Tree, Verdict


@final
@dataclass(frozen=True)
class Match(Acceptor):
    """Exact for any tree at any temperature; the default for sampling."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        return walk(tree, lambda node: chance.categorical(p(node), int(tree.row[node]), int(tree.depth[node])))
