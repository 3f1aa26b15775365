"""Drafters that follow a rule, so that a tree can be grown from it a second time by other means.

Shapes: F frontier nodes, K candidates.
"""

from collections.abc import Callable, Sequence

import numpy as np

from draftree.policies.base import Expand
from draftree.tree import Candidates, Ints, Tree

Path = tuple[int, ...]
Rule = Callable[[Path], Sequence[float]]
"""From the tokens of a path, the root's first, to log q of tokens 0, 1, … after it; −∞ for a
missing candidate."""


def following(rule: Rule, asked: list[tuple[list[int], int]] | None = None) -> Expand:
    """A drafter that proposes tokens 0, 1, … by a rule, in this order whatever their q; `asked` gets frontier and K."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        if asked is not None:
            asked.append((frontier.tolist(), k))
        log_q = np.array(
            [rule(tuple(tree.tokens[tree.path(int(n))].tolist()))[:k] for n in frontier], np.float64
        )
        return Candidates(np.tile(np.arange(log_q.shape[1]), (len(frontier), 1)), log_q)

    return expand


def levels(seed: int, width: int, lowest: int = 3, missing: float = 0.2) -> Rule:
    """Log q of −lowest … 0, in whole numbers, so that sums are exact and there are many ties; some are missing."""

    def rule(path: Path) -> list[float]:
        rng = np.random.default_rng([seed, *path])
        return np.where(
            rng.random(width) < missing, -np.inf, -rng.integers(0, lowest + 1, width)
        ).tolist()

    return rule
