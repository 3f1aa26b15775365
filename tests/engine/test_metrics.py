"""The figures: what counts as a step, as accepted, as drafted."""

import math

import numpy as np
import pytest
import torch

from draftree.batch import SequenceBatch
from draftree.costs.cost_table import estimate_seconds, estimate_target_seconds
from draftree.costs.step_costs import Costs
from draftree.engine import Engine, generate_plain
from draftree.evaluation.compare import compare, warm_up
from draftree.metrics import Stats, Step, Work, repeated_ngrams, total
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.policies.yield_ import Yield
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.target.target import Probes, Target
from draftree.testing import Always, Never, tiny_target
from draftree.testing.fakes import Scripted
from draftree.tree import AcceptResult, Candidates, Tree

COSTS = Costs({1: 1.0}, {1: 1.0})


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def plans(target: Target, requests: list[Request]) -> list[list[int]]:
    longest = [Request(r.prompt, 30) for r in requests]
    out = Engine(target, Never([], 61), Chain(), costs=COSTS).plain(longest).tokens
    return [[*r.prompt, *t] for r, t in zip(requests, out, strict=True)]


def test_figures_of_hand_made_steps() -> None:
    stats = Stats(10, [Step(2, 5, 3), Step(0, 0, 0), Step(3, 4, 2)], 1.0, 2.0, 4.0)
    assert stats.acceptance_length == pytest.approx((3 + 1 + 4) / 3)
    assert stats.alpha == pytest.approx((3 / 3 + 4 / 2) / 2), (
        "over the steps that drafted; it can exceed 1"
    )
    assert stats.nodes_per_step == 3
    assert stats.depth_per_step == pytest.approx(5 / 3)
    assert stats.tokens_per_second == 2.5


def test_alpha_by_the_depth_that_the_policy_allows() -> None:
    steps = [Step(2, 5, 3), Step(0, 0, 0), Step(3, 4, 2)]
    assert Stats(10, steps, deepest=6).alpha_bound == pytest.approx(8 / 3 / 6), (
        "τ / 6, whatever the trees have left"
    )
    assert Stats(10, steps).alpha_bound is None
    assert total([Stats(10, steps, deepest=6)] * 2).alpha_bound == pytest.approx(8 / 3 / 6)


def test_a_run_knows_how_deep_its_policy_may_go(target: Target) -> None:
    requests = [Request([5, 6, 7], 10)]
    engine = Engine(target, Always(plans(target, requests), 61), VCT(2, 3), costs=COSTS)
    stats = engine.write(requests).stats
    assert (stats.deepest, stats.alpha_bound) == (3, stats.acceptance_length / 3)
    assert engine.plain(requests).stats.alpha_bound is None


def test_a_comparison_begins_with_nothing_learnt(target: Target) -> None:
    request = Request([5, 6, 7], 10)
    engine = Engine(target, Always(plans(target, [request]), 61), Yield(), costs=COSTS)
    first = engine.write([request], reuse=False)
    before = dict(engine.learned)
    assert before
    warm_up(engine, request, baseline=True)
    compare(engine, request, first)
    assert {key: id(value) for key, value in engine.learned.items()} == {
        key: id(value) for key, value in before.items()
    }


def test_counted_work_of_a_run(target: Target) -> None:
    requests = [Request([5, 6, 7], 10)]
    engine = Engine(target, Always(plans(target, requests), 61), VCT(2, 3), costs=COSTS)
    stats = engine.write(requests).stats
    # three layers of 1, 2 and 4 frontier nodes, a tree of 1 + 14; in the last step only a bonus may
    # still come
    assert stats.work == [Work((1, 2, 4), 15, 1, 3), Work((1, 2, 4), 15, 1, 7), Work((), 1, 1, 11)]
    assert stats.draft_steps_per_step == 2.0
    assert Stats().draft_steps_per_step == 0.0
    assert total([stats, stats]).work == [*stats.work, *stats.work]
    assert estimate_seconds(COSTS, stats.work) == (9.0, 6.0)
    plain = engine.plain(requests).stats
    assert plain.work == [Work((), 1, 1, 3 + n) for n in range(9)]
    assert estimate_target_seconds(COSTS, plain.work) == 9.0


def test_rows_are_counted_together(target: Target) -> None:
    requests = [Request([5, 6, 7], 4), Request([8], 8, number=1)]
    stats = (
        Engine(target, Always(plans(target, requests), 61), Chain(2), costs=COSTS)
        .write(requests)
        .stats
    )
    assert stats.work[0] == Work((2, 2), 6, 2, 3)
    assert [w.rows for w in stats.work] == [2, 1, 1]


def test_figures_of_nothing() -> None:
    stats = Stats()
    assert (stats.acceptance_length, stats.alpha, stats.nodes_per_step, stats.depth_per_step) == (
        1.0,
        None,
        0.0,
        0.0,
    )
    assert stats.tokens_per_second == 0.0
    assert Stats(steps=[Step(0, 0, 0)]).alpha is None


def test_json_has_the_names_of_the_command_line() -> None:
    said = Stats(10, [Step(2, 5, 3)], 1.0, 2.0, 4.0).as_json()
    assert said == {
        "new_tokens": 10,
        "steps": 1,
        "acceptance_length": 3.0,
        "alpha": 1.0,
        "alpha_bound": None,
        "nodes_per_step": 5.0,
        "depth_per_step": 3.0,
        "draft_seconds": 1.0,
        "verify_seconds": 2.0,
        "seconds": 4.0,
        "tokens_per_second": 2.5,
        "acceptor": None,
        "draw": None,
        "lossy": False,
        "state_bytes": 0,
    }
    assert all(not isinstance(v, np.generic) for v in said.values())


def test_total_puts_steps_together() -> None:
    parts = [
        Stats(3, [Step(1, 2, 2)], 1.0, 2.0, 3.5),
        Stats(4, [Step(0, 1, 1), Step(3, 3, 3)], 0.5, 0.25, 1.0),
    ]
    assert total(parts) == Stats(7, [Step(1, 2, 2), Step(0, 1, 1), Step(3, 3, 3)], 1.5, 2.25, 4.5)
    assert total([]) == Stats()


def test_repeated_ngrams() -> None:
    assert repeated_ngrams(range(50)) == 0.0
    assert repeated_ngrams([1] * 50) == pytest.approx(1 - 1 / 43)
    assert repeated_ngrams([1, 2, 1, 2, 1], n=2) == pytest.approx(0.5)
    assert repeated_ngrams([1, 2, 3]) == 0.0
    assert repeated_ngrams([]) == 0.0


def test_plain_decoding_is_one_with_a_step_less_than_tokens(target: Target) -> None:
    stats = Engine(target, Never([], 61), Chain(), costs=COSTS).plain([Request([1, 2], 6)]).stats
    assert (stats.new_tokens, len(stats.steps), stats.acceptance_length, stats.alpha) == (
        6,
        5,
        1.0,
        None,
    )
    assert stats.nodes_per_step == stats.depth_per_step == stats.draft_seconds == 0
    assert 0 < stats.verify_seconds < stats.seconds


def test_accepted_nodes_are_counted_and_so_are_trees(target: Target) -> None:
    requests = [Request([5, 6, 7], 10)]
    stats = (
        Engine(target, Always(plans(target, requests), 61), VCT(2, 3), costs=COSTS)
        .write(requests)
        .stats
    )
    assert [(s.accepted, s.nodes, s.depth) for s in stats.steps] == [
        (3, 14, 3),
        (3, 14, 3),
        (0, 0, 0),
    ]
    assert stats.acceptance_length == 3.0
    assert stats.alpha == pytest.approx(4 / 3)
    assert stats.nodes_per_step == pytest.approx(28 / 3)
    assert stats.new_tokens == 10
    assert stats.draft_seconds + stats.verify_seconds < stats.seconds


def test_nothing_accepted_is_one(target: Target) -> None:
    requests = [Request([5, 6, 7], 10)]
    stats = (
        Engine(target, Never(plans(target, requests), 61), Chain(3), costs=COSTS)
        .write(requests)
        .stats
    )
    assert stats.acceptance_length == 1.0
    assert stats.alpha == pytest.approx(
        np.mean([1 / min(3, 9 - n) for n in range(1, 9)]), abs=1e-12
    )


def test_a_cut_at_eos_takes_tokens_and_not_acceptance(target: Target) -> None:
    plan = plans(target, [Request([5, 6, 7])])
    eos = plan[0][3 + 2]
    assert eos not in plan[0][3:5]
    stats = (
        Engine(target, Always(plan, 61), Chain(5), costs=COSTS)
        .write([Request([5, 6, 7], 20, frozenset({eos}))])
        .stats
    )
    assert stats.new_tokens == 3
    assert stats.steps == [Step(5, 5, 5)], (
        "five were accepted, though two of them came after the end"
    )
    assert stats.acceptance_length == 6.0


def test_rows_count_each_for_itself_and_a_finished_row_no_more(target: Target) -> None:
    requests = [Request([5, 6, 7], 4), Request([8], 8, number=1)]
    stats = (
        Engine(target, Always(plans(target, requests), 61), Chain(2), costs=COSTS)
        .write(requests)
        .stats
    )
    assert stats.new_tokens == 12
    assert [(s.accepted, s.nodes) for s in stats.steps] == [(2, 2), (2, 2), (2, 2), (0, 0)][
        : len(stats.steps)
    ]
    assert len(stats.steps) == 1 + 3


def test_tokens_beyond_the_limit_are_not_emitted_but_count_for_tau(target: Target) -> None:
    texts = SequenceBatch(target.new_cache(1, 8))
    texts.admit([Request([1, 2], 3)])
    roots, p = Tree.from_roots(np.array([0]), np.array([2])), Distributions(torch.zeros(1, 3))
    texts.emit(target, roots, p, AcceptResult((np.zeros(0, np.int64),), np.array([3])), step=False)
    tree = Tree.from_roots(np.array([0]), np.array([3]))
    for node, token in enumerate((4, 5, 6)):
        zero = np.zeros(1)
        tree = tree.append(
            np.array([node]),
            np.array([token]),
            zero,
            zero,
            Candidates(np.array([[token]]), zero[None]),
        )
    probes = Probes(np.array([1, 2]), np.array([0, 0]), np.array([3, 4]), np.eye(2, dtype=np.bool_))
    (event,) = texts.emit(
        target, tree, p, AcceptResult((np.array([1, 2, 3]),), np.array([7])), probes
    )
    assert (event.tokens, event.origins) == ([4, 5], ["drafted", "drafted"])
    assert texts.written == [[3, 4, 5]]
    assert texts.stats.new_tokens == 3
    assert texts.stats.steps == [Step(3, 5, 3)], "probes count with the nodes"
    assert texts.live.size == 0


def test_seconds_are_finite_numbers(target: Target) -> None:
    said = (
        Engine(target, Never([[1]], 61), Chain(), costs=COSTS)
        .write([Request([1], 3)])
        .stats.as_json()
    )
    assert all(v is None or isinstance(v, str) or math.isfinite(v) for v in said.values())
    assert torch.is_inference_mode_enabled() is False


class Scheduled(Scripted):
    """Is right for as many tokens of a chain as the schedule says, step by step."""

    def __init__(
        self, plans: list[list[int]], vocab: int, schedules: list[list[int]], start: int
    ) -> None:
        super().__init__(plans, vocab)
        self.misses = list[set[int]]()
        for schedule in schedules:
            ends = np.cumsum([start, *(accepted + 1 for accepted in schedule)])
            self.misses.append(
                {int(end) for end, accepted in zip(ends[1:], schedule, strict=True) if accepted < 8}
            )

    def place(self, row: int, position: int) -> int | None:
        return None if position in self.misses[row] else 0


def test_a_depth_reached_in_exactly_half_the_steps_of_the_one_before(target: Target) -> None:
    """Depth d in 2^-d of 256 steps, to depth 8: τ is 1 + Σ 2^-d = 2 − 2^-8, and α an eighth of it for chains of 8."""
    texts, start = 32, 3
    every = np.random.default_rng(0).permutation(
        [d for d in range(8) for _ in range(2 ** (7 - d))] + [8]
    )
    schedules = [part.tolist() for part in np.split(every, texts)]
    longest = max(sum(s) + len(s) for s in schedules) + 12
    requests = [Request([3, 1, n], longest, number=n) for n in range(texts)]
    known = [
        [*r.prompt, *w]
        for r, w in zip(requests, generate_plain(target, requests).tokens, strict=True)
    ]
    steps = list[Step]()
    for n, request in enumerate(requests):
        alone = Scheduled(known[n : n + 1], 61, schedules[n : n + 1], start)
        written = Engine(target, alone, Chain(8)).write([request])
        assert written.tokens[0] == known[n][start:]
        steps += written.stats.steps[: len(schedules[n])]
    found = Stats(0, steps, 0, 0, 0, [])
    assert found.acceptance_length == pytest.approx(2 - 2**-8, abs=1e-12)
    assert found.alpha == pytest.approx((2 - 2**-8) / 8, abs=1e-12)
