"""Lookahead: the window's mask and its way along the text, the pool, and what is drafted of it, all by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from draftree.acceptors.greedy import Greedy
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.lookahead import (
    Lookahead,
    LookaheadDrafter,
    LookaheadSequence,
    LookaheadState,
    add_to_pool,
    advance_window,
    places,
    window_ngrams,
    window_visibility,
)
from draftree.engine import Engine
from draftree.loop import Components, decode
from draftree.models.causal_lm import CausalLM
from draftree.policies.base import Expand, Policy
from draftree.policies.chain import Chain
from draftree.policies.trie import Trie
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec, Target
from draftree.testing import random_table, table_target, tiny_target
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget

COSTS = Costs({1: 1.0}, {1: 1.0})
TARGET = table_target(random_table(4, 1), context=64)
CACHE = TARGET.new_cache(1, 1)
TAPS = TARGET.prefill(CACHE, [np.array([1])], HiddenStateSpec()).hidden_states
SMALL = Lookahead(ngram=4, window=3, guesses=2, seed_prompt=False)


def ids(*tokens: int) -> Ints:
    return np.array(tokens, np.int64)


def lists(window: Sequence[Ints]) -> list[list[int]]:
    return [level.tolist() for level in window]


def begun(knobs: Lookahead, *texts: Sequence[int]) -> LookaheadState:
    """The state after texts whose last tokens are the roots."""
    return LookaheadDrafter(knobs).start(
        [ids(*t[:-1]) for t in texts], ids(*(t[-1] for t in texts)), TAPS
    )


def row_of(
    pool: dict[int, Any], knobs: Lookahead, text: Sequence[int] = (9,), **known: Any
) -> LookaheadSequence:
    none = (0,) * (knobs.ngram - 1)
    return LookaheadSequence(
        ids(*text),
        pool,
        known.pop("window", ()),
        known.pop("tried", none),
        known.pop("right", none),
    )


def drafted(
    drafter: LookaheadDrafter, state: LookaheadState, root: int, policy: Policy = Trie()
) -> tuple[Tree, list[list[int]]]:
    """The tree of one row, and the tokens of its paths."""
    expand = lambda tree, frontier, k: drafter.expand(state, tree, frontier, k, Drawing())[0]
    tree = policy.draft(
        expand, Tree.from_roots(ids(0), ids(root)), COSTS, TreeBudget(ids(50), 100), None
    )
    return tree, [tree.tokens[tree.path(n)[1:]].tolist() for n in range(1, len(tree))]


def said(tokens: Sequence[int], vocab: int = 50) -> HiddenStates:
    """Taps with a logit for one token after each probe."""
    logits = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.long), vocab).double()
    return HiddenStates({}, ids(), ids(), ids(), CACHE, logits)


def committed(
    drafter: LookaheadDrafter,
    state: LookaheadState,
    hidden_states: HiddenStates,
    chain: Sequence[int],
    bonus: int,
    row: int = 0,
) -> LookaheadState:
    """After a step in which a root and a chain behind it were all accepted."""
    tree = Tree.from_roots(ids(row), ids(chain[0]))
    for i, token in enumerate(chain[1:]):
        one = Candidates(ids(token)[None], np.zeros((1, 1)))
        tree = tree.append(ids(i), ids(token), np.zeros(1), np.zeros(1), one)
    return drafter.commit(
        state, tree, AcceptResult((np.arange(1, len(chain)),), ids(bonus)), hidden_states
    )


# The window.


def test_places_and_mask_of_two_levels_by_hand() -> None:
    level, column = places((2, 3))
    assert list(zip(level.tolist(), column.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert window_visibility(level, column).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],  # column 0 of level 0 is the root, which all see anyway
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def alone(window: Sequence[Ints]) -> list[list[int]]:
    """For each window token the tokens between the root and itself: level 0 up to its column, then up its column."""
    zero = window[0].tolist()
    found = [zero[: j + 1] for j in range(len(zero))]
    for level in range(1, len(window)):
        for j in range(len(window[level])):
            found.append(zero[:j] + [int(window[i][j]) for i in range(1, level + 1)])
    return found


@pytest.mark.parametrize("rows", [1, 2])
def test_the_windows_logits_are_those_of_feeding_what_each_token_sees(rows: int) -> None:
    target, drafter = tiny_target(), LookaheadDrafter(Lookahead(ngram=5, window=4))
    prompts = [ids(3, 14, 15, 9, 26), ids(5, 35, 8, 9, 7, 9, 32)][:rows]
    cache = target.new_cache(rows, 8)
    target.prefill(cache, prompts, HiddenStateSpec())
    state = drafter.start(prompts, ids(58, 12)[:rows], TAPS)
    for step in range(5):  # while the levels are filled, and after
        roots = ids(58 + step % 2, 12 + step)[:rows]
        tree = Tree.from_roots(np.arange(rows), roots)
        both = Candidates(ids(1, 2)[None], np.zeros((1, 2)))
        tree = tree.append(
            ids(0, 0), ids(1, 2), np.zeros(2), np.zeros(2), both
        )  # drafted nodes do not disturb it
        probes = drafter.probes(state)
        assert probes is not None
        verified = target.verify(cache, tree, HiddenStateSpec(), probes)
        assert verified.hidden_states.probe_logits is not None
        wanted, position = [], []
        for r, row in enumerate(state.rows):
            for seen in alone(row.window):
                text = torch.tensor([[*row.text.tolist(), int(roots[r]), *seen]])
                with torch.inference_mode():
                    wanted.append(
                        target.decoder.model(input_ids=text, use_cache=False).logits[0, -1]
                    )
                position.append(text.shape[1] - 1)
        assert probes.positions.tolist() == position
        assert (verified.hidden_states.probe_logits - torch.stack(wanted)).abs().max() < 1e-6
        verdict = AcceptResult((ids(),) * rows, ids(59 - step % 2, 13 + step)[:rows])
        target.commit(cache, tree, verdict)
        state = drafter.commit(state, tree, verdict, verified.hidden_states)
    assert [len(level) for level in state.rows[0].window] == [3, 4, 4, 4]


def test_the_first_window_is_of_the_text_and_always_the_same() -> None:
    one, again = begun(SMALL, [7, 8, 9]), begun(SMALL, [1, 1], [7, 8, 9])
    assert lists(one.rows[0].window) == lists(again.rows[1].window), "whatever the neighbours"
    assert [len(level) for level in one.rows[0].window] == [3 + 4 - 3]
    assert set(one.rows[0].window[0].tolist()) <= {7, 8, 9}
    long = begun(Lookahead(window=200), [7, 8, 9]).rows[0].window[0]
    assert set(long.tolist()) == {7, 8, 9}, "any of them, the root too"


def test_the_window_advances_by_hand() -> None:
    """N = 4 and W = 3: levels of 4, then 3 and 4, then 2, 3 and 3 tokens, from where on it is full."""
    drafter, state = LookaheadDrafter(SMALL), begun(SMALL, [5, 6])
    b, c, d = state.rows[0].window[0].tolist()[1:]
    # After its four come 11 … 14. Root 6 is committed, 7 is the next: it takes the first one's
    # place, 11 is behind it.
    state = committed(drafter, state, said([11, 12, 13, 14]), [6], 7)
    assert lists(state.rows[0].window) == [[b, c, d], [11, 12, 13, 14]]
    # The choices after b, c, d are of no use: the tokens there are known. Those after 11 … 14 are
    # 21 … 24; the first of them stands where the new level begins one place before its column 0.
    state = committed(drafter, state, said([0, 0, 0, 21, 22, 23, 24]), [7], 8)
    assert lists(state.rows[0].window) == [[c, d], [12, 13, 14], [22, 23, 24]]
    assert dict(state.rows[0].pool) == {}, "no column is an n-gram yet"
    # Now it is full. Columns: 8 12 22 31, c 13 23 32, d 14 24 33; the lowest level goes.
    state = committed(drafter, state, said([0] * 5 + [31, 32, 33]), [8], 9)
    assert lists(state.rows[0].window) == [[13, 14], [22, 23, 24], [31, 32, 33]]
    known = dict(state.rows[0].pool)
    assert known[8] == ((12, 22, 31),)
    if c == d:  # both columns begin with the same token
        assert known[c] == ((13, 23, 32), (14, 24, 33))
    else:
        assert known[c], known[d] == (((13, 23, 32),), ((14, 24, 33),))
    # One step for four tokens as for one.
    state = committed(drafter, state, said([0] * 5 + [41, 42, 43]), [9, 1, 2, 3], 4)
    assert lists(state.rows[0].window) == [[23, 24], [31, 32, 33], [41, 42, 43]]
    assert state.rows[0].pool[9] == ((22, 31, 41),), (
        "the column of the root, not of what was accepted"
    )


def test_while_nothing_is_accepted_every_guess_keeps_its_place_in_the_text() -> None:
    rng = np.random.default_rng(0)
    n = 5
    width = 3
    window: tuple[Ints, ...] = (rng.integers(0, 9, width + n - 3),)
    for root in range(10, 18):
        full, level = len(window) == n - 1, places(tuple(map(len, window)))
        stands = set(
            zip((root + sum(level)).tolist(), np.concatenate(window).tolist(), strict=True)
        )
        new = rng.integers(0, 9, len(window[-1]))
        window = advance_window(window, new, full)
        level = places(tuple(map(len, window)))
        moved = list(
            zip((root + 1 + sum(level)).tolist(), np.concatenate(window).tolist(), strict=True)
        )
        assert set(moved[: -len(window[-1])]) <= stands
    assert [len(level) for level in window] == [width - 1, width, width, width]


def test_a_pass_without_probes_leaves_the_window_as_it_was() -> None:
    drafter, state = LookaheadDrafter(SMALL), begun(SMALL, [5, 6])
    after = committed(drafter, state, TAPS, [6], 7)
    assert lists(after.rows[0].window) == lists(state.rows[0].window)
    assert after.rows[0].text.tolist() == [5, 6]


def test_the_window_takes_the_likeliest_token_of_its_own_row() -> None:
    drafter, state = LookaheadDrafter(SMALL), begun(SMALL, [5, 6], [1], [2, 3, 4])
    tree = Tree.from_roots(ids(0, 2), ids(6, 4))
    _, state = drafter.expand(state, tree, ids(0, 1), 2, Drawing())
    probes = drafter.probes(state)
    assert probes is not None
    assert probes.row.tolist() == [0] * 4 + [2] * 4, "a row that ended sends none"
    assert probes.positions.tolist() == [2, 3, 4, 5, 3, 4, 5, 6], "the roots are at 1 and 2"
    assert not probes.visible[:4, 4:].any()
    assert not probes.visible[4:, :4].any()
    verdict = AcceptResult((ids(), ids()), ids(7, 8))
    after = drafter.commit(state, tree, verdict, said([11, 12, 13, 14, 15, 16, 17, 18]))
    assert [lists(after.rows[r].window)[-1] for r in (0, 2)] == [[11, 12, 13, 14], [15, 16, 17, 18]]
    assert after.rows[1] is state.rows[1]
    assert len(state.rows[0].window) == 1, "the earlier state is as it was"


# The pool.


def test_the_pool_forgets_the_least_recently_met() -> None:
    pool = add_to_pool({}, [(1, (2, 3)), (1, (4, 5)), (2, (3, 3))], 2)
    assert pool == {1: ((2, 3), (4, 5)), 2: ((3, 3),)}
    again = add_to_pool(pool, [(1, (2, 3))], 2)
    assert again[1] == ((4, 5), (2, 3)), "met again, it is the most recent, and not there twice"
    assert add_to_pool(again, [(1, (6, 7))], 2)[1] == ((2, 3), (6, 7)), "(4, 5) was met longest ago"
    assert add_to_pool(pool, [(1, (6, 7)), (1, (8, 9)), (1, (6, 7))], 2)[1] == ((8, 9), (6, 7))
    assert pool == {1: ((2, 3), (4, 5)), 2: ((3, 3),)}, "the earlier pool is as it was"


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.tuples(st.integers(0, 1), st.integers(0, 1))), max_size=30
    ),
    st.integers(1, 3),
)
def test_the_pool_holds_the_last_different_ones(
    met: list[tuple[int, tuple[int, int]]], cap: int
) -> None:
    pool = add_to_pool(add_to_pool({}, met[:10], cap), met[10:], cap)
    for first in range(3):
        latest = list(dict.fromkeys(rest for token, rest in reversed(met) if token == first))
        assert list(pool.get(first, ())) == latest[:cap][::-1]


def test_the_grams_of_a_window() -> None:
    window = (ids(1), ids(2, 3), ids(4, 5))
    assert window_ngrams(window, 9, ids(6, 7)) == [(9, (2, 4, 6)), (1, (3, 5, 7))]


def test_the_grams_of_prompt_and_output_are_found() -> None:
    knobs = Lookahead(ngram=3, window=2, guesses=4)
    drafter, state = LookaheadDrafter(knobs), begun(knobs, [1, 2, 3, 1, 2])
    assert dict(state.rows[0].pool) == {1: ((2, 3),), 2: ((3, 1),), 3: ((1, 2),)}, (
        "the root counts, it is known"
    )
    assert drafted(drafter, state, 2)[1] == [[3], [3, 1]]
    after = committed(drafter, state, TAPS, [2, 3], 4)
    wanted = {1: ((2, 3),), 2: ((3, 1), (3, 4)), 3: ((1, 2),)}
    assert dict(after.rows[0].pool) == wanted, "1 2 3 is met again, and 2 3 4 is new"
    assert begun(Lookahead(ngram=3, seed_prompt=False), [1, 2, 3, 1, 2]).rows[0].pool == {}


def test_an_n_gram_of_the_text_is_met_once() -> None:
    knobs = Lookahead(ngram=3, window=1, guesses=4)
    drafter, state = LookaheadDrafter(knobs), begun(knobs, [2, 3])
    state = committed(drafter, state, said([5]), [3], 2)
    assert dict(state.rows[0].pool) == {2: ((3, 2),)}, (
        "the text's 2 3 2, of which the last is the root"
    )
    state = committed(drafter, state, said([6]), [2], 9)
    assert dict(state.rows[0].pool) == {2: ((3, 2), (5, 6)), 3: ((2, 9),)}, (
        "the window's 2 5 6 came after it"
    )


def test_a_text_written_in_steps_fills_the_pool_as_if_it_were_read() -> None:
    knobs = Lookahead(ngram=4, window=2, guesses=2)
    drafter, text = LookaheadDrafter(knobs), np.random.default_rng(3).integers(0, 3, 60).tolist()
    state, at = begun(knobs, text[:2]), 1
    for length in (1, 4, 2, 1, 1, 5, 3, 6, 1, 1, 2, 7):
        state = committed(drafter, state, TAPS, text[at : at + length], text[at + length])
        at += length
        whole = begun(knobs, text[: at + 1]).rows[0]
        assert state.rows[0].pool == whole.pool
        assert state.rows[0].text.tolist() == whole.text.tolist()


def test_a_cut_text_is_gone_on_from_as_if_it_were_new() -> None:
    knobs = Lookahead(ngram=3, window=2)
    drafter, state = LookaheadDrafter(knobs), begun(knobs, [1, 2, 3, 4, 5, 6], [7, 7, 7])
    state = committed(drafter, state, said([8, 9, 8, 9]), [6], 5)
    cut = drafter.truncate(state, ids(3, 0))
    assert [row.text.tolist() for row in cut.rows] == [[1, 2, 3], []]
    assert [dict(row.pool) for row in cut.rows] == [{1: ((2, 3),)}, {}]
    assert drafter.probes(cut) is None, "the window is drawn when the text goes on"
    on, new = (
        drafter.start([ids(1, 2, 3, 9), ids(4)], ids(1, 2), TAPS, cut),
        begun(knobs, [1, 2, 3, 9, 1], [4, 2]),
    )
    for mine, fresh in zip(on.rows, new.rows, strict=True):
        assert (mine.text.tolist(), lists(mine.window), mine.pool) == (
            fresh.text.tolist(),
            lists(fresh.window),
            fresh.pool,
        )
    assert len(state.rows[0].text) == 6, "the earlier state is as it was"


# What is drafted.


def test_guesses_are_a_trie_and_q_is_share_times_how_often_they_were_right() -> None:
    pool = {
        1: ((2, 3, 4), (5, 6, 7), (2, 3, 8))
    }  # the last one counts 1, the one before 1/2, the first 1/3
    row = row_of(pool, SMALL, tried=(2, 0, 0), right=(2, 0, 0))
    drafter, state = LookaheadDrafter(SMALL), LookaheadState((row,), ids(0))
    tree, paths = drafted(drafter, state, 1)
    q = {tuple(path): float(np.exp(tree.log_q[i + 1])) for i, path in enumerate(paths)}
    first, later = (2 + 1) / (2 + 2), 1 / 2  # two times right of two; nothing known: one half
    whole = 1 + 1 / 2 + 1 / 3
    assert q == pytest.approx({
        (2,): first * (1 + 1 / 3) / whole, (5,): first * (1 / 2) / whole,
        (2, 3): later, (5, 6): later,
        (2, 3, 8): later * 1 / (1 + 1 / 3), (2, 3, 4): later * (1 / 3) / (1 + 1 / 3), (5, 6, 7): later,
    })  # fmt: skip
    assert paths[:2] == [[2], [5]], "the likelier first"
    one, _ = drafter.expand(state, Tree.from_roots(ids(0), ids(1)), ids(0), 1, Drawing())
    assert one.tokens.tolist() == [[2]]
    assert drafted(drafter, state, 7)[1] == [], "nothing is known of 7"


def test_how_often_guesses_were_right_is_counted_by_depth() -> None:
    drafter, pool = LookaheadDrafter(SMALL), {1: ((2, 3, 4), (2, 5, 6))}
    state = LookaheadState((row_of(pool, SMALL),), ids(0))
    for chain, bonus, tried, right in (
        ([1], 9, (1, 0, 0), (0, 0, 0)),  # 2 was guessed, 9 came
        ([1, 2], 5, (1, 1, 0), (1, 1, 0)),  # 5 is among the guesses, whether it was drafted or not
        ([1, 2, 3, 4], 7, (1, 1, 1), (1, 1, 1)),  # behind a whole guess nothing is guessed
        (
            [1, 2, 9, 8],
            7,
            (1, 1, 0),
            (1, 0, 0),
        ),  # 9 came from elsewhere; behind it nothing is known
        ([3, 2], 5, (0, 0, 0), (0, 0, 0)),  # no guesses at all
    ):
        after = committed(drafter, state, TAPS, chain, bonus).rows[0]
        assert (after.tried, after.right) == (tried, right)


def test_drafts_end_with_the_guess_unless_they_are_to_be_chained() -> None:
    pool = {1: ((2, 3, 4),), 4: ((5, 6, 7),), 3: ((8, 8, 8),)}
    drafter, state = LookaheadDrafter(SMALL), LookaheadState((row_of(pool, SMALL),), ids(0))
    assert drafted(drafter, state, 1, Chain(9))[1][-1] == [2, 3, 4], "all N − 1 tokens, and no more"
    knobs = Lookahead(ngram=4, chain=True)
    chained = LookaheadDrafter(knobs)
    assert drafted(chained, state, 1, Chain(9))[1][-1] == [2, 3, 4, 5, 6, 7]
    after = committed(
        chained, LookaheadState((row_of(pool, knobs),), ids(0)), TAPS, [1, 2, 3, 4, 5], 9
    ).rows[0]
    assert (after.tried, after.right) == ((2, 2, 1), (2, 1, 1))


def test_nodes_of_other_drafters_are_no_obstacle() -> None:
    drafter = LookaheadDrafter(SMALL)
    state = LookaheadState(
        (row_of({1: ((2, 3, 4),)}, SMALL), row_of({1: ((5, 6, 7),)}, SMALL)), ids(0, 1)
    )
    tree = Tree.from_roots(ids(0, 1), ids(1, 1))
    both = Candidates(ids(2, 9, 5)[:, None], np.zeros((3, 1)))
    tree = tree.append(ids(0, 0, 1), ids(2, 9, 5), np.zeros(3), np.zeros(3), both)
    found, _ = drafter.expand(state, tree, ids(4, 3, 2, 1, 0), 3, Drawing())
    assert found.tokens[:, 0][found.log_q[:, 0] > -np.inf].tolist() == [6, 3, 5, 2]
    assert (found.log_q[1] == -np.inf).all(), "9 was never guessed"


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=25),
    st.integers(3, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_never_an_invented_token(text: list[int], n: int, cap: int, chain: bool) -> None:
    knobs = Lookahead(ngram=n, window=2, guesses=cap, chain=chain)
    drafter, state = LookaheadDrafter(knobs), begun(knobs, text)
    met = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
    tree, paths = drafted(drafter, state, text[-1], Trie(20))
    for path in paths:
        whole = [text[-1], *path]
        anchor = (len(path) - 1) // (n - 1) * (n - 1) if chain else 0
        assert any(gram[: len(whole) - anchor] == tuple(whole[anchor:]) for gram in met)
    assert (tree.log_q[1:] <= 0).all()


# The whole loop.


def written(
    target: Target, knobs: Lookahead, requests: Sequence[Request], policy: Policy
) -> SequenceBatch:
    texts = SequenceBatch(target.new_cache(len(requests), 8))
    for _ in decode(
        Components(target, LookaheadDrafter(knobs), policy, Greedy(), COSTS), texts, requests
    ):
        pass
    plain = Engine(target, LookaheadDrafter(knobs), policy).plain(requests)
    assert texts.written == plain.tokens
    return texts


def cycle(vocab: int = 5) -> torch.Tensor:
    """[V + 1, V, V] a table whose every text goes round: v is followed by v + 1."""
    nexts = torch.roll(torch.eye(vocab), 1, dims=1)
    return (0.9 * nexts + 0.1 / vocab).expand(vocab + 1, vocab, vocab)


def test_jacobi_iteration_finds_what_was_never_written() -> None:
    """Behind 28 come 29 … 39 and then 0, 1, …; of 3 4 5 6 7, say, only the window knows, which began with the prompt's 0."""
    vocab, n = 40, 5
    target = table_target(cycle(vocab), context=128)
    knobs = Lookahead(ngram=n, window=6, guesses=6, seed_prompt=False)
    texts = written(target, knobs, [Request([0, 7, 14, 21, 28], 30)], Trie())
    steps = texts.stats.steps
    assert [s.accepted for s in steps[: n - 1]] == [0] * (n - 1), (
        "n − 2 steps fill the window, one more the pool"
    )
    assert max(s.accepted for s in steps) == n - 1, "a whole guess, which the official code cannot"
    assert len(steps) < 16
    sent = [8, 7 + 8, 6 + 7 + 7, 5 + 6 + 6 + 6]
    assert [s.nodes for s in steps[: n - 1]] == sent, (
        "probes count; nothing else was sent, as nothing was known"
    )
    assert {s.nodes - s.accepted for s in steps[n - 1 :]} == {sent[-1]}, (
        "one guess at most, and right wherever there is one"
    )
    assert [w.fed for w in texts.stats.work] == [1 + s.nodes for s in steps]


def test_the_texts_own_grams_are_accepted_from_the_first_step_on() -> None:
    texts = written(
        table_target(cycle(), context=64),
        Lookahead(ngram=4, window=2, guesses=3),
        [Request([0, 1, 2, 3, 4] * 2, 20)],
        Trie(),
    )
    assert [s.accepted for s in texts.stats.steps] == [3] * 4 + [2], (
        "20 tokens: one of the prefill, 4 · 4, and 3"
    )


def test_rows_do_not_depend_on_their_neighbours() -> None:
    target = table_target(random_table(4, 1), context=48)
    requests = [
        Request([0], 20, number=0),
        Request([3, 1, 2, 2], 30, number=1),
        Request([2] * 12, 9, number=2),
    ]
    knobs = Lookahead(ngram=4, window=3, guesses=3)
    together, apart = (
        written(target, knobs, requests, Trie()),
        [written(target, knobs, [r], Trie()) for r in requests],
    )
    assert len(together.stats.steps) == sum(len(t.stats.steps) for t in apart)
    paths = sorted((s.accepted, s.nodes, s.depth) for s in together.stats.steps)
    assert paths == sorted((s.accepted, s.nodes, s.depth) for t in apart for s in t.stats.steps)


@dataclass(frozen=True)
class Declining(Policy):
    """Drafts nothing and does not even ask."""

    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        return tree


@pytest.mark.parametrize("policy", [Declining(), Trie()], ids=["declining", "trie"])
def test_the_window_ends_with_the_context(policy: Policy) -> None:
    """Learned positions: one beyond the last would be an error. A row that is full is done before the others are."""
    config = GPT2Config(
        vocab_size=61,
        n_positions=12,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = Target(CausalLM(GPT2LMHeadModel(config).double()), "short")
    requests = [
        Request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 9),
        Request([4, 5], 9, number=1),
        Request([3] * 12, 9, number=2),
    ]
    texts = written(target, Lookahead(ngram=4, window=6), requests, policy)
    assert [len(t) for t in texts.written] == [2, 9, 1]
