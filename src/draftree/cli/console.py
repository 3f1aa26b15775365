"""The standard streams and how a program ends; imports nothing heavy."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer

from draftree.errors import cut


def given(ctx: typer.Context, option: str) -> bool:
    """Whether an option was set, be it to its default."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def emit(found: Mapping[str, Any]) -> None:
    """Prints one JSON object."""
    print(json.dumps(found, allow_nan=False))


NOTHING_KEPT = "nothing was written; the same command begins anew"


@contextmanager
def interruptible(again: str) -> Iterator[None]:
    """After Ctrl-C or another signal inside, says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        tell(again)
        raise


def tell(message: str) -> None:
    """A line on standard error, as long as there is one: a terminal that was closed takes nothing."""
    with suppress(OSError):
        print(f"draftree: {cut(message)}", file=sys.stderr, flush=True)


def fail(message: str, status: int) -> NoReturn:
    """Ends the program with one line."""
    tell(message)
    sys.exit(status)
