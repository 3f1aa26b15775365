"""Policies on candidates made by hand.

Shapes: F frontier nodes, K candidates.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import leading, rank_scores
from draftree.policies.base import Layered, append, best, fit, log, top
from draftree.policies.chain import Chain
from draftree.policies.pct import PCT
from draftree.policies.vct import VCT
from draftree.tree import Candidates, Ints, Tree
from grown_trees import always, grown, paths
from rules import following

# What all of them are made of.


SCORES = st.sampled_from([-np.inf, -3.0, -1.5, -1.0, -0.5, 0.0])


@given(st.lists(st.tuples(st.integers(-1, 3), SCORES), max_size=60), st.integers(0, 5))
def test_the_best_of_each_row_are_its_first_by_falling_score(
    nodes: list[tuple[int, float]], k: int
) -> None:
    rows, score = (
        np.array([r for r, _ in nodes], np.int64),
        np.array([s for _, s in nodes], np.float64),
    )
    wanted = sorted(range(len(nodes)), key=lambda i: (rows[i], -score[i]))
    order, place = rank_scores(rows, score)
    assert order.tolist() == wanted
    assert place.tolist() == [
        sum(rows[j] == rows[i] for j in wanted[:at]) for at, i in enumerate(wanted)
    ]
    assert leading(rows, score, k).tolist() == order[place < k].tolist()


# chain and vct.


def test_chain_is_a_chain() -> None:
    tree = grown(Chain(4), always(0.5, 0.4))
    assert tree.tokens.tolist() == [0] * 5
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    assert np.exp(tree.score) == pytest.approx([1, 0.5, 0.25, 0.125, 0.0625])
    assert np.exp(tree.log_q[1:]) == pytest.approx(0.5)


@pytest.mark.parametrize(("width", "depth"), [(3, 1), (3, 4), (2, 5), (1, 3)])
def test_vct_is_full(width: int, depth: int) -> None:
    tree = grown(VCT(width, depth), always(*[0.3] * width))
    assert np.bincount(tree.depth).tolist() == [width**d for d in range(depth + 1)]
    inner = np.flatnonzero(tree.depth < depth)
    assert all(tree.tokens[tree.children(int(n))].tolist() == list(range(width)) for n in inner)


# pct.


def test_pct_expands_what_is_worth_a_step() -> None:
    # Values after .7 and .3: .49 .21 | .21 .09, then .343 .147. At sₐ/sₜ = .4 the nodes .7 and .49
    # are expanded.
    tree = grown(PCT(width=2, leaf_threshold=0.0, ratio=0.4), always(0.7, 0.3))
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1)]
    assert np.exp(tree.score[1:]) == pytest.approx([0.7, 0.3, 0.49, 0.21, 0.343, 0.147])


def test_pct_expands_at_exactly_the_ratio_and_not_below() -> None:
    at = lambda ratio: np.bincount(
        grown(PCT(width=2, leaf_threshold=0, ratio=ratio), always(0.5, 0.5)).depth
    ).tolist()
    assert at(0.25) == [1, 2, 4, 8], "nodes of value .25 are expanded (eq. 5)"
    assert at(np.nextafter(0.25, 1)) == [1, 2, 4]
    assert at(0.5) == [1, 2, 4]
    assert at(np.nextafter(0.5, 1)) == [1, 2]


def test_pct_drafts_nothing_where_a_draft_step_costs_more_than_a_pass() -> None:
    asked: list[list[int]] = []
    assert grown(PCT(ratio=1.01), always(1.0, asked=asked)).drafted == 0
    assert asked == []
    assert grown(PCT(width=1, max_depth=3, ratio=1.0), always(1.0)).drafted == 3


def test_pct_leaves_out_leaves_below_the_threshold() -> None:
    tree = grown(PCT(width=3, leaf_threshold=0.125, ratio=0.25), always(0.5, 0.25, 0.0625))
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], (
        "a leaf of exactly .125 stays"
    )
    assert np.exp(tree.score[1:]) == pytest.approx([0.5, 0.25, 0.25, 0.125, 0.125, 0.125])


def test_pct_ends_at_its_depth() -> None:
    assert grown(PCT(width=1, max_depth=4, ratio=0.0), always(0.9)).depth.max() == 4
    assert grown(PCT(width=1, max_depth=0, ratio=0.0), always(0.9)).drafted == 0


def test_pct_reads_the_ratio_from_the_costs() -> None:
    assert PCT().reads_costs
    assert not PCT(ratio=0.1).reads_costs
    measured = [
        grown(PCT(width=2, leaf_threshold=0), always(0.5, 0.5), costs=Costs({1: a}, {1: 2.0}))
        for a in (0.5, 0.51)
    ]
    assert [int(t.depth.max()) for t in measured] == [3, 2]
    asked = grown(
        PCT(width=2, leaf_threshold=0, ratio=0.5),
        always(0.5, 0.5),
        costs=Costs({1: 0.001}, {1: 1.0}),
    )
    assert asked.depth.max() == 2


def by_hand(path: tuple[int, ...]) -> list[float]:
    q = {(): [0.6, 0.4], (0,): [0.3, 0.2], (1,): [0.9, 0.1]}
    return np.log(q.get(path[1:], [0.5, 0.25])).tolist()


def test_pct_without_gain_expands_by_the_nodes_own_confidence() -> None:
    # .6 .4 | .6 · (.3 .2) = .18 .12, .4 · (.9 .1) = .36 .04. At a ratio of .35 the values .6, .4
    # and .36 are expanded, and below .36 neither .5 · .36 = .18 nor .09. Of the confidences .6, .4
    # and .9 are, and .5 below .9 again and again.
    knobs = {"width": 2, "leaf_threshold": 0.0, "ratio": 0.35, "max_depth": 4}
    first = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0, 0), (1, 0, 1)]
    assert paths(grown(PCT(**knobs), following(by_hand))) == first
    assert paths(grown(PCT(**knobs, gain=False), following(by_hand))) == [
        *first,
        (1, 0, 0, 0),
        (1, 0, 0, 1),
    ]
    # Leaves are removed by their value whichever it is (step 5 of the ablation): .18 · .5 = .09 and
    # .045 go at .1.
    knobs["leaf_threshold"] = 0.1
    kept = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0)]
    assert paths(grown(PCT(**knobs, gain=False), following(by_hand))) == kept
    assert paths(grown(PCT(**knobs), following(by_hand))) == kept


def test_pct_removes_nodes_by_their_own_confidence() -> None:
    # The same tree: without gain at .35 it only grows, by the children of .5; what is removed at
    # .35 are the .3, .2, .1 and .25, and nothing is left below them. Values stand in for nothing
    # here: (1, 0, 0) is worth .18.
    knobs = {"width": 2, "leaf_threshold": 0.0, "max_depth": 4}
    sure = [(0,), (1,), (1, 0), (1, 0, 0), (1, 0, 0, 0)]
    assert paths(grown(PCT(**knobs, ratio=0.0, own=0.35), following(by_hand))) == sure
    grows = paths(grown(PCT(**knobs, ratio=0.35, gain=False), following(by_hand)))
    with_gain = paths(grown(PCT(**knobs, ratio=0.35), following(by_hand)))
    assert set(with_gain) < set(grows), "a superset, whatever the ratio"
    assert not set(with_gain) <= set(sure)
    assert paths(grown(PCT(**knobs, ratio=0.35, own=0.35), following(by_hand))) == sure[:4], (
        "together: .18 is not expanded"
    )
    knobs["leaf_threshold"] = 0.1
    assert paths(grown(PCT(**knobs, ratio=0.0, own=0.35), following(by_hand))) == sure[:4], (
        "leaves go by their value: .09"
    )


def test_pct_keeps_what_is_exactly_at_the_threshold_of_its_own_confidence() -> None:
    at = lambda own: grown(PCT(1, 3, 0.0, 0.0, own=own), always(0.5)).drafted
    assert [at(0.5), at(np.nextafter(0.5, 1))] == [3, 0]


def test_pct_without_gain_compares_with_the_same_ratio() -> None:
    assert PCT(gain=False).reads_costs
    deepest = lambda ratio: int(grown(PCT(1, 5, 0.0, ratio, False), always(0.5)).depth.max())
    assert [deepest(ratio) for ratio in (0.5, np.nextafter(0.5, 1), 1.01)] == [5, 1, 0]


def test_pct_asks_for_each_layer_at_once() -> None:
    asked: list[list[int]] = []
    grown(PCT(width=2, leaf_threshold=0, ratio=0.25), always(0.5, 0.5, asked=asked), depth=(99, 99))
    assert asked == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13]]


# Room.


def test_room_for_nodes_keeps_the_best_of_each_row() -> None:
    tree = grown(VCT(2, 3), always(0.6, 0.4), depth=(99, 1), nodes=3)
    assert paths(tree, 0) == [(0,), (1,), (0, 0)]
    assert paths(tree, 1) == [(0,), (1,)]
    assert tree.number.tolist() == [0, 1, 2, 3, 4, 5, 6], "numbers of a layer run over all rows"


def test_a_row_that_has_what_it_has_room_for_is_not_drafted_for() -> None:
    # Row 0 has two candidates after each node, row 1 has one: with room for three, row 0 has 2 + 4
    # after two layers, and row 1 needs a third.
    asked: list[tuple[list[int], int]] = []
    rule = lambda path: [-1.0, -1.0 if path[0] == 0 else -np.inf]
    tree = grown(VCT(2, 9), following(rule, asked), depth=(99, 99), nodes=3)
    assert [frontier for frontier, _ in asked] == [[0, 1], [2, 3, 4], [9]]
    assert paths(tree, 0) == [(0,), (1,), (0, 0)]
    assert paths(tree, 1) == [(0,), (0, 0), (0, 0, 0)]
    assert grown(VCT(2, 9), following(rule, asked), depth=(99, 99), nodes=0).drafted == 0
    assert len(asked) == 3, "without room nothing is asked for"


def test_a_node_that_is_cut_takes_its_children_along_and_the_lower_number_wins() -> None:
    tree = grown(VCT(2, 2), always(0.5, 0.5))
    assert paths(fit(tree, 1)) == [(0,)]
    assert paths(fit(tree, 2)) == [(0,), (1,)]
    assert paths(fit(tree, 3)) == [(0,), (1,), (0, 0)]
    assert fit(tree, 6) is tree
    assert fit(tree, 0).drafted == 0
    sure = grown(Chain(3), always(1.0))
    assert paths(fit(sure, 2)) == [(0,), (0, 0)], "a child as good as its parent comes after it"


def test_nothing_is_drafted_beyond_the_room() -> None:
    asked: list[list[int]] = []
    tree = grown(VCT(2, 30), always(0.6, 0.4, asked=asked), nodes=10)
    assert tree.drafted == 10
    assert len(asked) == 3, "2, 4 and 8 nodes are more than there is room for"


trees = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=25)


@given(trees, st.integers(0, 12))
def test_fit_is_connected_and_best(steps: list[tuple[int, int]], nodes: int) -> None:
    tree = Tree.from_roots(np.arange(2), np.zeros(2, np.int64))
    for parent, log_q in steps:
        tree = append(
            tree,
            np.array([parent % len(tree)]),
            Candidates(np.array([[1]]), np.array([[-float(log_q)]])),
        )
    kept = fit(tree, nodes)  # `select` asserts that no kept node lost its parent
    for row in range(2):
        before, after = tree.of_row(row)[1:], kept.number[kept.of_row(row)[1:]]
        wanted = sorted(before.tolist(), key=lambda n: (-tree.score[n], n))[:nodes]
        assert sorted(wanted) == after.tolist()


# append.


def test_append_keeps_draw_order_and_scores_by_path() -> None:
    layer = Candidates(np.array([[4, 2, 7]]), np.log([[0.2, 0.5, 0.3]]))
    tree = append(Tree.from_roots(np.array([0]), np.array([9])), np.array([0]), layer)
    assert tree.tokens[tree.children(0)].tolist() == [4, 2, 7]
    tree = append(tree, np.array([3, 1]), Candidates(np.array([[1], [1]]), np.log([[0.5], [0.1]])))
    assert tree.parents.tolist() == [-1, 0, 0, 0, 3, 1]
    assert np.exp(tree.score[4:]) == pytest.approx([0.15, 0.02])
    assert tree.row.tolist() == [0] * 6


def test_a_layered_policy_may_select_at_the_end() -> None:
    class Pruned(Layered):
        candidates, deepest = 2, 2

        def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
            return append(tree, frontier, candidates)

        def finish(self, tree: Tree) -> Tree:
            return tree.select(np.arange(len(tree)) != 4)

    assert paths(grown(Pruned(), always(0.6, 0.4))) == [(0,), (1,), (0, 0), (1, 0), (1, 1)]


# What policies choose by.


def test_top_is_the_best_of_each_rows_layer() -> None:
    # Rows 0 0 1; of .5 .2 | .5 .1 the two .5, of .1 .1 | both. Of three, .2; of one, the first .5
    # and the first .1.
    tree = Tree.from_roots(np.array([0, 0, 1]), np.zeros(3, np.int64))
    score = np.log([[0.5, 0.2], [0.5, 0.1], [0.1, 0.1]])
    picked = lambda k: top(tree, np.arange(3), score, k).astype(int).tolist()
    assert picked(0) == [[0, 0], [0, 0], [0, 0]]
    assert picked(1) == [[1, 0], [0, 0], [1, 0]]
    assert picked(2) == [[1, 0], [1, 0], [1, 1]]
    assert picked(3) == [[1, 1], [1, 0], [1, 1]]
    assert picked(99) == [[1, 1], [1, 1], [1, 1]]
    assert top(tree, np.arange(0), score[:0], 2).shape == (0, 2)


def test_best_may_go_by_something_else_than_the_score() -> None:
    tree = grown(VCT(2, 1), always(0.6, 0.4), depth=(9, 9))
    nodes = np.arange(2, 6)
    assert best(tree, nodes[::-1], 1).tolist() == [2, 4]
    assert best(tree, nodes, 1, by=-tree.score).tolist() == [3, 5]
    assert best(tree, nodes, 2, by=np.zeros(6)).tolist() == [2, 3, 4, 5]


def test_log_knows_zero() -> None:
    assert log(0.0) == -np.inf
    assert log(1.0) == 0.0
