"""Monte-Carlo tree search over a local model of the drafter, compiled (ADED, Algorithm 1, eq. 16-17).

The local model is a forest: node i has the children first[i] … last[i] − 1. Compiled functions are plain functions of
arrays, because that is what numba compiles; everything is decided by the arrays, so each row is searched as if alone.

Shapes: R rows, M nodes of the local model, W nodes asked about.
"""

import math

import numpy as np

from draftree.compiled import compiled
from draftree.tree import Floats, Ints


@compiled
def uniform(seed: int, count: int) -> float:
    """Draw number `count` of a stream, in [0, 1): SplitMix64 (Steele, Lea, Flood 2014), by counter instead of by state."""
    mixed = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(count + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def puct(mean: float, prior: float, visits: int, siblings: int, c1: float, c2: float) -> float:
    """Eq. 16-17: what a child is worth looking at.

    Args:
        mean: Q(s, a), the mean reward of the sentences that went through it; 0 for none.
        prior: P(s, a).
        visits: N(s, a).
        siblings: Σ_b N(s, b), visits of all children of its parent.
        c1, c2: of eq. 16.
    """
    exploration = c1 + math.log((siblings + c2 + 1) / c2)
    return mean + exploration * prior * math.sqrt(siblings) / (1 + visits)


@compiled
def _select(start: int, end: int, prior: Floats, visits: Ints, total: Floats, c1: float, c2: float, each_first: bool) -> int:
    """The child to go down to: of equals the first."""
    siblings = 0
    for child in range(start, end):
        siblings += visits[child]
    chosen, most = start, -math.inf
    for child in range(start, end):
        if visits[child] == 0 and each_first:
            return child
        mean = total[child] / visits[child] if visits[child] else 0.0
        worth = puct(mean, prior[child], visits[child], siblings, c1, c2)
        if worth > most:
            chosen, most = child, worth
    return chosen


@compiled
def _drawn(start: int, end: int, prior: Floats, chance: float) -> int:
    """A child drawn in proportion to its prior."""
    mass = 0.0
    for child in range(start, end):
        mass += prior[child]
    left = chance * mass
    for child in range(start, end):
        left -= prior[child]
        if left < 0:
            return child
    return end - 1


@compiled
def search(
    seeds: Ints,
    first: Ints,
    last: Ints,
    prior: Floats,
    gain: Floats,
    offset: float,
    iterations: int,
    c1: float,
    c2: float,
    each_first: bool,
) -> tuple[Ints, Floats]:
    """Algorithm 1 for every row.

    An iteration goes down from the root by PUCT to a node whose children do not exist yet, makes all of them, and goes on to
    the end by drawing. The sentence's reward counts for every node of the path that exists, the first one drawn included.

    Algorithm 1 goes on with the last of the new children; in the official code's order of a hash map that is any of them.
    In an order by likelihood it would be the least likely one, which then had a visit before all the others.

    Args:
        seeds: [R] fixes a row's draws; its root is node r.
        first, last: [M] where the node's children begin and end.
        prior: [M] q(node | its parent's path).
        gain: [M] what the reward of a sentence gets for going through the node.
        offset: what every sentence's reward begins with.
        iterations: of each row.
        c1, c2: of eq. 16.
        each_first: whether a child that was never visited is taken before all others.

    Returns:
        [M] visits of each node, and the sum of the rewards of the sentences that went through it.
    """
    visits, total = np.zeros(len(first), np.int64), np.zeros(len(first))
    exist = np.zeros(len(first), np.bool_)  # whether the node's children do
    path = np.empty(len(first) + 1, np.int64)
    for row in range(len(seeds)):
        draws = 0
        if first[row] == last[row]:
            continue
        for _ in range(iterations):
            node, path[0], length, reward = row, row, 1, offset
            while exist[node] and first[node] < last[node]:
                node = _select(first[node], last[node], prior, visits, total, c1, c2, each_first)
                path[length] = node
                length += 1
                reward += gain[node]
            if not exist[node] and first[node] < last[node]:
                exist[node] = True
                node = _drawn(first[node], last[node], prior, uniform(seeds[row], draws))
                draws += 1
                path[length] = node
                length += 1
                reward += gain[node]
            while first[node] < last[node]:  # sentences end where the local model does
                node = _drawn(first[node], last[node], prior, uniform(seeds[row], draws))
                draws += 1
                reward += gain[node]
            for i in range(length):
                visits[path[i]] += 1
                total[path[i]] += reward
    return visits, total


@compiled
def likeliest(nodes: Ints, first: Ints, last: Ints, prior: Floats) -> Ints:
    """[W] the child of the largest prior of each node asked about, of equals the first; −1 where it has none."""
    found = np.full(len(nodes), -1, np.int64)
    for i in range(len(nodes)):
        for child in range(first[nodes[i]], last[nodes[i]]):
            if found[i] < 0 or prior[child] > prior[found[i]]:
                found[i] = child
    return found


@compiled
def repeats(tokens: Ints, first: Ints, last: Ints, prior: Floats) -> Floats:
    """[M] for each node the q of its own token's coming once more right after it."""
    found = np.zeros(len(first))
    for node in range(len(first)):
        for child in range(first[node], last[node]):
            if tokens[child] == tokens[node]:
                found[node] = prior[child]
    return found
