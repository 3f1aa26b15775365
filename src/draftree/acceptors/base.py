"""The contract of an acceptor, which keeps of a verified tree exactly what the target would have produced."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from draftree.boundary.knobs import Part
from draftree.kernels.verification import followed
from draftree.sampling.distributions import Distributions
from draftree.sampling.noise import Chance
from draftree.tree import Draw, Ints, Tree, Verdict


class Acceptor(Part, ABC):
    """A rule that walks a verified tree from each root.

    Attributes:
        exact_for: the draws under which its output has the target's distribution.
        survives_pruning: whether that also holds where a policy drops nodes by what was drawn.
        keeps_text: whether the text is the very one that plain decoding writes for the same seed, and not only of the same
            distribution.
        greedy: whether it serves greedy decoding.
        sampling: whether it serves sampling.
        looks_ahead: whether it asks for p after nodes that it then does not accept, so that a processor that keeps count of its
            calls would count wrong.
        chains: whether it looks only at the first of siblings, so that all others are drafted in vain.
        lossy: whether it may change the output at all; such a rule is never a default.
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
        """The kind of draw it asks for; drafters that search have none but `point` ones, which are exact with every rule."""
        return Draw.POINT

    @abstractmethod
    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        """Accept a path below each root and choose the token after it.

        Args:
            tree: the verified tree.
            p: the target's distribution after each node, computed where it is asked for.
            chance: the only randomness.
        """


def walk(tree: Tree, choose: Callable[[int], int]) -> Verdict:
    """From each root, follows the chosen token while it is a child; the first that is not is the bonus.

    Args:
        tree: the verified tree.
        choose: the target's token after a node.
    """
    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    children = {pairs[child]: child for child in range(len(tree) - 1, tree.roots - 1, -1)}  # of equal siblings the first stays

    def step(node: int) -> tuple[int | None, int]:
        token = choose(node)
        return children.get((node, token)), token

    return descend(tree, step)


def follow(tree: Tree, chosen: Ints) -> Verdict:
    """Return what `walk` does where the target's token [N] after every node is known."""
    nodes, ends, bonus = followed(tree.parents, tree.tokens, chosen)
    paths, start = [], 1  # after the first root
    for end in ends.tolist():
        paths.append(nodes[start:end])
        start = end + 1
    return Verdict(tuple(paths), bonus)


def descend(tree: Tree, step: Callable[[int], tuple[int | None, int]]) -> Verdict:
    """From each root, goes from a node to the child that is accepted, until none is.

    Args:
        tree: the verified tree.
        step: a node → the child accepted below it and its token, or None and the bonus.
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
    return Verdict(tuple(paths), np.array(bonus, np.int64))


UNCOUPLED = frozenset(Draw) - {Draw.COUPLED}
"""The draws that rules by rejection are exact for: those that know nothing of the noise that judges them."""


def proposal(tree: Tree, node: int, vocab: int) -> Tensor:
    """[V] the q that a node was drawn from, float64 on the host; all of it on its own token where it is no draw.

    A token that is the same whatever is drawn comes with probability 1: so with every rule the `point` candidates of a drafter
    that searches are exact, too.
    """
    if tree.q is not None and tree.q_row[node] >= 0:
        return tree.q[int(tree.q_row[node])].cpu().double()
    certain = torch.zeros(vocab, dtype=torch.float64)
    certain[int(tree.tokens[node])] = 1
    return certain


def judged(
    tree: Tree, siblings: Ints, node: int, p: Tensor, chance: Chance, replacement: bool = True
) -> tuple[int | None, int]:
    """Return a step by rejection: the first sibling that is kept and its token, or None and a token of what is left of p.

    Args:
        tree: the verified tree.
        siblings: the children that are judged, in draw order.
        node: their parent.
        p: [V] the target's distribution after it.
        chance: of each judgement, and of the bonus.
        replacement: whether the siblings were drawn with replacement.
    """
    gone, place = list[int](), (int(tree.row[node]), int(tree.depth[node]))
    for index, child in enumerate(siblings.tolist()):
        token, q = int(tree.tokens[child]), proposal(tree, child, len(p))
        if gone and not replacement:
            q = q.index_fill(0, torch.tensor(gone), 0)  # a copy: the siblings share the tree's own
            if (left := q.sum()) == 0:  # by rounding; what siblings come next is known from those before, so it is no draw
                break
            q = q / left
        if chance.bernoulli(min(1.0, ratio(p, q, token)), *place, index):
            return child, token
        p = residual(p, q)
        gone.append(token)
    return None, chance.categorical(p, *place)


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    """p(x)/q(x), 0 where p(x) is; a q(x) so small that it is rounded to 0 counts as less than any p(x)."""
    if p[token] == 0:
        return 0.0
    return float(p[token] / q[token]) if q[token] > 0 else float("inf")


def residual(p: Tensor, q: Tensor, keep: float = 1.0) -> Tensor:
    """[V] norm(max(0, keep · p − q)): what is left of p once as much of it as possible has come from q.

    p itself where nothing is left, which has probability 0 and comes up by rounding alone.
    """
    rest = (keep * p - q).clamp(min=0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p
