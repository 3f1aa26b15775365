"""`draftree datastore`: builds and shows the corpora that drafters without training search."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from draftree.cli.console import NOTHING_KEPT, emit, interruptible
from draftree.cli.options import AsJson, Force, SourceOptions, TargetName, dataclass_command
from draftree.cli.output_files import check_output, default_name
from draftree.utils.validated_dataclass import knob


@dataclass(frozen=True)
class BuildOptions:
    """Store the options of `draftree datastore build`."""

    kind: str = knob(metavar="DRAFTER", help="The drafter that will search it: rest or aded.")
    data: list[Path] = knob(
        metavar="PATH",
        help="Text, source code, JSONL, JSON or parquet, or a folder of them; may be repeated.",
    )
    out: Path | None = knob(
        None,
        short="-o",
        help="The new folder, which --drafter takes; by default DRAFTER-MODEL in this one.",
    )
    force: Force = False
    skip_bad_rows: bool = knob(
        False, help="Leave out rows that cannot be read, and name the first of them."
    )
    target: TargetName = "demo"
    settings: list[str] = knob(
        (), flag="--set", metavar="KEY=VALUE", help="Set an option of the build; may be repeated."
    )
    source: SourceOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def build_datastore(ctx: typer.Context, asked: BuildOptions) -> None:
    """Build a datastore from a corpus, for the targets that have this one's tokenizer."""
    from draftree.cli import arguments, terminal
    from draftree.data.readers import Skipped
    from draftree.target.load_options import Source
    from draftree.training.base import LOG
    from draftree.training.datastore import CorpusFiles, create_datastore

    settings, source = parse_settings(asked.settings), Source.of(asked.source)
    out = asked.out or Path(default_name(asked.kind, asked.target))
    overwrite = check_output(out, asked.force, folder=True)
    arguments.quiet()
    skipped = Skipped() if asked.skip_bad_rows else None
    with (
        interruptible(NOTHING_KEPT),
        terminal.progress(f"datastore for {asked.kind}, MB", None) as tell,
    ):
        corpus = CorpusFiles(asked.target, asked.data, source, skipped)
        note = create_datastore(asked.kind, corpus, out, settings, tell, overwrite)
    if skipped and skipped.count:
        LOG.info("%s", skipped)
    if asked.as_json:
        return emit({"out": str(out)} | note)
    left_out = (
        f", {note['undecodable']} files left out that are not UTF-8 text"
        if note["undecodable"]
        else ""
    )
    terminal.line(
        f"{out}: datastore for '{note['drafter']}', {note['documents']:,} documents, {note['tokens']:,} tokens, "
        f"{decimal(note['text_bytes'])} of text in {decimal(note['bytes'])}{left_out}"
    )


def show_datastore(
    folder: Annotated[Path, typer.Argument(help="Folder of a datastore.")], as_json: AsJson = False
) -> None:
    """Show what a datastore was built from, how, and for which tokenizer."""
    from draftree.cli import terminal
    from draftree.drafters.retrieval import datastore_drafter

    note = datastore_drafter.read_note(folder)
    if as_json:
        return emit(note)
    rows = [
        {"what": key.replace("_", " "), "value": _format_entry(key, value)}
        for key, value in note.items()
    ]
    terminal.output().print(terminal.table(str(folder), rows))


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Return a dictionary of settings of the form KEY=VALUE."""
    return {key: value for key, _, value in (item.partition("=") for item in settings)}


def _format_entry(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return decimal(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
