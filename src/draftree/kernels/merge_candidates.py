"""Merge the candidates of several drafters into one list per node.

Shapes: F frontier nodes, M candidates of all parts side by side, K candidates of the list.
"""

import math

import numpy as np

from draftree.kernels.scalar_log_exp import exp, log
from draftree.native import Array, native, native_as


@native
def odds(log_q: float, certain: float) -> float:
    """Return the log-odds of exp(log_q), which is first clamped to [certain, 1 − certain]."""
    q = min(max(exp(log_q), certain), 1 - certain)
    return log(q) - log(1 - q)


@native_as("judged")
def estimate_acceptance(
    log_q: Array, guide: Array, recent: Array, weights: Array, neutral: float, certain: float
) -> tuple[Array, Array, Array, Array]:
    """Return features of retrieval hits [F, K], and their estimated probabilities of acceptance.

    A fused drafter combines a guide (a model) with parts that retrieve continuations without a
    forward pass.

    Args:
        log_q: [F, K] log q of the retrieval part, −∞ where it has no hit.
        guide: [F, K] the guide's log q of the same tokens; [0, 0] without a guide.
        recent: [F] the recent share of right hits in each node's sequence.
        weights: [F, 4] weights of the calibration for the features 1, log-odds of the part's q,
            log-odds of the guide's q, and recent success.
        neutral: the value that is subtracted from `recent`.
        certain: the bound of probabilities; see `odds`.

    Returns:
        The features [F, K, 4]; the probabilities of acceptance [F, K], 0 without a hit; the guide's
            q [F, K]; and [F, K] −∞ at hits, NaN elsewhere.
    """
    nodes, width = log_q.shape
    x, value = np.ones((nodes, width, 4)), np.zeros((nodes, width))
    theirs, place = np.zeros((nodes, width)), np.full((nodes, width), np.nan)
    for f in range(nodes):
        for k in range(width):
            x[f, k, 1], x[f, k, 2], x[f, k, 3] = (
                odds(log_q[f, k], certain),
                0.0,
                recent[f] - neutral,
            )
            if guide.size:
                x[f, k, 2], theirs[f, k] = odds(guide[f, k], certain), exp(guide[f, k])
            if log_q[f, k] > -np.inf:
                logit = 0.0
                for i in range(4):
                    logit += x[f, k, i] * weights[f, i]
                value[f, k], place[f, k] = 1 / (1 + exp(-logit)), -np.inf
    return x, value, theirs, place


@native
def judgements(
    numbers: Array,
    place: Array,
    tokens: Array,
    x: Array,
    kept: Array,
    nexts: Array,
    recent: float,
    share: float,
) -> tuple[Array, Array, float]:
    """Return training examples from retrieval hits that the target has judged.

    The examples are the hits after accepted nodes.

    Args:
        numbers: [F] the nodes after which hits were found.
        place: [F, K] −∞ at hits, else NaN.
        tokens: [F, K] the tokens of the hits.
        x: [F, K, X] the features of the hits.
        kept: [n] numbers of root and accepted nodes.
        nexts: [n] the token that the target chose after each of these nodes.
        recent: the running share of nodes whose hits contained the right token.
        share: the weight of the newest outcome in `recent`.

    Returns:
        The features [M, X], whether each hit was right [M], and the new value of `recent`.
    """
    nodes, width, features = x.shape
    examples = np.empty((nodes * width, features))
    right = np.empty(nodes * width, np.bool_)
    count = 0
    for f in range(nodes):
        for i in range(len(kept)):
            if kept[i] == numbers[f]:
                before, success = count, False
                for k in range(width):
                    if place[f, k] == -np.inf:
                        examples[count], right[count] = x[f, k], tokens[f, k] == nexts[i]
                        success |= right[count]
                        count += 1
                if count > before:
                    recent += share * (success - recent)
    return examples[:count], right[:count], recent


@native
def merge(
    tokens: Array,
    log_q: Array,
    value: Array,
    seen: Array,
    bits: Array,
    k: int,
    most: float,
    certain: float,
) -> tuple[Array, Array, Array]:
    """Return the K best distinct tokens after each node by falling q.

    A hit's q is its value. The guide's other tokens share the rest in their original proportions
    (Jeffrey's rule: evidence about some tokens does not change the ratios of the others). So the q
    of siblings add up to at most 1. Without a hit, q is the guide's, bit for bit. Of equal q, the
    earlier candidate comes first.

    Args:
        tokens: [F, M] the candidates.
        log_q: [F, M] the guide's log q; −∞ for hits of other parts, NaN where there is no
            candidate.
        value: [F, M] the value of each hit, 0 for the guide's candidates.
        seen: [F, M] the guide's q of each hit, 0 for its own candidates.
        bits: [M] the bit of the part that proposes the column.
        k: the number of tokens.
        most: the largest total value of the hits after a node.
        certain: the least share that is left to the guide.

    Returns:
        The tokens [F, K], their log q [F, K] (−∞ for missing ones), and [F, K] the bits of all
            parts that propose each, minus 1. K is the largest number of candidates of any node, so
            it may be smaller than `k`.
    """
    nodes, columns = tokens.shape
    width = min(k, columns)
    token, found = np.zeros((nodes, width), np.int64), np.full((nodes, width), -np.inf)
    parts, used = np.full((nodes, width), -1), 0
    ids, by = np.empty(columns, np.int64), np.empty(columns, np.int64)
    guide = np.empty(columns)
    worth = np.empty(columns)
    known = np.empty(columns)
    for f in range(nodes):
        n = 0
        for m in range(columns):
            if not math.isnan(log_q[f, m]):
                i = 0
                while i < n and ids[i] != tokens[f, m]:
                    i += 1
                if i == n:
                    ids[i], by[i], guide[i], worth[i], known[i] = tokens[f, m], 0, -np.inf, 0.0, 0.0
                    n += 1
                by[i] |= bits[m]
                guide[i], worth[i], known[i] = (
                    max(guide[i], log_q[f, m]),
                    max(worth[i], value[f, m]),
                    max(known[i], seen[f, m]),
                )
        total = 0.0
        listed = 0.0
        rest = 1.0
        for i in range(n):
            total += worth[i]
            rest -= known[i]
            listed += 0.0 if worth[i] > 0 else exp(guide[i])
        cut = most / max(total, most)
        shift = log(1 - total * cut) - log(max(rest, max(listed, certain))) if total > 0 else 0.0
        for i in range(n):
            guide[i] = log(worth[i] * cut) if worth[i] > 0 else guide[i] + shift
        order = np.argsort(-guide[:n], kind="mergesort")[:width]
        used = max(used, len(order))
        for place in range(len(order)):
            i = order[place]
            token[f, place], found[f, place], parts[f, place] = ids[i], guide[i], by[i] - 1
    return token[:, :used], found[:, :used], parts[:, :used]
