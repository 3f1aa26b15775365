"""EAGLE-2's dynamic tree: expand the best nodes of each layer, then keep the best of all (section 4).

A node's value is the product of draft confidences along its path. Shallow nodes that were not
expanded may be worth more than deep ones that were, so all candidates are ranked once more at the
end (section 4.2).
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.policies._device_growth import DeviceGrowth
from draftree.policies.base import Expand, Policy, append, best, fit
from draftree.tree import Tree, TreeBudget
from draftree.utils.validated_dataclass import knob

NODES = ((10e9, 60), (30e9, 50), (inf, 48))
"""Pairs of a bound on the target's parameters and the number of nodes to verify below it.

The numbers are from appendix A of EAGLE-2.
"""


@final
@dataclass(frozen=True)
class EAGLE2(Policy):
    """Expand the best of each layer, then rank all.

    It is not a `Layered` policy, because it drafts several times as many nodes as it verifies. A
    `Layered` policy stops when it has drafted as many nodes as the budget allows to verify.

    Attributes:
        nodes: number of nodes to verify, without the root (`total_token` of the official code
            includes it). The default depends on the number of the target's parameters, as in the
            paper: 60 below 10 billion, 50 below 30 billion, and 48 above. The paper's targets have
            7, 13 and 70 billion.
        depth: number of layers (6 in the paper; `depth` of the official code does not count the
            first layer).
        width: number of nodes expanded in a layer, and of candidates after each of them (10 in the
            paper).
        expand_by: whether the nodes to expand are chosen by `value` or by their own `confidence`.
            The latter is the paper's ablation "w/o value" (section 5.2.1, Table 3).
        rank_by: whether the final ranking is by `value` or by `confidence`. The paper describes
            "w/o value" only as "not using value and directly using confidence", which may mean the
            expansion alone, or the ranking too. With `confidence`, a node is ranked by the smallest
            confidence on its path, because it cannot be verified without its parent; the paper does
            not define this case.
        rerank: whether all candidates are ranked at the end. Without it ("w/o reranking"), only
            nodes that were chosen for expansion are candidates for verification, including those
            chosen in the last layer. The best `nodes` of them by `rank_by` are verified. This
            follows from "we do not use the tokens selected during the expansion phase as the draft
            directly" (section 4.2). The ablation "w/o both" is `rerank=false` with
            `expand_by=confidence` and `rank_by=confidence`.
    """

    nodes: int | None = knob(None, least=1)
    depth: int = knob(6, least=1, deepest=True)
    width: int = knob(10, least=1)
    expand_by: Literal["value", "confidence"] = "value"
    rerank: bool = True
    rank_by: Literal["value", "confidence"] = "value"

    @property
    @override
    def plan(self) -> DeviceGrowth | None:
        if not self.rerank or self.rank_by != "value":
            return None
        confidence = self.expand_by == "confidence"
        return DeviceGrowth(
            self.depth,
            self.width,
            frontier=self.width,
            confidence=confidence,
            nodes=self.num_verified,
        )

    @property
    def num_verified(self) -> int:
        """Return the number of nodes to verify.

        For a target of unknown size it is 60, the number for the paper's smallest target.
        """
        return NODES[0][1] if self.nodes is None else self.nodes

    @override
    def for_target_size(self, parameters: int) -> "EAGLE2":
        usual = next(nodes for below, nodes in NODES if parameters < below)
        return replace(self, nodes=usual) if self.nodes is None and usual != NODES[0][1] else self

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        chosen = np.arange(tree.roots)
        verified = [chosen]
        while (frontier := room.expandable(tree, chosen, self.depth)).size:
            before = len(tree)
            tree = append(tree, frontier, expand(tree, frontier, self.width))
            ranks = tree.score if self.expand_by == "value" else tree.log_q
            chosen = best(tree, np.arange(before, len(tree)), self.width, ranks)
            verified.append(chosen)
        # A child whose q is 1 is worth as much as its parent, which has the lower number and so is
        # kept before it. The official code leaves the order of equal nodes open, and hangs a child
        # kept without its parent on another node.
        if not self.rerank:
            tree = tree.select(np.isin(np.arange(len(tree)), np.concatenate(verified)))
        least_sure = (
            np.where(tree.ancestors, tree.log_q, 0).min(axis=1)
            if self.rank_by == "confidence"
            else None
        )
        return fit(tree, min(self.num_verified, room.nodes), least_sure)
