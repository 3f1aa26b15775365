"""The cache as a table of tokens: what is written where, what a commit moves, what is forgotten."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftree.models.forward_batch import ForwardBatch, write_mask, write_masks
from draftree.models.kv_cache import LayerShape, SlotCache

WIDE, NARROW = LayerShape(2, 3, 3), LayerShape(1, 4, 2)
SHAPES = (WIDE, NARROW, WIDE)  # layers of one shape lie together, and yet every layer is found


def empty(rows: int, slots: int = 0) -> SlotCache:
    """A cache of three layers of two shapes."""
    cache = SlotCache(SHAPES, rows, torch.float64, torch.device("cpu"))
    cache.reserve(slots)
    return cache


def coded(layer: int, shape: LayerShape, numbers: np.ndarray, value: bool) -> Tensor:
    """[R, H, n, width] keys or values in which every entry tells the token's number [R, n], the layer, and which it is."""
    one = torch.from_numpy(numbers).double()[:, None, :, None] * 10 + layer + 0.5 * value
    heads = torch.arange(shape.heads).double()[None, :, None, None] / 8
    return (
        one + heads + torch.zeros(1, 1, 1, shape.value if value else shape.key, dtype=torch.float64)
    )


def write(cache: SlotCache, starts: list[int], numbers: np.ndarray) -> None:
    """One pass of tokens [R, n] through all layers."""
    writer = cache.writer(np.array(starts), numbers.shape[1])
    end = max(starts) + numbers.shape[1]
    for layer, shape in enumerate(SHAPES):
        keys, values = writer.update(
            coded(layer, shape, numbers, False), coded(layer, shape, numbers, True), layer
        )
        assert keys.shape == (cache.rows, shape.heads, end, shape.key)
        assert values.shape == (cache.rows, shape.heads, end, shape.value)
        for row, start in enumerate(starts):
            assert torch.equal(
                keys[row, :, start : start + numbers.shape[1]],
                coded(layer, shape, numbers, False)[row],
            )


def held(cache: SlotCache, row: int) -> list[int]:
    """The numbers of a row's committed tokens, the same in all layers, keys and values."""
    found = []
    for layer, shape in enumerate(SHAPES):
        for value, tensor in enumerate(cache.layer(layer)):
            mine = tensor[row, :, : int(cache.lengths[row])]
            numbers = ((mine[0, :, 0] - layer - 0.5 * value) / 10).round().long()
            assert torch.equal(mine, coded(layer, shape, numbers[None].numpy(), bool(value))[0])
            found.append(numbers.tolist())
    assert all(f == found[0] for f in found)
    return found[0]


@settings(max_examples=50)
@given(st.data())
def test_passes_and_commits_against_lists(data: st.DataObject) -> None:
    """Any passes, commits of any scratch slots in any order, and truncations, beside plain lists that do the same."""
    rows = data.draw(st.integers(1, 3))
    cache = empty(rows, data.draw(st.integers(0, 4)))
    model = [[] for _ in range(rows)]
    number = 0
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(1, 5))
        numbers = np.arange(number, number + rows * n).reshape(rows, n)
        number += rows * n
        starts = [int(length) for length in cache.lengths]
        write(cache, starts, numbers)
        for row in range(rows):
            columns = data.draw(st.lists(st.integers(0, n - 1), unique=True).map(sorted))
            cache.keep(row, starts[row] + np.array(columns, np.int64))
            model[row] += numbers[row, columns].tolist()
        if data.draw(st.booleans()):
            lengths = np.array([data.draw(st.integers(0, len(m) + 2)) for m in model])
            cache.truncate(lengths)
            model = [m[:length] for m, length in zip(model, lengths, strict=True)]
        assert [held(cache, row) for row in range(rows)] == model
        assert cache.lengths.tolist() == [len(m) for m in model]


def test_a_commit_may_reverse_and_overlap() -> None:
    cache = empty(1)
    write(cache, [0], np.arange(6)[None])
    cache.keep(0, np.array([1, 0, 2, 5, 3]))  # read before it is overwritten
    assert held(cache, 0) == [1, 0, 2, 5, 3]
    cache.keep(0, np.array([], np.int64))
    assert held(cache, 0) == [1, 0, 2, 5, 3]


def test_growing_keeps_what_is_there() -> None:
    cache = empty(2, 3)
    write(cache, [0, 0], np.arange(6).reshape(2, 3))
    cache.keep(0, np.arange(3))
    cache.keep(1, np.arange(2))
    cache.reserve(50)
    assert cache.capacity == 50
    assert (held(cache, 0), held(cache, 1)) == ([0, 1, 2], [3, 4])
    cache.reserve(51)
    assert cache.capacity == 75  # by half at least, so that it is seldom done
    cache.reserve(10)
    assert cache.capacity == 75
    assert all(torch.isfinite(t).all() for layer in range(3) for t in cache.layer(layer))


def test_inserted_keys_and_values_are_committed() -> None:
    one = empty(1)
    three = empty(3)
    for layer, shape in enumerate(SHAPES):
        keys, values = (
            coded(layer, shape, np.arange(4)[None], value)[0] for value in (False, True)
        )
        one.insert(layer, np.zeros(4, np.int64), np.arange(4), keys, values)
        three.insert(layer, np.array([0, 2, 2, 0]), np.array([0, 0, 1, 1]), keys, values)
    assert held(one, 0) == [0, 1, 2, 3]
    assert [held(three, row) for row in range(3)] == [[0, 3], [], [1, 2]]
    for layer, shape in enumerate(SHAPES):
        keys, values = (coded(layer, shape, np.array([[7]]), value)[0] for value in (False, True))
        one.insert(layer, np.zeros(1, np.int64), np.array([4]), keys, values)
    assert held(one, 0) == [0, 1, 2, 3, 7]


@pytest.mark.parametrize("starts", [[2, 2], [0, 3]])
def test_a_writer_tells_where_its_pass_begins(starts: list[int]) -> None:
    cache = empty(2)
    write(cache, [0, 0], np.arange(6).reshape(2, 3))
    writer = cache.writer(np.array(starts), 4)
    assert cache.capacity >= max(starts) + 4
    assert writer.get_seq_length() == starts[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_mask_is_the_same_by_machine_code(dtype: torch.dtype) -> None:
    """For rows of different lengths, one of them padded."""
    seen = [np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_), np.tri(2, dtype=np.bool_)]
    places = [np.array([4, 5, 5]), np.array([2, 3])]
    feed = ForwardBatch.from_sequences(
        [np.arange(3), np.arange(2)], places, np.array([4, 2]), seen, places, torch.device("cpu")
    )
    masks = [torch.full((2, 1, 3, 9), 7, dtype=dtype) for _ in range(2)]
    write_mask(masks[0], feed, np.array([4, 2]))
    write_masks(list(masks[1][:, 0]), feed, np.array([4, 2]))
    assert torch.equal(*masks)
    assert set(masks[0].unique().tolist()) == {torch.finfo(dtype).min, 0}
