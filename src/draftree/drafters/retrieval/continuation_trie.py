"""Tries of the continuations of a match, and the context of a tree's node.

Shapes: M matches, L tokens of a continuation, N nodes of a trie, E of a tree, C tokens of a
context, F trie nodes, K children.
"""

import math
from typing import NamedTuple

import numpy as np

from draftree.drafters.retrieval.suffix_array import END
from draftree.native import native, native_as
from draftree.tree import Floats, Ints

UNKNOWN = -1
"""Stands for the trie node of a tree node that is in no trie."""


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
