"""Merge the candidates of several drafters into one list per node.

Shapes: F frontier nodes, M candidates of all parts side by side, K candidates of the list.
"""

import math

import numpy as np

from draftree.kernels.ieee import exp, log, log1p
from draftree.native import Array, native


@native
def odds(log_q: float, certain: float) -> float:
    """Return the log-odds of a probability; none is taken to be closer to 0 or 1 than `certain`."""
    q = min(max(exp(log_q), certain), 1 - certain)
    return log(q) - log1p(-q)


@native
def judged(
    log_q: Array, guide: Array, recent: Array, weights: Array, neutral: float, certain: float
) -> tuple[Array, Array, Array, Array]:
    """Return features of retrieval hits [F, K], and their probabilities of acceptance.

    Args:
        log_q: [F, K] the part's own, −∞ where it found nothing.
        guide: [F, K] log q of the guide for the same tokens; [0, 0] where there is no guide.
        recent: [F] how often the last hits of each node's row were right.
        weights: [F, 4] of the calibration: 1, the log-odds of the part's q and of the guide's,
            recent success.
        neutral: subtracted from `recent`.
        certain: see `odds`.

    Returns:
        [F, K, 4] features; [F, K] probabilities of acceptance, 0 where nothing was found; [F, K]
        the guide's q; and [F, K] −∞ at hits, NaN where there is none.
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
    """Return examples of retrieval hits that the target has judged, and the recent success.

    The examples are features [M, X], and whether each hit was right [M]. They are the hits after
    accepted nodes.

    Args:
        numbers: [F] the nodes after which the hits were found.
        place: [F, K] −∞ where there is a hit, else NaN.
        tokens: [F, K].
        x: [F, K, X].
        kept: [n] numbers of root and accepted nodes.
        nexts: [n] the token that the target chose after each.
        recent: how often the last hits held the right token.
        share: the weight of the newest outcome in `recent`.
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

    Equal tokens keep the order in which they are given.

    What was found has its value, the guide's others share the rest in their proportions (Jeffrey's
    rule: what was learnt of some tokens says nothing of how the others compare). So siblings add up
    to 1 at most. After a node where nothing was found, q is the guide's, bit for bit.

    Args:
        tokens: [F, M].
        log_q: [F, M] the guide's, −∞ for hits of others, NaN where there is no candidate.
        value: [F, M] of the hits, 0 for the guide's own.
        seen: [F, M] the guide's q of the hits, 0 for its own.
        bits: [M] a bit for each part that proposes the column.
        k: K.
        most: the largest total value of the hits after a node.
        certain: the least share that is left to the guide.

    Returns:
        [F, K] tokens, log q (−∞ where there are fewer), and the bits of all who propose each, minus
        1. K is the largest number of candidates of a node, so it may be smaller than `k`.
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
        shift = log1p(-total * cut) - log(max(rest, max(listed, certain))) if total > 0 else 0.0
        for i in range(n):
            guide[i] = log(worth[i] * cut) if worth[i] > 0 else guide[i] + shift
        order = np.argsort(-guide[:n], kind="mergesort")[:width]
        used = max(used, len(order))
        for place in range(len(order)):
            i = order[place]
            token[f, place], found[f, place], parts[f, place] = ids[i], guide[i], by[i] - 1
    return token[:, :used], found[:, :used], parts[:, :used]
