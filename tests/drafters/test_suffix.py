"""Suffix decoding: counts and drafts against a plain search, by hand, and what is remembered of earlier outputs."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.drafters.retrieval.suffix_match_drafts import (
    END,
    Limits,
    Outputs,
    match_in_memory,
    match_in_text,
    sort_by_context,
)
from draftree.drafters.suffix import Suffix, SuffixDrafter, SuffixState
from draftree.engine import Engine
from draftree.policies.base import RetrievalExpand, append
from draftree.policies.chain import Chain
from draftree.policies.trie import Trie
from draftree.policies.yield_ import Yield
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec
from draftree.testing import random_table, table_target
from draftree.tree import AcceptResult, Candidates, Ints, SubtreeCandidates, Tree, TreeBudget

COSTS = Costs({1: 1.0}, {1: 1.0})
TARGET = table_target(random_table(4, 1), context=64)
TAPS = TARGET.prefill(TARGET.new_cache(1, 1), [np.array([1])], HiddenStateSpec()).hidden_states
TEXT = st.lists(st.integers(0, 2), max_size=24)
TEXTS = st.lists(TEXT, max_size=5)

Path = tuple[int, ...]


def ints(text: Sequence[int]) -> Ints:
    return np.array(text, np.int64)


def reading(
    drafter: SuffixDrafter, texts: Sequence[Sequence[int]], earlier: Sequence[Sequence[int]] = ()
) -> SuffixState:
    """The state after texts (without their roots), with earlier outputs in the memory."""
    memory = Outputs.empty().remember(
        [ints(e) for e in earlier], drafter.knobs.longest, drafter.knobs.memory
    )
    carried = SuffixState((), ints([]), memory)
    return drafter.start([ints(t) for t in texts], ints([0] * len(texts)), TAPS, carried)


def from_roots(*texts: Sequence[int]) -> Tree:
    return Tree.from_roots(np.arange(len(texts)), ints([t[-1] for t in texts]))


def below(tree: Tree, parent: int, *tokens: int) -> Tree:
    """The tree with nodes that somebody proposed."""
    n = len(tokens)
    row = Candidates(ints([tokens]), np.zeros((1, n)))
    return tree.append(np.full(n, parent), ints(tokens), np.zeros(n), np.zeros(n), row)


def asked(
    drafter: SuffixDrafter, state: SuffixState, tree: Tree, nodes: Sequence[int], k: int = 99
) -> list[dict[int, float]]:
    """q by token after nodes, in the order proposed."""
    found, _ = drafter.expand(state, tree, ints(nodes), k, Drawing())
    return [
        {int(t): float(np.exp(v)) for t, v in zip(tokens, values, strict=True) if v > -np.inf}
        for tokens, values in zip(found.tokens, found.log_q, strict=True)
    ]


def drafted(
    text: Sequence[int],
    knobs: Suffix = Suffix(),
    earlier: Sequence[Sequence[int]] = (),
    nodes: int = 500,
) -> dict[Path, float]:
    """The probability along each path that the trie policy drafts behind a text whose last token is the root."""
    drafter = SuffixDrafter(knobs)
    state = reading(drafter, [text[:-1]], earlier)
    expand = lambda tree, frontier, k: drafter.expand(state, tree, frontier, k, Drawing())[0]
    tree = Trie(nodes).draft(expand, from_roots(text), COSTS, TreeBudget(ints([500]), 500), None)
    return {
        tuple(tree.tokens[tree.path(n)[1:]].tolist()): float(np.exp(tree.score[n]))
        for n in range(1, len(tree))
    }


# By hand.


def test_the_most_frequent_continuation_by_hand() -> None:
    # Behind 1 2 there stood 3 4, 3 5 and 6: shares 3: 2/3, 6: 1/3; behind 1 2 3 there stood 4 and
    # 5: 1/2 each. Pattern (1 2) occurs three times before, and no longer one does: p = 2 grows 4 ·
    # 2 = 8 tokens.
    text = [1, 2, 3, 4, 0, 1, 2, 3, 5, 7, 1, 2, 6, 9, 1, 2]
    drafter = SuffixDrafter(Suffix())
    state, tree = reading(drafter, [text[:-1]]), from_roots(text)
    assert asked(drafter, state, tree, [0]) == [pytest.approx({3: 2 / 3, 6: 1 / 3})]
    tree = below(tree, 0, 3, 6)
    three, six = asked(drafter, state, tree, [1, 2])
    assert list(three.items()) == [(4, 0.5), (5, 0.5)], "equals by their number"
    assert six == {9: 1.0}
    # The likeliest eight: 3 (2/3), then of value 1/3 in the order they are come upon: 6, 4, 5, 9,
    # 0, 7, 1 (below 9).
    assert drafted(text) == pytest.approx({
        (3,): 2 / 3, (6,): 1 / 3, (3, 4): 1 / 3, (3, 5): 1 / 3, (6, 9): 1 / 3, (3, 4, 0): 1 / 3, (3, 5, 7): 1 / 3,
        (6, 9, 1): 1 / 3,
    })  # fmt: skip


def test_the_longest_pattern_is_not_the_draft_if_a_shorter_one_promises_more() -> None:
    # Pattern (8 1) stood once, at the text's front, and was followed by 5: 2 tokens at α = 1, score
    # 1 + 1 = 2. Pattern (1) scores 1 at most. At α = 1 the longer pattern wins, whatever the
    # shorter one's counts.
    text = [8, 1, 5, 6, 1, 7, 2, 1, 7, 3, 8, 1]
    assert drafted(text, Suffix(factor=1)) == {(5,): 1, (5, 6): 1}
    # Pattern (8 1), now followed by three different tokens, twice each by two of them: 2 tokens are
    # worth 2/5 + 2/5. The pattern (1): 7 follows 20 times of 25, and its one token is worth .8 as
    # well, which is no more. With 21 of 26 it is.
    front = [8, 1, 3, 8, 1, 3, 8, 1, 4, 8, 1, 4, 8, 1, 6]
    tie, more = front + [1, 7] * 20 + [8, 1], front + [1, 7] * 21 + [8, 1]
    assert drafted(tie, Suffix(factor=1)) == pytest.approx({(3,): 0.4, (4,): 0.4})
    assert drafted(more, Suffix(factor=1)) == pytest.approx({(7,): 21 / 26})


def test_continuations_below_least_are_not_drafted() -> None:
    text = [1, 2] * 8 + [1, 3] * 2 + [1]
    assert drafted(text, Suffix(longest=1, factor=9, length=1)) == pytest.approx(
        {(2,): 0.8, (3,): 0.2}
    )
    assert drafted(text, Suffix(longest=1, factor=9, length=1, least=0.21)) == pytest.approx(
        {(2,): 0.8}
    )


def test_no_deeper_than_told() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert max(map(len, drafted(text))) == 6
    assert max(map(len, drafted(text, Suffix(length=4)))) == 4
    assert max(map(len, drafted(text, Suffix(factor=1.5)))) == 3, "α · p = 1.5 · 2"


def test_a_repeated_document_gives_its_continuation() -> None:
    document = np.random.default_rng(0).integers(0, 50, 40).tolist()
    text = [*document, *document[:5]]
    assert list(drafted(text, Suffix(factor=7))) == [
        tuple(document[5 : 5 + n]) for n in range(1, 36)
    ]
    assert list(drafted(document[:5], earlier=[document], knobs=Suffix(factor=7))) == [
        tuple(document[5 : 5 + n]) for n in range(1, 36)
    ]


@pytest.mark.parametrize("text", [[1], [1, 2], [3, 1, 2]])
def test_nothing_found_is_nothing_drafted(text: list[int]) -> None:
    drafter = SuffixDrafter(Suffix())
    candidates, _ = drafter.expand(
        reading(drafter, [text[:-1]], [[7, 8, 9]]), from_roots(text), ints([0]), 5, Drawing()
    )
    assert candidates.tokens.shape == (1, 1)
    assert (candidates.log_q == -np.inf).all()


# Against a plain search.


def plain_places(source: Sequence[int], pattern: Sequence[int]) -> list[int]:
    """Where a pattern ends, with a token behind it."""
    p = len(pattern)
    return [i + p - 1 for i in range(len(source) - p) if list(source[i : i + p]) == list(pattern)]


def plain_tree(
    conts: list[Path], budget: int, length: int, least: float
) -> tuple[list[tuple[Path, float]], float]:
    """Paths and shares of the likeliest continuations, and the sum of their probabilities, from the definition."""
    waiting: list[tuple[Path, float, float]] = []
    nodes: list[tuple[Path, float]] = []
    path = ()
    value = 1.0
    score = 0.0
    while len(nodes) < budget:
        next_tokens = [c[len(path)] for c in conts if c[: len(path)] == path and len(c) > len(path)]
        for token in sorted(set(next_tokens)) if len(path) < length else ():
            share = next_tokens.count(token) / len(next_tokens)
            if value * share >= least:
                waiting.append(((*path, token), value * share, share))
        if not waiting:
            break
        best = max(waiting, key=lambda w: w[1])  # the first of equals
        waiting.remove(best)
        path, value = best[:2]
        nodes.append((path, best[2]))
        score += value
    return nodes, score


def plain_draft(
    text: Sequence[int], documents: Sequence[Sequence[int]], knobs: Suffix
) -> dict[Path, float]:
    best: tuple[list[tuple[Path, float]], float] = [], 0.0
    for sources in ([text], documents):
        for p in range(min(knobs.longest, len(text)), 0, -1):
            conts = [tuple(s[i + 1 :]) for s in sources for i in plain_places(s, text[-p:])]
            grown = plain_tree(conts, int(knobs.factor * p + 1e-6), knobs.length, knobs.least)
            best = grown if grown[1] > best[1] else best
    return dict(best[0])


KNOBS = st.builds(
    Suffix,
    longest=st.integers(1, 6),
    length=st.integers(1, 6),
    factor=st.sampled_from([1, 1.5, 4]),
    least=st.sampled_from([0, 0.1, 0.3]),
    memory=st.just(10_000),
)


@settings(deadline=None)
@given(TEXT.filter(len), TEXTS, KNOBS)
def test_drafts_are_those_of_a_plain_search(
    text: list[int], documents: list[list[int]], knobs: Suffix
) -> None:
    wanted = plain_draft(text, documents, knobs)
    drafter = SuffixDrafter(knobs)
    state = reading(drafter, [text[:-1]], documents)
    tree = from_roots(text)
    numbers = {(): 0}
    for path in wanted:
        numbers[path] = len(tree)
        tree = below(tree, numbers[path[:-1]], path[-1])
    for at, q in zip(numbers, asked(drafter, state, tree, list(numbers.values())), strict=True):
        siblings = {path[-1]: share for path, share in wanted.items() if path[:-1] == at}
        assert q == pytest.approx(siblings), at
        assert list(q) == sorted(q, key=lambda t: (-siblings[t], t)), "by falling q, then by number"


@settings(deadline=None)
@given(TEXT.filter(len), TEXTS, st.integers(1, 8))
def test_the_places_of_every_pattern_are_found(
    text: list[int], documents: list[list[int]], longest: int
) -> None:
    memory = Outputs.empty()
    for document in documents:  # one call after another, so that blocks are merged
        memory = memory.remember([ints(document)], longest, 400)
    limits, whole = Limits(longest, 8, 4.0, 0.1, 1000), np.array(text, np.int32)
    sources = (
        (text, match_in_text(whole, len(text), limits)),
        (memory.tokens.tolist(), match_in_memory(memory, whole, len(text), limits)),
    )
    for source, (places, lengths) in sources:
        assert (np.diff(lengths) <= 0).all()
        for p in range(1, longest + 1):
            ends = (
                [i for i in plain_places(source, text[-p:]) if source[i + 1] != END]
                if p <= len(text)
                else []
            )
            assert sorted(places[lengths >= p].tolist()) == ends, f"pattern of {p}"


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=30), st.integers(1, 8))
@example([1, 0, 0, 0, 0, 0], 3)
def test_the_order_is_that_of_the_texts_read_backwards(tokens: list[int], longest: int) -> None:
    order = sort_by_context(np.array([*tokens, END], np.int32), longest)
    reach = 2 ** math.ceil(math.log2(longest))
    contexts = [([*tokens[: i + 1]][::-1][:reach], i) for i in order.tolist()]
    assert contexts == sorted(contexts)
    followed = [
        i
        for i, (t, after) in enumerate(zip(tokens, [*tokens[1:], END], strict=True))
        if t != END != after
    ]
    assert sorted(order.tolist()) == followed


def test_longest_matches_count_among_too_many_places() -> None:
    # Behind 9 there stands 1 three times, each time after a 5, and 2 twenty times; only four places
    # are looked at: the three of the longer match, and of the others the latest.
    text = [5, 9, 1] * 3 + [9, 2] * 20 + [5, 9]
    drafter = SuffixDrafter(Suffix(places=4, factor=1, length=1))
    (q,) = asked(drafter, reading(drafter, [text[:-1]]), from_roots(text), [0])
    assert q == {1: 1.0}, "the pattern of two"
    limits = Limits(2, 1, 1.0, 0.0, 4)
    places, lengths = match_in_text(np.array(text, np.int32), len(text), limits)
    assert places.tolist() == [7, 4, 1, 47]
    assert lengths.tolist() == [2, 2, 2, 1]
    memory = Outputs.empty().remember([ints([*text, 0])], 2, 1000)
    assert match_in_memory(memory, np.array(text, np.int32), len(text), limits)[1].tolist() == [
        2,
        2,
        2,
        2,
    ], "and its own end"


@settings(deadline=None)
@given(TEXT.filter(len), st.lists(TEXT, min_size=3, max_size=8), st.integers(1, 5))
def test_longest_matches_of_many_blocks_are_taken(
    text: list[int], documents: list[list[int]], most: int
) -> None:
    memory, whole = Outputs.empty(), np.array(text, np.int32)
    for document in documents:
        memory = memory.remember([ints(document)], 6, 160)  # blocks of 20 tokens at most
    every = match_in_memory(memory, whole, len(text), Limits(6, 8, 4.0, 0.1, 1000))
    places, lengths = match_in_memory(memory, whole, len(text), Limits(6, 8, 4.0, 0.1, most))
    assert lengths.tolist() == every[1][:most].tolist()
    assert set(zip(places, lengths, strict=True)) <= set(zip(*every, strict=True))


# Nodes of others, rows, k.


def test_behind_a_node_of_another_drafter_a_draft_of_its_own_begins() -> None:
    text = [1, 2, 3, 4, 9, 3, 6, 8, 1, 2]
    drafter = SuffixDrafter(Suffix())
    state = reading(drafter, [text[:-1]])
    tree = below(
        from_roots(text), 0, 3, 9, 7
    )  # 3 is its own, 9 and 7 are not, and 7 never stood in the text
    tree = below(below(tree, 2, 3, 5), 4, 6)  # 9 3 goes on as in the text, 9 5 does not; 9 3 6 does
    assert asked(drafter, state, tree, [0, 1, 2, 3, 4, 5, 6]) == [
        {3: 1},
        {4: 1},
        {3: 1},
        {},
        {6: 1},
        {},
        {8: 1},
    ]


def test_a_draft_ends_where_it_was_cut() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    drafter = SuffixDrafter(Suffix(factor=1))
    state = reading(drafter, [text[:-1]])
    tree = below(below(from_roots(text), 0, 3), 1, 4)
    assert asked(drafter, state, tree, [1, 2]) == [{4: 1}, {}], "α · p = 2 tokens"


def test_rows_do_not_mix_and_few_candidates_are_the_first() -> None:
    texts = [[1, 2, 3, 1, 2], [1, 5, 4], [1, 2, 9, 1, 2, 8, 1, 2]]
    drafter = SuffixDrafter(Suffix())
    state = reading(drafter, [t[:-1] for t in texts])
    tree = Tree.from_roots(ints([0, 2]), ints([2, 2]))
    assert asked(drafter, state, tree, [1, 0]) == [{8: 0.5, 9: 0.5}, {3: 1}]
    assert asked(drafter, state, tree, [1, 0], k=1) == [{8: 0.5}, {3: 1}]
    for row in (0, 2):
        alone = reading(drafter, [texts[row][:-1]])
        assert asked(drafter, alone, from_roots(texts[row]), [0]) == asked(
            drafter, state, tree, [row // 2]
        )


# All layers at once.


def by_layers(
    drafter: SuffixDrafter, state: SuffixState, tree: Tree, frontier: Ints, k: int, deepest: int
) -> Tree:
    """The tree with what is found below some nodes, layer by layer."""
    while (frontier := frontier[tree.depth[frontier] < deepest]).size:
        found, state = drafter.expand(state, tree, frontier, k, Drawing())
        before, tree = len(tree), append(tree, frontier, found)
        frontier = np.arange(before, len(tree))
    return tree


def values(tree: Tree, start: int) -> dict[Path, float]:
    """The log value along each path of the nodes from `start` on."""
    return {
        tuple(tree.tokens[tree.path(n)].tolist()): float(tree.score[n])
        for n in range(start, len(tree))
    }


@settings(deadline=None)
@given(
    TEXT.filter(len),
    TEXTS,
    KNOBS,
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(st.integers(0, 2), max_size=2, unique=True),
)
def test_one_call_finds_the_same_as_calls_by_layer(
    text: list[int],
    documents: list[list[int]],
    knobs: Suffix,
    k: int,
    deepest: int,
    others: list[int],
) -> None:
    drafter = SuffixDrafter(knobs)
    state, tree = reading(drafter, [text[:-1]], documents), from_roots(text)
    tree = below(tree, 0, *others) if others else tree
    frontier = np.arange(len(tree))[-max(len(others), 1) :]  # nodes of another drafter, or the root
    found, after = drafter.below(state, tree, frontier, k, Drawing(), ints([deepest]))
    assert found is not None
    whole = append(tree, found.nodes, found.candidates)
    assert whole.number.tolist() == list(range(len(whole)))
    assert values(whole, len(tree)) == values(
        by_layers(drafter, state, tree, frontier, k, deepest), len(tree)
    )
    assert values(whole, len(tree)) == values(
        by_layers(drafter, after, tree, frontier, k, deepest), len(tree)
    )


@settings(deadline=None)
@given(st.lists(TEXT.filter(len), min_size=2, max_size=3), KNOBS, st.integers(1, 3), st.data())
def test_one_call_for_several_sequences(
    texts: list[list[int]], knobs: Suffix, k: int, data: st.DataObject
) -> None:
    """Each sequence has the drafts that it has alone, to its own depth."""
    drafter = SuffixDrafter(knobs)
    rows = np.arange(len(texts))
    deepest = ints([data.draw(st.integers(1, 6)) for _ in texts])
    tree = Tree.from_roots(rows, ints([text[-1] for text in texts]))
    state = reading(drafter, [text[:-1] for text in texts], [])
    found, _ = drafter.below(state, tree, rows, k, Drawing(), deepest)
    assert found is not None
    assert found.rows.tolist() == sorted(found.rows.tolist())
    whole = append(tree, found.nodes, found.candidates)
    for row, text in enumerate(texts):
        alone, own = reading(drafter, [text[:-1]], []), from_roots(text)
        mine = drafter.below(alone, own, ints([0]), k, Drawing(), deepest[row : row + 1])[0]
        assert mine is not None
        wanted = values(append(own, mine.nodes, mine.candidates), 1)
        nodes = [n for n in range(len(texts), len(whole)) if whole.row[n] == row]
        paths = {tuple(whole.tokens[whole.path(n)].tolist()): float(whole.score[n]) for n in nodes}
        assert paths == wanted


def test_a_tree_that_is_found_in_one_call_is_that_of_layers() -> None:
    """And one draft step is noted for it, whatever its depth."""
    text = [5, 1, 2, 3, 4, 1, 2, 3, 9, 8, 1, 2, 6, 1, 2]
    drafter, costs = SuffixDrafter(Suffix()), Costs({1: 0.001}, {1: 1.0, 9: 1.4})
    state = reading(drafter, [text[:-1]])
    policy = Yield()
    room = TreeBudget(ints([40]), 40)

    class Layers(RetrievalExpand):
        def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
            return drafter.expand(state, tree, frontier, k, Drawing())[0]

        def find(self, tree: Tree, frontier: Ints, k: int) -> None:
            return None

    class Whole(Layers):
        searches, calls = True, 0

        def below(
            self, tree: Tree, frontier: Ints, k: int, deepest: Ints
        ) -> SubtreeCandidates | None:
            self.calls += 1
            return drafter.below(state, tree, frontier, k, Drawing(), deepest)[0]

    one = Whole()
    whole, layered = (
        policy.draft(each, from_roots(text), costs, room, policy.start())
        for each in (one, Layers())
    )
    assert one.calls == 1
    assert len(whole) > 4
    assert values(whole, 0) == pytest.approx(values(layered, 0))
    table = table_target(random_table(4, 1), context=200)
    stats = Engine(table, drafter, policy, costs=costs).write([Request([1, 2, 3, 1, 2], 60)]).stats
    assert any(tree.fed > 3 for tree in stats.work)
    assert all(len(work.frontiers) <= 1 for work in stats.work)


# State.


def committed(drafter: SuffixDrafter, state: SuffixState, root: int, *tokens: int) -> SuffixState:
    tree = Tree.from_roots(ints([0]), ints([root]))
    for token in tokens:
        tree = below(tree, len(tree) - 1, token)
    return drafter.commit(state, tree, AcceptResult((np.arange(1, len(tree)),), ints([0])), TAPS)


def test_older_states_stay_as_they_were() -> None:
    drafter = SuffixDrafter(Suffix())
    tree = from_roots([0])
    states = [drafter.start([ints([0, 1, 0])], ints([0]), TAPS)]
    said = [asked(drafter, states[0], tree, [0])]
    for n in range(12):
        state = committed(drafter, states[-1], n % 3, (n + 1) % 3)
        said.append(asked(drafter, state, tree, [0]))
        states.append(state)
        if n % 4 == 3:
            carried = drafter.carry(state)
            assert carried is not None
            states.append(drafter.start([ints([0, 2, 0])], ints([0]), TAPS, carried))
            said.append(asked(drafter, states[-1], tree, [0]))
    assert said == [asked(drafter, state, tree, [0]) for state in states]
    assert len({str(s) for s in said}) > 4


def test_a_draft_is_kept_for_its_root_only() -> None:
    drafter = SuffixDrafter(Suffix())
    state = drafter.start([ints([1, 2, 3, 4])], ints([1]), TAPS)
    one, other = from_roots([1]), from_roots([3])
    _, after = drafter.expand(state, one, ints([0]), 1, Drawing())
    assert asked(drafter, after, one, [0]) == [{2: 1}]
    assert asked(drafter, after, other, [0]) == [{4: 1}]
    assert asked(drafter, committed(drafter, after, 1, 5), one, [0]) == [{2: 0.5, 5: 0.5}]


def test_earlier_outputs_are_remembered_and_prompts_are_not() -> None:
    tree = from_roots([3])
    for session in (True, False):
        drafter = SuffixDrafter(Suffix(session=session))
        state = committed(drafter, drafter.start([ints([3, 7])], ints([3]), TAPS), 3, 4, 5)
        later = drafter.start([ints([0])], ints([3]), TAPS, drafter.carry(state))
        assert asked(drafter, later, tree, [0]) == ([{4: 1}] if session else [{}])
        assert asked(drafter, later, from_roots([7]), [0]) == [{}], "7 stood in the prompt"


@pytest.mark.parametrize("session", [True, False])
def test_truncating_is_starting_anew_with_what_was_carried(session: bool) -> None:
    drafter = SuffixDrafter(Suffix(session=session))
    state = drafter.start([ints([1, 2, 3]), ints([2, 2])], ints([1, 0]), TAPS)
    tree = below(Tree.from_roots(np.arange(2), ints([1, 0])), 0, 2, 3)
    state = drafter.commit(state, tree, AcceptResult((ints([3]), ints([])), ints([2, 1])), TAPS)
    state = drafter.commit(
        state,
        Tree.from_roots(np.arange(2), ints([2, 1])),
        AcceptResult((ints([]),) * 2, ints([0, 0])),
        TAPS,
    )
    prompts = [ints([1, 2, 0, 3]), ints([1, 1])]
    cut = drafter.start(prompts, ints([1, 1]), TAPS, drafter.truncate(state, ints([2, 0])))
    fresh = drafter.start(prompts, ints([1, 1]), TAPS, drafter.carry(state))
    assert (
        cut.memory.tokens.tolist()
        == fresh.memory.tokens.tolist()
        == ([1, 3, 2, END, 0, 1, END] if session else [])
    )
    tree = Tree.from_roots(np.arange(2), ints([3, 0]))
    assert asked(drafter, cut, tree, [0, 1]) == asked(drafter, fresh, tree, [0, 1])
    again = drafter.carry(cut)
    assert again is None or again.memory.tokens.tolist() == cut.memory.tokens.tolist(), (
        "nothing is remembered twice"
    )


@settings(deadline=None)
@given(st.lists(st.lists(TEXT, max_size=3), max_size=8), st.sampled_from([24, 40, 80]))
def test_the_memory_is_bounded_and_forgets_the_oldest(
    calls: list[list[list[int]]], size: int
) -> None:
    memory, given_in = Outputs.empty(), list[int]()
    for documents in calls:
        memory = memory.remember([ints(d) for d in documents], 4, size)
        for d in documents:
            given_in += [*d[1 - max(size // 8, 3) :], END] if len(d) > 1 else []
        assert len(memory.tokens) <= size
        held = memory.tokens.tolist()
        assert held == given_in[len(given_in) - len(held) :], "what is left is the newest"
        assert len(held) == len(given_in) or len(held) > size - 2 * max(size // 8, 3), (
            "no more is forgotten than must be"
        )
        blocks, orders = memory.blocks, memory.sorted_blocks
        for b in range(len(blocks) - 1):
            block = memory.tokens[blocks[b] : blocks[b + 1]]
            order = memory.order[orders[b] : orders[b + 1]] - blocks[b]
            assert order.tolist() == sort_by_context(block, 4).tolist()


def test_blocks_are_few() -> None:
    memory = Outputs.empty()
    for n in range(200):
        memory = memory.remember([ints([n, n + 1, n + 2])], 4, 8 * 256)
    assert len(memory.tokens) == 800
    assert len(memory.blocks) - 1 <= 12
    assert memory.tokens.dtype == memory.order.dtype == np.int32, (
        "8 bytes a token, and no second compilation"
    )


def test_the_second_time_a_text_is_written_in_fewer_passes() -> None:
    requests = [Request([0], 40)]
    steps = {}
    for session in (True, False):
        engine = Engine(TARGET, SuffixDrafter(Suffix(session=session)), Chain(5), costs=COSTS)
        plain = engine.plain(requests).tokens
        first, second = (engine.write(requests, reuse=reuse) for reuse in (True, False))
        assert first.tokens == second.tokens == plain
        assert first.stats.acceptance_length > 1.7, "greedy decoding of a table runs in a circle"
        steps[session] = len(first.stats.steps), len(second.stats.steps)
    assert steps[False][0] == steps[False][1] == steps[True][0] > steps[True][1]
