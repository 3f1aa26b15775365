"""Draft trees that are built and verified on the device, and copied to the host once per step.

Shapes: R rows, N nodes a row so far (the root is the first), M nodes fed to the drafter, F nodes of
a frontier, n nodes to be verified, V vocabulary. A node that does not exist, because its row has no
budget or nothing was found there, is padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.kernels.node_table import NodeTable
from draftree.models.forward_batch import DeviceBatch
from draftree.models.graph_capture import Epilogue, InputTensors, OutputTensors
from draftree.models.kv_cache import SlotCache
from draftree.target.target import (
    HiddenStates,
    HiddenStateSpec,
    Packing,
    Target,
    VerificationResult,
)
from draftree.tree import Floats, Ints, Tree
from draftree.utils.padding import pad_end
from draftree.utils.profiler import in_phase

NUM_CONSTANT_FIELDS = 2
"""Number of fields at the end of `Nodes` that do not change as the trees grow."""


@dataclass(frozen=True)
class Nodes:
    """Draft trees that grow on the device; these tensors are inputs and outputs of each pass.

    Attributes:
        tokens: [R, N] ids.
        score: [R, N] log values; −∞ for padding. A node's value is its estimated probability of
            acceptance.
        log_q: [R, N] log draft probability of each token after its path.
        entropy: [R, N] entropy of the distribution that proposed each token, if the policy reads
            it; else 0.
        parents: [R, N] the index of each node's parent; −1 for roots.
        seen: [R, N, N] whether node i sees node j, which is an ancestor or i itself.
        fed: [R, M] the nodes that the drafter has read, followed by those that it reads next.
        asked: [R, M] whether the policy requests children of each of these nodes.
        broken: [R, 1] whether any of the drafter's logits were not finite.
        known: [X] parameters of the policy, in float64.
        noise: [R, D, V] the sampling noise by depth: only the frontier's depth in a draft pass, all
            depths for the target. D is 0 if no noise is needed.
        bounds: [R, 3] bounds of each sequence that the host sets; see `room`, `begin` and `start`.
        places: [R, D, 5] the random counters from which the first pass computes the noise of all
            depths. D is 0 in later passes, and if no noise is needed.
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
    def as_inputs(self) -> dict[str, Tensor]:
        """Return the tensors as inputs of a pass, by name."""
        return {f"nodes {f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, given: InputTensors) -> Self:
        """Return the draft trees whose tensors are among a pass's named inputs.

        This is the inverse of `as_inputs`.
        """
        return cls(*(given[f"nodes {f.name}"] for f in fields(cls)))

    @property
    def growing_tensors(self) -> OutputTensors:
        """Return the tensors that change as the trees grow."""
        return tuple(getattr(self, f.name) for f in fields(self)[:-NUM_CONSTANT_FIELDS])

    def after(self, made: OutputTensors) -> Self:
        """Return the draft trees with the outputs of a pass in place of the old tensors."""
        return replace(
            self,
            **dict(zip([f.name for f in fields(self)[:-NUM_CONSTANT_FIELDS]], made, strict=True)),
        )

    @property
    def room(self) -> Tensor:
        """Return [R, 1] the largest depth of each tree; −1 for a sequence without a root."""
        return self.bounds[:, :1]

    @property
    def begin(self) -> Tensor:
        """Return [R, 1] the root's slot in the drafter's cache, which is also its position."""
        return self.bounds[:, 1:2]

    @property
    def start(self) -> Tensor:
        """Return [R, 1] the root's slot in the target's cache, which is also its position."""
        return self.bounds[:, 2:]

    @property
    def depth(self) -> Tensor:
        """Return [R, N] the distance of each node from the root."""
        return self.seen.sum(dim=2) - 1

    def lines(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return a part [R, a, b] of the visibility matrix.

        Args:
            rows: [R, a] the nodes that see.
            columns: [R, b] the nodes that may be seen.
        """
        some = self.seen.gather(1, rows[..., None].expand(-1, -1, self.seen.shape[2]))
        return some.gather(2, columns[:, None].expand(-1, rows.shape[1], -1))

    def best(self, count: int, by: Tensor | None = None) -> Tensor:
        """Return the best nodes [R, n] of each tree with its root, by number, then padding.

        Args:
            count: n, the number of nodes.
            by: [R, N] the ranking, −∞ for excluded nodes; the score by default.
        """
        by = self.score if by is None else by
        found = by.sort(dim=1, descending=True, stable=True).indices[
            :, :count
        ]  # the root has the largest value
        missing = by.gather(1, found) == -torch.inf
        return found.gather(1, (found + missing * by.shape[1]).argsort(dim=1))


BatchTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs of a pass that are computed on the device.

They are ids [R, n]; positions [R, m] of scratch slots, the last n of which belong to the tokens;
whether token i sees scratch slot j, [R, n, m]; and the first scratch slot [R, 1]. All tokens see
the slots before that one.
"""


@dataclass(frozen=True)
class NodeBatch(DeviceBatch):
    """Hold the nodes of draft trees that one forward pass reads.

    Attributes:
        count: n, the number of tokens of each sequence.
        make: computes `BatchTensors` from the batch's tensors `given`; see `DeviceBatch`.
    """

    count: int
    make: Callable[[Mapping[str, Tensor]], BatchTensors]

    @override
    def inputs(
        self, given: Mapping[str, Tensor], slots: int, dtype: torch.dtype, window: int | None
    ) -> dict[str, Tensor]:
        ids, places, visible, first = self.make(given)
        deep, more = visible.shape[2], self.width - self.count
        slot = torch.arange(slots, device=ids.device)
        place = slot - first  # [R, S] each slot's scratch slot number; negative before them
        inside = place.clamp(0, deep - 1)
        seen = (
            visible.gather(2, inside[:, None].expand(-1, self.count, -1)) & (place < deep)[:, None]
            | (place < 0)[:, None]
        )
        masks, positions = {"full": seen}, places[:, -self.count :]
        if window is not None:
            keys = torch.where(place < 0, slot, places.gather(1, inside))
            masks["sliding"] = seen & (keys[:, None] > positions[..., None] - window)
        hidden = {
            name: pad_end(~each, 1, more)[:, None] for name, each in masks.items()
        }  # padding sees all
        nothing, lowest = torch.zeros((), dtype=dtype, device=ids.device), torch.finfo(dtype).min
        return {
            "tokens": pad_end(ids, 1, more),
            "positions": pad_end(positions, 1, more),
            "slots": first + deep - self.count + torch.arange(self.width, device=ids.device),
            **{name: nothing.masked_fill(each, lowest) for name, each in hidden.items()},
        }


Choose = Callable[[Tensor, Nodes, Tensor | None], Nodes]
"""A function choose(logits [R, F, V], nodes, ids) that adds children to draft trees.

The logits belong to the last F nodes that were fed. Their columns are the tokens ids [V], or all
tokens if ids is None. The function returns the trees with the children, and marks the children that
are fed next. It must be hashable, because recorded passes are keyed by it.
"""


class Layers(ABC):
    """Run a drafter's passes of one step, layer by layer, over nodes that only the device knows.

    Each pass also chooses the nodes of the next one.

    Attributes:
        device: the device of the passes.
        begin: [R] the slot of each sequence's root in the drafter's cache.
        deepest: the last layer for which the drafter has proposals; None for no bound.
        each_node: whether a pass is fed every frontier node. Otherwise it computes one distribution
            per sequence, which all nodes of that depth share.
    """

    device: torch.device
    begin: Ints
    deepest: int | None = None
    each_node: bool = True

    @abstractmethod
    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        """Return the trees with their first layer; the given trees consist of roots only."""

    @abstractmethod
    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        """Return the trees with another layer, below the last `count` nodes of `nodes.fed`.

        The drafter computes logits after these nodes, and `choose` adds their children to the
        trees.
        """

    @abstractmethod
    def state(self, fed: Sequence[Ints]) -> Any:
        """Return the drafter's state after the step.

        Args:
            fed: for each pass, the numbers [R, F] of the nodes that were fed, −1 for padding.
        """


@dataclass(frozen=True)
class DeviceReport:
    """Draft trees that were grown on the device, in the form that the host uses.

    Attributes:
        tree: the nodes to be verified. Its `whole` has all drafted nodes, in the order in which the
            host would have drafted them.
        fed: for each pass of the drafter, the numbers [R, F] of the expanded nodes, −1 for padding.
        finite: whether all of the drafter's logits were finite.
    """

    tree: Tree
    fed: tuple[Ints, ...]
    finite: bool


@dataclass(frozen=True)
class DeviceTree:
    """Draft trees that were grown on the device and that the host does not know yet.

    Attributes:
        nodes: all drafted nodes.
        layers: number of nodes in each layer, including the layer of the roots.
        frontiers: number of nodes that each pass of the drafter was fed.
        count: n, the number of nodes to verify, root included; smaller trees are padded at the end.
        rank: returns the ranking [R, N], −∞ for nodes that are not verified. It must be hashable,
            because recorded passes are keyed by it.
        asked: maps logits [R, n, V], noise [R, D, V] and depths [R, n] to [R, 2n]: the likeliest
            token after each node, then the sampled token after each node, −1 for none. Functions
            that compare equal must compute the same.
    """

    nodes: Nodes
    layers: Sequence[int]
    frontiers: Sequence[int]
    count: int
    rank: Callable[[Nodes], Tensor]
    asked: Callable[[Tensor, Tensor, Tensor], Tensor]

    def report(self, nodes: Nodes, best: Tensor) -> Tensor:
        """Return all results that the host needs, as one float64 tensor [R, …].

        Args:
            nodes: the draft trees as an input of the pass.
            best: [R, n] the verified nodes.
        """
        rank = self.rank(nodes)
        verified = best.masked_fill(rank.gather(1, best) == -torch.inf, -1)
        told = (
            nodes.tokens,
            nodes.score,
            nodes.log_q,
            nodes.entropy,
            nodes.parents,
            nodes.fed,
            nodes.asked,
            nodes.broken,
        )
        return torch.cat([each.double() for each in (*told, verified)], dim=1)

    def to_host(self, report: Floats) -> DeviceReport:
        """Convert a report to trees in the order in which the host would have drafted them."""
        size, fed = self.nodes.tokens.shape[1], self.nodes.fed.shape[1]
        ends = np.cumsum([*(size,) * 5, fed, fed, 1])
        tokens, score, log_q, entropy, parents, read, asked, broken, verified = np.split(
            report, ends, axis=1
        )
        exists = score > -np.inf
        number = np.full(score.shape, -1)
        firsts = np.cumsum([0, *self.layers])
        parts = [
            np.argwhere(exists[:, begin:end]) + np.array([0, begin])
            for begin, end in pairwise(firsts.tolist())
        ]
        at = tuple(np.concatenate(parts).T)
        depth = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        number[at] = np.arange(len(depth))
        above = np.where(depth > 0, number[at[0], parents[at].astype(np.int64)], -1)
        source, q_row = np.where(depth > 0, 0, -1), np.full(len(depth), -1)
        real = [np.ascontiguousarray(column[at]) for column in (log_q, score, entropy)]
        ids, row = tokens[at].astype(np.int64), at[0].copy()
        numbers = np.arange(len(depth))
        tree = Tree(
            NodeTable(ids, above, depth, row, real[0], real[1], source, real[2], numbers, q_row)
        )
        keep = np.zeros(score.shape, np.bool_)
        of, column = np.nonzero(verified >= 0)
        keep[of, verified[of, column].astype(np.int64)] = True
        kept = keep[at]
        fed_numbers = np.where(
            asked > 0, np.take_along_axis(number, read.astype(np.int64), axis=1), -1
        )
        passes = np.split(
            fed_numbers[:, : sum(self.frontiers)], np.cumsum(self.frontiers)[:-1], axis=1
        )
        return DeviceReport(
            tree if kept.all() else tree.select(kept), tuple(passes), not broken.any()
        )


@torch.inference_mode()
@in_phase("verify")
def verify_device_tree(
    target: Target,
    cache: SlotCache,
    grown: DeviceTree,
    needs: HiddenStateSpec,
    mark: Callable[[], None] = lambda: None,
) -> tuple[DeviceReport, VerificationResult]:
    """Verify draft trees that only the device knows; return the trees and the result.

    As in `Target.verify`, this is one pass. The host waits for the device only once in the step,
    which is here. `mark` is called when the pass has been launched.
    """
    n = grown.count
    last = target.decoder.context - 1
    asked = grown.asked

    def make(given: InputTensors) -> BatchTensors:
        nodes = Nodes.of(given)
        best = nodes.best(n, grown.rank(nodes))
        places = (nodes.start + nodes.depth.gather(1, best)).clamp(
            max=last
        )  # the position of padding is arbitrary
        return nodes.tokens.gather(1, best), places, nodes.lines(best, best), nodes.start

    def append_report(results: OutputTensors, given: InputTensors) -> OutputTensors:
        nodes = Nodes.of(given)
        best = nodes.best(n, grown.rank(nodes))
        answers = asked(results[0][:, :n], nodes.noise, nodes.depth.gather(1, best))
        return *results, torch.cat((grown.report(nodes, best), answers.double()), dim=1)

    batch = NodeBatch(n, cache.lengths.copy(), grown.nodes.as_inputs, "verify", n, make)
    then = Epilogue((n, asked, grown.rank), {}, append_report)
    out, *caught, report = target.decoder.forward_on_device(batch, cache, needs.hidden, then)
    mark()
    told_of = report.cpu().numpy()
    told = grown.to_host(told_of[:, : -2 * n])
    tree = told.tree
    rows = [tree.of_row(row) for row in range(cache.rows)]
    answers = np.empty((2, len(tree)), np.int64)
    for row, nodes in enumerate(rows):
        answers[:, nodes] = told_of[row, -2 * n :].reshape(2, n)[:, : len(nodes)]
    packed, positions = Packing(tree.row, rows, out.device), cache.lengths[tree.row] + tree.depth
    hidden = {layer: packed(h) for layer, h in zip(needs.hidden, caught, strict=True)}
    return told, VerificationResult(
        packed(out),
        HiddenStates(hidden, tree.row, positions, tree.tokens, cache),
        (answers[0].tolist(), answers[1].tolist()),
    )
