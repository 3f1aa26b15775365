"""Files of others are read with care, and ours are written whole or not at all.

Whatever a file can hold (no JSON, JSON nested ten thousand deep, a number for a text, broken weights) becomes one line
that names the file, what was got and what is allowed.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from draftree.errors import DraftreeError, UserError, first_line, shown


@contextmanager
def understood(told: str) -> Iterator[None]:
    """Turns any failure inside into one line.

    Args:
        told: how the line begins; what went wrong comes behind a colon.

    Raises:
        UserError: something went wrong that was not told in a line yet.
    """
    try:
        yield
    except DraftreeError:
        raise
    except Exception as error:  # what other people's readers raise on broken bytes cannot be listed
        raise UserError(f"{told}: {first_line(error)}") from error


def read_json(path: Path, what: str) -> Any:
    """What a JSON file holds.

    Args:
        path: of the file.
        what: the file should be, for the error.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    with understood(f"'{path}' is not {what}"):
        return json.loads(path.read_text("utf-8"))


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    found = read_json(path, what)
    if not isinstance(found, dict):
        raise UserError(f"'{path}' is not {what}: it holds {shown(found)}, allowed is a JSON object")
    return found


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` once it is whole; if writing fails, nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two processes may write the same
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, "utf-8")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process that asks for this folder may write there; the lock dies with its process.

    Raises:
        UserError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process writes into '{folder}': wait for its end, or name another folder") from None
    try:
        yield
    finally:
        lock.release()
