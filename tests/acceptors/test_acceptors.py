"""Acceptors on hand-made trees: what they accept, what they ask chance for and how much they accept; what is refused."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from answers import Answers
from draftree.acceptors.base import Acceptor, walk
from draftree.acceptors.block import Block
from draftree.acceptors.greedy import Greedy
from draftree.acceptors.match import Match
from draftree.acceptors.multiround import MultiRound
from draftree.acceptors.rejection import Rejection
from draftree.acceptors.traversal import Traversal
from draftree.acceptors.typical import Typical
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.drafters.pld import PLD
from draftree.drafters.retrieval.text_drafter import extend_texts, truncate_texts
from draftree.drafters.vdm import VDM
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.loop import Components, decode
from draftree.policies.base import Policy, append
from draftree.policies.chain import Chain
from draftree.policies.pct import PCT
from draftree.policies.static import Static
from draftree.policies.vct import VCT
from draftree.registry import check_exact
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import Keyed, RandomSource
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStates
from draftree.testing import Branching, TableDrafter, outcomes, random_table, table_target
from draftree.testing.fakes import Always, tiny_target
from draftree.tree import AcceptResult, Candidates, Draw, Ints, Tree
from selection import one_in

# The walk on hand-made trees.


def bush() -> Tree:
    """Two rows: 0 → (5 → 7, 6 → 8), and 1 → (5)."""
    tree = Tree.from_roots(np.array([0, 3]), np.array([1, 2]))
    layer = Candidates(np.array([[5, 6], [5, 0]]), np.array([[-0.1, -0.2], [-0.3, -np.inf]]))
    tree = append(tree, np.array([0, 1]), layer)
    return append(
        tree, np.array([2, 3]), Candidates(np.array([[7], [8]]), np.array([[-0.1], [-0.1]]))
    )


def says(tokens: dict[int, int]) -> Callable[[int], int]:
    return lambda node: tokens.get(node, 0)


def test_walk_follows_children_and_stops_at_the_first_that_is_none() -> None:
    tree = bush()
    assert tree.tokens.tolist() == [1, 2, 5, 6, 5, 7, 8]
    verdict = walk(tree, says({0: 6, 3: 8, 6: 9, 1: 4}))
    assert [p.tolist() for p in verdict.paths] == [[3, 6], []]
    assert verdict.bonus.tolist() == [9, 4]
    assert walk(tree, says({0: 5, 2: 8})).paths[0].tolist() == [2], (
        "token 8 is a child of another node"
    )
    assert not verdict.lossy


def test_walk_asks_only_where_it_goes() -> None:
    asked: list[int] = []
    walk(bush(), lambda node: asked.append(node) or {0: 5, 1: 5}.get(node, 0))
    assert asked == [0, 2, 1, 4]


def test_walk_takes_the_first_of_equal_siblings() -> None:
    tree = Tree.from_roots(np.array([0]), np.array([1]))
    twice = Candidates(np.array([[5, 5]]), np.array([[-0.1, -0.1]]))
    assert walk(append(tree, np.array([0]), twice), says({0: 5})).paths[0].tolist() == [1]


def test_greedy_takes_the_lower_of_equal_tokens() -> None:
    logits = torch.zeros(7, 10)
    logits[0, [6, 9]] = 1.0
    verdict = Greedy().accept(bush(), Distributions(logits), Branching())
    assert [p.tolist() for p in verdict.paths] == [[3], []]
    assert verdict.bonus.tolist() == [0, 0]


def test_match_draws_once_a_node_at_its_own_place() -> None:
    class Recording(RandomSource):
        places: ClassVar[list[tuple[int, int]]] = []

        def categorical(self, p: Tensor, row: int, depth: int) -> int:
            self.places.append((row, depth))
            return int(p.argmax())

        def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
            raise AssertionError("match asks for tokens alone")

    logits = torch.zeros(7, 10)
    logits[0, 6] = logits[3, 8] = logits[6, 2] = logits[1, 5] = 1.0
    verdict = Match().accept(bush(), Distributions(logits), Recording())
    assert [p.tolist() for p in verdict.paths] == [[3, 6], [4]]
    assert Recording.places == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1)]


def test_match_with_keyed_noise_is_the_same_for_every_tree() -> None:
    p = Distributions(torch.zeros(7, 10))
    keyed = Keyed(3, np.array([0, 1, 2, 3]), np.array([4, 0, 0, 9]))
    bare = Match().accept(Tree.from_roots(np.array([0, 3]), np.array([1, 2])), p, keyed)
    token = int(bare.bonus[0])
    tree = append(
        Tree.from_roots(np.array([0, 3]), np.array([1, 2])),
        np.array([0]),
        Candidates(np.array([[(token + 1) % 10, token]]), np.array([[-0.1, -3.0]])),
    )
    assert [x.tolist() for x in Match().accept(tree, p, keyed).paths] == [[3], []]


# Rejection on hand-made trees.


Q = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
P = torch.tensor([0.25, 0.25, 0.1, 0.4], dtype=torch.float64)


def drawn_tree(first: list[int], second: list[int], draw: Draw = Draw.WITH_REPLACEMENT) -> Tree:
    """Row 7 without drafts and row 3 with drafts of Q[0], the first of which has drafts of Q[1]."""
    tree = Tree.from_roots(np.array([7, 3]), np.array([0, 0]))
    for parent, tokens, q in ((1, first, Q[:1]), (2, second, Q[1:])):
        if tokens:
            log_q = q.log().numpy()[:, tokens]
            tree = append(
                tree, np.array([parent]), Candidates(np.array([tokens]), log_q, q.log(), draw)
            )
    return tree


def everywhere(tree: Tree) -> Distributions:
    return Distributions(P.log().expand(len(tree), -1))


def rests(p: Tensor, q: Tensor) -> list[float]:
    """norm(max(0, p − q)), to 9 digits."""
    rest = [max(0.0, a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    return [round(x / sum(rest), 9) for x in rest]


def test_rejection_keeps_drafts_by_p_over_q_and_replaces_the_first_that_is_not() -> None:
    tree, chance = drawn_tree([0, 1], [2]), Answers(True, False)
    verdict = Rejection().accept(tree, everywhere(tree), chance)
    assert [p.tolist() for p in verdict.paths] == [[], [2]]
    assert chance.asked == [(0.5, 3, 0, 0), (round(0.1 / 0.3, 9), 3, 1, 0)]
    assert chance.drawn == [(P.tolist(), 7, 0), (rests(P, Q[1]), 3, 1)]
    assert not verdict.lossy


def test_rejection_draws_from_p_behind_the_last_draft_and_looks_at_no_second_sibling() -> None:
    tree, chance = drawn_tree([0, 1], [3]), Answers(True, True)
    assert Rejection().accept(tree, everywhere(tree), chance).paths[1].tolist() == [2, 4]
    assert [p for p, *_ in chance.asked] == [0.5, 1.0]
    assert chance.drawn[1] == (P.tolist(), 3, 2)
    tree, chance = drawn_tree([0, 1], []), Answers(False)
    assert Rejection().accept(tree, everywhere(tree), chance).paths[1].size == 0
    assert chance.asked == [(0.5, 3, 0, 0)]
    assert chance.drawn[1] == (rests(P, Q[0]), 3, 0)


def test_a_draft_that_cannot_come_is_never_kept() -> None:
    p = torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64).log().expand(5, -1)
    for rule in (Rejection(), MultiRound(), MultiRound(True), Block()):
        tree, chance = drawn_tree([0], [1]), Answers()
        assert rule.accept(tree, Distributions(p), chance).paths[1].size == 0
        assert all(x == 0 for x, *_ in chance.asked)
        assert chance.drawn[1][0] == [0, 0.5, 0.5, 0]


def test_multiround_asks_sibling_after_sibling_of_what_is_left() -> None:
    tree, chance = drawn_tree([0, 1, 2], [], Draw.WITHOUT_REPLACEMENT), Answers(False, False, True)
    verdict = MultiRound().accept(tree, everywhere(tree), chance)
    assert verdict.paths[1].tolist() == [4]
    # p − q = (−, 0, −, .4), so p is token 3 alone, which q is never; and the drafts left are never
    # kept.
    assert chance.asked == [(0.5, 3, 0, 0), (0.0, 3, 0, 1), (0.0, 3, 0, 2)]
    assert chance.drawn[1] == (P.tolist(), 3, 1)


def test_multiround_without_replacement_normalises_q_and_with_it_does_not() -> None:
    q = torch.tensor([[0.8, 0.1, 0.1, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.2, 0.3, 0.1, 0.4]], dtype=torch.float64).log().expand(3, -1)
    for kind, rule in (
        (Draw.WITHOUT_REPLACEMENT, MultiRound()),
        (Draw.WITH_REPLACEMENT, MultiRound(True)),
    ):
        found = Candidates(np.array([[0, 1]]), q.log().numpy()[:, :2], q.log(), kind)
        tree, chance = (
            append(Tree.from_roots(np.array([0]), np.array([0])), np.array([0]), found),
            Answers(),
        )
        rule.accept(tree, Distributions(p), chance)
        # After token 0 is lost p is (0, .2, 0, .4) / .6; q is (0, ½, ½, 0) or what it was.
        second = (1 / 3) / (0.5 if kind is Draw.WITHOUT_REPLACEMENT else 0.1)
        assert chance.asked == [(0.25, 0, 0, 0), (round(min(1.0, second), 9), 0, 0, 1)]


def test_accepting_leaves_the_tree_as_it_was() -> None:
    for draw, rule in (
        (Draw.WITHOUT_REPLACEMENT, MultiRound()),
        (Draw.WITH_REPLACEMENT, MultiRound(True)),
    ):
        tree = drawn_tree([0, 1, 2], [1, 2], draw)
        assert tree.q is not None
        before = tree.q.clone()
        rule.accept(tree, everywhere(tree), Answers())
        assert torch.equal(tree.q, before)


def test_rejection_takes_point_candidates_as_certain() -> None:
    tree = Tree.from_roots(np.array([0]), np.array([0]))
    tree = append(tree, np.array([0]), Candidates(np.array([[1, 3]]), np.log([[0.6, 0.2]])))
    for rule, asked, left in (
        (Rejection(), [(0.25, 0, 0, 0)], [0.25, 0, 0.1, 0.4]),
        (Block(), [(0.25, 0, 0, 0)], [0.25, 0, 0.1, 0.4]),
        (MultiRound(), [(0.25, 0, 0, 0), (round(0.4 / 0.75, 9), 0, 0, 1)], [0.25, 0, 0.1, 0]),
    ):
        chance = Answers()
        rule.accept(tree, everywhere(tree), chance)
        assert chance.asked == asked
        assert chance.drawn == [([round(x / sum(left), 9) for x in left], 0, 0)]


def test_block_verification_by_hand() -> None:
    """Algorithm 2 for the drafts 0 of Q[0] and 2 of Q[1]: p₁ = .25/.5, p₂ = ½ · .1/.3, h₂ = p₂.

    h₁ = S / (S + 1 − ½), S = Σ max(0, ½ p − q) = (.125 − .1) + 0 + 0 + 0 of Q[1].
    """
    tree, rest = drawn_tree([0], [2]), 0.025
    for answers, path, left in (
        ((True, True), [2, 3], P.tolist()),
        ((False, True), [2, 3], P.tolist()),  # the longest beginning that is kept
        ((True, False), [2], rests(P / 2, Q[1])),
        ((False, False), [], rests(P, Q[0])),
    ):
        chance = Answers(*answers)
        verdict = Block().accept(tree, everywhere(tree), chance)
        assert verdict.paths[1].tolist() == path
        assert chance.asked == [
            (round(rest / (rest + 0.5), 9), 3, 0, 0),
            (round(0.5 * 0.1 / 0.3, 9), 3, 1, 0),
        ]
        assert chance.drawn[1] == (left, 3, len(path))


# How much is accepted.


def accepted(acceptor: Acceptor, policy: Policy, p: Tensor, q: Tensor) -> dict[int, float]:
    """The law of how many drafts are accepted after token 1, with tables of p and q [V, V]."""
    table = p.expand(len(p) + 1, -1, -1).clone()
    table[-1, 0] = torch.eye(len(p))[1]  # the first token, which is not drafted, is certain
    target, costs = table_target(table, 16), Costs({1: 1.0}, {1: 1.0})

    def run(chance: Branching) -> int:
        texts = SequenceBatch(target.new_cache(1, 16), lambda _: chance)
        parts = Components(target, TableDrafter(q, chance), policy, acceptor, costs)
        steps = decode(parts, texts, [Request([0], 4, sampling=Sampling(1.0))])
        next(steps)
        (event,), _ = next(steps)
        return len(event.path)

    return outcomes(run)


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """p and q [3, 3]."""
    return random_table(3, seed)[1], random_table(3, seed + 100)[1]


def mean(law: dict[int, float]) -> float:
    return sum(n * x for n, x in law.items())


@pytest.mark.parametrize("seed", range(3))
def test_rejection_accepts_what_p_and_q_share(seed: int) -> None:
    p, q = tables(seed)
    expected = float(torch.minimum(p[1], q[1]).sum())
    for rule in (Rejection(), Block(), MultiRound(), MultiRound(True)):
        assert accepted(rule, Chain(1), p, q)[1] == pytest.approx(expected, abs=1e-12)


def test_block_verification_accepts_no_less_than_rejection_and_mostly_more() -> None:
    gains = []
    for seed in range(4):
        p, q = tables(seed)
        gains.append(
            mean(accepted(Block(), Chain(2), p, q)) - mean(accepted(Rejection(), Chain(2), p, q))
        )
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_traversal_is_block_verification_on_a_chain_and_no_worse_than_rounds_on_a_tree(
    tmp_path: Path,
) -> None:
    paths = tmp_path / "paths.json"
    paths.write_text("[[0], [1], [0, 0]]")
    gains = []
    for seed in (0, 2):
        p, q = tables(seed)
        assert accepted(Traversal(), Chain(2), p, q) == pytest.approx(
            accepted(Block(), Chain(2), p, q), abs=1e-12
        )
        rules = (Traversal(), MultiRound())
        one, other = (mean(accepted(rule, Static(str(paths)), p, q)) for rule in rules)
        gains.append(one - other)
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_two_siblings_are_accepted_no_less_often_than_one() -> None:
    gains = []
    for seed in range(4):
        p, q = tables(seed)
        one = accepted(Rejection(), Chain(1), p, q)[1]
        gains += [
            accepted(rule, VCT(2, 1), p, q)[1] - one for rule in (MultiRound(), MultiRound(True))
        ]
    assert min(gains) > -1e-12
    assert max(gains) > 0.05


@pytest.mark.parametrize("seed", range(2))
def test_coupled_drafts_are_accepted_as_often_as_the_coupling_promises(seed: int) -> None:
    """At least (1 − TV) / (1 + TV), of 1,500 places within 4 standard deviations; at most what p and q share."""
    n, generator = 1500, np.random.default_rng(seed)
    p, q = (torch.from_numpy(generator.dirichlet(np.full(30, 0.5))) for _ in range(2))
    q = 0.5 * p + 0.5 * q
    for drafted, tv in ((q, 0.5 * float((p - q).abs().sum())), (p, 0.0)):
        rows, zero = np.arange(n), np.zeros(n, np.int64)
        keyed = Keyed(seed, rows, zero)
        drawing = Drawing(Draw.COUPLED, [Sampling(1.0)] * n, keyed)
        tree = append(
            Tree.from_roots(rows, zero),
            rows,
            draw_candidates(drafted.log().expand(n, -1), 1, drawing, rows, zero),
        )
        verdict = Match().accept(tree, Distributions(p.log().expand(2 * n, -1)), keyed)
        rate = np.mean([path.size for path in verdict.paths])
        noise = 4 * np.sqrt(0.25 / n)
        assert (1 - tv) / (1 + tv) - (noise if tv else 0) <= rate <= 1 - tv + (noise if tv else 0)


# Typical acceptance.


def typical_tree() -> Tree:
    """0 → (1 → 3, 2 → 0), tokens by number."""
    bare, two = (
        Tree.from_roots(np.array([0]), np.array([0])),
        Candidates(np.array([[1, 2]]), np.log([[0.5, 0.5]])),
    )
    tree = append(bare, np.array([0]), two)
    return append(tree, np.array([1, 2]), Candidates(np.array([[3], [0]]), np.log([[0.5], [0.5]])))


def test_typical_keeps_what_is_above_the_lower_of_its_two_thresholds() -> None:
    """H = ln 4 for p uniform, so δ · exp(−H) = δ / 4: below ε = .26 a quarter is enough for δ = .9, and not for δ = 1.1."""
    tree, flat = typical_tree(), Distributions(torch.zeros(5, 4))
    kept = Typical(epsilon=0.26, delta=0.9).accept(tree, flat, Answers())
    assert kept.paths[0].size == 2
    assert kept.lossy
    assert Typical(epsilon=0.26, delta=1.1).accept(tree, flat, Answers()).paths[0].size == 0
    assert Typical(epsilon=0.24, delta=1.1).accept(tree, flat, Answers()).paths[0].size == 2


def test_typical_takes_the_longest_path_then_the_likeliest_then_the_first() -> None:
    chances = torch.full((5, 4), 0.01, dtype=torch.float64)
    chances[0, 1], chances[0, 2], chances[1:3, 0], chances[1:3, 3] = 0.3, 0.67, 0.49, 0.49

    def path(*changes: tuple[int, int, float]) -> list[int]:
        p = chances.clone()
        for node, token, x in changes:
            p[node, token] = x
        given = Distributions((p / p.sum(-1, keepdim=True)).log())
        return Typical().accept(typical_tree(), given, Answers()).paths[0].tolist()

    assert path() == [2, 4]
    assert path((2, 0, 0.001)) == [1, 3], "longer, though less likely"
    assert path((0, 1, 0.485), (0, 2, 0.485)) == [1, 3], "equally likely: the first"
    assert path((1, 3, 0.001), (2, 0, 0.001)) == [2]


def test_typical_draws_its_bonus_from_p() -> None:
    tree, chance = typical_tree(), Answers()
    Typical().accept(tree, Distributions(P.log().expand(5, -1)), chance)
    assert chance.drawn == [(P.tolist(), 0, 2)]
    assert chance.asked == []


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

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        raise NotImplementedError


def test_pairings_that_are_not_exact_are_refused() -> None:
    check_exact(Chain(), Picky())
    with pytest.raises(
        UserError,
        match="'picky' is not exact where policy 'pct' prunes on what was drawn; allowed: match",
    ):
        check_exact(PCT(), Picky())
    with pytest.raises(
        UserError, match="'picky' is not exact for point draws; allowed: without-replacement"
    ):
        check_exact(Chain(), Picky(Draw.POINT))
    policies: list[Any] = [Chain(), VCT(), PCT()]
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
def test_a_rule_that_does_not_serve_a_temperature_is_refused(
    acceptor: Acceptor, temperature: float
) -> None:
    with pytest.raises(UserError, match=f"does not serve temperature {temperature:g}; allowed: "):
        check_exact(Chain(), acceptor, [Request([0], sampling=Sampling(temperature))])


# The enumeration itself.


def test_outcomes_are_all_there_with_their_probabilities() -> None:
    def run(chance: Branching) -> tuple[Any, ...]:
        first = chance.categorical(torch.tensor([0.5, 0.0, 0.3, 0.2]), 0, 0)
        return (first, chance.bernoulli(0.25, 0, 1)) if first == 2 else (first,)

    assert outcomes(run) == pytest.approx(
        {(0,): 0.5, (2, True): 0.075, (2, False): 0.225, (3,): 0.2}
    )
    assert outcomes(lambda chance: chance.bernoulli(1.0, 0, 0)) == {True: 1.0}


def test_match_at_temperature_0_is_greedy() -> None:
    target, requests = tiny_target(), [Request([3, 1, 4], 9), Request([2], 7, number=1)]
    engine = Engine(target, PLD().open(target), Chain(), Match())
    assert engine.write(requests).tokens == engine.plain(requests).tokens


def test_a_processor_that_may_count_its_calls_is_refused_where_a_rule_looks_ahead() -> None:
    class Counting(LogitsProcessor):
        """Forbids a token at its third call."""

    engine = Engine(tiny_target(), PLD().open(tiny_target()), Chain(), Block())
    request = Request([3, 1, 4], 5, processors=(Counting(),))
    with pytest.raises(
        UserError,
        match="'block' asks for p ahead of what it accepts, and processor Counting may keep count",
    ):
        engine.write([request], Sampling(1.0))
    known = TemperatureLogitsWarper(1.2)
    engine.write([Request([3, 1, 4], 5, processors=(known,), guides=(known,))], Sampling(1.0))
    engine.write([Request([3, 1, 4], 5, processors=(known,), stateless=(known,))], Sampling(1.0))


@pytest.mark.parametrize("at", range(2, 8))
def test_no_processor_is_asked_what_follows_an_eos(at: int) -> None:
    prompt, target = [3, 1, 4], tiny_target()
    plan = Engine(target, Always([prompt], 61), Chain()).plain([Request(prompt, 12)]).tokens[0]

    class Ending(LogitsProcessor):
        """As a trie of allowed texts: it knows nothing that follows an EOS; plain decoding does not ask it."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert plan[at] not in input_ids[0, len(prompt) :], "asked behind the end of the text"
            return scores

    request = Request(prompt, 12, frozenset({plan[at]}), processors=(Ending(),))
    written = Engine(target, Always([prompt + plan], 61), Chain()).write([request])
    assert written.tokens == [plan[: plan.index(plan[at]) + 1]]


def test_an_eos_at_the_end_of_a_prompt_ends_nothing() -> None:
    few = SuppressTokensLogitsProcessor(list(range(5, 61)))
    request = Request([3, 1, 4], 3, frozenset({4}), processors=(few,))
    assert (
        max(Engine(tiny_target(), Always([[3, 1, 4]], 61), Chain()).write([request]).tokens[0]) < 5
    )


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_request_number_out_of_range_is_told(number: int) -> None:
    with pytest.raises(UserError, match=f"number is {number}, allowed is"):
        Engine(tiny_target(), PLD().open(tiny_target()), Chain()).write(
            [Request([3], 5, number=number)], Sampling(1.0)
        )


@dataclass(frozen=True)
class Memory:
    """What was written last, and each row's text."""

    last: Ints
    texts: tuple[Ints, ...]


class Remembering(Drafter[Memory]):
    """Drafts what the last call wrote at the same place."""

    remembers = True

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Memory | None = None,
        rows: Ints | None = None,
    ) -> Memory:
        return Memory(np.zeros(0, np.int64) if state is None else state.last, tuple(prompts))

    def expand(
        self, state: Memory, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Memory]:
        places = [len(state.texts[tree.row[n]]) + int(tree.depth[n]) + 1 for n in frontier]
        known = np.array([place < len(state.last) for place in places])
        tokens = np.array([state.last[place] if place < len(state.last) else 0 for place in places])
        return Candidates(tokens[:, None], np.where(known, 0.0, -np.inf)[:, None]), state

    def commit(
        self, state: Memory, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Memory:
        return replace(state, texts=extend_texts(state.texts, tree, verdict))

    def truncate(self, state: Memory, lengths: Ints, rows: Ints | None = None) -> Memory:
        return Memory(state.texts[0], truncate_texts(state.texts, lengths, rows))

    def carry(self, state: Memory) -> Memory:
        return Memory(state.texts[0], ())


@pytest.mark.parametrize(
    ("rule", "reuse"), one_in(2, [Rejection(), Block(), MultiRound()], [False, True]), ids=str
)
def test_a_drafter_that_remembers_does_not_know_the_noise_that_judges_it(
    rule: Acceptor, reuse: bool
) -> None:
    """Three calls of one seed. With the same noise in each, the second's text would be what that noise makes of the first's,
    and the third's first token .82 instead of .7 by rejection: where 0.3 < u < 0.7 always, else in
    .7 of the cases.
    """
    target = table_target(torch.tensor([0.7, 0.3]).repeat(3, 2, 1), 32)
    seeds = 60
    length = 8
    request, frequent = Request([0, 1, 0, 1], length), 0
    for seed in range(seeds):
        engine = Engine(target, Remembering(), Chain(3), rule)
        for _ in range(3):
            written = engine.write([request], Sampling(1.0, seed=seed), reuse=reuse).tokens[0][1:]
        frequent += written.count(0)
    error = (frequent / (seeds * (length - 1)) - 0.7) / np.sqrt(0.7 * 0.3 / (seeds * (length - 1)))
    assert abs(error) < 3.3


def test_calls_of_a_drafter_that_remembers_nothing_repeat_themselves() -> None:
    target, request = tiny_target(), Request([3, 1, 4], 9)
    engine = Engine(target, VDM().example(target), Chain(3), Rejection())
    assert (
        engine.write([request], Sampling(1.0, seed=4)).tokens
        == engine.write([request], Sampling(1.0, seed=4)).tokens
    )
