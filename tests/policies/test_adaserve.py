"""AdaServe's selection, against the definition over again on lists."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from draftree.costs.step_costs import UNIT_COSTS
from draftree.policies.adaserve import AdaServe
from draftree.tree import Candidates, Ints, Tree, TreeBudget


def drafted(policy: AdaServe, seed: int, rows: int) -> Tree:
    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        path = [
            [seed, int(tree.row[n]), *tree.tokens[tree.path(int(n))].tolist()] for n in frontier
        ]
        q = -np.sort(
            [-np.random.default_rng(p).dirichlet(np.full(k + 2, 0.5)) for p in path], axis=1
        )[:, :k]
        return Candidates(np.tile(np.arange(k), (len(frontier), 1)), np.log(q))

    roots = Tree.from_roots(np.arange(rows), np.zeros(rows, np.int64))
    return policy.draft(expand, roots, UNIT_COSTS, TreeBudget(np.full(rows, 99), 512), None)


@example(seed=0, rows=3, budget=1, owed=1.0, most=1)  # 1 + x − x was below 1
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 30), st.floats(1, 4), st.integers(0, 6)
)
def test_each_gets_what_it_is_owed_and_then_the_best_are_taken(
    seed: int, rows: int, budget: int, owed: float, most: int
) -> None:
    whole = drafted(AdaServe(budget=10**6, depth=3, width=3), seed, rows)
    order = sorted(range(rows, len(whole)), key=lambda n: (-whole.score[n], n))
    due: list[tuple[int, int]] = []
    for row in range(rows):
        expected = 1.0
        for place, node in enumerate([n for n in order if whole.row[n] == row][:most]):
            if expected >= owed:
                break
            due.append((place, node))
            expected += float(np.exp(whole.score[node]))
    first = [n for _, n in sorted(due, key=lambda d: (d[0], -whole.score[d[1]], d[1]))]
    chosen = (first + [n for n in order if n not in first])[:budget]
    tree = drafted(AdaServe(budget=budget, owed=owed, most=most, depth=3, width=3), seed, rows)
    assert sorted(tree.number[rows:].tolist()) == sorted(chosen)


def test_the_budget_is_the_batchs() -> None:
    for rows in (1, 4):
        assert drafted(AdaServe(budget=6), 3, rows).drafted == 6
