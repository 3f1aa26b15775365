"""DDTree: the likeliest prefixes, against a heap over the same marginals, and what they take of a drafter of blocks."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_opttree import likely

from draftree.policies.ddtree import DDTree
from grown_trees import grown, paths
from rules import Path, Rule, following


def heaped(rule: Rule, nodes: int, depth: int) -> dict[Path, float]:
    """The paper's builder: a popped prefix is followed on the heap by its next sibling and by its first child."""

    def order(path: Path) -> list[int]:
        log_q = rule((0, *path))
        return sorted(
            (t for t, q in enumerate(log_q) if q > -math.inf), key=lambda t: (-log_q[t], t)
        )

    heap, found = list[tuple[float, Path, int]](), dict[Path, float]()

    def push(parent: Path, rank: int) -> None:
        ranked = order(parent)
        if rank < len(ranked):
            score = (found[parent] if parent else 0.0) + rule((0, *parent))[ranked[rank]]
            heapq.heappush(heap, (-score, (*parent, ranked[rank]), rank))

    push((), 0)
    while heap and len(found) < nodes:
        score, path, rank = heapq.heappop(heap)
        found[path] = -score
        push(path[:-1], rank + 1)
        if len(path) < depth:
            push(path, 0)
    return found


@given(st.integers(0, 999), st.integers(1, 20), st.integers(1, 5))
def test_the_same_prefixes_as_from_a_heap(seed: int, nodes: int, depth: int) -> None:
    rule = likely(seed, 4)
    tree, wanted = grown(DDTree(nodes, depth), following(rule)), heaped(rule, nodes, depth)
    assert dict(zip(paths(tree), tree.score[1:], strict=True)) == pytest.approx(wanted)


@given(st.integers(0, 999), st.integers(1, 12))
def test_marginals_that_all_parents_share(seed: int, nodes: int) -> None:
    rule = lambda path: likely(seed, 5)((len(path),))
    tree, wanted = grown(DDTree(nodes, 4), following(rule)), heaped(rule, nodes, 4)
    assert sorted(tree.score[1:]) == pytest.approx(sorted(wanted.values()))


def test_nodes_that_cannot_be_kept_are_not_expanded() -> None:
    # Two nodes of q = .6 .3: of layer 2, .36 beats .3, and of layer 3, .216 beats nothing.
    asked: list[tuple[list[int], int]] = []
    tree = grown(DDTree(2), following(lambda path: np.log([0.6, 0.3]).tolist(), asked))
    assert paths(tree) == [(0,), (0, 0)]
    assert asked == [([0], 2), ([1, 2], 2), ([3], 2)]
