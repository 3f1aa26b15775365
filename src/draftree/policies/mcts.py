"""Monte-Carlo tree search over a local model of the drafter, over arrays (ADED, Algorithm 1, eq. 16-17).

In the local model, node i has the children first[i] … last[i] − 1. All decisions follow from the
arrays, so each row is searched as if alone.

Shapes: R rows, M nodes of the local model, W nodes asked about.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
from typing_extensions import override

from draftree.costs.curves import Costs
from draftree.kernels.tree_growth import ranked
from draftree.native import native_as
from draftree.policies.base import Expand, Policy, append, best, fit
from draftree.tree import Candidates, Floats, Ints, Room, Tree
from draftree.utils.validated_dataclass import knob


def uniform(seed: int, count: int) -> float:
    """Return number `count` of a random stream, in [0, 1).

    The generator is SplitMix64 (Steele, Lea, Flood 2014), by counter instead of by state.
    """
    mixed = (int(seed) * 0xD1342543DE82EF95 + (count + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return float((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def puct(mean: float, prior: float, visits: int, siblings: int, c1: float, c2: float) -> float:
    """Return the worth of looking at a child (eq. 16-17).

    Args:
        mean: Q(s, a), the mean reward of the sentences that went through it; 0 for none.
        prior: P(s, a).
        visits: N(s, a).
        siblings: Σ_b N(s, b), visits of all children of its parent.
        c1: of eq. 16.
        c2: of eq. 16.
    """
    exploration = c1 + math.log((siblings + c2 + 1) / c2)
    return mean + exploration * prior * math.sqrt(siblings) / (1 + visits)


def _select(
    start: int,
    end: int,
    prior: Floats,
    visits: Ints,
    total: Floats,
    c1: float,
    c2: float,
    each_first: bool,
) -> int:
    """Return the child to descend to, the first of equals."""
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


def _drawn(start: int, end: int, prior: Floats, chance: float) -> int:
    """Return a child drawn in proportion to its prior."""
    mass = 0.0
    for child in range(start, end):
        mass += prior[child]
    left = chance * mass
    for child in range(start, end):
        left -= prior[child]
        if left < 0:
            return child
    return end - 1


@native_as("search_sentences")
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
    """Run algorithm 1 for every row.

    An iteration goes down from the root by PUCT to a node whose children do not exist yet, makes
    all of them, and goes on to the end by drawing. The sentence's reward counts for every node of
    the path that exists, the first one drawn included.

    Algorithm 1 goes on with the last of the new children; in the official code's order of a hash
    map that is any of them. In an order by likelihood it would be the least likely one, which then
    had a visit before all the others.

    Args:
        seeds: [R] seeds of the rows' draws; the root of row r is node r.
        first: [M] the node's first child.
        last: [M] the end of its children, exclusive.
        prior: [M] q(node | its parent's path).
        gain: [M] added to the reward of a sentence that goes through the node.
        offset: the reward that every sentence begins with.
        iterations: number of iterations for each row.
        c1: of eq. 16.
        c2: of eq. 16.
        each_first: whether a child that was never visited is taken before all others.

    Returns:
        [M] visits of each node, and the sum of the rewards of the sentences that went through it.
    """
    visits, total = np.zeros(len(first), np.int64), np.zeros(len(first))
    exist = np.zeros(len(first), np.bool_)  # True where the node's children do
    path = np.empty(len(first) + 1, np.int64)
    for row in range(len(seeds)):
        draws = 0
        if first[row] == last[row]:
            continue
        for _ in range(iterations):
            node, path[0], length, reward, drawing = row, row, 1, offset, False
            while first[node] < last[node]:  # sentences end where the local model does
                on_path = not drawing  # the first node drawn is on it, too
                if exist[node]:
                    node = _select(
                        first[node], last[node], prior, visits, total, c1, c2, each_first
                    )
                else:
                    exist[node], drawing = on_path, True
                    node = _drawn(first[node], last[node], prior, uniform(seeds[row], draws))
                    draws += 1
                reward += gain[node]
                if on_path:
                    path[length] = node
                    length += 1
            for i in range(length):
                visits[path[i]] += 1
                total[path[i]] += reward
    return visits, total


BREADTH = 1024
"""The most nodes of a row that are expanded in a layer; the paper's setting has 144."""


@final
@dataclass(frozen=True)
class MCTS(Policy):
    """The search of ADED (Algorithm 1, eq. 16-17; official code: Adaptix), for any drafter.

    First the drafter proposes all sentences of `length` tokens, root included, layer by layer: with
    12 candidates after each node these are three calls of 1, 12 and 144 nodes. The search itself
    then needs no model. Of the nodes it reached, the most visited are kept, and each is continued
    by its likeliest next token.

    Where the paper and the official code differ, the paper is the default:

    - reward: Algorithm 1 adds "score from tri-gram matrix" along the sentence, which is taken to be
      the probability of each token after the two before it. The official code looks for the token
      before instead.
    - unvisited: by eq. 17 as it stands a child that was never visited has Q = 0; the official code
      visits each once first.
    - Algorithm 1 sorts sentences "by score" and does not say which; like the official code this
      sorts by visits. Nodes never visited are not drafted. What is kept are nodes, so a sentence
      and its beginning count as two; and each goes on for one token more than the search, which is
      the official code's: the paper has 24 candidates of 4 tokens.
    - The official code takes candidates in the order of a hash map, so the last of new children,
      which Algorithm 1 goes on with, is any of them. Here the likeliest comes first, ties go to the
      lower number, and the child is drawn as in the simulation. Draws follow from the root's token,
      so that a text always gets the same trees.
    - PUCT takes the sum of the children's visits (eq. 17); the official code the parent's own,
      which is one more.

    Attributes:
        iterations: number of iterations of the search (150 in the paper).
        c1: exploration (eq. 16; 32 in the paper, 2.414 in its Figures 4a and 5).
        c2: number of visits after which exploration grows (eq. 16; 8 in the paper).
        length: tokens of a sentence, root included; it is also the largest depth of a node, as one
            more token follows each sentence.
        continuations: number of nodes kept (24 in the paper).
        width: candidates after each node (12 in the paper).
        reward: the reward of a sentence: `paper`, 1 + Σ q of its tokens; `official`, 1 + Σ q of the
            token before coming once more; `likelihood`, Σ log q, which is eq. 8 with the sign of a
            log-likelihood.
        unvisited: `zero`, Q = 0 (eq. 17); `first`, before all others (official code).
        search: `mcts`, or `greedy`, which takes the nodes of the largest path probability without
            any search. The paper does not define its "greedy search"; its τ of 1.49, where the
            search has 2.42, is that of one greedy sentence, the policy `chain:length=4`.
        nodes: the most drafted nodes of a row.
    """

    iterations: int = knob(150, least=1)
    c1: float = knob(32.0, least=0)
    c2: float = knob(8.0, above=0)
    length: int = knob(4, least=2, deepest=True)
    continuations: int = knob(24, least=1)
    width: int = knob(12, least=1)
    reward: Literal["paper", "official", "likelihood"] = "paper"
    unvisited: Literal["zero", "first"] = "zero"
    search: Literal["mcts", "greedy"] = "mcts"
    nodes: int = knob(64, least=1)

    @override
    def draft(self, expand: Expand, tree: Tree, costs: Costs, room: Room, memory: Any) -> Tree:
        tree, frontier, candidates = self._asked(expand, tree, room)
        near, size = Local.of(tree, frontier, candidates), len(tree)
        value = near.tree.score.copy() if self.search == "greedy" else self._searched(near)
        kept = near.best(value, self.continuations)
        longer = near.longer(kept)
        value[longer] = value[near.tree.parents[longer]] + near.tree.log_q[longer]
        wanted = near.tree.parents < 0
        wanted[kept] = wanted[longer] = True
        there = candidates.log_q > -np.inf
        keep, score = np.zeros(there.shape, np.bool_), np.zeros(there.shape)
        keep[there], score[there] = wanted[size:], value[size:]
        tree = append(replace(tree, score=value[:size]), frontier, candidates, keep, score)
        number = size - 1 + np.cumsum(wanted[size:])[kept[kept >= size] - size]
        if (
            frontier := room.expandable(tree, number)
        ).size:  # the likeliest token after sentences of full length
            tree = append(tree, frontier, expand(tree, frontier, 1))
        return fit(
            tree.select(np.append(wanted[:size], np.ones(len(tree) - size, np.bool_))),
            min(self.nodes, room.nodes),
        )

    def _asked(self, expand: Expand, tree: Tree, room: Room) -> tuple[Tree, Ints, Candidates]:
        """Return the tree without its last layer, and the parents and candidates of that layer."""
        nodes = np.arange(tree.roots)
        while (frontier := room.expandable(tree, nodes)).size:
            candidates = expand(tree, frontier, self.width)
            if tree.depth[frontier[0]] == self.length - 2:
                return tree, frontier, candidates
            before, tree = len(tree), append(tree, frontier, candidates)
            nodes = np.sort(best(tree, np.arange(before, len(tree)), BREADTH))
        return tree, nodes[:0], Candidates(np.zeros((0, 1), np.int64), np.zeros((0, 1)))

    def _searched(self, near: "Local") -> Floats:
        """Return the log of the share of sentences through each node [M]; −∞ for none."""
        gain, offset = near.gain(self.reward)
        seeds, each_first = near.tree.tokens[: near.tree.roots], self.unvisited == "first"
        visits, _ = search(
            seeds,
            near.first,
            near.last,
            near.prior,
            gain,
            offset,
            self.iterations,
            self.c1,
            self.c2,
            each_first,
        )
        visits[: near.tree.roots] = self.iterations
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(visits / self.iterations))


@dataclass(frozen=True)
class Local:
    """Hold the local model: a tree of all sentences, with their last layer.

    Attributes:
        tree: of M nodes; parents never fall, as a layer follows the order of its frontier.
        prior: [M] q.
        first: [M] the node's first child.
        last: [M] the end of its children, exclusive.
    """

    tree: Tree
    prior: Floats
    first: Ints
    last: Ints

    @classmethod
    def of(cls, tree: Tree, frontier: Ints, candidates: Candidates) -> "Local":
        """Return the model of a tree and the candidates of its last layer."""
        whole = append(tree, frontier, candidates)
        first, last = (
            np.searchsorted(whole.parents, np.arange(len(whole)), side)
            for side in ("left", "right")
        )
        return cls(whole, np.exp(whole.log_q), first, last)

    def best(self, value: Floats, k: int) -> Ints:
        """Return the k best nodes of each row, in the order of their numbers.

        Of equal values the lower number is taken; nodes of value −∞ are never taken.

        No value exceeds the parent's, so what is kept is connected.
        """
        return np.sort(
            best(self.tree, np.flatnonzero((value > -np.inf) & (self.tree.parents >= 0)), k, value)
        )

    def longer(self, nodes: Ints) -> Ints:
        """Return the likeliest child of each node that has any, unless it is one of the nodes."""
        children = np.flatnonzero(np.isin(self.tree.parents, nodes))
        order, place = ranked(self.tree.parents[children], self.prior[children])
        return np.setdiff1d(children[order[place == 0]], nodes)

    def gain(self, reward: str) -> tuple[Floats, float]:
        """Return the reward [M] that each node adds to its sentences, and the initial reward."""
        if reward == "likelihood":
            return self.tree.log_q, 0.0
        if (
            reward == "official"
        ):  # the code looks up the pair's second token in the pair's own row, not the next token
            tokens, parents = self.tree.tokens, self.tree.parents
            repeated = np.zeros(
                len(self.prior)
            )  # [M] q of each node's token coming once more right after it
            again = np.flatnonzero((parents >= 0) & (tokens == tokens[parents]))
            repeated[parents[again]] = self.prior[again]
            return repeated[parents], 1.0
        return self.prior, 1.0
