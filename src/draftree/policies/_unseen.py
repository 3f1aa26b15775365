"""Grows trees of known shape on the device that drafts, so that the host waits for no layer of them.

What a `Plan` says is done here with tensors that stay where they are. What the drafter found is reported later on, in one
piece, and the policy itself then makes the host's tree of it: both are the same.

Shapes: R rows, N nodes a row so far (the root is the first), F nodes of the frontier, K candidates, M nodes of a layer, V
vocabulary. A node that does not exist, as its row has no room or nothing was found there, has score −∞ and is padding.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
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


@torch.inference_mode()
def grow(
    plan: Plan,
    layers: Layers,
    log_q: Callable[[Tensor], Tensor],
    roots: Ints,
    depth: Ints,
    told: Callable[[Told], Tree],
    device: torch.device,
) -> Unseen:
    """The forest that a plan makes of a drafter's logits.

    Args:
        plan: the tree's shape.
        layers: the drafter's passes.
        log_q: of logits [R, F, V].
        roots: [R] tokens.
        depth: [R] how deep each row's tree may be; −1 for rows without a root.
        told: makes the host's tree of what is reported.
        device: of the tensors.
    """
    on: Callable[[NDArray[Any]], Tensor] = lambda values: torch.from_numpy(values).to(device)
    tokens, score = on(roots[:, None]), on(np.where(depth < 0, -np.inf, 0.0)[:, None])
    frontier = fed = torch.zeros_like(tokens)
    seen, sizes, report, shapes = (
        torch.ones_like(tokens, dtype=torch.bool)[:, None],
        [1],
        list[Tensor](),
        list[tuple[int, int]](),
    )
    deepest, logits = min(plan.depth, int(depth.max())), layers.first()
    every = torch.arange(plan.drafted(deepest), device=device)
    for layer in range(1, deepest + 1):
        found, values = leading_tokens(log_q(logits), plan.candidates)
        shapes.append((found.shape[1], found.shape[2]))
        ids = found if layers.ids is None else layers.ids[found]
        above = score.gather(1, frontier)
        there = (above > -torch.inf) & on(depth >= layer)[:, None]
        report += [there.double(), ids.flatten(1).double(), values.flatten(1)]
        there = there & ~values.isnan().any(-1)
        values = torch.where(there[..., None], values, -torch.inf)
        # From here on by candidate [R, F · K], and by node [R, M].
        worth, own = (above[..., None] + values).flatten(1), values.flatten(1)
        at = leading(worth, plan.layer or worth.shape[1]).sort(dim=1).values
        worth, own, parent = worth.gather(1, at), own.gather(1, at), frontier.gather(1, at // found.shape[2])
        before, added = tokens.shape[1], at.shape[1]
        tokens, score = torch.cat((tokens, ids.flatten(1).gather(1, at)), 1), torch.cat((score, worth), 1)
        lines = torch.eye(added, dtype=torch.bool, device=device).expand(len(seen), -1, -1)
        seen = torch.cat((pad(seen, (0, added)), torch.cat((_rows(seen, parent), lines), 2)), 1)
        sizes.append(added)
        rank = own if plan.confidence else worth
        frontier = before + leading(rank, plan.frontier) if plan.frontier else before + every[:added].expand_as(at)
        if layer < deepest:
            fed = torch.cat((fed, frontier), 1)
            logits = layers.below(tokens.gather(1, frontier), _columns(_rows(seen, frontier), fed))
    chosen = _chosen(score, plan.nodes)
    depths = on(np.repeat(np.arange(len(sizes)), sizes))[chosen]
    return Unseen(
        tokens.gather(1, chosen), depths, _columns(_rows(seen, chosen), chosen), torch.cat(report, 1),
        lambda columns: told(Told(columns, shapes)), likeliest,
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
