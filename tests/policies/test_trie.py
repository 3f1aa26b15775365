"""The trie of what was retrieved: the likeliest nodes, by hand and against all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_opttree import likely, values

from draftree.errors import UserError
from draftree.policies.base import log
from draftree.policies.trie import Trie
from grown_trees import grown, paths
from rules import following


def test_the_most_frequent_continuations_are_kept() -> None:
    # Ten continuations: 0 0 0 five times, 0 1 twice, 1 three times. Shares of the beginnings: (0)
    # .7, (1) .3, (0, 0) .5, (0, 1) .2, (0, 0, 0) .5. The four largest: .7 .5 .5 .3.
    shares = {(): [0.7, 0.3], (0,): [5 / 7, 2 / 7], (0, 0): [1.0, 0.0]}
    asked: list[tuple[list[int], int]] = []

    def rule(path: tuple[int, ...]) -> list[float]:
        return [log(share) for share in shares.get(path[1:], [0.0, 0.0])]

    assert paths(grown(Trie(nodes=4), following(rule, asked))) == [(0,), (1,), (0, 0), (0, 0, 0)]
    assert asked[0] == ([0], 4), "it asks for as many candidates as it may keep"
    assert paths(grown(Trie(), following(rule, []))) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], (
        "all of them fit"
    )


@settings(max_examples=15)
@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 6))
def test_no_other_nodes_are_worth_more(seed: int, width: int, nodes: int) -> None:
    rule = likely(seed, width)
    tree = grown(Trie(nodes), following(rule, []))
    every = sorted((v for p, v in values(rule, 0, 6).items() if p), reverse=True)
    assert np.exp(np.sort(tree.score[1:])[::-1]) == pytest.approx(every[: len(tree) - 1])
    assert len(tree) - 1 == min(nodes, len(every))


def test_a_long_path_is_followed_to_its_end() -> None:
    # .95 and 63 others that share .05: of the 64 best nodes 29 are the path, .95 … .95²⁹ = .23,
    # each worth more than .05/63.
    rule = lambda _: [log(0.95), *[log(0.05 / 63)] * 63]
    tree = grown(Trie(), following(rule, []), (29,))
    assert tree.depth.max() == 29
    assert len(tree) == 1 + 64


def test_a_trie_of_no_nodes_is_refused() -> None:
    with pytest.raises(
        UserError, match="trie: nodes is 0, allowed is a whole number of at least 1"
    ):
        Trie(0)
