"""Beam search and the capped candidate tree, against the definition over again on lists."""

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.policies.beam import Beam
from draftree.policies.vct import VCT
from grown_trees import always, grown, paths
from rules import Path, Rule, following, levels


def layers(rule: Rule, root: int, width: int, kept: int, depth: int) -> list[list[Path]]:
    """The nodes of each layer in drafted order: the `kept` best of all children of the layer before."""
    found: list[list[tuple[float, Path]]] = [[(0.0, ())]]
    for _ in range(depth):
        below = [
            (v + q, (*p, t))
            for v, p in found[-1]
            for t, q in enumerate(rule((root, *p))[:width])
            if q > -math.inf
        ]
        best = sorted(range(len(below)), key=lambda i: -below[i][0])[:kept]
        found.append([below[i] for i in sorted(best)])
    return [[p for _, p in layer] for layer in found[1:]]


def reaching(kept: list[list[Path]]) -> list[list[Path]]:
    """What lies on a path to the last layer that has nodes."""
    last = next((layer for layer in reversed(kept) if layer), [])
    return [[p for p in layer if any(end[: len(p)] == p for end in last)] for layer in kept]


# By hand.

Q = {
    (): [0.5, 0.4, 0.1],
    (0,): [0.4, 0.3, 0.3],
    (1,): [0.9, 0.05, 0.05],
    (0, 0): [0.3, 0.2, 0.1],
    (1, 0): [0.6, 0.3, 0.1],
}


def example(path: Path) -> list[float]:
    return [math.log(q) for q in Q[path[1:]]]


def test_the_best_of_a_layers_children_go_on() -> None:
    # Width 2. Layer 1: .5 and .4. Layer 2: .5 · (.4 .3) = .2 .15 and .4 · (.9 .05) = .36 .02; kept
    # are .2 and .36. Layer 3: .2 · (.3 .2) = .06 .04 and .36 · (.6 .3) = .216 .108; kept are .216
    # and .108, so token 0's beam has died.
    asked: list[tuple[list[int], int]] = []
    tree = grown(Beam(2, 3, survivors=False), following(example, asked))
    assert paths(tree) == [(0,), (1,), (0, 0), (1, 0), (1, 0, 0), (1, 0, 1)]
    assert np.exp(tree.score[1:]) == pytest.approx([0.5, 0.4, 0.2, 0.36, 0.216, 0.108])
    assert asked == [([0], 2), ([1, 2], 2), ([3, 4], 2)], "one draft step for each layer's beams"


def test_dead_beams_can_be_left_out() -> None:
    asked: list[tuple[list[int], int]] = []
    tree = grown(Beam(2, 3, survivors=True), following(example, asked))
    assert paths(tree) == [(1,), (1, 0), (1, 0, 0), (1, 0, 1)]
    assert asked == [([0], 2), ([1, 2], 2), ([3, 4], 2)], "they were drafted all the same"
    both = grown(
        Beam(2, 3, survivors=True), following(lambda path: example((0, *path[1:]))), depth=(99, 2)
    )
    assert [paths(both, row) for row in (0, 1)] == [
        [(1,), (1, 0), (1, 0, 0), (1, 0, 1)],
        [(0,), (1,), (0, 0), (1, 0)],
    ], "each row by its own last layer"


def test_a_capped_layer_keeps_its_best() -> None:
    # Width 3, of which two are kept a layer: .5 .4 | .2 .36 | .216 .108, as the beam; a cap of
    # three keeps .1 too, then .15 of .5 · (.4 .3 .3) = .2 .15 .15, the lower number of two.
    Q[(2,)] = [0.4, 0.3, 0.3]
    assert paths(grown(VCT(3, 3, layer_top=2), following(example))) == paths(
        grown(Beam(2, 3, survivors=False), following(example))
    )
    assert paths(grown(VCT(3, 2, layer_top=3), following(example))) == [
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert np.bincount(grown(VCT(3, 5, layer_top=9), always(0.5, 0.3, 0.2)).depth).tolist() == [
        1,
        3,
        9,
        9,
        9,
        9,
    ]


def test_lower_number_of_equal_nodes_goes_on() -> None:
    level = always(*[0.25] * 4)
    assert paths(grown(Beam(2, 3, survivors=False), level)) == [
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (0, 0, 0),
        (0, 0, 1),
    ]
    assert paths(grown(VCT(4, 2, layer_top=3), level)) == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2)]


# Against the definition over again.


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 99),
    st.integers(0, 3),
    st.booleans(),
)
def test_beams_are_the_definitions(
    width: int, depth: int, rooms: list[int], seed: int, lowest: int, survivors: bool
) -> None:
    rule = levels(seed, 6, lowest)
    tree = grown(Beam(width, depth, survivors), following(rule), depth=rooms)
    for row, room in enumerate(rooms):
        kept = layers(rule, row, width, width, min(depth, room))
        assert paths(tree, row) == [*chain.from_iterable(reaching(kept) if survivors else kept)]


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 7),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_capped_trees_are_the_definitions(
    width: int, depth: int, top: int, rooms: list[int], seed: int
) -> None:
    rule = levels(seed, 3)
    tree = grown(VCT(width, depth, top), following(rule), depth=rooms)
    for row, room in enumerate(rooms):
        assert paths(tree, row) == [
            *chain.from_iterable(layers(rule, row, width, top, min(depth, room)))
        ]
