"""`draftree replay`: judges drafters and policies along texts that the target has written once."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.bench import CellsOptions, PreparedRun, prepare, run_with_journal, save_and_show
from draftree.cli.console import interruptible, remark
from draftree.cli.options import AsJson, dataclass_command
from draftree.errors import UserError
from draftree.utils.validated_dataclass import knob

if TYPE_CHECKING:
    from draftree.costs.cost_table import CostTable
    from draftree.drafters.base import Drafter
    from draftree.engine import Engine
    from draftree.evaluation.bench import Bench
    from draftree.evaluation.roofline import Machine

REPLAYABLE_ACCEPTORS = ("greedy", "match")
"""Acceptors that can be replayed: their choice at every position depends only on the text and the
seed."""


@dataclass(frozen=True)
class ReplayOptions(CellsOptions):
    """Store the options of `draftree replay`."""

    recording: Path = knob(
        Path("recording"),
        help="Folder of recorded texts and hidden states; missing ones are recorded first.",
    )
    as_json: AsJson = False


@dataclass_command
def replay(ctx: typer.Context, asked: ReplayOptions) -> None:
    """Compare drafters and policies on recorded texts, for this or another machine; the model does not run."""
    asked = asked.with_default_out("replay")
    result, work = run_replay(ctx, asked)
    save_and_show(result, asked, list(work.requests), asked.as_json)
    remark(f"the recordings stay in '{asked.recording}', for the next replay")


def run_replay(ctx: typer.Context, asked: ReplayOptions) -> "tuple[dict[str, Any], Bench]":
    """Run a replay, and return its result and the benchmark that was run.

    Raises:
        UserError: a requested part does not exist, does not fit, or cannot be replayed.
    """
    from draftree.cli import terminal
    from draftree.evaluation.bench import Bench
    from draftree.evaluation.result_file import Run, assemble_result
    from draftree.evaluation.roofline import Machine
    from draftree.evaluation.trace_store import Recordings

    machines = [Machine.load(name) for name in dict.fromkeys(asked.machine)]
    if machines and asked.costs:
        raise UserError(
            "--machine and --costs were given, allowed is one of them: a machine is a file of costs by its name"
        )
    ready = prepare(ctx, asked)
    engines = replayable_engines(ready)
    some = next(iter(engines.values()))
    requests = ready.requests(engines)
    with terminal.busy("loading the recordings"):
        recordings = Recordings.open(
            asked.recording, some.target, [e.drafter.needs for e in engines.values()]
        )
    work = Bench(
        ready.cells, engines, requests, asked.seed, top_p=asked.top_p, recordings=recordings
    )
    record(work)
    about = ready.about(work) | {"replayed": True}
    runs = dict[str, Run]()
    with contextlib.ExitStack() as journals:
        for name, priced in on_each(work, machines):
            first = next(iter(runs.values()), ([], {}))[0]
            journal = asked.out.with_name(f"{asked.out.name}.{name}") if name else asked.out
            done = journals.enter_context(
                run_with_journal(
                    priced, about, tables(priced), journal, f"replaying {name}".strip()
                )
            )
            merged = (
                [dict(before) | new for before, new in zip(first, done, strict=True)]
                if first
                else done
            )
            runs[name] = merged, priced.prices
        with terminal.progress("measuring the drafters by themselves", None) as tell:
            result = assemble_result(work, runs, about, ready.categories(requests), tell)
    return result, work


def tables(work: "Bench") -> "dict[str, CostTable]":
    """Return the cost tables of a benchmark's drafters, by drafter.

    Drafters whose costs are given for a single context (`Costs`) are left out.
    """
    from draftree.costs.cost_table import CostTable

    return {d: c for d, c in work.prices.items() if isinstance(c, CostTable)}


def on_each(work: "Bench", machines: "Sequence[Machine]") -> Iterator[tuple[str, "Bench"]]:
    """Yield for each machine its name and the benchmark with its costs.

    Cells whose trees do not depend on costs run only on the first machine.

    If no machine is given, the benchmark is yielded once, with an empty name and this machine's
    costs.
    """
    from draftree.cli import terminal
    from draftree.evaluation.bench import with_fixed_costs
    from draftree.evaluation.roofline import count_draft_reads

    with terminal.busy("measuring the cost of a step") as tell:
        engines = {} if machines else with_fixed_costs(work.engines, tell)
        reads = (
            {d: count_draft_reads(e.target, e.drafter, tell) for (d, _), e in work.engines.items()}
            if machines
            else {}
        )
    if not machines:
        yield "", replace(work, engines=engines)
    reading = {policy for (_, policy), e in work.engines.items() if e.policy.reads_costs}
    for i, machine in enumerate(machines):
        costs = {d: machine.costs(r) for d, r in reads.items()}
        engines = {pair: replace(e, costs=costs[pair[0]]) for pair, e in work.engines.items()}
        cells = [c for c in work.cells if i == 0 or c.plain or c.policy in reading]
        yield machine.name, replace(work, engines=engines, cells=cells, sessions={})


def replayable_engines(ready: PreparedRun) -> "dict[tuple[str, str], Engine]":
    """Return a dict from (drafter, policy) to an engine that can be replayed.

    Raises:
        UserError: an acceptor or a drafter cannot be replayed; the message names it.
    """
    for _, _, acceptor in ready.pairs:
        if acceptor is not None and acceptor.partition(":")[0] not in REPLAYABLE_ACCEPTORS:
            told = f"acceptor '{acceptor}' cannot be replayed: what it accepts hangs on the target's whole distribution"
            raise UserError(f"{told}; allowed are {' and '.join(REPLAYABLE_ACCEPTORS)}")
    engines = ready.load()
    for (name, _), engine in engines.items():
        check_replayable(name, engine.drafter)
    return engines


def check_replayable(name: str, drafter: "Drafter[Any]") -> None:
    """Raise an error for a drafter that needs more than recorded outputs of the target.

    Args:
        name: name of the drafter in the options.
        drafter: the opened drafter.

    Raises:
        UserError: the drafter cannot be replayed.
    """
    if not drafter.replayable:
        reads = (
            "sends probes, which need"
            if drafter.sends_probes
            else "reads what was not accepted, which needs"
        )
        raise UserError(f"drafter '{name}' cannot be replayed: it {reads} a pass of the target")


def record(work: "Bench") -> None:
    """Record the missing texts, after printing their number and size."""
    from draftree.cli import terminal
    from draftree.evaluation.time_estimate import plain_seconds

    recordings = work.recordings
    assert recordings is not None
    temperatures = dict.fromkeys(c.temperature for c in work.cells)
    every = [work.at_temperature(request, t) for t in temperatures for request in work.requests]
    missing = recordings.missing(every)
    if not missing:
        return
    most = (
        sum(len(r.prompt) + r.max_new_tokens for r in missing) * recordings.bytes_per_token / 2**20
    )
    told = f"{len(missing)} texts in '{recordings.folder}', {recordings.bytes_per_token:,} bytes a token"
    remark(f"recording {told}: at most {most:,.1f} MiB")
    some = next(iter(work.engines.values()))
    terminal.forecast(
        f"recording {len(missing)} texts", plain_seconds(some.target, some.drafter, missing)
    )
    again = "the same command goes on with the texts that are missing"
    with terminal.progress("recording", 2 * len(missing)) as tell, interruptible(again):
        recordings.record(missing, tell)
