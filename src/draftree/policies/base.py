"""The contract of a policy, which grows candidates into a tree and keeps the nodes worth their cost.

Shapes: R rows, N nodes, F frontier nodes, K candidates, M nodes added.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from typing_extensions import override

from draftree.boundary.knobs import Part
from draftree.costs.curves import Costs
from draftree.kernels.growing import appended, leading, leading_of_layer
from draftree.policies._unseen import Outlook, Plan
from draftree.stats import Work
from draftree.tree import Below, Bools, Candidates, Floats, Ints, Room, Tree, Verdict

Expand = Callable[[Tree, Ints, int], Candidates]
"""expand(tree, frontier [F], K) → K candidates after each frontier node."""
ALL, OWN, ZEROS, SAME = np.zeros((0, 0), np.bool_), np.zeros((0, 0)), np.zeros(0), np.zeros((0, 0), np.int64)
"""Stand for what is not said of candidates: all are kept, by their own log value, of entropy 0 and of one drafter."""


class Search(ABC):
    """An `Expand` that can say what is found without a pass of a model, and what a pass would take."""

    @abstractmethod
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        """K candidates after each frontier node."""

    @abstractmethod
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        """Of these candidates those that take no pass; None where passes give all, or nothing does."""

    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> Below | None:
        """Return what is found below the frontier in all layers, down to a depth [R], without a pass.

        Return None where it goes by layers.
        """
        return None

    @property
    def searches(self) -> bool:
        """Whether all is found without a pass of a model."""
        return False

    def passes(self, tree: Tree, frontier: Ints) -> int:
        """How many nodes a pass would be fed to expand the frontier; 0 where an earlier pass of the step told it all."""
        return len(frontier)

    @property
    def ahead(self) -> int:
        """How many layers one pass tells."""
        return 1


class Policy(Part, ABC):
    """A way to grow a tree; implementations are frozen dataclasses of their knobs."""

    @property
    def prunes_on_draws(self) -> bool:
        """True where a node's existence or survival depends on what was drawn, its own or a sibling's q included.

        Such trees are exact only with candidates that are not draws of their own, or under `match`. A policy that does not
        keeps the siblings in draw order and drops none before one it keeps.
        """
        return True

    @property
    def reads_costs(self) -> bool:
        """True where it asks the cost model, which then has to be measured first."""
        return False

    @property
    def plan(self) -> Plan | None:
        """The shape of its trees, where it is known before anything is drafted; None by default."""
        return None

    def plan_step(self, outlook: Outlook) -> Plan | None:
        """Return how trees grow on a device without the host, which are those of `draft`.

        Return None where they cannot.

        Args:
            outlook: what is known of the step.
        """
        return self.plan

    @cached_property
    def deepest(self) -> int | None:
        """The deepest layer that its knobs allow, the one declared `deepest`; None where only drafter and room end a tree."""
        knobs: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        return next((getattr(self, f.name) for f in knobs if f.metadata.get("deepest")), None)

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

    def sized(self, parameters: int) -> Self:
        """Return the policy for a target of that many parameters; by default the same for all.

        Args:
            parameters: of the target.
        """
        return self

    def start(self) -> Any:
        """Return the memory before anything was seen; None for policies that learn nothing."""
        return None

    def observe(self, memory: Any, tree: Tree, verdict: Verdict, work: Work, costs: Costs) -> Any:
        """Return the memory after a verdict.

        Args:
            memory: the one before.
            tree: the verified tree.
            verdict: what of it was accepted.
            work: what the step asked of the models.
            costs: of the step, on this machine.
        """
        return memory


class Layered(Policy):
    """A policy that drafts layer by layer, down to the layer of its knob declared `deepest`, and verifies what it drafts.

    A row that has drafted as many nodes as there is room to verify is drafted for no more, whatever the others do.
    """

    @property
    @abstractmethod
    def candidates(self) -> int:
        """K, the number of candidates it asks for after each node."""

    @abstractmethod
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        """Append the nodes to keep of one layer's candidates."""

    def expandable(self, tree: Tree, nodes: Ints, costs: Costs) -> Ints:
        """Those of the roots, or of a layer's new nodes, that are drafted below; by default all."""
        return nodes

    def finish(self, tree: Tree) -> Tree:
        """Select the nodes to verify; by default all."""
        return tree

    @override
    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        new = np.arange(tree.roots)
        while (frontier := self.expandable(tree, self._with_room(tree, new, room), costs)).size:
            before, tree = len(tree), self.grow(tree, frontier, expand(tree, frontier, self.candidates))
            new = np.arange(before, len(tree))
        grown = self.finish(tree)
        return fit(grown, room.nodes, None if self.prunes_on_draws else -np.arange(len(grown), dtype=np.float64))

    def _with_room(self, tree: Tree, nodes: Ints, room: Room) -> Ints:
        """Those of the nodes above the deepest layer whose rows may be drafted further nodes for."""
        if tree.drafted >= room.nodes:
            drafted = np.bincount(tree.row[tree.roots :], minlength=len(room.depth))
            nodes = nodes[drafted[tree.row[nodes]] < room.nodes]
        return room.expandable(tree, nodes, np.inf if self.deepest is None else self.deepest)


def append(
    tree: Tree,
    frontier: Ints,
    candidates: Candidates,
    keep: Bools | None = None,
    score: Floats | None = None,
    entropy: Floats | None = None,
) -> Tree:
    """Return the tree with the frontier's candidates as children.

    Args:
        tree: what was drafted so far.
        frontier: [F] the candidates' parents; those behind the tree's nodes are candidates that stand before.
        candidates: [F, K].
        keep: [F, K] which of them become nodes; all by default. Missing candidates (log q = −∞) never do.
        score: [F, K] what the policy ranks by; by default the log value of the path, `path_log_q`.
        entropy: [F] of the distributions they were drawn from, for policies that read it.
    """
    q, first = tree.q, -1
    if candidates.draw.sampled:  # an acceptor will need the whole q that each child was drawn from
        assert candidates.log_probs is not None
        first = 0 if q is None else len(q)
        q = candidates.log_probs.exp() if q is None else torch.cat((q, candidates.log_probs.exp()))
    new, sources = np.ascontiguousarray(candidates.tokens), SAME if candidates.sources is None else candidates.sources
    whole, real = appended(
        tree.tokens, tree.parents, tree.depth, tree.row, tree.source, tree.number, tree.q_row,
        tree.log_q, tree.score, tree.entropy, frontier, new, np.ascontiguousarray(candidates.log_q),
        ALL if keep is None else keep, OWN if score is None else score, ZEROS if entropy is None else entropy,
        np.ascontiguousarray(sources), candidates.source, first,
    )  # fmt: skip
    tokens, parents, depth, row, source, number, q_row = whole
    log_q, score, entropy = real
    return Tree(tokens, parents, depth, row, log_q, score, source, entropy, number, q_row, candidates.draw, q)


def path_log_q(tree: Tree, frontier: Ints, candidates: Candidates) -> Floats:
    """[F, K] the candidates' log value where q itself is the estimate: the parent's score plus log q."""
    return tree.score[frontier][:, None] + candidates.log_q


def best(tree: Tree, nodes: Ints, k: int, by: Floats | None = None) -> Ints:
    """Return the k best of each row, best first; the lower number wins ties.

    The frontier's order is that of its children's numbers, by which ties in the next layer and at the end are decided.

    Args:
        tree: what was drafted so far.
        nodes: to choose from.
        k: how many.
        by: [N] what to rank by; the score by default.
    """
    nodes = np.sort(nodes)
    return nodes[leading(tree.row[nodes], (tree.score if by is None else by)[nodes], k)]


def top(tree: Tree, frontier: Ints, score: Floats, k: int) -> Bools:
    """[F, K] True at the k best of a layer's candidates in each row; of equals, at those that get the lower numbers.

    Args:
        tree: what was drafted so far.
        frontier: [F] the candidates' parents.
        score: [F, K] what to rank by; −∞ for missing candidates.
        k: how many.
    """
    return leading_of_layer(tree.row, frontier, np.ascontiguousarray(score), k)


def log(x: float) -> float:
    """Return the natural logarithm; −∞ of 0, which every node is worth."""
    return math.log(x) if x > 0 else -math.inf


def fit(tree: Tree, nodes: int, by: Floats | None = None) -> Tree:
    """Return the tree with at most `nodes` drafted nodes a row: the best by score, the lower number winning ties.

    No score exceeds its parent's, and a parent's number is the lower one, so what is kept is connected.

    Args:
        tree: what was drafted.
        nodes: how many of each row stay at most.
        by: [N] what to rank by instead of the score, no node's above its parent's.
    """
    if tree.drafted <= nodes or np.bincount(tree.row[tree.roots :]).max() <= nodes:
        return tree
    keep = np.zeros(len(tree), np.bool_)
    keep[: tree.roots] = True
    keep[best(tree, np.arange(tree.roots, len(tree)), nodes, by)] = True
    return tree.select(keep)
