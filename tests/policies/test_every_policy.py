"""What holds for every policy; they are found by name, none is listed here but to try more of its knobs.

Shapes: R rows, F frontier nodes, K candidates.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path as File
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftree
from draftree import registry
from draftree.costs.step_costs import Costs
from draftree.policies.base import Expand, Policy
from draftree.tree import Candidates, Ints, Tree, TreeBudget
from grown_trees import always, paths
from policy_specs import VARIATIONS
from rules import Path

COSTS = Costs({1: 0.04, 16: 0.06}, {1: 1.0, 16: 1.1, 64: 1.6})
JOINT = ("yield", "adaptive", "adaserve")
"""Policies with one budget for all rows."""
EXEMPT: dict[str, dict[str, str]] = {
    "alone": dict.fromkeys(
        JOINT, "it decides for the batch jointly: a row's tree depends on what the others' cost"
    ),
    "layers": {
        "accumlogp": "where nodes have fewer children than it asks for, it comes back for more parents"
    },
    "hand": {
        "yield": "it decides for the batch jointly: rows that ride along change what a node costs"
    },
}
"""By property, the policies that are not asked for it, and why."""


def specs(exempt: str = "") -> list[str]:
    """The defaults of every policy, and the variations, less those that a property is not asked of."""
    every = [*registry.names("policy"), *VARIATIONS]
    return [spec for spec in every if spec.partition(":")[0] not in EXEMPT.get(exempt, {})]


@cache
def distribution(seed: int, path: Path) -> tuple[float, ...]:
    """q of tokens 0 … 11, in eighths: there are ties, tokens that cannot come and, now and then, a certain one."""
    rng = np.random.default_rng([seed, *path])
    return tuple(
        (rng.multinomial(8, rng.dirichlet(np.full(12, rng.choice([0.02, 0.2, 1.0])))) / 8).tolist()
    )


def drafter(seed: int, asked: list[Ints] | None = None) -> Expand:
    """The K likeliest tokens of `distribution`, the lower of equals first."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        if asked is not None:
            asked.append(frontier)
        q = np.array([distribution(seed, tokens(tree, int(n))) for n in frontier])
        likeliest = np.argsort(-q, axis=1, kind="stable")[:, :k]
        log_probs = torch.from_numpy(q).log()
        return Candidates(
            likeliest, np.take_along_axis(log_probs.numpy(), likeliest, axis=1), log_probs
        )

    return expand


def tokens(tree: Tree, node: int) -> Path:
    """The tokens from a node's root to it."""
    found: list[int] = []
    while node >= 0:
        found.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tuple(found[::-1])


def grown(spec: str, expand: Expand, rows: Sequence[int], depth: Sequence[int], nodes: int) -> Tree:
    """A forest for some rows of a batch; a row's root is its number."""
    policy: Policy = registry.build("policy", spec)
    live = np.array(rows, np.int64)
    return policy.draft(
        expand,
        Tree.from_roots(live, live),
        COSTS,
        TreeBudget(np.array(depth, np.int64), nodes),
        policy.start(),
    )


def described(tree: Tree, row: int) -> list[tuple[Path, float, float, float]]:
    """One row's nodes in their order."""
    columns = ("log_q", "score", "entropy")
    return [
        (tokens(tree, int(n)), *(float(getattr(tree, c)[n]) for c in columns))
        for n in tree.of_row(row)
    ]  # type: ignore[misc]


def own_limit(spec: str, names: Sequence[str], otherwise: int) -> int:
    """What the policy itself allows, by a knob of one of these names."""
    policy = registry.build("policy", spec)
    found = [
        getattr(policy, n) for n in registry.knobs("policy", spec.partition(":")[0]) if n in names
    ]
    return min([otherwise, *(limit for limit in found if limit is not None)])


seeds = st.integers(0, 10**6)
depths = st.integers(0, 7)
few = st.sampled_from([1, 3, 10, 512])
rooms = st.tuples(depths, depths, depths)
property_test: Callable[[Any], Any] = settings(max_examples=12, deadline=None)


@pytest.mark.parametrize("spec", specs())
@property_test
@given(seeds, rooms, few)
def test_a_tree_is_connected_and_within_its_limits(
    spec: str, seed: int, depth: tuple[int, ...], nodes: int
) -> None:
    tree = grown(spec, drafter(seed), range(3), depth, nodes)
    below = np.arange(3, len(tree))
    parents = tree.parents[below]
    assert tree.tokens[:3].tolist() == tree.row[:3].tolist() == [0, 1, 2], (
        "the roots come first, as they were"
    )
    assert ((parents >= 0) & (parents < below)).all(), "parents come before their children"
    assert (tree.row[below] == tree.row[parents]).all()
    assert (tree.depth[below] == tree.depth[parents] + 1).all()
    assert (np.diff(tree.number) > 0).all()
    assert (tree.score[below] <= tree.score[parents]).all(), "no node ranks above its parent"
    allowed = registry.build("policy", spec).deepest
    assert (tree.depth <= np.minimum(depth, 99 if allowed is None else allowed)[tree.row]).all()
    most = own_limit(spec, ("nodes", "max_nodes"), nodes)
    assert (np.bincount(tree.row) - 1 <= min(most, nodes)).all()
    assert (
        len(set(zip(parents.tolist(), tree.tokens[below].tolist(), strict=True))) == below.size
    ), "siblings differ"
    q = [
        distribution(seed, tokens(tree, int(p)))[t]
        for p, t in zip(parents, tree.tokens[below], strict=True)
    ]
    assert np.exp(tree.log_q[below]) == pytest.approx(q)
    assert min(q, default=1) > 0, "what cannot come becomes no node"


@pytest.mark.parametrize("spec", specs())
def test_the_deepest_layer_that_it_allows_is_reached_where_all_is_certain(spec: str) -> None:
    def certain(tree: Tree, frontier: Ints, k: int) -> Candidates:
        log_q = np.full((len(frontier), k), -np.inf)
        log_q[:, 0] = 0.0
        return Candidates(
            np.tile(np.arange(k), (len(frontier), 1)), log_q, torch.zeros(len(frontier), 1)
        )

    allowed = registry.build("policy", spec).deepest
    most = min(own_limit(spec, ("nodes", "max_nodes"), 40), own_limit(spec, ("budget",), 41) - 1)
    for room in (2, 40):
        tree = grown(spec, certain, [0], (room,), 512)
        assert tree.depth.max() == min(room if allowed is None else allowed, room, most)


@pytest.mark.parametrize("spec", specs())
def test_missing_candidates_become_no_nodes(spec: str) -> None:
    """A drafter that proposes nothing is asked once, and one with a single candidate gets a chain."""
    asked: list[list[int]] = []
    assert grown(spec, always(asked=asked), [0], (9,), 512).drafted == 0
    assert asked in ([], [[0]])
    tree = grown(spec, always(0.9), [0], (9,), 512)
    assert paths(tree) == [(0,) * n for n in range(1, tree.drafted + 1)]
    assert asked == [] or tree.drafted


@pytest.mark.parametrize(
    "spec", [s for s in specs() if "nodes" in registry.knobs("policy", s.partition(":")[0])]
)
def test_a_limit_of_nodes_is_as_good_as_the_option(spec: str) -> None:
    """The nodes that a policy keeps where the batch has room for few are those it would plan itself."""
    name, _, rest = spec.partition(":")
    others = [item for item in rest.split(",") if item and not item.startswith("nodes=")]
    planned = ":".join([name, ",".join([*others, "nodes=3"])])
    for seed in range(5):
        few = grown(spec, drafter(seed), [0], (6,), 3)
        assert described(few, 0) == described(grown(planned, drafter(seed), [0], (6,), 512), 0)


@pytest.mark.parametrize("spec", specs("alone"))
@property_test
@given(seeds, rooms, few)
def test_a_row_gets_the_tree_it_gets_alone(
    spec: str, seed: int, depth: tuple[int, ...], nodes: int
) -> None:
    asked: list[Ints] = []
    together = grown(spec, drafter(seed, asked), range(3), depth, nodes)
    asked_alone: list[Ints] = []
    for row in range(3):
        alone = grown(spec, drafter(seed, asked_alone), [row], depth, nodes)
        assert described(together, row) == described(alone, row)
    assert sum(map(len, asked)) == sum(map(len, asked_alone)), "each row's nodes and no others"
    assert not {r for r in range(3) if depth[r] == 0} & {
        int(n) for frontier in asked for n in frontier
    }
    live = grown(spec, drafter(seed), [0, 2], depth, nodes)
    assert [described(live, row) for row in (0, 2)] == [
        described(together, row) for row in (0, 2)
    ], "a finished row is gone"


@pytest.mark.parametrize("spec", specs())
@property_test
@given(seeds, rooms, few)
def test_ties_are_settled_alike_each_time(
    spec: str, seed: int, depth: tuple[int, ...], nodes: int
) -> None:
    asked: tuple[list[Ints], list[Ints]] = ([], [])
    first, second = (grown(spec, drafter(seed, told), range(3), depth, nodes) for told in asked)
    assert [described(first, row) for row in range(3)] == [
        described(second, row) for row in range(3)
    ]
    assert first.number.tolist() == second.number.tolist()
    assert [f.tolist() for f in asked[0]] == [f.tolist() for f in asked[1]]


@pytest.mark.parametrize("spec", specs())
def test_a_row_without_room_is_not_drafted_for(spec: str) -> None:
    asked: list[Ints] = []
    tree = grown(spec, drafter(5, asked), range(3), (0, 4, -2), 512)
    assert set(tree.row[3:]) == {1}
    assert not {0, 2} & {int(n) for frontier in asked for n in frontier}
    asked.clear()
    assert grown(spec, drafter(5, asked), range(2), (0, 0), 512).drafted == 0
    assert asked == []
    assert grown(spec, drafter(5), range(2), (4, 4), 0).drafted == 0


@pytest.mark.parametrize("spec", specs("layers"))
def test_a_layer_is_drafted_in_one_step(spec: str) -> None:
    layers: list[set[int]] = []

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        layers.append(set(tree.depth[frontier].tolist()))
        return drafter(5)(tree, frontier, k)

    grown(spec, expand, range(3), (7, 7, 7), 512)
    assert layers == [{depth} for depth in range(len(layers))]


@pytest.mark.parametrize("spec", specs("hand"))
def test_nothing_is_done_node_by_node_or_row_by_row(spec: str) -> None:
    def lines(rows: int) -> int:
        seen = 0

        def count(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
            nonlocal seen
            if not frame.f_code.co_filename.startswith(str(File(draftree.__file__).parent)):
                return None
            seen += event == "line"
            return count

        expand = same_everywhere()
        policy: Policy = registry.build("policy", spec)
        roots, room = (
            Tree.from_roots(np.arange(rows), np.zeros(rows, np.int64)),
            TreeBudget(np.full(rows, 7), 4096),
        )  # for all
        memory = policy.start()
        before = sys.gettrace()
        sys.settrace(count)
        try:
            tree = policy.draft(expand, roots, COSTS, room, memory)
        finally:
            sys.settrace(before)
        assert tree.drafted >= rows
        return seen

    lines(1)  # what is computed once is there
    assert lines(1) == lines(5), "as many lines of Python for five rows as for one"


def same_everywhere() -> Expand:
    """The same distribution after every node, so that rows grow alike; outside the traced package, and without a loop."""
    q = 0.7 * 0.3 ** np.arange(60)
    log_probs = torch.from_numpy(q / q.sum()).log()

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        found = np.tile(np.arange(60)[:k], (len(frontier), 1))
        return Candidates(found, log_probs.numpy()[found], log_probs.expand(len(frontier), -1))

    return expand
