"""Read foreign files with clear errors, and write files atomically.

Whatever a file can hold (no JSON, JSON nested ten thousand deep, a number for a text, broken
weights) becomes one line that names the file, what was got and what is allowed.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, final

from filelock import FileLock, Timeout
from safetensors import safe_open

from draftree.errors import DraftreeError, UnknownName, UserError, first_line, format_value
from draftree.utils.validated_dataclass import Range, Rule, rule_of


@contextmanager
def as_user_error(told: str) -> Iterator[None]:
    """Turn any error inside the context into a one-line message.

    Args:
        told: the start of the line; the cause follows after a colon.

    Raises:
        UserError: an error occurred whose message is not yet a single line.
    """
    try:
        yield
    except (DraftreeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # parsers raise any error; Rust panics are no Exception
        raise UserError(f"{told}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OSError) and error.strerror:  # without number and file name
        return error.strerror
    first = f"no {error}" if isinstance(error, KeyError) else first_line(error)
    return str(error) if first.endswith(":") else first  # the rest is on the next line


def tensor_names(path: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file, without loading them.

    Raises:
        UserError: the file cannot be read.
    """
    with as_user_error(f"cannot read '{path}'"), safe_open(path, framework="pt") as file:
        return set(file.keys())


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file by name, without loading them.

    Raises:
        UserError: the file cannot be read.
    """
    with as_user_error(f"cannot read '{path}'"), safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def read_json(path: Path, what: str) -> Any:
    """Return the value in a JSON file.

    Args:
        path: path of the file.
        what: the expected kind of file, for the error.

    Raises:
        UserError: the file cannot be read, or is not JSON.
    """
    with as_user_error(f"'{path}' is not {what}"):
        return json.loads(path.read_text("utf-8"))


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UserError: the file cannot be read, or contains something else.
    """
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise UserError(
            f"'{path}' is not {what}: it holds {format_value(value)}, allowed is a JSON object"
        )
    return value


REQUIRED: Any = object()
"""The default of an entry that must be present."""


@final
@dataclass(frozen=True)
class Entries:
    """Read the entries of a JSON object, and check each against its type.

    Attributes:
        values: the entries.
        where: the origin of the object for errors: a file, or a description of a part of it.
    """

    values: Mapping[str, Any]
    where: Path | str

    def get(self, name: str, hint: Any, default: Any = REQUIRED, least: float | None = None) -> Any:
        """Return an entry's value.

        Args:
            name: the name of the entry.
            hint: the type of the entry, as for `check_value`.
            default: the value if the entry is missing.
            least: the lower bound of a number, or of the numbers in a list or an object.

        Raises:
            UserError: the entry is missing and has no default, or has another type.
        """
        place = f"'{self.where}'" if isinstance(self.where, Path) else self.where
        where = f"{place}: {name}"
        if name in self.values:
            return check_value(self.values[name], hint, where, least)
        if default is REQUIRED:
            raise UserError(f"{where} is missing, allowed is {_rule(hint, least)[0]}")
        return default


def check_value(value: Any, hint: Any, where: str, least: float | None = None) -> Any:
    """Check a value of a file or a spec against a type hint, and return it.

    Args:
        value: the value.
        hint: bool, int, float, str, dict, list, None, a `Literal`, or a union, list or dict of
            these, as in a dataclass's field. A number must be finite. An integer is allowed for a
            float.
        where: the origin of the value, for the error.
        least: the lower bound of a number.

    Raises:
        UserError: the value has another type.
    """
    words, fine = _rule(hint, least)
    if not fine(value):
        raise UserError(f"{where} is {format_value(value)}, allowed is {words}")
    return float(value) if hint is float else value


def _rule(hint: Any, least: float | None) -> Rule:
    return rule_of(hint, Range() if least is None else Range(least)) or ("anything", lambda _: True)


@contextmanager
def report_disk_errors(path: Path) -> Iterator[None]:
    """Turn an error inside the context into an OSError with the disk's reason.

    If a disk is full, torch raises RuntimeError, safetensors an error of its own, and NumPy an
    OSError without a reason. The disk is therefore probed for the reason.

    Args:
        path: the file that is written, for the error.
    """
    try:
        yield
    except DraftreeError:
        raise
    except Exception as error:
        reason = (
            error
            if isinstance(error, OSError) and error.errno
            else _disk_full_error(nearest_existing(path.parent))
        )
        if reason is None or (reason is error and error.filename):
            raise
        raise OSError(reason.errno, reason.strerror, str(path)) from error


def _disk_full_error(folder: Path) -> OSError | None:
    """Return the error of a disk that accepts no more data; None if it accepts data."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return error
    return None


def nearest_existing(path: Path) -> Path:
    """Return a path if it exists, or else its nearest parent folder that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


@contextmanager
def _partial(path: Path, out: Path) -> Iterator[Path]:
    """Yield a hidden path next to `path` to write to, and remove it at the end.

    The name of the hidden path contains the process id.

    Args:
        path: the file or folder that is written.
        out: its name in errors.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with report_disk_errors(out):
            yield partial
    finally:
        _remove(partial)


def _flush(path: Path) -> None:
    """Flush a file, or all files of a folder: some disks report only then that they are full."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the parent folders of a path.

    If the body fails, new folders that are empty are removed again.
    """
    made = [p for p in path.absolute().parents if not p.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        _remove_empty(made)
        raise


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Write a file that replaces `path` once it is complete; if writing fails, remove it.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    with _parents(path), _partial(path, path) as partial:
        yield partial
        _flush(partial)
        partial.replace(path)


@contextmanager
def fill_folder(folder: Path, last: str) -> Iterator[Path]:
    """Provide a temporary folder; its files are moved into `folder` once all are complete.

    The file that marks the others as complete is moved last.

    Args:
        folder: the target folder; it may contain other files.
        last: the name of the file that is moved last.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    with _partial(folder / last, folder / last) as partial:
        partial.mkdir(parents=True)
        yield partial
        _flush(partial)
        for path in sorted(partial.iterdir(), key=lambda p: p.name == last):
            path.replace(folder / path.name)


@contextmanager
def replace_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder that becomes `out` once it is complete; if writing fails, remove it.

    Args:
        out: the folder.
        overwrite: whether an existing folder is replaced.

    Raises:
        UserError: another process writes the same folder.
        OSError: the disk is full, or cannot be written to.
    """
    home = out.absolute()
    beside = nearest_existing(home.parent) / home.name
    aside = beside.with_name(f".{beside.name}.replaced")
    with lock_output(out, _lock(beside)), _partial(beside, out) as partial:
        _restore(aside, home)
        partial.mkdir()
        yield partial
        _flush(partial)
        try:
            with _parents(home):
                if overwrite and home.exists():
                    home.replace(aside)
                partial.replace(home)
        finally:
            _restore(aside, home)


@contextmanager
def set_aside(out: Path) -> Iterator[None]:
    """Move a finished output away while its successor is made in its place.

    It is removed once the successor exists, complete or interrupted. If there is none in the end,
    it is put back.

    Raises:
        UserError: another process is writing the output.
    """
    home = out.absolute()
    aside = home.with_name(f".{home.name}.replaced")
    with lock_output(out, lock_file_in(out) if out.is_dir() else None):
        pass
    home.replace(aside)
    try:
        yield
    finally:
        if home.is_dir():
            _remove_empty([home])
        _restore(aside, home)


def _restore(aside: Path, home: Path) -> None:
    """Restore a folder that was moved aside, or remove it if the new one is in place."""
    if aside.exists():
        if home.exists():
            _remove(aside)
        else:
            aside.replace(home)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replace_file(path) as partial:
        partial.write_text(text, "utf-8")


def append(path: Path, text: str) -> None:
    """Add lines to a text file; if writing fails, the last line may be incomplete."""
    with report_disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def lock_output(out: Path, lock: Path | None = None, wait: bool = False) -> Iterator[None]:
    """Lock an output against other processes that write the same output.

    The lock ends with its process. Incomplete output of a killed process is removed. No lock file
    remains. The thread that holds the lock may request it again.

    Args:
        out: a file or a folder.
        lock: the file that is locked: `lock_file_in` a folder; by default a file next to `out`.
        wait: whether to wait until no other process holds the lock, instead of raising an error.

    Raises:
        UserError: another process holds the lock.
    """
    lock = lock or _lock(out)
    made = [p for p in (lock.parent, *lock.parent.absolute().parents) if not p.exists()]
    held = FileLock(lock, is_singleton=True)
    try:
        with report_disk_errors(out):
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise UserError(
            f"another process is writing '{out}': wait until it ends, or name another"
        ) from None
    except BaseException:
        _remove_empty(made)
        raise
    try:
        if held.lock_counter == 1:
            for left in lock.parent.glob(
                f".{'*' if lock.parent == out else escape(out.name)}.*.partial"
            ):
                _remove(left)
        yield
    finally:
        if held.lock_counter == 1:
            lock.unlink(missing_ok=True)  # while locked: a waiting process notices and retries
        held.release()
        _remove_empty(made)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove empty folders, the innermost first, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def lock_file_in(folder: Path) -> Path:
    """Return the lock file of a folder that is written file by file."""
    return folder / ".lock"


def cache_folder() -> Path:
    """Return the cache folder: `DRAFTREE_CACHE`, by default `~/.cache/draftree`."""
    return Path(os.environ.get("DRAFTREE_CACHE") or Path.home() / ".cache" / "draftree")


def check_writable(path: Path, folder: bool = False, endings: Collection[str] = ()) -> None:
    """Refuse an output that cannot be written, before the work for it starts.

    Args:
        path: the path of the output.
        folder: whether the output is a folder.
        endings: allowed endings of a file's name; all by default.

    Raises:
        UserError: a folder is given for a file or the reverse, the ending is not allowed, the place
            is not writable, or the parent folder of a file whose endings are limited does not
            exist.
    """
    if endings and path.suffix.lower() not in endings:
        raise UnknownName(f"ending of '{path}',", path.suffix, endings)
    if path.exists() and path.is_dir() is not folder:
        raise UserError(
            f"'{path}' is a {'file' if folder else 'folder'}, allowed is a {'folder' if folder else 'file'}"
        )
    if (
        endings and not path.parent.exists()
    ):  # a picture's folder must exist: a new name may be a misspelling
        raise UserError(f"'{path}' cannot be written: there is no folder '{path.parent}'")
    home = nearest_existing(path if folder else path.parent)
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise UserError(
            f"'{path}' cannot be written: '{home}' is not a folder with the right to write"
        )
