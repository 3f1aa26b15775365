"""Each sample is used once an epoch, and steps that are grouped by length need little padding."""

import numpy as np
import pytest

from draftree.training.sample_order import SampleOrder


def steps(order: SampleOrder, count: int) -> list[list[int]]:
    return [order.of_step(step) for step in range(count)]


@pytest.mark.parametrize("group", [0, 3, 100])
@pytest.mark.parametrize("count", [64, 61, 7])
def test_an_epoch_uses_each_sample_once(group: int, count: int) -> None:
    """Also if the number of samples is no multiple of the batch size, or smaller than a batch."""
    lengths = np.random.default_rng(0).integers(5, 900, count)
    order = SampleOrder(lengths, 8, group, seed=4)
    used = [i for step in steps(order, 3 * count) for i in step]
    epochs = np.array(used[: len(used) // count * count]).reshape(-1, count)
    assert len(epochs) > 2
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(count))
    assert count < 8 or not np.array_equal(epochs[0], epochs[1])


def test_order_depends_on_seed_and_step_alone() -> None:
    lengths = np.random.default_rng(0).integers(5, 900, 61)
    one, other = (SampleOrder(lengths, 8, 3, seed=4) for _ in range(2))
    backwards = [other.of_step(step) for step in reversed(range(30))]
    assert steps(one, 30) == backwards[::-1]
    assert steps(SampleOrder(lengths, 8, 3, seed=5), 30) != steps(one, 30)


def test_without_groups_the_order_is_a_permutation_of_the_epoch() -> None:
    """Runs that were started by earlier versions go on with the same samples."""
    order = SampleOrder(np.arange(20), 5, 0, seed=9)
    wanted = np.random.default_rng([9, 1, 1]).permutation(20).tolist()
    assert [i for step in range(4, 8) for i in order.of_step(step)] == wanted


def test_groups_need_little_padding() -> None:
    lengths = np.random.default_rng(1).lognormal(5.5, 0.6, 2048).astype(int)

    def padded(group: int) -> float:
        made = steps(SampleOrder(lengths, 32, group, seed=0), 192)
        return sum(32 * lengths[step].max() for step in made) / sum(
            lengths[step].sum() for step in made
        )

    assert padded(16) < 1.3 < 2.0 < padded(0)
    means = [lengths[step].mean() for step in steps(SampleOrder(lengths, 32, 16, 0), 64)]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.5, "batches are shuffled again"
