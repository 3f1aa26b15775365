"""Search for the best static tree from acceptance rates by rank and depth.

Shapes: D depths, K ranks, N nodes at most.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from draftree.costs.step_costs import Costs
from draftree.metrics import Work
from draftree.tree import Floats, Ints

Ranks = tuple[int, ...]
RankTree = tuple[Ranks, ...]
"""A tree, given by the ranks along the path to each node; it contains every prefix of a path."""
MOST = 128
"""Largest number of nodes that is tried if the number of nodes is chosen automatically."""


def expected_tau(paths: RankTree, table: Floats) -> float:
    """Return the expected acceptance length τ of a tree under the product model.

    The model assumes that a node is accepted with the product of a[d, r] along its path, where
    a[d, r] is the entry of `table` [D, K] for depth d and rank r. τ is then 1 plus the sum of these
    products over all nodes.
    """
    return 1.0 + sum(float(np.prod([table[d, r] for d, r in enumerate(path)])) for path in paths)


def greedy_tree(table: Floats, nodes: int) -> RankTree:
    """Return the tree that Medusa's search finds (section 2.3.3).

    The search repeatedly adds the node with the largest product.

    Args:
        table: [D, K] a, the acceptance by depth and rank.
        nodes: N, the largest number of nodes.

    Returns:
        At most N paths in the order in which they were added, so that the first n are the tree of n
        nodes. Among equal products the shorter path comes first, then the one with lower ranks.
        Nodes that are never accepted are left out.
    """
    found: list[Ranks] = []
    heap: list[tuple[float, int, Ranks]] = []

    def offer(path: Ranks, product: float) -> None:
        if len(path) < len(table):
            for rank, a in enumerate(table[len(path)].tolist()):
                if product * a > 0:
                    heapq.heappush(heap, (-product * a, len(path) + 1, (*path, rank)))

    offer((), 1.0)
    while heap and len(found) < nodes:
        product, _, path = heapq.heappop(heap)
        found.append(path)
        offer(path, -product)
    return tuple(found)


@dataclass(frozen=True)
class Forests:
    """The dynamic programme of Sequoia (section 3.1), with acceptances that depend on depth.

    Let V(δ, n) be the largest expected number of accepted tokens among at most n nodes below an
    accepted node of depth δ. Let B(δ, k, n) be the same if only ranks below k may be children of
    that node. The child of rank k − 1 has a subtree of m nodes, itself included, or is left out (m
    = 0):

        B(δ, 0, n) = 0
        B(δ, k, n) = max( B(δ, k−1, n),  max_{1 ≤ m ≤ n} a[δ+1, k−1] · (1 + V(δ+1, m−1)) + B(δ, k−1, n−m) )
        V(δ, n)    = B(δ, K, n) for δ < D,  V(D, n) = 0

    and τ = 1 + V(0, n). Sequoia's state is size, height and branches of a subtree; here the depth
    of the root replaces the height, because a depends on it, and D − δ is the remaining height. The
    algorithm takes O(D·K·N²) operations; each (δ, k) is one vectorised call.

    Attributes:
        values: [N + 1] V(0, n) for n = 0 … N.
        sizes: [D, K + 1, N + 1] the m that attains B(δ, k, n); the smallest one if there are
            several.
    """

    values: Floats
    sizes: Ints

    @classmethod
    def solve(cls, table: Floats, nodes: int) -> Self:
        """Return the solution for an acceptance table [D, K] and all tree sizes up to N."""
        depths, width = table.shape
        sizes = np.zeros((depths, width + 1, nodes + 1), np.int64)
        left = np.arange(nodes + 1)[:, None] - np.arange(1, nodes + 1)  # [n, m − 1]
        values = np.zeros(nodes + 1)
        for depth in reversed(range(depths)):
            below, values = values[:-1], np.zeros(nodes + 1)
            for k, a in enumerate(table[depth].tolist(), 1):
                gains = np.where(left >= 0, a * (1 + below) + values[left], -np.inf)
                best = gains.argmax(axis=1)
                gain = gains[np.arange(nodes + 1), best]
                taken = gain > values
                sizes[depth, k], values = (
                    np.where(taken, best + 1, 0),
                    np.where(taken, gain, values),
                )
        return cls(values, sizes)

    def tree(self, nodes: int) -> RankTree:
        """Return the best tree of at most `nodes` nodes.

        Nodes that are never accepted are left out.
        """
        return tuple(sorted(self._below((), nodes), key=lambda path: (len(path), path)))

    def _below(self, path: Ranks, nodes: int) -> Iterator[Ranks]:
        if len(path) == len(self.sizes):
            return
        for rank in reversed(range(self.sizes.shape[1] - 1)):
            if size := int(self.sizes[len(path), rank + 1, nodes]):
                nodes -= size
                yield (*path, rank)
                yield from self._below((*path, rank), size - 1)


def make_search(search: str, table: Floats, most: int) -> Callable[[int], RankTree]:
    """Return a function that returns the best tree for a number of nodes of at most `most`.

    `search` is `sequoia` or `greedy_tree`, and `table` [D, K] is the acceptance by depth and rank.
    """
    if search == "sequoia":
        return Forests.solve(table, most).tree
    order = greedy_tree(table, most)
    return lambda nodes: order[:nodes]


@dataclass(frozen=True)
class Shape:
    """A tree with its expected acceptance length τ and its speed-up.

    Attributes:
        paths: the nodes of the tree.
        tau: τ, the expected number of tokens per step under the product model.
        speedup: predicted speed-up over plain decoding of one sequence: τ · sₜ(1) / (Σ_layers
            sₐ(nodes with children) + sₜ(1 + n) + commit), with n nodes, seconds sₜ of a target pass
            and sₐ of a draft step.
    """

    paths: RankTree
    tau: float
    speedup: float

    @classmethod
    def of(cls, paths: RankTree, table: Floats, costs: Costs) -> Self:
        """Return a tree with its τ from an acceptance table [D, K] and its speed-up from costs."""
        tau = expected_tau(paths, table)
        return cls(paths, tau, tau * costs.token / step_seconds(paths, costs))

    @property
    def depth(self) -> int:
        """Return the depth of the deepest node."""
        return max(map(len, self.paths), default=0)


def step_seconds(paths: RankTree, costs: Costs) -> float:
    """Return the seconds of a step with a tree.

    The step has a draft step for every layer that has children, a target pass, and a commit.
    """
    layers = Counter(map(len, {path[:-1] for path in paths}))
    return costs.step(
        Work(tuple(layers[d] for d in sorted(layers)), 1 + len(paths), 1, costs.context)
    )


def fastest_tree(search: str, table: Floats, costs: Costs, most: int = MOST) -> Shape:
    """Return the tree with the most expected tokens per second, over all depths and sizes.

    Among equals the shallowest and then the smallest tree is returned.

    Args:
        search: see `make_search`.
        table: [D, K] a, the acceptance by depth and rank; some entry must be positive.
        costs: the costs of a step.
        most: N, the largest number of nodes.
    """
    shapes = []
    for depth in range(1, len(table) + 1):
        tree = make_search(search, table[:depth], most)
        shapes += [Shape.of(paths, table, costs) for n in range(1, most + 1) if (paths := tree(n))]
    return max(shapes, key=lambda shape: shape.speedup)
