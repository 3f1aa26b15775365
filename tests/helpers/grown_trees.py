"""Grow trees of policies from scripted candidates."""

from collections.abc import Sequence

import numpy as np

from draftree.costs.step_costs import Costs
from draftree.policies.base import Expand, Policy
from draftree.tree import Candidates, Ints, Tree, TreeBudget

COSTS = Costs({1: 0.25}, {1: 1.0})


WIDE = 10**6


def always(*q: float, asked: list[list[int]] | None = None) -> Expand:
    """A drafter that proposes tokens 0, 1, … with the same q after every node."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        if asked is not None:
            asked.append(frontier.tolist())
        found = np.log(
            np.array((*q, *[0.0] * k)[:k]), where=np.arange(k) < len(q), out=np.full(k, -np.inf)
        )
        return Candidates(
            np.tile(np.arange(k), (len(frontier), 1)), np.tile(found, (len(frontier), 1))
        )

    return expand


def grown(
    policy: Policy,
    expand: Expand,
    depth: Sequence[int] = (99,),
    nodes: int = WIDE,
    costs: Costs = COSTS,
) -> Tree:
    rows = np.arange(len(depth))
    return policy.draft(
        expand,
        Tree.from_roots(rows, rows),
        costs,
        TreeBudget(np.array(depth), nodes),
        policy.start(),
    )


def paths(tree: Tree, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens from each node's root to it, in node order."""
    return [tuple(tree.tokens[tree.path(int(n))[1:]].tolist()) for n in tree.of_row(row)[1:]]
