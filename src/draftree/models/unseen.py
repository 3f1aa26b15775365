"""Trees that lie on the device alone: verified before the host has seen them, and told to it in one transfer.

Shapes: R rows, F nodes of a frontier, n nodes a row, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.boundary.phases import in_phase
from draftree.models.cache import SlotCache
from draftree.models.feed import DeviceFeed
from draftree.models.target import Needs, Packing, Taps, Target, Verified
from draftree.tree import Floats, Ints, Tree


class Layers(ABC):
    """A drafter's passes of one step, layer by layer, over nodes that only the device knows.

    Attributes:
        device: of the passes.
        ids: [V] of the tokens that logits are of; all by default.
    """

    device: torch.device
    ids: Tensor | None = None

    @abstractmethod
    def first(self) -> Tensor:
        """[R, 1, V] logits after each root; anything in rows without one."""

    @abstractmethod
    def below(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """[R, F, V] logits after the frontier of the next layer.

        Args:
            tokens: [R, F] its ids.
            seen: [R, F, m] which of all nodes fed in this step each one sees, the frontier's own being the last.
        """

    @abstractmethod
    def state(self, fed: Sequence[Ints]) -> Any:
        """The drafter's state once it is known which nodes were fed: of each pass the numbers [R, F], −1 for padding."""


@dataclass(frozen=True)
class Unseen:
    """A forest that was grown on the device; each row has the same number of nodes, of which the last may be padding.

    Attributes:
        tokens: [R, n] ids, of the root first, then in the order of the host's tree.
        depth: [R, n] distance from the root.
        seen: [R, n, n] whether a node sees another: its ancestors and itself.
        report: [R, …] float64, what the host has to be told to know the tree.
        told: makes of that report the tree that the host would have grown.
        asked: what the host will ask of logits [R, n, V]: a whole number [R, n] for each node.
    """

    tokens: Tensor
    depth: Tensor
    seen: Tensor
    report: Tensor
    told: Callable[[Floats], Tree]
    asked: Callable[[Tensor], Tensor]


@torch.inference_mode()
@in_phase("verify")
def verified(target: Target, cache: SlotCache, grown: Unseen, needs: Needs) -> tuple[Tree, Verified]:
    """As `Target.verify`, one pass over a forest that the host does not know yet; that forest, and what came of the pass.

    The host waits for the device here, once, and nowhere else in the step.
    """
    width, begin = grown.tokens.shape[1], torch.from_numpy(cache.lengths).to(cache.device, non_blocking=True)
    places = (begin[:, None] + grown.depth).clamp(max=target.decoder.context - 1)  # padding may lie anywhere
    feed = DeviceFeed(grown.tokens, places, cache.lengths.copy(), grown.seen, places, begin)
    out, caught = target.decoder.read(cache, feed, layers=needs.hidden)
    report = torch.cat((grown.report, grown.tokens.double(), grown.asked(out).double()), dim=1).cpu().numpy()
    tree = grown.told(report[:, : -2 * width])
    rows = [tree.of_row(row) for row in range(cache.rows)]
    tokens, answers = np.empty(len(tree), np.int64), np.empty(len(tree), np.int64)
    for row, nodes in enumerate(rows):
        tokens[nodes] = report[row, -2 * width :][: len(nodes)]
        answers[nodes] = report[row, -width:][: len(nodes)]
    assert np.array_equal(tokens, tree.tokens), "the device has grown another tree than the host"
    packed, positions = Packing(tree.row, rows, out.device), cache.lengths[tree.row] + tree.depth
    taps = Taps({layer: packed(h) for layer, h in caught.items()}, tree.row, positions, tree.tokens, cache)
    return tree, Verified(packed(out), taps, answers.tolist())
