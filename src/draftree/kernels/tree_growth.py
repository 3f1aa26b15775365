"""Grow a draft tree layer by layer, in C++ or NumPy.

Shapes: N drafted nodes, F frontier nodes, K candidates, M nodes added, X features, S sources.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from draftree.kernels.node_table import NodeTable
from draftree.kernels.scalar_log_exp import exp, log, round_to_unit
from draftree.native import Array, native, native_as

Curve = tuple[Array, Array]
"""A piecewise linear curve: [W] points in ascending order, and [W] the values there."""
Scan = tuple[Array, int, float, float]
Promise = tuple[Array, Array, float, float]


class CandidateTable(NamedTuple):
    """The candidates after a frontier.

    Attributes:
        tokens: [F, K] their ids.
        log_q: [F, K] their log q, −∞ where there is no candidate.
        sources: [F, K] the source of each candidate; [0, 0] if all have the same.
        source: the source that all candidates have.
    """

    tokens: Array
    log_q: Array
    sources: Array
    source: int


class PassPrice(NamedTuple):
    """The price of verification in a step.

    Attributes:
        target: [W] tokens of each sequence, and [W] seconds of a target pass over them.
        rows: R, the number of sequences.
        rate: λ, the price of a second in tokens.
        left: seconds that may still be spent.
    """

    target: Curve
    rows: int
    rate: float
    left: float


class DraftPrice(NamedTuple):
    """The price of the next draft step.

    Attributes:
        draft: the seconds of a draft step, as a curve over the nodes per sequence that it reads.
        fed: the number of nodes that the draft model must read. More nodes cost more time only
            beyond this number.
        ahead: the number of tree depths that one draft step drafts. A token at each of them is
            assumed to be accepted after the one before it with the same probability.
        waiting: seconds of postponed work that must be done before the step.
    """

    draft: Curve
    fed: int
    ahead: int
    waiting: float


class DraftSuccess(NamedTuple):
    """What is known of the success of draft steps.

    Attributes:
        weights: [5] w, the weights of the features of `worth_expanding`.
        recent: recent success.
        beyond: number of nodes that are accepted after a child at no cost.
    """

    weights: Array
    recent: float
    beyond: float


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


PARTIAL_SORT_FACTOR = 4
"""All scores are sorted only if they are at most this many times the requested number."""


@native
def height(at: Array, seconds: Array, t: float) -> Any:
    """Return the value of a piecewise linear curve at `t`.

    The curve is constant before the first point. After the last point it continues linearly, but
    does not fall.

    Args:
        at: [W] the curve's points, ascending.
        seconds: [W] the values at these points.
        t: the point of interest.
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
    """Return the values [N] of a cost curve at several numbers of tokens; see `height`.

    Args:
        at: [W] the numbers of tokens at the curve's points, ascending.
        seconds: [W] the seconds at these points.
        tokens: [N] the numbers of tokens of interest.
    """
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
def falling(score: Array) -> Array:
    """Return the indices that sort scores in falling order; of equal scores the first comes first.

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


@native_as("ranked")
def rank_scores(rows: Array, score: Array) -> tuple[Array, Array]:
    """Return the order by sequence and falling score, and each entry's rank in its sequence.

    Ranks are given in that order. Of equal scores the first comes first.

    Args:
        rows: [N] the sequence of each score. The use of memory grows with the range of these
            numbers.
        score: [N] the scores.
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
    """Return the indices of the k largest scores of each sequence.

    The indices are ordered by sequence, and within a sequence by descending score. Of equal scores
    the first comes first.

    Args:
        rows: [N] the sequence of each score. The use of memory grows with the range of these
            numbers.
        score: [N] the scores.
        k: the number of scores of each sequence.
    """
    if len(score) <= PARTIAL_SORT_FACTOR * k:
        order, place = rank_scores(rows, score)
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
    """Return [F, K] whether each score is among the k largest of its sequence.

    Of equal scores the first ones are chosen.

    Args:
        row: [N] the sequence of each of the tree's nodes.
        frontier: [F] the parents of the scored candidates.
        score: [F, K] the scores of the candidates.
        k: the number of scores of each sequence.
    """
    keep = np.zeros(score.size, np.bool_)
    keep[leading(np.repeat(row[frontier], score.shape[1]), score.ravel(), k)] = True
    return keep.reshape(score.shape)


@native_as("appended")
def append_nodes(
    nodes: NodeTable,
    frontier: Array,
    candidates: CandidateTable,
    keep: Array,
    score: Array,
    entropy: Array,
    first_q: int,
) -> NodeTable:
    """Return a tree to which candidates after a frontier were added.

    Args:
        nodes: the tree of N nodes.
        frontier: [F] the candidates' parents; numbers from N on are candidates of this call.
        candidates: [F, K] the candidates.
        keep: [F, K] whether a candidate becomes a node; [0, 0] for all.
        score: [F, K] the candidates' scores; [0, 0] for the parent's score plus log q.
        entropy: [F] the entropy of each parent's q; [0] for zeros.
        first_q: the index of the first parent's q among all stored q; −1 if q is not stored.
    """
    tokens, log_q, sources, source = candidates
    before, added, (count, width) = len(nodes.tokens), 0, log_q.shape
    for f in range(count):
        for k in range(width):
            added += log_q[f, k] > -np.inf and (keep.size == 0 or keep[f, k])
    new = NodeTable(*(np.append(column, np.empty(added, column.dtype)) for column in nodes))
    at = before
    for f, parent in enumerate(frontier):
        for k in range(width):
            if log_q[f, k] > -np.inf and (keep.size == 0 or keep[f, k]):
                new.tokens[at] = tokens[f, k]
                new.parents[at] = parent
                new.depth[at] = new.depth[parent] + 1
                new.row[at] = new.row[parent]
                new.log_q[at] = log_q[f, k]
                new.score[at] = score[f, k] if score.size else new.score[parent] + log_q[f, k]
                new.source[at] = sources[f, k] if sources.size else source
                new.entropy[at] = entropy[f] if entropy.size else 0.0
                new.number[at] = at
                new.q_row[at] = first_q + f if first_q >= 0 else -1
                at += 1
    return new


@native
def nodes_that_pay(
    score: Array, row: Array, roots: int, before: int, k: int, worth: Array, least: float
) -> tuple[Array, Array]:
    """Return the nodes of the last layer that are among the k best of their sequence, best first.

    Only sequences count in which the layer raised the summed value of the k best nodes enough.

    Args:
        score: [N] log values of the tree's nodes.
        row: [N] the sequence of each node.
        roots: the number of roots.
        before: the first node of the layer.
        k: the number of best nodes of each sequence.
        worth: [R] the summed value of the k best nodes without the layer.
        least: the gain that the layer has to exceed.

    Returns:
        The nodes, and [R] the summed value with the layer.
    """
    kept, total = leading(row[roots:], score[roots:], k) + roots, np.zeros(len(worth))
    for node in kept:
        total[row[node]] += exp(score[node])
    good = np.empty(len(kept), np.bool_)
    for i, node in enumerate(kept):
        good[i] = node >= before and total[row[node]] - worth[row[node]] > least
    return kept[good], total


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


@native
def worth_verifying(score: Array, price: PassPrice, ahead: int) -> Scan:
    """Find how many nodes to verify, so that their total value minus the cost is largest.

    The nodes with the highest scores are taken. Their verification may not add more seconds to the
    pass than `price.left`.

    Args:
        score: [N] log values of the nodes, without the roots.
        price: the price of verification.
        ahead: the largest number i of further nodes that is examined for the cost of one more node.

    Returns:
        - The indices of the nodes by falling score.
        - The number of nodes to verify, which are the first ones in this order.
        - The cost of verifying one more node, in tokens. It is the least average cost per node of i
          further nodes, for i = 1 … `ahead`.
        - The value of the worst of the nodes to verify; ∞ if there are none.
    """
    target, rows, rate, left = price
    order = falling(score)
    best = 0
    most = 0.0
    gain = 0.0
    roots = beside = height(*target, 1.0)
    for i in range(len(order)):
        gain += round_to_unit(exp(score[order[i]]))
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


@native_as("selected")
def select_nodes(score: Array, price: PassPrice) -> Array:
    """Return [R + N] True at the roots and at the nodes that are worth their verification.

    A child's value must not exceed its parent's.
    """
    order, count, _, _ = worth_verifying(score[price.rows :], price, 1)
    keep = np.zeros(len(score), np.bool_)
    keep[: price.rows] = True
    keep[price.rows + order[:count]] = True
    return keep


@native
def promising(
    nodes: NodeTable,
    start: int,
    deepest: Array,
    limit: int,
    widest: int,
    unread: float,
    price: PassPrice,
    ahead: int,
) -> Promise:
    """Return the best nodes of each sequence that may have children, by sequence and falling value.

    Args:
        nodes: the tree of N nodes.
        start: the first node that is considered.
        deepest: [R] the depth limit of each sequence.
        limit: the depth limit of all sequences.
        widest: the largest number of nodes of a sequence.
        unread: the entropy that marks nodes whose parent the drafter has not read.
        price: the price of verification.
        ahead: the most nodes over which the cost of a further node is averaged.

    Returns:
        The nodes; those among them whose parent the drafter has read; the least cost of verifying
            one more node; and the value of the worst node that is worth its verification.
    """
    row, depth, score = nodes.row, nodes.depth, nodes.score
    able, count = np.empty(len(row) - start, np.int64), 0
    for node in range(start, len(row)):
        if depth[node] < min(deepest[row[node]], limit):
            able[count], count = node, count + 1
    able = able[:count]
    likely = able[leading(row[able], score[able], widest)]
    _, _, least, worst = worth_verifying(score[price.rows :], price, ahead)
    return likely, likely[nodes.entropy[likely] != unread], least, worst


@native
def worth_expanding(
    nodes: NodeTable,
    frontier: Array,
    below: Array,
    success: DraftSuccess,
    least: float,
    step: DraftPrice,
    price: PassPrice,
) -> tuple[Array, float]:
    """Return the frontier nodes that are worth a common draft step, best first, and its seconds.

    The result is empty if no number of nodes is worth it. After a node of value v, a child that was
    not found before is accepted with probability v · σ(w · x). The features x are 1, whether the
    node is a root, log v, recent success, and the share of v that was found. The child has to pay
    for its verification too.

    Args:
        nodes: the tree.
        frontier: [F] the nodes that the step can expand.
        below: [F] the summed value of the tokens that retrieval found after each; [0] for none.
        success: what is known of the success of draft steps.
        least: the cost of verifying one more node, in tokens.
        step: the price of the draft step.
        price: the price of verification.
    """
    weights, recent, beyond = success
    draft, fed, ahead, waiting = step
    target, rows, rate, left = price
    net = np.empty(len(frontier))
    for f, node in enumerate(frontier):
        x = (
            weights[0]
            + weights[1] * (nodes.depth[node] == 0)
            + weights[2] * nodes.score[node]
            + weights[3] * recent
        )
        value, net[f] = exp(nodes.score[node]), 0.0
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
    )  # at least one node must be verified
    for i in range(len(order)):
        gain += round_to_unit(max(net[order[i]], 0.0))
        seconds = waiting + height(*draft, min(i + 1, fed) / rows)
        if seconds <= left and gain - rate * seconds > most:
            best = i + 1
            most = gain - rate * seconds
            spent = seconds
    return frontier[order[:best]], spent
