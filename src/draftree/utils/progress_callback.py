"""The protocol of progress callbacks."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SILENT_SECONDS = 2.0
"""Seconds after which long work is announced."""
LOG = logging.getLogger("draftree")
_shown = threading.local()


def duration(seconds: float) -> str:
    """Return a time as text, in seconds, in minutes, or in hours and minutes."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 180 else f"{minutes // 60} h {minutes % 60} min"


class Tell(Protocol):
    """Define the callback for progress: amount done, a remark, and the total once it is known."""

    def __call__(self, done: int, remark: str = "", of: int | None = None) -> None:
        """Report the amount done, a short description, and the total."""
        ...


def ignore_progress(done: int, remark: str = "", of: int | None = None) -> None:
    """Ignore all progress."""


@contextmanager
def announce(what: str, own_bar: bool = False) -> Iterator[None]:
    """Report work that takes longer than two seconds.

    One line of text is logged. On a terminal a spinner turns until the work is done. Nothing is
    reported inside other announced work, or while the command line shows its own progress.

    Args:
        what: the work, for example "loading the target".
        own_bar: whether the work shows its own progress bar, so that no spinner is needed.
    """
    if getattr(_shown, "already", False):
        yield
        return
    spinner: list[Any] = []

    def say() -> None:
        LOG.warning("%s takes a while", what)
        if sys.stderr is not None and sys.stderr.isatty() and not own_bar:
            from rich.console import Console

            spinner.append(Console(stderr=True).status(f"{what} …"))
            spinner[0].start()

    timer = threading.Timer(SILENT_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        with mute_announcements():
            yield
    finally:
        timer.cancel()
        timer.join()
        if spinner:
            spinner[0].stop()


@contextmanager
def mute_announcements() -> Iterator[None]:
    """Keep `announce` silent inside the context, because progress is shown already."""
    before, _shown.already = getattr(_shown, "already", False), True
    try:
        yield
    finally:
        _shown.already = before
