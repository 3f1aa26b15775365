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

from draftree.costs.step_costs import Costs
from draftree.kernels.philox import gumbel_on_device
from draftree.sampling.captured_sampling import LIKELIEST, TokenChoice
from draftree.sampling.keyed_noise import Keyed
from draftree.target.device_tree import DeviceTree, Layers, Nodes
from draftree.tree import Floats, Ints, Tree, TreeBudget
from draftree.utils.hardware import to_device
from draftree.utils.padding import pad_end

LEAST_DEPTH, LEAST_FRONTIER, LEAST_NODES = 3, 2, 8
"""Lower bounds for the sizes of recent trees, from which the next tree is planned.

They bound the depth, the number of frontier nodes, and the number of nodes of a sequence.
"""


@dataclass(frozen=True)
class Outlook:
    """What is known of a step before anything is drafted.

    Attributes:
        costs: the costs of the step.
        roots: the roots of the step.
        room: the largest size of the trees.
        memory: the policy's memory.
        depth: depth of the deepest recent trees.
        nodes: number of nodes per sequence in the largest recent trees.
        frontier: largest number of nodes per sequence that a recent draft step read.
    """

    costs: Costs
    roots: Tree
    room: TreeBudget
    memory: Any
    depth: int
    nodes: int
    frontier: int

    @property
    def layers(self) -> int:
        """Return the number of layers to draft: one more than the deepest recent trees have."""
        return max(self.depth + 1, LEAST_DEPTH)

    @property
    def wide(self) -> int:
        """Return the number of nodes to expand per layer: about twice `frontier`.

        It is rounded up to a power of two, so that few kinds of passes are captured.
        """
        return double_to_power_of_two(max(self.frontier, LEAST_FRONTIER))

    @property
    def large(self) -> int:
        """Return the number of nodes to verify: about twice `nodes`.

        It is rounded so that the nodes and the root together are a power of two.
        """
        return double_to_power_of_two(max(self.nodes, LEAST_NODES)) - 1


def double_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least twice a number."""
    return 1 << (2 * count - 1).bit_length()


@dataclass(frozen=True)
class DeviceGrowth:
    """Describes how trees grow on the device, without the host.

    Of equal candidates or nodes, those with lower numbers are chosen.

    Attributes:
        depth: number of layers.
        candidates: K, the number of candidates after each expanded node.
        layer: largest number of nodes of a layer, the best candidates by score; by default all
            candidates.
        frontier: largest number of a layer's nodes that are expanded, the best first; by default
            all.
        confidence: whether the nodes to expand are chosen by their own log q instead of their
            score.
        nodes: largest number of drafted nodes per sequence that are verified, the best by `rank`;
            by default all.
        first: the slots of the sequences that are drafted for; by default all.
    """

    depth: int
    candidates: int
    layer: int | None = None
    frontier: int | None = None
    confidence: bool = False
    nodes: int | None = None
    first: Ints | None = field(default=None, compare=False)

    def max_drafted_nodes(self, depth: int) -> int:
        """Return the largest number of nodes of a sequence that are drafted down to a depth."""
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

    def choice_inputs(self, layers: Layers) -> Floats:
        """Return the policy's parameters [X] for one step; by default there are none.

        They become `Nodes.known`, where the other methods of the plan read them. They are inputs of
        the captured passes, so that they can change from step to step without a new capture.

        Args:
            layers: the drafter's passes.
        """
        return np.zeros(0)

    def values(self, own: Tensor, frontier: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return scores [R, F, K] of candidates, and the entropy [R, F] of their q.

        A candidate with the score −∞ does not become a node.

        Args:
            own: [R, F, K] log q; −∞ where there is no candidate.
            frontier: [R, F] the candidates' parents.
            nodes: the draft trees before the candidates are added.
        """
        above = nodes.score.gather(1, frontier)
        return above[..., None] + own, torch.zeros_like(above)

    def choose_nodes(self, worth: Tensor, depth: int, nodes: Nodes) -> Tensor:
        """Return the indices [R, M] of a layer's nodes among its candidates, in ascending order.

        `worth` holds the scores of the candidates, [R, F · K].
        """
        return top_indices(worth, self.layer or worth.shape[1]).sort(dim=1).values

    def ask(self, added: int, depth: int, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the nodes of a layer that the drafter expands next.

        Args:
            added: M, the number of nodes in the layer.
            depth: the depth of the layer.
            nodes: the draft trees including the layer, whose nodes come last.

        Returns:
            - [R, F] indices of the chosen nodes within the layer, best first. All nodes are chosen,
              in their order, if the policy has no bound (`self.frontier`).
            - [R, F] True for nodes to expand, False for entries that only fill the shape.
            - The new values that the policy keeps for the next layer (`Nodes.known`).
        """
        score = nodes.score[:, -added:]
        if self.frontier is None:
            order = torch.arange(added, device=score.device).expand_as(score)
        else:
            order = top_indices(
                nodes.log_q[:, -added:] if self.confidence else score, self.frontier
            )
        return order, torch.ones_like(order, dtype=torch.bool), nodes.known

    def rank(self, nodes: Nodes) -> Tensor:
        """Return the ranks [R, N] by which the nodes to verify are chosen; −∞ excludes a node.

        No node may have a higher rank than its parent.
        """
        return nodes.score


@final
@dataclass(frozen=True)
class GrowStep:
    """Chooses the nodes of a layer from logits, as a function of tensors only.

    It is captured together with the layer's pass. No Python number is passed to `torch.where`,
    because that would copy the number to the device.

    Attributes:
        plan: the shape of the trees.
        layer: the depth of the children.
        recorded: the choice of tokens that the captured pass was recorded with.
    """

    plan: DeviceGrowth
    layer: int
    recorded: TokenChoice = LIKELIEST

    def __call__(self, logits: Tensor, nodes: Nodes, ids: Tensor | None) -> Nodes:
        """Return the draft trees with the chosen children appended; see `Choose`."""
        plan, count = self.plan, logits.shape[1]
        if self.layer == 1 and not self.recorded.setting.greedy:  # once for all passes of a step
            nodes = replace(nodes, noise=gumbel_on_device(nodes.places, self.recorded.vocab))
        frontier, asked = nodes.fed[:, -count:], nodes.asked[:, -count:]
        log_q, ids = self.recorded.log_q(logits, nodes.noise[:, :1], ids)
        found, own = leading_tokens(log_q, plan.candidates)
        found = found if ids is None else ids[found]
        if (missing := plan.candidates - found.shape[2]) > 0:  # a small vocabulary
            found, own = pad_end(found, 2, missing), pad_end(own, 2, missing, -torch.inf)
        nothing = own.isnan().any(dim=2)
        own = own.masked_fill((nothing | ~asked)[..., None], -torch.inf)
        worth, entropy = plan.values(own, frontier, nodes)
        worth, own = worth.masked_fill(own == -torch.inf, -torch.inf).flatten(1), own.flatten(1)
        at = plan.choose_nodes(worth, self.layer, nodes)  # [R, M] of the candidates [R, F · K]
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
            seen=torch.cat((pad_end(nodes.seen, 2, added), lines), dim=1),
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
    """Calls the `rank` method of a plan.

    Objects with equal plans are equal, which bound methods are not.
    """

    plan: DeviceGrowth

    def __call__(self, nodes: Nodes) -> Tensor:
        return self.plan.rank(nodes)


@torch.inference_mode()
def grow(
    plan: DeviceGrowth,
    layers: Layers,
    roots: Ints,
    depth: Ints,
    starts: Ints,
    recorded: TokenChoice = LIKELIEST,
    keyed: Keyed | None = None,
    mark: Callable[[], None] = lambda: None,
) -> DeviceTree:
    """Build the draft trees of a plan from a drafter's logits.

    Nothing is copied to the device after the first pass has begun, because such a copy may wait for
    all earlier work.

    Args:
        plan: the shape of the trees.
        layers: the drafter's passes.
        roots: [R] token ids of the roots.
        depth: [R] the depth limit of each sequence's tree; −1 for slots without a root.
        starts: [R] the positions of the roots in the target's cache.
        recorded: the choice of tokens that the captured pass was recorded with.
        keyed: the keyed noise, if tokens are drawn.
        mark: called after each layer has been queued on the device.
    """
    bounds = to_device(np.stack((roots, depth, layers.begin, starts), axis=1), layers.device)
    known = to_device(plan.choice_inputs(layers), layers.device)
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
        choices, before = GrowStep(plan, layer, recorded), nodes
        nodes = layers.first(nodes, choices) if layer == 1 else layers.below(nodes, count, choices)
        mark()
        if layer == 1:
            noise, nodes = nodes.noise, replace(nodes, places=nowhere)
        frontiers.append(count)
        sizes.append(nodes.tokens.shape[1] - before.tokens.shape[1])
        count = nodes.fed.shape[1] - before.fed.shape[1]
    size = nodes.tokens.shape[1]
    verified = size if plan.nodes is None else min(plan.nodes + 1, size)
    return DeviceTree(
        replace(nodes, noise=noise), sizes, frontiers, verified, Ranks(plan), recorded
    )


def top_indices(values: Tensor, k: int) -> Tensor:
    """Return the indices [R, min(k, N)] of the k largest of values [R, N], in descending order.

    Equal values keep their order.
    """
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]


def leading_tokens(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens [R, F, K] of log_probs [R, F, V], and their log q in float64.

    They are in descending order; among equals the lower id comes first. `torch.topk` does not
    define which of several equal values it selects, and a full sort is slow. The function therefore
    finds the k-th largest value first. It then selects the tokens above that value, and the first
    tokens equal to it.
    """
    k, vocab = min(k, log_probs.shape[-1]), log_probs.shape[-1]
    last = log_probs.topk(k, dim=-1).values[..., -1:]
    turn = torch.arange(vocab - 1, -1, -1, device=log_probs.device)
    above, equal = log_probs > last, log_probs == last
    rank = turn.expand_as(equal).masked_fill(~equal, -1).masked_fill(above, vocab)
    ids = rank.topk(k, dim=-1).indices.sort(dim=-1).values
    values, order = log_probs.gather(-1, ids).double().sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values
