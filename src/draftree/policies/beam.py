"""Beam search as a tree: keep the best paths of each length (GliDe + CaPE, section 5, Table 3).

The paper says that each of the top k tokens of a position is used to draft the following ones,
which gives "tree structures with many branches" (section 4.2), and that all are verified with a
tree mask. It does not say what becomes of a beam that dies, one none of whose continuations is
among the best; the official code verifies the beams that reach the end. With `survivors=false` the
others are verified with them: they have been drafted, most of their nodes are shared with beams
that live, and one that is accepted counts like any other. That is a stronger baseline than the
paper's.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.policies._device_growth import DeviceGrowth
from draftree.policies.base import Layered, append, path_log_q, top
from draftree.target.device_tree import Nodes
from draftree.tree import Candidates, Ints, Tree
from draftree.utils.validated_dataclass import Presets, knob


@final
@dataclass(frozen=True)
class BeamPlan(DeviceGrowth):
    """Plans trees in which only paths to a sequence's last layer are verified."""

    @override
    def rank(self, nodes: Nodes) -> Tensor:
        exists = nodes.score > -torch.inf
        depth = nodes.depth.masked_fill(~exists, -1)
        last = exists & (depth == depth.amax(dim=1, keepdim=True))
        return nodes.score.masked_fill(~(nodes.seen & last[..., None]).any(dim=1), -torch.inf)


@final
@dataclass(frozen=True)
class Beam(Layered):
    """Beam search by joint probability.

    Attributes:
        width: number of beams, which is the number of nodes of a layer (4 and 8 in the paper).
            Among equals those with the lower numbers are kept.
        depth: number of layers (4 in the official code).
        survivors: whether only paths to a sequence's last layer are verified, as in the official
            code.

    `preset=fast` verifies every beam, down to depth 5.
    """

    presets: ClassVar[Presets] = {"fast": {"depth": 5, "survivors": False}}

    width: int = knob(4, least=1)
    depth: int = knob(4, least=1, deepest=True)
    survivors: bool = True

    @property
    @override
    def candidates(self) -> int:
        return self.width  # no beam has more than `width` continuations among the best

    @property
    @override
    def plan(self) -> DeviceGrowth:
        kind = BeamPlan if self.survivors else DeviceGrowth
        return kind(self.depth, self.width, layer=self.width)

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        return append(
            tree,
            frontier,
            candidates,
            top(tree, frontier, path_log_q(tree, frontier, candidates), self.width),
        )

    @override
    def finish(self, tree: Tree) -> Tree:
        if not self.survivors:
            return tree
        deepest = np.zeros(tree.row.max() + 1, np.int64)
        np.maximum.at(deepest, tree.row, tree.depth)
        last = tree.depth == deepest[tree.row]
        return tree.select(tree.ancestors[last].any(axis=0))
