"""`draftree bench`: compares drafters and policies on a suite of prompts."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.markup import escape

from draftree.boundary.files import locked, writable
from draftree.boundary.knobs import knob
from draftree.cli.console import emit, given, interruptible, remark
from draftree.cli.early import may_overwrite
from draftree.cli.options import AsJson, Force, LoadingOptions, Machines, Seed, TargetName, asks_for
from draftree.errors import UserError

if TYPE_CHECKING:
    from draftree.costs.curves import CostTable
    from draftree.engine import Engine
    from draftree.evaluation.bench import Bench
    from draftree.evaluation.cells import Cell, PromptResult
    from draftree.evaluation.suites import Suite
    from draftree.request import Request


@dataclass(frozen=True)
class CellsOptions:
    """What is measured, on which prompts: the options of `draftree bench` and `draftree replay`."""

    suite: str = knob("demo", help="A shipped suite, a file of prompts, or FORMAT:FILE of a benchmark: see `draftree list`.")
    whole: bool = knob(False, help="Take a text file as one prompt, and not each of its lines.")
    out: Path = knob(
        None,
        kind=Path | None,
        short="-o",
        help="Where the result is saved, as JSON; by default COMMAND-MODEL-SUITE.json in this folder.",
    )
    force: Force = False
    drafter: list[str] = knob(
        (), help="A spec or a checkpoint's folder; repeat it for several. By default the target's usual one, as of generate."
    )
    policy: list[str] = knob((), help="A spec; repeat it for several. By default the one that generate takes.")
    pair: list[str] = knob(
        (),
        metavar="'DRAFTER POLICY [ACCEPTOR]'",
        help="A drafter with this policy and acceptor alone; repeat it for several.",
    )
    acceptor: list[str] = knob((), help="A spec; repeat it for several. By default greedy at temperature 0, else match.")
    target: TargetName = "demo"
    temperature: list[float] = knob((0.0,), least=0, short="-t", help="0 for greedy decoding; repeat it for several.")
    category: list[str] = knob((), help="Only prompts of this category; repeat it for several.")
    limit: int | None = knob(None, min=1, help="Only the first so many prompts.")
    per_category: int | None = knob(None, min=1, help="Only the first so many of each category.")
    all_turns: bool = knob(False, help="Ask every question of a conversation, and not the first alone; caches are kept.")
    max_new_tokens: int = knob(128, least=1, short="-n", help="How many tokens may be written.")
    seed: Seed = 0
    costs: list[Path] = knob(
        (), help="A file `draftree costs --out` wrote; repeat it for one for each drafter, in their order."
    )
    machine: Machines = knob(())
    loading: LoadingOptions = knob(None)

    def placed(self, command: str) -> Self:
        """Return the options with the file of the result, where none was named."""
        names = (re.sub(r"\W+", "-", Path(name).stem.lower()).strip("-") for name in (self.target, self.suite))
        return replace(self, out=self.out or Path("-".join([command, *names]) + ".json"))


@dataclass(frozen=True)
class BenchOptions(CellsOptions):
    """The options of `draftree bench`."""

    repeats: int = knob(1, min=1, help="How often each text is written; seconds are means.")
    profile: Path | None = knob(None, help="Save a picture of where the time goes, by pairing: a file .png, .svg or .pdf.")
    as_json: AsJson = False


@asks_for
def bench(ctx: typer.Context, asked: BenchOptions) -> None:
    """Measure drafters × policies on a file of prompts, with plain decoding interleaved."""
    from draftree.cli import inputs, plots, terminal
    from draftree.evaluation.bench import Bench, priced
    from draftree.evaluation.profile import per_token
    from draftree.evaluation.results import finished

    asked = asked.placed("bench")
    if asked.profile is not None:
        plots.check(asked.profile)
    if asked.all_turns and asked.repeats > 1:
        raise UserError(f"--repeats is {asked.repeats}, allowed is 1 with --all-turns: a cache holds what came before once")
    ready = prepared(ctx, asked)
    machines = inputs.machines_of_each(asked.machine, asked.costs, ready.drafters)
    engines, fixed = ready.load(), ready.fixed
    requests = ready.requests(engines)
    with terminal.busy("measuring what a step costs") as tell:
        if machines:
            engines, fixed = inputs.elsewhere(engines, machines, tell)
        known = priced(engines, tell)
        work = Bench(ready.cells, known, requests, asked.seed, asked.repeats)
        if not machines and not fixed:  # policies go on learning, as they do in use
            work = replace(work, engines=engines, read=work.prices)
    about = ready.about(work) | {"repeats": asked.repeats}
    with journalled(work, about, fixed, asked.out) as done:
        with terminal.busy("measuring the drafters by themselves"):
            result = finished(work, {"": (done, work.prices)}, about, ready.categories(requests))
        if asked.profile is not None and not result["simulated"]:
            bars = {" ".join(filter(None, (r["drafter"], r["policy"]))): per_token(r) for r in result["rows"]}
            told = f"Where the time goes: {asked.target}, {ready.suite.name}, {len(requests)} prompts"
            plots.draw_profile(bars, told, asked.profile)
        saved(result, asked, requests, asked.as_json)


@dataclass(frozen=True)
class Prepared:
    """What options ask for, checked before anything is loaded.

    Attributes:
        asked: the options.
        drafters: their specs, in order.
        cells: to be measured.
        suite: of the prompts.
        fixed: the costs that were given, by drafter.
        pairs: specs of drafter, policy and acceptor.
        skipped: by category how many prompts are too long.
    """

    asked: CellsOptions
    drafters: list[str]
    cells: "list[Cell]"
    suite: "Suite"
    fixed: "dict[str, CostTable]"
    pairs: list[tuple[str, str, str | None]]
    skipped: dict[str, int]

    def load(self) -> "dict[tuple[str, str], Engine]":
        """The engines of all pairs."""
        from draftree.cli import inputs, terminal
        from draftree.evaluation.cells import assemble
        from draftree.models.target import Target

        inputs.quiet()
        with terminal.busy("loading"):
            return assemble(lambda: Target.load(self.asked.target, **self.asked.loading), self.pairs, self.fixed)

    def requests(self, engines: "Mapping[tuple[str, str], Engine]") -> "list[Request]":
        """The prompts that fit."""
        from draftree.cli import terminal
        from draftree.evaluation.cells import chosen, conversations

        asked, selected = self.asked, self.suite.select(self.asked.category)
        some = next(iter(engines.values()))
        requests, too_long = chosen(selected, some, asked.max_new_tokens, asked.limit, asked.per_category)
        self.skipped.update(too_long)
        if too_long:
            of = ", ".join(f"{count} of {name or 'no category'}" for name, count in too_long.items())
            remark(f"prompts left out, too long for the target's context: {of}")
        if asked.all_turns:
            with terminal.busy("answering, for the questions that follow"):
                return conversations(some, selected, requests)
        return requests

    def about(self, work: "Bench") -> dict[str, Any]:
        """The provenance of what is run."""
        from draftree.evaluation.provenance import provenance

        asked, suite = self.asked, self.suite
        turns = "all are asked, behind greedy answers" if asked.all_turns else "of several, the first is asked"
        told = {"name": suite.name, "sha256": suite.sha256, "categories": asked.category, "limit": asked.limit,
                "per_category": asked.per_category, "skipped_too_long": self.skipped,
                "turns": turns}  # fmt: skip
        return {"suite": told, "max_new_tokens": asked.max_new_tokens} | provenance(work.target, work.seed)

    def categories(self, requests: "list[Request]") -> list[str]:
        """That of each request."""
        from draftree.evaluation.cells import FOLLOWING

        of = {p.number: p.category for p in self.suite.prompts}
        return [of[request.number % FOLLOWING] for request in requests]


def prepared(ctx: typer.Context, asked: CellsOptions) -> Prepared:
    """Reads and checks what is asked for; the file of the result is locked.

    Raises:
        UserError: something of it does not exist, does not fit, or cannot be written.
    """
    from draftree.cli import inputs
    from draftree.engine import usual_drafter, usual_policy
    from draftree.evaluation import suites
    from draftree.evaluation.cells import paired, product

    whole = not asked.pair or given(ctx, "drafter") or given(ctx, "policy")
    drafts = [inputs.drafter(spec, asked.target) for spec in asked.drafter]
    policies = asked.policy or [usual_policy(asked.target, bool(drafts))]
    crossed = (drafts or [usual_drafter(asked.target)[0]], policies) if whole else ([], [])
    pairs = paired(*crossed, asked.pair, asked.acceptor)
    drafters = list(dict.fromkeys(d for d, *_ in pairs))
    suite, fixed = suites.load(asked.suite, asked.whole), inputs.costs_of_each(asked.costs, drafters)
    cells = product(pairs, asked.temperature)
    suite.select(asked.category)
    writable(asked.out)
    ctx.with_resource(locked(asked.out))
    may_overwrite(asked.out, asked.force)
    if suite.rule:
        remark(f"'{asked.suite}': {suite.summary} ({suite.rule})")
    if whole and not asked.drafter:
        inputs.drafter(None, asked.target)  # says which it is
    return Prepared(asked, drafters, cells, suite, fixed, pairs, {})


@contextmanager
def journalled(
    work: "Bench", about: Mapping[str, Any], fixed: "Mapping[str, CostTable]", out: Path, what: str = "bench"
) -> Iterator["list[dict[Cell, PromptResult]]"]:
    """Runs a benchmark, or the rest of an interrupted one; its journal is removed once the result is saved.

    Args:
        work: to be run.
        about: its provenance.
        fixed: the costs that were given, by drafter; other costs would grow other trees.
        out: the result's file; beside it stands the journal.
        what: is done, for the progress.
    """
    from draftree.cli import terminal
    from draftree.evaluation.journal import Journal

    key = {k: v for k, v in about.items() if k not in ("date", "command")} | {
        "cells": [asdict(c) for c in work.cells],
        "costs": {d: asdict(c) for d, c in fixed.items()},
    }
    journal = Journal(out.with_name(out.name + ".partial"), key)
    again = f"the same command goes on from '{journal.path}'"
    with terminal.progress(what, len(work.requests)) as tell, interruptible(again):
        done = work.run(journal, lambda n: tell(n))
    yield done
    journal.remove()


def saved(result: dict[str, Any], asked: CellsOptions, requests: "list[Request]", as_json: bool = False) -> None:
    """Saves a result and shows it."""
    from draftree.cli import terminal
    from draftree.evaluation import report, tables

    report.save(result, asked.out)
    if as_json:
        emit(result)
        return
    texts = f"{len(requests)} prompts of suite {Path(asked.suite).stem}, at most {asked.max_new_tokens} new tokens"
    console = terminal.output()
    clocked = "speedup" in result["rows"][0]
    shown = (tables.shown if clocked else tables.counted)(result["rows"], result["oracle"])
    simulated = "simulated, on " + ", ".join(sorted(set(asked.machine))) + ": " if result["simulated"] else ""
    rows = terminal.narrowed(tables.readable(shown), console.width, tables.FIRST)
    console.print(terminal.table(f"{simulated}{texts}; saved in {asked.out}", rows))
    for told in tables.legend(rows[0]):
        console.print(f"[dim]{escape(told)}[/]", soft_wrap=True)
    terminal.line(tables.claims(result))
