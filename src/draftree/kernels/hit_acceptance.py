"""Estimate the acceptance of retrieval hits in a fused drafter, and learn it from verified hits.

Shapes: F frontier nodes, K hits, R sequences, X features, n accepted nodes with the roots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.kernels.logistic_regression import newton
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
        prior: see `logistic_regression.newton`.
        forgetting: see `logistic_regression.newton`.
        least: see `logistic_regression.newton`.
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
