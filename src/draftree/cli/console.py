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
"""The time at which the program began."""


def given(ctx: typer.Context, option: str) -> bool:
    """Return whether an option was given, even with its default value."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def emit(values: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(values, allow_nan=False))


NOTHING_KEPT = "nothing was written; the same command begins anew"


@contextmanager
def interruptible(again: str) -> Iterator[None]:
    """Print how to resume if Ctrl-C or another signal interrupts the block."""
    try:
        yield
    except KeyboardInterrupt:
        remark(again)
        raise


def remark(message: str) -> None:
    """Write a line on standard error, and ignore a terminal that was closed."""
    with suppress(OSError):
        print(f"draftree: {cut(message)}", file=sys.stderr, flush=True)


def fail(message: str, status: int) -> NoReturn:
    """End the program with one line; only the main process of a launcher writes it."""
    if speaks():
        remark(message)
    sys.exit(status)


GRACE = 2.0
"""Seconds that the other processes wait while the main one reports an error and ends."""


def speaks() -> bool:
    """Return whether this is the process of a launcher that writes messages."""
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    return not together or os.environ.get("RANK", "0") == "0"


@contextmanager
def one_voice() -> Iterator[None]:
    """Silence all processes of a run but the main one.

    After an error the others end after the main one, with the same status.

    Raises:
        SystemExit: this process is not the main one, and the run has failed or was interrupted.
    """
    if speaks():
        yield
        return
    try:
        with redirect_stderr(StringIO()):  # progress, remarks and hints are the main one's to tell
            yield
    except (DraftreeError, Interrupted) as error:
        time.sleep(GRACE)  # a launcher stops all processes when it sees one end
        sys.exit(error.status if isinstance(error, Interrupted) else 2)
