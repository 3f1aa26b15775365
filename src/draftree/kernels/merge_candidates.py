"""Merge the candidates of several drafters into one list per node.

Shapes: F frontier nodes, M candidates of all parts side by side, K candidates of the list.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.kernels.logistic import newton
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


class HitRates(NamedTuple):
    """Hold how often one part's hits are accepted in each sequence, given that the parent is.

    Attributes:
        weights: [R, 2, X] weights of the logistic regression of acceptance: at [:, 0] for hits
            without a guide, at [:, 1] for hits that were proposed together with one.
        information: [R, 2, X, X] the curvature of all examples learnt, including the prior.
        recent: [R] moving mean of how often the sequence's last hits included the right token.
    """

    weights: Array
    information: Array
    recent: Array


class JudgedNodes(NamedTuple):
    """Hold the root and the accepted nodes of all sequences.

    Attributes:
        numbers: [n] the numbers of the nodes during drafting.
        tokens: [n] the token that the target chose after each node.
        rows: [n] the slot of each node's sequence.
    """

    numbers: Array
    tokens: Array
    rows: Array


class LearningRates(NamedTuple):
    """Hold the constants by which the acceptance of hits is learnt.

    Attributes:
        recent: the weight of the newest outcome in the moving mean.
        prior: see `logistic.newton`.
        forgetting: see `logistic.newton`.
        least: see `logistic.newton`.
    """

    recent: float
    prior: float
    forgetting: float
    least: float


@native
def learn_hits(
    finds: Sequence[tuple[Array, Array, Array, Array, bool]],
    judged: JudgedNodes,
    rates: HitRates,
    learning: LearningRates,
) -> HitRates:
    """Return the acceptance of a part's hits after a step of some sequences.

    The target's token after a node decides about all hits after the node, even about those that
    were not verified. Nothing is learnt from hits after other nodes. All examples of a sequence are
    learnt in one Newton step, those with a guide separately from those without one.

    Args:
        finds: the hits of the step. Each entry has [F] the numbers of the nodes after which hits
            were found, [F, K] tokens, [F, K] −∞ at hits (NaN elsewhere), [F, K, X] features, and
            whether there was a guide.
        judged: the root and the accepted nodes.
        rates: the acceptance before the step.
        learning: constants.
    """
    weights, information, recent = (column.copy() for column in rates)
    for row in range(len(recent)):
        kept = judged.numbers[judged.rows == row]
        nexts = judged.tokens[judged.rows == row]
        examples: tuple[list[Array], list[Array]] = ([], [])
        right: tuple[list[bool], list[bool]] = ([], [])
        for numbers, tokens, place, x, guided in finds:
            kind = int(guided)
            for f in range(len(numbers)):
                for i in range(len(kept)):
                    hits = np.flatnonzero(place[f] == -np.inf)
                    if kept[i] != numbers[f] or not hits.size:
                        continue
                    found = [bool(tokens[f, k] == nexts[i]) for k in hits]
                    examples[kind].extend(x[f, hits])
                    right[kind].extend(found)
                    recent[row] += learning.recent * (any(found) - recent[row])
        for kind in range(2):
            if right[kind]:
                weights[row, kind], information[row, kind] = newton(
                    weights[row, kind],
                    information[row, kind],
                    learning.prior,
                    np.array(examples[kind]),
                    np.array(right[kind]),
                    learning.forgetting,
                    learning.least,
                )
    return HitRates(weights, information, recent)


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
