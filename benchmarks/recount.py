"""Compute the counted figures of a saved result with other costs, without running anything.

    python benchmarks/recount.py result.json --costs other_machine.json --out recounted.json
    python benchmarks/recount.py result.json --machine h100-8b --machine rtx4090-8b-int4 --without pct
    python benchmarks/recount.py result.json --one-curve

A policy that reads costs would grow other trees on another machine, so it is refused unless it is
left out by `--without`. `--one-curve` prices all drafters by the median of their target curves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from common.command_line import run
from draftree.cli.console import emit
from draftree.cli.options import AsJson, Force, Machines, dataclass_command
from draftree.errors import UserError
from draftree.utils.files import write_text
from draftree.utils.validated_dataclass import knob


@dataclass(frozen=True)
class RecountOptions:
    """Store the options of the script."""

    result: Annotated[Path, typer.Argument(help="A result of bench or replay.")]
    costs: list[Path] = knob(
        (), help="A file of costs for all drafters, or one for each in the order of the result."
    )
    machine: Machines = knob(())
    one_curve: bool = knob(
        False, help="One curve of target costs for all drafters: the median of theirs."
    )
    without: list[str] = knob((), help="A policy that is left out; may be repeated.")
    out: Path | None = knob(
        None,
        written=(),
        short="-o",
        help="Where the result is saved, as JSON; by default it is only shown.",
    )
    force: Force = False
    as_json: AsJson = False


@dataclass_command
def recount(ctx: typer.Context, asked: RecountOptions) -> None:
    """Compute the speed of a saved result with the costs of another machine, without running anything."""
    from common import reprice as counting
    from draftree.cli import arguments, terminal
    from draftree.evaluation import result_rows, text_tables
    from draftree.evaluation.roofline import Machine

    if sum(map(bool, (asked.costs, asked.machine, asked.one_curve))) != 1:
        raise UserError("recount needs exactly one of --costs, --machine and --one-curve")
    machines = [Machine.load(name) for name in dict.fromkeys(asked.machine)]
    result = result_rows.read_result(asked.result)
    with result_rows.as_result_error(asked.result):
        saved = counting.without_policies(result, asked.without)
        if machines:
            result = counting.on_machines(saved, machines)
        elif asked.one_curve:
            result = counting.on_one_curve(saved)
        else:
            result = counting.reprice_result(
                saved, arguments.costs_of_each(asked.costs, counting.drafters(saved))
            )
        text = result_rows.as_text(result)
        heading = title(result, asked.result)
        shown = text_tables.counted_table(result["rows"], result["oracle"])
    if asked.out is not None:
        write_text(asked.out, text)
    if asked.as_json:
        emit(result)
        return
    terminal.output().print(terminal.table(heading, shown))
    for machine in machines:
        if counting.order_changes([r for r in result["rows"] if r["machine"] == machine.name]):
            terminal.line(
                f"on {machine.name} another cell is the fastest where costs are varied: see 'if varied'"
            )


def title(result: dict[str, Any], path: Path) -> str:
    """Return the title of the table, which says whether the costs are simulated."""
    devices = {about["device"] for about in result["provenance"].get("machines", {}).values()}
    if not result["simulated"]:
        return f"the steps of {path} at other costs"
    return f"Simulated: the acceptance of {path} on the cost curves of {'; '.join(sorted(devices)) or 'another machine'}"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the script and end the program."""
    run(recount, args)


if __name__ == "__main__":
    main()
