"""Prompt lookup: only what stands in the text is drafted, from its latest place, by the longest suffix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs import Costs
from draftree.drafters.pld import PLD, PLDDrafter, continuation
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.policies.base import Room
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.sampling import Drawing
from draftree.target import Needs
from draftree.testing import random_table, table_target
from draftree.text import Request
from draftree.tree import Ints, Tree, Verdict

COSTS = Costs({1: 1.0}, {1: 1.0})


TARGET = table_target(random_table(4, 1), context=64)
TAPS = TARGET.prefill(TARGET.new_cache(1, 1), [np.array([1])], Needs()).taps


def found(text: list[int], **knobs: int) -> list[int]:
    return continuation(np.array(text, np.int64), PLD(**knobs)).tolist()


def drafted(text: list[int], policy: Chain | VCT, knobs: PLD = PLD()) -> tuple[Tree, list[list[int]]]:
    """The tree behind a text whose last token is the root, and the tokens of its paths."""
    drafter = PLDDrafter(knobs)
    state = drafter.start([np.array(text[:-1], np.int64)], np.array(text[-1:]), TAPS)
    expand = lambda tree, frontier, k: drafter.expand(state, tree, frontier, k, Drawing())[0]
    roots = Tree.planted(np.array([0]), np.array(text[-1:], np.int64))
    tree = policy.draft(expand, roots, COSTS, Room(np.array([50]), 100), None)
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


def brute_force(text: list[int], ngram: int, length: int) -> list[int]:
    for n in range(ngram, 0, -1):
        for at in range(len(text) - n - 1, -1, -1):
            if n < len(text) and text[at : at + n] == text[-n:]:
                return text[at + n : at + n + length]
    return []


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4), st.integers(1, 5))
def test_continuation_is_that_of_a_plain_search(text: list[int], ngram: int, length: int) -> None:
    assert found(text, ngram=ngram, length=length) == brute_force(text, ngram, length)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 6))
def test_a_chain_drafts_the_continuation_and_never_an_invented_token(text: list[int], length: int) -> None:
    for policy in (Chain(length), VCT(3, length)):
        tree, paths = drafted(text, policy)
        want = brute_force(text, 3, 10)[:length]
        assert paths == [want[: i + 1] for i in range(len(want))], "one way to go on, whatever the width"
        assert np.exp(tree.log_q[1:]) == pytest.approx(0.8)


def test_rows_do_not_mix() -> None:
    drafter = PLDDrafter(PLD())
    state = (np.array([1, 2, 3, 1]), np.array([1, 5, 6]), np.array([1, 2, 9, 1]))
    tree = Tree.planted(np.array([0, 2]), np.array([2, 2]))
    candidates, _ = drafter.expand(state, tree, np.array([0, 1]), 3, Drawing())
    assert candidates.tokens[:, 0].tolist() == [3, 9]


def test_commit_and_truncate_follow_the_text() -> None:
    drafter = PLDDrafter(PLD())
    state: tuple[Ints, ...] = (np.array([1, 2]), np.array([3]))
    tree = Tree.planted(np.array([1]), np.array([4]))
    after = drafter.commit(state, tree, Verdict((np.zeros(0, np.int64),), np.array([5])), TAPS)
    assert [t.tolist() for t in after] == [[1, 2], [3, 4]]
    assert [t.tolist() for t in state] == [[1, 2], [3]], "the earlier state is as it was"
    assert [t.tolist() for t in drafter.truncate(after, np.array([1, 2]))] == [[1], [3, 4]]


def test_a_repeating_text_is_written_in_fewer_passes() -> None:
    engine = Engine(TARGET, PLDDrafter(PLD()), Chain(5), costs=COSTS)
    written, plain = engine.generate([Request([0], 40)]), engine.plain([Request([0], 40)])
    assert written.tokens == plain.tokens
    assert written.stats.acceptance_length > 1.7, "greedy decoding of a table runs in a circle"


@pytest.mark.parametrize("knobs", [{"ngram": 0}, {"length": 0}, {"confidence": 0.0}, {"confidence": 1.1}], ids=str)
def test_knobs_out_of_range_are_refused(knobs: dict[str, float]) -> None:
    with pytest.raises(UserError, match="allowed are"):
        PLD(**knobs)  # type: ignore[arg-type]
