"""`draftree bench`: compares drafters and policies on a suite of prompts."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftree.boundary.files import locked
from draftree.cli.console import emit, given, interruptible
from draftree.cli.options import ALL, GREEDY, NO_FILES, PCT, AsJson, Device, DType, MaxNew, Seed, TargetName


def bench(
    ctx: typer.Context,
    suite: Annotated[str, typer.Option(help="A shipped suite, or a file of prompts.")],
    out: Annotated[Path, typer.Option(help="Where the result is saved, as JSON.")],
    drafter: Annotated[
        list[str],
        typer.Option(help="A spec or a checkpoint's folder; repeat it for several. By default edd for the demo, else suffix."),
    ] = ALL,
    policy: Annotated[list[str], typer.Option(help="A spec; repeat it for several.")] = PCT,
    pair: Annotated[
        list[str],
        typer.Option(
            metavar="'DRAFTER POLICY [ACCEPTOR]'", help="A drafter with this policy and acceptor alone; repeat it for several."
        ),
    ] = ALL,
    acceptor: Annotated[
        list[str], typer.Option(help="A spec; repeat it for several. By default greedy at temperature 0, else match.")
    ] = ALL,
    target: TargetName = "demo",
    temperature: Annotated[list[float], typer.Option(help="0 for greedy decoding; repeat it for several.")] = GREEDY,
    category: Annotated[list[str], typer.Option(help="Only prompts of this category; repeat it for several.")] = ALL,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Only the first so many of each category.")] = None,
    max_new_tokens: MaxNew = 128,
    repeats: Annotated[int, typer.Option(min=1, help="How often each text is written; seconds are means.")] = 1,
    seed: Seed = 0,
    costs: Annotated[
        list[Path],
        typer.Option(help="A file `draftree costs --out` wrote; repeat it for one for each drafter, in their order."),
    ] = NO_FILES,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Measure drafters × policies on a file of prompts, with plain decoding interleaved."""
    from draftree.boundary import files
    from draftree.cli import inputs, terminal
    from draftree.engine import usual_drafter
    from draftree.evaluation import report, suites, tables
    from draftree.evaluation.bench import Bench, priced
    from draftree.evaluation.cells import assemble, chosen, paired, product
    from draftree.evaluation.journal import Journal
    from draftree.evaluation.provenance import provenance
    from draftree.models.target import Target

    whole = not pair or given(ctx, "drafter") or given(ctx, "policy")
    pairs = paired(drafter or [usual_drafter(target)[0]], policy, pair, acceptor) if whole else paired([], [], pair, acceptor)
    prompts, fixed, cells = suites.load(suite), inputs.costs_of_each(costs, [d for d, *_ in pairs]), product(pairs, temperature)
    selected = prompts.select(category)
    files.writable(out)
    ctx.with_resource(locked(out))
    if whole and not drafter:
        inputs.drafter(None, target)  # says which it is
    inputs.quiet()
    with terminal.busy("loading"):
        engines = assemble(lambda: Target.load(target, dtype, device), pairs, fixed)
        requests, too_long = chosen(selected, next(iter(engines.values())), max_new_tokens, limit, per_category)
    if too_long:
        of = ", ".join(f"{count} of {name or 'no category'}" for name, count in too_long.items())
        terminal.errors().print(f"draftree: prompts left out, too long for the target's context: {of}")
    picked = {"name": prompts.name, "sha256": prompts.sha256, "categories": category, "limit": limit,
              "per_category": per_category, "skipped_too_long": too_long,
              "turns": "of several, the first is asked"}  # fmt: skip
    about = {
        "suite": picked,
        "repeats": repeats,
        "max_new_tokens": max_new_tokens,
    }
    with terminal.busy("measuring what a step costs") as say:
        work = Bench(cells, priced(engines, say), requests, seed, repeats)
    said = about | provenance(work.target, seed)
    key = {k: v for k, v in said.items() if k not in ("date", "command")} | {
        "cells": [asdict(c) for c in cells],
        "costs": {d: asdict(c) for d, c in fixed.items()},  # other costs would grow other trees
    }
    journal = Journal(out.with_name(out.name + ".partial"), key)
    with terminal.progress("bench", len(requests)) as tell, interruptible(f"the same command goes on from '{journal.path}'"):
        done = work.run(journal, lambda n: tell(n))
    with terminal.busy("measuring the drafters by themselves"):
        prices = work.prices
        rows = report.rows(done, seed, {d: work.quality(d, done, prices[d]) for d in prices}, prices)
    result = {"provenance": said | {"costs": {d: asdict(c) for d, c in prices.items()}}, "rows": rows}
    report.save(result, out)
    journal.remove()
    if as_json:
        emit(result)
        return
    title = f"{len(requests)} prompts of suite {prompts.name}, at most {max_new_tokens} new tokens; saved in {out}"
    console = terminal.output()
    console.print(terminal.table(title, terminal.narrowed(tables.shown(rows), console.width, tables.FIRST)))
