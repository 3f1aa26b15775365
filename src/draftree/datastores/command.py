"""What `draftree datastore` does between its options and its result."""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import draftree
from draftree import inputs, terminal
from draftree.datastores.corpus import Reading, files
from draftree.drafters._checkpoint import ABOUT, CONFIG
from draftree.drafters._stored import Stored, note, tokenizer_hash
from draftree.errors import UnknownName, UserError
from draftree.evaluation.provenance import commit
from draftree.files import whole_folder
from draftree.registry import names, part
from draftree.target import tokenizer_of

MEGA = 1_000_000


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        kind: the drafter that will search it.
        target: whose tokenizer it is for.
        data: files and folders of the corpus.
        out: the new folder.
        settings: how it is built, as key=value.
    """

    kind: str
    target: str
    data: Sequence[Path]
    out: Path
    settings: Sequence[str] = ()


def kinds() -> dict[str, type[Stored]]:
    """The drafters that search a datastore, by name."""
    every = {name: part("drafter", name) for name in names("drafter")}
    return {name: method for name, method in every.items() if issubclass(method, Stored)}


def build(asked: Asked) -> dict[str, Any]:
    """Builds a datastore; returns its note.

    Nothing is at `out` before all is there.

    Raises:
        UserError: something that was asked for does not exist or does not fit, `out` has something in it, or another
            process builds it.
    """
    known = kinds()
    if asked.kind not in known:
        raise UnknownName("kind of datastore", asked.kind, known)
    settings, out = parsed(asked.settings), asked.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' exists, allowed is a new or an empty folder")
    inputs.writable(out, folder=True)
    found = files(asked.data)
    tokenizer = tokenizer_of(asked.target)
    vocab = 1 + max(tokenizer.get_vocab().values())
    start, done, of = time.perf_counter(), 0, -(-sum(file.bytes for file in found) // MEGA)
    with terminal.progress(f"datastore for {asked.kind}, MB", of) as bar, whole_folder(out) as folder:

        def read(size: int) -> None:
            nonlocal done
            done = size // MEGA
            bar(done)

        reading = Reading(found, tokenizer, read)
        figures = known[asked.kind].build(reading, vocab, folder, settings, lambda doing: bar(done, doing))
        said = {
            "drafter": asked.kind, "target": asked.target, "tokenizer": tokenizer_hash(tokenizer), "vocab": vocab,
            "files": len(found), "undecodable": reading.undecodable, "documents": reading.documents, "tokens": reading.tokens,
            "text_bytes": reading.text_bytes, "bytes": sum(path.stat().st_size for path in folder.iterdir()), **figures,
            "seconds": round(time.perf_counter() - start, 3),
            "data": list(map(str, asked.data)), "settings": settings, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["draftree", *sys.argv[1:]]), "version": draftree.__version__, "commit": commit(),
        }  # fmt: skip
        (folder / CONFIG).write_text(json.dumps({ABOUT: said}, indent=2) + "\n")
    return said


def parsed(settings: Sequence[str]) -> dict[str, str]:
    """Settings by name.

    Raises:
        UserError: one is not key=value.
    """
    pairs = [item.partition("=") for item in settings]
    for item, (key, equals, _) in zip(settings, pairs, strict=True):
        if not key or not equals:
            raise UserError(f"--set is '{item}', allowed is KEY=VALUE")
    return {key: value for key, _, value in pairs}


def show(folder: Path) -> dict[str, Any]:
    """What a datastore says of itself.

    Raises:
        UserError: it is not a datastore.
    """
    return note(folder)


def print_note(folder: Path, said: Mapping[str, Any]) -> None:
    """A datastore's note as a table."""
    rows = [{"what": key.replace("_", " "), "value": _shown(key, value)} for key, value in said.items()]
    terminal.output().print(terminal.table(str(folder), rows))


def _shown(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return terminal.bytes_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def print_built(out: Path, said: Mapping[str, Any]) -> None:
    """What was built, in a line."""
    left_out = f", {said['undecodable']} files left out that are not UTF-8 text" if said["undecodable"] else ""
    terminal.output().print(
        f"{out}: datastore for '{said['drafter']}', {said['documents']:,} documents, {said['tokens']:,} tokens, "
        f"{terminal.bytes_text(said['text_bytes'])} of text in {terminal.bytes_text(said['bytes'])}{left_out}",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip
