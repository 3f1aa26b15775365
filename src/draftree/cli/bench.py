"""`draftree bench`: compares drafters and policies on a suite of prompts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import typer
from rich.markup import escape

from draftree.cli.bench_serving import serve_arrivals, serve_batches, served_row
from draftree.cli.console import NOTHING_KEPT, emit, interruptible, remark, was_given
from draftree.cli.options import (
    AsJson,
    Force,
    LoadingOptions,
    Machines,
    Seed,
    TargetName,
    dataclass_command,
)
from draftree.cli.output_files import check_output, default_name
from draftree.errors import UserError
from draftree.utils.files import lock_output
from draftree.utils.validated_dataclass import knob

if TYPE_CHECKING:
    from draftree.costs.cost_table import CostTable
    from draftree.engine import Engine
    from draftree.evaluation.bench import Bench
    from draftree.evaluation.grid import Cell, PromptResult
    from draftree.evaluation.suites import Suite
    from draftree.request import Request


@dataclass(frozen=True)
class CellsOptions:
    """Store the options that `draftree bench` and `draftree replay` share."""

    suite: list[str] = knob(
        (),
        help="Prompts: a shipped suite (draftree list; by default demo), a file, or FORMAT:FILE; may be repeated.",
    )
    prompts: Literal["plain", "official"] = knob(
        "plain",
        help="Wording of a benchmark's questions: official is that of EAGLE's and GLIDE's evaluations.",
    )
    whole: bool = knob(False, help="A text file is one prompt, not one prompt a line.")
    out: Path = knob(
        None,
        kind=Path | None,
        short="-o",
        help="Where the result is saved, as JSON; by default COMMAND-MODEL-SUITE.json in this folder.",
    )
    force: Force = False
    drafter: list[str] = knob(
        (),
        help="A drafter: a name (draftree list), folder or hub id; may be repeated. By default that of generate.",
    )
    policy: list[str] = knob((), help="A policy; may be repeated. By default that of generate.")
    pair: list[str] = knob(
        (),
        metavar="'DRAFTER POLICY [ACCEPTOR]'",
        help="Measure just this combination; may be repeated.",
    )
    acceptor: list[str] = knob(
        (), help="An acceptor; may be repeated. By default greedy at temperature 0, else match."
    )
    target: TargetName = "demo"
    temperature: list[float] = knob(
        (0.0,), least=0, short="-t", help="0 for greedy decoding; may be repeated."
    )
    top_p: float = knob(
        1.0,
        above=0,
        most=1,
        help="Sample from the likeliest tokens whose probabilities add up to this; 1 is all.",
    )
    category: list[str] = knob((), help="Only prompts of this category; may be repeated.")
    limit: int | None = knob(None, min=1, help="Only the first N prompts.")
    per_category: int | None = knob(None, min=1, help="Only the first N prompts of each category.")
    shuffle: bool = knob(
        False, help="Draw the prompts of --limit and --per-category at random, by --seed."
    )
    all_turns: bool = knob(False, help="Ask all questions of a conversation instead of the first.")
    max_new_tokens: int = knob(128, least=1, short="-n", help="Maximum number of new tokens.")
    seed: Seed = 0
    costs: list[Path] = knob(
        (),
        help="Costs saved by draftree costs, for all drafters or for each in turn; may be repeated.",
    )
    machine: Machines = knob(())
    loading: LoadingOptions = knob(None)

    def with_default_out(self, command: str) -> Self:
        """Return the options; a missing name for the result's file is replaced by a default."""
        return replace(
            self, out=self.out or Path(f"{default_name(command, self.target, *self.suites)}.json")
        )

    @property
    def suites(self) -> list[str]:
        """Return the names of the prompt suites, by default `demo`."""
        return list(self.suite) or ["demo"]


@dataclass(frozen=True)
class BenchOptions(CellsOptions):
    """Store the options of `draftree bench`."""

    repeats: int = knob(
        1, min=1, help="Number of times each text is generated; times are averaged."
    )
    arrivals: float | None = knob(
        None,
        above=0,
        metavar="RATE",
        help="Serve the prompts in a running batch, RATE a second on average, at random times that follow from --seed.",
    )
    batch: list[int] = knob(
        (),
        least=1,
        metavar="N",
        help="Serve the prompts N at a time in a running batch, in turns with plain decoding; may be repeated.",
    )
    max_sequences: int = knob(
        8, least=1, help="Maximum number of running sequences, with --arrivals."
    )
    max_cache_tokens: int | None = knob(
        None,
        least=2,
        help="Maximum number of their tokens in the KV cache, with --arrivals or --batch.",
    )
    max_batch_tokens: int = knob(
        512,
        least=1,
        help="Maximum number of prompt tokens read in one step, with --arrivals or --batch.",
    )
    profile: Path | None = knob(
        None,
        written=(".png", ".svg", ".pdf"),
        help="Save a picture of where the time goes: a .png, .svg or .pdf file.",
    )
    as_json: AsJson = False


NO_TIMES = "allowed is one of them: a simulated machine has no times of its parts"


@dataclass_command
def bench(ctx: typer.Context, asked: BenchOptions) -> None:
    """Measure the speed of drafters and policies on a file of prompts, in turns with plain decoding."""
    from draftree.cli import arguments, cost_charts, terminal
    from draftree.evaluation.bench import Bench, with_fixed_costs
    from draftree.evaluation.report_text import name_of
    from draftree.evaluation.result_file import assemble_result
    from draftree.evaluation.step_profile import per_token
    from draftree.evaluation.time_estimate import plain_seconds

    asked = asked.with_default_out("bench")
    if asked.profile is not None:
        cost_charts.require_matplotlib()
        if asked.machine:
            raise UserError(f"--profile is given with --machine, {NO_TIMES}")
    if asked.all_turns and asked.repeats > 1:
        raise UserError(
            f"--repeats is {asked.repeats}, allowed is 1 with --all-turns: a cache holds what came before once"
        )
    if asked.arrivals is not None or asked.batch:
        refuse_with_serving(ctx)
        run_requests(prepare(ctx, asked), asked)
        return
    ready = prepare(ctx, asked)
    if asked.profile is not None and any(c.is_simulated for c in ready.fixed.values()):
        raise UserError(f"--profile is given with --costs of a simulated machine, {NO_TIMES}")
    machines = arguments.machines_of_each(asked.machine, asked.costs, ready.drafters)
    engines, fixed = ready.load(), ready.fixed
    requests = ready.requests(engines)
    with terminal.busy("measuring the cost of a step") as tell:
        if machines:
            engines, fixed = arguments.with_machines(engines, machines, tell)
        known = with_fixed_costs(engines, tell)
        work = Bench(ready.cells, known, requests, asked.seed, asked.repeats, asked.top_p)
        if not machines and not fixed:  # policies go on learning, as they do in use
            work = replace(work, engines=engines, read=work.prices)
    some = next(iter(engines.values()))
    texts = len(requests) * len(ready.cells) * asked.repeats
    seconds = plain_seconds(some.target, some.drafter, requests) * len(ready.cells) * asked.repeats
    terminal.forecast(f"{texts} texts, {len(requests)} prompts in {len(ready.cells)} ways", seconds)
    about = ready.about(work) | {"repeats": asked.repeats}
    with run_with_journal(work, about, fixed, asked.out) as done:
        with terminal.progress("measuring the drafters by themselves", None) as tell:
            result = assemble_result(
                work, {"": (done, work.prices)}, about, ready.categories(requests), tell
            )
        if asked.profile is not None:
            bars = {name_of(r): per_token(r) for r in result["rows"]}
            told = (
                f"Where the time goes: {asked.target}, {ready.suite.name}, {len(requests)} prompts"
            )
            cost_charts.draw_profile(bars, told, asked.profile)
        save_and_show(result, asked, requests, asked.as_json)


def refuse_with_serving(ctx: typer.Context) -> None:
    """Raise an error for options that cannot be combined with `--arrivals` or `--batch`.

    Raises:
        UserError: such an option was given, or both `--arrivals` and `--batch`.
    """
    how = "arrivals" if was_given(ctx, "arrivals") else "batch"
    with_batch = ("batch",) if how == "arrivals" else ("max_sequences",)
    for name in ("all_turns", "repeats", "profile", "machine", *with_batch):
        if was_given(ctx, name):
            raise UserError(
                f"--{name.replace('_', '-')} is given with --{how}, allowed is one of them"
            )


def run_requests(ready: "PreparedRun", asked: BenchOptions) -> None:
    """Serve the prompts with each pair and with plain decoding, then save and show the figures.

    Depending on the options, requests arrive at random times or in batches.

    Raises:
        UserError: there are fewer prompts than the largest batch size.
    """
    from draftree.cli import terminal
    from draftree.evaluation import result_rows
    from draftree.evaluation.bench import Bench
    from draftree.evaluation.plain_decoding import plain_engine
    from draftree.registry import build
    from draftree.scheduling.options import SchedulerOptions

    limits = SchedulerOptions(asked.max_sequences, asked.max_cache_tokens, asked.max_batch_tokens)
    engines = ready.load()
    requests = ready.requests(engines)
    if (widest := max(asked.batch, default=1)) > len(requests):
        raise UserError(
            f"--batch is {widest}, allowed is at most the number of prompts, {len(requests)}"
        )
    work, serving = (
        Bench(ready.cells, engines, requests, asked.seed, top_p=asked.top_p),
        dict["Cell", "Engine"](),
    )
    for cell in ready.cells:
        rule = None if cell.acceptor is None else build("acceptor", cell.acceptor)
        known = work.engines.get((cell.drafter or "", cell.policy or ""))
        serving[cell] = (
            plain_engine(work.target)
            if known is None
            else replace(known, acceptor=rule, learned={})
        )
    coming = {
        cell: [work.at_temperature(request, cell.temperature) for request in requests]
        for cell in serving
    }
    with interruptible(NOTHING_KEPT):
        rows = (
            serve_arrivals(serving, coming, asked.arrivals, asked.seed, limits)
            if asked.arrivals
            else serve_batches(serving, coming, asked.batch, limits)
        )
    about = ready.about(work) | {
        "arrivals": asked.arrivals,
        "batch": list(asked.batch),
        "limits": asdict(limits),
    }
    result = {"provenance": about, "rows": rows}
    result_rows.save(result, asked.out)
    if asked.as_json:
        emit(result)
        return
    how = f", {asked.arrivals:g} a second" if asked.arrivals else ""
    title = f"{len(requests)} prompts of suite {ready.suite.name}{how}; saved in {asked.out}"
    acceptors = any(row["rule"] for row in rows)
    terminal.output().print(terminal.table(title, [served_row(row, acceptors) for row in rows]))


@dataclass(frozen=True)
class PreparedRun:
    """Store the parts of a benchmark, which were checked before anything is loaded.

    Attributes:
        asked: options of the command.
        drafters: specs of the drafters, in order.
        cells: combinations of drafter, policy, acceptor and temperature to measure.
        suite: suite of the prompts.
        fixed: costs by drafter that the command line names.
        pairs: specs of the drafter, policy and acceptor of each pairing.
        skipped: number of prompts by category that are left out because they are too long.
    """

    asked: CellsOptions
    drafters: list[str]
    cells: "list[Cell]"
    suite: "Suite"
    fixed: "dict[str, CostTable]"
    pairs: list[tuple[str, str, str | None]]
    skipped: dict[str, int]

    def load(self) -> "dict[tuple[str, str], Engine]":
        """Load the target, and return the engines by (drafter, policy)."""
        from draftree.cli import arguments, terminal
        from draftree.evaluation.grid import assemble
        from draftree.target.target import Target

        arguments.quiet()
        with terminal.busy("loading"):
            return assemble(
                lambda: Target.load(self.asked.target, **self.asked.loading), self.pairs, self.fixed
            )

    def requests(self, engines: "Mapping[tuple[str, str], Engine]") -> "list[Request]":
        """Return requests for the chosen prompts, without those that are too long."""
        from draftree.cli import terminal
        from draftree.evaluation.grid import choose_requests, conversations

        asked, selected = self.asked, self.suite.select(self.asked.category)
        some = next(iter(engines.values()))
        order = asked.seed if asked.shuffle else None
        requests, too_long = choose_requests(
            selected, some, asked.max_new_tokens, asked.limit, asked.per_category, order
        )
        self.skipped.update(too_long)
        if too_long:
            of = ", ".join(
                f"{count} of {name or 'no category'}" for name, count in too_long.items()
            )
            remark(f"prompts left out, too long for the target's context: {of}")
        if asked.all_turns:
            with terminal.busy("answering, for the questions that follow"):
                return conversations(some, selected, requests)
        return requests

    def about(self, work: "Bench") -> dict[str, Any]:
        """Return the provenance of the run: commit, versions, hardware, suite and options."""
        from draftree.evaluation.provenance import provenance

        asked, suite = self.asked, self.suite
        turns = (
            "all are asked, behind greedy answers"
            if asked.all_turns
            else "of several, the first is asked"
        )
        told = {
            "name": suite.name,
            "sha256": suite.sha256,
            "categories": asked.category,
            "limit": asked.limit,
            "per_category": asked.per_category,
            "skipped_too_long": self.skipped,
            "turns": turns,
            "prompts": asked.prompts,
            "shuffled": asked.shuffle,
        }
        truncated = {} if asked.top_p == 1 else {"top_p": asked.top_p}
        about = {"suite": told, "max_new_tokens": asked.max_new_tokens} | truncated
        return about | provenance(work.target, work.seed)

    def categories(self, requests: "list[Request]") -> list[str]:
        """Return the category of each request's prompt."""
        from draftree.evaluation.grid import QUESTION_STRIDE

        of = {p.number: p.category for p in self.suite.prompts}
        return [of[request.number % QUESTION_STRIDE] for request in requests]


def prepare(ctx: typer.Context, asked: CellsOptions) -> PreparedRun:
    """Check the options, and return the parts of the benchmark that they describe.

    Raises:
        UserError: a drafter, policy, acceptor or suite does not exist or does not fit, or the
            result's file cannot be written.
    """
    from draftree.cli import arguments
    from draftree.engine import usual_drafter, usual_policy
    from draftree.evaluation import suites
    from draftree.evaluation.grid import pairings, product

    whole = not asked.pair or was_given(ctx, "drafter") or was_given(ctx, "policy")
    drafts = [arguments.drafter(spec, asked.target) for spec in asked.drafter]
    usual = dict.fromkeys(
        usual_policy(asked.target, drafter, asked.loading["device"]) for drafter in drafts
    )
    policies = asked.policy or list(usual) or [usual_policy(asked.target)]
    crossed = (drafts or [usual_drafter(asked.target)[0]], policies) if whole else ([], [])
    several = pairings(*crossed, asked.pair, asked.acceptor)
    pairs = list(dict.fromkeys((arguments.drafter(d, asked.target), p, a) for d, p, a in several))
    drafters = list(dict.fromkeys(d for d, *_ in pairs))
    suite, fixed = (
        suites.join_suites(asked.suites, asked.whole, asked.prompts),
        arguments.costs_of_each(asked.costs, drafters),
    )
    cells = product(pairs, asked.temperature)
    suite.select(asked.category)
    check_output(asked.out, asked.force)
    ctx.with_resource(lock_output(asked.out))
    if suite.rule:
        remark(f"'{suite.name}': {suite.summary} ({suite.rule})")
    if whole and not asked.drafter:
        arguments.drafter(None, asked.target)  # says which it is
    return PreparedRun(asked, drafters, cells, suite, fixed, pairs, {})


@contextmanager
def run_with_journal(
    work: "Bench",
    about: Mapping[str, Any],
    fixed: "Mapping[str, CostTable]",
    out: Path,
    what: str = "bench",
) -> Iterator["list[dict[Cell, PromptResult]]"]:
    """Run a benchmark, or resume an interrupted one, and yield the results by prompt.

    Finished prompts are recorded in a journal, which is removed after the context.

    Args:
        work: the benchmark to run.
        about: provenance of the run. A journal with another provenance is not used.
        fixed: fixed costs by drafter. A journal with other costs is not used, because trees depend
            on them.
        out: file of the result; the journal is written next to it.
        what: name of the work in the progress display.
    """
    from draftree.cli import terminal
    from draftree.evaluation.resume import Journal, files_of, hash_prompts

    key = {k: v for k, v in about.items() if k not in ("date", "command")} | {
        "cells": [asdict(c) for c in work.cells],
        "costs": {d: asdict(c) for d, c in fixed.items()},
        "prompts": hash_prompts(work.requests),
        "files": {d: files_of(d) for d in dict.fromkeys(c.drafter for c in work.cells) if d},
    }
    journal = Journal(out.with_name(out.name + ".partial"), key)
    again = f"the same command goes on from '{journal.path}'"
    with terminal.progress(what, len(work.requests)) as tell, interruptible(again):
        done = work.run(journal, lambda n: tell(n))
    yield done
    journal.remove()


def save_and_show(
    result: dict[str, Any], asked: CellsOptions, requests: "list[Request]", as_json: bool = False
) -> None:
    """Save a result, and print it as a table or as JSON."""
    from draftree.cli import terminal
    from draftree.evaluation import result_rows, text_tables

    result_rows.save(result, asked.out)
    if as_json:
        emit(result)
        return
    suite = result["provenance"]["suite"]["name"]
    texts = f"{len(requests)} prompts of suite {suite}, at most {asked.max_new_tokens} new tokens"
    console = terminal.output()
    clocked = "speedup" in result["rows"][0]
    shown = (text_tables.result_table if clocked else text_tables.counted_table)(
        result["rows"], result["oracle"]
    )
    simulated = (
        "simulated, on " + ", ".join(sorted(set(asked.machine))) + ": "
        if result["simulated"]
        else ""
    )
    rows = terminal.drop_wide_columns(text_tables.readable(shown), console.width, text_tables.FIRST)
    console.print(terminal.table(f"{simulated}{texts}; saved in {asked.out}", rows))
    for told in text_tables.legend(rows[0]):
        console.print(f"[dim]{escape(told)}[/]", soft_wrap=True)
    terminal.line(text_tables.faster_and_slower(result))
