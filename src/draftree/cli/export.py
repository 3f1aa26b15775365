"""`draftree export`: writes a drafter in another format."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson


def export_drafter(
    drafter: Annotated[str, typer.Argument(help="A checkpoint's folder, ours or published, or a shipped drafter's name.")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    wanted: Annotated[str | None, typer.Option("--format", help="speculators, eagle or vllm-medusa.")] = None,
    alone: Annotated[bool, typer.Option("--standalone", help="Ours, with an embedding and a head of its own.")] = False,
    target: Annotated[str | None, typer.Option(help="The drafter's target; by default the one its checkpoint names.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter in the layout that another program reads."""
    from draftree.boundary import files
    from draftree.cli import inputs, terminal
    from draftree.errors import UserError
    from draftree.training.export import FORMATS, export, standalone

    if alone is (wanted is not None):
        raise UserError(f"export was given --format {wanted} and --standalone {alone}, allowed is one: {', '.join(FORMATS)}")
    files.writable(out, folder=True)
    inputs.quiet()
    with terminal.busy("exporting"):
        done = standalone(drafter, out, target) if wanted is None else export(drafter, wanted, out, target)
    if as_json:
        emit(asdict(done))
    else:
        terminal.line(f"{done.out}: '{done.drafter}' as {done.format}, {done.tensors} tensors, {done.bytes / 1e6:.1f} MB")
