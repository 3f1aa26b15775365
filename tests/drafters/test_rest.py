"""REST: suffix search and trie against plain ones, boundaries of documents, the official file, and what trees it drafts."""

import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.drafters.rest import REST, RESTDrafter, RESTState, index_documents, read_official
from draftree.drafters.retrieval.continuation_trie import PrefixTree, build_trie
from draftree.drafters.retrieval.suffix_array import (
    SEPARATOR,
    continuations,
    join_documents,
    search,
    suffix_array,
)
from draftree.engine import Engine
from draftree.errors import UnknownName, UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.base import Layered
from draftree.policies.chain import Chain
from draftree.policies.trie import Trie as TriePolicy
from draftree.policies.vct import VCT
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec
from draftree.testing import random_table, table_target
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget

COSTS = Costs({1: 1.0}, {1: 1.0})
TARGET = table_target(random_table(4, 1), context=64)
TAPS = TARGET.prefill(TARGET.new_cache(1, 1), [np.array([1])], HiddenStateSpec()).hidden_states
Document = list[int]
Counts = dict[tuple[int, ...], int]

tokens = st.integers(0, 3)
corpora = st.lists(st.lists(tokens, min_size=1, max_size=25), min_size=1, max_size=6)
contexts = st.lists(tokens, min_size=1, max_size=20)


def drafter(documents: list[Document], knobs: REST = REST(), vocab: int = 4) -> RESTDrafter:
    return RESTDrafter(
        knobs, (index_documents([np.array(d, np.uint32) for d in documents], vocab),), vocab
    )


def paths(trie: PrefixTree) -> dict[tuple[int, ...], float]:
    """Every node's path and the product of the shares along it."""
    found: dict[tuple[int, ...], float] = {}

    def walk(node: int, path: tuple[int, ...], share: float) -> None:
        for child in range(trie.first[node], trie.first[node] + trie.children[node]):
            found[(*path, int(trie.tokens[child]))] = share * float(np.exp(trie.log_q[child]))
            walk(child, (*path, int(trie.tokens[child])), found[(*path, int(trie.tokens[child]))])

    walk(0, (), 1.0)
    return found


def brute_force(documents: list[Document], context: Document, knobs: REST) -> list[tuple[int, ...]]:
    """What follows the longest suffix of a context wherever it stands in a document and something follows."""
    for n in range(min(knobs.longest, len(context)), knobs.shortest - 1, -1):
        found = [
            tuple(d[i + n : i + n + knobs.continuation])
            for d in documents
            for i in range(len(d) - n)
            if d[i : i + n] == context[-n:]
        ]
        if found:
            return found
    return []


def counted(found: list[tuple[int, ...]]) -> Counts:
    return Counter(f[: n + 1] for f in found for n in range(len(f)))


@given(corpora, st.sampled_from([4, 255, 256, 65535, 65536, 2**24, 2**31]))
def test_the_suffix_array_is_the_order_of_all_suffixes(
    documents: list[Document], vocab: int
) -> None:
    spread = [
        [t * ((vocab - 1) // 3) for t in d] for d in documents
    ]  # over all bytes that a token may have
    whole = join_documents([np.array(d) for d in spread])
    assert whole.tolist() == [t for d in spread for t in (*d, SEPARATOR)]
    want = sorted(np.flatnonzero(whole != SEPARATOR).tolist(), key=lambda i: whole[i:].tolist())
    assert suffix_array(whole, vocab).tolist() == want


@given(corpora, contexts, st.integers(1, 6), st.integers(1, 3))
def test_the_search_finds_what_a_plain_one_finds(
    documents: list[Document], context: Document, longest: int, few: int
) -> None:
    knobs = REST(longest=max(longest, few), shortest=few, continuation=5)
    corpus = index_documents([np.array(d) for d in documents], 4)
    n, low, high = search(
        corpus.tokens, corpus.suffixes, np.array(context), knobs.longest, knobs.shortest
    )
    rows = continuations(corpus.tokens, corpus.suffixes, low, high, n, 5, 1000)
    want = brute_force(documents, context, knobs)
    assert sorted(tuple(t for t in row if t >= 0) for row in rows.tolist()) == sorted(want)
    assert (n > 0) == bool(want)


@given(corpora, contexts)
def test_the_trie_counts_every_beginning(documents: list[Document], context: Document) -> None:
    knobs = REST(nodes=10_000, matches=10_000)
    found = brute_force(documents, context, knobs)
    trie = drafter(documents, knobs).retrieve(np.array(context))
    assert paths(trie) == pytest.approx({p: n / len(found) for p, n in counted(found).items()})


@given(corpora, contexts, st.integers(1, 12))
@settings(max_examples=200)
def test_the_trie_keeps_the_most_frequent_nodes(
    documents: list[Document], context: Document, nodes: int
) -> None:
    found = brute_force(documents, context, REST())
    every = counted(found)
    kept = paths(drafter(documents, REST(nodes=nodes)).retrieve(np.array(context)))
    assert len(kept) == min(nodes, len(every))
    assert all(path[:-1] in kept or len(path) == 1 for path in kept), "a node without its parent"
    assert kept == pytest.approx({p: every[p] / len(found) for p in kept})
    rest = [n for p, n in every.items() if p not in kept]
    assert min((every[p] for p in kept), default=0) >= max(rest, default=0)


def test_siblings_stand_in_the_order_of_their_frequency() -> None:
    trie = build_trie(np.array([[0, 1], [1, 0], [1, 2], [1, 2], [2, -1], [2, -1]]), 10)
    assert trie.tokens.tolist() == [-1, 1, 2, 0, 2, 0, 1]
    assert np.exp(trie.log_q).tolist() == pytest.approx([1, 3 / 6, 2 / 6, 1 / 6, 2 / 3, 1 / 3, 1])
    assert (trie.first[0], trie.children.tolist()) == (1, [3, 2, 0, 1, 0, 0, 0])


def test_many_matches_are_sampled_evenly() -> None:
    documents = [[0, 1, token] for token in range(2, 100) for _ in range(10)]
    corpus = index_documents([np.array(d) for d in documents], 100)
    n, low, high = search(corpus.tokens, corpus.suffixes, np.array([0, 1]), 16, 2)
    assert (n, high - low) == (2, 980)
    assert continuations(corpus.tokens, corpus.suffixes, low, high, 2, 1, 98)[
        :, 0
    ].tolist() == list(range(2, 100))


# Documents.


@given(corpora, contexts)
def test_nothing_reaches_from_one_document_into_the_next(
    documents: list[Document], context: Document
) -> None:
    own = [
        [t + 4 * i for t in d] for i, d in enumerate(documents)
    ]  # no two documents share a token
    asked = [t + 4 * (i % len(documents)) for i, t in enumerate(context)]
    for path in paths(drafter(own, REST(shortest=1), 4 * len(own)).retrieve(np.array(asked))):
        assert {t // 4 for t in path} == {asked[-1] // 4}


def test_the_end_of_a_document_is_no_continuation() -> None:
    documents = [[1, 2], [3, 0], [0, 1, 2, 3]]
    trie = drafter(documents).retrieve(np.array([0, 1, 2]))
    assert paths(trie) == {(3,): 1.0}
    trie = drafter(documents).retrieve(np.array([1, 2]))
    assert paths(trie) == {(3,): 1.0}, "the match at the end of the first document does not count"
    assert paths(drafter([[1, 2], [3, 0]]).retrieve(np.array([1, 2]))) == {}


def test_a_shorter_suffix_is_taken_where_the_longer_one_ends_its_document() -> None:
    trie = drafter([[0, 1, 2], [3, 1, 2, 0]]).retrieve(np.array([0, 1, 2]))
    assert paths(trie) == {(0,): 1.0}


# Trees.


def drafted(model: RESTDrafter, text: Document, policy: Layered) -> dict[tuple[int, ...], float]:
    """The paths of the tree behind a text whose last token is the root, and their values."""
    state = model.start([np.array(text[:-1], np.int64)], np.array(text[-1:]), TAPS)

    def draft(tree: Tree, frontier: Ints, k: int) -> Candidates:
        nonlocal state
        candidates, state = model.expand(state, tree, frontier, k, Drawing())
        return candidates

    roots = Tree.from_roots(np.array([0]), np.array(text[-1:], np.int64))
    tree = policy.draft(draft, roots, COSTS, TreeBudget(np.array([50]), 1000), None)
    return {
        tuple(tree.tokens[tree.path(n)[1:]].tolist()): float(np.exp(tree.score[n]))
        for n in range(1, len(tree))
    }


@pytest.mark.parametrize("at", [2, 9, 17, 40])
def test_a_corpus_of_one_repeated_document_gives_its_continuation(at: int) -> None:
    document = np.random.default_rng(0).permutation(60).tolist()
    model = drafter([document] * 7, vocab=60)
    want = document[at : at + 10]
    assert drafted(model, document[:at], TriePolicy()) == {
        tuple(want[: n + 1]): pytest.approx(1.0) for n in range(10)
    }
    assert drafted(model, document[:at], Chain(20)).keys() == {
        tuple(want[: n + 1]) for n in range(10)
    }


@given(corpora, contexts)
@settings(max_examples=50)
def test_the_trie_policy_drafts_what_was_retrieved(
    documents: list[Document], context: Document
) -> None:
    found = brute_force(documents, context, REST())
    want = {p: n / len(found) for p, n in counted(found).items()}
    got = drafted(drafter(documents, REST(nodes=10_000)), context, TriePolicy(nodes=10_000))
    assert got == pytest.approx(want)
    few = drafted(drafter(documents, REST(nodes=5)), context, TriePolicy())
    assert few.keys() <= want.keys()
    assert len(few) == min(5, len(want))


@given(corpora, contexts, st.integers(1, 3))
@settings(max_examples=50)
def test_no_policy_gets_an_invented_token(
    documents: list[Document], context: Document, width: int
) -> None:
    want = counted(brute_force(documents, context, REST(nodes=10_000)))
    assert (
        drafted(drafter(documents, REST(nodes=10_000)), context, VCT(width, 4)).keys()
        <= want.keys()
    )


def test_nothing_found_is_nothing_drafted() -> None:
    for text in ([0], [3, 3], [0, 1, 2, 2]):
        assert drafted(drafter([[0, 1, 2, 3, 0]]), text, TriePolicy()) == {}


def test_a_node_that_is_not_in_the_trie_is_searched_for_with_its_own_path() -> None:
    model = drafter([[0, 1, 2, 3, 3], [1, 3, 0, 2, 2]])
    state = model.start([np.array([0])], np.array([1]), TAPS)
    tree = Tree.from_roots(np.array([0]), np.array([1]))
    first, after = model.expand(state, tree, np.array([0]), 4, Drawing())
    assert first.tokens.tolist() == [[2]]
    given_ = Candidates(np.array([[2, 3]]), np.zeros((1, 2)))  # the second comes from elsewhere
    tree = tree.append(np.array([0, 0]), np.array([2, 3]), np.zeros(2), np.zeros(2), given_)
    second, last = model.expand(after, tree, np.array([1, 2]), 4, Drawing())
    assert second.tokens.tolist() == [[3], [0]], (
        "0 1 2 goes on with 3; 1 3, of another document, with 0"
    )
    assert len(after.trie.tokens) < len(last.trie.tokens)
    assert len(state.trie.tokens) == 0, "an older state is as it was"
    again, _ = model.expand(after, tree, np.array([1, 2]), 4, Drawing())
    assert again.tokens.tolist() == second.tokens.tolist()
    tree = tree.append(np.array([2]), np.array([0]), np.zeros(1), np.zeros(1), given_)
    third, _ = model.expand(last, tree, np.array([3]), 4, Drawing())
    assert third.tokens.tolist() == [[2]], "the second trie is followed too"


def test_commit_and_truncate_follow_the_text_and_forget_what_was_found() -> None:
    model = drafter([[0, 1, 2, 3]])
    state = model.start([np.array([0]), np.array([3])], np.array([1, 0]), TAPS)
    tree = Tree.from_roots(np.array([0, 1]), np.array([1, 0]))
    candidates, state = model.expand(state, tree, np.arange(2), 1, Drawing())
    tree = tree.append(np.array([0]), candidates.tokens[0], np.zeros(1), np.zeros(1), candidates)
    after = model.commit(
        state, tree, AcceptResult((np.array([2]), np.zeros(0, np.int64)), np.array([3, 1])), TAPS
    )
    assert [t.tolist() for t in after.texts] == [[0, 1, 2], [3, 0]]
    assert (len(after.trie.tokens), len(after.at)) == (0, 0)
    assert [t.tolist() for t in model.truncate(after, np.array([1, 2])).texts] == [[0], [3, 0]]


def test_a_text_that_stands_in_the_corpus_is_written_in_fewer_passes() -> None:
    plain = Engine(TARGET, drafter([[0]]), TriePolicy(), costs=COSTS).plain([Request([0], 40)])
    engine = Engine(TARGET, drafter([plain.tokens[0]]), TriePolicy(), costs=COSTS)
    written = engine.write([Request([0], 40)])
    assert written.tokens == plain.tokens
    assert written.stats.acceptance_length > 4


def test_description_has_the_size_and_not_the_folder() -> None:
    model = drafter([[0, 1, 2]], REST(datastore="somewhere"))
    assert "somewhere" not in model.description
    assert "4 tokens" in model.description


# Datastores.


def test_without_a_datastore_it_says_how_to_build_one() -> None:
    with pytest.raises(UserError, match="draftree datastore build --kind rest"):
        REST().open(TARGET)


def test_datastore_has_no_settings_and_needs_tokens(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown setting of a datastore for 'rest' 'order'"):
        REST.build([np.array([1])], 4, tmp_path, {"order": "3"}, print)
    with pytest.raises(UserError, match="the corpus is empty"):
        REST.build([np.zeros(0, np.int64)], 4, tmp_path, {}, print)


# The official file.


def official(path: Path, chunks: list[Document], token: str) -> Path:
    """A file as REST's code writes it: for each chunk its bytes and tokens, then the bytes and numbers of its suffix array."""
    parts = b""
    for chunk in chunks:
        suffixes = sorted(range(len(chunk)), key=lambda i: chunk[i:])
        for code, numbers in ((token, chunk), ("i", suffixes)):
            packed = struct.pack(f"<{len(numbers)}{code}", *numbers)
            parts += struct.pack("<I", len(packed)) + packed
    path.write_bytes(parts)
    return path


@given(
    st.lists(st.lists(tokens, min_size=1, max_size=25), min_size=1, max_size=3),
    contexts,
    st.sampled_from("Hi"),
)
@settings(max_examples=50)
def test_an_official_file_is_searched_as_one_corpus(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[Document], context: Document, token: str
) -> None:
    path = official(tmp_path_factory.mktemp("rest") / "datastore.idx", chunks, token)
    model = REST(datastore=str(path), nodes=10_000).open(TARGET)
    assert paths(model.retrieve(np.array(context))) == pytest.approx(
        {
            p: n / len(f)
            for f in [brute_force(chunks, context, REST())]
            for p, n in counted(f).items()
        }
    )


def test_tokens_of_more_than_two_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalLM, "vocab", 200_000)
    path = official(tmp_path / "d.idx", [[70_000, 3, 131_072, 3]], "i")
    (corpus,) = read_official(path, TARGET)
    assert corpus.tokens.tolist() == [70_000, 3, 131_072, 3]
    assert not corpus.tokens.flags.writeable


@pytest.mark.parametrize("case", ["empty", "cut", "text", "tokens", "large"])
def test_another_file_is_refused(tmp_path: Path, case: str) -> None:
    path = official(tmp_path / "d.idx", [[0, 1, 2, 9 if case == "large" else 3]], "H")
    whole = path.read_bytes()
    changed = {
        "empty": b"",
        "cut": whole[:-3],
        "text": b"some text, and no datastore",
        "tokens": whole[:4] * 2,
        "large": whole,
    }
    path.write_bytes(changed[case])
    told = (
        "token ids up to 9, allowed are those below"
        if case == "large"
        else "not a datastore of REST's code"
    )
    with pytest.raises(UserError, match=told) as refused:
        REST(datastore=str(path)).open(TARGET)
    assert "\n" not in str(refused.value)


def test_the_example_finds_something() -> None:
    model = REST().example(TARGET)
    candidates, _ = model.expand(
        RESTState((np.array([1]),)),
        Tree.from_roots(np.array([0]), np.array([2])),
        np.arange(1),
        9,
        Drawing(),
    )
    assert (candidates.log_q > -np.inf).all()
    assert (candidates.tokens < 4).all()
