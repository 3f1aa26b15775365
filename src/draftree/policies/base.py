"""The contract of a policy: what grows candidates into a tree and keeps the nodes worth their cost.

Shapes: R rows, N nodes, F frontier nodes, K candidates, M nodes added.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from draftree.costs import Costs
from draftree.tree import Bools, Candidates, Draw, Ints, Tree, Verdict

Expand = Callable[[Tree, Ints, int], Candidates]
"""expand(tree, frontier [F], K) → K candidates after each frontier node."""


@dataclass(frozen=True)
class Room:
    """What a step may hold at most.

    Attributes:
        depth: [R] the deepest a node of each row may lie (new tokens left, end of the context, change of rope).
        nodes: drafted nodes a row.
    """

    depth: Ints
    nodes: int


class Policy(ABC):
    """A way to grow a tree; implementations are frozen dataclasses of their knobs.

    Attributes:
        draw: how it wants candidates drawn.
        prunes_on_draws: whether a node's existence or survival depends on what was drawn (its own or a sibling's draft
            probability included); such trees are exact only with `point` draws or under `match`.
    """

    draw: ClassVar[Draw] = Draw.POINT
    prunes_on_draws: ClassVar[bool] = True

    @property
    def reads_costs(self) -> bool:
        """Whether it asks the cost model, which then has to be measured first."""
        return False

    @abstractmethod
    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        """Grows a forest of roots into the tree to be verified.

        Args:
            expand: asks the drafter.
            tree: the roots.
            costs: seconds of a draft step and of a target pass on this machine.
            room: bounds of depth and nodes.
            memory: what `start` or `observe` returned last.
        """

    def start(self) -> Any:
        """What the policy remembers before the first step; None for those that learn nothing."""
        return None

    def observe(self, memory: Any, tree: Tree, verdict: Verdict) -> Any:
        """What it remembers after a verdict."""
        return memory


class Layered(Policy):
    """A policy that drafts layer by layer."""

    @property
    @abstractmethod
    def candidates(self) -> int:
        """K, how many candidates it asks for after each node."""

    @abstractmethod
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        """Appends the nodes to keep of one layer's candidates; returns the tree and the next frontier."""

    def first(self, tree: Tree, costs: Costs) -> Ints:
        """The first frontier; by default all roots."""
        return np.arange(tree.roots)

    def finish(self, tree: Tree, costs: Costs) -> Tree:
        """Selects the nodes to verify; by default all."""
        return tree

    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        frontier = self.first(tree, costs)
        while (frontier := frontier[tree.depth[frontier] < room.depth[tree.row[frontier]]]).size:
            tree, frontier = self.grow(tree, frontier, expand(tree, frontier, self.candidates), costs)
            if tree.drafted >= room.nodes * tree.roots:
                break
        return fit(self.finish(tree, costs), room.nodes)


def append(tree: Tree, frontier: Ints, candidates: Candidates, worth: Callable[[Any], Bools] | None = None) -> Tree:
    """The tree with the frontier's candidates as children, scored by the log value of their path.

    Args:
        tree: what was drafted so far.
        frontier: [F] the candidates' parents.
        candidates: [F, K].
        worth: which scores [F, K] are worth a node; all by default. Missing candidates (log q = −∞) never are.
    """
    score = tree.score[frontier][:, None] + candidates.log_q
    keep = candidates.log_q > -np.inf
    if worth is not None:
        keep &= worth(score)
    parent, rank = np.nonzero(keep)
    q, q_row = tree.q, None
    if candidates.draw is not Draw.POINT:  # an acceptor will need the whole q that each child was drawn from
        assert candidates.log_probs is not None
        q_row = parent + (0 if q is None else len(q))
        q = candidates.log_probs.exp() if q is None else torch.cat((q, candidates.log_probs.exp()))
    log_q = candidates.log_q[parent, rank]
    return tree.append(frontier[parent], candidates.tokens[parent, rank], log_q, score[parent, rank], candidates, q_row, q)


def fit(tree: Tree, nodes: int) -> Tree:
    """The tree with at most `nodes` drafted nodes a row: the best by score, the lower number winning ties.

    No score exceeds its parent's, and a parent's number is the lower one, so what is kept is connected.
    """
    if tree.drafted <= nodes:
        return tree
    keep = np.zeros(len(tree), np.bool_)
    keep[: tree.roots] = True
    for root in range(tree.roots):
        mine = tree.of_row(int(tree.row[root]))[1:]
        keep[mine[np.argsort(-tree.score[mine], kind="stable")[:nodes]]] = True
    return tree.select(keep)
