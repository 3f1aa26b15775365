"""Warpers with the same results on every device, beside those of transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from draftree.sampling.warpers import WARPERS, MinP, TopP, Typical, apply_warpers, make_reproducible

NOBODY = torch.zeros((1, 0), dtype=torch.int64)
STOCK: list[LogitsProcessor] = [
    *(TemperatureLogitsWarper(t) for t in (0.3, 0.7, 1.7)),
    *(TopKLogitsWarper(k) for k in (1, 5, 1000)),
    *(TopPLogitsWarper(p) for p in (1e-9, 0.3, 0.9, 0.999)),
    *(MinPLogitsWarper(p) for p in (0.01, 0.3, 1.0)),
    TypicalLogitsWarper(0.8),
]


def logits(
    seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32, digits: int | None = None
) -> Tensor:
    """Some of them forbidden, and with few digits some equal."""
    draw = np.random.default_rng(seed)
    found = draw.normal(0, draw.choice([0.1, 2, 8]), (rows, vocab))
    found = found.round(int(draw.integers(0, 6)) if digits is None else digits)
    found[draw.random((rows, vocab)) < 0.1] = -np.inf
    found[:, 0] = 0.5
    return torch.from_numpy(found).to(dtype)


def on_device(step: TopP, scores: Tensor) -> Tensor:
    return scores.masked_fill(step.unlikely(scores), step.filter_value)


@pytest.mark.parametrize(
    "step", STOCK, ids=lambda step: f"{type(step).__name__} {next(iter(vars(step).values()))}"
)
def test_a_warper_is_transformers_own(step: LogitsProcessor) -> None:
    """Where no token lies at a bound, of which the stock ones have their own rounding, and none are equal."""
    for seed in range(40):
        scores = logits(seed, 3, 50, digits=9)
        (mine,) = make_reproducible([step])
        assert torch.equal(mine(NOBODY, scores), step(NOBODY, scores)), seed


@pytest.mark.parametrize("p", [1e-20, 1e-9, 0.2, 0.5, 0.95, 0.9999999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least", [1, 2])
def test_top_p_leaves_out_the_same_on_every_device(
    p: float, dtype: torch.dtype, least: int
) -> None:
    step = TopP(p, min_tokens_to_keep=least)
    for seed in range(40):
        scores = logits(seed, 3, int(np.random.default_rng(seed).integers(1, 400)), dtype)
        assert torch.equal(step(NOBODY, scores), on_device(step, scores)), seed
        together = [step(NOBODY, row[None])[0] for row in scores]
        assert torch.equal(step(NOBODY, scores), torch.stack(together)), "whatever stands beside it"


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 8.0, -np.inf]), min_size=1, max_size=12),
    st.floats(1e-6, 1 - 1e-6),
)
def test_top_p_of_equal_scores_leaves_out_the_higher_ids_first(
    values: list[float], p: float
) -> None:
    scores, step = torch.tensor([[1.0, *values]]), TopP(p)
    kept = step(NOBODY, scores)[0] > -np.inf
    assert torch.equal(step(NOBODY, scores), on_device(step, scores))
    whole = torch.softmax(scores[0].double(), 0)
    assert whole[kept].sum() >= p - 1e-12
    equal = scores[0] == scores[0][kept].min()
    assert kept[equal].tolist() == sorted(kept[equal].tolist(), reverse=True)
    assert whole[kept].sum() - whole[kept].min() < p + 1e-12, "none of them could go as well"


def test_tokens_of_exactly_the_remaining_mass_are_left_out() -> None:
    """As transformers does it: of four equal tokens two have the half that is not wanted."""
    scores, step = torch.zeros(1, 4), TopP(0.5)
    for found in (step(NOBODY, scores), on_device(step, scores)):
        assert found.tolist() == [[0.0, 0.0, -np.inf, -np.inf]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_left_out_of_what_is_no_distribution(bad: float) -> None:
    scores = torch.tensor([[1.0, 2.0, bad, 0.0], [0.0, 9.0, 1.0, 0.0], [-np.inf] * 4])
    for step in (TopP(0.5), Typical(0.5)):
        assert torch.equal(step(NOBODY, scores)[0].nan_to_num(7, 8), scores[0].nan_to_num(7, 8))
    kept = torch.tensor([[1, 2, bad, 0], [-np.inf, 9, -np.inf, -np.inf], [-np.inf] * 4])
    for found in (TopP(0.5)(NOBODY, scores), on_device(TopP(0.5), scores)):
        assert torch.equal(found.nan_to_num(7, 8), kept.nan_to_num(7, 8))
    assert not MinP(0.5)(NOBODY, scores)[0].amax().isfinite()


def test_several_texts_at_once_are_each_alone() -> None:
    steps = make_reproducible(
        [
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )
    assert {type(step) for step in steps} <= WARPERS
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        scores = logits(1, 5, 60, dtype)
        alone = torch.stack([apply_warpers(row[None], steps)[0] for row in scores])
        assert torch.equal(apply_warpers(scores, steps), alone)
        assert alone.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
