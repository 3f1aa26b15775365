"""A head that finds candidates by factors: logits are the head's own, no token is excluded, the text is the target's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftree.costs.step_costs import Costs
from draftree.drafters.neural import low_rank_head
from draftree.drafters.neural.low_rank_head import CandidateHead, decompose_head, factors
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import Tree
from selection import one_in

COSTS = Costs({1: 1.0}, {1: 1.0})
V, D = 50, 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("demo")


def rows_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(seed))


def test_factors_are_those_of_the_singular_value_decomposition() -> None:
    rows = rows_of() + 3
    centred = (rows - rows.mean(dim=0)).numpy().astype(np.float64)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    for rank in (1, 4, D):
        down, up = decompose_head(rows, rank)
        best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        assert np.abs((up @ down).numpy() - best).max() < 1e-5
        assert torch.allclose(down @ down.T, torch.eye(rank), atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rank", "count"), [(D, 5), (D, V), (3, 20), (1, 999)])
def test_candidates_have_the_logits_of_the_head(rank: int, count: int, bias: bool) -> None:
    rows, add = rows_of(), rows_of(1)[:, 0] if bias else None
    states = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(2))
    logits = CandidateHead(rows, rank, count, "edd", add)(states)
    whole = torch.nn.functional.linear(states, rows, add)
    found = logits > -torch.inf
    assert logits.shape == whole.shape
    assert (found.sum(dim=-1) == min(count, V)).all()
    assert torch.allclose(logits[found], whole[found], atol=1e-5)
    if rank == D:  # with all directions they are the largest ones
        assert (
            whole.topk(min(count, V)).values.sort().values
            - logits[found].view(2, 3, -1).sort().values
        ).abs().max() < 1e-5


def test_the_mean_of_all_rows_finds_nobody() -> None:
    """What all tokens have in common is no reason to take one; without that, one direction would be spent on it."""
    rows = rows_of() * torch.tensor([1.0] + [0.01] * (D - 1)) + 100 * torch.ones(D)
    states = torch.eye(D)[:1]
    wanted = set(torch.topk(rows @ states[0], 5).indices.tolist())
    logits = CandidateHead(rows, 1, 5, "edd")(states)[0]
    assert set(torch.nonzero(logits > -torch.inf)[:, 0].tolist()) == wanted


def test_factors_are_computed_once_and_a_broken_file_is_made_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    counted = lambda rows, rank: calls.append(rank) or decompose_head(rows, rank)
    monkeypatch.setattr(low_rank_head, "decompose_head", counted)
    first = factors(rows_of(), 4)
    again = factors(rows_of(), 4)
    assert calls == [4]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    factors(rows_of(1), 4)
    factors(rows_of(), 5)
    assert calls == [4, 4, 5], "of other rows, and of another rank"
    files = list((cache / "factors").iterdir())
    assert len(files) == 3
    for file in files:
        file.write_bytes(b"no tensors")
    assert torch.equal(factors(rows_of(), 4)[1], first[1])
    monkeypatch.setenv("DRAFTREE_CACHE", "/proc/none")  # nothing can be written there
    assert torch.equal(factors(rows_of(), 4)[1], first[1])


@pytest.mark.parametrize(
    ("drafter", "policy", "temperature"),
    one_in(2, ["eagle3", "edd"], ["chain", "eagle2", "yield"], [0.0, 1.0]),
)
def test_the_text_is_the_targets_and_drafts_are_accepted(
    target: Target, drafter: str, policy: str, temperature: float
) -> None:
    engine = opened(target, f"{drafter}:head_rank=8,head_candidates=16", policy)
    requests = [
        Request(p, 16, sampling=Sampling(temperature=temperature, seed=3))
        for p in ([40, 50, 60], [70, 80])
    ]
    out = engine.write(requests)
    assert out.tokens == engine.plain(requests).tokens
    if policy == "chain" and not temperature:
        assert sum(step.accepted for step in out.stats.steps), (
            "hardly anything was found: the test is idle"
        )


def opened(target: Target, drafter: str, policy: str = "chain") -> Engine:
    return Engine(
        target, build("drafter", drafter).open(target), build("policy", policy), costs=COSTS
    )


@pytest.mark.parametrize("drafter", ["eagle3", "edd"])
def test_with_all_directions_and_tokens_it_is_the_whole_head(target: Target, drafter: str) -> None:
    """Drafts are those of the head without factors, over tokens that a draft vocabulary excludes, too."""
    vocab, width = target.decoder.vocab, target.decoder.hidden_size
    whole, other = (
        logits_of(target, drafter),
        logits_of(target, f"{drafter}:head_rank={width},head_candidates={vocab}"),
    )
    assert other.shape[1] == vocab
    assert bool((other > -torch.inf).all())
    if whole.shape == other.shape:
        assert torch.allclose(whole, other, atol=1e-3)
    few = logits_of(target, f"{drafter}:head_rank=8,head_candidates=7")
    assert ((few > -torch.inf).sum(dim=1) == 7).all()
    assert torch.allclose(few.exp().sum(dim=1), torch.ones(len(few)), atol=1e-4), (
        "q is over the candidates"
    )


def logits_of(target: Target, spec: str) -> torch.Tensor:
    """Log q after two roots, of a drafter."""
    drafter: Any = build("drafter", spec).open(target)
    prompts = [np.array([40, 50, 60]), np.array([70, 80])]
    hidden_states = target.prefill(target.new_cache(2, 32), prompts, drafter.needs).hidden_states
    state = drafter.start(prompts, np.array([61, 62]), hidden_states)
    found, _ = drafter.expand(
        state, Tree.from_roots(np.arange(2), np.array([61, 62])), np.arange(2), 4, Drawing()
    )
    return found.drafted_log_probs


def test_a_rank_beyond_the_head_is_refused(target: Target) -> None:
    for drafter in ("eagle3", "edd"):
        with pytest.raises(
            UserError,
            match=f"{drafter}: head_rank is 9999, allowed is at most the width of the head",
        ):
            opened(target, f"{drafter}:head_rank=9999")


def test_a_mistake_in_the_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that are scored by the factors, or the smallest ones."""
    head = CandidateHead(rows_of(), D, 5, "edd")
    monkeypatch.setattr(head, "_rows", head._rows.flip(0))
    monkeypatch.setattr(low_rank_head, "CandidateHead", lambda *args: head)
    states = torch.randn(1, D)
    logits, whole = head(states), states @ rows_of().T
    found = logits > -torch.inf
    assert not torch.allclose(logits[found], whole[found], atol=1e-5)
