"""Merge the candidates of several drafters into one list per node.

Shapes: F frontier nodes, M candidates of all parts side by side, K candidates of the list.
"""

import math

import numpy as np

from draftree.kernels.scalar_log_exp import exp, log
from draftree.native import Array, native


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
