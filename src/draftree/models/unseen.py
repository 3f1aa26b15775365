"""Trees that lie on the device alone: verified before the host has seen them, and told to it in one transfer.

Shapes: R rows, N nodes a row so far (the root is the first), M nodes fed to the drafter, F nodes of a frontier, n nodes to be
verified, V vocabulary. A node that does not exist, as its row has no room or nothing was found there, is padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True)
class Nodes:
    """A forest that grows on the device; what a pass makes it grow by is a function of these tensors.

    Attributes:
        tokens: [R, N] ids.
        score: [R, N] log values; −∞ of padding.
        seen: [R, N, N] whether a node sees another: its ancestors and itself.
        fed: [R, M] the nodes that the drafter has read and those that it reads next, which are the last.
        report: [R, …] float64, what the host has to be told.
        bounds: [R, 3] what the host has said of each row, see `room`, `begin` and `start`.
    """

    tokens: Tensor
    score: Tensor
    seen: Tensor
    fed: Tensor
    report: Tensor
    bounds: Tensor

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors by name, as passes are given them."""
        return {f"nodes {f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, given: Given) -> Self:
        """The forest that a pass was given."""
        return cls(*(given[f"nodes {f.name}"] for f in fields(cls)))

    @property
    def made(self) -> Made:
        """What changes as it grows."""
        return self.tokens, self.score, self.seen, self.fed, self.report

    def after(self, made: Made) -> Self:
        """The forest as a pass has made it."""
        return replace(self, **dict(zip(("tokens", "score", "seen", "fed", "report"), made, strict=True)))

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

    def best(self, count: int) -> Tensor:
        """[R, n] the root and the best nodes by score, so many in all, in the order of their numbers; behind them padding."""
        found = self.score.sort(dim=1, descending=True, stable=True).indices[:, :count]  # none is worth more than the root
        missing = self.score.gather(1, found) == -torch.inf
        return found.gather(1, (found + missing * self.score.shape[1]).argsort(dim=1))


Choose = Callable[[Tensor, Nodes, Tensor | None], Nodes]
"""choose(logits [R, F, V] after the last F nodes fed, forest, ids [V] of the tokens that these are of, or none for all) → the
forest with their children, of which some are to be fed next. It can be hashed, and tells passes apart."""


class Layers(ABC):
    """A drafter's passes of one step, layer by layer, over nodes that only the device knows; each chooses the next ones, too.

    Attributes:
        device: of the passes.
        begin: [R] where each row's root lies in the drafter's cache.
    """

    device: torch.device
    begin: Ints

    @abstractmethod
    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        """The forest of bare roots with the first layer."""

    @abstractmethod
    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        """The forest with the layer below the `count` nodes that are to be fed next."""

    @abstractmethod
    def state(self, fed: Sequence[Ints]) -> Any:
        """The drafter's state once it is known which nodes were fed: of each pass the numbers [R, F], −1 for padding."""


@dataclass(frozen=True)
class Unseen:
    """A forest that was grown on the device.

    Attributes:
        nodes: all that were drafted.
        count: n, the root and the best of them by score that are verified; of a row with fewer, the last are padding.
        told: makes of the report the tree that the host would have grown.
        asked: what the host will ask of logits [R, n, V]: a whole number [R, n] for each node.
    """

    nodes: Nodes
    count: int
    told: Callable[[Floats], Tree]
    asked: Callable[[Tensor], Tensor]


@torch.inference_mode()
@in_phase("verify")
def verified(target: Target, cache: SlotCache, grown: Unseen, needs: Needs) -> tuple[Tree, Verified]:
    """As `Target.verify`, one pass over a forest that the host does not know yet; that forest, and what came of the pass.

    The host waits for the device here, once, and nowhere else in the step.
    """
    n, last, asked = grown.count, target.decoder.context - 1, grown.asked

    def make(given: Given) -> Laid:
        nodes = Nodes.of(given)
        best = nodes.best(n)
        places = (nodes.start + nodes.depth.gather(1, best)).clamp(max=last)  # padding may lie anywhere
        return nodes.tokens.gather(1, best), places, nodes.lines(best, best), nodes.start

    def made(results: Made, given: Given) -> Made:
        nodes = Nodes.of(given)
        tokens, answers = nodes.tokens.gather(1, nodes.best(n)), asked(results[0][:, :n])
        return *results, torch.cat((nodes.report, tokens.double(), answers.double()), dim=1)

    feed = DeviceFeed(n, n, cache.lengths.copy(), grown.nodes.given, "verify", make)
    then = Then((n, asked), {}, made)
    out, *caught, told = target.decoder.forward_on_device(feed, cache, needs.hidden, then)
    report = told.cpu().numpy()
    tree = grown.told(report[:, : -2 * n])
    rows = [tree.of_row(row) for row in range(cache.rows)]
    tokens, answers = np.empty(len(tree), np.int64), np.empty(len(tree), np.int64)
    for row, nodes in enumerate(rows):
        tokens[nodes] = report[row, -2 * n :][: len(nodes)]
        answers[nodes] = report[row, -n:][: len(nodes)]
    assert np.array_equal(tokens, tree.tokens), "the device has grown another tree than the host"
    packed, positions = Packing(tree.row, rows, out.device), cache.lengths[tree.row] + tree.depth
    hidden = {layer: packed(h) for layer, h in zip(needs.hidden, caught, strict=True)}
    return tree, Verified(packed(out), Taps(hidden, tree.row, positions, tree.tokens, cache), answers.tolist())
