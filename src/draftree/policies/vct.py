"""VCT, the vanilla candidate tree: fixed width and depth (EDD + PCT, section 4.1)."""

from dataclasses import dataclass
from typing import final

from typing_extensions import override

from draftree.policies._device_growth import DeviceGrowth
from draftree.policies.base import Layered, append, path_log_q, top
from draftree.tree import Candidates, Ints, Tree
from draftree.utils.validated_dataclass import knob


@final
@dataclass(frozen=True)
class VCT(Layered):
    """Every node has the same number of children down to a fixed depth; layers can be capped.

    Attributes:
        width: number of children of a node (3 in the paper).
        depth: number of layers (5 in the paper).
        layer_top: largest number of nodes in a layer of one sequence. The nodes of largest value
            (the product of q along the path) are kept, among equals those with the lower numbers.
            Other nodes are neither verified nor expanded. By default there is no cap, as in the
            paper, where 3 + 9 + … + 243 = 363 nodes are verified.
    """

    width: int = knob(3, least=1)
    depth: int = knob(5, least=1, deepest=True)
    layer_top: int | None = knob(None, least=1)

    @property
    @override
    def prunes_on_draws(self) -> bool:
        return self.layer_top is not None

    @property
    @override
    def candidates(self) -> int:
        return self.width

    @property
    @override
    def plan(self) -> DeviceGrowth:
        return DeviceGrowth(self.depth, self.width, layer=self.layer_top)

    @override
    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        if self.layer_top is None:
            return append(tree, frontier, candidates)
        return append(
            tree,
            frontier,
            candidates,
            top(tree, frontier, path_log_q(tree, frontier, candidates), self.layer_top),
        )
