"""Fused drafters: merging by hand, what is learnt and from what, rows on their own, and the conformance suite's checks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.costs.step_costs import Costs
from draftree.drafters import _fused
from draftree.drafters._fused import (
    Fused,
    FusedDrafter,
    FusedState,
    RetrievalHits,
    initial_rates,
    merge_hits,
)
from draftree.drafters.base import Drafter
from draftree.drafters.medusa import Medusa
from draftree.drafters.pld import PLD, PLDDrafter
from draftree.drafters.suffix import Suffix, SuffixDrafter
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.online_logistic import Logistic
from draftree.policies.base import Policy, append
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.pct import PCT
from draftree.policies.yield_ import Yield
from draftree.registry import build
from draftree.request import Emitted, Request
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes
from draftree.testing import TableDrafter, random_table, table_target, tiny_target
from draftree.testing.conformance import CHECKS, Case, Suite, pairwise
from draftree.tree import AcceptResult, Candidates, Draw, Floats, Ints, Tree

COSTS = Costs({1: 0.1}, {1: 1.0, 32: 1.2})
TABLE = table_target(random_table(4, 1), context=64)
TAPS = TABLE.prefill(TABLE.new_cache(1, 1), [np.array([1])], HiddenStateSpec()).hidden_states
NOTHING = np.zeros(0, np.int64)
GUIDED = 1
"""Index of the weights for hits that were proposed together with a guide."""


class Given(Drafter[tuple[int, ...]]):
    """Proposes the same after every node; its state is the tokens it was told of, `carry` leaves them with a −1 behind."""

    remembers = True

    def __init__(
        self,
        proposals: dict[int, float],
        vocab: int | None = None,
        needs: HiddenStateSpec = HiddenStateSpec(),
    ) -> None:
        self.proposals = proposals
        self.vocab = vocab
        self._needs = needs
        self.given: list[HiddenStates] = []

    @property
    def needs(self) -> HiddenStateSpec:
        return self._needs

    @property
    def description(self) -> str:
        return f"given {self.proposals}"

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Any = None,
        rows: Ints | None = None,
    ) -> tuple[int, ...]:
        self.given.append(hidden_states)
        return (*(state or ()), *roots.tolist())

    def expand(
        self, state: Any, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Any]:
        best = sorted(self.proposals.items(), key=lambda one: -one[1])[:k]
        tokens, q = np.array([t for t, _ in best], np.int64), np.array([p for _, p in best])
        whole = None
        if self.vocab is not None:
            whole = torch.full((len(frontier), self.vocab), 1e-9, dtype=torch.float64)
            whole[:, list(self.proposals)] = torch.tensor(
                list(self.proposals.values()), dtype=torch.float64
            )
            whole = whole.log()
        return Candidates(
            np.tile(tokens, (len(frontier), 1)), np.tile(np.log(q), (len(frontier), 1)), whole
        ), state

    def commit(
        self, state: Any, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> tuple[int, ...]:
        self.given.append(hidden_states)
        return (*state, *tree.tokens[verdict.committed_nodes(0)].tolist())

    def truncate(self, state: Any, lengths: Ints, rows: Ints | None = None) -> tuple[int, ...]:
        return tuple(state[: int(lengths[0])])

    def carry(self, state: Any) -> tuple[int, ...]:
        return (*state, -1)


class Probing(Given):
    """One that sends probes."""

    sends_probes = True

    def probes(self, state: Any) -> Probes | None:
        return Probes(
            np.array(state),
            np.zeros(len(state), np.int64),
            np.arange(len(state)),
            np.eye(len(state), dtype=np.bool_),
        )


def begun(drafter: FusedDrafter, rows: int = 1, state: FusedState | None = None) -> FusedState:
    return drafter.start([np.array([1, 2])] * rows, np.full(rows, 3), TAPS, state)


def asked(drafter: FusedDrafter, state: FusedState, k: int = 4) -> tuple[Candidates, FusedState]:
    rows = len(state.trust[0].recent)
    return drafter.expand(
        state, Tree.from_roots(np.arange(rows), np.full(rows, 3)), np.arange(rows), k, Drawing()
    )


def find(
    tokens: list[list[int]],
    value: list[list[float]],
    guide: list[list[float]],
    part: int = 1,
    guided: bool = True,
) -> RetrievalHits:
    values = np.array(value)
    numbers = np.arange(len(tokens))
    place, x = np.where(values > 0, -np.inf, np.nan), np.zeros((*values.shape, 4))
    return RetrievalHits(
        part, guided, numbers, np.array(tokens), place, np.array(guide, np.float64), x, values
    )


def logs(q: list[list[float]]) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(np.array(q))


# Merging.


def test_hits_keep_their_value_and_other_tokens_share_the_rest() -> None:
    guide = Candidates(np.array([[4, 2, 7]]), logs([[0.5, 0.3, 0.1]]))
    out = merge_hits(guide, [find([[2, 9]], [[0.6, 0.2]], [[0.3, 0.05]])], 4)
    assert out.tokens.tolist() == [[2, 9, 4, 7]]
    left = (1 - 0.8) / (1 - 0.35)  # of the guide's 0.65 for other tokens
    assert np.exp(out.log_q) == pytest.approx(np.array([[0.6, 0.2, 0.5 * left, 0.1 * left]]))
    assert out.sources is not None
    assert out.sources.tolist() == [[2, 1, 0, 0]], "both, the second, the first"
    assert merge_hits(guide, [find([[2, 9]], [[0.6, 0.2]], [[0.3, 0.05]])], 2).tokens.tolist() == [
        [2, 9]
    ]


def test_where_nothing_was_found_the_guide_is_left_bit_for_bit() -> None:
    log_q = np.log(np.random.default_rng(0).dirichlet(np.ones(5), 2))[:, :3]
    guide = Candidates(np.array([[4, 2, 7], [1, 8, 3]]), -np.sort(-log_q))
    out = merge_hits(guide, [find([[9], [0]], [[0.5], [0.0]], [[0.01], [0.0]])], 3)
    assert out.tokens[0].tolist() == [9, 4, 2]
    assert out.tokens[1].tolist() == [1, 8, 3]
    assert (out.log_q[1] == guide.log_q[1]).all()
    assert out.sources is not None
    assert out.sources[1].tolist() == [0, 0, 0]


def test_largest_value_counts_among_hits_of_one_token() -> None:
    first, second = (
        find([[5, 6]], [[0.4, 0.1]], [[0.0, 0.0]], 0, False),
        find([[6, 5]], [[0.3, 0.2]], [[0.0, 0.0]], 1, False),
    )
    out = merge_hits(None, [first, second], 4)
    assert out.tokens.tolist() == [[5, 6]]
    assert np.exp(out.log_q) == pytest.approx(np.array([[0.4, 0.3]]))
    assert out.sources is not None
    assert out.sources.tolist() == [[2, 2]]
    assert out.log_probs is None


def test_ties_go_to_the_earlier_part_and_rank() -> None:
    out = merge_hits(
        None,
        [
            find([[8, 3]], [[0.2, 0.2]], [[0, 0]], 0, False),
            find([[9, 1]], [[0.2, 0.2]], [[0, 0]], 1, False),
        ],
        4,
    )
    assert out.tokens.tolist() == [[8, 3, 9, 1]]
    guide = Candidates(
        np.array([[9]]), logs([[0.25]]), source=1
    )  # the second part is the guide; it keeps half of 1/4
    out = merge_hits(
        guide, [find([[4]], [[0.5]], [[0.0]], 0), find([[6]], [[0.125 / 2]], [[0.0]], 2)], 3
    )
    assert out.tokens.tolist() == [[4, 9, 6]]
    assert out.sources is not None
    assert out.sources.tolist() == [[0, 1, 3]]


def test_hits_never_take_all_probability() -> None:
    guide = Candidates(np.array([[4]]), logs([[0.9]]))
    out = merge_hits(guide, [find([[5, 6]], [[0.9, 0.6]], [[0.05, 0.05]])], 3)
    assert out.tokens.tolist() == [[5, 6, 4]]
    assert np.exp(out.log_q) == pytest.approx(np.array([[0.6, 0.4, 0.001]]) * [0.999, 0.999, 1])
    assert np.exp(
        merge_hits(None, [find([[5]], [[1.0]], [[0.0]], 0, False)], 3).log_q
    ) == pytest.approx(0.999)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_siblings_are_distinct_and_sum_to_one_at_most(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    q = torch.log_softmax(
        torch.from_numpy(rng.normal(size=(3, 9)) * rng.choice([0.1, 3, 30])).float(), -1
    )
    tokens = np.argsort(-q.numpy(), kind="stable")[:, :k]
    guide = Candidates(tokens, np.take_along_axis(q.double().numpy(), tokens, 1), q)
    finds = []
    for part in (1, 2):
        found = np.array([rng.permutation(9)[:4] for _ in range(3)])
        value = rng.random((3, 4)) * (rng.random((3, 4)) < 0.5)
        finds.append(
            find(
                found.tolist(),
                value.tolist(),
                np.take_along_axis(q.double().exp().numpy(), found, 1).tolist(),
                part,
            )
        )
    if not any((f.value > 0).any() for f in finds):
        return
    out = merge_hits(guide, finds, k)
    for i in range(3):
        there = out.log_q[i] > -np.inf
        assert len(set(out.tokens[i, there])) == there.sum() == np.isfinite(out.log_q[i]).sum()
        assert np.exp(out.log_q[i]).sum() <= 1 + 1e-6, "float32's q sums to 1 only nearly"
        assert (np.diff(out.log_q[i, there]) <= 0).all()
        found_there = {int(t) for f in finds for t in f.tokens[i][f.value[i] > 0]}
        assert set(out.tokens[i, there]) <= found_there | set(tokens[i])


# Drafting.


def test_the_trained_part_alone_where_nothing_is_found() -> None:
    target = tiny_target()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        medusa = Medusa().example(target)
    fused = FusedDrafter([medusa, PLDDrafter(PLD())])
    prompts = [np.array([4, 9, 2]), np.array([1, 7, 8, 1])]
    verified = target.prefill(target.new_cache(2, 8), prompts, fused.needs)
    roots = np.array([30, 7])  # 30 is new, 7 stood before 8
    alone, state = (
        medusa.start(prompts, roots, verified.hidden_states),
        fused.start(prompts, roots, verified.hidden_states),
    )
    learnt = initial_rates(2)
    learnt.recent[:] = 0.9
    learnt.weights[:, 1] += 0.5
    for rates in (initial_rates(2), learnt):  # whatever was learnt
        state = replace(state, trust=(rates,) * 2)
        tree = Tree.from_roots(np.arange(2), roots)
        want, _ = medusa.expand(alone, tree, np.arange(2), 5, Drawing())
        got, _ = fused.expand(state, tree, np.arange(2), 5, Drawing())
        assert (got.tokens[0] == want.tokens[0]).all()
        assert (got.log_q[0] == want.log_q[0]).all(), "row 1 found something, row 0 did not"
        assert (got.log_q[1] != want.log_q[1]).all()
        only, _ = fused.expand(state, tree, np.array([0]), 5, Drawing())
        assert (only.tokens == want.tokens[:1]).all()
        assert (only.log_q == want.log_q[:1]).all()
        assert got.log_probs is not None
        assert want.log_probs is not None
        assert torch.equal(got.log_probs, want.log_probs), "entropies are the trained part's"
        assert (got.entropy() == want.entropy()).all()


def test_a_find_multiplies_the_guides_odds_at_first() -> None:
    drafter = FusedDrafter([Given({4: 0.5, 6: 0.25}, vocab=9), Given({6: 0.5})])
    out, _ = asked(drafter, begun(drafter))
    odds = np.e * (0.25 / 0.75)  # weights 1, 0.5, 1: e · (0.5 / 0.5)^½ · the guide's
    value = odds / (1 + odds)
    assert out.tokens.tolist() == [[6, 4]]
    assert np.exp(out.log_q) == pytest.approx(
        np.array([[value, 0.5 * (1 - value) / 0.75]]), rel=1e-6
    )


def test_without_a_guide_the_parts_q_is_the_estimate_at_first() -> None:
    drafter = FusedDrafter([Given({4: 0.5, 5: 0.2}), Given({6: 0.3})])
    out, _ = asked(drafter, begun(drafter))
    assert out.tokens.tolist() == [[4, 6, 5]]
    assert np.exp(out.log_q) == pytest.approx(np.array([[0.5, 0.3, 0.2]]) * 0.999)
    nothing = FusedDrafter([Given({}), Given({})])
    assert asked(nothing, begun(nothing))[0].log_q.size == 0


def test_the_tree_remembers_who_proposed_a_node() -> None:
    drafter = FusedDrafter([Given({4: 0.5, 6: 0.25}, vocab=9), Given({6: 0.5, 7: 0.1})])
    out, _ = asked(drafter, begun(drafter))
    roots = Tree.from_roots(np.arange(1), np.array([3]))
    tree = append(roots, np.arange(1), out)
    assert dict(zip(tree.tokens.tolist(), tree.source.tolist(), strict=True)) == {
        3: -1,
        4: 0,
        6: 2,
        7: 1,
    }
    alone = append(
        roots, np.arange(1), drafter.parts[0].expand((), roots, np.arange(1), 2, Drawing())[0]
    )
    assert alone.source.tolist() == [-1, 0, 0]


def test_retrieval_hits_cost_no_pass_and_are_searched_once() -> None:
    class Counted(Given):
        asked = 0

        def expand(
            self, state: Any, tree: Tree, frontier: Ints, k: int, drawing: Drawing
        ) -> tuple[Candidates, Any]:
            self.asked += 1
            return super().expand(state, tree, frontier, k, drawing)

    guide, search = Counted({1: 0.6, 2: 0.3}, vocab=4), Counted({2: 0.5})
    search.searches = True
    drafter = FusedDrafter([guide, search])
    state = drafter.start([np.array([1])], np.array([0]), TAPS)
    tree = Tree.from_roots(np.array([0]), np.array([0]))
    drawing = Drawing(Draw.POINT)
    found, after = drafter.find(state, tree, np.array([0]), 4, drawing)
    assert found is not None
    assert (found.tokens.tolist(), found.log_probs, found.origin.tolist()) == ([[2]], None, [[1]])
    assert np.exp(found.log_q) == pytest.approx(0.5)  # its own q, before any find was judged
    assert (guide.asked, search.asked) == (0, 1)
    both, _ = drafter.expand(after, tree, np.array([0]), 4, drawing)
    alone, _ = drafter.expand(state, tree, np.array([0]), 4, drawing)
    assert (both.tokens.tolist(), both.log_q.tolist()) == (
        alone.tokens.tolist(),
        alone.log_q.tolist(),
    )
    assert (guide.asked, search.asked) == (2, 2)
    assert drafter.find(state, tree, np.array([0]), 4, Drawing(Draw.WITH_REPLACEMENT)) == (
        None,
        state,
    )
    assert (
        FusedDrafter([search, search]).find(state, tree, np.array([0]), 4, drawing)[0] is None
    )  # nothing costs a pass


def test_hits_of_whole_subtrees_are_valued_and_learnt_as_by_layers() -> None:
    text, drawing = np.array([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1]), Drawing(Draw.POINT)
    search = SuffixDrafter(Suffix())
    drafter = FusedDrafter([Given({7: 0.6}, vocab=9), search])
    begin = drafter.start([text], np.array([2]), TAPS)
    first = append(
        Tree.from_roots(np.array([0]), np.array([2])),
        np.array([0]),
        Candidates(np.array([[3]]), np.zeros((1, 1))),
    )
    found, once = drafter.below(begin, first, np.array([1]), 4, drawing, np.array([4]))
    assert found is not None
    assert not found.alone
    whole = append(first, found.nodes, found.candidates)
    layered = first
    state = begin
    frontier = np.array([1])
    while (frontier := frontier[layered.depth[frontier] < 4]).size:
        some, state = drafter.find(state, layered, frontier, 4, drawing)
        if some is None:
            break
        before, layered = len(layered), append(layered, frontier, some)
        frontier = np.arange(before, len(layered))
    assert len(whole) > 4
    columns = ("tokens", "parents", "depth", "row", "source", "number")
    assert all(getattr(whole, name).tolist() == getattr(layered, name).tolist() for name in columns)
    assert whole.score == pytest.approx(layered.score)
    path = [1, int(whole.children(1)[0])]
    verdict = AcceptResult((np.array(path),), np.array([1]))
    learnt = [drafter.commit(each, whole, verdict, TAPS).trust[1] for each in (once, state)]
    assert learnt[0].recent == learnt[1].recent != begin.trust[1].recent
    assert learnt[0].weights == pytest.approx(learnt[1].weights)
    assert (
        FusedDrafter([search, search]).below(
            begin, first, np.array([1]), 4, drawing, np.array([4])
        )[0]
        is None
    )
    nothing = drafter.start([np.array([8])], np.array([2]), TAPS)
    none, _ = drafter.below(nothing, first, np.array([1]), 4, drawing, np.array([4]))
    assert none is not None
    assert (none.nodes.size, none.alone) == (0, False)


def test_samples_are_one_parts_own() -> None:
    drawing = Drawing(
        Draw.WITHOUT_REPLACEMENT, [Sampling(1.0)], Keyed(5, np.array([0]), np.array([2]))
    )
    table = TableDrafter(random_table(9, 2)[0])
    drafter = FusedDrafter([Given({6: 0.5}), table])
    tree, frontier = Tree.from_roots(np.arange(1), np.array([3])), np.arange(1)
    got, _ = drafter.expand(begun(drafter), tree, frontier, 3, drawing)
    want, _ = table.expand(None, tree, frontier, 3, drawing)
    assert got.draw is Draw.WITHOUT_REPLACEMENT
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.source == 1
    assert append(tree, frontier, got).source.tolist() == [-1, 1, 1, 1]


# Learning.


def test_finds_after_kept_nodes_are_learnt_from_and_no_others() -> None:
    drafter = FusedDrafter([Given({4: 0.5, 6: 0.25}, vocab=9), Given({6: 0.5})])
    before = begun(drafter)
    out, state = asked(drafter, before)
    tree = append(Tree.from_roots(np.arange(1), np.array([3])), np.arange(1), out)
    _, state = drafter.expand(state, tree, np.array([1, 2]), 4, Drawing())
    node = int(np.flatnonzero(tree.tokens == 4)[0])
    verdict = AcceptResult(
        (np.array([node]),), np.array([6])
    )  # 4 is accepted, where 6 was found; then 6 is chosen, as found
    after = drafter.commit(state, tree, verdict, TAPS)
    x = state.finds[0].x[0]
    assert (state.finds[1].x == x).all(), "the same everywhere"
    prior = Logistic.around(*_fused.GUIDED_WEIGHTS, prior=_fused.PRIOR)
    want = prior.learn(np.concatenate((x, x)), np.array([False, True]))
    trust = after.trust[1]
    assert (trust.weights[0, GUIDED] == want.weights).all()
    assert (trust.information[0, GUIDED] == want.information).all()
    assert trust.recent == pytest.approx([0.5 * 0.8 * 0.8 + 0.2])
    assert trust.weights[0, 0].tolist() == list(_fused.UNGUIDED_WEIGHTS)
    assert after.trust[0].weights[0, GUIDED].tolist() == list(_fused.GUIDED_WEIGHTS), (
        "the guide is never judged"
    )
    assert before.trust[1].weights[0, GUIDED].tolist() == list(_fused.GUIDED_WEIGHTS), (
        "the earlier state is as it was"
    )
    assert not after.finds


def test_a_node_that_was_verified_under_another_number_is_found_again() -> None:
    drafter = FusedDrafter([Given({4: 0.5, 5: 0.25}, vocab=9), Given({6: 0.5})])
    out, state = asked(drafter, begun(drafter))
    tree = append(Tree.from_roots(np.arange(1), np.array([3])), np.arange(1), out)
    node = int(np.flatnonzero(tree.tokens == 5)[0])
    assert node > 1
    _, state = drafter.expand(state, tree, np.array([node]), 4, Drawing())
    cut = tree.select(np.isin(np.arange(len(tree)), [0, node]))
    after = drafter.commit(state, cut, AcceptResult((np.array([1]),), np.array([6])), TAPS)
    assert after.trust[1].recent == pytest.approx([0.5 * 0.8 * 0.8 + 0.2]), (
        "wrong after the root, right after the node"
    )


@pytest.mark.parametrize("right", [True, False])
def test_trust_follows_what_was_accepted(right: bool) -> None:
    drafter = FusedDrafter([Given({4: 0.5, 5: 0.3}, vocab=9), Given({6: 0.5})])
    state, values = begun(drafter), []
    for _ in range(12):
        out, state = asked(drafter, state)
        values.append(float(np.exp(out.log_q[0, out.tokens[0] == 6][0])))
        verdict = AcceptResult((NOTHING,), np.array([6 if right else 4]))
        state = drafter.commit(state, Tree.from_roots(np.arange(1), np.array([3])), verdict, TAPS)
    assert values[0] < 0.001, "the guide gives it nothing, and a find is no more than evidence"
    if right:
        assert values[-1] > 0.9
        assert asked(drafter, state, 1)[0].tokens.tolist() == [[6]]
    else:
        assert values[-1] < values[0]
        assert np.exp(asked(drafter, state)[0].log_q[0, :2]) == pytest.approx(
            [0.5, 0.3], rel=1e-3
        ), "as the guide alone"


def test_learnt_weights_are_carried_on_and_sequences_are_joined() -> None:
    drafter = FusedDrafter([Given({4: 0.5}, vocab=9), Given({6: 0.5})])
    _, state = asked(drafter, begun(drafter, rows=2))
    verdict = AcceptResult(
        (NOTHING, NOTHING), np.array([6, 4])
    )  # right in one row, wrong in the other
    state = drafter.commit(state, Tree.from_roots(np.arange(2), np.array([3, 3])), verdict, TAPS)
    (one, other), (much, more) = (
        state.trust[1].weights[:, GUIDED],
        state.trust[1].information[:, GUIDED],
    )
    carried = drafter.carry(state)
    assert carried.parts == ((3, 3, 3, -1), (3, 3, 3, -1))
    together = carried.trust[1].weights[:, GUIDED]
    assert together.shape == (1, 4)
    assert together[0] == pytest.approx(np.linalg.solve(much + more, much @ one + more @ other))
    assert other[0] < together[0, 0] < one[0]
    assert carried.trust[1].information[0, GUIDED] == pytest.approx((much + more) / 2)
    again = begun(drafter, 3, carried)
    assert (again.trust[1].weights[:, GUIDED] == together).all()
    assert again.trust[1].recent.tolist() == [_fused.INITIAL_HIT_MEAN] * 3, "another text"
    assert again.parts[0] == (3, 3, 3, -1, 3, 3, 3)
    shorter = drafter.truncate(state, np.array([1, 1]))
    assert shorter.parts == ((3,), (3,))
    assert (shorter.trust[1].weights[:, GUIDED] == together).all()
    assert len(shorter.trust[1].recent) == 2


@dataclass(frozen=True)
class Trees:
    """What each row of a call was offered and wrote."""

    tokens: list[list[int]]
    trees: dict[int, list[list[tuple[int, float]]]]


def written(engine: Engine, requests: list[Request]) -> Trees:
    trees: dict[int, list[list[tuple[int, float]]]] = {r: [] for r in range(len(requests))}

    def told(events: list[Emitted]) -> None:
        for e in events:
            nodes = NOTHING if e.tree is None else e.tree.of_row(e.row)
            if e.tree is not None and len(nodes) > 1:
                trees[e.row].append(
                    [(int(e.tree.tokens[n]), round(float(e.tree.log_q[n]), 9)) for n in nodes]
                )

    return Trees(engine.write(requests, on_tokens=told).tokens, trees)


@pytest.mark.parametrize("policy", [PCT(), EAGLE2(nodes=12, depth=4)], ids=str)
def test_rows_are_drafted_for_as_if_alone(policy: Policy) -> None:
    q = torch.softmax(random_table(4, 1)[0].clamp(1e-3).log() * 0.5 + random_table(4, 7)[1], -1)
    drafter = FusedDrafter([TableDrafter(q), PLDDrafter(PLD()), PLDDrafter(PLD(ngram=1))])
    requests = [
        Request([0, 1, 2, 0, 1], 30),
        Request([3, 3, 1], 20, number=1),
        Request([2] * 9, 25, number=2),
    ]
    together = written(Engine(TABLE, drafter, policy, costs=COSTS), requests)
    assert len(together.trees[0]) > 5
    for i, request in enumerate(requests):
        engine = Engine(TABLE, drafter, policy, costs=COSTS)
        alone = written(engine, [request])
        assert together.tokens[i] == alone.tokens[0] == engine.plain([request]).tokens[0]
        assert together.trees[i] == alone.trees[0]


# Parts.


def test_each_part_gets_the_taps_it_asked_for() -> None:
    target = tiny_target()
    one, other = (
        Given({4: 0.5}, 61, HiddenStateSpec(hidden=(-1, 2))),
        Given({4: 0.5}, 61, HiddenStateSpec(hidden=(2,), kv=(1,))),
    )
    drafter = FusedDrafter([one, other])
    assert drafter.needs == HiddenStateSpec((-1, 2), (1,))
    prompts = [np.array([1, 2, 3])]
    hidden_states = target.prefill(target.new_cache(1, 8), prompts, drafter.needs).hidden_states
    state = drafter.start(prompts, np.array([4]), hidden_states)
    drafter.commit(
        state,
        Tree.from_roots(np.arange(1), np.array([4])),
        AcceptResult((NOTHING,), np.array([5])),
        hidden_states,
    )
    assert [list(t.hidden) for t in one.given] == [[-1, 2]] * 2
    assert [list(t.hidden) for t in other.given] == [[2]] * 2


def test_probes_are_one_parts() -> None:
    drafter = FusedDrafter([Given({4: 0.5}), Probing({4: 0.5})])
    probes = drafter.probes(begun(drafter))
    assert probes is not None
    assert probes.tokens.tolist() == [3]
    quiet = FusedDrafter([Given({4: 0.5}), Given({5: 0.5})])
    assert quiet.probes(begun(quiet)) is None
    with pytest.raises(
        UserError, match=r"'given .*' and 'given .*' cannot be fused: each adds probes"
    ) as told:
        FusedDrafter([Probing({4: 0.5}), Given({5: 0.5}), Probing({6: 0.5})])
    assert "\n" not in str(told.value)


def test_described_tells_fusions_apart() -> None:
    assert (
        FusedDrafter([Given({4: 0.5}), Given({5: 0.5})]).description
        == "given {4: 0.5} + given {5: 0.5}"
    )
    opened = [
        build("drafter", spec).open(TABLE).description
        for spec in ("pld+pld:ngram=2", "pld:ngram=2+pld", "pld+pld")
    ]
    assert len(set(opened)) == 3


def test_copying_gains() -> None:
    q = torch.full((4, 4), 0.25)  # knows nothing
    drafters = TableDrafter(q), PLDDrafter(PLD())
    steps = []
    for drafter in (*drafters, FusedDrafter(drafters)):
        engine = Engine(TABLE, drafter, EAGLE2(nodes=6, depth=5, width=3), costs=COSTS)
        first, second = Request([0], 40), Request([1], 40)
        got = [engine.write([r]) for r in (first, second)]
        assert [g.tokens for g in got] == [engine.plain([r]).tokens for r in (first, second)]
        steps.append(sum(g.stats.acceptance_length for g in got))
    assert steps[2] > max(steps[:2])


def test_hits_without_a_pass_are_counted() -> None:
    drafter = FusedDrafter((TableDrafter(torch.full((4, 4), 0.25)), PLDDrafter(PLD())))
    asked, layered = (
        [
            w.finds
            for w in Engine(TABLE, drafter, policy, costs=COSTS)
            .write([Request([0], 20)])
            .stats.work
        ]
        for policy in (Yield(), EAGLE2(nodes=6, depth=5, width=3))
    )
    assert all(asked[:-1]), "in the last step there is no room for a draft"
    assert not any(layered)


# The conformance suite.

FUSIONS = (
    "edd+pld",
    "medusa+pld",
    "edd+suffix",
    "lookahead+glide+medusa",
    "pld+pld:ngram=1",
    "edd+token_recycling",
)
POLICIES = ("chain", "vct", "pct", "eagle2", "static", "c2t", "trie", "yield", "mcts")


@pytest.fixture(scope="module")
def suite() -> Suite:
    ready = Suite()
    for spec in FUSIONS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            method: Fused = build("drafter", spec)
            ready._examples[spec] = method.example(ready.target)
    return ready


SOME_CHECKS = [check for check in CHECKS if check not in ("joining-8", "scheduled-8")]
"""Of two checks that differ by their number of rows alone, the one with few."""
CASES = [
    (SOME_CHECKS[i % len(SOME_CHECKS)], *parts)
    for i, parts in enumerate(pairwise([FUSIONS, POLICIES, ("greedy", "match")]))
]
"""Any two parts meet, under the checks in turn."""


@pytest.mark.parametrize("case", [Case(*c) for c in CASES], ids=str)
def test_conformance(suite: Suite, case: Case) -> None:
    suite.run(case)
