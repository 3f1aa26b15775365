"""Acceptors: the output distribution, enumerated outcome by outcome, is the target's; and the walk on hand-made trees."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.acceptors.base import Acceptor, check_exact, walk
from draftree.acceptors.block import Block
from draftree.acceptors.greedy import Greedy
from draftree.acceptors.match import Match
from draftree.acceptors.multiround import MultiRound
from draftree.acceptors.rejection import Rejection
from draftree.acceptors.typical import Typical
from draftree.costs import Costs
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.loop import plain, speculate
from draftree.policies.base import Layered, Policy, append
from draftree.policies.chain import Chain
from draftree.policies.pct import PCT
from draftree.policies.static import Static
from draftree.policies.vct import VCT
from draftree.sampling import Chance, Distributions, Keyed, Sampling
from draftree.testing import Branching, TableDrafter, outcomes, random_table, table_target
from draftree.testing.fakes import tiny_target
from draftree.text import Request, Texts
from draftree.tree import Candidates, Draw, Ints, Tree, Verdict

COSTS = Costs({1: 0.1}, {1: 1.0})
TABLE = random_table(3, 4)
NEAR = torch.softmax(TABLE[1].log() / 2, dim=-1)
FAR = random_table(3, 9)[1]
SAMPLINGS = {
    "t=0.3": Sampling(temperature=0.3),
    "t=1": Sampling(temperature=1.0),
    "t=1.7": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.7, top_p=0.6),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "all": Sampling(temperature=1.4, top_k=2, top_p=0.9, min_p=0.05),
}
POLICIES: dict[str, Policy] = {"chain": Chain(2), "vct": VCT(2, 2), "pct": PCT(width=3, max_depth=3, ratio=0.2)}


def processed(p: Tensor, sampling: Sampling) -> np.ndarray:
    """The request's processors over again, by their definitions: temperature, top-k, top-p, min-p, in this order."""
    with np.errstate(divide="ignore"):
        x = np.exp(np.log(p.numpy()) / sampling.temperature)
    x /= x.sum()
    order = np.argsort(-x, kind="stable")
    if sampling.top_k:
        x[order[sampling.top_k :]] = 0
        x /= x.sum()
    mass_before = np.concatenate(([0.0], np.cumsum(x[order])[:-1]))
    x[order[mass_before >= sampling.top_p]] = 0
    x /= x.sum()
    x[x < sampling.min_p * x.max()] = 0
    return x / x.sum()


def wanted(prompt: list[int], length: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's distribution over continuations, as a product of its rows."""
    found = {}
    for text in itertools.product(range(3), repeat=length):
        whole, probability = [*prompt, *text], 1.0
        for at in range(len(prompt), len(whole)):
            before = whole[at - 2] if at > 1 else 3
            probability *= processed(TABLE[before, whole[at - 1]], sampling)[whole[at]]
        if probability:
            found[text] = float(probability)
    return found


def distribution(
    policy: Policy, acceptor: Acceptor, q: Tensor, sampling: Sampling, prompt: tuple[int, ...] = (1,), length: int = 3
) -> dict[tuple[int, ...], float]:
    """What the loop writes, over every outcome of the target's and the drafter's draws."""
    target = table_target(TABLE)

    def run(chance: Branching) -> tuple[int, ...]:
        texts = Texts([Request(prompt, length)], sampling, target.new_cache(1, 8), branches=chance)
        for _ in speculate(target, TableDrafter(q, chance), policy, acceptor, COSTS, texts):
            pass
        return tuple(texts.written[0])

    return outcomes(run)


@pytest.mark.parametrize("q", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_match_has_the_targets_distribution(sampling: Sampling, policy: Policy, q: Tensor) -> None:
    assert distribution(policy, Match(), q, sampling) == pytest.approx(wanted([1], 3, sampling), abs=1e-12)


REJECTING: dict[str, tuple[Acceptor, Policy]] = {
    "rejection-chain": (Rejection(), Chain(3)),
    "rejection-vct": (Rejection(), VCT(2, 2)),
    "block-chain": (Block(), Chain(3)),
    "multiround-chain": (MultiRound(), Chain(3)),
    "multiround-vct": (MultiRound(), VCT(2, 2)),
    "multiround-all": (MultiRound(), VCT(3, 1)),
    "multiround-repeating-vct": (MultiRound(replacement=True), VCT(2, 2)),
}


@pytest.mark.parametrize("q", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("pairing", REJECTING.values(), ids=REJECTING)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_rejection_has_the_targets_distribution(sampling: Sampling, pairing: tuple[Acceptor, Policy], q: Tensor) -> None:
    acceptor, policy = pairing
    assert distribution(policy, acceptor, q, sampling) == pytest.approx(wanted([1], 3, sampling), abs=1e-12)


def test_plain_has_the_targets_distribution() -> None:
    target, sampling = table_target(TABLE), SAMPLINGS["all"]

    def run(chance: Branching) -> tuple[int, ...]:
        texts = Texts([Request([2, 0], 3)], sampling, target.new_cache(1, 8), branches=chance)
        for _ in plain(target, Match(), texts):
            pass
        return tuple(texts.written[0])

    assert outcomes(run) == pytest.approx(wanted([2, 0], 3, sampling), abs=1e-12)


@dataclass(frozen=True)
class Dropping(Layered):
    """Has two children of each node and drops the unlikely ones, by their own and their siblings' draws."""

    @property
    def candidates(self) -> int:
        return 2

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates, costs: Costs) -> tuple[Tree, Ints]:
        grown = append(tree, frontier, candidates, candidates.log_q > np.log(0.3))
        new = np.arange(len(tree), len(grown))
        return grown, new[grown.depth[new] < 2]


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

    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        return self.rule.accept(tree, p, chance)


@pytest.mark.parametrize("kind", [Draw.WITHOUT_REPLACEMENT, Draw.WITH_REPLACEMENT], ids=lambda d: d.value)
@pytest.mark.parametrize("name", ["t=1", "all"])
def test_match_survives_sampled_draws_and_pruning_on_them(kind: Draw, name: str) -> None:
    sampling, rule = SAMPLINGS[name], Asking(Match(), kind)
    assert distribution(Dropping(), rule, FAR, sampling, length=2) == pytest.approx(wanted([1], 2, sampling), abs=1e-12)


# What must make the enumeration fail.


def raw(p: Distributions, node: int) -> Tensor:
    return torch.softmax(p._logits[node].double(), dim=-1)


@dataclass(frozen=True)
class RawBonus(Acceptor):
    """Walks with the request's p, and draws the bonus without its processors."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        def choose(node: int) -> int:
            place = int(tree.row[node]), int(tree.depth[node])
            token = chance.categorical(p(node), *place)
            return token if token in tree.tokens[tree.children(node)] else chance.categorical(raw(p, node), *place)

        return walk(tree, choose)


@dataclass(frozen=True)
class TwoDraws(Acceptor):
    """Asks for each child by itself, and draws the bonus anew from all of p."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        def choose(node: int) -> int:
            place = int(tree.row[node]), int(tree.depth[node])
            for child in tree.children(node):
                if chance.bernoulli(float(p(node)[tree.tokens[child]]), *place):
                    return int(tree.tokens[child])
            return chance.categorical(p(node), *place)

        return walk(tree, choose)


@pytest.mark.parametrize(("wrong", "name"), [(RawBonus(), "top-k"), (RawBonus(), "t=0.3"), (TwoDraws(), "t=1")], ids=str)
def test_a_wrong_rule_is_noticed(wrong: Acceptor, name: str) -> None:
    got, want = distribution(VCT(2, 2), wrong, FAR, SAMPLINGS[name]), wanted([1], 3, SAMPLINGS[name])
    assert sum(got.values()) == pytest.approx(1)
    assert 0.5 * sum(abs(got.get(t, 0) - want.get(t, 0)) for t in {*got, *want}) > 0.03


# The walk on hand-made trees.


def bush() -> Tree:
    """Two rows: 0 → (5 → 7, 6 → 8), and 1 → (5)."""
    tree = Tree.planted(np.array([0, 3]), np.array([1, 2]))
    layer = Candidates(np.array([[5, 6], [5, 0]]), np.array([[-0.1, -0.2], [-0.3, -np.inf]]))
    tree = append(tree, np.array([0, 1]), layer)
    return append(tree, np.array([2, 3]), Candidates(np.array([[7], [8]]), np.array([[-0.1], [-0.1]])))


def says(tokens: dict[int, int]) -> Callable[[int], int]:
    return lambda node: tokens.get(node, 0)


def test_walk_follows_children_and_stops_at_the_first_that_is_none() -> None:
    tree = bush()
    assert tree.tokens.tolist() == [1, 2, 5, 6, 5, 7, 8]
    verdict = walk(tree, says({0: 6, 3: 8, 6: 9, 1: 4}))
    assert [p.tolist() for p in verdict.paths] == [[3, 6], []]
    assert verdict.bonus.tolist() == [9, 4]
    assert walk(tree, says({0: 5, 2: 8})).paths[0].tolist() == [2], "token 8 is a child of another node"
    assert not verdict.lossy


def test_walk_asks_only_where_it_goes() -> None:
    asked: list[int] = []
    walk(bush(), lambda node: asked.append(node) or {0: 5, 1: 5}.get(node, 0))
    assert asked == [0, 2, 1, 4]


def test_walk_takes_the_first_of_equal_siblings() -> None:
    tree = Tree.planted(np.array([0]), np.array([1]))
    twice = Candidates(np.array([[5, 5]]), np.array([[-0.1, -0.1]]))
    assert walk(append(tree, np.array([0]), twice), says({0: 5})).paths[0].tolist() == [1]


def test_greedy_takes_the_lower_of_equal_tokens() -> None:
    logits = torch.zeros(7, 10)
    logits[0, [6, 9]] = 1.0
    verdict = Greedy().accept(bush(), Distributions(logits, (), lambda _: []), Branching())
    assert [p.tolist() for p in verdict.paths] == [[3], []]
    assert verdict.bonus.tolist() == [0, 0]


def test_match_draws_once_a_node_at_its_own_place() -> None:
    class Recording(Chance):
        places: ClassVar[list[tuple[int, int]]] = []

        def categorical(self, p: Tensor, row: int, depth: int) -> int:
            self.places.append((row, depth))
            return int(p.argmax())

        def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
            raise AssertionError("match asks for tokens alone")

    logits = torch.zeros(7, 10)
    logits[0, 6] = logits[3, 8] = logits[6, 2] = logits[1, 5] = 1.0
    verdict = Match().accept(bush(), Distributions(logits, (), lambda _: []), Recording())
    assert [p.tolist() for p in verdict.paths] == [[3, 6], [4]]
    assert Recording.places == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1)]


def test_match_with_keyed_noise_is_the_same_for_every_tree() -> None:
    p = Distributions(torch.zeros(7, 10), (), lambda _: [])
    keyed = Keyed(3, np.array([0, 1, 2, 3]), np.array([4, 0, 0, 9]))
    bare = Match().accept(Tree.planted(np.array([0, 3]), np.array([1, 2])), p, keyed)
    token = int(bare.bonus[0])
    tree = append(
        Tree.planted(np.array([0, 3]), np.array([1, 2])),
        np.array([0]),
        Candidates(np.array([[(token + 1) % 10, token]]), np.array([[-0.1, -3.0]])),
    )
    assert [x.tolist() for x in Match().accept(tree, p, keyed).paths] == [[3], []]


# Which pairings are refused.


@dataclass(frozen=True)
class Picky(Acceptor):
    """Wants draws without replacement, is exact for them alone, and not where they are pruned."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset({Draw.WITHOUT_REPLACEMENT})
    survives_pruning: ClassVar[bool] = False

    kind: Draw = Draw.WITHOUT_REPLACEMENT

    @property
    def draw(self) -> Draw:
        return self.kind

    def accept(self, tree: Tree, p: Distributions, chance: Chance) -> Verdict:
        raise NotImplementedError


def test_pairings_that_are_not_exact_are_refused() -> None:
    check_exact(Chain(), Picky())
    with pytest.raises(UserError, match="'picky' is not exact where policy 'pct' prunes on what was drawn; allowed: match"):
        check_exact(PCT(), Picky())
    with pytest.raises(UserError, match="'picky' is not exact for point draws; allowed: without-replacement"):
        check_exact(Chain(), Picky(Draw.POINT))
    policies: list[Any] = [Dropping(), Chain(), VCT(), PCT()]
    for policy, acceptor in itertools.product(policies, (Greedy(), Match())):
        check_exact(policy, acceptor)
    for policy, acceptor in itertools.product(
        (Chain(), VCT(), Static()), (Rejection(), MultiRound(), MultiRound(True), Block())
    ):
        check_exact(policy, acceptor)
    for policy, acceptor in itertools.product(
        (PCT(), VCT(layer_top=3)), (Rejection(), MultiRound(), MultiRound(True), Block())
    ):
        with pytest.raises(UserError, match="prunes on what was drawn; allowed: match"):
            check_exact(policy, acceptor)
    check_exact(PCT(), Typical())  # lossy, and says so


@pytest.mark.parametrize(
    ("acceptor", "temperature"),
    [(Greedy(), 1.0), (Rejection(), 0.0), (MultiRound(), 0.0), (Block(), 0.0), (Typical(), 0.0)],
    ids=str,
)
def test_a_rule_that_does_not_serve_a_temperature_is_refused(acceptor: Acceptor, temperature: float) -> None:
    with pytest.raises(UserError, match=f"does not serve temperature {temperature:g}; allowed: "):
        check_exact(Chain(), acceptor, Sampling(temperature))


# The enumeration itself.


def test_outcomes_are_all_there_with_their_probabilities() -> None:
    def run(chance: Branching) -> tuple[Any, ...]:
        first = chance.categorical(torch.tensor([0.5, 0.0, 0.3, 0.2]), 0, 0)
        return (first, chance.bernoulli(0.25, 0, 1)) if first == 2 else (first,)

    assert outcomes(run) == pytest.approx({(0,): 0.5, (2, True): 0.075, (2, False): 0.225, (3,): 0.2})
    assert outcomes(lambda chance: chance.bernoulli(1.0, 0, 0)) == {True: 1.0}


def test_match_at_temperature_0_is_greedy() -> None:
    target, requests = tiny_target(), [Request([3, 1, 4], 9), Request([2], 7, number=1)]
    engine = Engine(target, PLD().open(target), Chain(), Match())
    assert engine.write(requests).tokens == engine.plain(requests).tokens
