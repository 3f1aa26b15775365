"""Sampling on a device: the host's tokens, and one wait for all nodes of a tree.

The device is PyTorch on the CPU, told that it is none.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from test_graph_capture import Waits
from torch import Tensor
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from draftree.acceptors.match import Match
from draftree.batch import SequenceBatch
from draftree.models.graph_capture import Graphs
from draftree.request import Request, override_sampling
from draftree.sampling import devices
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing, couple_log_q, draw_candidates
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.logits_processors import FrequencyPenalty
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStateSpec, VerificationResult
from draftree.testing.fakes import PassRecorder, tiny_target
from draftree.tree import Candidates, Draw, Tree

SETTINGS = [
    Sampling(1.0),
    Sampling(0.7, top_k=5, seed=3),
    Sampling(1.3, top_p=0.8, min_p=0.02, seed=2**64 - 1),
    Sampling(0.0),
    Sampling(0.9, typical_p=0.7),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the noise is that of a device."""
    return lambda there: monkeypatch.setattr(devices, "on_host", lambda device: not there)


def forest(draw: np.random.Generator, rows: int, vocab: int) -> Tree:
    """Trees of random tokens."""
    tree = Tree.from_roots(np.arange(rows), draw.integers(0, vocab, rows))
    for _ in range(3):
        parents = np.unique(draw.integers(0, len(tree), 2 * rows))
        tokens = np.stack([draw.permutation(vocab)[:2] for _ in parents])
        found = Candidates(tokens, np.full(tokens.shape, -1.0))
        both = np.repeat(parents, 2)
        tree = tree.append(
            both, tokens.ravel(), np.full(len(both), -1.0), np.full(len(both), -1.0), found
        )
    return tree


class Slow(LogitsProcessor):
    """A processor that nothing is known of."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 0.25 * (scores > 0)


PROCESSORS: list[tuple[LogitsProcessor, ...]] = [
    (),
    (),
    (FrequencyPenalty(0.5, 0), RepetitionPenaltyLogitsProcessor(1.3)),
    (),
    (Slow(),),
    (SuppressTokensLogitsProcessor(range(31)),),  # all of them, so that nothing can be chosen
]


def settings(row: int) -> Sampling:
    return SETTINGS[row % len(SETTINGS)]


def of_tree(tree: Tree, logits: Tensor, keyed: Keyed, at_once: bool) -> Distributions:
    """p after its nodes, of which each row has its own settings and processors."""

    def processors(node: int) -> tuple[LogitsProcessor, ...]:
        row = int(tree.row[node])
        return (*PROCESSORS[row % len(PROCESSORS)], *settings(row).processors)

    after = lambda nodes: keyed.gumbel_of(
        tree.row[nodes], tree.depth[nodes], logits.shape[1], logits.device
    )
    text = lambda node: [1, 2, *tree.tokens[tree.path(node)].tolist()]
    greedy = lambda node: settings(int(tree.row[node])).greedy
    return Distributions(logits, processors, text, greedy, noise=after if at_once else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_device_accepts_what_the_host_accepts(
    device: Callable[[bool], None], rows: int, dtype: torch.dtype
) -> None:
    """With equal logits, −∞ among them, and rows where processors leave nothing."""
    lengths = set[int]()
    for seed in range(20):
        draw = np.random.default_rng(seed)
        tree = forest(draw, rows, 31)
        made = draw.normal(0, 3, (len(tree), 31)).round(int(draw.integers(0, 4)))
        made[draw.random(made.shape) < 0.2] = -np.inf
        made[np.arange(len(tree)), draw.integers(0, 31, len(tree))] = 1.0
        logits = torch.from_numpy(made).to(dtype)
        keyed = Keyed(
            [settings(row).seed for row in range(rows)], np.arange(rows), draw.integers(0, 99, rows)
        )
        found = []
        for there in (False, True):
            device(there)
            p = of_tree(tree, logits, keyed, there)
            verdict = Match().accept(tree, p, keyed)
            refused = [str(p._refused[node]) for node in sorted(p._refused)]
            found.append(
                ([path.tolist() for path in verdict.paths], verdict.bonus.tolist(), refused)
            )
        assert found[0][:2] == found[1][:2], seed
        assert bool(found[0][2]) == bool(found[1][2]) == (rows == 6)
        lengths |= set(map(len, found[0][0]))
    assert max(lengths) > 0


def test_noise_of_several_places_has_the_hosts_bits(device: Callable[[bool], None]) -> None:
    keyed = Keyed(
        [0, 2**64 - 1, 5], np.array([0, 7, 2**33]), np.array([3, 0, 70]), np.array([0, 1, 2])
    )
    rows, depths = np.array([2, 0, 0, 1, 2]), np.array([0, 1, 1, 5, 0])
    for kind in (0, 2, 3):
        found = []
        for there in (False, True):
            device(there)
            found.append(
                keyed.gumbel_of(rows, depths, 37, torch.device("cpu"), kind).numpy().tobytes()
            )
        each = np.stack(
            [
                keyed.gumbel(r, d, 37, kind)
                for r, d in zip(rows.tolist(), depths.tolist(), strict=True)
            ]
        )
        assert found == [each.tobytes()] * 2


@pytest.mark.parametrize(
    "kind", [Draw.COUPLED, Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT], ids=lambda k: k.value
)
def test_the_device_drafts_what_the_host_drafts(device: Callable[[bool], None], kind: Draw) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (6, 40)).round(1)).float()
    rows, depths = np.array([0, 1, 2, 3, 0, 2]), np.array([0, 0, 0, 0, 1, 2])
    keyed = Keyed(4, np.arange(5), np.arange(5) + 7)
    found = []
    for there in (False, True):
        device(there)
        made = draw_candidates(logits, 3, Drawing(kind, SETTINGS, keyed), rows, depths)
        assert made.logs is not None
        found.append((made.tokens.tolist(), made.log_q.tobytes(), made.logs.numpy().tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.0, 0.0)], ids=str)
def test_coupled_drafting_never_waits(
    device: Callable[[bool], None], temperatures: tuple[float, float]
) -> None:
    """And leaves greedy rows as they are."""
    device(True)
    log_q = torch.log_softmax(torch.arange(20.0, dtype=torch.float64).view(2, 10), -1)
    drawing = Drawing(
        Draw.COUPLED, [*map(Sampling, temperatures)], Keyed(0, np.arange(2), np.arange(2))
    )
    with Waits() as waits:
        found = couple_log_q(log_q, drawing, np.arange(2), np.zeros(2, np.int64))
    assert waits.count == 0
    for row, temperature in enumerate(temperatures):
        assert torch.equal(found[row], log_q[row]) is (temperature == 0)


def grown(target_rows: int) -> Iterator[tuple[SequenceBatch, Tree, VerificationResult]]:
    """Rows that write at temperature 1, a tree, and the pass over it, on what stands for a device."""
    target = tiny_target(context=96, capture=Graphs(PassRecorder()))
    rows = SequenceBatch(target.new_cache(target_rows, 96))
    rows.admit(
        override_sampling(
            [Request([7, 18, 29 + row], 60, number=row) for row in range(target_rows)],
            Sampling(1.0, top_p=0.9),
        )
    )
    target.prefill(
        rows.cache, [np.array([7, 18, 29 + row]) for row in range(target_rows)], HiddenStateSpec()
    )
    for seed in range(3):
        tree = forest(np.random.default_rng(seed), target_rows, 61)
        yield rows, tree, target.verify(rows.cache, tree, HiddenStateSpec())


@pytest.mark.parametrize("target_rows", [1, 3])
def test_a_sampled_tree_is_judged_with_one_wait(
    device: Callable[[bool], None], target_rows: int
) -> None:
    device(True)
    for rows, tree, verified in grown(target_rows):
        with Waits() as waits:
            p = rows.distributions(tree, verified, drawn=Match.keeps_text)
            verdict = Match().accept(tree, p, rows.chance)
        assert waits.count == 1
        assert len(verdict.bonus) == target_rows


def test_other_rules_ask_for_nothing_that_they_do_not_need(device: Callable[[bool], None]) -> None:
    """Nothing is drawn for them, and p of a node is copied once."""
    device(True)
    for rows, tree, verified in grown(1):
        p = rows.distributions(tree, verified)
        with Waits() as waits:
            p(0)
            p(0)
        assert waits.count == 1
