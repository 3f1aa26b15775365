"""EAGLE's objective."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from architectures import target
from draftree.doctor import forward_parity
from draftree.drafters.base import Batch
from draftree.drafters.eagle import EAGLE
from draftree.target.target import LAST
from forests import texts


def test_the_loss_is_its_formula() -> None:
    """Smooth L1 between drafted and true features, and 0.1 of the cross-entropy of what the head makes of them."""
    t = target("llama")
    drafter = EAGLE(noise=0.0).fresh(t)
    drafter.model.double()
    batch = forward_parity.batch_of(t, drafter, np.stack(texts([9, 9], np.random.default_rng(0))))
    true = batch.hidden[-1]
    with torch.no_grad():
        _, out = next((None, o) for o, _ in drafter.training_time_test(batch, true, 1))
        # Position 0 has no pair before it; from position 8 nothing is left to predict.
        drafted, wanted = out[:, 1:8], true[:, 1:8]
        q, p = (torch.log_softmax(drafter.model.logits(x), -1) for x in (drafted, wanted))
        expected = (
            smooth_l1_loss(drafted, wanted, reduction="none").mean(-1).sum()
            - 0.1 * (p.exp() * q).sum()
        )
        assert float(drafter.loss(batch)) == pytest.approx(float(expected) / batch.count, rel=1e-5)


@pytest.mark.parametrize(("k", "weight"), [(1, 1.0), (10, 0.5), (1000, 2.0)])
def test_the_top_k_loss_token_by_token(k: int, weight: float) -> None:
    """HASS, section 3.2: −Σ p(x) log q(x) over the K tokens x that the target holds likeliest, p as it is."""
    t = target("llama")
    torch.manual_seed(1)
    drafter = EAGLE(
        noise=0.0, feature_weight=0.0, token_weight=0.0, top_k=k, top_weight=weight
    ).fresh(t)
    drafter.model.double()
    tokens = np.stack(texts([9, 9], np.random.default_rng(0)))
    batch = forward_parity.batch_of(t, drafter, tokens)
    with torch.no_grad():
        out = next(o for o, _ in drafter.training_time_test(batch, batch.hidden[-1], 1))
        total = 0.0
        for row, place in itertools.product(range(2), range(1, 8)):
            here = torch.zeros(2, 9, dtype=torch.bool)
            here[row, place] = True
            p, q = (
                torch.softmax(batch.target(here)[0], 0).tolist(),
                torch.log_softmax(drafter.model.logits(out[row, place]), 0).tolist(),
            )
            likeliest = sorted(range(len(p)), key=lambda x: -p[x])[:k]
            total -= sum(p[x] * q[x] for x in likeliest)
        assert float(drafter.loss(batch)) == pytest.approx(weight * total / batch.count, rel=1e-5)


@pytest.mark.parametrize(("length", "bound"), [(9, 0.1), (100, 0.1), (512, 0.1), (1024, 0.05)])
def test_noise_is_the_papers_and_less_on_long_texts(length: int, bound: float) -> None:
    """± 0.1 · min(1, 512 / T), the same for a sample whatever stands beside it in the batch."""
    drafter = EAGLE().fresh(target("llama"))
    tokens = torch.zeros(2, length, dtype=torch.int64)
    learn = torch.ones_like(tokens, dtype=torch.bool)

    def noise(rows: int) -> torch.Tensor:
        hidden = {LAST: torch.zeros(rows, length, 64)}
        generators = tuple(torch.Generator().manual_seed(i) for i in range(rows))
        batch = Batch(tokens[:rows], learn[:rows], hidden, {}, lambda at: at, generators, 1.0)
        return drafter._noise(batch)  # type: ignore[attr-defined]

    both = noise(2)
    assert torch.equal(both[:1], noise(1))
    assert not torch.equal(both[0], both[1])
    assert 0.95 * bound < float(both.abs().max()) <= bound


def test_aligned_passes_count_alike() -> None:
    t = target("llama")
    once, twice = EAGLE(noise=0.0).fresh(t), EAGLE(noise=0.0, steps=2).fresh(t)
    for drafter in (once, twice):
        drafter.model.double()
    twice.model.load_state_dict(once.model.state_dict())
    batch = forward_parity.batch_of(t, once, np.stack(texts([9], np.random.default_rng(0))))
    with torch.no_grad():
        one, two = float(once.loss(batch)), float(twice.loss(batch))
    assert two != pytest.approx(one)
    assert 0.3 < two / one < 1.7
