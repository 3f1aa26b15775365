"""The tree of EAGLE-2, against section 4 over again on lists."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.policies.eagle2 import EAGLE2
from draftree.tree import MAX_NODES
from grown_trees import always, grown, paths
from rules import Path, Rule, following, levels

Candidate = tuple[float, float, Path]
"""Value, own log q, path."""


def wanted(rule: Rule, root: int, knobs: EAGLE2, room: int = 99) -> list[Path]:
    """The paths kept in one row, in flat order; a candidate's place in the list is the official flat index."""
    by_value = knobs.expand_by == "value"
    least: dict[Path, float] = {(): 0.0}
    candidates: list[Candidate] = []
    expanded: set[Path] = set()
    frontier: list[Candidate] = [(0.0, 0.0, ())]
    for _ in range(min(knobs.depth, room)):
        layer = [
            (v + q, q, (*p, t))
            for v, _, p in frontier
            for t, q in enumerate(rule((root, *p))[: knobs.width])
            if q > -math.inf
        ]
        frontier = sorted(layer, key=lambda c: -c[0] if by_value else -c[1])[: knobs.width]
        expanded |= {p for _, _, p in frontier}
        candidates += layer
        least |= {p: min(q, least[p[:-1]]) for _, q, p in layer}
    ranked = [i for i, c in enumerate(candidates) if knobs.rerank or c[2] in expanded]
    worth = lambda c: c[0] if knobs.rank_by == "value" else least[c[2]]
    best = sorted(ranked, key=lambda i: -worth(candidates[i]))[: knobs.nodes]
    return [candidates[i][2] for i in sorted(best)]


# By hand.


def test_all_candidates_are_ranked_once_more_at_the_end() -> None:
    # .6 .3 | .36 .18 .18 .09: the shallow node .3 is worth more than the deeper .18, and .36 more
    # than it.
    expand = always(0.6, 0.3)
    assert paths(grown(EAGLE2(3, 2, 2), expand)) == [(0,), (1,), (0, 0)]
    assert paths(grown(EAGLE2(4, 2, 2), expand)) == [(0,), (1,), (0, 0), (0, 1)], (
        "of two nodes worth .18 the first"
    )
    assert paths(grown(EAGLE2(5, 2, 2), expand)) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    tree = grown(EAGLE2(59, 2, 2), expand)
    assert np.exp(tree.score[1:]) == pytest.approx([0.6, 0.3, 0.36, 0.18, 0.18, 0.09])


def test_a_sure_drafter_gets_a_chain() -> None:
    assert paths(grown(EAGLE2(3, 3, 2), always(0.9, 0.05))) == [(0,), (0, 0), (0, 0, 0)]


def test_the_best_of_a_layer_are_expanded_in_their_order() -> None:
    q = {(): [0.5, 0.4, 0.1], (0,): [0.2, 0.1, 0.1], (1,): [0.1, 0.9, 0.01]}
    asked: list[tuple[list[int], int]] = []
    tree = grown(
        EAGLE2(59, 3, 3),
        following(lambda path: np.log(q.get(path[1:], [0.25] * 3)).tolist(), asked),
    )
    # Nodes 1-3 are the first layer; 4-6 are worth .1 .05 .05, 7-9 are worth .04 .36 .004, 10-12 are
    # worth .025 each.
    assert asked == [([0], 3), ([1, 2, 3], 3), ([8, 4, 5], 3)]
    assert tree.parents[13:].tolist() == [8] * 3 + [4] * 3 + [5] * 3, (
        "children of the better parent have lower numbers"
    )


# The ablation of Table 3.

Q = {
    (): [0.6, 0.4],
    (0,): [0.5, 0.4],
    (1,): [0.9, 0.1],
    (0, 0): [0.8, 0.2],
    (0, 1): [0.7, 0.3],
    (1, 0): [0.6, 0.4],
}


def example(path: Path) -> list[float]:
    return [math.log(q) for q in Q[path[1:]]]


def test_layers_may_be_expanded_by_confidence() -> None:
    # Nodes 1 2 are worth .8 .2; 3-6 are worth .8 · (.5 .4) = .40 .32 and .2 · (.6 .3) = .12 .06.
    # Expanded are the two of the highest value, 3 and 4, or of the highest confidence, 5 (.6) and 3
    # (.5).
    rule = lambda path: np.log(
        {(): [0.8, 0.2], (0,): [0.5, 0.4], (1,): [0.6, 0.3]}.get(path[1:], [0.5, 0.25])
    ).tolist()
    by_value: list[tuple[list[int], int]] = []
    tree = grown(EAGLE2(99, 3, 2), following(rule, by_value))
    assert by_value == [([0], 2), ([1, 2], 2), ([3, 4], 2)]
    by_confidence: list[tuple[list[int], int]] = []
    other = grown(EAGLE2(99, 3, 2, expand_by="confidence"), following(rule, by_confidence))
    assert by_confidence == [([0], 2), ([1, 2], 2), ([5, 3], 2)]
    # All ten are ranked by value in both: .8 .40 .32 .2 | .20 .10 .16 .08 against | .06 .03 .20 .10
    # at the end.
    assert np.exp(tree.score[7:]) == pytest.approx([0.2, 0.1, 0.16, 0.08])
    assert np.exp(other.score[7:]) == pytest.approx([0.06, 0.03, 0.2, 0.1])
    ranked = grown(EAGLE2(5, 3, 2, expand_by="confidence"), following(rule))
    assert paths(ranked) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], (
        "(1, 0) was expanded, and is worth no place"
    )


def test_the_last_ranking_may_go_by_confidence() -> None:
    # Values .6 .4 | .30 .24 .36 .04 (all four of two layers of width 2); own confidences .6 .4 | .5
    # .4 .9 .1, of which the .9 lies below the .4 and counts for no more: .6 .5 and, of the three
    # .4, the first two.
    by_value, by_confidence = (EAGLE2(4, 2, 2, rank_by=by) for by in ("value", "confidence"))  # type: ignore[arg-type]
    assert paths(grown(by_value, following(example))) == [(0,), (1,), (0, 0), (1, 0)]
    assert paths(grown(by_confidence, following(example))) == [(0,), (1,), (0, 0), (0, 1)]
    assert paths(grown(EAGLE2(2, 2, 2, rank_by="confidence"), following(example))) == [
        (0,),
        (0, 0),
    ], ".5 is more than .4"


def test_without_reranking_what_was_chosen_for_expansion_is_kept() -> None:
    # Width 2, by hand as above: layer 1 .6 .4, layer 2 .36 .30 of .30 .24 .36 .04; layer 3 .36 ·
    # (.6 .4) = .216 .144 and .30 · (.8 .2) = .24 .06, of which .24 and .216 would be expanded next:
    # 2 nodes of each of 3 layers.
    plain = EAGLE2(99, 3, 2, rerank=False)
    assert paths(grown(plain, following(example))) == [
        (0,),
        (1,),
        (0, 0),
        (1, 0),
        (1, 0, 0),
        (0, 0, 0),
    ]
    # Six nodes again, by rank: .24 (0, 1) is worth as much as .24 (0, 0, 0) and more than .216 (1,
    # 0, 0).
    assert paths(grown(EAGLE2(6, 3, 2), following(example))) == [
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 0, 0),
    ]
    assert paths(grown(EAGLE2(4, 3, 2, rerank=False), following(example))) == [
        (0,),
        (1,),
        (0, 0),
        (1, 0),
    ], "at most `nodes`"
    both = EAGLE2(99, 3, 1, expand_by="confidence", rerank=False)
    assert paths(grown(both, following(example))) == [(0,), (0, 0), (0, 0, 0)]


def test_the_papers_budget_is_what_is_expanded() -> None:
    wide = always(*[0.1] * 10)
    assert (
        grown(EAGLE2(rerank=False), wide).drafted == grown(EAGLE2(), wide).drafted == 60 == 6 * 10
    )


# Ties.


@pytest.mark.parametrize("nodes", range(1, 7))
def test_a_child_that_is_certain_is_never_kept_without_its_parent(nodes: int) -> None:
    # Both first tokens are worth 1/e; behind token 1 all is certain, and so worth as much as token
    # 1 itself.
    rule = lambda path: (
        [-1.0, -1.0] if path == (0,) else [-9.0, 0.0] if path[1] == 1 else [-5.0, -5.0]
    )
    best = [(0,), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 1)]
    assert paths(grown(EAGLE2(nodes, 5, 2), following(rule))) == best[:nodes]


# Against the rule over again.

rooms = st.lists(st.integers(0, 6), min_size=1, max_size=3)
knobs = st.builds(
    EAGLE2,
    nodes=st.integers(1, 39),
    depth=st.integers(1, 5),
    width=st.integers(1, 5),
    expand_by=st.sampled_from(["value", "confidence"]),
    rerank=st.booleans(),
    rank_by=st.sampled_from(["value", "confidence"]),
)


@given(knobs, rooms, st.integers(0, 99), st.integers(1, 4), st.integers(0, 3))
def test_the_tree_is_the_papers(
    policy: EAGLE2, rooms: list[int], seed: int, width: int, lowest: int
) -> None:
    rule = levels(seed, width, lowest)
    tree = grown(policy, following(rule), depth=rooms)
    for row, room in enumerate(rooms):
        assert paths(tree, row) == wanted(rule, row, policy, room)


# Room.


def test_every_row_has_its_own_best() -> None:
    asked: list[list[int]] = []
    tree = grown(EAGLE2(5, 3, 2), always(0.6, 0.3, asked=asked), depth=(99, 1, 0))
    assert [len(paths(tree, row)) for row in range(3)] == [5, 2, 0]
    assert asked[0] == [0, 1], "a row without room is not drafted for"
    both: list[list[int]] = []
    grown(EAGLE2(5, 3, 2), always(0.6, 0.3, asked=both), depth=(99, 99))
    assert both == [[0, 1], [2, 3, 4, 5], [6, 7, 10, 11]], "two nodes of each row"


def test_more_is_drafted_than_there_is_room_to_verify() -> None:
    asked: list[list[int]] = []
    tree = grown(EAGLE2(59, 8, 10), always(0.91, *[0.01] * 9, asked=asked), nodes=MAX_NODES)
    assert len(asked) == 8, "the last layer's nodes are not expanded"
    assert MAX_NODES < 10 + 7 * 100
    assert (int(tree.depth.max()), tree.drafted) == (8, 59)
    few = grown(EAGLE2(59, 3, 2), always(0.9, 0.05), nodes=3)
    assert paths(few) == [(0,), (0, 0), (0, 0, 0)]
