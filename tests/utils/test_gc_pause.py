"""Python's search for garbage while models are loaded."""

import gc
import subprocess
import sys

import pytest

from draftree.utils.gc_pause import GC_THRESHOLD, MIN_LOADED_OBJECTS, end_gc_pause, pause_gc


def test_the_search_is_as_frequent_after_as_before_whoever_leaves_first() -> None:
    before = gc.get_threshold()
    one, other = pause_gc(), pause_gc()
    one.__enter__()
    other.__enter__()
    assert gc.get_threshold() == (GC_THRESHOLD, *before[1:])
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == GC_THRESHOLD
    other.__exit__(None, None, None)
    assert gc.get_threshold() == before
    with pytest.raises(OSError, match="full"), pause_gc():
        raise OSError("full")
    assert gc.get_threshold() == before


def test_a_pause_can_be_ended_inside_its_block() -> None:
    before = gc.get_threshold()
    with pause_gc(), pause_gc():
        end_gc_pause()
        assert gc.get_threshold() == before
        with pause_gc():
            assert gc.get_threshold()[0] == GC_THRESHOLD
        assert gc.get_threshold() == before
    assert gc.get_threshold() == before


def test_a_search_that_is_off_stays_off_and_a_rarer_one_as_rare() -> None:
    before = gc.get_threshold()
    try:
        for asked in (0, 10 * GC_THRESHOLD):
            gc.set_threshold(asked)
            with pause_gc():
                assert gc.get_threshold()[0] == asked
    finally:
        gc.set_threshold(*before)


def loaded(count: int) -> tuple[int, int]:
    """How many of that many objects made inside count as old after, and how many searches there were."""
    code = f"""
import gc
from draftree.utils.gc_pause import pause_gc
gc.collect()
searched = [s["collections"] for s in gc.get_stats()]
with pause_gc():
    made = [[i] for i in range({count})]
    again = [s["collections"] for s in gc.get_stats()]
old = set(map(id, gc.get_objects(2)))
print(sum(id(m) in old for m in made), sum(again) - sum(searched), gc.get_freeze_count())
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found[2] == "0"
    return int(found[0]), int(found[1])


def test_loaded_objects_are_frozen_and_few_objects_are_not() -> None:
    assert loaded(MIN_LOADED_OBJECTS + 10_000) == (MIN_LOADED_OBJECTS + 10_000, 0)
    assert loaded(100) == (0, 0)


def test_objects_frozen_by_others_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with pause_gc():
            made = [[i] for i in range(MIN_LOADED_OBJECTS + 1000)]
        assert len(made) > MIN_LOADED_OBJECTS
        assert gc.get_freeze_count() >= frozen - 100  # some of them may have died
    finally:
        gc.unfreeze()


def test_loading_searches_a_few_times() -> None:
    told = "import gc, draftree; draftree.load; print(sum(s['collections'] for s in gc.get_stats()), gc.get_threshold()[0])"
    found = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(found[0]) < 100
    assert int(found[1]) == gc.get_threshold()[0]
