"""Grows trees of known shape on the device that drafts, so that the host waits for no layer of them.

What a `Plan` says is done here with tensors that stay where they are. What the drafter found is reported later on, in one
piece, and the policy itself then makes the host's tree of it: both are the same.

Shapes: R rows, N nodes a row so far (the root is the first), F nodes of the frontier, K candidates, M nodes of a layer, V
vocabulary. A node that does not exist, as its row has no room or nothing was found there, has score −∞ and is padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftree.models.unseen import Layers, Unseen
from draftree.policies.base import Plan
from draftree.sampling.distributions import likeliest
from draftree.tree import Candidates, Floats, Ints, Tree


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
class _Nodes:
    """The nodes of a forest that grows on the device.

    Attributes:
        tokens: [R, N] ids.
        score: [R, N] log values; −∞ of padding.
        depth: [R, N] distance from the root.
        seen: [R, N, N] whether a node sees another: its ancestors and itself.
    """

    tokens: Tensor
    score: Tensor
    depth: Tensor
    seen: Tensor

    def with_layer(self, tokens: Tensor, score: Tensor, parents: Tensor) -> Self:
        """The forest with children [R, M] of some nodes [R, M] of the last layer but one."""
        added = tokens.shape[1]
        itself = torch.eye(added, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        lines = torch.cat((_rows(self.seen, parents), itself), dim=2)
        return type(self)(
            torch.cat((self.tokens, tokens), dim=1),
            torch.cat((self.score, score), dim=1),
            torch.cat((self.depth, self.depth.gather(1, parents) + 1), dim=1),
            torch.cat((pad(self.seen, (0, added)), lines), dim=1),
        )


@torch.inference_mode()
def grow(
    plan: Plan, layers: Layers, log_q: Callable[[Tensor], Tensor], roots: Ints, depth: Ints, told: Callable[[Told], Tree]
) -> Unseen:
    """The forest that a plan makes of a drafter's logits.

    Nothing is brought to the device once the first pass has begun: such a copy may wait for all that was asked before.

    Args:
        plan: the tree's shape.
        layers: the drafter's passes.
        log_q: of logits [R, F, V].
        roots: [R] tokens.
        depth: [R] how deep each row's tree may be; −1 for rows without a root.
        told: makes the host's tree of what is reported.
    """
    deepest = min(plan.depth, int(depth.max()))
    tokens, room = (torch.from_numpy(each)[:, None].to(layers.device) for each in (roots, depth))
    nothing, itself = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    nodes = _Nodes(tokens, torch.where(room < 0, -torch.inf, nothing.double()), nothing, itself[:, None])
    frontier = fed = nothing
    logits, report, shapes = layers.first(), list[Tensor](), list[tuple[int, int]]()
    for layer in range(1, deepest + 1):
        found, own = leading_tokens(log_q(logits), plan.candidates)
        found, k = found if layers.ids is None else layers.ids[found], found.shape[2]
        above = nodes.score.gather(1, frontier)
        there = (above > -torch.inf) & (room >= layer)
        report += [there.double(), found.flatten(1).double(), own.flatten(1)]
        shapes.append((found.shape[1], k))
        own = torch.where((there & ~own.isnan().any(dim=2))[..., None], own, -torch.inf)
        worth = (above[..., None] + own).flatten(1)
        at = leading(worth, plan.layer or worth.shape[1]).sort(dim=1).values  # [R, M] of the candidates [R, F · K]
        before, parents = nodes.tokens.shape[1], frontier.gather(1, at // k)
        # Padding reads the root's token, lest what a broken drafter made of another one disturbs its neighbours.
        ids = torch.where(worth > -torch.inf, found.flatten(1), tokens).gather(1, at)
        nodes = nodes.with_layer(ids, worth.gather(1, at), parents)
        rank = own.flatten(1).gather(1, at) if plan.confidence else worth.gather(1, at)
        order = at.argsort(dim=1) if plan.frontier is None else leading(rank, plan.frontier)  # ascending: 0 … M − 1
        frontier = before + order
        if layer < deepest:
            fed = torch.cat((fed, frontier), dim=1)
            logits = layers.below(nodes.tokens.gather(1, frontier), _columns(_rows(nodes.seen, frontier), fed))
    chosen = _chosen(nodes.score, plan.nodes)
    return Unseen(
        nodes.tokens.gather(1, chosen), nodes.depth.gather(1, chosen), _columns(_rows(nodes.seen, chosen), chosen),
        torch.cat(report, dim=1), lambda columns: told(Told(columns, shapes)), likeliest,
    )  # fmt: skip


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
    rank = torch.where(log_probs > last, vocab, torch.where(log_probs == last, turn, -1))
    ids = rank.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = log_probs.gather(-1, ids).double().sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values


def _chosen(score: Tensor, nodes: int | None) -> Tensor:
    """[R, n] the root and the best nodes by score [R, N], in the order of their numbers; behind them padding."""
    best = leading(score, score.shape[1] if nodes is None else nodes + 1)  # the root is worth most, and the first
    missing = score.gather(1, best) == -torch.inf
    return best.gather(1, (best + missing * score.shape[1]).argsort(dim=1))


def _rows(seen: Tensor, which: Tensor) -> Tensor:
    """[R, m, N] some rows [R, m] of a matrix [R, N, N]."""
    return seen.gather(1, which[..., None].expand(-1, -1, seen.shape[2]))


def _columns(seen: Tensor, which: Tensor) -> Tensor:
    """[R, N, m] some columns [R, m] of a matrix [R, N, N]."""
    return seen.gather(2, which[:, None].expand(-1, seen.shape[1], -1))
