"""Estimate the acceptance of candidates, and collect examples of acceptance and draft steps.

The functions run in C++ or NumPy.

Shapes: N nodes, F frontier nodes, K candidates, R sequences, S sources, X features, E and M
examples, A nodes after which retrieval searched.
"""

import math
from typing import NamedTuple

import numpy as np

from draftree.kernels.node_table import NodeTable
from draftree.kernels.scalar_log_exp import exp, log
from draftree.native import Array, native


class RetrievalNote(NamedTuple):
    """What retrieval found after nodes that a draft model expanded afterwards.

    Attributes:
        asked: [A] the numbers of these nodes.
        share: [A] the summed values of the tokens found after each node, divided by the value of
            the node.
        found: [A, K] the ids of the tokens found after each node; −1 in unused places.
    """

    asked: Array
    share: Array
    found: Array


@native
def values(
    log_q: Array,
    sources: Array,
    weights: Array,
    entropy: Array,
    frontier: Array,
    depth: Array,
    score: Array,
    certain: float,
) -> tuple[Array, Array]:
    """Return the log values [F, K] of candidates, and the entropies [F] of their parents' q.

    A node's value is its probability of acceptance: the parent's value times σ(w · x). The features
    x are 1, log q, −log(1 − q), entropy and depth. Siblings' σ(w · x) are scaled to add up to at
    most 1, because at most one of them is accepted.

    Args:
        log_q: [F, K] log q of the candidates, −∞ where there is none.
        sources: [F, K] the index of the calibration of each candidate. An empty array of shape
            [0, 0] means that all use the first one.
        weights: [S, X] the weights w of the calibrations.
        entropy: [F] of q; NaN to compute it from the candidates, with all other tokens counted as
            one.
        frontier: [F] the parents. N + i is candidate i of this call, counted row by row without
            those that have log q = −∞.
        depth: [N] depth of the tree's nodes.
        score: [N] log values of the tree's nodes.
        certain: the least distance of q from 0 and 1.
    """
    (nodes, width), before, count = log_q.shape, len(score), 0
    found, entropies = np.empty((nodes, width)), entropy.copy()
    depths, scores = np.empty(nodes * width, np.int64), np.empty(nodes * width)
    for f in range(nodes):
        at = frontier[f] - before
        above, deep = (
            (score[frontier[f]], depth[frontier[f]]) if at < 0 else (scores[at], depths[at])
        )
        if math.isnan(entropies[f]):
            rest, total = 1.0, 0.0
            for k in range(width):
                q = exp(log_q[f, k])
                rest -= q
                total -= q * max(log_q[f, k], log(certain))
            rest = max(rest, certain)
            entropies[f] = total - rest * log(rest)
        together = 0.0
        for k in range(width):
            found[f, k] = 0.0
            if log_q[f, k] > -np.inf:
                w = weights[sources[f, k] if sources.size else 0]
                q = min(exp(log_q[f, k]), 1 - certain)
                x = w[0] + w[1] * max(log_q[f, k], log(certain)) - w[2] * log(1 - q)
                x += w[3] * entropies[f] + w[4] * (deep + 1)
                found[f, k] = 1 / (1 + exp(-x))
                together += found[f, k]
        for k in range(width):
            value = found[f, k] / max(together, 1.0)
            found[f, k] = above + log(value) if value > 0 else -np.inf
            if log_q[f, k] > -np.inf:
                depths[count], scores[count], count = deep + 1, found[f, k], count + 1
    return found, entropies


@native
def calibration_examples(
    verified: NodeTable, accepted: Array, bonus: Array, drafted: NodeTable, certain: float
) -> tuple[Array, Array, Array]:
    """Return training examples for the calibration of drafts, from an accept result.

    The examples are the verified children of accepted nodes; for a node without verified children,
    all its drafted children. Features are 1, log q, −log(1 − q), entropy and depth.

    Args:
        verified: the verified tree of N nodes; `number` is their place in `drafted`.
        accepted: [N] whether each node is accepted; roots are.
        bonus: [R] the token after the last accepted node of each sequence.
        drafted: all drafted nodes.
        certain: the least distance of q from 0 and 1.

    Returns:
        The nodes [M], their features [M, 5], and whether their tokens were right [M].
    """
    parents, number, drafted_count = verified.parents, verified.number, len(drafted.parents)
    root, nexts = np.empty(len(parents), np.int64), np.full(drafted_count, -1)
    seen, some = np.zeros(drafted_count, np.bool_), np.zeros(drafted_count, np.bool_)
    for i, parent in enumerate(parents):
        root[i] = i if parent < 0 else root[parent]
        seen[number[i]] = True
        if parent >= 0:
            some[number[parent]] = True
        if accepted[i]:
            nexts[number[i]] = bonus[root[i]]
            if parent >= 0:
                nexts[number[parent]] = verified.tokens[i]
    nodes = np.empty(drafted_count, np.int64)
    count = 0
    for i, parent in enumerate(drafted.parents):
        if parent >= 0 and nexts[parent] >= 0 and (seen[i] or not some[parent]):
            nodes[count], count = i, count + 1
    nodes = nodes[:count]
    x = np.empty((count, 5))
    right = np.empty(count, np.bool_)
    for m, node in enumerate(nodes):
        log_q = drafted.log_q[node]
        q = min(exp(log_q), 1 - certain)
        x[m, 0], x[m, 1], x[m, 2] = 1.0, max(log_q, log(certain)), -log(1 - q)
        x[m, 3], x[m, 4] = drafted.entropy[node], drafted.depth[node]
        right[m] = drafted.tokens[node] == nexts[drafted.parents[node]]
    return nodes, x, right


@native
def outcomes(
    nodes: NodeTable, accepted: Array, note: RetrievalNote, unread: float, recent: float
) -> tuple[Array, Array, Array]:
    """Return examples for predicting whether it pays to expand a node by a pass of the draft model.

    There is an example for each accepted node that the model expanded. Features are 1, whether the
    node is a root, its log value, recent success, and the share of its value that retrieval had
    found after it.

    Args:
        nodes: the verified tree of N nodes.
        accepted: [N] whether each node is accepted; roots are.
        note: what retrieval found first; its tokens do not count as proposals of the model.
        unread: the entropy that marks nodes whose parent no model expanded.
        recent: recent success of the model.

    Returns:
        The features [E, 5]; whether a child that the model proposed was accepted [E]; and the
            number of accepted nodes [E] that directly follow such a child without another
            expansion.
    """
    parents, entropy = nodes.parents, nodes.entropy
    expanded, reached = np.zeros(len(parents), np.bool_), np.zeros(len(parents), np.bool_)
    below = np.full(len(parents), -1)
    for i, parent in enumerate(parents):
        if parent >= 0 and accepted[parent]:
            expanded[parent] |= entropy[i] != unread
            if accepted[i]:
                below[parent] = i
    examples = np.flatnonzero(expanded)
    x, behind = np.zeros((len(examples), 5)), np.zeros(len(examples), np.int64)
    for m, node in enumerate(examples):
        x[m, 0], x[m, 1] = 1.0, nodes.depth[node] == 0
        x[m, 2], x[m, 3] = nodes.score[node], recent
        reached[node] = below[node] >= 0
        for a in range(len(note.asked)):
            if note.asked[a] == nodes.number[node]:
                x[m, 4] = note.share[a]
                for token in note.found[a]:
                    reached[node] &= token != nodes.tokens[below[node]]
        after = below[below[node]] if reached[node] else -1
        while after >= 0 and entropy[after] == unread:
            behind[m], after = behind[m] + 1, below[after]
    return x, reached[examples], behind
