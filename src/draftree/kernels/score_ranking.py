"""Order nodes by score, and find the best of each sequence, in C++ or NumPy.

Shapes: N nodes, F frontier nodes, K candidates.
"""

import numpy as np

from draftree.native import Array, native, native_as

PARTIAL_SORT_FACTOR = 4
"""All scores are sorted only if they are at most this many times the requested number."""


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
