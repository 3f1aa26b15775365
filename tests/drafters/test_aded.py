"""N-grams of a corpus and what a text adds to them: storage against counting, adaptation against Algorithm 2, by hand too."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.drafters.aded import ADED, ADEDDrafter, ADEDState
from draftree.drafters.retrieval.adaptive_ngrams import Adapted
from draftree.drafters.retrieval.ngram_build import GramSettings, grams_of
from draftree.drafters.retrieval.ngram_table import Grams
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.policies.base import append
from draftree.policies.mcts import MCTS
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec
from draftree.testing import table_target
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget

TINY = table_target(torch.full((3, 2, 2), 0.5))
TAPS = TINY.prefill(TINY.new_cache(1, 1), [np.array([1])], HiddenStateSpec()).hidden_states
COSTS = Costs({1: 1.0}, {1: 1.0})
Q = dict[int, float]


def corpus(*documents: Sequence[int], n: int = 3, vocab: int = 100, **how: int) -> Grams:
    return grams_of([np.array(d, np.int64) for d in documents], GramSettings(n, vocab, **how))


def read(drafter: ADEDDrafter, *texts: Sequence[int], state: ADEDState | None = None) -> ADEDState:
    """The state after texts whose last tokens are the roots."""
    return drafter.start(
        [np.array(t[:-1], np.int64) for t in texts], np.array([t[-1] for t in texts]), TAPS, state
    )


def after(
    drafter: ADEDDrafter, state: ADEDState, path: Sequence[int], row: int = 0, k: int = 20
) -> Q:
    """q of the candidates after a path; its first token is the root."""
    tree = Tree.from_roots(np.array([row]), np.array(path[:1]))
    for token in path[1:]:
        tree = append(
            tree, np.array([len(tree) - 1]), Candidates(np.array([[token]]), np.zeros((1, 1)))
        )
    candidates, _ = drafter.expand(state, tree, np.array([len(tree) - 1]), k, Drawing())
    assert candidates.tokens.shape == (1, k)
    there = candidates.log_q[0] > -np.inf
    assert not there[int(there.sum()) :].any(), "missing candidates come last"
    return dict(
        zip(
            candidates.tokens[0][there].tolist(),
            np.exp(candidates.log_q[0][there]).tolist(),
            strict=True,
        )
    )


def step(
    drafter: ADEDDrafter,
    state: ADEDState,
    root: int,
    accepted: Sequence[int],
    bonus: int,
    row: int = 0,
) -> ADEDState:
    tree = Tree.from_roots(np.array([row]), np.array([root]))
    for token in accepted:
        tree = append(
            tree, np.array([len(tree) - 1]), Candidates(np.array([[token]]), np.zeros((1, 1)))
        )
    return drafter.commit(
        state, tree, AcceptResult((np.arange(1, len(tree)),), np.array([bonus])), TAPS
    )


GRAMS = corpus([1, 2, 3], [1, 2, 3], [1, 2, 4])


# The corpus.


def test_shares_by_hand() -> None:
    # C(1, 2, 3) = 2, C(1, 2, 4) = 1, C(1, 2) = 3 (eq. 1).
    drafter = ADEDDrafter(ADED(adapt=False), GRAMS)
    assert after(drafter, read(drafter, [9, 1, 2]), [2]) == pytest.approx(
        {3: 2 / 3, 4: 1 / 3}, abs=1e-5
    )
    assert after(drafter, read(drafter, [9, 1]), [1, 2]) == pytest.approx(
        {3: 2 / 3, 4: 1 / 3}, abs=1e-5
    )
    assert after(drafter, read(drafter, [9]), [9, 1, 2]) == pytest.approx(
        {3: 2 / 3, 4: 1 / 3}, abs=1e-5
    )


def test_pruned_successors_keep_their_part_of_q() -> None:
    grams = corpus(
        [1, 2, 3] * 5, [1, 2, 4] * 3, [1, 2, 5], [1, 2, 6]
    )  # after (1, 2): 5, 3, 1, 1 of ten
    drafter = ADEDDrafter(ADED(adapt=False, top=2), grams)
    assert after(drafter, read(drafter, [1, 2]), [2]) == pytest.approx({3: 0.5, 4: 0.3}, abs=1e-4)
    assert after(drafter, read(drafter, [1, 2]), [2], k=1) == pytest.approx({3: 0.5}, abs=1e-4)
    stored = ADEDDrafter(
        ADED(adapt=False), corpus([1, 2, 3] * 5, [1, 2, 4] * 3, [1, 2, 5], [1, 2, 6], threshold=2)
    )
    assert after(stored, read(stored, [1, 2]), [2]) == pytest.approx({3: 0.5, 4: 0.3}, abs=1e-4)


def test_unseen_tokens_are_not_drafted() -> None:
    drafter = ADEDDrafter(ADED(adapt=False), GRAMS)
    state = read(drafter, [1, 2])
    for path in ([2, 3], [7], [2, 99], [2, 1]):
        assert after(drafter, state, path) == {}
    assert after(drafter, read(drafter, [2]), [2]) == {}, "a context of one token is none"
    assert after(drafter, read(drafter, [1]), [1, 2])
    nothing = ADEDDrafter(ADED(), Grams.none(3, 100))
    assert after(nothing, read(nothing, [5, 6, 7]), [7]) == {}


def test_a_corpus_of_one_repeated_document_gives_its_continuation() -> None:
    document = [11, 5, 8, 2, 9, 4, 7, 3]
    drafter = ADEDDrafter(ADED(), corpus(*[document] * 7))
    held = {"state": read(drafter, document[:2])}

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        found, held["state"] = drafter.expand(held["state"], tree, frontier, k, Drawing())
        return found

    roots = Tree.from_roots(np.zeros(1, np.int64), np.array(document[1:2]))
    tree = MCTS().draft(expand, roots, COSTS, TreeBudget(np.array([9]), 64), None)
    assert tree.tokens.tolist() == document[1:6]
    assert np.exp(tree.log_q) == pytest.approx(1.0)


documents = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("n", "vocab", "top", "threshold"),
    [(3, 61, 12, 1), (3, 70_000, 2, 2), (2, 61, 3, 1), (4, 61, 12, 1), (4, 70_000, 0, 1)],
)
@settings(max_examples=12, deadline=None)
@given(documents, st.integers(1, 40))
def test_the_table_is_what_counting_gives(
    n: int, vocab: int, top: int, threshold: int, documents: list[list[int]], piece: int
) -> None:
    texts = [
        [t * (vocab - 1) // 3 for t in d] for d in documents
    ]  # ids up to the vocabulary's last
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for i in range(n - 1, len(text)):
            counts[tuple(text[i - n + 1 : i])][text[i]] += 1
    if not counts:
        with pytest.raises(UserError, match="the corpus is empty"):
            corpus(*texts, n=n, vocab=vocab)
        return
    drafter = ADEDDrafter(
        ADED(adapt=False, top=99),
        corpus(*texts, n=n, vocab=vocab, top=top, threshold=threshold, piece=piece),
    )
    stored = 0
    for context, seen in counts.items():
        want = sorted(
            ((t, c) for t, c in seen.items() if c >= threshold), key=lambda tc: (-tc[1], tc[0])
        )[: top or None]
        got = after(drafter, read(drafter, context), context[-1:])
        assert list(got) == [t for t, _ in want], "the likeliest first, of equals the lower id"
        assert list(got.values()) == pytest.approx([c / seen.total() for _, c in want], abs=2e-4)
        stored += len(want)
    assert len(drafter.grams) == stored
    assert after(drafter, read(drafter, [1] * (n - 1)), [1]) == {}, "1 is in no document"


def test_figures_of_a_build_and_its_files(tmp_path: Path) -> None:
    told: list[str] = []
    texts = [np.array([1, 2, 3, 1, 2, 4]), np.array([7]), np.array([1, 2, 3])]
    figures = ADED.build(texts, 100, tmp_path, {"top": "1"}, told.append)
    assert figures == {
        "documents": 3, "tokens": 10, "grams": 5, "n": 3, "distinct": 4, "stored": 3, "contexts": 3,
        "bytes": sum(f.stat().st_size for f in tmp_path.glob("*.bin")),
    }  # fmt: skip
    assert any("sorting" in line for line in told)
    assert any("merging" in line for line in told)
    assert {f.suffix for f in tmp_path.iterdir()} == {".bin", ".json"}, (
        "nothing is left of the runs"
    )
    drafter = ADEDDrafter(ADED(adapt=False), Grams.from_folder(tmp_path))
    assert after(drafter, read(drafter, [1, 2]), [2]) == pytest.approx({3: 2 / 3}, abs=1e-5)
    with pytest.raises(ValueError, match="read-only"):
        drafter.grams.table.share[0] = 1


def test_a_build_does_not_depend_on_how_it_is_cut(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 30, n) for n in (700, 3, 1200, 400)]
    whole = grams_of(texts, GramSettings(3, 30)).table
    cut = grams_of(texts, GramSettings(3, 30, piece=50)).table
    for name, ours, theirs in zip(whole._fields, whole, cut, strict=True):
        assert np.array_equal(ours, theirs), name


def test_many_contexts_of_different_sizes_are_found() -> None:
    rng = np.random.default_rng(1)
    text = rng.zipf(1.3, 20_000) % 500
    drafter = ADEDDrafter(ADED(adapt=False), corpus(text.tolist(), vocab=500))
    counts: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for a, b, c in zip(text[:-2].tolist(), text[1:-1].tolist(), text[2:].tolist(), strict=True):
        counts[a, b][c] += 1
    for context in list(counts)[::37]:
        want = sorted(counts[context].items(), key=lambda tc: (-tc[1], tc[0]))[:12]
        assert list(after(drafter, read(drafter, context), context[-1:])) == [t for t, _ in want]


# Adaptation.


def test_adaptation_by_hand() -> None:
    # The text 1 2 4 1 2 has the tri-grams (1 2 4), (2 4 1), (4 1 2); each gets one increment for
    # the step.
    drafter = ADEDDrafter(ADED(prompt=False), GRAMS)
    state = read(drafter, [1, 2, 4, 1, 2])
    # Weights after (1, 2): 4: 1/3 + .04, 3: 2/3; together 1.04.
    assert after(drafter, state, [2]) == pytest.approx(
        {3: 2 / 3 / 1.04, 4: (1 / 3 + 0.04) / 1.04}, abs=1e-5
    )
    # (2, 4) is not in the corpus: 1 has the weight .04, and all of q.
    assert after(drafter, state, [2, 4]) == {1: 1.0}
    # The next step writes 4: the tri-grams are (1 2 4) twice, (2 4 1), (4 1 2). Increments of (1 2
    # 4): 1 + 2.
    state = step(drafter, state, 2, [], 4)
    assert after(drafter, state, [4, 1, 2]) == pytest.approx(
        {3: 2 / 3 / 1.12, 4: (1 / 3 + 0.12) / 1.12}, abs=1e-5
    )


def test_a_prompt_counts_once_when_it_is_read() -> None:
    # Once for the prompt and once for the step: 4: 1/3 + .08.
    drafter = ADEDDrafter(ADED(), GRAMS)
    want = {3: 2 / 3 / 1.08, 4: (1 / 3 + 0.08) / 1.08}
    assert after(drafter, read(drafter, [1, 2, 4, 1, 2]), [2]) == pytest.approx(want, abs=1e-5)


def test_the_window_and_the_cap_by_hand() -> None:
    # Of 1 2 4 1 2 the last four tokens have (2 4 1) and (4 1 2) only.
    drafter = ADEDDrafter(ADED(prompt=False, window=4), GRAMS)
    state = read(drafter, [1, 2, 4, 1, 2])
    assert after(drafter, state, [2]) == pytest.approx({3: 2 / 3, 4: 1 / 3}, abs=1e-5)
    assert after(drafter, state, [2, 4]) == {1: 1.0}
    # increment 1, cap 1.5: of 4 the weight is min(1/3 + 2, 1.5).
    drafter = ADEDDrafter(ADED(increment=1.0, cap=1.5), GRAMS)
    want = {4: 1.5 / (2 / 3 + 1.5), 3: 2 / 3 / (2 / 3 + 1.5)}
    assert after(drafter, read(drafter, [1, 2, 4, 1, 2]), [2]) == pytest.approx(want, abs=1e-5)


class Matrix:
    """Algorithm 2, word for word."""

    def __init__(self, knobs: ADED, base: dict[tuple[int, ...], Counter[int]], n: int) -> None:
        self.knobs, self.n = knobs, n
        self.weights = {
            c: {t: k / seen.total() for t, k in seen.items()} for c, seen in base.items()
        }

    def adjust(self, tokens: Sequence[int], length: int) -> None:
        part = tokens[max(0, len(tokens) - length) :]
        for i in range(self.n - 1, len(part)):
            row = self.weights.setdefault(tuple(part[i - self.n + 1 : i]), {})
            token = part[i]
            row[token] = (
                min(row[token] + self.knobs.increment, self.knobs.cap)
                if token in row
                else self.knobs.increment
            )

    def q(self, context: tuple[int, ...]) -> Q:
        row = self.weights.get(context, {})
        return {t: w / sum(row.values()) for t, w in row.items()}


token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(token_lists, st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=8)),
        min_size=1,
        max_size=3,
    ),
    token_lists,
    st.sampled_from([2, 3]),
    st.integers(1, 9),
    st.sampled_from([0.3, 3.0]),
    st.booleans(),
)
def test_weights_are_those_of_algorithm_2_over_a_session(
    session: list[tuple[list[int], list[list[int]]]],
    corpus_text: list[int],
    n: int,
    window: int,
    cap: float,
    prompt: bool,
) -> None:
    """Each text of the session is a prompt and steps, each of which writes the tokens accepted and a bonus."""
    knobs = ADED(window=window, cap=cap, increment=0.07, prompt=prompt)
    base: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for i in range(n - 1, len(corpus_text)):
        base[tuple(corpus_text[i - n + 1 : i])][corpus_text[i]] += 1
    grams = corpus(corpus_text, n=n, vocab=4) if base else Grams.none(n, 4)
    drafter = ADEDDrafter(knobs, grams)
    matrix = Matrix(knobs, base, n)
    state = None
    for start, steps in session:
        text = [*start, 0]
        state = read(drafter, text, state=state)
        if prompt:
            matrix.adjust(text, len(text))
        matrix.adjust(text, window)
        for written in steps:
            state = step(drafter, state, text[-1], written, 1)
            text += [*written, 1]
            matrix.adjust(text, window)
        for context in np.ndindex(*[4] * (n - 1)):
            got = after(
                drafter, replace(state, rows=(_with_text(state.rows[0], context, n),)), context[-1:]
            )
            assert got == pytest.approx(matrix.q(context), abs=2e-4)
            rounding = 4 * 0.5 / 65535  # of four shares stored in 16 bits
            assert not got or sum(got.values()) == pytest.approx(1.0, rel=0, abs=rounding + 1e-9), (
                "renormalised"
            )
        state = drafter.carry(state)


def _with_text(row: Adapted, context: tuple[int, ...], n: int) -> Adapted:
    """The row as if its text ended with a context, with no increments for it."""
    return row.plus(np.array(context), n)


def test_an_earlier_state_stays_as_it_was() -> None:
    drafter = ADEDDrafter(ADED(), GRAMS)
    before = read(drafter, [1, 2, 4, 1, 2])
    want = after(drafter, before, [2])
    one, other = step(drafter, before, 2, [4, 1], 2), step(drafter, before, 2, [3], 3)
    assert after(drafter, before, [2]) == want
    assert after(drafter, one, [2]) != after(drafter, other, [3, 1, 2])
    assert [r.tokens.tolist() for r in (*one.rows, *other.rows)] == [
        [1, 2, 4, 1, 2, 4, 1, 2],
        [1, 2, 4, 1, 2, 3, 3],
    ]


def test_a_long_text_is_indexed_like_one_read_at_once() -> None:
    rng = np.random.default_rng(2)
    text, drafter = (
        rng.integers(0, 5, 900),
        ADEDDrafter(ADED(prompt=False, window=900), Grams.none(3, 5)),
    )
    grown = read(drafter, text[:10])
    for i in range(10, 900, 5):
        grown = step(drafter, grown, int(text[i - 1]), text[i : i + 4].tolist(), int(text[i + 4]))
    seen: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for i in range(2, 900):
        seen[tuple(text[i - 2 : i].tolist())].add(int(text[i]))
    for a, b in np.ndindex(5, 5):
        assert (
            set(
                after(drafter, replace(grown, rows=(grown.rows[0].plus(np.array([a, b]), 3),)), [b])
            )
            == seen[a, b]
        )


# Rows and sessions.


def test_rows_see_the_session_and_their_own_text_only() -> None:
    drafter = ADEDDrafter(ADED(), Grams.none(3, 100))
    carried = drafter.carry(read(drafter, [5, 6, 7]))
    texts = ([1, 2, 3, 1, 2], [1, 2, 4, 1, 2], [8, 5, 6])
    together = read(drafter, *texts, state=carried)
    for row, text in enumerate(texts):
        alone = read(drafter, text, state=carried)
        assert after(drafter, together, text[-1:], row) == after(drafter, alone, text[-1:])
    roots = Tree.from_roots(np.array([0, 1, 2]), np.array([2, 2, 6]))
    found, _ = drafter.expand(together, roots, np.array([2, 0, 1]), 3, Drawing())
    assert found.tokens[:, 0].tolist() == [7, 3, 4]


def test_session_option_keeps_counts_for_later_texts() -> None:
    for session, want in ((True, {7: 1.0}), (False, {})):
        drafter = ADEDDrafter(ADED(session=session), Grams.none(3, 100))
        done = step(drafter, read(drafter, [9, 5, 6]), 6, [7], 9)
        assert after(drafter, read(drafter, [5, 6], [1, 2], state=drafter.carry(done)), [6]) == want
        again = read(drafter, [9, 5, 6], state=drafter.truncate(done, np.array([2])))
        assert after(drafter, again, [6]) == want
        assert after(drafter, read(drafter, [9, 5, 6], state=None), [6]) == {}


def test_the_memory_keeps_what_occurs_often_and_what_is_new() -> None:
    drafter = ADEDDrafter(ADED(memory=4, prompt=False), Grams.none(3, 100))
    one, other = (
        step(drafter, read(drafter, [9, 1, 2]), 2, [3], 8),
        step(drafter, read(drafter, [7, 5, 6]), 6, [7], 4),
    )

    def kept(*texts: ADEDState) -> ADEDState:
        memory = drafter.carry(texts[0])
        for text in texts[1:]:
            assert memory is not None
            memory = drafter.carry(replace(text, memory=memory.memory))
        assert memory is not None
        assert len(memory.memory.token) == 4
        assert memory.memory.times.max() < 100
        return memory

    def following(state: ADEDState, a: int, b: int) -> Q:
        return after(drafter, read(drafter, [a, b], state=state), [b])

    for first, second, often, rare in ((one, other, (1, 2), (5, 6)), (other, one, (5, 6), (1, 2))):
        newer, older = kept(first, second), kept(first, first, second)
        assert following(newer, *rare), "what is new stays"
        assert following(older, *often), "what occurred twice stays"


def test_a_prefix_that_is_reused_does_not_count_again() -> None:
    drafter = ADEDDrafter(
        ADED(increment=1.0, window=1), Grams.none(3, 100)
    )  # the window holds no tri-gram: prompts count alone
    first = read(drafter, [1, 2, 3, 1, 2, 4, 9])
    assert after(drafter, first, [9, 1, 2]) == pytest.approx({3: 0.5, 4: 0.5})
    # [1, 2, 3] is shared; (1 2 3) counts once from before, (1 2 4) once from before and once from
    # here.
    on = read(drafter, [1, 2, 3, 1, 2, 4], state=drafter.truncate(first, np.array([3])))
    assert after(drafter, on, [4, 1, 2]) == pytest.approx({3: 1 / 3, 4: 2 / 3})
    # As a new text all of it counts: (1 2 3) and (1 2 4) twice each.
    new = read(drafter, [1, 2, 3, 1, 2, 4], state=drafter.carry(first))
    assert after(drafter, new, [4, 1, 2]) == pytest.approx({3: 0.5, 4: 0.5})


def test_a_repeating_text_is_written_in_fewer_passes_and_the_same() -> None:
    table = torch.full((7, 6, 6), 0.01)
    for a, b in np.ndindex(7, 6):
        table[a, b, (b + 1) % 6] = 0.95
    target = table_target(table, 80)
    engine = Engine(target, ADED().open(target), MCTS(), costs=COSTS)
    requests = [Request([0, 1], 40), Request([3], 30)]
    written = engine.write(requests)
    assert written.tokens == engine.plain(requests).tokens
    assert written.stats.acceptance_length > 2.5
    later = engine.write([Request([2, 3], 40)])
    assert later.stats.acceptance_length > 4.5, (
        "the session knows how it goes on from the first token"
    )


# What is refused.


def refusals(folder: Path) -> list[tuple[str, Any]]:
    ADED.build([np.array([1, 2, 3, 4])], 5, folder, {"n": "2"}, lambda _: None)
    target = table_target(torch.full((4, 3, 3), 1 / 3))
    return [
        ("n is 3, allowed is 2", lambda: ADED(n=3).searching(folder)),
        ("is not a drafter's config", lambda: ADED(str(folder)).open(target)),
        ("'.*nowhere' does not exist", lambda: ADED(str(folder / "nowhere")).open(target)),
        ("is not the header of n-grams", lambda: ADED().searching(folder / "nowhere")),
        ("n is 5, allowed is none or a whole number in 2 … 4", lambda: ADED(n=5)),
        ("cap is 0.0, allowed is a finite number above 0", lambda: ADED(cap=0.0)),
        ("window is 0", lambda: ADED(window=0)),
        ("did you mean 'top'", lambda: ADED.build([], 5, folder, {"tip": "2"}, print)),
        (
            "n is 7, allowed is a whole number in 2 … 4",
            lambda: ADED.build([], 5, folder, {"n": "7"}, print),
        ),
        ("has token 9, allowed are 0 … 4", lambda: corpus([1, 2, 9], vocab=5)),
        ("allowed with a vocabulary of 4,000,000 is at most 3", lambda: Grams.none(4, 4_000_000)),
    ]


@pytest.mark.parametrize("case", range(11))
def test_broken_datastores_and_options_are_refused(case: int, tmp_path: Path) -> None:
    said, call = refusals(tmp_path)[case]
    with pytest.raises(UserError, match=said):
        call()


def test_a_datastore_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    ADED.build([np.array([1, 2, 3, 4])], 5, tmp_path, {}, lambda _: None)
    Grams.from_folder(tmp_path)
    (tmp_path / "share.bin").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"has 1 bytes, ngrams.json says 4"):
        Grams.from_folder(tmp_path)


def test_described_tells_drafters_apart_but_not_folders(tmp_path: Path) -> None:
    ADED.build([np.array([1, 2, 3, 4])], 5, tmp_path, {}, lambda _: None)
    target = table_target(torch.full((6, 5, 5), 0.2))
    stored, plain = (
        ADED(str(tmp_path)).searching(tmp_path).description,
        ADED().open(target).description,
    )
    assert str(tmp_path) not in stored
    assert len({stored, plain, ADED(window=3).open(target).description}) == 3
