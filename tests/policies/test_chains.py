"""Chains that stop early, against the definition over again on lists."""

import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.policies.chain import Chain
from draftree.policies.dyjoint import DyJoint
from draftree.policies.dymax import DyMax
from grown_trees import always, grown, paths
from rules import Rule, following


def by_depth(*q: float) -> Rule:
    """A drafter whose one token at depth d has the probability q[d − 1]."""
    return lambda path: [math.log(q[len(path) - 1])]


# By hand.


def test_dymax_stops_before_the_first_unsure_step() -> None:
    # .9 .4 .3 are at least .3; .2 is not: it is drafted, not verified, and .95 behind it is never
    # asked for.
    asked: list[tuple[list[int], int]] = []
    tree = grown(DyMax(), following(by_depth(0.9, 0.4, 0.3, 0.2, 0.95), asked))
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert np.exp(tree.log_q[1:]) == pytest.approx([0.9, 0.4, 0.3])
    assert asked == [([0], 1), ([1], 1), ([2], 1), ([3], 1)], (
        "the step that was too unsure was drafted"
    )


def test_dyjoint_stops_before_the_path_is_too_unlikely() -> None:
    # Values .9, .9 · .4 = .36, .36 · .3 = .108 are at least .08; .108 · .7 = .0756 is not, though
    # .7 alone would do.
    tree = grown(DyJoint(), following(by_depth(0.9, 0.4, 0.3, 0.7, 0.95)))
    assert np.exp(tree.score[1:]) == pytest.approx([0.9, 0.36, 0.108])


def test_node_at_the_threshold_stays() -> None:
    # Powers of two, so that nothing is rounded: .5 at each step; the path's values are .5 .25 .125
    # .0625.
    assert grown(DyMax(0.5, 4), always(0.5)).drafted == 4
    assert grown(DyMax(0.5 + 1e-12, 4), always(0.5)).drafted == 0
    assert grown(DyJoint(0.125), always(0.5)).drafted == 3
    assert grown(DyJoint(0.125 + 1e-12), always(0.5)).drafted == 2


def test_a_sure_drafter_gets_the_whole_length_and_no_threshold_is_a_chain() -> None:
    assert [grown(policy, always(1.0)).drafted for policy in (DyMax(), DyJoint())] == [10, 10]
    never_unsure = [
        grown(policy, always(1e-9)) for policy in (Chain(3), DyMax(0, 3), DyJoint(0, 3))
    ]
    assert [paths(tree) for tree in never_unsure] == [[(0,), (0, 0), (0, 0, 0)]] * 3
    assert grown(DyMax(0), always()).drafted == grown(DyJoint(0), always()).drafted == 0, (
        "without a candidate nothing"
    )


# Against the definition over again.

probabilities = st.lists(st.floats(1e-3, 1), min_size=1, max_size=12)


@given(probabilities, st.just(0.0) | st.floats(1e-3, 1), st.integers(1, 12), st.integers(0, 12))
def test_length_is_the_definitions(
    some: list[float], threshold: float, length: int, room: int
) -> None:
    q = [*some, *[1e-9] * 12]
    least = math.log(threshold) if threshold else -math.inf
    steps = [math.log(x) for x in q]
    for policy, found in (
        (DyMax(threshold, length), steps),
        (DyJoint(threshold, length), list(accumulate(steps))),
    ):
        unsure = next((i for i, log_q in enumerate(found) if log_q < least), 99)
        assert grown(policy, following(by_depth(*q)), depth=(room,)).drafted == min(
            length, room, unsure
        )


def test_a_chains_shape_does_not_depend_on_draws() -> None:
    assert not Chain().prunes_on_draws
    assert DyMax().prunes_on_draws
    assert DyJoint().prunes_on_draws
    for q in (0.01, 0.5, 1.0):
        assert paths(grown(Chain(5), always(q), nodes=3)) == [(0,), (0, 0), (0, 0, 0)], (
            "room cuts by number"
        )
