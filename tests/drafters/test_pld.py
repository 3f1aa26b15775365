"""Prompt lookup: only what stands in the text is drafted, by the longest suffix, from the places asked for."""

from collections import Counter
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.drafters import pld
from draftree.drafters.pld import PADDING, PLD, PLDDrafter, continuations
from draftree.engine import Engine
from draftree.policies.base import append
from draftree.policies.chain import Chain
from draftree.policies.trie import Trie
from draftree.policies.vct import VCT
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec
from draftree.testing import random_table, table_target
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget

COSTS = Costs({1: 1.0}, {1: 1.0})


TARGET = table_target(random_table(4, 1), context=64)
TAPS = TARGET.prefill(TARGET.new_cache(1, 1), [np.array([1])], HiddenStateSpec()).hidden_states


def everything(text: list[int], **knobs: Any) -> list[list[int]]:
    """The continuation of each place that counts."""
    return [
        row[row != PADDING].tolist()
        for row in continuations(np.array(text, np.int64), PLD(**knobs))
    ]


def found(text: list[int], **knobs: Any) -> list[int]:
    places = everything(text, **knobs)
    assert len(places) <= 1
    return places[0] if places else []


def drafted(
    text: list[int], policy: Chain | VCT | Trie, knobs: PLD = PLD()
) -> tuple[Tree, list[list[int]]]:
    """The tree behind a text whose last token is the root, and the tokens of its paths."""
    drafter = PLDDrafter(knobs)
    state = drafter.start([np.array(text[:-1], np.int64)], np.array(text[-1:]), TAPS)
    expand = lambda tree, frontier, k: drafter.expand(state, tree, frontier, k, Drawing())[0]
    roots = Tree.from_roots(np.array([0]), np.array(text[-1:], np.int64))
    tree = policy.draft(expand, roots, COSTS, TreeBudget(np.array([50]), 100), None)
    return tree, [tree.tokens[tree.path(n)[1:]].tolist() for n in range(1, len(tree))]


def test_the_longest_suffix_wins_over_a_later_place() -> None:
    assert found([1, 2, 3, 7, 7, 3, 8, 2, 3, 9, 1, 2, 3]) == [7, 7, 3, 8, 2, 3, 9, 1, 2, 3]
    assert found([1, 2, 3, 7, 7, 3, 8, 2, 3, 9, 1, 2, 3], ngram=2) == [9, 1, 2, 3]
    assert found([1, 2, 3, 7, 7, 2, 3, 8, 3, 9, 1, 2, 3], ngram=1) == [9, 1, 2, 3]


def test_the_latest_place_wins() -> None:
    assert found([1, 2, 5, 1, 2, 6, 1, 2], ngram=2) == [6, 1, 2]


def test_shorter_suffixes_are_tried_in_turn() -> None:
    assert found([4, 9, 8, 5, 6, 4]) == [9, 8, 5, 6, 4]
    assert found([2, 3, 9, 8, 2, 3]) == [9, 8, 2, 3]


def test_no_more_than_length_tokens() -> None:
    assert found([1, 2, 3, 4, 5, 1], length=2) == [2, 3]


def test_a_suffix_may_overlap_its_own_place() -> None:
    assert found([6, 6, 6, 6]) == [6]
    assert found([1, 2, 1, 2, 1]) == [2, 1]


@pytest.mark.parametrize("text", [[], [1], [1, 2], [3, 1, 2]])
def test_nothing_found_is_nothing_drafted(text: list[int]) -> None:
    assert found(text) == []
    if text:
        assert drafted(text, Chain(5))[1] == []


def brute_force(text: list[int], ngram: int, length: int) -> list[list[int]]:
    """What followed every place of the longest suffix, in the order of the text."""
    for n in range(min(ngram, len(text) - 1), 0, -1):
        places = [at for at in range(len(text) - n) if text[at : at + n] == text[-n:]]
        if places:
            return [text[at + n : at + n + length] for at in places]
    return []


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4), st.integers(1, 5))
def test_continuations_are_those_of_a_plain_search(
    text: list[int], ngram: int, length: int
) -> None:
    want = brute_force(text, ngram, length)
    assert everything(text, ngram=ngram, length=length, match="all") == want
    assert everything(text, ngram=ngram, length=length) == want[-1:]
    assert everything(text, ngram=ngram, length=length, match="earliest") == want[:1]


def test_the_earliest_place_wins_where_that_is_asked_for() -> None:
    assert found([1, 2, 5, 1, 2, 6, 1, 2], match="earliest") == [5, 1, 2, 6, 1, 2]
    assert found([2, 8, 1, 2, 6, 1, 2], match="earliest") == [6, 1, 2], "of the longest suffix"


def test_all_places_are_merged_by_hand() -> None:
    # Behind 1 2: 3 4 …, 3 5 …, 6 …; q(3) = .8 · 2/3, q(6) = .8 · 1/3, and behind 3 q(4) = q(5) = .8
    # · 1/2.
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 1, 2]
    tree, paths = drafted(text, Trie(), PLD(match="all", length=2))
    assert paths == [[3], [6], [3, 4], [3, 5], [6, 1]]
    assert np.exp(tree.log_q[1:]) == pytest.approx([0.8 * 2 / 3, 0.8 / 3, 0.4, 0.4, 0.8])
    _, paths = drafted(text, Chain(2), PLD(match="all", length=2))
    assert paths == [[3], [3, 4]], "the largest share, and of equals the lower token"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 4))
def test_the_trie_of_all_places_is_that_of_a_plain_search(text: list[int], length: int) -> None:
    tree, paths = drafted(text, Trie(nodes=500), PLD(match="all", length=length))
    every = brute_force(text, 3, length)
    begins = Counter(tuple(c[:n]) for c in every for n in range(1, length + 1) if len(c) >= n)
    assert sorted(map(tuple, paths)) == sorted(begins)
    for node, path in enumerate(paths, 1):
        on = sum(count for begin, count in begins.items() if begin[:-1] == tuple(path[:-1]))
        assert np.exp(tree.log_q[node]) == pytest.approx(0.8 * begins[tuple(path)] / on)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 6))
def test_a_chain_drafts_the_continuation_and_never_an_invented_token(
    text: list[int], length: int
) -> None:
    for policy in (Chain(length), VCT(3, length)):
        tree, paths = drafted(text, policy)
        want = (brute_force(text, 3, 10) or [[]])[-1][:length]
        assert paths == [want[: i + 1] for i in range(len(want))], (
            "one way to go on, whatever the width"
        )
        assert np.exp(tree.log_q[1:]) == pytest.approx(0.8)


@pytest.mark.parametrize("match", ["latest", "earliest", "all"])
def test_the_text_is_searched_once_a_row(
    match: Literal["latest", "earliest", "all"], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = list[int]()
    search = pld.continuations
    monkeypatch.setattr(
        pld, "continuations", lambda text, knobs: searched.append(len(text)) or search(text, knobs)
    )
    drafter = PLDDrafter(PLD(match=match))
    state = (np.array([1, 2, 3, 1]), np.array([5, 6, 5]))
    tree = Tree.from_roots(np.array([0, 1]), np.array([2, 6]))
    proposed, _ = drafter.expand(state, tree, np.array([0, 1]), 2, Drawing())
    others = Candidates(np.array([[7, 8]] * 2), np.zeros((2, 2)))
    tree = append(append(tree, np.array([0, 1]), proposed), np.array([0, 1]), others)
    searched.clear()
    found, _ = drafter.expand(state, tree, np.arange(len(tree)), 2, Drawing())
    assert sorted(searched) == [4, 5]
    assert found.tokens[:4, 0].tolist() == [3, 5, 1, 6]
    assert (found.log_q[4:] == -np.inf).all(), "behind what it did not propose it knows nothing"


def test_commit_and_truncate_follow_the_text() -> None:
    drafter = PLDDrafter(PLD())
    state: tuple[Ints, ...] = (np.array([1, 2]), np.array([3]))
    tree = Tree.from_roots(np.array([1]), np.array([4]))
    after = drafter.commit(state, tree, AcceptResult((np.zeros(0, np.int64),), np.array([5])), TAPS)
    assert [t.tolist() for t in after] == [[1, 2], [3, 4]]
    assert [t.tolist() for t in state] == [[1, 2], [3]], "the earlier state is as it was"
    assert [t.tolist() for t in drafter.truncate(after, np.array([1, 2]))] == [[1], [3, 4]]


def test_a_repeating_text_is_written_in_fewer_passes() -> None:
    engine = Engine(TARGET, PLDDrafter(PLD()), Chain(5), costs=COSTS)
    written, plain = engine.write([Request([0], 40)]), engine.plain([Request([0], 40)])
    assert written.tokens == plain.tokens
    assert written.stats.acceptance_length > 1.7, "greedy decoding of a table runs in a circle"
