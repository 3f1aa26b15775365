"""`draftree bench`: compares drafters and policies on a suite of prompts."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.boundary.files import locked, writable
from draftree.boundary.knobs import knob
from draftree.cli.console import emit, given, interruptible, remark
from draftree.cli.options import AsJson, LoadingOptions, Seed, TargetName, asks_for

if TYPE_CHECKING:
    from draftree.costs import CostTable
    from draftree.evaluation.bench import Bench


@dataclass(frozen=True)
class BenchOptions:
    """The options of `draftree bench`."""

    suite: str = knob(help="A shipped suite, or a file of prompts.")
    out: Path = knob(help="Where the result is saved, as JSON.")
    drafter: list[str] = knob(
        (), help="A spec or a checkpoint's folder; repeat it for several. By default the target's usual one, as of generate."
    )
    policy: list[str] = knob(("pct",), help="A spec; repeat it for several.")
    pair: list[str] = knob(
        (),
        metavar="'DRAFTER POLICY [ACCEPTOR]'",
        help="A drafter with this policy and acceptor alone; repeat it for several.",
    )
    acceptor: list[str] = knob((), help="A spec; repeat it for several. By default greedy at temperature 0, else match.")
    target: TargetName = "demo"
    temperature: list[float] = knob((0.0,), help="0 for greedy decoding; repeat it for several.")
    category: list[str] = knob((), help="Only prompts of this category; repeat it for several.")
    limit: int | None = knob(None, min=1, help="Only the first so many prompts.")
    per_category: int | None = knob(None, min=1, help="Only the first so many of each category.")
    max_new_tokens: int = knob(128, help="How many tokens may be written.")
    repeats: int = knob(1, min=1, help="How often each text is written; seconds are means.")
    seed: Seed = 0
    costs: list[Path] = knob(
        (), help="A file `draftree costs --out` wrote; repeat it for one for each drafter, in their order."
    )
    profile: Path | None = knob(None, help="Save a picture of where the time goes, by pairing: a file .png, .svg or .pdf.")
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@asks_for
def bench(ctx: typer.Context, asked: BenchOptions) -> None:
    """Measure drafters × policies on a file of prompts, with plain decoding interleaved."""
    from draftree.cli import inputs, plots, terminal
    from draftree.engine import usual_drafter
    from draftree.evaluation import suites, tables
    from draftree.evaluation.bench import Bench, priced
    from draftree.evaluation.cells import assemble, chosen, paired, product
    from draftree.evaluation.profile import per_token
    from draftree.models.target import Target

    whole = not asked.pair or given(ctx, "drafter") or given(ctx, "policy")
    crossed = (asked.drafter or [usual_drafter(asked.target)[0]], asked.policy) if whole else ([], [])
    pairs = paired(*crossed, asked.pair, asked.acceptor)
    prompts, fixed = suites.load(asked.suite), inputs.costs_of_each(asked.costs, [d for d, *_ in pairs])
    cells, selected = product(pairs, asked.temperature), prompts.select(asked.category)
    writable(asked.out)
    if asked.profile is not None:
        plots.check(asked.profile)
    ctx.with_resource(locked(asked.out))
    if whole and not asked.drafter:
        inputs.drafter(None, asked.target)  # says which it is
    inputs.quiet()
    with terminal.busy("loading"):
        engines = assemble(lambda: Target.load(asked.target, **asked.loading), pairs, fixed)
        requests, too_long = chosen(
            selected, next(iter(engines.values())), asked.max_new_tokens, asked.limit, asked.per_category
        )
    if too_long:
        of = ", ".join(f"{count} of {name or 'no category'}" for name, count in too_long.items())
        remark(f"prompts left out, too long for the target's context: {of}")
    suite = {"name": prompts.name, "sha256": prompts.sha256, "categories": asked.category, "limit": asked.limit,
             "per_category": asked.per_category, "skipped_too_long": too_long,
             "turns": "of several, the first is asked"}  # fmt: skip
    with terminal.busy("measuring what a step costs") as tell:
        work = Bench(cells, priced(engines, tell), requests, asked.seed, asked.repeats)
    result = measured(
        work, {"suite": suite, "repeats": asked.repeats, "max_new_tokens": asked.max_new_tokens}, fixed, asked.out
    )
    if asked.profile is not None:
        bars = {" ".join(filter(None, (r["drafter"], r["policy"]))): per_token(r) for r in result["rows"]}
        plots.draw_profile(bars, f"Where the time goes: {asked.target}, {prompts.name}, {len(requests)} prompts", asked.profile)
    if asked.as_json:
        emit(result)
        return
    texts = f"{len(requests)} prompts of suite {prompts.name}, at most {asked.max_new_tokens} new tokens"
    console = terminal.output()
    rows = terminal.narrowed(tables.shown(result["rows"]), console.width, tables.FIRST)
    console.print(terminal.table(f"{texts}; saved in {asked.out}", rows))


def measured(work: "Bench", asked: dict[str, Any], fixed: dict[str, "CostTable"], out: Path) -> dict[str, Any]:
    """Runs a benchmark, or the rest of an interrupted one, and saves its result.

    Args:
        work: to be run.
        asked: what it was asked for, for the record.
        fixed: the costs that were given, by drafter; other costs would grow other trees.
        out: the result's file; beside it stands a journal, until the result is saved.

    Raises:
        UserError: the journal is of another benchmark.
    """
    from draftree.cli import terminal
    from draftree.evaluation import report
    from draftree.evaluation.journal import Journal
    from draftree.evaluation.provenance import provenance

    about = asked | provenance(work.target, work.seed)
    key = {k: v for k, v in about.items() if k not in ("date", "command")} | {
        "cells": [asdict(c) for c in work.cells],
        "costs": {d: asdict(c) for d, c in fixed.items()},
    }
    journal = Journal(out.with_name(out.name + ".partial"), key)
    again = f"the same command goes on from '{journal.path}'"
    with terminal.progress("bench", len(work.requests)) as tell, interruptible(again):
        done = work.run(journal, lambda n: tell(n))
    with terminal.busy("measuring the drafters by themselves"):
        prices = work.prices
        rows = report.rows(done, work.seed, {d: work.quality(d, done, prices[d]) for d in prices}, prices)
    result = {"provenance": about | {"costs": {d: asdict(c) for d, c in prices.items()}}, "rows": rows}
    report.save(result, out)
    journal.remove()
    return result
