"""Random batches: equal to plain decoding, deterministic by seed, and nothing left behind.

`make soak` runs the same properties for an hour.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings

import properties
import soak
from strategies import Batch, Served, batches, served


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Costs and findings are stored in a folder of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@settings(max_examples=20)
@given(batches())
def test_texts_are_those_of_plain_decoding_and_the_same_again(batch: Batch) -> None:
    properties.check_batch(batch)


@settings(max_examples=12)
@given(batches())
def test_an_engine_that_was_interrupted_writes_the_same(batch: Batch) -> None:
    properties.check_engine(batch)


@settings(max_examples=10)
@given(served())
def test_submitted_requests_are_written_as_alone_and_the_same_again(batch: Served) -> None:
    properties.check_served(batch)


@settings(max_examples=2)
@given(served(("tiny",)))
def test_submitted_requests_leave_nothing_behind(batch: Served) -> None:
    properties.check_nothing_served_left(batch)


@settings(max_examples=3)
@given(batches(("tiny",)))
def test_nothing_is_left_behind(batch: Batch) -> None:
    properties.check_nothing_left(batch)


def test_a_soak_finds_shrinks_and_saves_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(batch: Batch) -> None:
        if (count := len(batch.requests)) > 1:
            raise AssertionError(f"{count} requests, {batch.slots} slots")

    monkeypatch.setattr(properties, "check_batch", fails)
    monkeypatch.setattr(soak, "EXAMPLES", {"check_batch": 20})
    assert soak.main(["--seconds", "0", "--seed", "3", "--out", str(tmp_path)]) == 1
    (saved,) = tmp_path.glob("failure-*.txt")
    text = saved.read_text()
    assert "check_batch, seed 3" in text
    assert "AssertionError: 2 requests, 1 slots" in text, "the example is not shrunk"
