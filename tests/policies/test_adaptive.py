"""vLLM's adaptive verification: chains, against the definition over again on lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.metrics import Work
from draftree.policies.adaptive import MIN_DISTANCE, PRIOR_ACCEPTANCE, Adaptive
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget

STAIRS = Costs({1: 0.05}, {1: 1.0, 2: 1.0, 3: 1.5, 4: 1.5, 5: 2.5, 8: 2.5})


def chains(q: list[list[float]], costs: Costs, length: int = 7) -> Tree:
    """Grow chains whose tokens have these probabilities, for one row each."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        assert k == 1
        found = [q[int(tree.row[n])][int(tree.depth[n])] for n in frontier]
        return Candidates(np.zeros((len(frontier), 1), np.int64), np.log(found)[:, None])

    roots = Tree.from_roots(np.arange(len(q)), np.zeros(len(q), np.int64))
    return Adaptive(length).draft(
        expand, roots, costs, TreeBudget(np.full(len(q), 99), 512), PRIOR_ACCEPTANCE
    )


@given(st.lists(st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4), min_size=1, max_size=4))
def test_no_other_number_of_tokens_gives_more_tokens_per_second(q: list[list[float]]) -> None:
    rows = len(q)
    seconds = sum(STAIRS.draft_seconds(1) for _ in range(4))
    survival = sorted((float(np.prod(row[: i + 1])) for row in q for i in range(4)), reverse=True)
    rates = [
        (rows + sum(survival[:n])) / (seconds + STAIRS.target_seconds(1 + n / rows))
        for n in range(len(survival) + 1)
    ]
    tree = chains(q, STAIRS, 4)
    assert rates[tree.drafted] == pytest.approx(max(rates))
    assert sorted(np.exp(tree.score[rows:]), reverse=True) == pytest.approx(
        survival[: tree.drafted]
    )


def test_chains_are_cut_where_passes_get_dearer() -> None:
    flat, steep = Costs({1: 1e-3}, {1: 1.0, 9: 1.001}), Costs({1: 1e-3}, {1: 1.0, 9: 9.0})
    assert np.bincount(chains([[0.9] * 7, [0.5] * 7], flat).row).tolist() == [8, 8]
    assert chains([[0.9] * 7, [0.1] * 7], steep).drafted == 0
    some = Costs({1: 1e-3}, {1: 1.0, 9: 3.0})
    mine, other = np.bincount(chains([[0.9] * 7, [0.1] * 7], some).row).tolist()
    assert mine > other == 1


def test_acceptance_is_learnt_from_what_was_verified() -> None:
    tree = chains([[0.9] * 3], Costs({1: 1e-3}, {1: 1.0, 9: 1.001}), 3)
    memory, policy = PRIOR_ACCEPTANCE, Adaptive()
    nothing = AcceptResult((np.zeros(0, np.int64),), np.array([7]))
    for _ in range(100):
        memory = policy.observe(memory, tree, nothing, Work((1,), 4, 1, 0, 0), STAIRS)
    x = np.array([[1.0, np.log(0.9 / 0.1)]])
    assert memory(x)[0] < 0.2 < PRIOR_ACCEPTANCE(x)[0] == pytest.approx(0.9)
    assert 0 < MIN_DISTANCE < 1e-3
