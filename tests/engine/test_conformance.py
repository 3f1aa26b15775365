"""Every registered drafter, policy and acceptor under the public suite, and proof that the suite can fail."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from draftree.acceptors.base import Acceptor
from draftree.acceptors.greedy import Greedy
from draftree.acceptors.match import Match
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.drafters.lm import LMDrafter
from draftree.drafters.medusa import MedusaDrafter
from draftree.drafters.neural import kv_cached_drafter
from draftree.drafters.neural.decoding_state import rewind
from draftree.engine import Engine, generate_plain
from draftree.errors import NotANumber, UserError
from draftree.kernels.pass_layout import pack_trees
from draftree.loop import Components, decode
from draftree.models.causal_lm import CausalLM
from draftree.models.kv_cache import SlotCache
from draftree.policies.base import Layered, Policy, append
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.registry import KINDS, check_exact, names, part
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import RandomSource
from draftree.sampling.params import Sampling
from draftree.target import target as models_target
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes, Target
from draftree.testing import (
    Always,
    Case,
    Coached,
    Suite,
    TableDrafter,
    cases,
    random_table,
    table_target,
)
from draftree.testing.__main__ import main as run_suite
from draftree.testing.conformance import (
    CHECKS,
    COSTS,
    FULL_CHECKS,
    PAIRWISE,
    PAUSED,
    SCRIPTED,
    batch_cases,
    pairwise,
    preference,
)
from draftree.tree import AcceptResult, Candidates, Draw, Ints, Tree
from selection import one_in


@pytest.fixture(scope="module")
def suite() -> Suite:
    return Suite()


@pytest.mark.parametrize("case", batch_cases((1, 3, 8))[::1201], ids=str)
def test_continuous_batching_conforms(suite: Suite, case: Case) -> None:
    """A slice; `python -m draftree.testing --batches 1 3 8` runs every pairing."""
    suite.run(case)


def test_every_pairing_runs_in_batches_of_the_sizes_asked_for() -> None:
    parts = {kind: len(names(kind)) for kind in KINDS}
    assert (
        len(batch_cases((1, 3, 8)))
        == 3 * (parts["drafter"] + len(SCRIPTED)) * parts["policy"] * parts["acceptor"]
    )
    assert {case.check for case in batch_cases((1, 3, 8))} == {
        "scheduled-1",
        "scheduled",
        "scheduled-8",
    }
    assert len(batch_cases((2,), {"drafter": ["edd"], "acceptor": ["greedy"]})) == parts["policy"]


def exact(case: Case) -> bool:
    """Whether the acceptor may verify the policy's trees; other pairings are refused."""
    try:
        check_exact(part("policy", case.policy)(), part("acceptor", case.acceptor)())
    except UserError:
        return False
    return True


def some() -> list[Case]:
    """Return the cases that run here, for `python -m draftree.testing` runs all.

    Of drafter × policy every third pairing runs with one sequence, the others with three, under
    acceptors in turn; further ones where a drafter has not met an acceptor then. The checks that
    are covered pairwise are there, those of eight sequences with every second of their pairings.
    """
    alone = {(c.drafter, c.policy): c for c in cases() if c.check == "one"}
    met, found, others = set[tuple[str, str]](), list[Case](), list[Case]()
    for number, ((drafter, policy), one) in enumerate(alone.items()):
        ragged = [Case("ragged", drafter, policy, rule) for rule in names("acceptor")]
        options = [one] if number % 3 == 1 else list(filter(exact, ragged))
        found.append(max(options, key=lambda case: len(accepting(case) - met)))
        others += [case for case in ragged if exact(case)]
        met |= accepting(found[-1])
    for case in others:
        if accepting(case) - met:
            found.append(case)
            met |= accepting(case)
    rest = [case for case in cases() if case.check in PAIRWISE and exact(case)]
    large = [case for case in rest if case.check.endswith("-8")]
    paused = [case for case in cases() if case.check in PAUSED and exact(case)]
    return [*found, *(case for case in rest if case not in large[1::2]), *paused[::2]]


def accepting(case: Case) -> set[tuple[str, str]]:
    """Return the pairs of an acceptor with the drafter and with the policy."""
    return {(case.acceptor, case.drafter), (case.acceptor, case.policy)}


SOME = some()


@pytest.mark.parametrize("case", SOME, ids=str)
def test_case(suite: Suite, case: Case) -> None:
    suite.run(case)


def test_any_two_parts_meet_in_the_cases_that_run_here() -> None:
    """Where they are exact together; other pairings are refused, see the next test."""
    wanted = {c for c in cases(full=True) if c.check == "ragged" and exact(c)}
    everywhere = [case for case in SOME if case.check in FULL_CHECKS]
    for kinds in combinations(("drafter", "policy", "acceptor"), 2):
        met, all_ = (
            {tuple(getattr(c, kind) for kind in kinds) for c in found}
            for found in (everywhere, wanted)
        )
        assert met == all_, kinds
    drafters = {*SCRIPTED, *names("drafter")}
    for check in ("one", "ragged", "limit", *PAUSED):
        assert {c.drafter for c in SOME if c.check == check} == drafters, check


@pytest.mark.parametrize("policy", names("policy"))
def test_pairings_that_are_not_exact_are_refused(policy: str) -> None:
    """And not skipped by accident: the suite counts them."""
    ask = Suite()
    for acceptor in names("acceptor"):
        case = Case("ragged", "never", policy, acceptor)
        refused = not exact(case)
        if refused:
            ask.run(case)
        assert (f"{policy} with {acceptor}" in ask.coverage.refused) == refused


@pytest.mark.parametrize("acceptor", names("acceptor"))
def test_plain_rows_are_independent(suite: Suite, acceptor: str) -> None:
    suite.baseline(acceptor)


def test_plain_is_what_transformers_writes(suite: Suite) -> None:
    for length in (1, 6, 11):
        request = Request(suite.prompt(length), 9)
        ids = torch.tensor([request.prompt])
        theirs = suite.target.decoder.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=9,
            do_sample=False,
            pad_token_id=0,
        )
        suite.same(request, Sampling(), theirs[0, length:].tolist(), "transformers")


def test_scripts_meet_accepted_paths_of_all_lengths_and_later_siblings() -> None:
    fresh = Suite()
    for case in cases(full=True)[::16]:
        if case.drafter in SCRIPTED and case.check in ("one", "ragged", "eos"):
            fresh.run(case)
    seen = fresh.coverage
    assert set(seen.accepted) >= set(range(7))
    assert set(seen.siblings) >= {0, 1, 2}
    assert seen.inside >= 6, "no text ended in the middle of an accepted path"
    assert not seen.ties
    assert all(word in str(seen) for word in ("always", "pct", "match", "ragged", "accepted"))


def test_always_is_accepted_and_never_is_not(suite: Suite) -> None:
    sampling, request = Sampling(), Request(suite.prompt(7), 13)
    lengths = {}
    for name in SCRIPTED:
        engine = Engine(
            suite.target, suite.drafter(name, [request], sampling), Chain(4), costs=COSTS
        )
        lengths[name] = engine.write([request]).stats.acceptance_length
    assert lengths["always"] == 4.0, "12 tokens in three steps: 5, 5 and the last 2"
    assert lengths["never"] == 1.0 < lengths["sometimes"] < 4.0


def test_every_case_is_there() -> None:
    chosen = cases()
    assert len(set(chosen)) == len(chosen)
    parts = {
        "drafter": (*SCRIPTED, *names("drafter")),
        "policy": names("policy"),
        "acceptor": names("acceptor"),
    }
    everywhere = [c for c in chosen if c.check == "ragged"]
    for one, other in combinations(parts, 2):
        met = {(getattr(c, one), getattr(c, other)) for c in everywhere}
        assert met == set(product(parts[one], parts[other])), "any two meet"
    alone = {
        c.acceptor
        for c in cases(only={"drafter": ["edd"], "policy": ["vct"]})
        if c.check == "ragged"
    }
    assert alone == set(parts["acceptor"])
    rest = [c for c in chosen if c.check in PAIRWISE]
    for check in PAIRWISE:
        for kind, known in parts.items():
            assert {getattr(c, kind) for c in rest if c.check == check} == set(known)
    assert len(cases(full=True)) == prod(map(len, parts.values())) * (
        len(FULL_CHECKS) + len(PAIRWISE) + len(PAUSED)
    )


def test_pairwise_meets_every_pair_in_few_rows() -> None:
    rows = pairwise(["abc", "de", "fgh", "i"])
    assert {(r[0], r[2]) for r in rows} == {(a, b) for a in "abc" for b in "fgh"}
    assert {(r[1], r[2]) for r in rows} == {(a, b) for a in "de" for b in "fgh"}
    assert {(r[0], r[1]) for r in rows} == {(a, b) for a in "abc" for b in "de"}
    assert len(rows) == 9


# What must make the suite fail.


@pytest.mark.parametrize(
    "words", [("--start", "1000000"), ("--drafter", "never", "--every", "1000")]
)
def test_a_run_that_accepts_nothing_fails(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    few = ("--policy", "chain", "--acceptor", "greedy")
    monkeypatch.setattr(sys, "argv", ["testing", *few, *words])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert run_suite() == 1
    assert "accepted no drafted token" in capsys.readouterr().err


@dataclass(frozen=True)
class Credulous(Acceptor):
    """Takes the first child whatever the target says."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        paths, bonus = [], []
        for root in range(tree.roots):
            child = tree.children(root)[:1]
            paths.append(child)
            bonus.append(p.argmax(int(child[0]) if child.size else root))
        return AcceptResult(tuple(paths), np.array(bonus))


@dataclass(frozen=True)
class Hasty(Acceptor):
    """Stops one node too late: the bonus is drawn after a node that was not accepted."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        right = Greedy().accept(tree, p, chance)
        return replace(
            right,
            bonus=np.array(
                [p.argmax(int(max(tree.of_row(int(tree.row[r]))))) for r in range(tree.roots)]
            ),
        )


@pytest.mark.parametrize("wrong", [Credulous(), Hasty()], ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_wrong_acceptor_fails(suite: Suite, wrong: Acceptor, rows: int) -> None:
    requests = [Request(suite.prompt(4 + n), 6, number=n) for n in range(rows)]
    with pytest.raises(AssertionError, match=r"differs from plain|plain decoding writes"):
        suite.write(Case("mutant", "never", "vct", "greedy"), VCT(2, 3), wrong, requests)


def test_a_policy_beyond_the_room_fails(suite: Suite) -> None:
    class Deep(Policy):
        def draft(self, expand, tree, costs, room, memory):  # type: ignore[no-untyped-def]
            return VCT(1, 3).draft(expand, tree, costs, replace(room, depth=room.depth + 1), memory)

    with pytest.raises(AssertionError, match="deeper than the room"):
        suite.write(
            Case("mutant", "always", "deep", "greedy"),
            Deep(),
            Greedy(),
            [Request(suite.prompt(4), 3)],
        )


def test_a_drafter_that_forgets_a_token_fails(suite: Suite) -> None:
    class Forgetful(Drafter):  # type: ignore[type-arg]
        def __init__(self, inner: Drafter) -> None:  # type: ignore[type-arg]
            self.inner = inner

        def start(self, prompts, roots, hidden_states, state=None, rows=None):  # type: ignore[no-untyped-def]
            return self.inner.start(prompts, roots, hidden_states, state, rows)

        def expand(self, state, tree, frontier, k, drawing):  # type: ignore[no-untyped-def]
            return self.inner.expand(state, tree, frontier, k, drawing)

        def commit(self, state, tree, verdict, hidden_states):  # type: ignore[no-untyped-def]
            after = self.inner.commit(state, tree, verdict, hidden_states)
            return self.inner.truncate(after, after.cache.lengths - 1)

        def truncate(self, state, lengths, rows=None):  # type: ignore[no-untyped-def]
            return self.inner.truncate(state, lengths, rows)

    forgetful = Suite()
    forgetful.drafter("vdm", [], Sampling())
    forgetful._examples["vdm"] = Forgetful(forgetful._examples["vdm"])
    with pytest.raises(AssertionError, match="away from a fresh start"):
        forgetful.run(Case("caches", "vdm", "chain", "greedy"))


def test_a_cache_that_keeps_the_wrong_slots_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order(self: Target, cache, tree, verdict):  # type: ignore[no-untyped-def]
        for root, path in enumerate(verdict.paths):
            row = int(tree.row[root])
            cache.keep(row, cache.lengths[row] + np.arange(len(path) + 1))

    monkeypatch.setattr(Target, "commit", in_order)
    with pytest.raises(AssertionError):
        Suite().run(Case("caches", "sometimes", "vct", "greedy"))


def test_a_tie_is_told_from_an_error(suite: Suite) -> None:
    request, sampling = Request(suite.prompt(7), 5), Sampling()
    want = suite.expected_tokens(request, sampling)
    other = (want[2] + 1) % 61
    for drawn in (sampling, Sampling(temperature=1.0)):
        assert preference(suite.target, request, drawn, want[:3], other) > 1e-6
    with pytest.raises(AssertionError, match="differs from plain"):
        suite.same(request, sampling, [*want[:2], (want[2] + 1) % 61, *want[3:]], "here")
    with pytest.raises(AssertionError, match="plain decoding writes 5"):
        suite.same(request, sampling, want[:4], "here")
    level = Suite(table_target(torch.full((4, 3, 3), 1 / 3)))
    level.same(Request([0], 3), sampling, [1, 0, 0], "a tie")
    assert level.coverage.ties == ["a tie"]


# The table model itself.


def test_the_table_model_notices_a_wrong_mask_position_or_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = table_target(random_table(4, 0))
    prompt, roots = [np.array([1, 2, 3])], Tree.from_roots(np.array([0]), np.array([0]))
    both = Candidates(np.array([[1, 2]]), np.zeros((1, 2)))
    tree = roots.append(np.array([0, 0]), np.array([1, 2]), np.zeros(2), np.zeros(2), both)

    def logits(spoil=lambda cache: None):  # type: ignore[no-untyped-def]
        cache = target.new_cache(1, 8)
        target.prefill(cache, prompt, HiddenStateSpec())
        spoil(cache)
        return target.verify(cache, tree, HiddenStateSpec()).logits

    table = target.decoder.model.lm_head.weight.T.reshape(5, 4, 4)
    assert torch.equal(logits(), torch.stack([table[3, 0], table[0, 1], table[0, 2]]))
    assert logits(lambda cache: cache.truncate(np.array([2])))[0].allclose(table[2, 0])
    assert logits(lambda cache: cache.keep(0, np.array([0]))).isnan().all(), (
        "position 3 is missing, 0 is there twice"
    )
    seen_by_all = np.tri(3, dtype=np.bool_).ravel()
    monkeypatch.setattr(
        models_target, "pack_trees", lambda *columns: (*pack_trees(*columns)[:-1], seen_by_all)
    )
    spoilt = logits()
    assert spoilt[2].isnan().all(), "node 2 sees its sibling"
    assert not spoilt[:2].isnan().any()


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.3, seed=2)], ids=["greedy", "match"]
)
def test_the_table_model_under_ragged_batches(sampling: Sampling) -> None:
    target, q = table_target(random_table(4, 1)), random_table(4, 2)[0]
    requests = [Request([0], 9), Request([3, 1, 2, 2], 4, number=1), Request([2] * 12, 9, number=2)]
    engine = Engine(target, TableDrafter(q), VCT(2, 3))
    apart = [engine.plain([r], sampling).tokens[0] for r in requests]
    together = engine.write(requests, sampling)
    assert together.tokens == apart
    assert [len(t) for t in apart] == [9, 4, 5]
    assert together.stats.acceptance_length > 1.3


# What the default policies and examples do not come across.


@dataclass(frozen=True)
class Renumbering(Layered):
    """Drops the second child of each root at the end, so that the nodes verified are not numbered as they were drafted."""

    candidates: ClassVar[int] = 2
    deepest: ClassVar[int] = 3

    def grow(self, tree: Tree, frontier: Ints, candidates: Candidates) -> Tree:
        return append(tree, frontier, candidates)

    def finish(self, tree: Tree) -> Tree:
        second = [tree.children(root)[1:] for root in range(tree.roots)]
        return tree.select(~tree.ancestors[:, np.concatenate(second)].any(axis=1))


@pytest.mark.parametrize(
    ("drafter", "check"), one_in(2, [*SCRIPTED, *names("drafter")], ["ragged", "caches"])
)
def test_drafters_follow_a_tree_that_was_renumbered(suite: Suite, drafter: str, check: str) -> None:
    CHECKS[check](suite, Case(check, drafter, "renumbering", "greedy"), Renumbering(), Greedy())


def test_a_block_that_is_read_along_paths_conforms() -> None:
    along = Suite()
    example = part("drafter", "jetspec")(conditioned=True).example(along.target)
    along._examples["jetspec"] = example
    pairs = {
        "ragged": "yield",
        "limit": "ddtree",
        "caches": "chain",
        "reuse": "eagle2",
        "processed": "beam",
    }
    for check, policy in pairs.items():
        along.run(Case(check, "jetspec", policy, "match"))


def test_a_drafter_drafts_nothing_beyond_its_own_context(suite: Suite) -> None:
    config = GPT2Config(
        vocab_size=61,
        n_positions=12,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        short = LMDrafter(Target(CausalLM(GPT2LMHeadModel(config).double()), "short"))
    for lengths in ((6,), (11,), (12,), (20,), (4, 12, 8)):
        requests = [Request(suite.prompt(n), 9, number=n) for n in lengths]
        plans = [[*r.prompt, *suite.reference(r, Sampling())] for r in requests]
        engine = Engine(suite.target, Coached(short, Always(plans, 61)), Chain(3), costs=COSTS)
        written = engine.write(requests)
        assert written.tokens == [suite.expected_tokens(r, Sampling()) for r in requests]


# Rows that ride along.

Committed = tuple[Ints, ...]


class Window(Drafter[Committed]):
    """Sends two probes a row behind the root, and keeps what came back."""

    sends_probes = True

    def __init__(self, inner: Always, vocab: int) -> None:
        self.inner = inner
        self.vocab = vocab
        self.back = list[tuple[list[int], list[int], torch.Tensor]]()

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Committed | None = None,
        rows: Ints | None = None,
    ) -> Committed:
        return self.inner.start(prompts, roots, hidden_states, state, rows)

    def expand(
        self, state: Committed, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Committed]:
        return self.inner.expand(state, tree, frontier, k, drawing)

    def truncate(self, state: Committed, lengths: Ints, rows: Ints | None = None) -> Committed:
        return self.inner.truncate(state, lengths, rows)

    def probes(self, state: Committed) -> Probes:
        rows = np.repeat(np.arange(len(state)), 2)
        positions = np.array([len(t) + i for t in state for i in (1, 2)])
        visible = np.tri(2 * len(state), dtype=np.bool_) & (rows[:, None] == rows)
        return Probes(np.tile([5, 6], len(state)), rows, positions, visible)

    def commit(
        self, state: Committed, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Committed:
        assert hidden_states.probe_logits is not None
        for root in range(tree.roots):
            row = int(tree.row[root])
            text = [*state[row].tolist(), int(tree.tokens[root])]
            self.back.append((text, [5, 6], hidden_states.probe_logits[2 * row : 2 * row + 2]))
        return self.inner.commit(state, tree, verdict, hidden_states)


@pytest.mark.parametrize("rows", [1, 3])
def test_probes_ride_along_and_change_nothing(suite: Suite, rows: int) -> None:
    requests = [Request(suite.prompt(5 + 2 * n), 4 + 3 * n, number=n) for n in range(rows)]
    plans = [[*r.prompt, *suite.reference(r, Sampling())] for r in requests]
    window = Window(Always(plans, 61), 61)
    texts = SequenceBatch(suite.target.new_cache(rows, 8))
    for _ in decode(Components(suite.target, window, VCT(2, 2), Greedy(), COSTS), texts, requests):
        pass
    assert texts.written == [suite.expected_tokens(r, Sampling()) for r in requests]
    assert len(window.back) == len(texts.stats.steps)
    for text, probes, logits in window.back:
        with torch.inference_mode():
            alone = suite.target.decoder.model(
                input_ids=torch.tensor([text + probes]), use_cache=False
            ).logits[0, -2:]
        assert (logits - alone).abs().max() < 1e-5
    deepest = max(s.nodes for s in texts.stats.steps)
    assert deepest == 2 + 4 + 2, "probes count as nodes"


def test_logits_that_are_no_numbers_are_refused() -> None:
    target = table_target(random_table(3, 0))
    target.decoder.model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(NotANumber, match="not finite"):
        Engine(target, TableDrafter(torch.eye(3)), Chain()).plain([Request([0], 2)])


def test_logits_that_are_no_numbers_after_a_rejected_draft_do_not_matter() -> None:
    table = torch.zeros(4, 3, 3, dtype=torch.float64)
    table[:, :, 0], table[:, :, 1] = 0.6, 0.4
    target = table_target(table)
    target.decoder.model.lm_head.weight.data[:, 2::3] = torch.nan  # after token 2
    request = Request([0, 1], 5)
    drafter = TableDrafter(torch.tensor([[0.5, 0.1, 0.4]] * 3))
    engine = Engine(target, drafter, VCT(2, 1), costs=Costs({1: 0.1}, {1: 1.0}))
    found = engine.write([request])
    assert found.stats.steps[0].nodes > 1
    assert found.tokens == generate_plain(target, [request]).tokens


def test_text_does_not_depend_on_neighbours_or_their_order(suite: Suite) -> None:
    sampling = Sampling(temperature=1.2, seed=5)
    requests = [Request(suite.prompt(3 + 2 * n), 6, number=n) for n in range(3)]
    engine = Engine(
        suite.target, suite.drafter("vdm", requests, sampling), VCT(2, 3), Match(), COSTS
    )
    forwards = engine.write(requests, sampling).tokens
    backwards = engine.write(requests[::-1], sampling).tokens[::-1]
    assert forwards == backwards == [engine.plain([r], sampling).tokens[0] for r in requests]
    assert engine.write([replace(requests[0], number=7)], sampling).tokens != forwards[:1]
    assert engine.write(requests[:1], replace(sampling, seed=6)).tokens != forwards[:1]


def rows_mixed_up(patch: pytest.MonkeyPatch) -> None:
    put = SlotCache.replace_sequences
    patch.setattr(
        SlotCache,
        "replace_sequences",
        lambda self, rows, part: put(self, (rows + 1) % self.rows, part),
    )


def others_forgotten(patch: pytest.MonkeyPatch) -> None:
    start = MedusaDrafter.start
    patch.setattr(
        MedusaDrafter,
        "start",
        lambda self, p, r, hidden_states, state=None, rows=None: start(
            self, p, r, hidden_states, None, rows
        ),
    )


def waiting_tokens_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        kv_cached_drafter, "rewind", lambda state, lengths, rows: rewind(state, lengths, None)
    )


def cache_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "truncate", lambda self, lengths: None)


def one_sampling_for_all(patch: pytest.MonkeyPatch) -> None:
    right = SequenceBatch.distributions

    def wrong(
        self: SequenceBatch, tree: Tree, logits: torch.Tensor, *known: Any, **drawn: bool
    ) -> Distributions:
        p = right(self, tree, logits, *known, **drawn)
        greedy = self.requests[int(tree.row[0])].sampling.greedy
        p.greedy = lambda node: greedy
        return p

    patch.setattr(SequenceBatch, "distributions", wrong)


@pytest.mark.parametrize(
    ("mistake", "drafter", "policy"),
    [
        (rows_mixed_up, "always", "vct"),
        (others_forgotten, "medusa", "vct"),
        (waiting_tokens_dropped, "lm", "chain"),
        (cache_kept, "always", "vct"),
        (one_sampling_for_all, "always", "vct"),
    ],
)
def test_a_mistake_with_rows_that_come_and_go_is_noticed(
    suite: Suite,
    mistake: Callable[[pytest.MonkeyPatch], None],
    drafter: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("joining-8", drafter, policy, "match")
    suite.run(case)
    mistake(monkeypatch)
    with pytest.raises(
        (AssertionError, ValueError, IndexError)
    ):  # a cache that holds too much leaves nothing to read
        suite.run(case)
