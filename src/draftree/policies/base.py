"""Base class of policies, which grow candidates into a draft tree.

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

from draftree.costs.curves import Costs
from draftree.kernels.tree_growth import appended, leading, leading_of_layer
from draftree.metrics import Work
from draftree.policies._device_growth import Outlook, Plan
from draftree.tree import Below, Bools, Candidates, Floats, Ints, Room, Tree, Verdict
from draftree.utils.validated_dataclass import Part

Expand = Callable[[Tree, Ints, int], Candidates]
"""expand(tree, frontier [F], K) → K candidates after each frontier node."""
ALL, OWN, ZEROS, SAME = (
    np.zeros((0, 0), np.bool_),
    np.zeros((0, 0)),
    np.zeros(0),
    np.zeros((0, 0), np.int64),
)
"""Empty arrays that select the defaults of compiled calls.

The defaults: all candidates are kept, scored by log q, with entropy 0 and of one drafter.
"""


class Search(ABC):
    """An `Expand` that can return retrieval hits, and the size of a pass, without a pass."""

    @abstractmethod
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        """Return K candidates after each frontier node."""

    @abstractmethod
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        """Return candidates that need no forward pass; None if there are none or all need it."""

    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> Below | None:
        """Return the retrieval hits of all layers below the frontier, down to depths [R].

        Return None if the drafter searches layer by layer.
        """
        return None

    @property
    def searches(self) -> bool:
        """Return whether all candidates are found without a pass of a model."""
        return False

    def passes(self, tree: Tree, frontier: Ints) -> int:
        """Return how many nodes a pass would be fed to expand the frontier.

        It is 0 if an earlier pass of the step computed the candidates already.
        """
        return len(frontier)

    @property
    def ahead(self) -> int:
        """Return how many layers one pass computes."""
        return 1


class Policy(Part, ABC):
    """A way to grow a tree; implementations are frozen dataclasses of their knobs."""

    @property
    def prunes_on_draws(self) -> bool:
        """Return whether a node's existence or survival depends on what was drawn.

        That includes its own and its siblings' q. Such trees are exact only with candidates that
        are not draws of their own, or under `match`. Any other policy keeps siblings in draw order
        and drops none before one that it keeps.
        """
        return True

    @property
    def reads_costs(self) -> bool:
        """Return whether the policy reads the cost model, which then has to be measured first."""
        return False

    @property
    def plan(self) -> Plan | None:
        """Return the shape of its trees, if it is known before drafting; None by default."""
        return None

    def plan_step(self, outlook: Outlook) -> Plan | None:
        """Return how to grow the trees of `draft` on a device without the host.

        Return None if that is not possible.

        Args:
            outlook: what is known of the step.
        """
        return self.plan

    @cached_property
    def deepest(self) -> int | None:
        """Return the deepest layer that the options allow: the value of the one declared `deepest`.

        It is None if only the drafter and the budget end a tree.
        """
        knobs: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        return next((getattr(self, f.name) for f in knobs if f.metadata.get("deepest")), None)

    @abstractmethod
    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        """Grow bare roots into the draft trees to be verified.

        Args:
            expand: requests candidates from the drafter.
            tree: the roots.
            costs: seconds of a draft step and of a target pass on this machine.
            room: bounds of depth and nodes.
            memory: the last return value of `start` or `observe`.
        """

    def sized(self, parameters: int) -> Self:
        """Return the policy for a target of that size; by default the same for all.

        Args:
            parameters: number of the target's parameters.
        """
        return self

    def start(self) -> Any:
        """Return the initial memory; None for policies that learn nothing."""
        return None

    def observe(self, memory: Any, tree: Tree, verdict: Verdict, work: Work, costs: Costs) -> Any:
        """Return the memory after a verification.

        Args:
            memory: the memory before it.
            tree: the verified tree.
            verdict: the accept result.
            work: the passes of the step.
            costs: of the step, on this machine.
        """
        return memory


class Layered(Policy):
    """A policy that drafts layer by layer and verifies what it drafts.

    It stops at the layer given by its option declared `deepest`. A sequence that has drafted as
    many nodes as its budget allows gets no more, whatever the others do.
    """

    @property
    @abstractmethod
    def candidates(self) -> int:
        """Return K, the number of candidates requested after each node."""

    @abstractmethod
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        """Append the nodes to keep of one layer's candidates."""

    def expandable(self, tree: Tree, nodes: Ints, costs: Costs) -> Ints:
        """Return the roots, or new nodes of a layer, to draft below; by default all."""
        return nodes

    def finish(self, tree: Tree) -> Tree:
        """Select the nodes to verify; by default all."""
        return tree

    @override
    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        new = np.arange(tree.roots)
        while (frontier := self.expandable(tree, self._with_room(tree, new, room), costs)).size:
            before, tree = (
                len(tree),
                self.grow(tree, frontier, expand(tree, frontier, self.candidates)),
            )
            new = np.arange(before, len(tree))
        grown = self.finish(tree)
        return fit(
            grown,
            room.nodes,
            None if self.prunes_on_draws else -np.arange(len(grown), dtype=np.float64),
        )

    def _with_room(self, tree: Tree, nodes: Ints, room: Room) -> Ints:
        """Return the nodes above the deepest layer whose sequences have budget for more nodes."""
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
        tree: the nodes drafted so far.
        frontier: [F] the candidates' parents. Numbers beyond the tree's nodes refer to earlier
            candidates.
        candidates: [F, K].
        keep: [F, K] which of them become nodes; all by default. Missing candidates (log q = −∞)
            never do.
        score: [F, K] the policy's ranking; by default the log value of the path, `path_log_q`.
        entropy: [F] of the distributions they were drawn from, for policies that read it.
    """
    q, first = tree.q, -1
    if candidates.draw.sampled:  # an acceptor will need the whole q that each child was drawn from
        assert candidates.log_probs is not None
        first = 0 if q is None else len(q)
        q = candidates.log_probs.exp() if q is None else torch.cat((q, candidates.log_probs.exp()))
    new, sources = (
        np.ascontiguousarray(candidates.tokens),
        SAME if candidates.sources is None else candidates.sources,
    )
    whole, real = appended(
        tree.tokens,
        tree.parents,
        tree.depth,
        tree.row,
        tree.source,
        tree.number,
        tree.q_row,
        tree.log_q,
        tree.score,
        tree.entropy,
        frontier,
        new,
        np.ascontiguousarray(candidates.log_q),
        ALL if keep is None else keep,
        OWN if score is None else score,
        ZEROS if entropy is None else entropy,
        np.ascontiguousarray(sources),
        candidates.source,
        first,
    )
    tokens, parents, depth, row, source, number, q_row = whole
    log_q, score, entropy = real
    return Tree(
        tokens,
        parents,
        depth,
        row,
        log_q,
        score,
        source,
        entropy,
        number,
        q_row,
        candidates.draw,
        q,
    )


def path_log_q(tree: Tree, frontier: Ints, candidates: Candidates) -> Floats:
    """Return the log value [F, K] of candidates if q is the estimate: parent's score + log q."""
    return tree.score[frontier][:, None] + candidates.log_q


def best(tree: Tree, nodes: Ints, k: int, by: Floats | None = None) -> Ints:
    """Return the k best nodes of each sequence, best first; the lower number wins ties.

    The frontier's order is that of its children's numbers, which decide ties in the next layer and
    at the end.

    Args:
        tree: the nodes drafted so far.
        nodes: the nodes to choose from.
        k: the number of nodes of each sequence.
        by: [N] the ranking; the score by default.
    """
    nodes = np.sort(nodes)
    return nodes[leading(tree.row[nodes], (tree.score if by is None else by)[nodes], k)]


def top(tree: Tree, frontier: Ints, score: Floats, k: int) -> Bools:
    """Return a mask [F, K] of the k best candidates of a layer in each sequence.

    Of equals, those that get the lower node numbers are chosen.

    Args:
        tree: the nodes drafted so far.
        frontier: [F] the candidates' parents.
        score: [F, K] the ranking; −∞ for missing candidates.
        k: the number of candidates of each sequence.
    """
    return leading_of_layer(tree.row, frontier, np.ascontiguousarray(score), k)


def log(x: float) -> float:
    """Return the natural logarithm; −∞ for values of at most 0."""
    return math.log(x) if x > 0 else -math.inf


def fit(tree: Tree, nodes: int, by: Floats | None = None) -> Tree:
    """Return the tree with the best `nodes` drafted nodes of each sequence at most.

    The lower number wins ties. No score exceeds its parent's, and a parent's number is lower, so
    the result is connected.

    Args:
        tree: the drafted nodes.
        nodes: the largest number of drafted nodes of each sequence.
        by: [N] the ranking instead of the score; no node's value exceeds its parent's.
    """
    if tree.drafted <= nodes or np.bincount(tree.row[tree.roots :]).max() <= nodes:
        return tree
    keep = np.zeros(len(tree), np.bool_)
    keep[: tree.roots] = True
    keep[best(tree, np.arange(tree.roots, len(tree)), nodes, by)] = True
    return tree.select(keep)
