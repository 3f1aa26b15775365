"""`draftree tune`: searches for a policy's knobs, and judges them beside the defaults."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from draftree.cli.console import emit, interruptible, remark
from draftree.cli.options import (
    AsJson,
    CostsFile,
    LoadingOptions,
    Seed,
    TargetName,
    dataclass_command,
)
from draftree.errors import UserError
from draftree.utils.files import as_user_error, check_writable
from draftree.utils.validated_dataclass import knob


@dataclass(frozen=True)
class TuneOptions:
    """Hold the options of `draftree tune`."""

    policy: str = knob("pct", help="The policy; options given in it (name:key=value) stay fixed.")
    drafter: str | None = knob(None, help="The drafter; by default the one of generate.")
    target: TargetName = "demo"
    suite: list[str] = knob(
        (),
        help="Prompts: a shipped suite (draftree list; by default demo), a file, or FORMAT:FILE; may be repeated.",
    )
    knobs: list[str] = knob(
        (),
        flag="--knob",
        help="Search only this option of the policy; may be repeated. By default all with a range.",
    )
    trials: int = knob(40, min=1, help="Number of settings to try.")
    limit: int | None = knob(None, min=4, help="Only the first N prompts.")
    per_category: int | None = knob(None, min=1, help="Only the first N prompts of each category.")
    max_new_tokens: int = knob(128, min=2, help="Maximum number of new tokens for each prompt.")
    temperature: float = knob(0.0, least=0, help="0 for greedy decoding.")
    recording: Path | None = knob(
        None,
        help="Folder in which recorded texts are kept for later searches; by default they are removed.",
    )
    storage: Path | None = knob(
        None, help="File of optuna with the settings tried, to continue an interrupted search."
    )
    costs: CostsFile = None
    machine: str | None = knob(
        None, help="Simulate another machine by its saved costs (draftree list)."
    )
    seed: Seed = 0
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def tune(ctx: typer.Context, asked: TuneOptions) -> None:
    """Search for the best options of a policy on half of the prompts, and measure them on the other half."""
    from draftree.cli import arguments, terminal
    from draftree.cli.replay import check_replayable, record
    from draftree.evaluation import suites
    from draftree.evaluation.bench import Bench, with_fixed_costs
    from draftree.evaluation.grid import Cell, assemble, choose_requests
    from draftree.evaluation.policy_search import OptionSearch, search_space
    from draftree.evaluation.trace_store import Recordings
    from draftree.registry import build
    from draftree.target.target import Target

    if find_spec("optuna") is None:
        raise UserError("searching needs the package 'optuna': pip install 'draftree[tune]'")
    search_space(build("policy", asked.policy), asked.knobs)
    drafter = arguments.drafter(asked.drafter, asked.target)
    suite = suites.join_suites(list(asked.suite) or ["demo"])
    fixed = arguments.fixed_costs(asked.costs)
    machines = arguments.machines_of_each(
        [asked.machine] if asked.machine else [], [asked.costs] if asked.costs else [], [drafter]
    )
    if asked.storage is not None:
        check_storage(asked.storage)
    arguments.quiet()
    with terminal.busy("loading"):
        engines = assemble(
            lambda: Target.load(asked.target, **asked.loading), [(drafter, asked.policy)], fixed
        )
    with terminal.busy("measuring the cost of a step") as tell:
        engines = (
            arguments.with_machines(engines, machines, tell)[0]
            if machines
            else with_fixed_costs(engines, tell)
        )
    engine = engines[drafter, asked.policy]
    check_replayable(drafter, engine.drafter)
    requests, _ = choose_requests(
        suite.prompts, engine, asked.max_new_tokens, asked.limit, asked.per_category
    )
    kept = asked.recording or Path(ctx.with_resource(TemporaryDirectory(prefix="draftree-")))
    recordings = Recordings.open(kept, engine.target, [engine.drafter.needs])
    work = Bench(
        [Cell(None, None, asked.temperature)], engines, requests, asked.seed, recordings=recordings
    )
    record(work)
    remark(
        f"{asked.trials} settings are replayed along half of the texts; the first one shows how long that takes"
    )
    search = OptionSearch(engine, drafter, asked.policy, recordings, asked.temperature, asked.seed)
    again = (
        f"the same command goes on from '{asked.storage}'"
        if asked.storage
        else "name --storage to go on from there"
    )
    with terminal.progress("tune", asked.trials) as advance, interruptible(again):
        found = search.run(requests, asked.trials, asked.storage, asked.knobs, advance)
    if asked.as_json:
        emit(found.as_json() | {"simulated": bool(machines), "machine": asked.machine})
        return
    where = f"simulated on {asked.machine}: " if machines else ""
    rows = [
        {
            "half": half,
            "policy": policy,
            "τ": f"{r['acceptance_length']:.2f}",
            "nodes/step": f"{r['nodes_per_step']:.1f}",
            "counted speed-up": f"{r['counted_speedup']:.3f}",
        }
        for half, several in (("searched", found.searched), ("judged", found.judged))
        for policy, r in several.items()
    ]
    terminal.output().print(
        terminal.table(f"{where}{drafter}, {found.trials} settings, {len(requests)} prompts", rows)
    )
    terminal.line(found.recommendation())


def check_storage(path: Path) -> None:
    """Refuse a file that Optuna did not write; a new or empty file is allowed.

    Raises:
        UserError: the file cannot be written, or holds something else.
    """
    check_writable(path)
    if not path.exists() or not path.stat().st_size:
        return
    told = f"--storage is '{path}', allowed is a new file or one of an earlier search"
    with as_user_error(told), path.open(encoding="utf-8") as file:
        json.loads(file.readline())["op_code"]
