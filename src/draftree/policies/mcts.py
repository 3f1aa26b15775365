"""Monte-Carlo tree search over the drafter's candidates (ADED, Algorithm 1, eq. 16-17).

In the local model, node i has the children first[i] … last[i] − 1. All decisions follow from the
arrays, so each row is searched as if alone.

Shapes: R rows, M nodes of the local model, W nodes asked about.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, final

import numpy as np
from typing_extensions import override

from draftree.costs.step_costs import Costs
from draftree.kernels.score_ranking import rank_scores
from draftree.native import native_as
from draftree.policies.base import Expand, Policy, append, best, fit
from draftree.tree import Candidates, Floats, Ints, Tree, TreeBudget
from draftree.utils.validated_dataclass import knob


class SentenceTree(NamedTuple):
    """The sentences of a local model, and their rewards.

    Attributes:
        first: [M] the first child of each node.
        last: [M] the end of the node's children, exclusive.
        prior: [M] q(node | path of its parent).
        gain: [M] the amount that each node adds to the reward of a sentence through it.
        offset: the initial reward of a sentence.
    """

    first: Ints
    last: Ints
    prior: Floats
    gain: Floats
    offset: float


class Exploration(NamedTuple):
    """The options by which the search descends.

    Attributes:
        c1: constant c₁ of eq. 16.
        c2: constant c₂ of eq. 16.
        each_first: whether a child without visits is taken before all others.
    """

    c1: float
    c2: float
    each_first: bool


def uniform(seed: int, count: int) -> float:
    """Return number `count` of a pseudo-random stream, in [0, 1).

    The generator is SplitMix64 (Steele, Lea, Flood 2014), indexed by a counter instead of a state.
    """
    mixed = (int(seed) * 0xD1342543DE82EF95 + (count + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return float((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def puct(mean: float, prior: float, visits: int, siblings: int, c1: float, c2: float) -> float:
    """Return the PUCT value of a child, by which the search descends (eq. 16-17).

    Args:
        mean: Q(s, a), the mean reward of the sentences through the child; 0 if there are none.
        prior: P(s, a), the draft probability of the child.
        visits: N(s, a), the number of visits of the child.
        siblings: Σ_b N(s, b), the number of visits of all children of its parent.
        c1: constant c₁ of eq. 16.
        c2: constant c₂ of eq. 16.
    """
    exploration = c1 + math.log((siblings + c2 + 1) / c2)
    return mean + exploration * prior * math.sqrt(siblings) / (1 + visits)


def _select(
    start: int, end: int, prior: Floats, visits: Ints, total: Floats, by: Exploration
) -> int:
    """Return the child with the largest PUCT value, to which the search descends.

    Among equals the first one is returned.
    """
    siblings = 0
    for child in range(start, end):
        siblings += visits[child]
    chosen, most = start, -math.inf
    for child in range(start, end):
        if visits[child] == 0 and by.each_first:
            return child
        mean = total[child] / visits[child] if visits[child] else 0.0
        worth = puct(mean, prior[child], visits[child], siblings, by.c1, by.c2)
        if worth > most:
            chosen, most = child, worth
    return chosen


def _draw_child(start: int, end: int, prior: Floats, chance: float) -> int:
    """Return a child drawn with probability proportional to its prior."""
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
    seeds: Ints, sentences: SentenceTree, iterations: int, by: Exploration
) -> tuple[Ints, Floats]:
    """Run algorithm 1 for every sequence.

    Each iteration descends from the root by PUCT to a node whose children do not exist yet. It
    creates all children of that node, and continues to the end of a sentence by drawing. The reward
    of the sentence counts for every existing node of its path, including the first node drawn.

    Algorithm 1 continues with the last of the new children. In the official code, which uses the
    order of a hash map, that can be any of them. In an order by likelihood it would be the least
    likely child, which would then have a visit before all others.

    Args:
        seeds: [R] seeds of the draws of each sequence; the root of sequence r is node r.
        sentences: the local model of M nodes.
        iterations: number of iterations for each sequence.
        by: the options by which the search descends.

    Returns:
        [M] the number of visits of each node, and [M] the sum of the rewards of the sentences
        through it.
    """
    first, last, prior, gain, offset = sentences
    visits, total = np.zeros(len(first), np.int64), np.zeros(len(first))
    exist = np.zeros(len(first), np.bool_)  # whether the node's children exist
    path = np.empty(len(first) + 1, np.int64)
    for row in range(len(seeds)):
        draws = 0
        if first[row] == last[row]:
            continue
        for _ in range(iterations):
            node, path[0], length, reward, drawing = row, row, 1, offset, False
            while first[node] < last[node]:  # sentences end at leaves of the local model
                on_path = not drawing  # the first node drawn is on the path, too
                if exist[node]:
                    node = _select(first[node], last[node], prior, visits, total, by)
                else:
                    exist[node], drawing = on_path, True
                    node = _draw_child(first[node], last[node], prior, uniform(seeds[row], draws))
                    draws += 1
                reward += gain[node]
                if on_path:
                    path[length] = node
                    length += 1
            for i in range(length):
                visits[path[i]] += 1
                total[path[i]] += reward
    return visits, total


MAX_LAYER_NODES = 1024
"""Largest number of nodes of a sequence expanded in a layer; the paper's setting needs 144."""


@final
@dataclass(frozen=True)
class MCTS(Policy):
    """The search of ADED (Algorithm 1, eq. 16-17; official code: Adaptix), for any drafter.

    First the drafter proposes all sentences of `length` tokens, including the root, layer by layer.
    With 12 candidates after each node these are three calls for 1, 12 and 144 nodes. The search
    then needs no model. The most visited nodes are kept, and each of them is continued by its most
    likely next token.

    Where the paper and the official code differ, the paper is the default:

    - Reward: Algorithm 1 adds the "score from tri-gram matrix" along the sentence. This is
      understood as the probability of each token after the two tokens before it. The official code
      looks up the preceding token instead.
    - Children without visits: by eq. 17 such a child has Q = 0. The official code visits each child
      once first.
    - Algorithm 1 sorts sentences "by score" and does not say by which. Like the official code, this
      policy sorts by visits. Nodes without visits are not drafted. The policy keeps nodes, so that
      a sentence and its beginning count as two. As in the official code, each kept node is
      continued by one token more than the search has; the paper has 24 candidates of 4 tokens.
    - The official code takes candidates in the order of a hash map. The last of the new children,
      with which Algorithm 1 continues, can therefore be any of them. Here the most likely child
      comes first, the lower number wins ties, and the child to continue with is drawn as in the
      simulation. The root's token is the seed of the draws, so that a text always gets the same
      trees.
    - PUCT uses the sum of the children's visits (eq. 17). The official code uses the visits of the
      parent, which are one more.

    Attributes:
        iterations: number of iterations of the search (150 in the paper).
        c1: weight of exploration (eq. 16; 32 in the paper, 2.414 in its Figures 4a and 5).
        c2: number of visits after which the weight of exploration grows (eq. 16; 8 in the paper).
        length: number of tokens of a sentence, including the root. It is also the largest depth of
            a node, because one more token follows each sentence.
        continuations: number of nodes kept (24 in the paper).
        width: number of candidates after each node (12 in the paper).
        reward: the reward of a sentence. `paper` is 1 + Σ q of its tokens. `official` is 1 + Σ q of
            the repetition of each preceding token. `likelihood` is Σ log q, which is eq. 8 with the
            sign of a log-likelihood.
        unvisited: the treatment of children without visits: with `zero` they have Q = 0 (eq. 17);
            with `first` they are visited before all others (official code).
        search: `mcts`, or `greedy`, which takes the nodes with the largest path probability without
            a search. The paper does not define its "greedy search". Its τ of 1.49 (2.42 with the
            search) is that of one greedy sentence, which is the policy `chain:length=4`.
        nodes: largest number of drafted nodes of a sequence.
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
    def draft(
        self, expand: Expand, tree: Tree, costs: Costs, room: TreeBudget, memory: Any
    ) -> Tree:
        tree, frontier, candidates = self._expand_layers(expand, tree, room)
        near, size = Local.of(tree, frontier, candidates), len(tree)
        value = near.tree.score.copy() if self.search == "greedy" else self._search_log_visits(near)
        kept = near.best(value, self.continuations)
        longer = near.longer(kept)
        value[longer] = value[near.tree.parents[longer]] + near.tree.log_q[longer]
        wanted = near.tree.parents < 0
        wanted[kept] = wanted[longer] = True
        there = candidates.log_q > -np.inf
        keep, score = np.zeros(there.shape, np.bool_), np.zeros(there.shape)
        keep[there], score[there] = wanted[size:], value[size:]
        tree = append(
            replace(tree, nodes=tree.nodes._replace(score=value[:size])),
            frontier,
            candidates,
            keep,
            score,
        )
        number = size - 1 + np.cumsum(wanted[size:])[kept[kept >= size] - size]
        if (
            frontier := room.expandable(tree, number)
        ).size:  # the likeliest token after sentences of full length
            tree = append(tree, frontier, expand(tree, frontier, 1))
        return fit(
            tree.select(np.append(wanted[:size], np.ones(len(tree) - size, np.bool_))),
            min(self.nodes, room.nodes),
        )

    def _expand_layers(
        self, expand: Expand, tree: Tree, room: TreeBudget
    ) -> tuple[Tree, Ints, Candidates]:
        """Draft the sentences of the local model, layer by layer.

        Every layer but the last is appended to the tree. The last layer is returned as candidates.

        Args:
            expand: returns the drafter's candidates after given nodes.
            tree: the roots.
            room: the largest size of the trees.

        Returns:
            The tree without the last layer, and the parents and candidates of the last layer. If
            `room` allows no further layer before, the tree has all layers, and there are no parents
            and candidates.
        """
        nodes = np.arange(tree.roots)
        while (frontier := room.expandable(tree, nodes)).size:
            candidates = expand(tree, frontier, self.width)
            if tree.depth[frontier[0]] == self.length - 2:
                return tree, frontier, candidates
            before, tree = len(tree), append(tree, frontier, candidates)
            nodes = np.sort(best(tree, np.arange(before, len(tree)), MAX_LAYER_NODES))
        return tree, nodes[:0], Candidates(np.zeros((0, 1), np.int64), np.zeros((0, 1)))

    @cached_property
    def exploration(self) -> Exploration:
        """Return the options by which the search descends."""
        return Exploration(self.c1, self.c2, self.unvisited == "first")

    def _search_log_visits(self, near: "Local") -> Floats:
        """Return [M] the log of the fraction of sentences through each node; −∞ for no sentence."""
        seeds = near.tree.tokens[: near.tree.roots]
        visits, _ = search(seeds, near.sentences(self.reward), self.iterations, self.exploration)
        visits[: near.tree.roots] = self.iterations
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(visits / self.iterations))


@dataclass(frozen=True)
class Local:
    """The local model: a tree of all sentences, including their last layer.

    Attributes:
        tree: a tree of M nodes. `parents` is in ascending order, because a layer follows the order
            of its frontier.
        prior: [M] q of each node.
        first: [M] the first child of each node.
        last: [M] the end of the node's children, exclusive.
    """

    tree: Tree
    prior: Floats
    first: Ints
    last: Ints

    @classmethod
    def of(cls, tree: Tree, frontier: Ints, candidates: Candidates) -> "Local":
        """Return the local model made of a tree and the candidates of its last layer."""
        whole = append(tree, frontier, candidates)
        first, last = (
            np.searchsorted(whole.parents, np.arange(len(whole)), side)
            for side in ("left", "right")
        )
        return cls(whole, np.exp(whole.log_q), first, last)

    def best(self, value: Floats, k: int) -> Ints:
        """Return the k best nodes of each sequence, in the order of their numbers.

        Among equal values the lower number is taken. Nodes of value −∞ are never taken. No value
        exceeds that of the parent, so that the chosen nodes are connected.
        """
        return np.sort(
            best(self.tree, np.flatnonzero((value > -np.inf) & (self.tree.parents >= 0)), k, value)
        )

    def longer(self, nodes: Ints) -> Ints:
        """Return the most likely child of each given node that has children.

        Children that are among the given nodes are left out.
        """
        children = np.flatnonzero(np.isin(self.tree.parents, nodes))
        order, place = rank_scores(self.tree.parents[children], self.prior[children])
        return np.setdiff1d(children[order[place == 0]], nodes)

    def sentences(self, reward: str) -> SentenceTree:
        """Return the sentences, with the rewards of a kind; see `MCTS.reward`."""
        offset = 0.0 if reward == "likelihood" else 1.0
        return SentenceTree(self.first, self.last, self.prior, self._gain(reward), offset)

    def _gain(self, reward: str) -> Floats:
        """Return [M] the reward that each node adds to a sentence."""
        if reward == "likelihood":
            return self.tree.log_q
        if (
            reward == "official"
        ):  # the code looks up the pair's second token in the pair's own row, not the next token
            tokens, parents = self.tree.tokens, self.tree.parents
            repeated = np.zeros(len(self.prior))  # [M] q of the repetition of each node's token
            again = np.flatnonzero((parents >= 0) & (tokens == tokens[parents]))
            repeated[parents[again]] = self.prior[again]
            return repeated[parents]
        return self.prior
