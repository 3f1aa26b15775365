"""The forest's own arithmetic, against its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.tree import Candidates, Draw, Tree
from forests import attach


@st.composite
def forests(draw: st.DrawFn) -> Tree:
    """Any forest: up to three rows, nodes behind any earlier ones."""
    rows = draw(st.integers(1, 3))
    tree = Tree.from_roots(np.arange(rows), np.arange(rows) + 10)
    parents = [draw(st.integers(0, n - 1)) for n in range(rows, rows + draw(st.integers(0, 14)))]
    return attach(tree, parents, range(20, 20 + len(parents)))


def path_of(tree: Tree, node: int) -> list[int]:
    """From the root to the node, by following parents."""
    before = [] if tree.parents[node] < 0 else path_of(tree, int(tree.parents[node]))
    return [*before, node]


@settings(max_examples=60)
@given(tree=forests())
def test_everything_follows_from_the_parents(tree: Tree) -> None:
    for node in range(len(tree)):
        path = path_of(tree, node)
        assert tree.path(node).tolist() == path
        assert tree.depth[node] == len(path) - 1
        assert tree.row[node] == path[0]
        assert np.flatnonzero(tree.ancestors[node]).tolist() == sorted(path)
        assert tree.children(node).tolist() == [
            i for i in range(len(tree)) if tree.parents[i] == node
        ]
    assert tree.roots + tree.drafted == len(tree)
    assert np.array_equal(
        np.concatenate([tree.of_row(r) for r in range(tree.roots)]),
        np.argsort(tree.row, kind="stable"),
    )
    assert tree.number.tolist() == list(range(len(tree)))


@settings(max_examples=60)
@given(tree=forests(), data=st.data())
def test_a_selection_keeps_paths_and_remembers_numbers(tree: Tree, data: st.DataObject) -> None:
    keep = np.zeros(len(tree), np.bool_)
    keep[: tree.roots] = True
    for node in data.draw(st.lists(st.integers(0, len(tree) - 1), max_size=6)):
        keep[tree.path(node)] = True
    small = tree.select(keep)
    assert small.number.tolist() == np.flatnonzero(keep).tolist()
    for node in range(len(small)):
        assert (
            small.tokens[small.path(node)].tolist()
            == tree.tokens[tree.path(int(small.number[node]))].tolist()
        )
    again = small.select(np.ones(len(small), np.bool_))
    assert again.number.tolist() == small.number.tolist()  # still the numbers of the drafting


def test_a_selection_that_loses_a_parent_is_refused() -> None:
    tree = attach(Tree.from_roots(np.arange(1), np.arange(1)), [0, 1], [5, 6])
    with pytest.raises(AssertionError, match="lost its parent"):
        tree.select(np.array([True, False, True]))
    with pytest.raises(AssertionError, match="lost its parent"):
        tree.select(np.array([False, True, True]))


def test_sampled_nodes_keep_their_distributions() -> None:
    q = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    drawn = Candidates(
        np.array([[1, 0], [0, 1]]), q.log().numpy(), q.log(), Draw.WITH_REPLACEMENT, source=3
    )
    roots = Tree.from_roots(np.array([0, 2]), np.array([7, 8]))
    tree = roots.append(
        np.array([1, 1]),
        np.array([0, 1]),
        np.log([0.25, 0.75]),
        np.zeros(2),
        drawn,
        np.arange(2)[::-1],
    )
    assert tree.draw is Draw.WITH_REPLACEMENT
    assert tree.source.tolist() == [-1, -1, 3, 3]
    assert tree.row.tolist() == [0, 2, 2, 2]
    small = tree.select(np.array([True, True, False, True]))
    assert small.q is not None
    assert small.q_row.tolist() == [-1, -1, 0]
    assert torch.allclose(small.q, q)
    more = small.append(
        np.array([2]), np.array([1]), np.zeros(1), np.zeros(1), drawn, np.ones(1, int)
    )
    assert more.q is not None
    assert more.q_row.tolist() == [-1, -1, 0, 3], "later distributions are stored after the earlier"
    assert torch.equal(more.q[2:], small.q)


def test_entropy_is_taken_over_the_likeliest_thousand() -> None:
    uniform = torch.full((1, 4), 0.25).log()
    certain = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]])
    both = Candidates(np.zeros((2, 1)), np.zeros((2, 1)), torch.cat((uniform, certain)))
    assert both.entropy() == pytest.approx([math.log(4), 0])
    wide = torch.full((1, 4000), 1 / 4000).log()
    assert Candidates(np.zeros((1, 1)), np.zeros((1, 1)), wide).entropy() == pytest.approx(
        [math.log(4000) / 4], rel=1e-4
    )
    assert Candidates(np.zeros((2, 1)), np.zeros((2, 1))).entropy().tolist() == [0, 0]
