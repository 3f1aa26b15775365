"""What takes long says so in one line, once."""

import logging
import sys
import time
from contextlib import nullcontext

import pytest

from draftree.utils import progress_callback
from draftree.utils.progress_callback import announce, mute_announcements


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_callback, "SILENT_SECONDS", 0.05)


def test_long_work_is_announced_once_and_short_work_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with announce("short work"):
        pass
    with announce("long work"), announce("a part of it"):
        time.sleep(0.3)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, "long work takes a while")
    ]


@pytest.mark.parametrize("quiet", [True, False])
def test_the_command_line_shows_its_own_progress(
    caplog: pytest.LogCaptureFixture, quiet: bool
) -> None:
    with mute_announcements() if quiet else nullcontext(), announce("long work"):
        time.sleep(0.3)
    assert len(caplog.records) == (not quiet)


@pytest.mark.parametrize("own_bar", [True, False])
def test_a_terminal_sees_a_spinner(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_bar: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with announce("long work", own_bar):
        time.sleep(0.3)
    assert ("long work …" in capfd.readouterr().err) != own_bar


def test_an_error_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="broken"), announce("long work"):
        raise ValueError("broken")
    time.sleep(0.15)
    assert not caplog.records
