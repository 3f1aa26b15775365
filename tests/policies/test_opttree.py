"""OPT-Tree: the best tree under a budget, against every other tree and against the definition over again on lists."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.policies.opttree import OPTTree
from grown_trees import always, grown, paths
from rules import Path, Rule, following


def likely(seed: int, width: int) -> Rule:
    """A distribution after every path, its likeliest tokens first; some cannot come."""

    def rule(path: Path) -> list[float]:
        rng = np.random.default_rng([seed, *path])
        q = -np.sort(-rng.dirichlet(np.full(width, rng.choice([0.2, 1.0]))))
        return np.log(q, where=q > 1e-4, out=np.full(width, -np.inf)).tolist()

    return rule


def values(rule: Rule, root: int, depth: int) -> dict[Path, float]:
    """The value of every path down to a depth, in order of layers."""
    found: dict[Path, float] = {(): 1.0}
    layer: list[Path] = [()]
    for _ in range(depth):
        layer = [(*p, t) for p in layer for t, q in enumerate(rule((root, *p))) if q > -math.inf]
        found |= {p: found[p[:-1]] * math.exp(rule((root, *p[:-1]))[p[-1]]) for p in layer}
    return found


def gains(found: dict[Path, float], nodes: int, depth: int) -> list[float]:
    """What each layer adds to the sum of the best values."""
    best = [
        sum(sorted((v for p, v in found.items() if 0 < len(p) <= d), reverse=True)[:nodes])
        for d in range(depth + 1)
    ]
    return np.diff(best).tolist()


# By hand.


def test_search_stops_where_a_layer_adds_too_little() -> None:
    # Three nodes, q = .6 .3. Layer 1: .6 .3, sum .9. Layer 2 brings .36 .18 | .18 .09: .6 .36 .3,
    # sum 1.26, gain .36. Layer 3, below .36 alone: .216 .108: no better than .3, gain 0. All others
    # can only be worse.
    asked: list[tuple[list[int], int]] = []
    rule = lambda path: np.log([0.6, 0.3]).tolist()
    tree = grown(OPTTree(3, 0.0), following(rule, asked))
    assert paths(tree) == [(0,), (1,), (0, 0)]
    assert asked == [([0], 3), ([1, 2], 3), ([3], 3)], (
        "(0, 1) is not among the best three, and so nothing below it is"
    )
    assert len(paths(grown(OPTTree(3, 0.36 + 1e-9), following(rule, asked)))) == 3
    assert asked[3:] == [([0], 3), ([1, 2], 3)], (
        "a gain of .36 is not enough, but what was drafted may be verified"
    )
    assert paths(grown(OPTTree(3, 0.9 + 1e-9), following(rule, asked))) == [(0,), (1,)]
    assert asked[5:] == [([0], 3)]


def test_a_sure_drafter_gets_a_chain_of_all_nodes() -> None:
    # .9ᵏ each: layer k adds .9ᵏ in place of nothing or of .05, so more than .5 up to .9⁶ = .53; .9⁷
    # = .478 is the last.
    assert grown(OPTTree(50, 0.5, max_depth=20), always(0.9)).depth.max() == 7
    assert paths(grown(OPTTree(4, 0.1), always(0.9, 0.05))) == [
        (0,),
        (0, 0),
        (0, 0, 0),
        (0, 0, 0, 0),
    ]
    assert grown(OPTTree(50, 0.0), always(1.0)).depth.max() == 10


def test_the_threshold_is_what_a_draft_step_costs_here() -> None:
    # A chain of .5: layer k adds .5ᵏ. At sₐ/sₜ = .25 the layer that adds exactly .25 is the last,
    # at .2 one more is.
    assert OPTTree().reads_costs
    assert not OPTTree(threshold=0.5).reads_costs
    deepest = [
        grown(OPTTree(), always(0.5), costs=Costs({1: a}, {1: 1.0})).depth.max()
        for a in (0.25, 0.2)
    ]
    assert deepest == [2, 3]
    assert (
        grown(OPTTree(threshold=0.25), always(0.5), costs=Costs({1: 1e-3}, {1: 1.0})).depth.max()
        == 2
    )


def test_lower_number_of_equal_nodes_stays() -> None:
    assert paths(grown(OPTTree(2, 0.0, 2), always(*[0.25] * 4))) == [(0,), (1,)]
    certain = lambda path: (
        [-1.0, -1.0] if len(path) == 1 else [-9.0, 0.0] if path[1] == 1 else [-5.0, -5.0]
    )
    assert paths(grown(OPTTree(3, 0.0), following(certain))) == [(0,), (1,), (1, 1)]


# Against every tree, and the definition over again.


@given(st.integers(0, 999), st.integers(1, 4))
def test_no_tree_of_so_many_nodes_is_expected_to_accept_more(seed: int, nodes: int) -> None:
    rule = likely(seed, 2)
    found = values(rule, 0, 3)
    connected = lambda tree: all(p[:-1] in tree or len(p) == 1 for p in tree)
    every = (set(t) for n in range(nodes + 1) for t in combinations([p for p in found if p], n))
    most = max(sum(found[p] for p in tree) for tree in every if connected(tree))
    tree = grown(OPTTree(nodes, 0.0, 3), following(rule))
    assert np.exp(tree.score[1:]).sum() == pytest.approx(most)


@given(
    st.integers(0, 999),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.07, 0.3, 0.5, 1.5]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_the_tree_is_the_definitions(
    seed: int, nodes: int, depth: int, threshold: float, rooms: list[int]
) -> None:
    rule = likely(seed, 3)
    tree = grown(OPTTree(nodes, threshold, depth), following(rule), depth=rooms)
    for row, room in enumerate(rooms):
        found = values(rule, row, deepest := min(depth, room))
        last = next(
            (
                d + 1
                for d, gain in enumerate(gains(found, nodes, deepest))
                if gain <= threshold + 1e-12
            ),
            deepest,
        )
        drafted = [p for p in found if 0 < len(p) <= last]
        best = sorted(sorted(drafted, key=lambda p: -found[p])[:nodes])
        assert sorted(paths(tree, row)) == best
