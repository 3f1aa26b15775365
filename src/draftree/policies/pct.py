"""PCT, the pruned candidate tree: expand a node only where that saves time (EDD + PCT, section 3.2).

A node's value is the product of draft confidences along its path, which estimates its probability
of acceptance. By eq. 5 a further draft step below it costs sₐ and saves value · sₜ, so nodes with
value < sₐ/sₜ are not expanded; leaves below a threshold are not worth their place in the
verification.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.policies._device_growth import (
    DeviceGrowth,
    Outlook,
    double_to_power_of_two,
    top_indices,
)
from draftree.policies.base import Layered, append, log, path_log_q
from draftree.target.device_tree import Layers, Nodes
from draftree.tree import Candidates, Floats, Ints, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class PCTPlan(DeviceGrowth):
    """Plans trees that keep nodes above one value, and expand nodes above a larger value.

    Attributes:
        least: [3] the smallest log value of a node, the smallest log q of a node, and the smallest
            log value of a node that is expanded.
    """

    least: Floats = field(default_factory=lambda: np.full(3, -np.inf), compare=False)

    @override
    def choice_inputs(self, layers: Layers) -> Floats:
        return self.least

    @override
    def values(self, own: Tensor, frontier: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        worth, entropy = super().values(own, frontier, nodes)
        return worth.masked_fill(
            (worth < nodes.known[0]) | (own < nodes.known[1]), -torch.inf
        ), entropy

    @override
    def ask(self, added: int, depth: int, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        assert self.frontier is not None
        assert self.nodes is not None
        score = nodes.score[:, -added:]
        order = top_indices(score, self.frontier).sort(dim=1).values
        drafted = (nodes.score[:, 1:] > -torch.inf).sum(dim=1, keepdim=True)
        return (
            order,
            (score.gather(1, order) >= nodes.known[2]) & (drafted < self.nodes),
            nodes.known,
        )


@final
@dataclass(frozen=True)
class PCT(Layered):
    """Pruned candidate tree.

    Attributes:
        width: number of candidates after each expanded node (5 in the paper).
        max_depth: largest depth of a node (10 in the paper).
        leaf_threshold: the smallest value of a leaf (0.01 in the paper); leaves below it are
            removed.
        ratio: sₐ/sₜ, the time of a draft step divided by that of a target pass. By default it is
            measured on this machine, for the context length and batch size of the step. The paper
            has one average for each of its two pairs of models, 0.037 and 0.028 (section 4.1).
        gain: the condition for expanding a node. If true, its value must be at least `ratio`, which
            is the expected time gain of eq. 5. If false, its own confidence must be at least
            `ratio`. A confidence is never below the value, so that trees are larger without `gain`.
        own: the smallest confidence of a node; nodes below it are removed with all their
            descendants. 0 removes none.

    In the paper's ablation "w/o expected time gain" (section 4.3.2, Table 3) "the expected time
    gain is not estimated, and confidence score is directly used to prune the candidate tree". This
    corresponds to `ratio=0`, with which all remaining nodes are expanded, and a threshold `own`
    that the paper does not give. Leaves are still removed by their value; turning that off is
    another ablation (`leaf_threshold=0`).
    """

    width: int = knob(5, least=1)
    max_depth: int = knob(10, least=0, deepest=True)
    leaf_threshold: float = knob(0.01, least=0, most=1)
    ratio: float | None = knob(None, least=0)
    gain: bool = True
    own: float = knob(0.0, least=0, most=1)

    @property
    @override
    def reads_costs(self) -> bool:
        return self.ratio is None

    @property
    @override
    def candidates(self) -> int:
        return self.width

    def plan_step(self, outlook: Outlook) -> DeviceGrowth | None:
        """Return a plan by which trees grow on the device, with the thresholds of this policy.

        The plan bounds the number of nodes that a layer keeps and the number that are expanded. The
        values of a layer sum to at most 1. So at most 1/t nodes of a layer reach a threshold t.

        Return None if `gain` is false, if `leaf_threshold` is 0, or if the ratio is not above 0 and
        at most 1.
        """
        ratio = outlook.costs.ratio if self.ratio is None else self.ratio
        if not self.gain or not 0 < ratio <= 1 or not self.leaf_threshold:
            return None
        least = np.array([log(self.leaf_threshold), log(self.own), log(ratio)])
        return PCTPlan(
            min(self.max_depth, outlook.layers),
            self.width,
            layer=int(1 / self.leaf_threshold) + 1,
            frontier=min(double_to_power_of_two(int(1 / ratio) + 1), outlook.wide),
            nodes=outlook.large,
            least=least,
        )

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        # A value never exceeds its parent's, so a node below the leaf threshold has only such nodes
        # below it: leaving it out now is the same as removing its leaves, and theirs, at the end.
        keep = path_log_q(tree, frontier, candidates) >= log(self.leaf_threshold)
        return append(tree, frontier, candidates, keep & (candidates.log_q >= log(self.own)))

    def expandable(self, tree: Tree, nodes: Ints, costs: Costs) -> Ints:
        """Return the nodes whose value is at least sₐ/sₜ (eq. 5); the value of a root is 1.

        Without `gain`, their confidence is compared instead.
        """
        ratio = costs.ratio if self.ratio is None else self.ratio
        sure = tree.score if self.gain else tree.log_q
        return nodes[sure[nodes] >= log(ratio)]
