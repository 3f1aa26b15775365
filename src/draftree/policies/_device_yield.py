"""Grow the trees of `yield` on the device; the device version of `kernels/node_selection.py`.

The numbers of layers, of expanded nodes and of verified nodes are bounded before the step, by those
of recent steps. Within these bounds the device stops where a layer does not pay; everything after
that is padding.

Shapes: R rows, N nodes a row so far, F frontier nodes, K candidates, M nodes of a layer.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.kernels.cost_curve import Curve, between
from draftree.kernels.log_exp import exp, log
from draftree.kernels.scalar_log_exp import LARGEST_EXPONENT, UNIT_ROUNDING
from draftree.kernels.scalar_log_exp import log as log_of
from draftree.policies._device_growth import DeviceGrowth, top_indices
from draftree.target.device_tree import Layers, Nodes
from draftree.tree import Floats

SECONDS_LEFT_INDEX = 13
"""Index in `Nodes.known` of the seconds that may still be spent."""
TABLES = SECONDS_LEFT_INDEX + 1
"""Index in `Nodes.known` of the first table."""


@dataclass(frozen=True)
class Prices:
    """The costs of a step, and the learnt weights that predict acceptance.

    Attributes:
        numbers: [14] the weights that `yield` has learnt, then λ (the batch's present rate in
            tokens per second), then the seconds that the step may still spend.
        draft: [W] numbers of nodes per sequence, and seconds of a draft step over so many nodes.
        target: [W] numbers of tokens per sequence, and seconds of a target pass over so many
            tokens.
        rows: number of sequences that are drafted for.
    """

    numbers: Floats
    draft: Curve
    target: Curve
    rows: int


@final
@dataclass(frozen=True)
class YieldPlan(DeviceGrowth):
    """Grow a tree on the device from nodes whose expected accepted tokens pay for their time.

    Attributes:
        ahead: largest number of further nodes over which costs are averaged. The cost of a further
            node is the least of the mean costs of 1 … `ahead` further nodes.
        certain: smallest distance from 0 and 1 to which draft probabilities are clipped.
        probing: whether one node of each sequence is verified even if none is worth its cost, to
            measure whether drafting pays again.
        prices: the costs of the step.
    """

    ahead: int = 1
    certain: float = 0.0
    probing: bool = False
    prices: Prices | None = field(default=None, compare=False)

    def choice_inputs(self, layers: Layers) -> Floats:
        assert self.prices is not None
        assert self.frontier is not None
        rows, count = self.prices.rows, len(layers.begin)
        fed = np.arange(count * self.frontier + 1)
        draft = between(
            *self.prices.draft, (fed if layers.each_node else np.minimum(fed, rows)) / rows
        )
        target = between(
            *self.prices.target, 1 + np.arange(self._target_table_length(count)) / rows
        )
        return np.concatenate((self.prices.numbers, target, draft))

    def _target_table_length(self, rows: int) -> int:
        """Return the length of the table of target passes.

        Entry 0 of the table is the time of a pass over the roots alone.
        """
        return rows * self.max_drafted_nodes(self.depth) + self.ahead + 1

    def _tables(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return the seconds of target passes and of draft steps over 0, 1, … nodes.

        The nodes of all sequences are counted. For target passes they are the nodes in addition to
        the roots.
        """
        end = TABLES + self._target_table_length(len(nodes.tokens))
        return nodes.known[TABLES:end], nodes.known[end:]

    def values(self, own: Tensor, frontier: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        least, w = log_of(self.certain), nodes.known[:5]
        above, depth = nodes.score.gather(1, frontier), nodes.depth.gather(1, frontier)
        q, sure = _exp(own), own.clamp(min=least)
        rest = torch.ones_like(above)
        total = torch.zeros_like(above)
        together = torch.zeros_like(above)
        for k in range(own.shape[2]):  # in the order of the host, because sums depend on it
            rest, total = rest - q[..., k], total - q[..., k] * sure[..., k]
        rest = rest.clamp(min=self.certain)
        entropy = total - rest * log(rest)
        capped = q.clamp(max=1 - self.certain)
        x = (
            w[0]
            + w[1] * sure
            - w[2] * log(1 - capped)
            + (w[3] * entropy + w[4] * (depth + 1))[..., None]
        )
        likely = (1 / (1 + _exp(-x))).masked_fill(own == -torch.inf, 0)
        for k in range(own.shape[2]):
            together = together + likely[..., k]
        value = likely / together.clamp(min=1)[..., None]
        return above[..., None] + log(value).masked_fill(~(value > 0), -torch.inf), entropy

    def _worth_verifying(self, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """Choose how many drafted nodes to verify.

        Returns:
            The drafted nodes of all sequences in descending order of score, the number of the first
            of them that are verified, and the cost of verifying one more node, in tokens.
        """
        scores, (target, _) = nodes.score[:, 1:].flatten(), self._tables(nodes)
        rate, left = nodes.known[12], nodes.known[SECONDS_LEFT_INDEX].clamp(min=0)
        found = scores.sort(descending=True, stable=True)
        there = found.values > -torch.inf
        more = target[1 : len(scores) + 1] - target[0]
        best = _most(_sums(_exp(found.values)) - rate * more, there & (more <= left))
        ahead = torch.arange(1, self.ahead + 1, device=scores.device)
        further = ((target[best + ahead] - target.take(best)) / ahead).amin()
        return found.indices, best, rate * further

    def ask(self, added: int, depth: int, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        assert self.frontier is not None
        known, (target, draft), (_, _, least) = (
            nodes.known,
            self._tables(nodes),
            self._worth_verifying(nodes),
        )
        score = nodes.score[:, -added:].masked_fill(nodes.room <= depth, -torch.inf)
        order = top_indices(score, self.frontier)
        score = score.gather(1, order)
        x = known[5] + known[7] * score + known[8] * known[10]
        net = ((1 + known[11]) * (_exp(score) / (1 + _exp(-x))) - least).clamp(min=0)
        net = net.masked_fill(score == -torch.inf, -torch.inf)
        found = net.flatten().sort(descending=True, stable=True)
        seconds = draft[1 : net.numel() + 1]
        able = (found.values > -torch.inf) & (
            seconds <= known[SECONDS_LEFT_INDEX] - (target[1] - target[0])
        )
        best = _most(_sums(found.values.clamp(min=0)) - known[12] * seconds, able)
        rank = found.indices.argsort().view_as(net)
        spent = draft.take(best) * (
            best > 0
        )  # an index without dimensions would be read from the device
        known = torch.cat(
            (
                known[:SECONDS_LEFT_INDEX],
                known[SECONDS_LEFT_INDEX : SECONDS_LEFT_INDEX + 1] - spent,
                known[SECONDS_LEFT_INDEX + 1 :],
            )
        )
        rank, within = rank.sort(dim=1)
        return order.gather(1, within), rank < best, known

    def rank(self, nodes: Nodes) -> Tensor:
        order, best, _ = self._worth_verifying(nodes)
        keep = (order.argsort() < best).view_as(nodes.score[:, 1:])
        if self.probing:  # the best child of every root if no node is worth its verification
            children = nodes.score[:, 1:].masked_fill(nodes.depth[:, 1:] != 1, -torch.inf)
            place = torch.arange(children.shape[1], device=children.device)
            keep = keep | (
                (place == top_indices(children, 1)) & (children > -torch.inf) & (best == 0)
            )
        return torch.cat(
            (nodes.score[:, :1], nodes.score[:, 1:].masked_fill(~keep, -torch.inf)), dim=1
        )


def _exp(x: Tensor) -> Tensor:
    """Return eˣ with the bits of the host's `scalar_log_exp.exp`."""
    clipped: Tensor = exp(x.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT))
    return clipped.masked_fill(x < -LARGEST_EXPONENT, 0)


def _sums(values: Tensor) -> Tensor:
    """Round values as `scalar_log_exp.round_to_unit` does, and return their running sums.

    The sums of rounded values are exact, so their bits do not depend on the order in which a device
    adds.
    """
    return (values + UNIT_ROUNDING - UNIT_ROUNDING).cumsum(0)


def _most(net: Tensor, allowed: Tensor) -> Tensor:
    """Return 1 + the index of the largest allowed value of `net`, or 0 if it is not positive.

    The result is a tensor without dimensions. `net` holds the net value of the first 1, 2, … nodes.
    """
    most, at = net.masked_fill(~allowed, -torch.inf).max(dim=0)
    return (at + 1) * (most > 0)
