"""CaPE's chain and its alternatives, against section 4.2 over again on lists."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.errors import UserError
from draftree.policies.cape import CAPE
from grown_trees import always, grown, paths
from rules import Path, Rule, following


def alternatives(p: float) -> int:
    """S(p)."""
    return 7 if p <= 0.3 else 5 if p <= 0.6 else 3 if p <= 0.8 else 1


def wanted(rule: Rule, root: int, knobs: CAPE, room: int = 99) -> list[Path]:
    """The paths kept in one row, in the order in which they are drafted."""
    found: list[tuple[float, Path]] = []
    value, chain = 0.0, ()
    for _ in range(min(knobs.length, room)):
        log_q = dict(enumerate(rule((root, *chain))[: knobs.candidates]))
        order = sorted((t for t in log_q if log_q[t] > -math.inf), key=lambda t: -log_q[t])
        if not order:
            break
        kept = order[
            : 1 + (alternatives(math.exp(log_q[order[0]])) if knobs.sets is None else knobs.sets)
        ]
        found += [(value + log_q[t], (*chain, t)) for t in sorted(kept)]
        value, chain = value + log_q[order[0]], (*chain, order[0])
    best = sorted(
        range(len(found)), key=lambda i: (found[i][1] != chain[: len(found[i][1])], -found[i][0])
    )[: knobs.max_nodes]
    return [found[i][1] for i in sorted(best)]


def dirichlet(seed: int, missing: float) -> Rule:
    """Ten candidates in no order of likelihood, now sure and now not; some are missing."""

    def rule(path: Path) -> list[float]:
        rng = np.random.default_rng([seed, *path])
        q = rng.dirichlet(np.full(10, rng.choice([0.05, 0.3, 3.0])))
        there = (q > 1e-9) & (rng.random(10) >= missing)
        return np.log(q, where=there, out=np.full(10, -np.inf)).tolist()

    return rule


# How many.


@pytest.mark.parametrize(
    ("p", "paper", "official"),
    [(0.01, 8, 8), (0.29, 8, 8), (0.3, 8, 6), (0.31, 6, 6), (0.6, 6, 4), (0.61, 4, 4), (0.79, 4, 4), (0.8, 4, 2), (0.81, 2, 2),
     (1.0, 2, 2), (1.0000001, 2, 2)],
)  # fmt: skip
def test_children_by_confidence(p: float, paper: int, official: int) -> None:
    assert CAPE(bins="paper").children(np.array([p])).tolist() == [paper]
    assert CAPE(bins="official").children(np.array([p])).tolist() == [official]
    assert p > 1 or paper == 1 + alternatives(p)


@given(st.lists(st.floats(1e-6, 1), min_size=1))
def test_paper_and_code_differ_at_the_edges_alone(p: list[float]) -> None:
    inside = np.array([x for x in p if min(abs(x - edge) for edge in (0.3, 0.6, 0.8)) > 1e-9])
    assert (
        CAPE(bins="paper").children(inside).tolist()
        == CAPE(bins="official").children(inside).tolist()
    )


@pytest.mark.parametrize(
    ("p", "children"), [(0.1, 4), (0.25, 4), (0.26, 1), (0.5, 1), (0.51, 3), (1.0, 3)]
)
def test_bins_can_be_given(p: float, children: int) -> None:
    # Three beside the top one up to .25, none up to .5, two beyond.
    assert CAPE(bins="3/.25/0/0.5/2").children(np.array([p])).tolist() == [children]


@given(st.lists(st.floats(1e-6, 1), min_size=1))
def test_the_papers_bins_and_the_ablation_written_out(p: list[float]) -> None:
    paper, written = CAPE(), CAPE(bins="7/0.3/5/0.6/3/0.8/1")
    assert paper.children(np.array(p)).tolist() == written.children(np.array(p)).tolist()
    assert CAPE(sets=4).children(np.array(p)).tolist() == [5] * len(p), (
        "the token of the chain and four others"
    )
    assert CAPE(bins="4").children(np.array(p)).tolist() == [5] * len(p)


def test_no_more_candidates_are_requested_than_the_largest_set() -> None:
    rooms = {
        CAPE(): 8,
        CAPE(bins="official"): 8,
        CAPE(sets=4): 5,
        CAPE(sets=0): 1,
        CAPE(bins="1/0.5/9"): 10,
    }
    assert [policy.candidates for policy in rooms] == list(rooms.values())


# By hand.


def test_sets_of_a_fixed_size_whatever_the_confidence() -> None:
    # Two beside each of the chain's three tokens, sure (.9) or not (.3): 3 + 3 + 3 nodes; values .9
    # .05 .05 | .27 …
    q = [[0.9, 0.05, 0.03, 0.02], [0.3, 0.25, 0.25, 0.2], [0.5, 0.3, 0.1, 0.1]]
    tree = grown(CAPE(3, sets=2), following(lambda path: np.log(q[len(path) - 1]).tolist()))
    assert paths(tree) == [(*[0] * d, t) for d in range(3) for t in range(3)]
    assert paths(grown(CAPE(3, sets=0), always(0.1, 0.05))) == [(0,), (0, 0), (0, 0, 0)], "a chain"


def test_the_less_sure_the_more_alternatives_and_none_is_expanded() -> None:
    sure = [0.9, 0.7, 0.5, 0.2]
    asked: list[tuple[list[int], int]] = []
    rule = lambda path: np.log([sure[len(path) - 1], *[(1 - sure[len(path) - 1]) / 9] * 9]).tolist()
    tree = grown(CAPE(4), following(rule, asked))
    assert asked == [([0], 8), ([1], 8), ([3], 8), ([7], 8)]
    assert np.bincount(tree.depth).tolist() == [1, 2, 4, 6, 8]
    assert [tuple(tree.tokens[tree.children(n)].tolist()) for n in (0, 1, 3, 7)] == [
        tuple(range(n)) for n in (2, 4, 6, 8)
    ]
    assert np.exp(tree.score[[1, 3, 7, 13]]) == pytest.approx(np.cumprod(sure))


def test_the_chain_follows_the_likeliest_wherever_it_stands() -> None:
    rule = lambda path: np.log([0.02, 0.85, 0.03, 0.1]).tolist()
    assert paths(grown(CAPE(2), following(rule))) == [(1,), (3,), (1, 1), (1, 3)]
    level = lambda path: np.log([0.25] * 4).tolist()
    assert paths(grown(CAPE(2), following(level)))[4:] == [(0, 0), (0, 1), (0, 2), (0, 3)], (
        "the first of equals"
    )


def test_beyond_the_nodes_allowed_the_best_are_kept() -> None:
    unsure = always(*[0.125] * 8)
    assert grown(CAPE(5, max_nodes=99), unsure).drafted == 40
    assert grown(CAPE(5), unsure).drafted == 32
    assert grown(CAPE(4), unsure).drafted == 32, "the official length needs no more than is allowed"
    assert paths(grown(CAPE(2, max_nodes=3), always(0.9, 0.02))) == [(0,), (1,), (0, 0)]
    assert paths(grown(CAPE(3, max_nodes=2), always(0.9, 0.02))) == [(0,), (0, 0)]


def test_the_chain_is_never_cut_by_its_own_alternatives() -> None:
    # Five times eight equals: by value 32 nodes are four whole layers, and the chain would end
    # before its fifth token.
    tree = grown(CAPE(5), always(*[0.125] * 8))
    assert np.bincount(tree.depth).tolist() == [1, 8, 8, 8, 7, 1]
    assert (0,) * 5 in paths(tree)
    assert paths(grown(CAPE(5, max_nodes=3), always(*[0.125] * 8))) == [(0,), (0, 0), (0, 0, 0)], (
        "only by the budget"
    )


# Against the rule over again.


@given(
    st.builds(
        CAPE,
        length=st.integers(1, 6),
        max_nodes=st.integers(1, 40),
        sets=st.none() | st.integers(0, 7),
    ),
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.3, 0.9]),
)
def test_the_tree_is_the_papers(policy: CAPE, rooms: list[int], seed: int, missing: float) -> None:
    rule = dirichlet(seed, missing)
    tree = grown(policy, following(rule), depth=rooms)
    for row, room in enumerate(rooms):
        assert paths(tree, row) == wanted(rule, row, policy, room)


# Bins and sets.


@pytest.mark.parametrize(
    "bins",
    [
        "mine",
        "",
        "7/0.3",
        "7/0.3/5/0.3/1",
        "7/0.6/5/0.3/1",
        "7/0/5",
        "7/1/5",
        "-1",
        "1.5",
        "7/nan/5",
        "7/x/5",
    ],
)
def test_bins_that_are_none_are_refused(bins: str) -> None:
    told = f"cape: bins is '{bins}', allowed are paper, official, or sizes with rising edges between them, as in 7/0.3/5/0.6/3"
    with pytest.raises(UserError) as error:
        CAPE(bins=bins)
    assert str(error.value) == told


@pytest.mark.parametrize(("sets", "bins"), [(-1, "paper"), (4, "official"), (4, "3/0.5/2")])
def test_sets_out_of_range_or_beside_bins_are_refused(sets: int, bins: str) -> None:
    with pytest.raises(
        UserError,
        match=f"^cape: sets is {sets}.*, allowed is (none or a whole number of at least 0|one of them)$",
    ):
        CAPE(sets=sets, bins=bins)
