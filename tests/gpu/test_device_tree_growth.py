"""Trees that grow on the device: the host's trees, node for node, and the same texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import draftree.drafting.step
from architectures import model
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.drafters.lm import LMDrafter
from draftree.drafters.neural.shared_vocabulary import Shared
from draftree.errors import DraftreeWarning
from draftree.loop import Components, State, admit, decode, release, step
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch, hide_far, write_mask
from draftree.models.graph_capture import Capture, EagerCapture, Graphs
from draftree.online_logistic import Logistic
from draftree.policies._device_growth import Outlook, grow, leading_tokens
from draftree.policies.base import Policy
from draftree.policies.beam import Beam
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.pct import PCT
from draftree.policies.static import Static
from draftree.policies.vct import VCT
from draftree.policies.yield_ import Learned, Yield
from draftree.registry import build, part
from draftree.request import Emitted, Request
from draftree.sampling import devices
from draftree.sampling.draft_sampling import Drawing, draw_candidates, top_k
from draftree.sampling.params import Sampling
from draftree.target.device_tree import Choose, Layers, NodeBatch, Nodes
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import PassRecorder, tiny_target
from draftree.tree import Candidates, DraftVocab, Ints, Tree, TreeBudget
from forests import random_forest
from selection import one_in

POLICIES: tuple[Policy, ...] = (
    Chain(4),
    Chain(1),
    VCT(2, 3),
    VCT(3, 4, layer_top=5),
    Beam(3, 4, survivors=False),
    Beam(12, 2, survivors=False),
    EAGLE2(nodes=9, depth=4, width=3),
    EAGLE2(nodes=500, depth=3, width=4),
    EAGLE2(nodes=12, depth=4, width=3, expand_by="confidence"),
    Beam(3, 4, survivors=True),
    Beam(1, 3, survivors=True),
    Static("medusa/vicuna_7b_stage1"),
    Static(),
    PCT(width=4, max_depth=5, ratio=0.1),
    PCT(width=4, max_depth=3, leaf_threshold=0.2, ratio=0.2),
    PCT(width=3, max_depth=5, leaf_threshold=0.02, ratio=0.05, own=0.2),
)
VOCAB = 9


class Paths:
    """Logits that depend on a path alone, drawn from few values, so that there are many ties; some are −∞, few paths are NaN.

    Args:
        seed: of the draws.
        broken: how often a path's logits are no numbers.
        dtype: of the logits.
    """

    def __init__(self, seed: int, broken: float, dtype: torch.dtype = torch.float64) -> None:
        self._seed, self._broken, self._dtype = seed, broken, dtype

    def __call__(self, row: int, path: Sequence[int]) -> Tensor:
        rng = np.random.default_rng([self._seed, row, *path])
        logits = rng.choice([0.0, 0.0, 1.0, 2.5, -np.inf], VOCAB)
        logits[rng.integers(VOCAB)] = rng.choice([0.0, 3.0])
        if rng.random() < self._broken:
            logits[rng.integers(VOCAB)] = rng.choice([np.nan, np.inf])
        return torch.from_numpy(logits).to(self._dtype)

    def expand(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        """As a drafter does on the host."""
        logits = torch.stack(
            [self(int(tree.row[n]), tree.tokens[tree.path(int(n))].tolist()) for n in frontier]
        )
        return draw_candidates(logits, k, Drawing(), tree.row[frontier], tree.depth[frontier])


class Fakes(Layers):
    """Passes whose logits are those of the path that each node is told to see."""

    device = torch.device("cpu")

    def __init__(self, paths: Paths, rows: int) -> None:
        self._paths, self.begin = paths, np.zeros(rows, np.int64)

    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        return self.below(nodes, 1, choose)

    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        seen, tokens = (
            nodes.lines(nodes.fed[:, -count:], nodes.fed),
            nodes.tokens.gather(1, nodes.fed),
        )
        rows = [
            [self._paths(r, tokens[r][mine].tolist()) for mine in seen[r]]
            for r in range(len(tokens))
        ]
        return choose(torch.stack([torch.stack(row) for row in rows]), nodes, None)

    def state(self, fed: Sequence[Ints]) -> Any:
        return None


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("depth", [(9,), (2,), (9, 9, 9), (2, 9, 0), (3, -1, 1)], ids=str)
def test_a_tree_is_the_hosts(policy: Policy, depth: tuple[int, ...]) -> None:
    for seed in range(6):
        paths, bounds = Paths(seed, broken=0.1 * (seed % 3)), np.array(depth)
        live, tokens = np.flatnonzero(bounds >= 0), np.arange(len(depth)) % VOCAB
        roots, room = Tree.from_roots(live, tokens[live]), TreeBudget(np.maximum(bounds, 0), 512)
        plan = policy.plan_step(Outlook(COSTS, roots, room, None, 9, 8 if seed % 2 else 120, 64))
        assert plan is not None
        room = (
            TreeBudget(room.depth, plan.nodes) if isinstance(policy, PCT) and plan.nodes else room
        )
        wanted = policy.draft(paths.expand, roots, COSTS, room, None)
        grown = grow(plan, Fakes(paths, len(depth)), tokens, bounds, np.zeros_like(bounds))
        best = grown.nodes.best(grown.count, grown.rank(grown.nodes))
        told = grown.to_host(grown.report(grown.nodes, best).numpy())
        tree = told.tree
        ids, depths = grown.nodes.tokens.gather(1, best), grown.nodes.depth.gather(1, best)
        seen = grown.nodes.lines(best, best)
        for mine, its in ((tree, wanted), (tree.whole or tree, wanted.whole or wanted)):
            for name in (
                "tokens",
                "parents",
                "depth",
                "row",
                "log_q",
                "score",
                "source",
                "entropy",
                "number",
                "q_row",
            ):
                assert np.array_equal(getattr(mine, name), getattr(its, name)), name
        for row in live.tolist():
            nodes = wanted.of_row(row)
            n = len(nodes)
            assert ids[row, :n].tolist() == wanted.tokens[nodes].tolist()
            assert depths[row, :n].tolist() == wanted.depth[nodes].tolist()
            assert np.array_equal(seen[row, :n, :n].numpy(), wanted.ancestors[np.ix_(nodes, nodes)])
            assert not seen[row, :n, n:].any(), "a node sees padding"
        assert seen.diagonal(dim1=1, dim2=2).all(), "padding has to see something"
        fed = np.concatenate([f.ravel() for f in told.fed])
        assert sorted(set(fed[fed >= 0].tolist())) == sorted(fed[fed >= 0].tolist()), (
            "a node is fed once"
        )


CURVES = (
    COSTS,
    Costs({1: 0.1, 8: 0.12, 64: 0.3}, {1: 1.0, 8: 1.05, 16: 1.3, 64: 3.0}, catch_up=0.05),
    Costs({1: 0.02}, {1: 1.0, 64: 1.02}),
    Costs({1: 0.2, 4: 0.3}, {1: 1.0, 4: 1.3, 64: 8.0}),
)


@pytest.mark.parametrize("costs", CURVES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tree_of_yield_is_the_hosts(costs: Costs, rows: int, dtype: torch.dtype) -> None:
    """From the same logits; the bits of its values are compared, too."""
    policy = Yield(width=3, depth=4)
    drafted = 0
    stopped = set[int]()
    for seed in range(25):
        rng = np.random.default_rng(seed)
        paths, depth = Paths(seed, 0.1 * (seed % 3), dtype), rng.integers(0, 6, rows)
        memory = Learned(
            acceptance={0: Logistic.around(*rng.normal([0, 1, 0.5, -0.1, -0.1], 0.3), prior=1.0)} if seed % 2 else {},
            recent=float(rng.uniform(0.3, 0.95)), beyond=float(rng.uniform(0, 1)), regret_budget=float(rng.uniform(0, 12)),
            gained=float(rng.uniform(0, 90)), spent=30.0,
        )  # fmt: skip
        roots, room = (
            Tree.from_roots(np.arange(rows), np.arange(rows) % VOCAB),
            TreeBudget(depth, 512),
        )
        wanted = policy.draft(paths.expand, roots, costs, room, memory)
        plan = policy.plan_step(Outlook(costs, roots, room, memory, 12, 255, 32))
        if plan is None:
            assert not wanted.drafted or rows > 1
            continue
        assert plan.first is not None
        bounds = np.where(np.isin(np.arange(rows), plan.first), depth, 0)
        grown = grow(plan, Fakes(paths, rows), roots.tokens, bounds, np.zeros(rows, np.int64))
        best = grown.nodes.best(grown.count, grown.rank(grown.nodes))
        tree = grown.to_host(grown.report(grown.nodes, best).numpy()).tree
        drafted += wanted.drafted
        stopped.add(int(wanted.depth.max()))
        for mine, its in ((tree, wanted), (tree.whole or tree, wanted.whole or wanted)):
            for row in range(rows):  # whose nodes the host numbers in another order
                a, b = mine.of_row(row), its.of_row(row)
                for name in ("tokens", "depth"):
                    assert getattr(mine, name)[a].tolist() == getattr(its, name)[b].tolist(), name
                assert np.array_equal(mine.ancestors[np.ix_(a, a)], its.ancestors[np.ix_(b, b)])
                for name in ("score", "log_q", "entropy"):
                    assert getattr(mine, name)[a].tobytes() == getattr(its, name)[b].tobytes(), name
    assert drafted > 30
    assert len(stopped) > 2


@pytest.mark.parametrize("rows", [1, 3])
def test_a_tree_that_probes_is_the_hosts(rows: int) -> None:
    """Where drafting does not pay, one node of each row is verified now and then; the best child, the first of equals."""
    policy = Yield(width=3)
    costs = Costs({1: 1.0, 4: 1.3}, {1: 1.0, 4: 1.3, 64: 8.0})
    verified = 0
    for seed in range(12):
        paths, depth = (
            Paths(seed, broken=0.1 * (seed % 3)),
            np.minimum(np.random.default_rng(seed).integers(0, 6, rows), 1),
        )
        roots, room = (
            Tree.from_roots(np.arange(rows), np.arange(rows) % VOCAB),
            TreeBudget(depth, 512),
        )
        for idle in (0.0, 500.0):
            memory = Learned(recent=0.05, regret_budget=9.0, idle=idle)
            wanted = policy.draft(paths.expand, roots, costs, room, memory)
            plan = policy.plan_step(Outlook(costs, roots, room, memory, 12, 255, 32))
            if plan is None:
                assert not wanted.drafted
                continue
            assert idle
            assert plan.first is not None
            bounds = np.where(np.isin(np.arange(rows), plan.first), depth, 0)
            grown = grow(plan, Fakes(paths, rows), roots.tokens, bounds, np.zeros(rows, np.int64))
            best = grown.nodes.best(grown.count, grown.rank(grown.nodes))
            tree = grown.to_host(grown.report(grown.nodes, best).numpy()).tree
            verified += wanted.drafted
            for mine, its in ((tree, wanted), (tree.whole or tree, wanted.whole or wanted)):
                for name in ("tokens", "parents", "depth", "row"):
                    assert np.array_equal(getattr(mine, name), getattr(its, name)), name
    assert verified > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_tokens_are_the_hosts(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for k in (1, 3, 10, 40):
        logits = torch.from_numpy(rng.integers(-3, 4, (4, 5, 33)) / 2).to(dtype)
        logits[0, 0], logits[1, :, 4:] = 1.0, -torch.inf
        values = torch.log_softmax(logits.float(), dim=-1)
        tokens, log_q = leading_tokens(values, k)
        wanted, theirs = top_k(values.flatten(0, 1), k)
        assert np.array_equal(tokens.flatten(0, 1).numpy(), wanted)
        assert np.array_equal(log_q.flatten(0, 1).numpy(), theirs)


@pytest.mark.parametrize("window", [None, 3, 6])
def test_a_mask_is_the_hosts(window: int | None) -> None:
    """Behind two committed tokens and up to three that wait, nodes of a forest, of which the last ones are fed."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        forests = [random_forest(1, 7, rng) for _ in range(2)]
        waiting = rng.integers(0, 4, 2)
        committed = rng.integers(2, 9, 2)
        fed = 4
        begin = committed + waiting
        places = [int(b) + f.depth for b, f in zip(begin, forests, strict=True)]
        host = ForwardBatch.from_sequences(
            [f.tokens[-fed:] for f in forests], [p[-fed:] for p in places], begin + 4,
            [np.concatenate((np.ones((fed, w), np.bool_), f.ancestors[-fed:]), axis=1)
             for w, f in zip(waiting, forests, strict=True)],
            [np.concatenate((c + np.arange(w), p)) for c, w, p in zip(committed, waiting, places, strict=True)],
            torch.device("cpu"),
        )  # fmt: skip
        lie, seen = (
            torch.from_numpy(np.stack(places)),
            torch.from_numpy(np.stack([f.ancestors[-fed:] for f in forests])),
        )
        given = {
            "ids": host.padded_tokens,
            "lie": lie,
            "seen": seen,
            "first": torch.from_numpy(begin)[:, None],
        }
        make = lambda given: (given["ids"], given["lie"], given["seen"], given["first"])
        device = NodeBatch(6, host.starts, given, None, fed, make)
        laid, wide = device.inputs(device.given, 24, torch.float32, window), host.with_width(6)
        full = write_mask(torch.empty(2, 1, 6, 24), wide, committed)
        assert torch.equal(laid["full"], full)
        if window is not None:
            hide_far(list(full[:, 0]), wide, committed, window)
            assert torch.equal(laid["sliding"], full)
        assert torch.equal(laid["tokens"], wide.padded_tokens)
        assert np.array_equal(laid["positions"].numpy(), wide.padded_positions)
        assert np.array_equal(laid["slots"].numpy(), host.starts[:, None] + np.arange(6))


# Whole texts.


def lm(
    target: Target, noise: float, capture: Capture = EagerCapture(), shared: bool = False
) -> Drafter[Any]:
    """The target itself, with weights a little off, as its drafter: now right, now wrong."""
    small = tiny_target(context=target.decoder.context, capture=capture)
    rng = torch.Generator().manual_seed(5)
    for weight in small.decoder.model.parameters():
        weight.data += noise * torch.randn(weight.shape, generator=rng, dtype=weight.dtype)
    if not shared:
        return LMDrafter(small)
    ids, vocab = torch.arange(3, 61, 2), target.decoder.vocab
    return LMDrafter(small, Shared(DraftVocab(ids, vocab), ids, torch.arange(vocab) // 2))


def one_layer(name: str, **knobs: Any) -> Callable[[Target], Drafter[Any]]:
    """A method's example."""

    def made(target: Target) -> Drafter[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found: Drafter[Any] = part("drafter", name)(**knobs).example(target)
        return found

    return made


DRAFTERS: dict[str, Callable[[Target], Drafter[Any]]] = {
    "edd": one_layer("edd"),
    "edd-vocabulary": one_layer("edd", draft_vocab=20, shared=True),
    "vdm": one_layer("vdm"),
    "lm": lambda target: lm(target, 0.01),
    "lm-right": lambda target: lm(target, 0.0),
    "lm-recorded": lambda target: lm(target, 0.01, Graphs(PassRecorder())),
    "eagle": one_layer("eagle"),
    "eagle-vocabulary": one_layer("eagle", draft_vocab=20),
    "eagle3": one_layer("eagle3"),
    "mtp": one_layer("mtp"),
    "medusa": one_layer("medusa", heads=3),
    "medusa-vocabulary": one_layer("medusa", draft_vocab=20),
    "hydra": one_layer("hydra", heads=3),
    "hydra-mlp": one_layer("hydra", arch="mlp", draft_vocab=20),
    "lm-shared": lambda target: lm(target, 0.01, shared=True),
}
SOME: tuple[Policy, ...] = (
    Chain(4),
    Beam(3, 4, survivors=False),
    EAGLE2(nodes=9, depth=4, width=3),
    VCT(2, 3),
)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each tree had that the host had not seen when it was verified."""
    counts: list[int] = []
    verified = draftree.drafting.step.verify_device_tree

    def counted(*args: Any) -> Any:
        found = verified(*args)
        counts.append(found[0].tree.drafted)
        return found

    monkeypatch.setattr(draftree.drafting.step, "verify_device_tree", counted)
    return counts


def written(
    capture: Capture,
    drafter: Callable[[Target], Drafter[Any]],
    policy: Policy,
    requests: Sequence[Request],
    context: int = 40,
    rule: str = "greedy",
) -> tuple[SequenceBatch, list[Emitted], Any]:
    """Some requests' texts, each step's part of them, and the drafter's state in the end."""
    target = tiny_target(context, capture=capture)
    rows = SequenceBatch(target.new_cache(len(requests), 8))
    parts = Components(target, drafter(target), policy, build("acceptor", rule), COSTS)
    steps = list(decode(parts, rows, requests))
    return rows, [event for events, _ in steps for event in events], steps[-1][1].drafter


def prompt(length: int) -> list[int]:
    return [(7 + 11 * (i % 5)) % 61 for i in range(length)]


def same(
    ours: tuple[SequenceBatch, list[Emitted], Any], theirs: tuple[SequenceBatch, list[Emitted], Any]
) -> None:
    """Texts, trees, figures and what the drafter has read are the same, but for the last bits of log q, keys and values."""
    assert ours[0].written == theirs[0].written
    a, b = ours[0].stats, theirs[0].stats
    assert (a.steps, a.work, a.new_tokens) == (b.steps, b.work, b.new_tokens)
    for mine, its in zip(ours[1], theirs[1], strict=True):
        assert (mine.tokens, mine.origins, mine.ending, mine.path.tolist()) == (
            its.tokens, its.origins, its.ending, its.path.tolist(),
        )  # fmt: skip
        for name in ("tokens", "parents", "depth", "row", "number", "source"):
            assert np.array_equal(getattr(mine.tree, name), getattr(its.tree, name)), name
        assert np.allclose(mine.tree.score, its.tree.score, atol=1e-5)
    mine, its = (getattr(state, "decoding", state) for state in (ours[2], theirs[2]))
    if not hasattr(its, "cache"):
        assert torch.allclose(mine.hidden, its.hidden, atol=1e-5, equal_nan=True)
        return
    if hasattr(its, "pending"):
        assert [p.tolist() for p in mine.pending] == [p.tolist() for p in its.pending]
    assert mine.cache.lengths.tolist() == its.cache.lengths.tolist()
    for row, length in enumerate(its.cache.lengths.tolist()):
        for a, b in (
            zip(mine.cache.layer(0), its.cache.layer(0), strict=True) if its.cache.shapes else ()
        ):
            assert torch.allclose(a[row, :, :length], b[row, :, :length], atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("name", "policy"), one_in(2, list(DRAFTERS), SOME), ids=str)
def test_texts_trees_and_figures_are_the_hosts(
    name: str, policy: Policy, unseen: list[int]
) -> None:
    """In turn of one sequence or three, to their limits or to an end of text."""
    which, how = list(DRAFTERS).index(name), SOME.index(policy)
    asked = [
        Request(prompt(n), m, number=i) for i, (n, m) in enumerate(((7, 16), (11, 3), (6, 14)))
    ][: 3 if (which + how // 2) % 3 else 1]
    theirs = written(EagerCapture(), DRAFTERS[name], policy, asked)
    if how // 2:
        ends = [text[4:5] for text in theirs[0].written]
        asked = [replace(r, eos=frozenset(end)) for r, end in zip(asked, ends, strict=True)]
        theirs = written(EagerCapture(), DRAFTERS[name], policy, asked)
    assert not unseen
    same(written(Graphs(PassRecorder()), DRAFTERS[name], policy, asked), theirs)
    assert max(unseen) > 0
    assert name != "lm-right" or theirs[0].stats.acceptance_length > 2


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("lm", Yield(width=3)), ("eagle3", Yield(width=3)), ("hydra", PCT(ratio=0.1)), ("lm", Beam(3, 4)),
        ("medusa", Static("medusa/vicuna_7b_stage1")),
    ],
    ids=str,
)  # fmt: skip
def test_texts_are_the_hosts(name: str, policy: Policy, unseen: list[int]) -> None:
    ragged = [
        Request(prompt(n), m, number=i) for i, (n, m) in enumerate(((7, 20), (11, 9), (6, 14)))
    ]
    for requests in (ragged[:1], ragged):
        ours, theirs = (
            written(c, DRAFTERS[name], policy, requests)
            for c in (Graphs(PassRecorder()), EagerCapture())
        )
        assert ours[0].written == theirs[0].written
        assert max(unseen) > 0
        assert name != "lm" or ours[0].stats.acceptance_length > 1.5
        unseen.clear()


@pytest.mark.parametrize("policy", SOME, ids=str)
@pytest.mark.parametrize("name", ["edd", "lm"])
def test_texts_end_with_the_context(name: str, policy: Policy, unseen: list[int]) -> None:
    requests = [Request(prompt(40 - missing), 30, number=missing) for missing in (9, 4, 0)]
    same(
        written(Graphs(PassRecorder()), DRAFTERS[name], policy, requests),
        written(EagerCapture(), DRAFTERS[name], policy, requests),
    )
    assert unseen


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma2", "gpt_neox"])
def test_layers_with_windows_and_other_architectures(name: str, unseen: list[int]) -> None:
    """Windows of five positions, in all layers or in half of them."""
    requests = [Request(prompt(n), 9, number=n) for n in (12, 4)]
    runs = []
    for capture in (Graphs(PassRecorder()), EagerCapture()):
        target = Target(CausalLM(model(name), capture=capture))
        rows = SequenceBatch(target.new_cache(2, 8))
        drafter = DRAFTERS["edd-vocabulary"](target)
        parts = Components(
            target, drafter, EAGLE2(nodes=9, depth=4, width=3), part("acceptor", "greedy")(), COSTS
        )
        steps = list(decode(parts, rows, requests))
        runs.append(
            (rows, [event for events, _ in steps for event in events], steps[-1][1].drafter)
        )
    same(*runs)
    assert unseen


def test_rows_come_and_go(unseen: list[int]) -> None:
    """A row that is free, and one that is taken again, while the others write."""

    def run(capture: Capture) -> list[list[int]]:
        target = tiny_target(capture=capture)
        rows = SequenceBatch(target.new_cache(3, 8))
        parts = Components(
            target,
            lm(target, 0.01),
            EAGLE2(nodes=9, depth=4, width=3),
            part("acceptor", "greedy")(),
            COSTS,
        )
        _, state = admit(parts, rows, [Request(prompt(n), 20, number=n) for n in (5, 9)], State())
        texts: list[list[int]] = [[], [], []]
        for at in range(4):
            events, state = step(parts, rows, state)
            for event in events:
                texts[event.row] += event.tokens
            if at == 1:
                state = release(parts, rows, 0, state)
            if at == 2:
                _, state = admit(parts, rows, [Request(prompt(4), 20, number=1)], state)
        return texts

    assert run(Graphs(PassRecorder())) == run(EagerCapture())
    assert len(unseen) == 4


@pytest.mark.parametrize("where", ["output", "some"])
def test_logits_that_are_no_numbers(where: str, unseen: list[int]) -> None:
    def broken(target: Target) -> Drafter[Any]:
        drafter: Any = lm(target, 0.01)
        weight = drafter.decoder.model.get_output_embeddings().weight if where == "output" else None
        if weight is None:
            weight = drafter.decoder.model.get_input_embeddings().weight
            weight.data[20:] = torch.nan
        else:
            weight.data[5] = torch.inf
        return drafter

    requests, policy = (
        [Request(prompt(n), 12, number=n) for n in (3, 8)],
        EAGLE2(nodes=9, depth=4, width=3),
    )
    runs = []
    for capture in (Graphs(PassRecorder()), EagerCapture()):
        with pytest.warns(DraftreeWarning, match="not finite"):
            runs.append(written(capture, broken, policy, requests))
    same(*runs)
    assert unseen


def nothing(ids: Tensor, scores: Tensor) -> Tensor:
    return scores


def conditions() -> Iterator[tuple[str, Request, Policy]]:
    plain = Request(prompt(6), 10)
    yield "processors", replace(plain, processors=(nothing,)), Chain(3)
    yield "guides", replace(plain, processors=(nothing,), guides=(nothing,)), Chain(3)
    yield "forced", replace(plain, forced=lambda ids: None), Chain(3)
    yield "no ranking at the end", plain, EAGLE2(nodes=9, depth=3, width=3, rerank=False)
    yield "the least sure", plain, EAGLE2(nodes=9, depth=3, width=3, rank_by="confidence")
    yield "shape from every confidence", plain, PCT(ratio=0.1, gain=False)
    yield "shape from every value", plain, PCT(ratio=0.1, leaf_threshold=0)
    yield "shape of another kind", plain, part("policy", "opttree")()


@pytest.mark.parametrize(
    ("why", "request_", "policy"), list(conditions()), ids=lambda c: c if isinstance(c, str) else ""
)
def test_otherwise_the_host_grows_trees(
    why: str, request_: Request, policy: Policy, unseen: list[int]
) -> None:
    same(
        written(Graphs(PassRecorder()), DRAFTERS["edd"], policy, [request_]),
        written(EagerCapture(), DRAFTERS["edd"], policy, [request_]),
    )
    assert not unseen


def test_trees_that_have_no_room_are_the_hosts(unseen: list[int]) -> None:
    """Of four layers that would be 1,364 nodes; near the end of the text there is room."""
    runs = [
        written(capture, DRAFTERS["edd"], VCT(4, 5), [Request(prompt(6), 10)])
        for capture in (Graphs(PassRecorder()), EagerCapture())
    ]
    same(*runs)
    assert 0 < len(unseen) < len(runs[0][0].stats.steps)
    assert max(unseen) <= 512


SAMPLED = Sampling(1.0, seed=1)


@pytest.mark.parametrize(
    ("rule", "name", "policy", "sampling"),
    [
        ("match", "edd", Chain(4), SAMPLED),
        (
            "match",
            "lm-right",
            EAGLE2(nodes=9, depth=4, width=3),
            Sampling(1.4, top_k=40, top_p=0.95, min_p=0.001, seed=2**64 - 1),
        ),
        ("match", "lm", VCT(2, 3), Sampling(0.7, top_p=0.9)),
        ("match:coupled=false", "lm-right", Beam(3, 4, survivors=False), SAMPLED),
    ],
    ids=str,
)
def test_sampled_texts_are_the_hosts(
    rule: str,
    name: str,
    policy: Policy,
    sampling: Sampling,
    unseen: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [
        Request(prompt(n), m, number=i, sampling=sampling)
        for i, (n, m) in enumerate(((1, 6), (11, 3), (6, 14)))
    ]
    theirs = written(EagerCapture(), DRAFTERS[name], policy, requests, rule=rule)
    assert not unseen
    monkeypatch.setattr(devices, "on_host", lambda device: False)
    same(written(Graphs(PassRecorder()), DRAFTERS[name], policy, requests, rule=rule), theirs)
    assert max(unseen) > 0
    if name == "lm-right":
        assert theirs[0].stats.acceptance_length > 1.5


class Odd(LogitsProcessor):
    """A warper that nothing is known of."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2


@pytest.mark.parametrize(
    ("rule", "samplings"),
    [
        ("multiround", [SAMPLED]),
        ("match", [SAMPLED, Sampling(0.5)]),
        ("match", [SAMPLED, Sampling()]),
        ("match", [Sampling(1.0, typical_p=0.9)]),
        ("match", [Sampling(1.0, warpers=(Odd(),))]),
    ],
    ids=["another rule", "two settings", "one is greedy", "typical_p", "a foreign warper"],
)
def test_otherwise_the_host_draws(rule: str, samplings: list[Sampling], unseen: list[int]) -> None:
    """Where rows are not alike, drafts are draws of their own, or warpers are not known."""
    requests = [Request(prompt(6), 6, number=i, sampling=each) for i, each in enumerate(samplings)]
    runs = [
        written(capture, DRAFTERS["edd"], VCT(2, 3), requests, rule=rule)
        for capture in (Graphs(PassRecorder()), EagerCapture())
    ]
    same(*runs)
    assert not unseen
