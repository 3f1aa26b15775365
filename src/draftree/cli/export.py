"""`draftree export`: writes a drafter in another format."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson


def export_drafter(
    drafter: Annotated[str, typer.Argument(help="A checkpoint's folder, ours or published, or a shipped drafter's name.")],
    wanted: Annotated[str, typer.Option("--format", help="speculators, eagle or vllm-medusa.")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    target: Annotated[str | None, typer.Option(help="The drafter's target; by default the one its checkpoint names.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter in the layout that another program reads."""
    from draftree.boundary import files
    from draftree.cli import inputs, terminal
    from draftree.training.export import export

    files.writable(out, folder=True)
    inputs.quiet()
    with terminal.busy("exporting"):
        done = export(drafter, wanted, out, target)
    if as_json:
        emit(asdict(done))
    else:
        terminal.line(f"{done.out}: '{done.drafter}' as {done.format}, {done.tensors} tensors, {done.bytes / 1e6:.1f} MB")
