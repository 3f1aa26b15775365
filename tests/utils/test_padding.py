"""Padding at the end of any dimension of a tensor."""

import pytest
import torch

from draftree.utils.padding import pad_end


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_entries_are_appended_to_one_dimension(dim: int, count: int) -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    shape = list(values.shape)
    shape[dim] = count
    wanted = torch.cat((values, torch.full(shape, -torch.inf)), dim)
    assert torch.equal(pad_end(values, dim, count, -torch.inf), wanted)


def test_masks_and_ids_are_padded_with_zeros() -> None:
    seen = torch.ones(2, 2, dtype=torch.bool)
    assert torch.equal(pad_end(seen, 1, 1), torch.tensor([[True, True, False]] * 2))
    assert torch.equal(pad_end(torch.tensor([[7]]), 0, 1), torch.tensor([[7], [0]]))
