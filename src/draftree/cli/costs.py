"""`draftree costs`: measures the costs of passes on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson, Device, DrafterSpec, DType, TargetName


def show_costs(
    target: TargetName = "demo",
    drafter: DrafterSpec = None,
    rows: Annotated[list[int], typer.Option(min=1, help="Texts written at a time, up to a power of two; repeat it.")] = [1],  # noqa: B006 - typer's way
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write them to a file, for --costs.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them: a file ending in .png, .svg or .pdf.")] = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Show what a draft step and a target pass cost on this machine, by tokens fed, length and number of the rows."""
    from draftree.boundary import files
    from draftree.cli import inputs, plots, terminal
    from draftree.costs import bracket
    from draftree.timing import identity, measured, store

    if plot is not None:
        plots.check(plot)
    if out is not None:
        files.writable(out)
    spec, model, opened = inputs.opened(drafter, target, dtype, device)
    with terminal.busy("measuring what a step costs") as tell:
        for several in dict.fromkeys(map(bracket, rows)):
            table = measured(model, opened, several, refresh, tell)
    if out is not None:
        table.save(out)
    if plot is not None:
        plots.draw_costs(table, f"{spec} for {target}", plot)
    place = store(identity(model, opened))
    if as_json:
        emit(asdict(table) | {"ratio": table.ratio, "kept": str(place)})
    else:
        terminal.show_costs(terminal.output(), f"{spec} for {target}", table, place)
