"""Expand tree nodes from suffix matches of the text and of other drafters' tokens.

Shapes: N nodes of a tree, F frontier nodes, K candidates, M nodes that something is found after.
"""

import math
from typing import NamedTuple

import numpy as np

from draftree.drafters.retrieval.suffix_tree import Draft, Int32s, Limits, Outputs, draft
from draftree.kernels.node_table import NodeTable
from draftree.native import native_as
from draftree.tree import MAX_NODES, Floats, Ints


class RootText(NamedTuple):
    """The text up to a root, and what continues it.

    Attributes:
        tokens: the tokens up to the root, which is token `end` − 1, followed by space for the
            longest path.
        end: the number of tokens up to the root.
        draft: the draft after the root.
        memory: the outputs of earlier texts.
        limits: bounds of patterns and drafts.
    """

    tokens: Int32s
    end: int
    draft: Draft
    memory: Outputs
    limits: Limits


def child(nodes: Int32s, node: int, token: int) -> int:
    """Return the index of a node's child with the given token; −2 if there is none."""
    for i in range(node + 1, len(nodes)):
        if nodes[i, 1] == node and nodes[i, 0] == token:
            return i
    return -2


def locate_draft(text: RootText, nodes: NodeTable, below: int) -> tuple[Draft, int, int]:
    """Return the draft that continues a node of the tree, the node in that draft, and the depth.

    The node in the draft is −1 if the draft begins after the given node.

    Args:
        text: the text up to the root; the node's path is written after it.
        nodes: the tree.
        below: the node of the tree.
    """
    tokens, end, drafted, memory, limits = text
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
def children(text: RootText, nodes: NodeTable, frontier: Ints, k: int) -> tuple[Ints, Floats, int]:
    """Return up to K candidates after the frontier nodes below one root.

    A node that is not in the root's draft was proposed by another drafter; a separate draft is
    computed for it.

    Args:
        text: the text up to the root; paths are written after it.
        nodes: the tree.
        frontier: [F] the nodes.
        k: K, the number of candidates of a node.

    Returns:
        Tokens [F, K], log q [F, K], and the largest number of candidates of a node, at least 1.
    """
    found = np.zeros((len(frontier), k), np.int64)
    log_q = np.full((len(frontier), k), -np.inf)
    most = 1
    for f, below in enumerate(frontier):
        (drafted, shares), at, _ = locate_draft(text, nodes, below)
        rank = 0
        for i in range(at + 1, len(drafted)):
            if drafted[i, 1] == at and rank < k:
                found[f, rank], log_q[f, rank] = drafted[i, 0], math.log(shares[i])
                rank += 1
        most = max(most, rank)
    return found, log_q, most


@native_as("suffix_descendants")
def descendants(
    text: RootText, nodes: NodeTable, frontier: Ints, k: int, deepest: int, first: int
) -> tuple[Ints, Ints, Floats]:
    """Return the candidates after the frontier nodes, and after all descendants of these nodes.

    Args:
        text: see `children`.
        nodes: see `children`.
        frontier: [F] see `children`.
        k: see `children`.
        deepest: the largest depth of a node.
        first: the node number of the first candidate, if all candidates are appended to the tree in
            the order of the result.

    Returns:
        [M] the numbers of the nodes that have candidates; [M, K] tokens; and [M, K] log q.
    """
    most = len(frontier) + MAX_NODES
    after = np.empty(most, np.int64)
    found = np.zeros((most, k), np.int64)
    log_q = np.full((most, k), -np.inf)
    count = 0
    total = 0
    widest = 1
    waiting = np.empty((MAX_NODES + 1, 3), np.int64)  # node in the draft, number in the tree, depth
    for below in frontier:
        (drafted, shares), at, depth = locate_draft(text, nodes, below)
        waiting[0, 0], waiting[0, 1], waiting[0, 2] = at, below, depth
        here, last = 0, 1
        while here < last:
            at = waiting[here, 0]
            number = waiting[here, 1]
            depth = waiting[here, 2]
            here, rank = here + 1, 0
            for i in range(at + 1, len(drafted)):
                if drafted[i, 1] == at and rank < k and depth < deepest and total < MAX_NODES:
                    found[count, rank], log_q[count, rank] = drafted[i, 0], math.log(shares[i])
                    waiting[last, 0], waiting[last, 1], waiting[last, 2] = (
                        i,
                        first + total,
                        depth + 1,
                    )
                    rank = rank + 1
                    last = last + 1
                    total = total + 1
            after[count] = number
            count, widest = count + (rank > 0), max(widest, rank)
    return after[:count], found[:count, :widest], log_q[:count, :widest]
