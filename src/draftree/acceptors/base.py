"""The contract of an acceptor: what keeps, of a verified tree, exactly what the target would have produced."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from draftree.errors import UserError
from draftree.policies.base import Policy
from draftree.sampling import Chance, Distributions
from draftree.tree import Draw, Ints, Tree, Verdict


class Acceptor(ABC):
    """A rule that walks a verified tree from each root.

    Attributes:
        exact_for: the draws under which its output has the target's distribution.
        survives_pruning: whether that also holds where a policy drops nodes by what was drawn.
        lossy: whether it may change the output at all; such a rule is never a default.
    """

    exact_for: ClassVar[frozenset[Draw]]
    survives_pruning: ClassVar[bool]
    lossy: ClassVar[bool] = False

    @abstractmethod
    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        """Accepts a path below each root and chooses the token after it.

        Args:
            tree: the verified tree.
            p: the target's distribution after each node, computed where it is asked for.
            chance: the only randomness.
        """


def walk(tree: Tree, choose: Callable[[int], int]) -> Verdict:
    """From each root, follows the chosen token while it is a child; the first that is not is the bonus.

    Args:
        tree: the verified tree.
        choose: the target's token after a node.
    """
    child: dict[tuple[int, int], int] = {}
    for node in range(len(tree) - 1, tree.roots - 1, -1):  # backwards: of equal siblings the first stays
        child[int(tree.parents[node]), int(tree.tokens[node])] = node
    paths: list[Ints] = []
    bonus: list[int] = []
    for root in range(tree.roots):
        path = [root]
        while (found := child.get((path[-1], token := choose(path[-1])))) is not None:
            path.append(found)
        paths.append(np.array(path[1:], np.int64))
        bonus.append(token)
    return Verdict(tuple(paths), np.array(bonus, np.int64))


def check_exact(policy: Policy, acceptor: Acceptor) -> None:
    """Refuses a pairing whose output would not have the target's distribution.

    Raises:
        UserError: the acceptor is not exact for the policy's draws, or for its pruning on them (DESIGN, Exactness).
    """
    name, rule = type(policy).__name__.lower(), type(acceptor).__name__.lower()
    if policy.draw not in acceptor.exact_for:
        allowed = ", ".join(sorted(d.value for d in acceptor.exact_for))
        raise UserError(f"acceptor '{rule}' is not exact for {policy.draw.value} draws of policy '{name}'; allowed: {allowed}")
    if policy.draw is not Draw.POINT and policy.prunes_on_draws and not acceptor.survives_pruning:
        raise UserError(f"acceptor '{rule}' is not exact where policy '{name}' prunes on what was drawn; allowed: match")
