"""Standard streams, JSON output and exit of the command line; imports nothing heavy."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from typing import Any, NoReturn

import typer

from draftree.errors import DraftreeError, cut
from draftree.utils.signals import Interrupted

STARTED = time.monotonic()
"""Time at which the program started, by `time.monotonic`."""


def was_given(ctx: typer.Context, option: str) -> bool:
    """Return whether an option was typed on the command line, even with its default value."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def emit(values: Mapping[str, Any]) -> None:
    """Print a mapping as one JSON object on one line."""
    print(json.dumps(values, allow_nan=False))


NOTHING_KEPT = "nothing was written; the same command begins anew"


@contextmanager
def interruptible(again: str) -> Iterator[None]:
    """Return a context that prints `again` if a signal such as Ctrl-C interrupts it.

    Args:
        again: a remark that says how to go on.
    """
    try:
        yield
    except KeyboardInterrupt:
        remark(again)
        raise


def remark(message: str) -> None:
    """Print a line on standard error; errors from a closed terminal are ignored."""
    with suppress(OSError):
        print(f"draftree: {cut(message)}", file=sys.stderr, flush=True)


def fail(message: str, status: int) -> NoReturn:
    """Print a message and end the program; under a launcher, only the main process prints."""
    if is_main_process():
        remark(message)
    sys.exit(status)


GRACE_SECONDS = 2.0
"""Seconds for which the other processes wait after an error, so that the main process can report
it."""


def is_main_process() -> bool:
    """Return whether this process prints messages: it is the only or the main process of a run."""
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    return not together or os.environ.get("RANK", "0") == "0"


@contextmanager
def main_process_only() -> Iterator[None]:
    """Return a context in which only the main process of a run prints messages.

    After an error, the other processes end later than the main one, with the same status.

    Raises:
        SystemExit: this process is not the main one, and the run has failed or was interrupted.
    """
    if is_main_process():
        yield
        return
    try:
        with redirect_stderr(StringIO()):  # progress, remarks and hints are the main one's to tell
            yield
    except (DraftreeError, Interrupted) as error:
        time.sleep(GRACE_SECONDS)  # a launcher stops all processes when it sees one end
        sys.exit(error.status if isinstance(error, Interrupted) else 2)
