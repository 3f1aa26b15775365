"""Grow draft trees on the device, without waiting for each layer on the host.

A plan describes how, with tensors that stay on the device. The tree is copied to the host
afterwards, in one transfer.

Shapes: R rows, N nodes a row so far (the root is the first), F nodes of the frontier, K candidates,
M nodes of a layer, V vocabulary. A node that does not exist, as its row has no room or nothing was
found there, has score −∞ and is padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftree.costs.curves import Costs
from draftree.kernels.philox import gumbel_on_device
from draftree.sampling.captured_sampling import LIKELIEST, Recorded
from draftree.sampling.keyed_noise import Keyed
from draftree.target.device_tree import Layers, Nodes, Unseen
from draftree.tree import Floats, Ints, Room, Tree
from draftree.utils.hardware import to_device

LEAST_DEPTH, LEAST_FRONTIER, LEAST_NODES = 3, 2, 8
"""What recent trees are taken to have had at least."""


@dataclass(frozen=True)
class Outlook:
    """Describe what is known of a step before anything is drafted.

    Attributes:
        costs: of the step.
        roots: the roots of the step.
        room: bounds of the trees.
        memory: of the policy.
        depth: of the deepest recent trees.
        nodes: of a sequence, in the largest recent trees.
        frontier: the most nodes of a sequence that a recent draft step was fed.
    """

    costs: Costs
    roots: Tree
    room: Room
    memory: Any
    depth: int
    nodes: int
    frontier: int

    @property
    def layers(self) -> int:
        """Return how many layers to draft: one more than the deepest recent trees have."""
        return max(self.depth + 1, LEAST_DEPTH)

    @property
    def wide(self) -> int:
        """Return how many nodes to expand in a layer: twice as many as recently.

        The number is a power of two, so that few kinds of passes are recorded.

        The number is a power of two, so that few kinds of passes are recorded.
        """
        return doubled(max(self.frontier, LEAST_FRONTIER))

    @property
    def large(self) -> int:
        """Return how many nodes to verify: twice as many as recently.

        With the root they are a power of two.
        """
        return doubled(max(self.nodes, LEAST_NODES)) - 1


def doubled(count: int) -> int:
    """Return the least power of two that is twice a number at least."""
    return 1 << (2 * count - 1).bit_length()


@dataclass(frozen=True)
class Plan:
    """Describe how trees grow on the device, where the host does not see them.

    Of equal candidates or nodes the lower numbers are chosen.

    Attributes:
        depth: layers.
        candidates: K, after each node of the frontier.
        layer: number of nodes of a layer, the best of its candidates by score; all by default.
        frontier: number of a layer's nodes that are expanded, the best first; all by default.
        confidence: whether the nodes to expand are the best by their own log q, and not by score.
        nodes: number of drafted nodes of a row to verify, the best of all by rank; all by default.
        first: the rows that are drafted for; all by default.
    """

    depth: int
    candidates: int
    layer: int | None = None
    frontier: int | None = None
    confidence: bool = False
    nodes: int | None = None
    first: Ints | None = field(default=None, compare=False)

    def drafted(self, depth: int) -> int:
        """Return the largest number of nodes of a row that are drafted down to a depth."""
        frontier, total = 1, 0
        for _ in range(depth):
            layer = (
                frontier * self.candidates
                if self.layer is None
                else min(self.layer, frontier * self.candidates)
            )
            frontier, total = (
                layer if self.frontier is None else min(self.frontier, layer),
                total + layer,
            )
        return total

    def known(self, layers: Layers) -> Floats:
        """Return the numbers [X] that its choices read as `Nodes.known`; they are not recorded."""
        return np.zeros(0)

    def values(self, own: Tensor, frontier: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return scores [R, F, K] of candidates, and the entropy [R, F] of their q.

        A score is −∞ for candidates that become no nodes.

        Args:
            own: [R, F, K] log q; −∞ where there is no candidate.
            frontier: [R, F] the candidates' parents.
            nodes: the draft trees without them.
        """
        above = nodes.score.gather(1, frontier)
        return above[..., None] + own, torch.zeros_like(above)

    def chosen(self, worth: Tensor, depth: int, nodes: Nodes) -> Tensor:
        """Return the places [R, M] of a layer's nodes among its candidates, in rising order.

        `worth` holds the candidates' scores [R, F · K].
        """
        return leading(worth, self.layer or worth.shape[1]).sort(dim=1).values

    def ask(self, added: int, depth: int, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes [R, F] of a layer that are expanded, best first.

        Two more results follow: whether each is really expanded, and the new `Nodes.known`.

        Args:
            added: M.
            depth: of the layer.
            nodes: the draft trees with the layer, whose nodes are the last.
        """
        score = nodes.score[:, -added:]
        if self.frontier is None:
            order = torch.arange(added, device=score.device).expand_as(score)
        else:
            order = leading(nodes.log_q[:, -added:] if self.confidence else score, self.frontier)
        return order, torch.ones_like(order, dtype=torch.bool), nodes.known

    def rank(self, nodes: Nodes) -> Tensor:
        """Return the ranks [R, N] by which the nodes to verify are chosen; −∞ for none.

        No node ranks above its parent.
        """
        return nodes.score


@final
@dataclass(frozen=True)
class Choices:
    """Choose a layer's nodes from logits, as a function of tensors alone.

    It is recorded with the layer's pass.

    No number is handed to `torch.where`, which would bring it to the device.

    Attributes:
        plan: the trees' shape.
        layer: the depth of the children.
        recorded: how tokens are chosen.
    """

    plan: Plan
    layer: int
    recorded: Recorded = LIKELIEST

    def __call__(self, logits: Tensor, nodes: Nodes, ids: Tensor | None) -> Nodes:
        """Return the draft trees with the chosen children; see `Choose`."""
        plan, count = self.plan, logits.shape[1]
        if self.layer == 1 and not self.recorded.setting.greedy:  # once for all passes of a step
            nodes = replace(nodes, noise=gumbel_on_device(nodes.places, self.recorded.vocab))
        frontier, asked = nodes.fed[:, -count:], nodes.asked[:, -count:]
        log_q, ids = self.recorded.log_q(logits, nodes.noise[:, :1], ids)
        found, own = leading_tokens(log_q, plan.candidates)
        found = found if ids is None else ids[found]
        if (missing := plan.candidates - found.shape[2]) > 0:  # a small vocabulary
            found, own = pad(found, (0, missing)), pad(own, (0, missing), value=-torch.inf)
        nothing = own.isnan().any(dim=2)
        own = own.masked_fill((nothing | ~asked)[..., None], -torch.inf)
        worth, entropy = plan.values(own, frontier, nodes)
        worth, own = worth.masked_fill(own == -torch.inf, -torch.inf).flatten(1), own.flatten(1)
        at = plan.chosen(worth, self.layer, nodes)  # [R, M] of the candidates [R, F · K]
        parent, worth = at // plan.candidates, worth.gather(1, at)
        parents = frontier.gather(1, parent)
        # Padding reads the root's token, lest what a broken drafter made of another one disturbs
        # its neighbours.
        tokens = torch.where(
            worth > -torch.inf, found.flatten(1).gather(1, at), nodes.tokens[:, :1]
        )
        before, added = nodes.tokens.shape[1], at.shape[1]
        every = torch.arange(before, device=at.device).expand(len(at), -1)
        itself = torch.eye(added, dtype=torch.bool, device=at.device).expand(len(at), -1, -1)
        lines = torch.cat((nodes.lines(parents, every), itself), dim=2)
        grown = replace(
            nodes,
            tokens=torch.cat((nodes.tokens, tokens), dim=1),
            score=torch.cat((nodes.score, worth), dim=1),
            log_q=torch.cat((nodes.log_q, own.gather(1, at)), dim=1),
            entropy=torch.cat((nodes.entropy, entropy.gather(1, parent)), dim=1),
            parents=torch.cat((nodes.parents, parents), dim=1),
            seen=torch.cat((pad(nodes.seen, (0, added)), lines), dim=1),
            broken=nodes.broken | (nothing & asked).any(dim=1, keepdim=True),
        )
        order, asks, known = plan.ask(added, self.layer, grown)
        asks = asks & (worth.gather(1, order) > -torch.inf) & (nodes.room > self.layer)
        fed, asked = (
            torch.cat((nodes.fed, before + order), dim=1),
            torch.cat((nodes.asked, asks), dim=1),
        )
        return replace(grown, fed=fed, asked=asked, known=known)


@final
@dataclass(frozen=True)
class Ranks:
    """Call a plan's `rank`; objects of equal plans are equal, as bound methods would not be."""

    plan: Plan

    def __call__(self, nodes: Nodes) -> Tensor:
        return self.plan.rank(nodes)


@torch.inference_mode()
def grow(
    plan: Plan,
    layers: Layers,
    roots: Ints,
    depth: Ints,
    starts: Ints,
    recorded: Recorded = LIKELIEST,
    keyed: Keyed | None = None,
    mark: Callable[[], None] = lambda: None,
) -> Unseen:
    """Return the draft trees that a plan makes of a drafter's logits.

    Nothing is copied to the device once the first pass has begun, because such a copy may wait for
    all earlier work.

    Args:
        plan: the shape of the trees.
        layers: the drafter's passes.
        roots: [R] tokens.
        depth: [R] the depth limit of each row's tree; −1 for rows without a root.
        starts: [R] the roots' slots in the target's cache.
        recorded: how tokens are chosen.
        keyed: the noise that tokens are drawn with, if they are drawn.
        mark: called after each layer has been queued.
    """
    bounds = to_device(np.stack((roots, depth, layers.begin, starts), axis=1), layers.device)
    known = to_device(plan.known(layers), layers.device)
    zeros = bounds.new_zeros((len(bounds), 0, recorded.vocab), dtype=torch.float64)
    nowhere = places = bounds.new_zeros(len(bounds), 0, 5)
    if keyed is not None and not recorded.setting.greedy:
        places = to_device(keyed.places(plan.depth + 1), layers.device)
    tokens, bounds = bounds[:, :1], bounds[:, 1:]
    room, zero = bounds[:, :1], torch.zeros_like(tokens, dtype=torch.float64)
    score = zero.masked_fill(room < 0, -torch.inf)
    itself = torch.ones_like(room, dtype=torch.bool)
    first = torch.zeros_like(room)
    broken = torch.zeros_like(itself)
    nodes = Nodes(
        tokens,
        score,
        zero,
        zero,
        first - 1,
        itself[..., None],
        first,
        room > 0,
        broken,
        known,
        zeros,
        bounds,
        places,
    )
    noise = zeros
    sizes = [1]
    frontiers = list[int]()
    count = 1
    deepest = min(plan.depth, int(depth.max()), layers.deepest or plan.depth)
    for layer in range(1, deepest + 1):
        if layer > 1:
            nodes = replace(nodes, noise=noise[:, layer - 1 : layer] if recorded.coupled else zeros)
        choices, before = Choices(plan, layer, recorded), nodes
        nodes = layers.first(nodes, choices) if layer == 1 else layers.below(nodes, count, choices)
        mark()
        if layer == 1:
            noise, nodes = nodes.noise, replace(nodes, places=nowhere)
        frontiers.append(count)
        sizes.append(nodes.tokens.shape[1] - before.tokens.shape[1])
        count = nodes.fed.shape[1] - before.fed.shape[1]
    size = nodes.tokens.shape[1]
    verified = size if plan.nodes is None else min(plan.nodes + 1, size)
    return Unseen(replace(nodes, noise=noise), sizes, frontiers, verified, Ranks(plan), recorded)


def leading(values: Tensor, k: int) -> Tensor:
    """Return the places [R, min(k, N)] of the k largest of values [R, N], in falling order.

    Of equal values the first comes first.
    """
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]


def leading_tokens(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens [R, F, K] of log_probs [R, F, V], and their log q in float64.

    They are in falling order, and of equals the lower id comes first. `torch.topk` does not define
    which of equals it takes, and a full sort is slow. So the k-th value is found first, then the
    tokens above it and the first of its equals.
    """
    k, vocab = min(k, log_probs.shape[-1]), log_probs.shape[-1]
    last = log_probs.topk(k, dim=-1).values[..., -1:]
    turn = torch.arange(vocab - 1, -1, -1, device=log_probs.device)
    above, equal = log_probs > last, log_probs == last
    rank = turn.expand_as(equal).masked_fill(~equal, -1).masked_fill(above, vocab)
    ids = rank.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = log_probs.gather(-1, ids).double().sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values
