"""Expand tree nodes from suffix matches of the text and of other drafters' tokens.

Shapes: T texts, F frontier nodes, K candidates, M nodes that something is found after.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafters.retrieval.suffix_match_drafts import Draft, Int32s, Limits, Outputs, draft
from draftree.kernels.node_table import NodeTable
from draftree.native import native_as
from draftree.tree import MAX_NODES, Floats, Ints

PATH_TOKENS = 64
"""Number of tokens of a path for which memory is allocated after a text."""


class RootText(NamedTuple):
    """The text up to a root, and what continues it.

    Attributes:
        tokens: the tokens up to the root, which is token `end` − 1, followed by space for the
            longest path.
        end: the number of tokens up to the root.
        draft: the draft after the root.
    """

    tokens: Int32s
    end: int
    draft: Draft


@native_as("suffix_root_texts")
def root_texts(
    texts: Sequence[Ints], roots: Sequence[int], memory: Outputs, limits: Limits
) -> list[tuple[Int32s, int, Draft]]:
    """Return the fields of the `RootText` of each text [T].

    Args:
        texts: [T] the committed tokens of each sequence.
        roots: [T] the token that follows each text.
        memory: the outputs of earlier texts.
        limits: bounds of patterns and drafts.
    """
    found = []
    for text, root in zip(texts, roots, strict=True):
        end = len(text) + 1
        tokens = np.zeros(end + PATH_TOKENS, np.int32)
        tokens[: end - 1], tokens[end - 1] = text, root
        found.append((tokens, end, draft(tokens, end, memory, limits)))
    return found


def child(nodes: Int32s, node: int, token: int) -> int:
    """Return the index of a node's child with the given token; −2 if there is none."""
    for i in range(node + 1, len(nodes)):
        if nodes[i, 1] == node and nodes[i, 0] == token:
            return i
    return -2


def locate_draft(
    text: RootText, nodes: NodeTable, below: int, memory: Outputs, limits: Limits
) -> tuple[Draft, int, int]:
    """Return the draft that continues a node of the tree, the node in that draft, and the depth.

    The node in the draft is −1 if the draft begins after the given node.

    Args:
        text: the text up to the root; the node's path is written after it.
        nodes: the tree.
        below: the node of the tree.
        memory: the outputs of earlier texts.
        limits: bounds of patterns and drafts.
    """
    tokens, end, drafted = text
    parents = nodes.parents
    depth, node = 0, below
    while parents[node] >= 0:
        depth, node = depth + 1, parents[node]
    node = below
    for i in range(depth - 1, -1, -1):
        tokens[end + i], node = nodes.tokens[node], parents[node]
    at = -1
    for i in range(end, end + depth):
        at = child(drafted[0], at, tokens[i])
        if at < -1:
            drafted = draft(tokens, i + 1, memory, limits)
            at = -1
    return drafted, at, depth


@native_as("suffix_children")
def children(
    texts: Sequence[RootText],
    owners: Ints,
    nodes: NodeTable,
    frontier: Ints,
    k: int,
    memory: Outputs,
    limits: Limits,
) -> tuple[Ints, Floats, int]:
    """Return up to K candidates after frontier nodes.

    A node that is not in its root's draft was proposed by another drafter; a separate draft is
    computed for it.

    Args:
        texts: [T] the texts up to the roots; paths are written after them.
        owners: [F] the index of the text of each node.
        nodes: the tree.
        frontier: [F] the nodes.
        k: K, the number of candidates of a node.
        memory: the outputs of earlier texts.
        limits: bounds of patterns and drafts.

    Returns:
        Tokens [F, K], log q [F, K], and the largest number of candidates of a node, at least 1.
    """
    found = np.zeros((len(frontier), k), np.int64)
    log_q = np.full((len(frontier), k), -np.inf)
    most = 1
    for f, below in enumerate(frontier):
        (drafted, shares), at, _ = locate_draft(texts[owners[f]], nodes, below, memory, limits)
        rank = 0
        for i in range(at + 1, len(drafted)):
            if drafted[i, 1] == at and rank < k:
                found[f, rank], log_q[f, rank] = drafted[i, 0], math.log(shares[i])
                rank += 1
        most = max(most, rank)
    return found, log_q, most


@native_as("suffix_descendants")
def descendants(
    texts: Sequence[RootText],
    owners: Ints,
    nodes: NodeTable,
    frontier: Ints,
    k: int,
    deepest: Ints,
    memory: Outputs,
    limits: Limits,
) -> tuple[Ints, Ints, Ints, Floats]:
    """Return the candidates after frontier nodes, and after all descendants of these nodes.

    Args:
        texts: see `children`.
        owners: see `children`.
        nodes: see `children`.
        frontier: [F] see `children`.
        k: see `children`.
        deepest: [T] the largest depth of a node below each root.
        memory: see `children`.
        limits: see `children`.

    Returns:
        [M] the nodes that have candidates, text by text; they are numbered as if all candidates
            were appended to the tree in the order of the result. [M] the index of the text of each.
            [M, K] tokens, and [M, K] log q.
    """
    most = len(frontier) + MAX_NODES * len(texts)
    after, whose = np.empty(most, np.int64), np.empty(most, np.int64)
    found = np.zeros((most, k), np.int64)
    log_q = np.full((most, k), -np.inf)
    number = len(nodes.tokens)
    count = 0
    widest = 1
    waiting = np.empty((MAX_NODES + 1, 3), np.int64)  # node in the draft, number in the tree, depth
    for text in range(len(texts)):
        total = 0
        for below in frontier[owners == text]:
            (drafted, shares), at, depth = locate_draft(texts[text], nodes, below, memory, limits)
            waiting[0, 0], waiting[0, 1], waiting[0, 2] = at, below, depth
            here, last = 0, 1
            while here < last:
                at = waiting[here, 0]
                parent = waiting[here, 1]
                depth = waiting[here, 2]
                here, rank = here + 1, 0
                for i in range(at + 1, len(drafted)):
                    drafts = drafted[i, 1] == at and rank < k and depth < deepest[text]
                    if drafts and total < MAX_NODES:
                        found[count, rank], log_q[count, rank] = drafted[i, 0], math.log(shares[i])
                        waiting[last, 0], waiting[last, 1], waiting[last, 2] = i, number, depth + 1
                        rank = rank + 1
                        last = last + 1
                        total = total + 1
                        number = number + 1
                after[count], whose[count] = parent, text
                count, widest = count + (rank > 0), max(widest, rank)
    return after[:count], whose[:count], found[:count, :widest], log_q[:count, :widest]
