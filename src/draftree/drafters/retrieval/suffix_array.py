"""A suffix array over tokens, and the trie of continuations of a match.

A corpus is one array of tokens, with a separator after each document. The separator is larger than
any token. So the occurrences of a pattern at the end of a document come last, and are cut off with
one comparison.

Shapes: T tokens of the corpus, C of them in a context, M matches, L tokens of a continuation, N
nodes of a trie, E of a tree.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftree.native import Array, native, native_as
from draftree.tree import Floats, Ints

SEPARATOR = 2**32 - 1
"""The token that follows every document."""
END = -1
"""Stands for places after the end of a document, and for the token of a trie's root."""
UNKNOWN = -1
"""Stands for the trie node of a tree node that is in no trie."""


@dataclass(frozen=True)
class Corpus:
    """Tokens [T] and their suffix array.

    The suffix array contains all positions except those of separators, sorted by the text that
    begins there.
    """

    tokens: Array
    suffixes: Array


class PrefixTree(NamedTuple):
    """Continuations merged by their common prefixes.

    The children of a node are stored in sequence, the most frequent first. One object may contain
    several tries, each with its own root.

    Attributes:
        tokens: [N] token of each node; −1 for a root.
        log_q: [N] logarithm of the fraction of the parent's matches that continue with this token.
        first: [N] index of the first child.
        children: [N] number of children.
    """

    tokens: Ints
    log_q: Floats
    first: Ints
    children: Ints


def join_documents(documents: list[Ints]) -> NDArray[np.uint32]:
    """Return one array of all documents' tokens, with a separator after each document."""
    parts = (part for document in documents for part in (document, [SEPARATOR]))
    return np.concatenate(list(parts), dtype=np.uint32, casting="unsafe")


def suffix_array(tokens: NDArray[np.uint32], vocab: int) -> Array:
    """Return the positions of all tokens except separators, sorted by the text that begins there.

    libdivsufsort sorts bytes. Tokens are therefore written as big-endian numbers with as many bytes
    as the vocabulary needs, so that the order of the bytes is that of the tokens. Of the sorted
    positions, those at which a token begins are kept.

    Args:
        tokens: [T] the tokens, including separators.
        vocab: number of token ids.
    """
    from pydivsufsort import divsufsort  # needed for building only, and not for searching

    width = max(1, (int(vocab).bit_length() + 7) // 8)
    places = divsufsort(
        np.minimum(tokens, vocab)
        .astype(">u4")
        .view(np.uint8)
        .reshape(-1, 4)[:, 4 - width :]
        .ravel()
    )
    places = places[places % width == 0] // width
    documents = int((tokens == SEPARATOR).sum())
    found: Array = places[: len(places) - documents].astype(
        np.uint32 if len(tokens) < SEPARATOR else np.int64
    )
    return found


def _before(tokens: Array, place: Any, query: Ints, whole: bool) -> bool:
    """Return whether the suffix at a position sorts before a query.

    If `whole` is true, suffixes that begin with the query and continue count as before, too.
    """
    for j in range(len(query)):
        if not 0 <= place + j < len(tokens):  # after the end, or in a broken file
            return True
        token = np.int64(tokens[place + j])
        if token != query[j]:
            return bool(token < query[j])
    after = place + len(query)
    return whole and (after >= len(tokens) or tokens[after] != SEPARATOR)


def _first(tokens: Array, suffixes: Array, query: Ints, whole: bool) -> int:
    """Return the index of the first suffix that does not sort before a query.

    If `whole` is true, suffixes that begin with the query and continue are skipped, too.
    """
    low, high = 0, len(suffixes)
    while low < high:
        middle = (low + high) // 2
        if _before(tokens, np.int64(suffixes[middle]), query, whole):
            low = middle + 1
        else:
            high = middle
    return low


@native_as("search_corpus")
def search(
    tokens: Array, suffixes: Array, context: Ints, longest: int, shortest: int
) -> tuple[int, int, int]:
    """Find the longest suffix of a context that occurs in the corpus with a token after it.

    If a suffix occurs, shorter suffixes occur too. The length is therefore found by bisection.

    Args:
        tokens: [T] the tokens of the corpus.
        suffixes: the suffix array of the corpus.
        context: [C] the context.
        longest: largest length of the suffix.
        shortest: smallest length of the suffix.

    Returns:
        The length of the suffix, and the begin and end of its range in the suffix array. The length
        is 0 if not even the shortest suffix occurs.
    """
    found = 0
    low = 0
    high = 0
    fewest, most = shortest, min(longest, len(context))
    while fewest <= most:
        n = (fewest + most) // 2
        query = context[len(context) - n :]
        at = _first(tokens, suffixes, query, False)
        if at < len(suffixes) and np.int64(suffixes[at]) + n == len(
            tokens
        ):  # a corpus without separators ends here
            at += 1
        if at < len(suffixes) and _before(tokens, np.int64(suffixes[at]), query, True):
            found = n
            low = at
            fewest = n + 1
        else:
            most = n - 1
    if found:
        high = max(low + 1, _first(tokens, suffixes, context[len(context) - found :], True))
    return found, low, high


@native
def continuations(
    tokens: Array, suffixes: Array, low: int, high: int, skip: int, length: int, most: int
) -> Ints:
    """Return the continuations [M, L] after positions, in order; −1 after the end of a document.

    If there are more than `most` positions, `most` evenly spread ones are used. REST uses the first
    ones, but these would all continue with the smallest tokens.

    Args:
        tokens: [T] the tokens of the corpus.
        suffixes: the suffix array of the corpus.
        low: the begin of a range of the suffix array.
        high: the end of the range.
        skip: the number of tokens that were matched.
        length: L, the number of tokens of a continuation.
        most: the largest number of positions.
    """
    count = min(high - low, most)
    rows = np.full((count, length), END, np.int64)
    for i in range(count):
        place = np.int64(suffixes[low + i * (high - low) // count]) + skip
        for j in range(length):
            if not 0 <= place + j < len(tokens) or tokens[place + j] == SEPARATOR:
                break
            rows[i, j] = tokens[place + j]
    return rows


def _runs(rows: Ints, depth: int, begin: Ints, end: Ints, layer: int, size: int) -> Ints:
    """Return [runs, 3] the nodes below a layer: begin and end of their matches, and parent."""
    found, runs = np.empty((len(rows), 3), np.int64), 0
    for node in range(layer, size):
        at = begin[node]
        while at < end[node]:
            after = at + 1
            while after < end[node] and rows[after, depth] == rows[at, depth]:
                after += 1
            if rows[at, depth] != END:
                found[runs, 0], found[runs, 1], found[runs, 2] = at, after, node
                runs += 1
            at = after
    return found[:runs]


def _most_frequent(count: Ints, k: int) -> Ints:
    """Return the indices of the k largest counts, in ascending order; of equals the first."""
    return np.sort(np.argsort(-count, kind="mergesort")[:k])


def build_trie(rows: Ints, nodes: int) -> PrefixTree:
    """Return the trie of the most frequent prefixes of continuations, the root first.

    Source: REST, section 3.2.

    No node is more frequent than its parent. Therefore at most `nodes` nodes of a layer have to be
    followed, and the most frequent nodes of all layers are connected. Among equally frequent nodes,
    those of smaller depth are kept, then those with the lower token.

    Args:
        rows: [M, L] sorted continuations, with −1 after the end of a continuation.
        nodes: the largest number of nodes, without the root.
    """
    return PrefixTree(*_grow_trie(rows, nodes))


@native_as("grow_trie")
def _grow_trie(rows: Ints, nodes: int) -> tuple[Ints, Floats, Ints, Ints]:
    """Return the four fields of the `PrefixTree` that `build_trie` returns, in their order."""
    matches, length = rows.shape
    most = 1 + nodes * length
    begin = np.zeros(most, np.int64)
    end = np.zeros(most, np.int64)
    parent = np.zeros(most, np.int64)
    token = np.full(most, END, np.int64)
    end[0], layer, size = matches, 0, 1
    for depth in range(length):
        runs = _runs(rows, depth, begin, end, layer, size)
        runs = runs[_most_frequent(runs[:, 1] - runs[:, 0], nodes)]
        # Group the nodes by parent, the most frequent first.
        runs = runs[
            np.argsort(runs[:, 2] * (matches + 1) - (runs[:, 1] - runs[:, 0]), kind="mergesort")
        ]
        layer = size
        for i in range(len(runs)):
            begin[size], end[size], parent[size] = runs[i]
            token[size] = rows[begin[size], depth]
            size += 1
    return _prune_trie(token[:size], end[:size] - begin[:size], parent[:size], nodes)


def _prune_trie(
    token: Ints, count: Ints, parent: Ints, nodes: int
) -> tuple[Ints, Floats, Ints, Ints]:
    """Return the four fields of a `PrefixTree` with the most frequent nodes of a larger trie.

    Args:
        token: the token of each node.
        count: the number of matches of each node.
        parent: the parent of each node.
        nodes: the largest number of nodes that are kept, without the root.
    """
    kept = _most_frequent(count, nodes + 1)  # the root is the most frequent, or the first of equals
    number, log_q = np.zeros(len(token), np.int64), np.zeros(len(kept))
    first, children = np.zeros(len(kept), np.int64), np.zeros(len(kept), np.int64)
    for new in range(1, len(kept)):
        old = kept[new]
        number[old], above = new, number[parent[old]]
        log_q[new] = math.log(count[old] / count[parent[old]])
        if children[above] == 0:
            first[above] = new
        children[above] += 1
    return token[kept], log_q, first, children


@native
def context_of(text: Ints, tokens: Ints, parents: Ints, node: int, longest: int) -> Ints:
    """Return the last tokens [C] up to and including a tree's node.

    They are the tokens of the node's path, preceded by those of the text before its root.

    Args:
        text: the committed tokens of the sequence.
        tokens: [E] the tokens of the tree.
        parents: [E] the parents of the tree's nodes.
        node: the node whose token comes last.
        longest: the largest C.
    """
    found, at = np.empty(longest, np.int64), longest
    while node >= 0 and at > 0:
        at -= 1
        found[at] = tokens[node]
        node = parents[node]
    before = min(at, len(text))
    found[at - before : at] = text[len(text) - before :]
    return found[at - before :]


@native
def follow(known: Ints, tokens: Ints, parents: Ints, trie: PrefixTree) -> Ints:
    """Return [E] the trie node to which each node of a tree corresponds; −1 for none.

    It is the child with the same token below the trie node to which the parent corresponds.

    Args:
        known: the results for the first nodes of the tree.
        tokens: [E] the tokens of the tree.
        parents: [E] the parents of the tree's nodes.
        trie: the trie.
    """
    found = np.full(len(tokens), UNKNOWN, np.int64)
    found[: len(known)] = known
    for node in range(len(known), len(tokens)):
        above = found[parents[node]] if parents[node] >= 0 else UNKNOWN
        if above >= 0:
            for child in range(trie.first[above], trie.first[above] + trie.children[above]):
                if trie.tokens[child] == tokens[node]:
                    found[node] = child
    return found


@native
def best_children(trie: PrefixTree, at: Ints, k: int) -> tuple[Ints, Floats]:
    """Return tokens and log q [F, K] of the most frequent children of trie nodes [F].

    In unused places log q is −∞. K is the largest number of children, at least 1 and at most `k`.
    """
    widest = 1
    for i in range(len(at)):
        widest = max(widest, min(k, trie.children[at[i]]))
    found, value = np.zeros((len(at), widest), np.int64), np.full((len(at), widest), -np.inf)
    for i in range(len(at)):
        for j in range(min(widest, trie.children[at[i]])):
            found[i, j], value[i, j] = (
                trie.tokens[trie.first[at[i]] + j],
                trie.log_q[trie.first[at[i]] + j],
            )
    return found, value
