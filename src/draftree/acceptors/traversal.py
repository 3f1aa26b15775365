"""Traversal verification: judge a sampled tree from its leaves to its root (Weng et al. 2025).

When a tree is judged from the root down, a draft is lost with its parent. Here a path is judged as
a whole, the deepest first. A refused path leaves its mass to its siblings and its parent, so that a
prefix of the path may still be kept. On a chain it is block verification.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.acceptors.base import UNCOUPLED, Acceptor, proposal, ratio, residual
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Ints, Tree


@final
@dataclass(frozen=True)
class Traversal(Acceptor):
    """Exact in distribution for trees whose siblings are drawn from q, without replacement, and kept whatever was drawn.

    The guarantee is weaker than that of `match`: for the same seed, the text depends on the
    drafter, the policy and the other sequences of the batch.
    """

    exact_for: ClassVar[frozenset[Draw]] = UNCOUPLED - {Draw.WITH_REPLACEMENT}
    greedy: ClassVar[bool] = False
    draw: ClassVar[Draw] = Draw.WITHOUT_REPLACEMENT
    looks_ahead: ClassVar[bool] = True

    @override
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        found = [_accept_path(tree, root, 1.0, p, chance) for root in range(tree.roots)]
        paths = tuple(np.array(nodes[1:], np.int64) for nodes, _ in found)
        return AcceptResult(paths, np.array([token for _, token in found], np.int64))


def _accept_path(
    tree: Tree, node: int, weight: float, p: Distributions, chance: RandomSource
) -> tuple[list[int], int]:
    """Return the accepted path that starts at a node, and the token after it.

    Let w be the probability that the node is accepted, and p the target's distribution after the
    node. Let q be the distribution from which a child x was drawn. The children are tested first,
    in sibling order, each with all nodes below it. A child is tested with min(1, w p(x) / q(x)) as
    its own w. If a child's path is accepted, the result is the node and this path. If the child is
    rejected, p becomes norm(max(0, w p − q)), and w becomes R / (R + 1 − w), where R is the mass of
    max(0, w p − q). If all children are rejected, the node itself is accepted with probability w; a
    root is always accepted. The token after an accepted node is then drawn from p. If the node is
    rejected, the path is empty.

    Args:
        tree: the verified tree.
        node: the node to test.
        weight: w before the children are tested.
        p: returns the target's distribution after a node.
        chance: the source of the random draws for each test and for the token.
    """
    if weight == 0:  # then nothing below it can be kept either
        return [], -1
    here, gone = p(node), list[int]()
    for child in tree.children(node).tolist():
        q, token = _sibling_distribution(tree, child, len(here), gone), int(tree.tokens[child])
        if q is None:
            break
        path, bonus = _accept_path(tree, child, min(1.0, weight * ratio(here, q, token)), p, chance)
        if path:
            return [node, *path], bonus
        rest = float((weight * here - q).clamp(min=0).sum())
        here, weight = (
            residual(here, q, weight),
            rest / (rest + 1 - weight) if rest > 0 else float(weight == 1),
        )
        gone.append(token)
    row, depth = int(tree.row[node]), int(tree.depth[node])
    if tree.parents[node] >= 0 and not chance.bernoulli(weight, row, depth, _place(tree, node)):
        return [], -1
    return [node], chance.categorical(here, row, depth)


def _sibling_distribution(tree: Tree, child: int, vocab: int, gone: list[int]) -> Tensor | None:
    """Return the q [V] of a child with the tokens of its earlier siblings excluded.

    Return None if rounding has left no probability.
    """
    q = proposal(tree, child, vocab)
    if not gone:
        return q
    q = q.index_fill(0, torch.tensor(gone), 0)  # a copy: the siblings share the tree's own
    left = q.sum()
    return q / left if left > 0 else None


def _place(tree: Tree, node: int) -> int:
    """Return a node's index among the nodes of its sequence and depth.

    Each index has its own random draw.
    """
    same: Ints = np.flatnonzero((tree.row == tree.row[node]) & (tree.depth == tree.depth[node]))
    return int(np.searchsorted(same, node))
