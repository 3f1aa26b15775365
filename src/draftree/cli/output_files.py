"""Check output paths before the work begins; overwrite files only with `--force`."""

import re
import sys
from collections.abc import Collection
from pathlib import Path

import typer

from draftree.errors import UserError
from draftree.utils.files import check_writable

MARKER_FILES = ("config.json", "training.json")
"""Files that identify a folder as written by draftree."""
DATA_ENDING = re.compile(r"\.(gguf|jsonl?|parquet|txt)$")
"""The ending of a file name that is left out of a default name; other dots are part of the name."""


def default_name(*parts: str) -> str:
    """Return the default name of an output, such as `bench-demo-questions`."""
    names = (DATA_ENDING.sub("", Path(part).name.lower()) for part in parts)
    return "-".join(filter(None, (re.sub(r"\W+", "-", name).strip("-") for name in names)))


def check_output(
    path: Path,
    force: bool,
    option: str = "--out",
    *,
    folder: bool = False,
    endings: Collection[str] = (),
) -> bool:
    """Raise an error if an output cannot be written, and ask before overwriting one.

    Without a terminal, an existing output is refused, because nobody can be asked.

    Args:
        path: file or folder to write.
        force: whether `--force` was given.
        option: option with which the user can name another path.
        folder: whether the output is a folder, which is replaced completely.
        endings: allowed suffixes of a file; empty for any suffix.

    Returns:
        Whether an existing output will be overwritten.

    Raises:
        UserError: the output cannot be written, or must not be overwritten.
    """
    check_writable(path, folder=folder, endings=endings)
    if not path.exists() or (folder and not any(path.iterdir())):
        return False
    if folder and not any((path / name).is_file() for name in MARKER_FILES):
        what = "holds files that draftree did not write"
        raise UserError(f"'{path}' {what}; name a new folder with {option}")
    if force:
        return True
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise UserError(f"'{path}' exists; --force overwrites it, {option} names another")
    try:
        agreed = typer.confirm(f"'{path}' exists. Overwrite it?", err=True)
    except typer.Abort as ended:
        print(file=sys.stderr)  # the question has no line break
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise ended.__context__ from None
        agreed = False  # Ctrl-D
    if not agreed:
        raise UserError(f"'{path}' was left as it is; {option} names another")
    return True
