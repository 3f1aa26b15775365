"""JetSpec's tree: whole families, the likeliest parent first, against a heap."""

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_opttree import likely

from draftree.policies.accumlogp import AccumLogP
from grown_trees import always, grown, paths
from rules import Path, Rule, following


def heaped(rule: Rule, budget: int, width: int, depth: int) -> dict[Path, float]:
    """The official builder: the likeliest node of the heap gets all its children, until there are enough with the root."""
    heap, found = [(-0.0, 0, ())], dict[Path, float]()
    while heap:
        score, _, path = heapq.heappop(heap)
        log_q = rule((0, *path))[:width]
        for token in [t for t, q in enumerate(log_q) if q > -math.inf] if len(path) < depth else []:
            if len(found) + 1 == budget:
                return found
            found[*path, token] = -score + log_q[token]
            heapq.heappush(heap, (-found[*path, token], len(found), (*path, token)))
    return found


@given(st.integers(0, 999), st.integers(2, 20), st.integers(1, 5), st.integers(1, 4))
def test_the_same_families_as_from_a_heap(seed: int, budget: int, width: int, depth: int) -> None:
    rule = likely(seed, 5)
    tree = grown(AccumLogP(budget, width, depth), following(rule))
    assert dict(zip(paths(tree), tree.score[1:], strict=True)) == pytest.approx(
        heaped(rule, budget, width, depth)
    )


def test_siblings_cost_their_place_and_the_last_family_is_cut() -> None:
    # Of q = .9 .05, six nodes with the root: (0), (1), then the children of .9, of .81 the first
    # alone.
    assert paths(grown(AccumLogP(6, 2), always(0.9, 0.05))) == [
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (0, 0, 0),
    ]
