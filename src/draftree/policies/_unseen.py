"""Grows trees of known shape on the device that drafts, so that the host waits for no layer of them.

What a `Plan` says is done here with tensors that stay where they are. What the drafter found is reported later on, in one
piece, and the policy itself then makes the host's tree of it: both are the same.

Shapes: R rows, N nodes a row so far (the root is the first), F nodes of the frontier, K candidates, M nodes of a layer, V
vocabulary. A node that does not exist, as its row has no room or nothing was found there, has score −∞ and is padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftree.models.unseen import Layers, Nodes, Unseen
from draftree.policies.base import Plan
from draftree.sampling.distributions import likeliest
from draftree.sampling.drawing import Drawing
from draftree.tree import Candidates, Floats, Ints, Tree

NOBODY = np.zeros(0, np.int64)


@final
class Told:
    """A drafter's candidates as they were reported, layer by layer.

    Args:
        report: [R, …] of all layers.
        shapes: F and K of each.

    Attributes:
        fed: of each layer asked for, the frontier's numbers [R, F]; −1 for padding.
    """

    def __init__(self, report: Floats, shapes: Sequence[tuple[int, int]]) -> None:
        self._report, self._shapes, self.fed = report, list(shapes), list[Ints]()

    def __call__(self, frontier: Ints) -> Candidates:
        """What was found after the next frontier [F of all rows], which is the one that the device has drafted below."""
        nodes, k = self._shapes.pop(0)
        ends = np.cumsum([nodes, nodes * k, nodes * k])
        exists, tokens, log_q, self._report = np.split(self._report, ends, axis=1)
        there, shape = exists > 0, (len(exists), nodes, k)
        numbers = np.full(there.shape, -1)
        numbers[there] = frontier
        self.fed.append(numbers)
        found, values = tokens.reshape(shape)[there].astype(np.int64), log_q.reshape(shape)[there]
        nothing = np.isnan(values).any(axis=1, keepdims=True)
        return Candidates(np.where(nothing, 0, found), np.where(nothing, -np.inf, values), finite=not nothing.any())


@final
@dataclass(frozen=True)
class Choices:
    """What a plan makes of the logits after a layer: a function of tensors alone, which is recorded with the layer's pass.

    No number is handed to `torch.where`, which would bring it to the device.

    Attributes:
        plan: the trees' shape.
        layer: the depth of the children.
    """

    plan: Plan
    layer: int

    def __call__(self, logits: Tensor, nodes: Nodes, ids: Tensor | None) -> Nodes:
        """The forest with the children chosen, see `Choose`."""
        plan, frontier = self.plan, nodes.fed[:, -logits.shape[1] :]
        found, own = leading_tokens(Drawing().log_q(logits, NOBODY), plan.candidates)
        found, k = found if ids is None else ids[found], found.shape[2]
        above = nodes.score.gather(1, frontier)
        there = (above > -torch.inf) & (nodes.room >= self.layer)
        report = torch.cat((nodes.report, there.double(), found.flatten(1).double(), own.flatten(1)), dim=1)
        own = own.masked_fill(~there[..., None] | own.isnan().any(dim=2, keepdim=True), -torch.inf).flatten(1)
        worth = (above[..., None] + own.view_as(found)).flatten(1)
        at = leading(worth, plan.layer or worth.shape[1]).sort(dim=1).values  # [R, M] of the candidates [R, F · K]
        own, worth, parents = own.gather(1, at), worth.gather(1, at), frontier.gather(1, at // k)
        # Padding reads the root's token, lest what a broken drafter made of another one disturbs its neighbours.
        tokens = torch.where(worth > -torch.inf, found.flatten(1).gather(1, at), nodes.tokens[:, :1])
        before, added = nodes.tokens.shape[1], at.shape[1]
        if plan.frontier is None:
            order = torch.arange(added, device=at.device).expand_as(at)
        else:
            order = leading(own if plan.confidence else worth, plan.frontier)
        every = torch.arange(before, device=at.device).expand(len(at), -1)
        itself = torch.eye(added, dtype=torch.bool, device=at.device).expand(len(at), -1, -1)
        lines = torch.cat((nodes.lines(parents, every), itself), dim=2)
        return replace(
            nodes,
            tokens=torch.cat((nodes.tokens, tokens), dim=1),
            score=torch.cat((nodes.score, worth), dim=1),
            seen=torch.cat((pad(nodes.seen, (0, added)), lines), dim=1),
            fed=torch.cat((nodes.fed, before + order), dim=1),
            report=report,
        )


@torch.inference_mode()
def grow(plan: Plan, layers: Layers, roots: Ints, depth: Ints, starts: Ints, told: Callable[[Told], Tree]) -> Unseen:
    """The forest that a plan makes of a drafter's logits.

    Nothing is brought to the device once the first pass has begun: such a copy may wait for all that was asked before.

    Args:
        plan: the trees' shape.
        layers: the drafter's passes.
        roots: [R] tokens.
        depth: [R] how deep each row's tree may be; −1 for rows without a root.
        starts: [R] the roots' slots in the target's cache.
        told: makes the host's tree of what is reported.
    """
    known = torch.from_numpy(np.stack((roots, depth, layers.begin, starts), axis=1)).to(layers.device)
    tokens, bounds = known[:, :1], known[:, 1:]
    score = torch.zeros_like(tokens, dtype=torch.float64).masked_fill(bounds[:, :1] < 0, -torch.inf)
    itself = torch.ones_like(tokens, dtype=torch.bool)[..., None]
    nodes = Nodes(tokens, score, itself, torch.zeros_like(tokens), score[:, :0], bounds)
    shapes, count = list[tuple[int, int]](), 1
    for layer in range(1, min(plan.depth, int(depth.max())) + 1):
        choices, before = Choices(plan, layer), nodes
        nodes = layers.first(nodes, choices) if layer == 1 else layers.below(nodes, count, choices)
        shapes.append((count, ((nodes.report.shape[1] - before.report.shape[1]) // count - 1) // 2))
        count = nodes.fed.shape[1] - before.fed.shape[1]
    size = nodes.tokens.shape[1]
    verified = size if plan.nodes is None else min(plan.nodes + 1, size)
    return Unseen(nodes, verified, lambda report: told(Told(report, shapes)), likeliest)


def leading(values: Tensor, k: int) -> Tensor:
    """[R, min(k, N)] the places of the k largest of values [R, N], falling; the first of equals first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]


def leading_tokens(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens [R, F, K] of log_probs [R, F, V], falling, of equals the lower id first; and their log q, float64.

    `torch.topk` leaves open which of equals it takes, and a whole sort takes long. So the k-th value is asked for, then those
    above it and the first of its equals.
    """
    k, vocab = min(k, log_probs.shape[-1]), log_probs.shape[-1]
    last = log_probs.topk(k, dim=-1).values[..., -1:]
    turn = torch.arange(vocab - 1, -1, -1, device=log_probs.device)
    above, equal = log_probs > last, log_probs == last
    rank = turn.expand_as(equal).masked_fill(~equal, -1).masked_fill(above, vocab)
    ids = rank.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = log_probs.gather(-1, ids).double().sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values
