"""Steps without drafts, which the drafter reads later, all at once.

Shapes: N nodes, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.target.target import HiddenStates
from draftree.tree import AcceptResult, Tree

MAX_UNREAD_STEPS = 64
"""Largest number of steps that the drafter has not read; their hidden states take memory."""


@dataclass(frozen=True)
class PlainStep:
    """A step without drafts.

    Attributes:
        roots: the roots, which are the tokens that the target has read.
        verdict: the accept result, which holds the token after each root.
        hidden_states: the target's hidden states of the roots.
    """

    roots: Tree
    verdict: AcceptResult
    hidden_states: HiddenStates


def join_steps(steps: Sequence[PlainStep]) -> tuple[Tree, AcceptResult, HiddenStates]:
    """Return several steps without drafts as one step in which a chain was accepted.

    The roots of later steps become accepted nodes below the roots of the first step. Sequences may
    end between the steps, but none may begin.

    Returns:
        A tree of N nodes, its accept result, and the hidden states [N, D] of all nodes.
    """
    first = steps[0].roots
    rows = np.concatenate([step.roots.row for step in steps])
    tokens = np.concatenate([step.roots.tokens for step in steps])
    parents, depth = np.full(len(rows), -1), np.zeros(len(rows), np.int64)
    paths, bonus = [], np.empty(len(first), np.int64)
    last = {
        row: int(token)
        for step in steps
        for row, token in zip(step.roots.row.tolist(), step.verdict.bonus, strict=True)
    }
    for root, row in enumerate(first.row.tolist()):
        mine = np.flatnonzero(rows == row)
        parents[mine[1:]], depth[mine] = mine[:-1], np.arange(len(mine))
        paths.append(mine[1:])
        bonus[root] = last[row]
    nodes = Tree.from_roots(rows, tokens).nodes._replace(parents=parents, depth=depth)
    lossy = any(step.verdict.lossy for step in steps)
    states = HiddenStates.concatenate([step.hidden_states for step in steps])
    return Tree(nodes), AcceptResult(tuple(paths), bonus, lossy), states
