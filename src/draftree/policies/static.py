"""A tree of fixed shape, given by candidate ranks along its paths (EAGLE-1, Medusa, Hydra).

The path [0, 2] is the third candidate after the first candidate after the root. Rank is the place
in draw order.

Shapes: T paths, F frontier nodes, K candidates.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from os.path import isfile
from pathlib import Path
from typing import Any, TypeGuard, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.errors import UnknownName, UserError, format_value
from draftree.policies._device_growth import DeviceGrowth
from draftree.policies.base import Expand, Policy, append
from draftree.target.device_tree import Layers, Nodes
from draftree.tree import Floats, Ints, Tree, TreeBudget
from draftree.utils.files import read_json

RANKS = 1024
"""Number of ranks that a path can name; ranks are 0 … `RANKS` − 1."""
SHIPPED = Path(__file__).with_name("trees.json")
"""File with the trees of the official codes, by name."""


@final
@dataclass(frozen=True)
class Paths(DeviceGrowth):
    """Plans trees whose paths are given by ranks.

    Attributes:
        name: the name of the tree.
        children: the children of each path, see `Static.children`.
    """

    name: str = ""
    children: Ints = field(default_factory=lambda: np.zeros((1, 0), np.int64), compare=False)

    @cached_property
    def shape(self) -> list[tuple[Ints, Ints]]:
        """Return, for each layer, its nodes [M] among its candidates and its expanded nodes [F]."""
        found, frontier = list[tuple[Ints, Ints]](), np.zeros(1, np.int64)
        while frontier.size:
            below = self.children[frontier]
            at = np.flatnonzero(below)
            inner = np.flatnonzero(self.children[below.ravel()[at]].any(axis=1))
            found.append((at, inner))
            frontier = below.ravel()[at][inner]
        return found

    @override
    def max_drafted_nodes(self, depth: int) -> int:
        return sum(len(at) for at, _ in self.shape[:depth])

    @override
    def choice_inputs(self, layers: Layers) -> Floats:
        return np.concatenate([places for layer in self.shape for places in layer]).astype(
            np.float64
        )

    def _places(self, depth: int, which: int, nodes: Nodes) -> Tensor:
        sizes = [len(places) for layer in self.shape for places in layer]
        place = 2 * (depth - 1) + which
        begin = sum(sizes[:place])
        return nodes.known[begin : begin + sizes[place]].long().expand(len(nodes.tokens), -1)

    @override
    def choose_nodes(self, worth: Tensor, depth: int, nodes: Nodes) -> Tensor:
        return self._places(depth, 0, nodes)

    @override
    def ask(self, added: int, depth: int, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
        order = self._places(depth, 1, nodes)
        return order, torch.ones_like(order, dtype=torch.bool), nodes.known


@final
@dataclass(frozen=True)
class Static(Policy):
    """The same tree in every step, less what the drafter has no candidate for.

    The shape does not depend on the drawn tokens. It is not a `Layered` policy, because the ranks
    on a node's path determine its children, and a `Tree` does not store ranks.

    Attributes:
        paths: the name of a shipped tree, or a JSON file with a list of paths, each of which is a
            list of ranks. The list is either the whole file or its entry `paths`, as written by
            `draftree train static`.
    """

    paths: str = "eagle1/mc_sim_7b_63"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.children  # a mistake in a file is reported at once

    @property
    def prunes_on_draws(self) -> bool:
        """Return whether the tree contains a path but not the path of an earlier sibling.

        The draws of such siblings influence how the later candidate is drawn.
        """
        gaps: np.ndarray = (self.children[:, 1:] > 0) & (self.children[:, :-1] == 0)
        return bool(gaps.any())

    @cached_property
    def children(self) -> Ints:
        """Return [T + 1, K] the number of each path's child by rank; 0 for no child.

        See `_table`.
        """
        return _table(self.paths)

    @property
    @override
    def deepest(self) -> int:
        layers, places = 0, self.children[0]
        while (places := places[places > 0]).size:
            layers, places = layers + 1, self.children[places]
        return layers

    @property
    @override
    def plan(self) -> DeviceGrowth:
        return Paths(self.deepest, self.children.shape[1], name=self.paths, children=self.children)

    @override
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        # Where not all have room, the first paths stay: to choose by score would be to prune on
        # draws.
        children = np.where(self.children <= room.nodes, self.children, 0)
        frontier, place = np.arange(tree.roots), np.zeros(tree.roots, np.int64)
        while True:
            inner = children[place].any(axis=1) & (
                tree.depth[frontier] < room.depth[tree.row[frontier]]
            )
            if not inner.any():
                return tree
            frontier, below = frontier[inner], children[place[inner]]
            candidates = expand(tree, frontier, below.shape[1])
            wanted = below[
                :, : candidates.tokens.shape[1]
            ]  # [F, K] the path of each; fewer where the vocabulary is smaller
            before, tree = len(tree), append(tree, frontier, candidates, wanted > 0)
            frontier, place = (
                np.arange(before, len(tree)),
                wanted[(wanted > 0) & (candidates.log_q > -np.inf)],
            )


def _table(name: str) -> Ints:
    """Return a table [T + 1, K] of the children of each path, by rank.

    Paths are numbered from 1, shorter ones first, then in order of their ranks. The root has number
    0, and an entry 0 means that there is no child.

    Raises:
        UserError: the parent of a path is not among the paths, or there is no such tree.
    """
    number = {p: i for i, p in enumerate(sorted(_load(name), key=lambda p: (len(p), p)))}
    table = np.zeros((len(number), 1 + max(p[-1] for p in number if p)), np.int64)
    for path, i in list(number.items())[1:]:
        if (beginning := path[:-1]) not in number:
            told = f"path {list(path)} without its beginning {list(beginning)}"
            raise UserError(
                f"static: tree '{name}' has {told}; allowed are paths whose prefixes are paths too"
            )
        table[number[beginning], path[-1]] = i
    return table


def _load(name: str) -> set[tuple[int, ...]]:
    """Return the paths of a shipped tree or of a file, and the empty path for the root.

    Raises:
        UnknownName: there is no such tree or file.
        UserError: the file does not contain a list of paths.
    """
    shipped: dict[str, list[list[int]]] = json.loads(SHIPPED.read_text())
    if name in shipped:
        return {(), *map(tuple, shipped[name])}
    if not isfile(name):
        raise UnknownName("tree (a JSON file, or the name of a shipped one)", name, shipped)
    found = read_json(Path(name), "a tree, a JSON list of lists of ranks")
    if isinstance(found, dict):
        found = found.get("paths", found)
    if not isinstance(found, list) or not found:
        raise UserError(
            f"static: tree '{name}' holds {format_value(found)}, allowed is a JSON list of lists of ranks"
        )
    for path in found:
        if not _is_path(path):
            told = f"tree '{name}' has path {format_value(path)}"
            raise UserError(f"static: {told}, allowed are lists of ranks from 0 to {RANKS - 1}")
    return {(), *map(tuple, found)}


def _is_path(path: object) -> TypeGuard[list[int]]:
    return (
        isinstance(path, list)
        and bool(path)
        and all(type(rank) is int and 0 <= rank < RANKS for rank in path)
    )
