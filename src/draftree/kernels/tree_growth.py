"""Grow a draft tree layer by layer, in C++ or NumPy.

Shapes: N drafted nodes, F frontier nodes, K candidates, M nodes added, X features, S sources.
"""

import math
from typing import Any

import numpy as np

from draftree.kernels.ieee import exp, log, log1p
from draftree.native import Array, native

Curve = tuple[Array, Array]
Scan = tuple[Array, int, float, float]
Promise = tuple[Array, Array, float, float]
MANY = 4
"""If there are more than this many times the requested scores, the others are not sorted."""


@native
def height(at: Array, seconds: Array, t: float) -> Any:
    """Return the value of a curve at `t`: linear between its points [W], constant before them.

    After the last point it continues linearly, but does not fall.
    """
    last = len(at) - 1
    if last == 0 or t <= at[0]:
        return seconds[0]
    i = last
    while at[i - 1] > t:
        i -= 1
    slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1])
    if t >= at[last]:
        return seconds[last] + max(slope, 0.0) * (t - at[last])
    return seconds[i - 1] + slope * (t - at[i - 1])


@native
def between(at: Array, seconds: Array, tokens: Array) -> Array:
    """Return the `height` of a curve at some places [N]."""
    found = np.empty(len(tokens))
    for n, t in enumerate(tokens):
        found[n] = height(at, seconds, t)
    return found


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
    """Return the log value [F, K] of candidates, and the entropy [F] of the q that they come from.

    A node's conditional acceptance is σ(w · x). The features x are 1, log q, −log(1 − q), entropy
    and depth. The values of siblings add up to 1 at most, as at most one of them is accepted.

    Args:
        log_q: [F, K] −∞ where there is no candidate.
        sources: [F, K] whose calibration each one has; [0, 0] where all have the first.
        weights: [S, X] of the calibrations.
        entropy: [F] of q; NaN where it is to be computed, with all other tokens taken for one.
        frontier: [F] the parents; from N on they are candidates, in the order in which they stand
            here.
        depth: [N] of the tree's nodes.
        score: [N] theirs.
        certain: no draft probability is taken to be closer to 1, or to 0.
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
                x = w[0] + w[1] * max(log_q[f, k], log(certain)) - w[2] * log1p(-q)
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
def falling(score: Array) -> Array:
    """Return the order of falling scores, with the first of equals first.

    It is a merge sort, whose result is defined for NaN too.
    """
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


@native
def ranked(rows: Array, score: Array) -> tuple[Array, Array]:
    """Return the order by row and falling score, and the place of each entry in its row.

    Places are in that order too. Of equal scores the first comes first.

    Args:
        rows: [N] whole numbers, close to each other.
        score: [N].
    """
    count = len(rows)
    low, high = (rows.min(), rows.max()) if count else (0, 0)
    begin = np.zeros(high - low + 2, np.int64)
    order = np.empty(count, np.int64)
    place = np.empty(count, np.int64)
    for row in rows:
        begin[row - low + 1] += 1
    begin = np.cumsum(begin)
    at = begin.copy()
    for node in falling(score):
        row = rows[node] - low
        order[at[row]], place[at[row]] = node, at[row] - begin[row]
        at[row] += 1
    return order, place


@native
def leading(rows: Array, score: Array, k: int) -> Array:
    """Return the places of the k largest scores of each row, by row and falling score.

    Of equal scores the first comes first.

    Args:
        rows: [N] whole numbers, close to each other.
        score: [N].
        k: the number of scores of each row.
    """
    if len(score) <= MANY * k:
        order, place = ranked(rows, score)
        return order[place < k]
    low, high = rows.min(), rows.max()
    best, count = np.empty((high - low + 1, k), np.int64), np.zeros(high - low + 1, np.int64)
    for i in range(len(score)):
        row = rows[i] - low
        at = count[row]
        if at < k:
            count[row] += 1
        elif k and score[best[row, k - 1]] < score[i]:
            at = k - 1
        else:
            continue
        while at and score[best[row, at - 1]] < score[i]:
            best[row, at], at = best[row, at - 1], at - 1
        best[row, at] = i
    found = np.empty(count.sum(), np.int64)
    end = 0
    for row in range(len(best)):
        found[end : end + count[row]], end = best[row, : count[row]], end + count[row]
    return found


@native
def leading_of_layer(row: Array, frontier: Array, score: Array, k: int) -> Array:
    """Return [F, K] True at the k largest scores [F, K] of each row, the first of equals.

    Args:
        row: [N] of the tree's nodes.
        frontier: [F] those that the scores come after.
        score: [F, K].
        k: the number of scores of each row.
    """
    keep = np.zeros(score.size, np.bool_)
    keep[leading(np.repeat(row[frontier], score.shape[1]), score.ravel(), k)] = True
    return keep.reshape(score.shape)


@native
def appended(
    tokens: Array,
    parents: Array,
    depth: Array,
    row: Array,
    source: Array,
    number: Array,
    q_row: Array,
    log_q: Array,
    score: Array,
    entropy: Array,
    frontier: Array,
    new_tokens: Array,
    new_log_q: Array,
    keep: Array,
    new_score: Array,
    new_entropy: Array,
    sources: Array,
    same_source: int,
    first_q: int,
) -> tuple[Array, Array]:
    """Return a tree's columns with the candidates after a frontier, or some of them, added.

    Args:
        tokens: [N] ids, the first column of the tree.
        parents: [N] as in `forest.kept`.
        depth: [N] as in `forest.kept`.
        row: [N] as in `forest.kept`.
        source: [N] as in `forest.kept`.
        number: [N] as in `forest.kept`.
        q_row: [N] as in `forest.kept`.
        log_q: [N] as in `forest.kept`.
        score: [N] as in `forest.kept`.
        entropy: [N] as in `forest.kept`.
        frontier: [F] the candidates' parents; numbers from N on are candidates that come earlier.
        new_tokens: [F, K] the candidates' ids.
        new_log_q: [F, K] −∞ where there is no candidate.
        keep: [F, K] which become nodes; [0, 0] for all.
        new_score: [F, K] of the candidates; [0, 0] for the parent's score plus log q.
        new_entropy: [F] of the q that they come from; [0] for zeros.
        sources: [F, K] of the candidates; [0, 0] where all have the same.
        same_source: the source that all have.
        first_q: the row among all q at which the first parent's is stored; −1 where q is not kept.

    Returns:
        [7, N + M] the integer columns and [3, N + M] the others, in the order of the arguments.
    """
    before, added, (nodes, width) = len(tokens), 0, new_log_q.shape
    for f in range(nodes):
        for k in range(width):
            added += new_log_q[f, k] > -np.inf and (keep.size == 0 or keep[f, k])
    whole, real = np.empty((7, before + added), np.int64), np.empty((3, before + added))
    for i in range(before):
        whole[0, i], whole[1, i], whole[2, i], whole[3, i] = tokens[i], parents[i], depth[i], row[i]
        whole[4, i], whole[5, i], whole[6, i] = source[i], number[i], q_row[i]
        real[0, i], real[1, i], real[2, i] = log_q[i], score[i], entropy[i]
    at = before
    for f, parent in enumerate(frontier):
        for k in range(width):
            if new_log_q[f, k] > -np.inf and (keep.size == 0 or keep[f, k]):
                whole[0, at], whole[1, at], whole[2, at] = (
                    new_tokens[f, k],
                    parent,
                    whole[2, parent] + 1,
                )
                whole[3, at], whole[4, at] = (
                    whole[3, parent],
                    sources[f, k] if sources.size else same_source,
                )
                whole[5, at], whole[6, at] = at, first_q + f if first_q >= 0 else -1
                real[0, at] = new_log_q[f, k]
                real[1, at] = (
                    new_score[f, k] if new_score.size else real[1, parent] + new_log_q[f, k]
                )
                real[2, at] = new_entropy[f] if new_entropy.size else 0.0
                at += 1
    return whole, real


@native
def gainful(
    score: Array, row: Array, roots: int, before: int, k: int, worth: Array, least: float
) -> tuple[Array, Array]:
    """Return the nodes of the last layer among the k best of each row, best first.

    They are returned for the rows in which the layer added enough to Σ value of these k nodes.

    Args:
        score: [N] log values of the tree's nodes.
        row: [N].
        roots: the number of roots.
        before: the first node of the layer.
        k: the number of nodes.
        worth: [R] Σ value without the layer.
        least: the gain of Σ value that the layer has to exceed.

    Returns:
        The nodes, and [R] Σ value with the layer.
    """
    kept, total = leading(row[roots:], score[roots:], k) + roots, np.zeros(len(worth))
    for node in kept:
        total[row[node]] += exp(score[node])
    good = np.empty(len(kept), np.bool_)
    for i, node in enumerate(kept):
        good[i] = node >= before and total[row[node]] - worth[row[node]] > least
    return kept[good], total


@native
def lessons(
    parents: Array,
    tokens: Array,
    number: Array,
    accepted: Array,
    bonus: Array,
    all_parents: Array,
    all_tokens: Array,
    log_q: Array,
    entropy: Array,
    depth: Array,
    certain: float,
) -> tuple[Array, Array, Array]:
    """Return what an accept result shows about drafts after accepted nodes.

    The results are nodes [M], their features [M, 5], and whether they were right [M]. The children
    of an accepted node that were verified are examples; if none was verified, all that were drafted
    are. Features are 1, log q, −log(1 − q), entropy and depth.

    Args:
        parents: [N] of the verified tree, −1 for its roots, which are its first nodes.
        tokens: [N].
        number: [N] what its nodes are in the tree of all that was drafted.
        accepted: [N] the roots among them.
        bonus: [R] the token after the last accepted node of each row.
        all_parents: [A] of all that was drafted.
        all_tokens: [A].
        log_q: [A].
        entropy: [A].
        depth: [A].
        certain: no draft probability is taken to be closer to 1, or to 0.
    """
    root, nexts = np.empty(len(parents), np.int64), np.full(len(all_parents), -1)
    verified, some = np.zeros(len(all_parents), np.bool_), np.zeros(len(all_parents), np.bool_)
    for i, parent in enumerate(parents):
        root[i] = i if parent < 0 else root[parent]
        verified[number[i]] = True
        if parent >= 0:
            some[number[parent]] = True
        if accepted[i]:
            nexts[number[i]] = bonus[root[i]]
            if parent >= 0:
                nexts[number[parent]] = tokens[i]
    nodes = np.empty(len(all_parents), np.int64)
    count = 0
    for i, parent in enumerate(all_parents):
        if parent >= 0 and nexts[parent] >= 0 and (verified[i] or not some[parent]):
            nodes[count], count = i, count + 1
    nodes = nodes[:count]
    x = np.empty((count, 5))
    right = np.empty(count, np.bool_)
    for m, node in enumerate(nodes):
        q = min(exp(log_q[node]), 1 - certain)
        x[m, 0], x[m, 1], x[m, 2] = 1.0, max(log_q[node], log(certain)), -log1p(-q)
        x[m, 3], x[m, 4] = entropy[node], depth[node]
        right[m] = all_tokens[node] == nexts[all_parents[node]]
    return nodes, x, right


@native
def outcomes(
    parents: Array,
    tokens: Array,
    number: Array,
    depth: Array,
    score: Array,
    entropy: Array,
    accepted: Array,
    asked: Array,
    share: Array,
    found: Array,
    unread: float,
    recent: float,
) -> tuple[Array, Array, Array]:
    """Return features [E, 5] of accepted nodes that a model has expanded, and two outcomes.

    The first outcome [E] is whether a child that the model proposed was accepted. The second [E] is
    how many accepted nodes that no model expanded follow directly after such a child. Features are
    1, whether it is a root, its log value, recent success, and the share of its value that was
    found after it.

    Args:
        parents: [N] −1 for roots.
        tokens: [N].
        number: [N] the nodes' numbers during drafting.
        depth: [N].
        score: [N] log values.
        entropy: [N] of the q that a node comes from.
        accepted: [N] True at accepted nodes, roots included.
        asked: [A] numbers of nodes after which something was found before the model expanded them.
        share: [A] the share of each node's value that was found after it.
        found: [A, K] the tokens found; they are not proposals of the model.
        unread: stands for the entropy where no model expanded the parent.
        recent: recent success.
    """
    expanded, reached = np.zeros(len(parents), np.bool_), np.zeros(len(parents), np.bool_)
    below = np.full(len(parents), -1)
    for i, parent in enumerate(parents):
        if parent >= 0 and accepted[parent]:
            expanded[parent] |= entropy[i] != unread
            if accepted[i]:
                below[parent] = i
    nodes = np.flatnonzero(expanded)
    x, behind = np.zeros((len(nodes), 5)), np.zeros(len(nodes), np.int64)
    for m, node in enumerate(nodes):
        x[m, 0], x[m, 1], x[m, 2], x[m, 3] = 1.0, depth[node] == 0, score[node], recent
        reached[node] = below[node] >= 0
        for a in range(len(asked)):
            if asked[a] == number[node]:
                x[m, 4] = share[a]
                for token in found[a]:
                    reached[node] &= token != tokens[below[node]]
        after = below[below[node]] if reached[node] else -1
        while after >= 0 and entropy[after] == unread:
            behind[m], after = behind[m] + 1, below[after]
    return x, reached[nodes], behind


@native
def worth_verifying(
    score: Array, target: Curve, rows: int, rate: float, left: float, ahead: int
) -> Scan:
    """Find how many of the best nodes gain the most over the cost of their verification.

    Args:
        score: [N] log values.
        target: [W] tokens of a row, and [W] seconds of a pass over them.
        rows: R.
        rate: λ.
        left: seconds that may still be spent.
        ahead: the most nodes over which the price of a further one is averaged.

    Returns:
        The order by falling score, the number, the least cost of verifying one more, and the value
        of the worst of them.
    """
    order = falling(score)
    best = 0
    most = 0.0
    gain = 0.0
    roots = beside = height(*target, 1.0)
    for i in range(len(order)):
        gain += exp(score[order[i]])
        seconds = height(*target, 1 + (i + 1) / rows)
        net = gain - rate * (seconds - roots)
        if seconds - roots <= max(left, 0.0) and net > most:
            best = i + 1
            most = net
            beside = seconds
    further = np.inf
    for i in range(1, ahead + 1):
        further = min(further, (height(*target, 1 + (best + i) / rows) - beside) / i)
    return order, best, rate * further, exp(score[order[best - 1]]) if best else np.inf


@native
def selected(score: Array, target: Curve, rows: int, rate: float, left: float) -> Array:
    """Return [R + N] True at the roots and at the nodes worth their verification.

    No child is worth more than its parent.
    """
    order, count, _, _ = worth_verifying(score[rows:], target, rows, rate, left, 1)
    keep = np.zeros(len(score), np.bool_)
    keep[:rows] = True
    keep[rows + order[:count]] = True
    return keep


@native
def promising(
    row: Array,
    depth: Array,
    score: Array,
    entropy: Array,
    start: int,
    deepest: Array,
    limit: int,
    widest: int,
    unread: float,
    target: Curve,
    rows: int,
    rate: float,
    left: float,
    ahead: int,
) -> Promise:
    """Return the best nodes of each row that may have children, by row and falling value.

    Only the nodes from `start` on are considered.

    Args:
        row: [N] of the tree's nodes, as are the next three arguments.
        depth: [N].
        score: [N] log values.
        entropy: [N] of the q that a node comes from.
        start: the first of the nodes to choose from.
        deepest: [R] the depth limit of each row.
        limit: the depth limit of all rows.
        widest: the most nodes of a row.
        unread: stands for the entropy of those whose parent the drafter has not read.
        target: see `worth_verifying`.
        rows: see `worth_verifying`.
        rate: see `worth_verifying`.
        left: see `worth_verifying`.
        ahead: see `worth_verifying`.

    Returns:
        The nodes; those of them whose parent the drafter has read; the least cost of verifying one
        more node; and the value of the worst node that is worth its verification.
    """
    nodes, count = np.empty(len(row) - start, np.int64), 0
    for node in range(start, len(row)):
        if depth[node] < min(deepest[row[node]], limit):
            nodes[count], count = node, count + 1
    nodes = nodes[:count]
    likely = nodes[leading(row[nodes], score[nodes], widest)]
    _, _, least, worst = worth_verifying(score[rows:], target, rows, rate, left, ahead)
    return likely, likely[entropy[likely] != unread], least, worst


@native
def worth_expanding(
    nodes: Array,
    score: Array,
    depth: Array,
    below: Array,
    weights: Array,
    recent: float,
    beyond: float,
    least: float,
    fed: int,
    ahead: int,
    waiting: float,
    draft: Curve,
    target: Curve,
    rows: int,
    rate: float,
    left: float,
) -> tuple[Array, float]:
    """Return the frontier nodes that are worth a draft step together, best first, and its seconds.

    None are returned if no number of them is worth it. After a node of value v, a child that was
    not found before is accepted with probability v · σ(w · x). The features x are 1, whether it is
    a root, log v, recent success, and the share of v that was found. The child has to pay for its
    verification too.

    Args:
        nodes: [F] the frontier.
        score: [N] log values of the tree's nodes.
        depth: [N].
        below: [F] the worth of what is found after each without a draft step; [0] for none.
        weights: [5] w.
        recent: recent success.
        beyond: nodes that are accepted after such a child without cost.
        least: the cost of verifying one more node.
        fed: the most nodes that the draft step can be fed.
        ahead: layers that the step predicts: after an accepted child, another is accepted with the
            same probability.
        waiting: seconds of work that has to be done before the step.
        draft: [W] nodes of a row, and [W] seconds of a draft step over them.
        target: [W] tokens of a row, and [W] seconds of a pass over them.
        rows: R.
        rate: λ.
        left: seconds that may still be spent.
    """
    net = np.empty(len(nodes))
    for f, node in enumerate(nodes):
        x = (
            weights[0]
            + weights[1] * (depth[node] == 0)
            + weights[2] * score[node]
            + weights[3] * recent
        )
        value, net[f] = exp(score[node]), 0.0
        worth = value / (1 + exp(-x - (weights[4] * below[f] / value if below.size else 0.0)))
        for _ in range(ahead):
            net[f] += max((1 + beyond) * worth - least, 0.0)
            worth /= 1 + exp(-x)
    order = falling(net)
    best = 0
    most = 0.0
    gain = 0.0
    spent = 0.0
    left -= height(*target, 1 + 1 / rows) - height(
        *target, 1.0
    )  # one node at least has to be verified
    for i in range(len(order)):
        gain += max(net[order[i]], 0.0)
        seconds = waiting + height(*draft, min(i + 1, fed) / rows)
        if seconds <= left and gain - rate * seconds > most:
            best = i + 1
            most = gain - rate * seconds
            spent = seconds
    return nodes[order[:best]], spent
