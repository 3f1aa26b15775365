"""Retrieval loops: the C++ functions and their Python twins return the same bits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.drafters.retrieval.adaptive_ngrams import Adapted, Increments, Weighting
from draftree.drafters.retrieval.continuation_trie import PrefixTree
from draftree.drafters.retrieval.ngram_build import GramSettings, grams_of
from draftree.drafters.retrieval.ngram_table import Grams
from draftree.drafters.retrieval.suffix_array import join_documents, suffix_array
from draftree.drafters.retrieval.suffix_match_drafts import Limits, Outputs
from draftree.drafters.retrieval.suffix_node_expansion import PATH_TOKENS, RootText
from draftree.native import REFERENCES, core
from draftree.policies.mcts import Exploration, SentenceTree
from draftree.tree import MAX_NODES, Tree

pytestmark = pytest.mark.skipif(core is None, reason="there are no native kernels")
SEEDS = st.integers(0, 2**32 - 1)
SUFFIX_LIMITS = st.builds(
    Limits,
    st.integers(1, 6),
    st.integers(1, 8),
    st.sampled_from([1.0, 1.5, 4.0]),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.integers(1, 9),
)


def same(left: Any, right: Any) -> bool:
    """Return whether two results have the same types, shapes and bits."""
    if isinstance(left, tuple):
        return isinstance(right, tuple) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    return bool(left == right)


def copied(argument: Any) -> Any:
    """Return an argument that a function may write to without changing the original."""
    return (
        argument.copy()
        if isinstance(argument, np.ndarray) and argument.flags.writeable
        else argument
    )


def check(name: str, *arguments: Any) -> Any:
    """Call both functions with copies of the same arguments; compare what they return and what they leave in them."""
    native, python = ([copied(argument) for argument in arguments] for _ in range(2))
    found = getattr(core.loops, name)(*native)
    expected = REFERENCES[name](*python)
    assert same(found, expected), f"{name}: {found} is not {expected}"
    assert all(
        same(a, b) for a, b in zip(native, python, strict=True) if isinstance(a, np.ndarray)
    ), "arguments differ"
    return found


def numbers(draw: np.random.Generator, high: int, most: int, least: int = 0) -> Any:
    return draw.integers(0, high, draw.integers(least, most + 1))


def random_tree(draw: np.random.Generator, vocab: int, most: int) -> tuple[Any, Any]:
    """Return tokens and parents of a tree whose first node is its root."""
    tokens = numbers(draw, vocab, most, least=1)
    parents = np.array(
        [-1, *(int(draw.integers(0, node)) for node in range(1, len(tokens)))], np.int64
    )
    return tokens, parents


@given(SEEDS, SUFFIX_LIMITS, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_suffix_drafts(seed: int, limits: Limits, k: int) -> None:
    draw = np.random.default_rng(seed)
    memory = Outputs.empty().remember(
        [numbers(draw, 3, 30) for _ in range(draw.integers(0, 6))], limits.longest, 80
    )
    tokens, parents = random_tree(draw, 3, 8)
    text = numbers(draw, 3, 60)
    end = len(text) + 1
    room = np.zeros(end + 8, np.int32)
    room[:end] = np.append(text, tokens[0])
    drafted = check("suffix_draft", room, end, memory, limits)
    texts = [text, numbers(draw, 3, 60)]  # of two trees, of which the second is its root
    found = check("suffix_root_texts", texts, [int(tokens[0]), 1], memory, limits)
    assert same(found[0][2], drafted)
    frontier = np.unique(draw.integers(0, len(tokens) + 1, 4))
    owners = (frontier == len(tokens)).astype(np.int64)
    tokens, parents = np.append(tokens, 1), np.append(parents, -1)
    nodes = Tree.from_roots(tokens, tokens).nodes._replace(parents=parents)
    asked = [RootText(*fields) for fields in found], owners, nodes, frontier, k
    check("suffix_children", *asked, memory, limits)
    check("suffix_descendants", *asked, draw.integers(0, 12, 2), memory, limits)


def test_a_draft_has_no_more_nodes_than_a_tree() -> None:
    assert core.loops.MAX_NODES == MAX_NODES
    assert core.loops.PATH_TOKENS == PATH_TOKENS
    text = np.tile(np.arange(300, dtype=np.int32), 4)
    nodes, _ = check(
        "suffix_draft", text, len(text), Outputs.empty(), Limits(300, 2000, 4.0, 0.1, 256)
    )
    assert len(nodes) == MAX_NODES


TOKEN_KINDS = ["<u4", "<i4", "<u2", "<i8", "<u8"]


@given(SEEDS, st.sampled_from(TOKEN_KINDS), st.sampled_from(["<u4", "<i4", "<i8"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_suffix_arrays(seed: int, token_kind: str, suffix_kind: str, is_shifted: bool) -> None:
    draw = np.random.default_rng(seed)
    documents = [
        numbers(draw, 4, 40, least=1).astype(np.uint32) for _ in range(draw.integers(1, 5))
    ]
    corpus = (
        join_documents(documents)
        if token_kind in ("<u4", "<i8", "<u8")
        else np.concatenate(documents)
    )
    suffixes = suffix_array(corpus, 4)
    arrays = []
    for array, kind in ((corpus, token_kind), (suffixes, suffix_kind)):
        bytes_ = (
            b" " * is_shifted + array.astype(kind).tobytes()
        )  # of a file: perhaps not aligned, and read-only
        arrays.append(np.frombuffer(bytes_, np.uint8)[is_shifted:].view(kind))
    context = numbers(draw, 4, 12)
    shortest = int(draw.integers(1, 3))
    length, low, high = check(
        "search_corpus", *arrays, context, int(draw.integers(shortest, 8)), shortest
    )
    if length == 0:
        low, high = 0, len(suffixes)
    rows = check(
        "continuations",
        *arrays,
        low,
        high,
        length,
        int(draw.integers(1, 7)),
        int(draw.integers(1, 30)),
    )
    trie = PrefixTree(*check("grow_trie", rows[np.lexsort(rows.T[::-1])], int(draw.integers(1, 9))))
    tokens, parents = random_tree(draw, 4, 8)
    at = check("follow", np.zeros(draw.integers(0, 2), np.int64), tokens, parents, trie)
    check("follow", np.zeros(1, np.int64), tokens, parents, trie)
    check("best_children", trie, at[at >= 0], int(draw.integers(1, 5)))
    for node in range(len(tokens)):
        check("context_of", context, tokens, parents, node, int(draw.integers(1, 16)))


@given(
    SEEDS,
    st.integers(2, 4),
    st.sampled_from([5, 300, 70_000]),
    st.integers(1, 6),
    st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_ngrams(seed: int, n: int, vocab: int, k: int, top: int) -> None:
    draw = np.random.default_rng(seed)
    few = draw.integers(
        0, vocab, 4
    )  # tokens enough to differ, and few enough that contexts are found again
    corpus = [few[numbers(draw, 4, 200)] for _ in range(draw.integers(0, 3))]
    grams = (
        grams_of(corpus, GramSettings(n, vocab))
        if any(len(d) >= n for d in corpus)
        else Grams.none(n, vocab)
    )
    by = Weighting(n, max(1, (vocab - 1).bit_length()), top, 0.04, 0.2)
    earlier = Adapted.empty().plus(few[numbers(draw, 4, 60)], n).with_increments(0, n)
    memory = Increments.empty().plus([earlier], n, by.width, 3, 1000)
    text = few[numbers(draw, 4, 400, least=1)]
    tokens, parents = random_tree(draw, 4, 6)
    tokens = few[tokens]
    heads, before = np.full(256, -1, np.int32), np.full(len(text), -1, np.int32)
    check("index_contexts", text, heads, before, int(draw.integers(0, len(text))), n)
    adapted = Adapted.empty().plus(text, n).with_increments(int(draw.integers(-5, len(text))), n)
    check(
        "ngram_successors",
        grams.table,
        memory,
        adapted,
        np.arange(len(tokens)),
        tokens,
        parents,
        k,
        by,
    )


@given(SEEDS, st.integers(0, 40), st.booleans(), st.sampled_from([(32.0, 8.0), (2.4, 1.0)]))
@settings(max_examples=150, deadline=None)
def test_searches(
    seed: int, iterations: int, each_first: bool, constants: tuple[float, float]
) -> None:
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(0, 4))
    sizes = draw.integers(0, 4, 40) * (draw.random(40) < 0.6)
    sizes[rows:] = np.where(np.arange(rows, 40) < 12, sizes[rows:], 0)
    last = rows + np.cumsum(sizes)  # children stand in the order of their parents
    nodes = max(int(last[-1]), rows)
    first = last - sizes
    first, last = (np.append(a, np.full(nodes, last[-1]))[:nodes] for a in (first, last))
    first, last = (
        np.where(first > np.arange(nodes), a, 0) for a in (first, last)
    )  # none that are their own children
    prior, gain = draw.random((2, nodes))
    seeds = draw.integers(-(2**40), 2**40, rows)
    check(
        "search_sentences",
        seeds,
        SentenceTree(first, last, prior, gain, 1.0),
        iterations,
        Exploration(*constants, each_first),
    )
