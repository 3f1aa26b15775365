"""Python's search for garbage while models are loaded."""

import gc
import subprocess
import sys

import pytest

from draftree.boundary.garbage import SELDOM, seldom


def test_the_search_is_as_frequent_after_as_before_whoever_leaves_first() -> None:
    before = gc.get_threshold()
    one, other = seldom(), seldom()
    one.__enter__()
    other.__enter__()
    assert gc.get_threshold() == (SELDOM, *before[1:])
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == SELDOM
    other.__exit__(None, None, None)
    assert gc.get_threshold() == before
    with pytest.raises(OSError, match="full"), seldom():
        raise OSError("full")
    assert gc.get_threshold() == before


def test_a_search_that_is_off_stays_off_and_a_rarer_one_as_rare() -> None:
    before = gc.get_threshold()
    try:
        for asked in (0, 10 * SELDOM):
            gc.set_threshold(asked)
            with seldom():
                assert gc.get_threshold()[0] == asked
    finally:
        gc.set_threshold(*before)


def test_loading_searches_a_few_times() -> None:
    told = "import gc, draftree; draftree.load; print(sum(s['collections'] for s in gc.get_stats()), gc.get_threshold()[0])"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) < 100
    assert int(found[1]) == gc.get_threshold()[0]
