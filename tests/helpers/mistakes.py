"""Acceptance rules with the mistakes that official implementations make, which tests of exactness must notice."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from draftree.acceptors.base import Acceptor, proposal, walk
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import RandomSource
from draftree.tree import AcceptResult, Draw, Tree


@dataclass(frozen=True)
class Asking(Acceptor):
    """Another rule, with candidates drawn as it is told and not as that rule wants."""

    rule: Acceptor
    kind: Draw
    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    @property
    def draw(self) -> Draw:
        return self.kind

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        return self.rule.accept(tree, p, chance)


@dataclass(frozen=True)
class RawBonus(Acceptor):
    """Walks with the request's p, and draws the bonus without its processors."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        def choose(node: int) -> int:
            place = int(tree.row[node]), int(tree.depth[node])
            token = chance.categorical(p(node), *place)
            if token in tree.tokens[tree.children(node)]:
                return token
            return chance.categorical(torch.softmax(p.raw(node).double(), dim=-1), *place)

        return walk(tree, choose)


@dataclass(frozen=True)
class TwoDraws(Acceptor):
    """Asks for each child by itself, and draws the bonus anew from all of p."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        def choose(node: int) -> int:
            place = int(tree.row[node]), int(tree.depth[node])
            for child in tree.children(node):
                if chance.bernoulli(float(p(node)[tree.tokens[child]]), *place):
                    return int(tree.tokens[child])
            return chance.categorical(p(node), *place)

        return walk(tree, choose)


@dataclass(frozen=True)
class Rounds(Acceptor):
    """Rejection among siblings, written down anew, with a mistake or without.

    Attributes:
        mistake: which.
        replacement: how siblings are drawn.
        believed: how the rule takes them to be drawn; as they are by default.
    """

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    mistake: str = ""
    replacement: bool = False
    believed: bool | None = None

    @property
    def draw(self) -> Draw:
        return Draw.WITH_REPLACEMENT if self.replacement else Draw.WITHOUT_REPLACEMENT

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        paths, bonus = [], []
        for root in range(tree.roots):
            path, found = [root], True
            while found:
                here = path[-1]
                found, left = self._round(tree, here, p, chance, path)
            last = p.raw(here).double().softmax(-1) if self.mistake == "raw bonus" else left
            paths.append(np.array(path[1:], np.int64))
            bonus.append(
                chance.categorical(last / last.sum(), int(tree.row[root]), int(tree.depth[here]))
            )
        return AcceptResult(tuple(paths), np.array(bonus, np.int64))

    def _round(
        self, tree: Tree, node: int, p: Distributions, chance: RandomSource, path: list[int]
    ) -> tuple[bool, Tensor]:
        left, gone = p(node), list[int]()
        for index, child in enumerate(tree.children(node).tolist()):
            token, q = int(tree.tokens[child]), self._q(tree, child, len(left), gone)
            keep = float(left[token] / (1 if self.mistake == "q = 1" else q[token]))
            if chance.bernoulli(min(1.0, keep), int(tree.row[node]), int(tree.depth[node]), index):
                path.append(child)
                return True, left
            rest = (left - q).clamp(min=0)
            if self.mistake == "residual without the token":
                rest = left.clone()
                rest[token] = 0
            left = rest if self.mistake == "residual not normalised" else rest / rest.sum()
            gone.append(token)
        return False, p(node) if self.mistake == "bonus of all of p" else left

    def _q(self, tree: Tree, child: int, vocab: int, gone: list[int]) -> Tensor:
        if self.mistake == "one-hot":
            return torch.nn.functional.one_hot(
                torch.tensor(int(tree.tokens[child])), vocab
            ).double()
        q = proposal(tree, child, vocab).clone()
        if self.mistake == "q of another node":
            q = 0.5 * q + 0.5 * q.roll(1)
        if not (self.replacement if self.believed is None else self.believed):
            q[gone] = 0
            q /= q.sum()
        return q
