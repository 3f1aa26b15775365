"""Files of others are read with care, and ours are written whole or not at all.

Whatever a file can hold (no JSON, JSON nested ten thousand deep, a number for a text, broken weights) becomes one line
that names the file, what was got and what is allowed.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile
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
def on_disk(path: Path) -> Iterator[None]:
    """What fails inside because of the disk raises an OSError that says so, whichever library wrote.

    Where a disk is full, torch raises RuntimeError, safetensors an error of its own and numpy an OSError without a reason:
    the disk is asked for it.

    Args:
        path: what is written, for the error.
    """
    try:
        yield
    except DraftreeError:
        raise
    except Exception as error:
        reason = error if isinstance(error, OSError) and error.errno else _refusal(_existing(path))
        if reason is None or (reason is error and error.filename):
            raise
        raise OSError(reason.errno, reason.strerror, str(path)) from error


def _refusal(folder: Path) -> OSError | None:
    """Why a disk takes nothing more; None where it does."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error
    return None


def _existing(path: Path) -> Path:
    """The nearest folder above a path that is there."""
    return next(p for p in path.absolute().parents if p.exists())


def _partial(path: Path) -> Path:
    """Where it is written first: beside it, hidden, and a process's own."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` once it is whole; if writing fails, nothing is left of it.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    partial = _partial(path)
    try:
        with on_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        _remove(partial)


@contextmanager
def filled(folder: Path, last: str) -> Iterator[Path]:
    """Where to write files that come into a folder once all are whole, the one that shows that they are there at the end.

    Args:
        folder: may hold others.
        last: the name of that file.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    partial = _partial(folder / last)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with on_disk(folder / last):
            partial.mkdir()
            yield partial
            for path in sorted(partial.iterdir(), key=lambda p: p.name == last):
                path.replace(folder / path.name)
    finally:
        _remove(partial)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Where to write a folder that becomes `out` once it is whole; if writing fails, nothing is left of it.

    Raises:
        UserError: another process writes the same one.
        OSError: the disk is full, or cannot be written to.
    """
    home = out.absolute()
    beside = _existing(home) / home.name
    partial = _partial(beside)
    with locked(out, _lock(beside)):
        try:
            with on_disk(out):
                partial.mkdir()
                yield partial
                home.parent.mkdir(parents=True, exist_ok=True)
                partial.replace(home)
        finally:
            _remove(partial)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, "utf-8")


def append(path: Path, text: str) -> None:
    """Adds lines to a text file; the last of them is broken off where that fails."""
    with on_disk(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def locked(out: Path, lock: Path | None = None) -> Iterator[None]:
    """Inside, no other process that asks for the same may write it; the lock dies with its process.

    What a killed process left half written is removed. Nothing of the lock stays behind. The thread that holds it may ask
    again.

    Args:
        out: a file, or a folder.
        lock: the file that is locked: `inside` a folder; beside `out` by default.

    Raises:
        UserError: another process holds it.
    """
    lock = lock or _lock(out)
    made = not lock.parent.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock, is_singleton=True)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process writes '{out}': wait for its end, or name another") from None
    try:
        if held.lock_counter == 1:
            for left in lock.parent.glob(f".{'*' if lock.parent == out else escape(out.name)}.*.partial"):
                _remove(left)
        yield
    finally:
        if held.lock_counter == 1:
            lock.unlink(missing_ok=True)  # while it is held: who has opened it meanwhile finds it gone, and asks again
        held.release()
        if made:
            with suppress(OSError):  # something was written
                lock.parent.rmdir()


def inside(folder: Path) -> Path:
    """The file to lock in a folder that is written bit by bit."""
    return folder / ".lock"
