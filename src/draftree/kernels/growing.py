"""The decisions of the policy `yield` on one layer, as machine code: in numpy they take as long as a small draft pass.

Shapes: N drafted nodes, F frontier nodes, K candidates, X features, S sources.
"""

import math

import numpy as np

from draftree.kernels.compiled import Array, compiled


@compiled
def values(
    log_q: Array, sources: Array, weights: Array, entropy: Array, depth: Array, score: Array, certain: float
) -> tuple[Array, Array]:
    """The log value [F, K] of candidates, and the entropy [F] of the q that they come from.

    A node's conditional acceptance is σ(w · x), x being 1, log q, −log(1 − q), entropy and depth; those of siblings add up to 1
    at most, as at most one of them is accepted.

    Args:
        log_q: [F, K] −∞ where there is no candidate.
        sources: [F, K] whose calibration each one has; [0, 0] where all have the first.
        weights: [S, X] of the calibrations.
        entropy: [F] of q; NaN where it is to be computed, with all other tokens taken for one.
        depth: [F] of the parents.
        score: [F] theirs.
        certain: no draft probability is taken to be closer to 1, or to 0.
    """
    nodes, width = log_q.shape
    found, entropies = np.empty((nodes, width)), entropy.copy()
    for f in range(nodes):
        if math.isnan(entropies[f]):
            rest, total = 1.0, 0.0
            for k in range(width):
                q = math.exp(log_q[f, k])
                rest -= q
                total -= q * max(log_q[f, k], math.log(certain))
            rest = max(rest, certain)
            entropies[f] = total - rest * math.log(rest)
        together = 0.0
        for k in range(width):
            found[f, k] = 0.0
            if log_q[f, k] > -np.inf:
                w = weights[sources[f, k] if sources.size else 0]
                q = min(math.exp(log_q[f, k]), 1 - certain)
                x = w[0] + w[1] * max(log_q[f, k], math.log(certain)) - w[2] * math.log1p(-q)
                x += w[3] * entropies[f] + w[4] * (depth[f] + 1)
                found[f, k] = 1 / (1 + math.exp(-x))
                together += found[f, k]
        for k in range(width):
            value = found[f, k] / max(together, 1.0)
            found[f, k] = score[f] + math.log(value) if value > 0 else -np.inf
    return found, entropies


@compiled
def falling(score: Array) -> Array:
    """The order of falling scores, the first of equals first; numpy's own sorts take seconds to compile."""
    count, width = len(score), 1
    order, other = np.arange(count), np.empty(count, np.int64)
    while width < count:
        for start in range(0, count, 2 * width):
            middle, end = min(start + width, count), min(start + 2 * width, count)
            left, right = start, middle
            for at in range(start, end):
                if left < middle and (right == end or score[order[left]] >= score[order[right]]):
                    other[at], left = order[left], left + 1
                else:
                    other[at], right = order[right], right + 1
        order, other, width = other, order, 2 * width
    return order


@compiled
def worth_verifying(score: Array, adds: Array, rate: float, left: float, ahead: int) -> tuple[int, float, float]:
    """How many best nodes gain the most over their verification.

    Returns:
        The number, the least that one more can cost beside them, and what the worst of them is worth.

    Args:
        score: [N] log values.
        adds: seconds that 0, 1, … nodes add to a pass.
        rate: λ.
        left: seconds that may still be spent.
        ahead: nodes over which the price of a further one is averaged at most.
    """
    order, best, most, gain = falling(score), 0, 0.0, 0.0
    for i in range(len(order)):
        gain += math.exp(score[order[i]])
        net = gain - rate * adds[i + 1]
        if adds[i + 1] <= max(left, 0.0) and net > most:
            best, most = i + 1, net
    further = np.inf
    for i in range(1, ahead + 1):
        further = min(further, (adds[best + i] - adds[best]) / i)
    return best, rate * further, math.exp(score[order[best - 1]]) if best else np.inf


@compiled
def worth_expanding(
    score: Array,
    depth: Array,
    weights: Array,
    recent: float,
    below: Array,
    least: float,
    ahead: int,
    drafts: Array,
    first: float,
    rate: float,
    left: float,
) -> Array:
    """Those of a frontier that are worth a draft step together, best first; none if no number of them is.

    Behind a node of value v an accepted child is found with probability v · σ(w · x), x being 1, whether it is a root, log v
    and recent success; it has to pay for its verification too. What is found there without a draft step is had anyway.

    Args:
        score: [F] log values.
        depth: [F].
        weights: [4] w.
        recent: success.
        below: [F] the worth of what is found after each node without a draft step.
        least: what a further node's verification costs.
        ahead: layers that the step tells: behind an accepted child, another is found as probably again.
        drafts: [F] seconds of a draft step over 1, 2, … nodes.
        first: seconds that one node adds to a pass.
        rate: λ.
        left: seconds that may still be spent.
    """
    net = np.empty(len(score))
    for f in range(len(score)):
        x = weights[0] + weights[1] * (depth[f] == 0) + weights[2] * score[f] + weights[3] * recent
        worth, net[f] = math.exp(score[f]), -max(below[f] - least, 0.0)
        for _ in range(ahead):
            worth /= 1 + math.exp(-x)
            net[f] += max(worth - least, 0.0)
    order, best, most, gain = falling(net), 0, 0.0, 0.0
    for i in range(len(order)):
        gain += max(net[order[i]], 0.0)
        if drafts[i] + first <= left and gain - rate * drafts[i] > most:
            best, most = i + 1, gain - rate * drafts[i]
    return order[:best]
