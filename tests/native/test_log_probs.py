"""The likeliest tokens and their log q from logits, against sums in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree import native
from draftree.kernels.log_probs import log_softmax, reads, top_of
from draftree.sampling.draft_sampling import Drawing, draw_candidates

pytestmark = pytest.mark.skipif(native.core is None, reason="the native kernels were not built")
DTYPES = [torch.float32, torch.bfloat16]
ZERO = np.zeros(3, np.int64)
HALF_STEP = 2.0**-24
"""The largest relative error of rounding to float32."""
SUMMED = 12 * HALF_STEP
"""The largest relative error of the sum: three steps of an exponential, eight sums in a column, one
of the distance from the largest logit, which is small where the exponential is not.
"""


def logits(width: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (scale * torch.randn(3, width, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 127, 128, 129, 1000, 49_152])
def test_log_q_is_that_of_float64(variant: str, width: int, dtype: torch.dtype) -> None:
    for scale in (0.1, 3.0, 40.0):
        given = logits(width, dtype, scale)
        wanted = torch.log_softmax(given.double(), dim=-1)
        tokens, log_q, log_sums = top_of(given, 10)
        sums = torch.logsumexp(given.double(), dim=-1).numpy()
        assert (abs(log_sums - sums) <= HALF_STEP * abs(sums) + SUMMED).all()
        found = wanted.gather(-1, torch.from_numpy(tokens)).numpy()
        bound = HALF_STEP * (abs(sums)[:, None] + abs(found)) + SUMMED
        assert (abs(log_q - found) <= bound).all()
        top = wanted.topk(min(10, width), dim=-1).values.numpy()
        assert (abs(log_q - top) <= bound).all()


def test_lower_of_equal_tokens_comes_first(variant: str) -> None:
    given = torch.zeros(2, 300)
    given[1, 200:] = 1.0
    tokens, log_q, _ = top_of(given, 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [200, 201, 202, 203]]
    assert (log_q == log_q[:, :1]).all()
    # Both logits less their log-sum-exp are the same number of float32.
    given = torch.full((1, 200), 1000.0)
    given[0, 150] = float(np.nextafter(np.float32(1000), np.float32(2000)))
    tokens, log_q, _ = top_of(given, 200)
    order = sorted(range(200), key=lambda t: (-log_q[0, tokens[0].tolist().index(t)], t))
    assert tokens[0].tolist() == order


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_spoils_no_other(variant: str, dtype: torch.dtype) -> None:
    for broken in (torch.nan, torch.inf, -torch.inf):
        given = logits(300, dtype)
        alone = top_of(given[2:], 5)
        given[1] = broken if broken == -torch.inf else given[1]
        given[1, 299] = broken
        tokens, log_q, log_sums = top_of(given, 5)
        assert np.isnan(log_q).all(axis=1).tolist() == [False, True, False]
        assert np.isnan(log_sums).tolist() == [False, True, False]
        assert (tokens[2].tobytes(), log_q[2].tobytes()) == (
            alone[0].tobytes(),
            alone[1].tobytes(),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, -1])
def test_no_tokens_are_no_tokens(variant: str, dtype: torch.dtype, k: int) -> None:
    given = logits(300, dtype)
    tokens, log_q, log_sums = top_of(given, k)
    assert (tokens.shape, log_q.shape) == ((3, 0), (3, 0))
    assert (log_sums == top_of(given, 1)[2]).all()


def test_the_loops_are_of_the_variant_in_use(variant: str) -> None:
    assert native.core.loops.simd_variant() == variant


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_to_log_q_have_the_same_bits(dtype: torch.dtype) -> None:
    given = logits(1000, dtype)
    given[0, ::7] = -torch.inf
    assert reads(given)
    found = draw_candidates(given, 6, Drawing(), ZERO, ZERO)
    assert found.log_sums is not None, "the whole log q was not computed"
    whole = found.log_probs
    assert whole is not None
    assert torch.equal(whole, log_softmax(given.float()))
    assert torch.equal(whole, Drawing().log_q(given, ZERO))
    assert (found.log_of(found.tokens) == found.log_q).all()
    shaped = draw_candidates(given, 6, Drawing(shaped=lambda scores: scores), ZERO, ZERO)
    assert shaped.log_sums is None
    assert (shaped.tokens == found.tokens).all()
    assert (shaped.log_q == found.log_q).all()
    assert (found.entropy() == shaped.entropy()).all()
    assert (found.last(2).entropy() == shaped.entropy()[1:]).all()
    spread = found.share_lists(np.array([2, 2, 0, 1]))
    assert (spread.log_of(spread.tokens) == spread.log_q).all()


def test_other_kinds_of_logits_take_the_way_through_pytorch() -> None:
    assert not reads(logits(50, torch.float64))
    assert not reads(torch.empty(1, 5, device="meta"))
    for dtype in (torch.float64, torch.float16):
        found = draw_candidates(logits(50, dtype), 4, Drawing(), ZERO, ZERO)
        assert found.log_sums is None
        assert found.log_probs is not None
