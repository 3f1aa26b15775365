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
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import leading, leading_of_layer
from draftree.kernels.tree_growth import CandidateTable, append_nodes
from draftree.metrics import Work
from draftree.policies._device_growth import DeviceGrowth, Outlook
from draftree.tree import (
    AcceptResult,
    Bools,
    Candidates,
    Floats,
    Ints,
    SubtreeCandidates,
    Tree,
    TreeBudget,
)
from draftree.utils.validated_dataclass import Part

Expand = Callable[[Tree, Ints, int], Candidates]
"""A function `expand(tree, frontier [F], K)` that returns K candidates after each frontier node."""
KEEP_ALL, PATH_SCORES, ZEROS, SAME_SOURCE = (
    np.zeros((0, 0), np.bool_),
    np.zeros((0, 0)),
    np.zeros(0),
    np.zeros((0, 0), np.int64),
)
"""Empty arrays that select the default arguments of native calls.

`KEEP_ALL` means that all candidates are kept, `PATH_SCORES` that their scores are log q, `ZEROS` that the
entropy is 0, and `SAME_SOURCE` that all candidates have the same drafter.
"""


class RetrievalExpand(ABC):
    """An `Expand` with further methods for candidates that need no forward pass."""

    @abstractmethod
    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        """Return K candidates after each frontier node."""

    @abstractmethod
    def find(self, tree: Tree, frontier: Ints, k: int) -> Candidates | None:
        """Return the candidates that need no forward pass.

        Return None if all candidates need a pass, or if none does (see `searches`).
        """

    def below(self, tree: Tree, frontier: Ints, k: int, deepest: Ints) -> SubtreeCandidates | None:
        """Return the retrieval hits of all layers below the frontier, down to depths `deepest` [R].

        Return None if the drafter can only search one layer at a time.
        """
        return None

    @property
    def searches(self) -> bool:
        """Return whether the drafter finds all candidates without a forward pass."""
        return False

    def passes(self, tree: Tree, frontier: Ints) -> int:
        """Return the number of nodes that the drafter's model must read to expand the frontier.

        It is 0 if an earlier pass of the step has already computed the candidates.
        """
        return len(frontier)

    @property
    def ahead(self) -> int:
        """Return the number of tree layers that one forward pass of the drafter computes."""
        return 1


class Policy(Part, ABC):
    """A strategy for growing draft trees; implementations are frozen dataclasses of options."""

    @property
    def prunes_on_draws(self) -> bool:
        """Return whether the existence or survival of a node depends on the drawn candidates.

        This includes dependence on the q of the node and of its siblings. Such trees are exact only
        if candidates are not random samples, or with the acceptor `match`. All other policies keep
        siblings in draw order, and drop a sibling only if they drop all later ones too.
        """
        return True

    @property
    def reads_costs(self) -> bool:
        """Return whether the policy reads the costs, which must then be measured first."""
        return False

    @property
    def plan(self) -> DeviceGrowth | None:
        """Return the plan of the trees if their shape is fixed; by default None."""
        return None

    def plan_step(self, outlook: Outlook) -> DeviceGrowth | None:
        """Return a plan by which the trees of `draft` grow on the device, without the host.

        Return None if that is not possible.

        Args:
            outlook: what is known of the step before it drafts.
        """
        return self.plan

    @cached_property
    def deepest(self) -> int | None:
        """Return the largest depth of a node, which is the value of the option declared `deepest`.

        It is None if only the drafter and the budget bound the depth.
        """
        knobs: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        return next((getattr(self, f.name) for f in knobs if f.metadata.get("deepest")), None)

    @abstractmethod
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        """Grow trees that consist of a root only into the draft trees to verify.

        Args:
            expand: requests candidates from the drafter.
            tree: the roots.
            costs: seconds of a draft step and of a target pass on this machine.
            room: the largest depth and number of nodes.
            memory: the last result of `start` or `observe`.

        Returns:
            The draft trees.
        """

    def for_target_size(self, parameters: int) -> Self:
        """Return the policy for a target of the given size; by default the policy itself."""
        return self

    def start(self) -> Any:
        """Return the initial memory; None for policies that learn nothing."""
        return None

    def pauses(self, memory: Any, rows: int) -> bool:
        """Return whether the next step of R sequences runs without the drafter; by default False.

        `draft` then returns the roots without a call of `expand`.
        """
        return False

    def observe(
        self, memory: Any, tree: Tree, verdict: AcceptResult, work: Work, costs: Costs
    ) -> Any:
        """Return the memory after a verification.

        Args:
            memory: the memory before the verification.
            tree: the verified tree.
            verdict: the accept result.
            work: the numbers of tokens that the models read in the step.
            costs: the costs of the step on this machine.
        """
        return memory


class Layered(Policy):
    """A policy that drafts layer by layer and verifies all nodes that it drafts.

    It stops at the depth given by the option declared `deepest`. A sequence that has drafted as
    many nodes as its budget allows gets no more, whatever other sequences do.
    """

    @property
    @abstractmethod
    def candidates(self) -> int:
        """Return K, the number of candidates requested after each node."""

    @abstractmethod
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        """Return the tree with those candidates of one layer appended that shall become nodes."""

    def expandable(self, tree: Tree, nodes: Ints, costs: Costs) -> Ints:
        """Return the numbers of the given new nodes (or roots) to expand; by default all."""
        return nodes

    def finish(self, tree: Tree) -> Tree:
        """Return the tree of the nodes to verify; by default all nodes."""
        return tree

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
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

    def _with_room(self, tree: Tree, nodes: Ints, room: TreeBudget) -> Ints:
        """Return those of the given nodes that may have children.

        Their depth must be below the limits of `room` and of the policy. The number of drafted
        nodes of their sequence must be below `room.nodes`.
        """
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
    """Return the tree with the frontier's candidates appended as children.

    Args:
        tree: the nodes drafted so far.
        frontier: [F] the candidates' parents. Numbers beyond the nodes of `tree` refer to
            candidates earlier in this call.
        candidates: [F, K] the candidates after each parent.
        keep: [F, K] whether a candidate becomes a node; by default all do. Missing candidates (log
            q = −∞) never become nodes.
        score: [F, K] the values by which the policy ranks; by default `path_log_q`.
        entropy: [F] entropy in nats of the distributions that the candidates were drawn from, for
            policies that read it.
    """
    q, first = tree.q_after(candidates)
    sources = SAME_SOURCE if candidates.sources is None else candidates.sources
    nodes = append_nodes(
        tree.nodes,
        frontier,
        CandidateTable(candidates.tokens, candidates.log_q, sources, candidates.source),
        KEEP_ALL if keep is None else keep,
        PATH_SCORES if score is None else score,
        ZEROS if entropy is None else entropy,
        first,
    )
    return Tree(nodes, candidates.draw, q)


def path_log_q(tree: Tree, frontier: Ints, candidates: Candidates) -> Floats:
    """Return the scores [F, K] of candidates: the score of the parent plus log q.

    It is the logarithm of the candidate's value, if q estimates acceptance.
    """
    return tree.score[frontier][:, None] + candidates.log_q


def best(tree: Tree, nodes: Ints, k: int, by: Floats | None = None) -> Ints:
    """Return the k best nodes of each sequence, best first; of equals, the lower number.

    The order of a frontier determines the numbers of its children, and these decide ties in the
    next layer and at the end.

    Args:
        tree: the nodes drafted so far.
        nodes: the nodes to choose from.
        k: the number of nodes of each sequence.
        by: [N] the values to rank by; by default the scores.
    """
    nodes = np.sort(nodes)
    return nodes[leading(tree.row[nodes], (tree.score if by is None else by)[nodes], k)]


def top(tree: Tree, frontier: Ints, score: Floats, k: int) -> Bools:
    """Return [F, K] whether a candidate is among the k best of its layer in its sequence.

    Among equals, those that get the lower node numbers are chosen.

    Args:
        tree: the nodes drafted so far.
        frontier: [F] the candidates' parents.
        score: [F, K] the values to rank by; −∞ for missing candidates.
        k: the number of candidates of each sequence.
    """
    return leading_of_layer(tree.row, frontier, np.ascontiguousarray(score), k)


def log(x: float) -> float:
    """Return the natural logarithm of x, or −∞ if x is not positive."""
    return math.log(x) if x > 0 else -math.inf


def fit(tree: Tree, nodes: int, by: Floats | None = None) -> Tree:
    """Return the tree with at most the best `nodes` drafted nodes of each sequence.

    Among equals, lower numbers are kept. The result is connected, because no score exceeds that of
    the parent, and a parent's number is lower.

    Args:
        tree: the drafted nodes.
        nodes: the largest number of drafted nodes of each sequence.
        by: [N] values to rank by instead of the scores. No node's value may exceed its parent's.
    """
    rows = tree.row[tree.roots :]
    if len(rows) <= nodes or np.bincount(rows).max() <= nodes:
        return tree
    keep = np.zeros(len(tree), np.bool_)
    keep[: tree.roots] = True
    keep[best(tree, np.arange(tree.roots, len(tree)), nodes, by)] = True
    return tree.select(keep)
