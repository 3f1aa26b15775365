"""`draftree costs`: measures the costs of passes on this machine explicitly."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from draftree.cli.console import emit
from draftree.cli.options import (
    AsJson,
    DrafterSpec,
    Force,
    LoadingOptions,
    TargetName,
    dataclass_command,
)
from draftree.utils.validated_dataclass import knob


@dataclass(frozen=True)
class CostsOptions:
    """Store the options of `draftree costs`."""

    target: TargetName = "demo"
    drafter: DrafterSpec = None
    rows: list[int] = knob(
        (1,), min=1, help="Batch size, rounded up to a power of two; may be repeated."
    )
    refresh: bool = knob(False, help="No effect: costs are always measured.")
    out: Path | None = knob(
        None, written=(), short="-o", help="Save the costs to a file, for --costs."
    )
    plot: Path | None = knob(
        None, written=(".png", ".svg", ".pdf"), help="Draw the costs: a .png, .svg or .pdf file."
    )
    force: Force = False
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def show_costs(ctx: typer.Context, asked: CostsOptions) -> None:
    """Measure the time of a draft step and of a target pass on this machine.

    Times are listed by number of tokens, context length and batch size. Nobody has to run this
    command, because engines learn costs while they generate. The measurements are added to the
    learnt costs. With --out they are also written to a file for --costs.
    """
    from draftree.cli import arguments, cost_charts, terminal
    from draftree.cost_estimate import cost_key, learnt_costs
    from draftree.costs.cost_table import CostTable, round_up_batch_size
    from draftree.evaluation.time_estimate import timed_seconds
    from draftree.measure_costs import MAX_SECONDS, measure

    if asked.plot is not None:
        cost_charts.require_matplotlib()
    spec, model, opened = arguments.open_drafter(asked.drafter, asked.target, **asked.loading)
    title = f"{spec} for {asked.target}"
    sizes = list(dict.fromkeys(map(round_up_batch_size, asked.rows)))
    terminal.forecast(
        "timing draft steps and passes", timed_seconds(model, opened, sizes, MAX_SECONDS)
    )
    with terminal.busy("measuring the cost of a step") as tell:
        entries = [entry for several in sizes for entry in measure(model, opened, several, tell)]
    about = cost_key(model) | {
        "drafter": opened.description,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    table, learnt = CostTable(tuple(entries), about), learnt_costs(model, opened)
    learnt.teach(table)
    if asked.out is not None:
        table.save(asked.out)
    if asked.plot is not None:
        cost_charts.draw_costs(table, title, asked.plot)
    place = learnt.drafter.path
    if asked.as_json:
        emit(asdict(table) | {"ratio": table.ratio, "kept": str(place)})
    else:
        terminal.show_costs(terminal.output(), title, table, place)
