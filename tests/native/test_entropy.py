"""The entropy over the likeliest tokens, as machine code, against torch's own sums."""

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.tree import Candidates


def told(logs: Tensor, top: int) -> np.ndarray:
    nothing = np.zeros((len(logs), 1))
    return Candidates(nothing.astype(np.int64), nothing, logs).entropy(top)


def summed(logs: Tensor, top: int) -> np.ndarray:
    likeliest = logs.double().topk(min(top, logs.shape[1]), dim=-1).values
    return torch.special.entr(likeliest.exp()).sum(-1).numpy()


@pytest.mark.parametrize("width", [1, 5, 17, 900, 4096])
@pytest.mark.parametrize("top", [1, 4, 1000])
@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
def test_entropy_is_the_sum_of_torch(width: int, top: int, scale: float) -> None:
    logs = torch.log_softmax(
        scale * torch.randn(6, width, generator=torch.Generator().manual_seed(width + top)), dim=-1
    )
    assert told(logs, top) == pytest.approx(summed(logs, top), abs=1e-5)


def test_tokens_of_one_q_and_tokens_that_cannot_come() -> None:
    logs = torch.log_softmax(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
    logs[0] = np.log(1 / 64)  # all alike
    logs[1] = logs[1].round(decimals=0)
    logs[2, 8:] = -torch.inf
    for top in (1, 4, 8, 20, 64, 100):
        assert told(logs, top) == pytest.approx(summed(logs, top), abs=1e-5)


def test_a_distribution_has_the_same_bits_in_any_company() -> None:
    logs = torch.log_softmax(
        3 * torch.randn(5, 300, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    assert [told(row[None], 40)[0] for row in logs] == told(logs, 40).tolist()


def test_half_precision_is_widened() -> None:
    logs = torch.log_softmax(
        torch.randn(3, 50, generator=torch.Generator().manual_seed(2)), dim=-1
    ).bfloat16()
    assert told(logs, 10) == pytest.approx(summed(logs, 10), abs=1e-4)
