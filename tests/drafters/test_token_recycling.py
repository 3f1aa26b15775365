"""Token Recycling: the table by hand and against a plain one, what is learnt from a verification, and whose it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.drafters.retrieval import adjacency_table
from draftree.drafters.retrieval.adjacency_table import (
    MAX_CONFIRMATIONS,
    MISSING,
    Adjacency,
    merge_lists,
    pairs_of,
)
from draftree.drafters.token_recycling import (
    MEASURED_ACCEPTANCE,
    PRIOR,
    TokenRecycling,
    TokenRecyclingDrafter,
    TokenRecyclingState,
)
from draftree.engine import Engine
from draftree.policies.chain import Chain
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStates, HiddenStateSpec, likeliest_tokens
from draftree.testing import random_table, table_target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from selection import one_in

COSTS = Costs({1: 1.0}, {1: 1.0})
TARGET = table_target(random_table(12, 2), context=96)
CACHE = TARGET.new_cache(1, 1)
K = 3


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def taps_of(top: Sequence[Sequence[int]] | None) -> HiddenStates:
    """The hidden states of a verified tree whose nodes have some likeliest tokens after them."""
    return HiddenStates(
        {}, ints(), ints(), ints(), CACHE, None, None if top is None else torch.tensor(top)
    )


def drafter_of(**knobs: Any) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(TokenRecycling(successors=K, **knobs), 12)


def below(tree: Tree, parents: Sequence[int], tokens: Sequence[int]) -> Tree:
    """The tree with nodes that somebody proposed."""
    nothing = np.zeros(len(tokens))
    row = Candidates(np.array([tokens]), nothing[None])
    return tree.append(ints(*parents), ints(*tokens), nothing, nothing, row)


def asked(
    drafter: Drafter[Any], state: Any, tree: Tree, *nodes: int, k: int = K
) -> list[dict[int, float]]:
    """q by token after nodes, in the order proposed."""
    found, _ = drafter.expand(state, tree, ints(*nodes), k, Drawing())
    return [
        {int(t): float(np.exp(v)) for t, v in zip(tokens, values, strict=True) if v > -np.inf}
        for tokens, values in zip(found.tokens, found.log_q, strict=True)
    ]


# The table.


def test_lines_replace_what_a_token_had_and_earlier_versions_stay() -> None:
    empty = Adjacency.empty(12, 2)
    first = empty.plus(ints(5, 7), np.array([[1, 2], [3, 4]]))
    second = first.plus(ints(5), np.array([[1, 9]]))
    third = second.plus(ints(5), np.array([[8, 1]]))
    assert [table.look_up(ints(5))[0].tolist() for table in (empty, first, second, third)] == [
        [[MISSING, MISSING]],
        [[1, 2]],
        [[1, 9]],
        [[8, 1]],
    ]
    assert [int(table.look_up(ints(5))[1][0]) for table in (first, second, third)] == [0, 1, 0], (
        "how often 1 was confirmed"
    )
    assert second.look_up(ints(7, 5, 0))[0].tolist() == [[3, 4], [1, 9], [MISSING, MISSING]]
    other = second.plus(ints(7), np.array([[6, 6]]))  # the storage has gone on already
    assert other.look_up(ints(7, 5))[0].tolist() == [[6, 6], [1, 9]]
    assert third.look_up(ints(7, 5))[0].tolist() == [[3, 4], [8, 1]]


def test_last_line_of_equal_tokens_counts() -> None:
    table = Adjacency.empty(12, 2).plus(ints(5, 3, 5), np.array([[1, 2], [3, 4], [6, 7]]))
    assert table.look_up(ints(5, 3))[0].tolist() == [[6, 7], [3, 4]]
    assert len(table) == 2


def test_a_first_successor_is_confirmed_no_more_than_told() -> None:
    table, found = Adjacency.empty(12, 1), []
    for successor in (4, 4, 4, 4, 4, 4, 2, 2):
        table = table.plus(ints(1), np.array([[successor]]))
        found.append(int(table.look_up(ints(1))[1][0]))
    assert found == [0, 1, 2, MAX_CONFIRMATIONS, MAX_CONFIRMATIONS, MAX_CONFIRMATIONS, 0, 1]


def test_a_table_goes_on_from_the_one_behind_it() -> None:
    behind = Adjacency.empty(12, 2).plus(ints(1, 2), np.array([[3, 4], [5, 6]]))
    own = Adjacency.empty(12, 2).plus(ints(1), np.array([[3, 9]]), behind)
    assert own.look_up(ints(1, 2, 3), behind)[0].tolist() == [[3, 9], [5, 6], [MISSING, MISSING]]
    assert own.look_up(ints(1), behind)[1].tolist() == [1], "confirmed what the one behind it held"
    both = behind.join(own)
    assert both.look_up(ints(1, 2))[0].tolist() == [[3, 9], [5, 6]]
    assert behind.look_up(ints(1))[0].tolist() == [[3, 4]]


LINES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), LINES), max_size=20))
def test_every_version_is_a_dictionary_of_its_own(
    steps: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    versions: list[tuple[Adjacency, dict[int, tuple[int, int]]]] = [(Adjacency.empty(6, 1), {})]
    for which, lines in steps:
        table, known = versions[which % len(versions)]  # any of them goes on
        wanted = dict(known)
        for token, successor in dict(lines).items():
            before = known.get(token, (MISSING, 0))
            wanted[token] = (
                successor,
                min(before[1] + 1, MAX_CONFIRMATIONS) if before[0] == successor else 0,
            )
        if lines:
            table = table.plus(ints(*(t for t, _ in lines)), np.array([[s] for _, s in lines]))
        versions.append((table, wanted))
    for table, wanted in versions:
        found, confirmed = table.look_up(np.arange(6))
        assert {
            t: (int(s), int(c))
            for t, (s,), c in zip(range(6), found, confirmed, strict=True)
            if s != MISSING
        } == wanted
        assert dict(
            zip(
                table.newest_lines()[0].tolist(),
                table.newest_lines()[1][:, 0].tolist(),
                strict=True,
            )
        ) == {t: s for t, (s, _) in wanted.items()}


def test_the_pairs_of_a_text_by_hand() -> None:
    tokens, followed = pairs_of(ints(1, 2, 1, 3, 1, 2, 4, 1), 2)
    assert dict(zip(tokens.tolist(), followed.tolist(), strict=True)) == {
        1: [2, 3], 2: [4, 1], 3: [1, MISSING], 4: [1, MISSING]
    }, "the most recent first"  # fmt: skip
    assert pairs_of(ints(1, 2, 1, 3), 1)[1].tolist() == [[3], [1]], "no more than there is room for"
    assert pairs_of(ints(1), 2)[0].size == 0


def test_merged_lists_have_no_token_twice() -> None:
    first, then = (
        np.array([[1, 2, MISSING], [MISSING, MISSING, MISSING], [1, 2, 3]]),
        np.array([[2, 3, 4], [5, 6, MISSING], [7, 8, 9]]),
    )
    assert merge_lists(first, then).tolist() == [[1, 2, 3], [5, 6, MISSING], [1, 2, 3]]


# What is learnt.


def verified() -> tuple[Tree, AcceptResult, list[list[int]]]:
    """Root 1, children 2 and 3, below 2 the token 3 again; 2 and that 3 are accepted; then 6. And the tokens after each."""
    tree = below(below(Tree.from_roots(ints(0), ints(1)), [0, 0], [2, 3]), [1], [3])
    return (
        tree,
        AcceptResult((ints(1, 3),), ints(6)),
        [[2, 9, 8], [3, 7, 5], [4, 4 + 1, 0], [6, 1, 2]],
    )


def learnt(drafter: TokenRecyclingDrafter) -> tuple[TokenRecyclingDrafter, TokenRecyclingState]:
    tree, verdict, top = verified()
    begun = drafter.start([ints(4)], ints(1), taps_of(None))
    return drafter, drafter.commit(begun, tree, verdict, taps_of(top))


def test_all_verified_nodes_are_entered_and_the_accepted_one_counts() -> None:
    drafter, state = learnt(drafter_of(prompt=False))
    (table,) = state.tables
    assert table.look_up(ints(1, 2, 3, 6))[0].tolist() == [
        [2, 9, 8],
        [3, 7, 5],
        [6, 1, 2],
        [MISSING] * 3,
    ]
    tree = below(Tree.from_roots(ints(0), ints(6)), [0, 0], [3, 1])
    assert [list(q) for q in asked(drafter, state, tree, 0, 1, 2)] == [[], [6, 1, 2], [2, 9, 8]]
    assert [list(q) for q in asked(drafter, state, tree, 1, 2, k=2)] == [[6, 1], [2, 9]]


def test_a_rejected_node_is_entered() -> None:
    tree, verdict, top = verified()
    drafter = drafter_of(prompt=False)
    begun = drafter.start([ints(4)], ints(1), taps_of(None))
    state = drafter.commit(
        begun, tree, replace(verdict, paths=(ints(1),), bonus=ints(7)), taps_of(top)
    )
    assert state.tables[0].look_up(ints(3))[0].tolist() == [[6, 1, 2]], (
        "of two rejected ones the last"
    )


def test_the_prompt_is_entered_and_what_earlier_texts_held_follows() -> None:
    drafter, state = learnt(drafter_of())
    carried = drafter.carry(state)
    assert carried is not None
    assert carried.tables == ()
    again = drafter.start([ints(1, 4, 1), ints(5)], ints(2, 1), taps_of(None), carried)
    assert again.tables[0].look_up(ints(1, 4))[0].tolist() == [[2, 4, 9], [1, MISSING, MISSING]], (
        "1 was followed by 2, and by 4"
    )
    assert again.tables[1].look_up(ints(1), again.memory)[0].tolist() == [[2, 9, 8]], (
        "of the memory"
    )
    assert again.tables[0].look_up(ints(3), again.memory)[0].tolist() == [[6, 1, 2]]


def test_rates_are_those_of_the_rank_among_equally_sure_lines() -> None:
    drafter, state = learnt(drafter_of(prompt=False))
    assert state.judged[0].sum() == 0, "nothing was known before the step"
    tree = below(
        Tree.from_roots(ints(0), ints(1)), [0], [2]
    )  # the line of 1 is 2 9 8, that of 2 is 3 7 5
    state = drafter.commit(
        state, tree, AcceptResult((ints(1),), ints(7)), taps_of([[2, 0, 0], [7, 3, 0]])
    )
    assert state.judged[0][:, 0].tolist() == [[2, 2, 2], [1, 1, 0]]
    q = asked(drafter, state, Tree.from_roots(ints(0), ints(2)), 0)[0]
    rates = [
        (PRIOR * p + right) / (PRIOR + 2)
        for p, right in zip(MEASURED_ACCEPTANCE[0][:K], (1, 1, 0), strict=True)
    ]
    assert q == pytest.approx(dict(zip((7, 3, 0), rates, strict=True))), (
        "7 was not the first before, so it is not sure"
    )
    sure = asked(drafter, state, Tree.from_roots(ints(0), ints(1)), 0)[0]
    assert sure[2] == pytest.approx(MEASURED_ACCEPTANCE[1][0]), "2 was confirmed once"


def test_q_falls_with_the_rank() -> None:
    drafter, state = learnt(drafter_of(prompt=False))
    odd = np.zeros_like(state.judged[0])
    odd[0], odd[1, :, 2] = 100, 90
    (q,) = asked(drafter, replace(state, judged=(odd,)), Tree.from_roots(ints(0), ints(1)), 0)
    assert list(q) == [2, 9, 8]
    assert list(q.values()) == sorted(q.values(), reverse=True)


def test_a_session_is_kept_and_a_text_that_is_cut_goes_into_it() -> None:
    for session in (True, False):
        drafter, state = learnt(drafter_of(prompt=False, session=session))
        cut = drafter.truncate(state, ints(1))
        again = drafter.start([ints(4)], ints(1), taps_of(None), cut)
        wanted = [[2, 9, 8]] if session else [[MISSING] * 3]
        assert again.tables[0].look_up(ints(1), again.memory)[0].tolist() == wanted
        assert (drafter.carry(state) is not None) == session


def test_other_rows_keep_what_they_have() -> None:
    drafter, state = learnt(drafter_of(prompt=False))
    two = drafter.select(state, ints(-1, 0), CACHE)
    assert [len(table) for table in two.tables] == [0, 3]
    begun = drafter.start([ints(9), ints(1, 2)], ints(3, 3), taps_of(None), two, ints(0))
    assert [len(table) for table in begun.tables] == [0, 3]
    assert begun.tables[1].look_up(ints(2))[0].tolist() == [[3, 7, 5]]


# What the target says.


def test_the_target_says_its_likeliest_tokens_after_every_node() -> None:
    cache = TARGET.new_cache(2, 32)
    TARGET.prefill(cache, [ints(1, 2), ints(3)], HiddenStateSpec(top=4))
    tree = below(
        Tree.from_roots(ints(0, 1), ints(5, 6)), [1, 0, 0, 1], [7, 8, 9, 10]
    )  # rows are not in order
    verified = TARGET.verify(cache, tree, HiddenStateSpec(top=4))
    assert verified.hidden_states.top is not None
    wanted = np.argsort(-verified.logits.numpy(), axis=1, kind="stable")[:, :4]
    assert verified.hidden_states.top.tolist() == wanted.tolist()
    assert verified.hidden_states.take(ints(0)).top is verified.hidden_states.top
    one = verified.hidden_states.of_rows(tree, [1]).top
    assert one is not None
    assert one.tolist() == wanted[tree.row == 1].tolist()
    assert TARGET.verify(cache, tree, HiddenStateSpec()).hidden_states.top is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_likeliest_tokens_of_any_dtype(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 5.0, 5.0]], dtype=dtype)
    assert likeliest_tokens(logits, 3).tolist() == [[1, 2, 3], [2, 3, 0]]
    assert likeliest_tokens(logits, 9).shape == (2, 4)


class Faulty(Drafter[TokenRecyclingState]):
    """Drafts as another one does, and raises in every commit of row 0."""

    def __init__(self, drafter: TokenRecyclingDrafter) -> None:
        self.drafter, self.searches = drafter, True
        self.sizes: list[tuple[int, int]] = []

    @property
    def needs(self) -> HiddenStateSpec:
        return self.drafter.needs

    def start(self, *args: Any) -> TokenRecyclingState:
        return self.drafter.start(*args)

    def expand(self, *args: Any) -> tuple[Candidates, TokenRecyclingState]:
        return self.drafter.expand(*args)

    def commit(
        self,
        state: TokenRecyclingState,
        tree: Tree,
        verdict: AcceptResult,
        hidden_states: HiddenStates,
    ) -> TokenRecyclingState:
        assert hidden_states.top is not None
        self.sizes.append((len(hidden_states.top), len(tree)))
        if 0 in tree.row:
            raise RuntimeError("of row 0")
        return self.drafter.commit(state, tree, verdict, hidden_states)

    def truncate(self, *args: Any) -> TokenRecyclingState:
        return self.drafter.truncate(*args)


def test_a_row_without_drafts_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for mistaken in (False, True):
        if mistaken:  # the tokens after all rows' nodes, and the tree of one row
            monkeypatch.setattr(HiddenStates, "of_rows", lambda self, tree, rows: self)
        drafter = Faulty(drafter_of())
        engine = Engine(TARGET, drafter, Chain(3), costs=COSTS)
        requests = [Request([1, 2], 20), Request([3, 4, 5], 20)]
        with pytest.warns(match="of row 0"):
            texts = engine.write(requests).tokens
        assert texts == engine.plain(requests).tokens
        assert all(top == nodes for top, nodes in drafter.sizes) is not mistaken


def test_rows_do_not_learn_from_each_other() -> None:
    prompts = [[1, 2], [3, 4, 5], [7]]
    alone = {len(p): steps([p]) for p in prompts}
    together = steps(prompts)
    assert sorted(together) == sorted(step for each in alone.values() for step in each)


def steps(prompts: list[list[int]]) -> list[tuple[int, int]]:
    engine = Engine(
        TARGET, TokenRecyclingDrafter(TokenRecycling(successors=K), 12), Chain(3), costs=COSTS
    )
    return [
        (s.accepted, s.nodes) for s in engine.write([Request(p, 20) for p in prompts]).stats.steps
    ]


def test_learnt_successors_help_the_next_text() -> None:
    lengths = {}
    for session in (True, False):
        drafter = TokenRecyclingDrafter(TokenRecycling(session=session, prompt=False), 12)
        engine = Engine(TARGET, drafter, Chain(3), costs=COSTS)
        lengths[session] = [
            engine.write([Request([1, 2], 24)], reuse=False).stats.acceptance_length
            for _ in range(2)
        ]
    assert lengths[True][1] > lengths[True][0] == lengths[False][0] == lengths[False][1]


@pytest.mark.parametrize(
    ("drafter", "policy", "temperature"),
    one_in(
        2,
        ["token_recycling", "suffix+token_recycling"],
        ["chain", "static:paths=token_recycling/2.2.2", "eagle2", "yield", "trie"],
        [0.0, 1.0],
    ),
)
def test_the_text_is_the_targets(drafter: str, policy: str, temperature: float) -> None:
    engine = Engine(
        TARGET, build("drafter", drafter).open(TARGET), build("policy", policy), costs=COSTS
    )
    sampling = Sampling(temperature=temperature, seed=5)
    for _ in range(2):
        requests = [Request(p, 24, sampling=sampling) for p in ([1, 2], [3, 4, 5], [7])]
        assert engine.write(requests).tokens == engine.plain(requests).tokens


# Mistakes that must show.


@pytest.mark.parametrize(
    "mistake",
    ["accepted alone", "the first of equals", "no confirmation", "another version's lines"],
)
def test_mistakes_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plus, find = Adjacency.plus, Adjacency.find
    if mistake == "accepted alone":
        monkeypatch.setattr(Tree, "of_row", lambda self, row: ints())
        noticing: Callable[[], None] = test_a_rejected_node_is_entered
    elif mistake == "the first of equals":
        turned = lambda self, tokens, successors, behind=None: plus(
            self, tokens[::-1], successors[::-1], behind
        )
        monkeypatch.setattr(Adjacency, "plus", turned)
        noticing = test_all_verified_nodes_are_entered_and_the_accepted_one_counts
    elif mistake == "no confirmation":
        monkeypatch.setattr(adjacency_table, "MAX_CONFIRMATIONS", 0)
        noticing = test_rates_are_those_of_the_rank_among_equally_sure_lines
    else:
        monkeypatch.setattr(
            Adjacency,
            "find",
            lambda self, tokens: find(replace(self, size=self.lines.used), tokens),
        )
        noticing = test_lines_replace_what_a_token_had_and_earlier_versions_stay
    with pytest.raises(AssertionError):
        noticing()


# Around it.


def test_fused_with_another_that_needs_more_each_gets_its_own() -> None:
    fused = build(
        "drafter", "token_recycling:successors=2+suffix+token_recycling:successors=5"
    ).open(TARGET)
    assert fused.needs == HiddenStateSpec(top=5)
    assert not fused.replayable
    engine = Engine(TARGET, fused, Chain(3), costs=COSTS)
    requests = [Request([1, 2], 24)]
    assert engine.write(requests).tokens == engine.plain(requests).tokens
    widths = [
        part.memory.lines.successors.shape[1]
        for part in engine.carried.parts
        if isinstance(part, TokenRecyclingState)
    ]
    assert widths == [2, 5]
