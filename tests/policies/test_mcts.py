"""Tree search in the drafter's local model: PUCT and rewards by hand, and the trees against Algorithm 1 in plain Python."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.policies import mcts
from draftree.policies.base import Expand, append, log
from draftree.policies.mcts import MCTS, Exploration, Local, puct, search, uniform
from draftree.tree import Candidates, Ints, Tree, TreeBudget
from rules import Path, Rule, levels

COSTS = Costs({1: 1.0}, {1: 1.0})


def grown(policy: MCTS, expand: Expand, depth: int = 9, nodes: int = 512, root: int = 0) -> Tree:
    roots = Tree.from_roots(np.zeros(1, np.int64), np.array([root]))
    return policy.draft(expand, roots, COSTS, TreeBudget(np.array([depth]), nodes), None)


def following(rule: Rule, asked: list[tuple[list[int], int]] | None = None) -> Expand:
    """A drafter that proposes tokens by a rule, the likeliest first, of equals the lower."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        if asked is not None:
            asked.append((frontier.tolist(), k))
        log_q = np.array(
            [rule(tuple(tree.tokens[tree.path(int(n))].tolist())) for n in frontier], np.float64
        )
        order = np.argsort(-log_q, axis=1, kind="stable")[:, :k]
        return Candidates(order, np.take_along_axis(log_q, order, axis=1))

    return expand


def ranked(rule: Rule, path: Path, k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens after a path and their log q."""
    found = [(token, q) for token, q in enumerate(rule(path)) if q > -np.inf]
    return sorted(found, key=lambda t: (-t[1], t[0]))[:k]


def paths(tree: Tree) -> dict[Path, float]:
    """Score of each drafted node by its tokens, the root's not among them."""
    return {
        tuple(tree.tokens[tree.path(n)[1:]].tolist()): float(tree.score[n])
        for n in range(1, len(tree))
    }


def small(shares: Mapping[Path, Sequence[float]]) -> Rule:
    """A rule by the tokens behind the root; nothing where it says nothing."""
    return lambda path: [log(share) for share in shares.get(path[1:], [0.0, 0.0])]


# Root 0 with children A = (0) .75 and B = (1) .25; A has children C = (0, 0) .6 and D = (0, 1) .4;
# B has none.
BUSH = {(): [0.75, 0.25], (0,): [0.6, 0.4]}


def near(tokens: Sequence[int] = (0, 0, 1, 0, 1)) -> Local:
    """That bush as a local model: nodes root, A, B, C, D."""
    tree = Tree.from_roots(np.zeros(1, np.int64), np.array(tokens[:1]))
    tree = append(tree, np.array([0]), Candidates(np.array([tokens[1:3]]), np.log([[0.75, 0.25]])))
    return Local.of(tree, np.array([1]), Candidates(np.array([tokens[3:]]), np.log([[0.6, 0.4]])))


def searched(
    iterations: int, c1: float, c2: float = 8.0, reward: str = "paper", first: bool = False
) -> tuple[list[int], list[float]]:
    sentences, by = near().sentences(reward), Exploration(c1, c2, first)
    visits, total = search(np.zeros(1, np.int64), sentences, iterations, by)
    return visits.tolist(), total.tolist()


def test_puct_by_hand() -> None:
    # E = 32 + log((9 + 8 + 1) / 8) = 32 + log 2.25 = 32.810930; 2 + E · 0.5 · √9 / (1 + 2) = 2 + E
    # / 2.
    assert (
        puct(2.0, 0.5, 2, 9, 32.0, 8.0)
        == pytest.approx(2 + (32 + math.log(2.25)) / 2)
        == pytest.approx(18.405465)
    )
    # E = 2.414 + log((0 + 1 + 1) / 1), but no sibling was visited: √0 = 0.
    assert puct(1.5, 0.9, 0, 0, 2.414, 1.0) == 1.5


def test_the_search_by_hand() -> None:
    # Draws .883, .432. 1: the root's children are made, B is drawn (.883 ≥ .75) and has none:
    # reward 1 + .25.
    assert searched(1, 32.0) == ([1, 0, 1, 0, 0], [1.25, 0, 1.25, 0, 0])
    # 2: Σ N = 1, E = 32 + log(10 / 8) = 32.223. A: 0 + E · .75 · 1 / 1 = 24.2; B: 1.25 + E · .25 ·
    # 1 / 2 = 5.3. A's children are made, C is drawn (.432 < .6): reward 1 + .75 + .6.
    assert searched(2, 32.0) == ([2, 1, 1, 1, 0], pytest.approx([3.6, 2.35, 1.25, 2.35, 0]))
    # 3: Σ N = 2, E = 32 + log(11 / 8) = 32.318. A: 2.35 + E · .75 · √2 / 2 = 19.5; B: 1.25 + E ·
    # .25 · √2 / 2 = 7.0. Under A, Σ N = 1: C: 2.35 + 32.223 · .6 / 2 = 12.0; D: 0 + 32.223 · .4 / 1
    # = 12.9. D: reward 1 + .75 + .4.
    assert searched(3, 32.0) == ([3, 2, 1, 1, 1], pytest.approx([5.75, 4.5, 1.25, 2.35, 2.15]))
    # 4: Σ N = 3, E = 32 + log(12 / 8) = 32.405. A: 2.25 + E · .75 · √3 / 3 = 16.3; B: 1.25 + E ·
    # .25 · √3 / 2 = 8.3. Under A, Σ N = 2, E = 32.318: C: 2.35 + E · .6 · √2 / 2 = 16.1; D: 2.15 +
    # E · .4 · √2 / 2 = 11.3.
    assert searched(4, 32.0) == ([4, 3, 1, 2, 1], pytest.approx([8.1, 6.85, 1.25, 4.7, 2.15]))


def test_a_child_that_was_never_visited_has_q_zero_or_comes_first() -> None:
    # With c1 = 0, E = log(10 / 8) = .223: A: 0 + .223 · .75 = .17; B: 1.25 + .223 · .25 / 2 = 1.28.
    assert searched(2, 0.0)[0] == [2, 0, 2, 0, 0]
    assert searched(2, 0.0, first=True)[0] == [2, 1, 1, 1, 0]


def test_rewards_by_hand() -> None:
    # Two iterations: root → B, then root → A → C. Tokens: root 0, A 0, B 1, C 0, D 1. official: the
    # root's token, 0, once more after the root is A: .75 (wherever the sentence goes on to); A's
    # token, 0, once more after A is C: .6.
    assert searched(2, 32.0, reward="official")[1] == pytest.approx(
        [1.75 + 2.35, 2.35, 1.75, 2.35, 0]
    )
    # likelihood: log .25, then log .75 + log .6.
    b, c = math.log(0.25), math.log(0.75 * 0.6)
    assert searched(2, 32.0, reward="likelihood")[1] == pytest.approx([b + c, c, b, c, 0])


def test_the_first_visit_of_new_children_is_drawn_and_not_the_least_likely_one_s() -> None:
    sentences, by = near().sentences("paper"), Exploration(32.0, 8.0, False)
    visits = np.array(
        [search(np.array([seed]), sentences, 1, by)[0] for seed in range(2000)],
    )
    assert visits[:, 1:3].sum(axis=1).tolist() == [1] * 2000, "A or B"
    assert visits[:, 1].mean() == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 2000))


def test_visits_follow_the_prior_where_exploration_outweighs_rewards() -> None:
    # Where all children are worth the same, n_a ≈ E · P_a · √N / (that worth − Q_a): where E is
    # large, a share of P_a.
    sentences, by = near().sentences("paper"), Exploration(1e4, 8.0, False)
    visits, _ = search(np.zeros(1, np.int64), sentences, 150, by)
    assert (visits[1:] / 150).tolist() == pytest.approx([0.75, 0.25, 0.45, 0.3], abs=0.02)


def test_a_sentence_goes_on_at_random_where_the_search_has_not_been() -> None:
    # One iteration makes the root's only child; behind it token 0 comes with .3 and token 1 with
    # .7.
    tree = Tree.from_roots(np.zeros(1, np.int64), np.zeros(1, np.int64))
    tree = append(tree, np.array([0]), Candidates(np.array([[0]]), np.zeros((1, 1))))
    model = Local.of(tree, np.array([1]), Candidates(np.array([[0, 1]]), np.log([[0.3, 0.7]])))
    sentences, by = model.sentences("paper")._replace(offset=0.0), Exploration(32.0, 8.0, False)
    rewards = [search(np.array([seed]), sentences, 1, by)[1][0] for seed in range(2000)]
    assert set(np.round(rewards, 9)) == {1.3, 1.7}
    assert np.mean(np.array(rewards) > 1.5) == pytest.approx(
        0.7, abs=4 * math.sqrt(0.3 * 0.7 / 2000)
    )


def test_draws_are_uniform_and_streams_differ() -> None:
    many = np.array([uniform(seed, count) for seed in (0, 7) for count in range(4000)])
    assert ((many >= 0) & (many < 1)).all()
    assert np.abs(np.histogram(many, 10, (0, 1))[0] - 800).max() < 4.5 * math.sqrt(800)
    assert len(set(many.tolist())) == 8000


def test_the_most_visited_nodes_are_kept_each_one_token_longer() -> None:
    # As by hand above, four iterations: A 3, C 2, B 1, D 1 visits. Two nodes are kept: A and C. A's
    # likeliest next token is C; behind C nothing is known, as sentences of three tokens, the root
    # among them, end there: the drafter is asked.
    asked: list[tuple[list[int], int]] = []
    rule = small({**BUSH, (0, 0): [0.2, 0.8], (0, 0, 0): [1.0]})
    tree = grown(MCTS(iterations=4, length=3, continuations=2), following(rule, asked))
    assert paths(tree) == {(0,): pytest.approx(math.log(3 / 4)), (0, 0): pytest.approx(math.log(2 / 4)),
                           (0, 0, 1): pytest.approx(math.log(2 / 4) + math.log(0.8))}  # fmt: skip
    assert asked == [([0], 12), ([1, 2], 12), ([3], 1)]


def test_a_longer_node_that_was_visited_less_is_worth_what_q_says() -> None:
    # One node is kept, A; C goes with it as its likeliest next token: log(3/4) + log .6. D does
    # not.
    tree = grown(MCTS(iterations=4, length=3, continuations=1), following(small(BUSH)))
    assert paths(tree) == {
        (0,): pytest.approx(math.log(3 / 4)),
        (0, 0): pytest.approx(math.log(0.75 * 0.6)),
    }


def test_nodes_never_visited_are_not_drafted() -> None:
    # One iteration came to B only, behind which there is nothing.
    assert paths(grown(MCTS(iterations=1), following(small(BUSH)))) == {(1,): 0.0}


def test_only_continuation_is_followed_to_the_end() -> None:
    # The first of 150 sentences makes the first node only, the second the second; no node of the
    # search lies deeper than 3.
    visits = {1: 150, 2: 149, 3: 148, 4: 148}
    tree = grown(MCTS(), following(lambda path: [0.0]))
    assert paths(tree) == {(0,) * n: pytest.approx(math.log(v / 150)) for n, v in visits.items()}


class Node:
    """Of Algorithm 1."""

    def __init__(self, tokens: Path, prior: float) -> None:
        self.tokens, self.prior = tokens, prior
        self.children: list[Node] = []
        self.visits, self.score = 0, 0.0

    def q(self) -> float:
        return self.score / self.visits if self.visits else 0.0


def algorithm_1(rule: Rule, policy: MCTS, depth: int) -> dict[Path, float]:
    """Visit counts of the nodes, by tokens behind the root, which is 0."""

    def words(tokens: Path) -> list[tuple[int, float]]:
        if len(tokens) - 1 >= min(depth, policy.length - 1):
            return []
        return [(token, math.exp(q)) for token, q in ranked(rule, tokens, policy.width)]

    def probability(tokens: Path, token: int) -> float:
        return dict(words(tokens)).get(token, 0.0)

    def drawn(tokens: Path, count: int) -> int:
        chance, at = uniform(0, count) * sum(q for _, q in words(tokens)), 0
        while (chance := chance - words(tokens)[at][1]) >= 0:
            at += 1
        return at

    root = Node((0,), 1.0)
    draws = 0
    nodes = []
    for _ in range(policy.iterations if words((0,)) else 0):
        node, path = root, [root]
        while node.children:
            siblings = sum(c.visits for c in node.children)
            e = policy.c1 + math.log((siblings + policy.c2 + 1) / policy.c2)
            worth = [
                c.q() + e * c.prior * math.sqrt(siblings) / (1 + c.visits) for c in node.children
            ]
            fresh = (
                [c for c in node.children if not c.visits] if policy.unvisited == "first" else []
            )
            node = fresh[0] if fresh else node.children[worth.index(max(worth))]
            path.append(node)
        if words(node.tokens):
            node.children = [Node((*node.tokens, t), q) for t, q in words(node.tokens)]
            nodes += node.children
            node = node.children[drawn(node.tokens, draws)]
            draws += 1
            path.append(node)
        state = node.tokens
        while words(state):
            state = (*state, words(state)[drawn(state, draws)][0])
            draws += 1
        edges = [(state[:i], state[i]) for i in range(1, len(state))]
        if policy.reward == "likelihood":
            score = sum(math.log(probability(*edge)) for edge in edges)
        elif policy.reward == "official":
            score = sum((probability(before, before[-1]) for before, _ in edges), 1.0)
        else:
            score = sum(
                (probability(*edge) for edge in edges), 1.0
            )  # in this order, so that ties stay ties
        for on in path:
            on.visits += 1
            on.score += score
    return {n.tokens[1:]: n.visits for n in nodes if n.visits}


@given(
    st.integers(0, 300),
    st.integers(1, 40),
    st.sampled_from(["paper", "official", "likelihood"]),
    st.sampled_from(["zero", "first"]),
    st.sampled_from([0.0, 2.414, 32.0]),
    st.integers(2, 4),
    st.integers(1, 4),
)
def test_visits_are_those_of_algorithm_1(
    seed: int, iterations: int, reward: str, unvisited: str, c1: float, length: int, depth: int
) -> None:
    rule = levels(seed, 4)
    policy = MCTS(
        iterations,
        c1,
        length=length,
        continuations=999,
        nodes=999,
        reward=reward,
        unvisited=unvisited,
    )  # type: ignore[arg-type]
    tree = paths(grown(policy, following(rule), depth))
    visits = algorithm_1(rule, policy, depth)
    assert {p: tree[p] for p in visits} == {
        p: pytest.approx(math.log(n / iterations)) for p, n in visits.items()
    }
    longer = {}
    for path in [p for p in visits if len(p) < depth]:
        for token, q in ranked(rule, (0, *path), 1):
            longer[(*path, token)] = tree[path] + q
    assert set(tree) == set(visits) | set(longer), "each visited node and its likeliest child"
    assert {p: tree[p] for p in longer if p not in visits} == {
        p: pytest.approx(v) for p, v in longer.items() if p not in visits
    }


@given(st.integers(0, 300), st.integers(1, 8), st.integers(2, 4))
def test_greedy_keeps_the_likeliest_paths(seed: int, continuations: int, length: int) -> None:
    rule = levels(seed, 4)
    values = {(0,): 0.0}
    todo = [(0,)]
    while todo:
        path = todo.pop()
        for token, q in enumerate(rule(path)):
            if len(path) < length and q > -np.inf:
                values[(*path, token)] = values[path] + q
                todo.append((*path, token))
    best = sorted((v for p, v in values.items() if len(p) > 1), reverse=True)[:continuations]
    tree = paths(
        grown(
            MCTS(search="greedy", length=length, continuations=continuations, nodes=999),
            following(rule),
        )
    )
    assert (
        sorted((v for p, v in tree.items() if len(p) < length), reverse=True)[: len(best)] == best
    )
    for path, score in tree.items():
        assert score == (
            values[(0, *path)]
            if (0, *path) in values
            else tree[path[:-1]] + rule((0, *path[:-1]))[path[-1]]
        )
    assert all(path[:-1] in tree for path in tree if len(path) > 1)
    assert len(tree) <= 2 * continuations


def test_the_cap_keeps_the_most_visited() -> None:
    rule = levels(3, 12, missing=0.0)
    whole, some = (paths(grown(MCTS(nodes=n), following(rule))) for n in (64, 10))
    assert len(whole) > 30
    assert len(some) == 10
    assert sorted(some.values()) == sorted(whole.values())[-10:]
    assert len(paths(grown(MCTS(), following(rule), nodes=7))) == 7


def test_trees_follow_from_the_root_s_token_alone() -> None:
    def drafted(root: int) -> dict[Path, float]:
        return paths(
            grown(
                MCTS(iterations=20, c1=0.5),
                following(lambda path: levels(1, 6)(path[1:])),
                root=root,
            )
        )

    assert drafted(5) == drafted(5)
    assert len({tuple(sorted(drafted(root).items())) for root in range(12)}) > 1, (
        "draws differ by the root's token"
    )


def test_a_layer_of_very_many_nodes_is_asked_about_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcts, "MAX_LAYER_NODES", 5)
    asked: list[tuple[list[int], int]] = []
    rule = levels(2, 3, missing=0.0)
    grown(MCTS(width=3), following(rule, asked))
    assert [len(frontier) for frontier, _ in asked[:3]] == [1, 3, 5]
    values = [p + q for a, p in ranked(rule, (0,), 3) for _, q in ranked(rule, (0, a), 3)]
    second = dict(enumerate(values, 4))
    assert asked[2][0] == sorted(sorted(second, key=lambda n: (-second[n], n))[:5]), (
        "the likeliest paths"
    )
