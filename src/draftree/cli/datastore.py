"""`draftree datastore`: builds and shows the corpora that drafters without training search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from draftree.cli.console import NOTHING_KEPT, emit, interruptible
from draftree.cli.options import AsJson, TargetName
from draftree.errors import UserError


def build_datastore(
    kind: Annotated[str, typer.Option(help="The drafter that will search it.")],
    data: Annotated[
        list[Path],
        typer.Option(help="Text, source code, JSONL, JSON or parquet, or a folder of them; repeat it for several."),
    ],
    out: Annotated[Path, typer.Option(help="The new folder, which --drafter takes.")],
    target: TargetName = "demo",
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="How it is built; repeat it.")] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Build a datastore from a corpus, for the targets that have this one's tokenizer."""
    from draftree.cli import inputs, terminal
    from draftree.training.datastore import build

    inputs.quiet()
    with interruptible(NOTHING_KEPT), terminal.progress(f"datastore for {kind}, MB", None) as tell:
        note = build(kind, target, data, out, parsed(settings), tell)
    if as_json:
        return emit({"out": str(out)} | note)
    left_out = f", {note['undecodable']} files left out that are not UTF-8 text" if note["undecodable"] else ""
    terminal.line(
        f"{out}: datastore for '{note['drafter']}', {note['documents']:,} documents, {note['tokens']:,} tokens, "
        f"{decimal(note['text_bytes'])} of text in {decimal(note['bytes'])}{left_out}"
    )


def show_datastore(folder: Annotated[Path, typer.Argument(help="Of a datastore.")], as_json: AsJson = False) -> None:
    """Show what a datastore was built from, how, and for which tokenizer."""
    from draftree.cli import terminal
    from draftree.drafters.lookup import datastore

    note = datastore.note(folder)
    if as_json:
        return emit(note)
    rows = [{"what": key.replace("_", " "), "value": _shown(key, value)} for key, value in note.items()]
    terminal.output().print(terminal.table(str(folder), rows))


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


def _shown(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return decimal(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
