"""Chunks of prompts: sized by the seconds that reading takes, and shared so that neither short nor old ones wait for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.prompt_chunks import (
    DEFAULT_CHUNK,
    LEAST,
    LEAST_BESIDE,
    MAX_IDLE_SECONDS,
    MAX_STEP_FACTOR,
    SHORT,
    ChunkSizes,
    shares,
)


def sizes_of(per_token: float, decoding: float | None = None, **options: float) -> ChunkSizes:
    """Return sizes after some steps of a machine that reads and decodes at a given pace."""
    found = ChunkSizes(SchedulerOptions(**options))  # type: ignore[arg-type]
    for _ in range(8):
        found.record_chunk(100, 100 * per_token)
        if decoding is not None:
            found.record_decode_step(decoding)
    return found


def test_a_reading_takes_as_long_as_its_bound() -> None:
    assert ChunkSizes(SchedulerOptions()).budget(True) == DEFAULT_CHUNK
    assert sizes_of(1e-3).budget(False) == pytest.approx(MAX_IDLE_SECONDS / 1e-3, abs=1)
    assert sizes_of(1e-3, 0.04).budget(True) == pytest.approx(MAX_STEP_FACTOR * 40, abs=1)
    assert sizes_of(1e-3, 0.04).budget(False) == pytest.approx(MAX_IDLE_SECONDS / 1e-3, abs=1)
    assert sizes_of(1e-3, 0.04, max_step_seconds=0.3).budget(True) == pytest.approx(260, abs=1)
    assert sizes_of(1e-3, 0.04, max_step_seconds=0.3).budget(False) == pytest.approx(300, abs=1)


def test_no_chunk_is_smaller_or_larger_than_allowed() -> None:
    assert sizes_of(1.0, 0.01).budget(True) == LEAST
    assert sizes_of(1e-9).budget(False) == 512
    assert sizes_of(1.0, max_batch_tokens=5).budget(False) == 5


def test_chunk_costs_the_added_seconds_of_a_shared_pass() -> None:
    sizes = sizes_of(1e-3, 0.04)
    for _ in range(8):
        sizes.record_chunk(100, 0.04 + 0.05, beside=True)
    assert sizes.budget(True, beside=True) == pytest.approx(MAX_STEP_FACTOR * 80, rel=0.05)
    for _ in range(8):
        sizes.record_chunk(
            100, 0.03, beside=True
        )  # faster than a step without it, as another program has ended
    assert sizes.budget(True, beside=True) <= 512
    for _ in range(8):
        sizes.record_chunk(10, 3.0, beside=True)
    assert sizes.budget(True, beside=True) == LEAST_BESIDE
    assert sizes.budget(False, beside=True) == LEAST


def test_a_machine_that_becomes_slower_is_followed() -> None:
    sizes = sizes_of(1e-4)
    for _ in range(8):
        sizes.record_chunk(100, 0.05)
    assert sizes.budget(False) == pytest.approx(MAX_IDLE_SECONDS / 5e-4, rel=0.05)


@given(
    st.dictionaries(st.integers(1, 99), st.integers(1, 300), min_size=1, max_size=6),
    st.integers(1, 600),
)
def test_a_budget_is_used_up_and_never_exceeded(left: dict[int, int], budget: int) -> None:
    found = shares(left, budget)
    assert all(0 <= found[number] <= left[number] for number in left)
    assert sum(found.values()) == min(budget, sum(left.values()))


@given(
    st.dictionaries(st.integers(1, 99), st.integers(1, 300), min_size=2, max_size=6),
    st.integers(1, 600),
)
def test_neither_the_oldest_nor_a_short_prompt_waits(left: dict[int, int], budget: int) -> None:
    found = shares(left, budget)
    oldest, shortest = min(left), min(left, key=lambda number: left[number])
    assert found[oldest] >= min(left[oldest], budget // 2, max(budget - SHORT, 0) or budget // 2)
    assert found[shortest] >= min(left[shortest], max(budget // 2, SHORT if budget > SHORT else 0))
