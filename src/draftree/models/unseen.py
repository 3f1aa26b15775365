"""Trees that lie on the device alone: verified before the host has seen them, and told to it in one transfer.

Shapes: R rows, N nodes a row so far (the root is the first), M nodes fed to the drafter, F nodes of a frontier, n nodes to be
verified, V vocabulary. A node that does not exist, as its row has no room or nothing was found there, is padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from draftree.boundary.phases import in_phase
from draftree.models.cache import SlotCache
from draftree.models.capture import Given, Made, Then
from draftree.models.forward_batch import DeviceFeed, Laid
from draftree.models.target import Needs, Packing, Taps, Target, Verified
from draftree.tree import Floats, Ints, Tree

GIVEN = 2
"""The last tensors of a forest, which do not change as it grows."""


@dataclass(frozen=True)
class Nodes:
    """A forest that grows on the device; what a pass makes it grow by is a function of these tensors.

    Attributes:
        tokens: [R, N] ids.
        score: [R, N] log values; −∞ of padding.
        log_q: [R, N] of each token after its path.
        entropy: [R, N] of the distribution it comes from, where the policy reads it; else 0.
        parents: [R, N] the number of each node's parent; −1 of roots.
        seen: [R, N, N] whether a node sees another: its ancestors and itself.
        fed: [R, M] the nodes that the drafter has read and those that it reads next, which are the last.
        asked: [R, M] which of these the policy wants children of.
        broken: [R, 1] whether logits after one of them were no numbers.
        known: [X] float64, numbers of the policy's own.
        noise: [R, D, V] that tokens are drawn with after nodes of some depths: of the frontier for a layer, and of all for the
            target; D is 0 where none is needed.
        bounds: [R, 3] what the host has said of each row, see `room`, `begin` and `start`.
        places: [R, D, 5] the words by which the first layer's pass computes the noise of all depths; D is 0 in later ones, and
            where none is needed.
    """

    tokens: Tensor
    score: Tensor
    log_q: Tensor
    entropy: Tensor
    parents: Tensor
    seen: Tensor
    fed: Tensor
    asked: Tensor
    broken: Tensor
    known: Tensor
    noise: Tensor
    bounds: Tensor
    places: Tensor

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors by name, as passes are given them."""
        return {f"nodes {f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, given: Given) -> Self:
        """Return the forest that a pass was given."""
        return cls(*(given[f"nodes {f.name}"] for f in fields(cls)))

    @property
    def made(self) -> Made:
        """What changes as it grows."""
        return tuple(getattr(self, f.name) for f in fields(self)[:-GIVEN])

    def after(self, made: Made) -> Self:
        """Return the forest as a pass has made it."""
        return replace(self, **dict(zip([f.name for f in fields(self)[:-GIVEN]], made, strict=True)))

    @property
    def room(self) -> Tensor:
        """[R, 1] how deep each row's tree may be; −1 of rows without a root."""
        return self.bounds[:, :1]

    @property
    def begin(self) -> Tensor:
        """[R, 1] where the root lies in the drafter's cache, and at which position."""
        return self.bounds[:, 1:2]

    @property
    def start(self) -> Tensor:
        """[R, 1] where the root lies in the target's cache, and at which position."""
        return self.bounds[:, 2:]

    @property
    def depth(self) -> Tensor:
        """[R, N] distance from the root."""
        return self.seen.sum(dim=2) - 1

    def lines(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[R, a, b] which of some nodes [R, b] each of others [R, a] sees."""
        some = self.seen.gather(1, rows[..., None].expand(-1, -1, self.seen.shape[2]))
        return some.gather(2, columns[:, None].expand(-1, rows.shape[1], -1))

    def best(self, count: int, by: Tensor | None = None) -> Tensor:
        """[R, n] the root and the best nodes, so many in all, in the order of their numbers; behind them padding.

        Args:
            count: how many.
            by: [R, N] what they are ranked by, −∞ for none; the score by default.
        """
        by = self.score if by is None else by
        found = by.sort(dim=1, descending=True, stable=True).indices[:, :count]  # none is worth more than the root
        missing = by.gather(1, found) == -torch.inf
        return found.gather(1, (found + missing * by.shape[1]).argsort(dim=1))


Choose = Callable[[Tensor, Nodes, Tensor | None], Nodes]
"""choose(logits [R, F, V] after the last F nodes fed, forest, ids [V] of the tokens that these are of, or none for all) → the
forest with their children, of which some are to be fed next. It can be hashed, and tells passes apart."""


class Layers(ABC):
    """A drafter's passes of one step, layer by layer, over nodes that only the device knows; each chooses the next ones, too.

    Attributes:
        device: of the passes.
        begin: [R] where each row's root lies in the drafter's cache.
        deepest: the last layer that the drafter has anything to say of; None for no such bound.
        each_node: whether every node is fed in a pass, and not one list computed for all nodes of a row.
    """

    device: torch.device
    begin: Ints
    deepest: int | None = None
    each_node: bool = True

    @abstractmethod
    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        """Return the forest of bare roots with the first layer."""

    @abstractmethod
    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        """Return the forest with the layer below the `count` nodes that are to be fed next."""

    @abstractmethod
    def state(self, fed: Sequence[Ints]) -> Any:
        """Return the drafter's state once it is known which nodes were fed: of each pass the numbers [R, F], −1 for padding."""


@dataclass(frozen=True)
class Told:
    """A forest that was grown on the device, as the host is told of it.

    Attributes:
        tree: the nodes to be verified; its `whole` has all, in the order in which the host would have drafted them.
        fed: of each pass of the drafter the numbers [R, F] of the nodes that it was asked for, −1 for padding.
        finite: whether all of the drafter's logits were numbers.
    """

    tree: Tree
    fed: tuple[Ints, ...]
    finite: bool


@dataclass(frozen=True)
class Unseen:
    """A forest that was grown on the device.

    Attributes:
        nodes: all that were drafted.
        layers: how many nodes each layer has, the roots' among them.
        frontiers: how many nodes each pass of the drafter was fed.
        count: n, the root and the best of them that are verified; of a row with fewer, the last are padding.
        rank: what they are ranked by [R, N], −∞ where they are not verified; it can be hashed, and tells passes apart.
        asked: what the host will ask of logits [R, n, V], noise [R, D, V] and depths [R, n]: [R, 2n], the likeliest token
            after each node and the one that is drawn, −1 where there is none; equal ones do the same.
    """

    nodes: Nodes
    layers: Sequence[int]
    frontiers: Sequence[int]
    count: int
    rank: Callable[[Nodes], Tensor]
    asked: Callable[[Tensor, Tensor, Tensor], Tensor]

    def report(self, nodes: Nodes, best: Tensor) -> Tensor:
        """[R, …] float64, what the host has to be told, of the forest as a pass was given it and the verified nodes [R, n]."""
        rank = self.rank(nodes)
        verified = best.masked_fill(rank.gather(1, best) == -torch.inf, -1)
        told = (nodes.tokens, nodes.score, nodes.log_q, nodes.entropy, nodes.parents, nodes.fed, nodes.asked, nodes.broken)
        return torch.cat([each.double() for each in (*told, verified)], dim=1)

    def told(self, report: Floats) -> Told:
        """Return what was reported, as the host would have drafted it."""
        size, fed = self.nodes.tokens.shape[1], self.nodes.fed.shape[1]
        ends = np.cumsum([*(size,) * 5, fed, fed, 1])
        tokens, score, log_q, entropy, parents, read, asked, broken, verified = np.split(report, ends, axis=1)
        exists, number, firsts = score > -np.inf, np.full(score.shape, -1), np.cumsum([0, *self.layers])
        parts = [np.argwhere(exists[:, begin:end]) + np.array([0, begin]) for begin, end in pairwise(firsts.tolist())]
        at = tuple(np.concatenate(parts).T)
        depth = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        number[at] = np.arange(len(depth))
        above = np.where(depth > 0, number[at[0], parents[at].astype(np.int64)], -1)
        source, q_row = np.where(depth > 0, 0, -1), np.full(len(depth), -1)
        real = [np.ascontiguousarray(column[at]) for column in (log_q, score, entropy)]
        ids, row = tokens[at].astype(np.int64), at[0].copy()
        tree = Tree(ids, above, depth, row, real[0], real[1], source, real[2], np.arange(len(depth)), q_row)
        keep = np.zeros(score.shape, np.bool_)
        of, column = np.nonzero(verified >= 0)
        keep[of, verified[of, column].astype(np.int64)] = True
        kept = keep[at]
        numbers = np.where(asked > 0, np.take_along_axis(number, read.astype(np.int64), axis=1), -1)
        passes = np.split(numbers[:, : sum(self.frontiers)], np.cumsum(self.frontiers)[:-1], axis=1)
        return Told(tree if kept.all() else tree.select(kept), tuple(passes), not broken.any())


@torch.inference_mode()
@in_phase("verify")
def verified(
    target: Target, cache: SlotCache, grown: Unseen, needs: Needs, mark: Callable[[], None] = lambda: None
) -> tuple[Told, Verified]:
    """As `Target.verify`, one pass over a forest that the host does not know yet; that forest, and what came of the pass.

    The host waits for the device here, once, and nowhere else in the step. `mark` is called when the pass was asked for.
    """
    n, last, asked = grown.count, target.decoder.context - 1, grown.asked

    def make(given: Given) -> Laid:
        nodes = Nodes.of(given)
        best = nodes.best(n, grown.rank(nodes))
        places = (nodes.start + nodes.depth.gather(1, best)).clamp(max=last)  # padding may lie anywhere
        return nodes.tokens.gather(1, best), places, nodes.lines(best, best), nodes.start

    def made(results: Made, given: Given) -> Made:
        nodes = Nodes.of(given)
        best = nodes.best(n, grown.rank(nodes))
        answers = asked(results[0][:, :n], nodes.noise, nodes.depth.gather(1, best))
        return *results, torch.cat((grown.report(nodes, best), answers.double()), dim=1)

    feed = DeviceFeed(n, n, cache.lengths.copy(), grown.nodes.given, "verify", make)
    then = Then((n, asked, grown.rank), {}, made)
    out, *caught, report = target.decoder.forward_on_device(feed, cache, needs.hidden, then)
    mark()
    told_of = report.cpu().numpy()
    told = grown.told(told_of[:, : -2 * n])
    tree = told.tree
    rows = [tree.of_row(row) for row in range(cache.rows)]
    answers = np.empty((2, len(tree)), np.int64)
    for row, nodes in enumerate(rows):
        answers[:, nodes] = told_of[row, -2 * n :].reshape(2, n)[:, : len(nodes)]
    packed, positions = Packing(tree.row, rows, out.device), cache.lengths[tree.row] + tree.depth
    hidden = {layer: packed(h) for layer, h in zip(needs.hidden, caught, strict=True)}
    return told, Verified(
        packed(out), Taps(hidden, tree.row, positions, tree.tokens, cache), (answers[0].tolist(), answers[1].tolist())
    )
