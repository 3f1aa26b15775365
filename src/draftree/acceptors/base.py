"""Base class of acceptors, which decide the accepted path of a verified tree."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from draftree.kernels.tree_verification import follow_choices
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Ints, Tree
from draftree.utils.validated_dataclass import Part


class Acceptor(Part, ABC):
    """A rule that accepts a path of a verified tree below each root.

    Attributes:
        exact_for: the kinds of draw for which the output has the target's distribution.
        survives_pruning: whether the rule is still exact if a policy drops nodes depending on the
            drawn tokens.
        keeps_text: whether the text equals that of plain decoding with the same seed, and does not
            only have the same distribution.
        greedy: whether the rule supports greedy decoding.
        sampling: whether the rule supports sampling.
        looks_ahead: whether the rule needs p after nodes that it may reject later. A processor that
            counts its calls would then count too many.
        chains: whether the rule reads only the first of several siblings, so that the others are
            useless.
        lossy: whether the rule may change the output distribution. Such a rule is never a default.
    """

    exact_for: ClassVar[frozenset[Draw]]
    survives_pruning: ClassVar[bool] = False
    keeps_text: ClassVar[bool] = False
    greedy: ClassVar[bool] = True
    sampling: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = False
    chains: ClassVar[bool] = False
    lossy: ClassVar[bool] = False

    @property
    def draw(self) -> Draw:
        """Return the kind of draw by which drafters must choose candidates.

        Retrieval drafters support only `point` draws, which are exact with every rule.
        """
        return Draw.POINT

    @abstractmethod
    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        """Accept a path below each root and choose the token after it.

        Args:
            tree: the verified tree.
            p: the target's distribution after each node, computed on demand.
            chance: the only source of randomness.
        """


def walk(tree: Tree, choose: Callable[[int], int]) -> AcceptResult:
    """Follow the target's tokens from each root as long as they are children.

    The first token that is not a child becomes the bonus token.

    Args:
        tree: the verified tree.
        choose: returns the target's token after a node.
    """
    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    children = {
        pairs[child]: child for child in range(len(tree) - 1, tree.roots - 1, -1)
    }  # among equal siblings the first is kept

    def step(node: int) -> tuple[int | None, int]:
        token = choose(node)
        return children.get((node, token)), token

    return descend(tree, step)


def follow(tree: Tree, chosen: Ints) -> AcceptResult:
    """Return the result of `walk`, given the target's token [N] after every node."""
    nodes, ends, bonus = follow_choices(tree.parents, tree.tokens, chosen)
    paths, start = [], 1  # after the first root
    for end in ends.tolist():
        paths.append(nodes[start:end])
        start = end + 1
    return AcceptResult(tuple(paths), bonus)


def descend(tree: Tree, step: Callable[[int], tuple[int | None, int]]) -> AcceptResult:
    """Descend from each root to accepted children until no child is accepted.

    Args:
        tree: the verified tree.
        step: maps a node to its accepted child and the child's token, or to None and the bonus
            token.
    """
    paths: list[Ints] = []
    bonus: list[int] = []
    for root in range(tree.roots):
        path, (child, token) = [root], step(root)
        while child is not None:
            path.append(child)
            child, token = step(child)
        paths.append(np.array(path[1:], np.int64))
        bonus.append(token)
    return AcceptResult(tuple(paths), np.array(bonus, np.int64))


UNCOUPLED = frozenset(Draw) - {Draw.COUPLED}
"""The kinds of draw for which rejection rules are exact.

They are the draws that do not depend on the noise that decides about acceptance.
"""


def proposal(tree: Tree, node: int, vocab: int) -> Tensor:
    """Return the q [V] from which a node was drawn, in float64 on the host.

    If a node is not a random sample, its own token has probability 1. Therefore the `point`
    candidates of retrieval drafters are exact with every rule.
    """
    if tree.q is not None and tree.q_row[node] >= 0:
        return tree.q[int(tree.q_row[node])].cpu().double()
    certain = torch.zeros(vocab, dtype=torch.float64)
    certain[int(tree.tokens[node])] = 1
    return certain


def find_accepted_sibling(
    tree: Tree, siblings: Ints, node: int, p: Tensor, chance: RandomSource, replacement: bool = True
) -> tuple[int | None, int]:
    """Test siblings in turn by rejection sampling; return the first accepted one and its token.

    If none is accepted, return None and a token drawn from the residual distribution.

    Args:
        tree: the verified tree.
        siblings: the children to test, in draw order.
        node: the parent of the siblings.
        p: [V] the target's distribution after the parent.
        chance: the randomness of each test and of the bonus token.
        replacement: whether the siblings were drawn with replacement.
    """
    gone, place = list[int](), (int(tree.row[node]), int(tree.depth[node]))
    for index, child in enumerate(siblings.tolist()):
        token, q = int(tree.tokens[child]), proposal(tree, child, len(p))
        if gone and not replacement:
            q = q.index_fill(0, torch.tensor(gone), 0)  # a copy: the siblings share the tree's own
            if (left := q.sum()) == 0:  # by rounding: later siblings follow from the earlier ones
                break
            q = q / left
        if chance.bernoulli(min(1.0, ratio(p, q, token)), *place, index):
            return child, token
        p = residual(p, q)
        gone.append(token)
    return None, chance.categorical(p, *place)


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    """Return p(x)/q(x) for a token x.

    It is 0 if p(x) is 0, and infinite if q(x) was rounded to 0.
    """
    if p[token] == 0:
        return 0.0
    return float(p[token] / q[token]) if q[token] > 0 else float("inf")


def residual(p: Tensor, q: Tensor, keep: float = 1.0) -> Tensor:
    """Return max(0, keep · p − q) [V], normalised: the residual distribution of rejection sampling.

    If the sum is 0, which only rounding causes, return p itself.

    Args:
        p: [V] the target's probabilities.
        q: [V] the drafter's probabilities.
        keep: a factor of p; 1 for the usual residual.
    """
    rest = (keep * p - q).clamp(min=0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p
