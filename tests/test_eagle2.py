"""The tree of EAGLE-2, against section 4 over again on lists."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree import registry
from draftree.errors import UserError
from draftree.policies.eagle2 import EAGLE2
from draftree.text import MAX_NODES
from rules import Path, Rule, following, levels
from test_policies import always, grown, paths


def wanted(rule: Rule, root: int, knobs: EAGLE2, room: int = 99) -> list[Path]:
    """The paths kept in one row, in flat order; a candidate's place in the list is the official flat index."""
    candidates: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(min(knobs.depth + 1, room)):
        layer = [(v + q, (*p, t)) for v, p in frontier for t, q in enumerate(rule((root, *p))[: knobs.top_k]) if q > -math.inf]
        frontier = sorted(layer, key=lambda c: -c[0])[: knobs.top_k]
        candidates += layer
    best = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[: knobs.total - 1]
    return [candidates[i][1] for i in sorted(best)]


# By hand.


def test_all_candidates_are_ranked_once_more_at_the_end() -> None:
    # .6 .3 | .36 .18 .18 .09: the shallow node .3 is worth more than the deeper .18, and .36 more than it.
    expand = always(0.6, 0.3)
    assert paths(grown(EAGLE2(4, 1, 2), expand)) == [(0,), (1,), (0, 0)]
    assert paths(grown(EAGLE2(5, 1, 2), expand)) == [(0,), (1,), (0, 0), (0, 1)], "of two nodes worth .18 the first"
    assert paths(grown(EAGLE2(6, 1, 2), expand)) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    tree = grown(EAGLE2(60, 1, 2), expand)
    assert np.exp(tree.score[1:]) == pytest.approx([0.6, 0.3, 0.36, 0.18, 0.18, 0.09])


def test_a_sure_drafter_gets_a_chain() -> None:
    assert paths(grown(EAGLE2(4, 2, 2), always(0.9, 0.05))) == [(0,), (0, 0), (0, 0, 0)]


def test_the_best_of_a_layer_are_expanded_in_their_order() -> None:
    q = {(): [0.5, 0.4, 0.1], (0,): [0.2, 0.1, 0.1], (1,): [0.1, 0.9, 0.01]}
    asked: list[tuple[list[int], int]] = []
    tree = grown(EAGLE2(60, 2, 3), following(lambda path: np.log(q.get(path[1:], [0.25] * 3)).tolist(), asked))
    # Nodes 1-3 are the first layer; 4-6 are worth .1 .05 .05, 7-9 are worth .04 .36 .004, 10-12 are worth .025 each.
    assert asked == [([0], 3), ([1, 2, 3], 3), ([8, 4, 5], 3)]
    assert tree.parents[13:].tolist() == [8] * 3 + [4] * 3 + [5] * 3, "children of the better parent have lower numbers"


# Ties.


@pytest.mark.parametrize("total", range(2, 8))
def test_a_child_that_is_certain_is_never_kept_without_its_parent(total: int) -> None:
    # Both first tokens are worth 1/e; behind token 1 all is certain, and so worth as much as token 1 itself.
    rule = lambda path: [-1.0, -1.0] if path == (0,) else [-9.0, 0.0] if path[1] == 1 else [-5.0, -5.0]
    best = [(0,), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 1)]
    assert paths(grown(EAGLE2(total, 4, 2), following(rule))) == best[: total - 1]


# Against the rule over again.

rooms = st.lists(st.integers(0, 6), min_size=1, max_size=3)
knobs = st.builds(EAGLE2, total=st.integers(2, 40), depth=st.integers(0, 4), top_k=st.integers(1, 5))


@given(knobs, rooms, st.integers(0, 99), st.integers(1, 4), st.integers(0, 3))
def test_the_tree_is_the_papers(policy: EAGLE2, rooms: list[int], seed: int, width: int, lowest: int) -> None:
    rule = levels(seed, width, lowest)
    tree = grown(policy, following(rule), depth=rooms)
    for row, room in enumerate(rooms):
        assert paths(tree, row) == wanted(rule, row, policy, room)


# Room.


def test_every_row_has_its_own_best() -> None:
    asked: list[list[int]] = []
    tree = grown(EAGLE2(6, 2, 2), always(0.6, 0.3, asked=asked), depth=(99, 1, 0))
    assert [len(paths(tree, row)) for row in range(3)] == [5, 2, 0]
    assert asked[0] == [0, 1], "a row without room is not drafted for"
    both: list[list[int]] = []
    grown(EAGLE2(6, 2, 2), always(0.6, 0.3, asked=both), depth=(99, 99))
    assert both == [[0, 1], [2, 3, 4, 5], [6, 7, 10, 11]], "two nodes of each row"


def test_more_is_drafted_than_there_is_room_to_verify() -> None:
    asked: list[list[int]] = []
    tree = grown(EAGLE2(60, 7, 10), always(0.91, *[0.01] * 9, asked=asked), nodes=MAX_NODES)
    assert len(asked) == 8, "the last layer's nodes are not expanded"
    assert MAX_NODES < 10 + 7 * 100
    assert (int(tree.depth.max()), tree.drafted) == (8, 59)
    few = grown(EAGLE2(60, 2, 2), always(0.9, 0.05), nodes=3)
    assert paths(few) == [(0,), (0, 0), (0, 0, 0)]


def test_what_is_missing_becomes_no_node() -> None:
    asked: list[list[int]] = []
    assert grown(EAGLE2(), always(asked=asked)).drafted == 0
    assert asked == [[0]]
    assert paths(grown(EAGLE2(9, 2, 3), always(0.6))) == [(0,), (0, 0), (0, 0, 0)]


# Knobs.


def test_a_spec_names_the_knobs() -> None:
    assert registry.build("policy", "eagle2") == EAGLE2(60, 5, 10)
    assert registry.build("policy", "eagle2:total=20,depth=3,top_k=4") == EAGLE2(20, 3, 4)


@pytest.mark.parametrize("wrong", [lambda: EAGLE2(total=1), lambda: EAGLE2(depth=-1), lambda: EAGLE2(top_k=0)])
def test_knobs_out_of_range_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match="allowed are at least 2, 0 and 1"):
        wrong()
