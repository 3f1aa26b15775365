"""The command line; other programs rely on its options, its JSON and its exit status.

Exit status: 0 done; 2 a user's mistake, told in one line; 128 + the signal that ended it (Ctrl-C 130, SIGTERM 143, SIGHUP
129); 1 anything else, and output found not to be lossless. What needs torch is imported inside the commands, so that help
and mistakes in options do not wait for it.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from draftree.errors import DraftreeError, DraftreeWarning, UnknownName, UserError, cut
from draftree.files import inside, locked
from draftree.interruption import STATUSES, Interrupted, raised


class Commands(TyperGroup):
    """The commands; for one that does not exist, the nearest is named."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if not cmd_name.startswith("-") and cmd_name not in self.commands:
            raise UnknownName("command", cmd_name, self.commands)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    help="Exactly what a causal language model would have written anyway, in far fewer forward passes.",
)

datastore = typer.Typer(cls=Commands, help="Build and show the corpora that drafters without training search.")
app.add_typer(datastore, name="datastore")

PCT, GREEDY, GREEDY_AND_1, ALL, ONE = ["pct"], [0.0], [0.0, 1.0], list[str](), [1]
NO_FILES, NO_IDS = list[Path](), list[int]()
THEIRS = "by default the method's"

TargetName = Annotated[str, typer.Option("--target", help="demo, a Hugging Face folder, or a hub id.")]
DrafterSpec = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A spec (name, or name:key=value,…) or a checkpoint's folder; by default edd for the demo, else suffix.",
    ),
]
Device = Annotated[str | None, typer.Option(help="A torch device; by default a GPU where there is one.")]
DType = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Of the target's weights; by default the checkpoint's own, float32 for half precision on a CPU."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", help="A file that `draftree costs --out` wrote; by default they are measured here.")
]
MaxNew = Annotated[int, typer.Option("--max-new-tokens", help="How many tokens may be written.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]


@app.callback(invoke_without_command=True)
def top(ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from draftree import __version__

        print(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        commands = [c.name or "" for c in app.registered_commands] + [g.name or "" for g in app.registered_groups]
        known = ", ".join(sorted(commands))
        raise UserError(f"no command was given, known are {known}; draftree --help explains them")


LIKELY, PENALTIES, SHAPE, END = "How tokens are chosen", "Penalties and bans", "What the answer must be", "Where it ends"
"""Parts of the help of `generate`."""


@app.command(name="generate")
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to answer or to continue; - reads it from standard input.")],
    target: TargetName = "demo",
    drafter: DrafterSpec = None,
    policy: Annotated[str, typer.Option(help="A spec.")] = "pct",
    acceptor: Annotated[str | None, typer.Option(help="A spec; by default greedy at temperature 0, else match.")] = None,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.", rich_help_panel=LIKELY)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="The least mass of likeliest tokens that is kept.", rich_help_panel=LIKELY)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="How many of the likeliest tokens are kept; 0 keeps all.", rich_help_panel=LIKELY)
    ] = 0,
    min_p: Annotated[
        float, typer.Option(help="The least probability kept, relative to the likeliest token's.", rich_help_panel=LIKELY)
    ] = 0.0,
    typical_p: Annotated[
        float, typer.Option(help="The least mass of the most typical tokens that is kept.", rich_help_panel=LIKELY)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.", rich_help_panel=LIKELY)] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, makes what stands in prompt or answer less likely.", rich_help_panel=PENALTIES)
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken from a token's logit each time it stands in the answer.", rich_help_panel=PENALTIES)
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logit of what stands in the answer.", rich_help_panel=PENALTIES)
    ] = 0.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(metavar="N", help="No N tokens in a row come twice; 0 allows it.", rich_help_panel=PENALTIES)
    ] = 0,
    logit_bias: Annotated[
        list[str],
        typer.Option(
            metavar="TOKEN=BIAS",
            help="Added to a token's logit; TOKEN is an id, or a text of one token (JSON where quoted). Repeat it.",
            rich_help_panel=PENALTIES,
        ),
    ] = ALL,
    suppress: Annotated[
        list[int], typer.Option(metavar="ID", help="A token that is never written; repeat it.", rich_help_panel=PENALTIES)
    ] = NO_IDS,
    bad_words: Annotated[
        list[str],
        typer.Option("--bad-word", metavar="TEXT", help="Never written; repeat it for several.", rich_help_panel=PENALTIES),
    ] = ALL,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="JSON that this schema allows.", rich_help_panel=SHAPE)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="What all of it must match.", rich_help_panel=SHAPE)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Lark grammar that derives all of it.", rich_help_panel=SHAPE)
    ] = None,
    beginning: Annotated[str, typer.Option(metavar="TEXT", help="What it begins with.", rich_help_panel=SHAPE)] = "",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="How many tokens may be written.", rich_help_panel=END)
    ] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="How many are written before one may end it.", rich_help_panel=END)] = 0,
    stop: Annotated[
        list[str], typer.Option(metavar="TEXT", help="Ends it, and is no part of it; repeat it.", rich_help_panel=END)
    ] = ALL,
    max_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="After which nothing more is written.", rich_help_panel=END)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="EOS ends nothing.", rich_help_panel=END)] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --json: each token's log-probability and the N likeliest's, by raw logits."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="Run plain decoding too, and compare.")] = False,
    show_trees: Annotated[bool, typer.Option("--show-trees", help="Draw each step's tree, or add it to the JSON.")] = False,
    trees: Annotated[Path | None, typer.Option(help="Save a picture of each step's tree: a file .html or .svg.")] = None,
    costs: CostsFile = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Write what the target would write, in fewer passes."""
    from draftree import inputs, terminal, viewer
    from draftree.completion import Reading
    from draftree.evaluation.runner import Comparison, assemble, compare, warm
    from draftree.prompts import encode, question
    from draftree.target import Target

    options = inputs.options(ctx.params)
    sampling = options.sampling
    text, fixed = inputs.prompt_text(prompt), inputs.fixed_costs(costs)
    if logprobs is not None and not as_json:
        raise UserError("--logprobs was given, allowed is it only with --json")
    if trees is not None:
        viewer.check_picture(trees)
    drafter = inputs.drafter(drafter, target)
    inputs.quiet()
    with terminal.busy("loading") as say:
        loaded = assemble(lambda: Target.load(target, dtype, device), [(drafter, policy)], fixed, acceptor)
        engine = loaded[drafter, policy]
        ids = encode(engine.tokenizer, text if raw else question(text))
        warm(engine, options.request(engine.target, ids), sampling, baseline, say)
        stops = options.stops(engine.tokenizer)
    console = terminal.output()
    stream = terminal.Stream(console, engine.tokenizer, stops) if console.is_terminal and not as_json else None
    draw = partial(viewer.draw, console) if show_trees and not as_json else None
    watch = viewer.Watch(engine.tokenizer, draw, stream) if show_trees or trees is not None else None
    reading = Reading(engine.tokenizer, stops)
    request = options.request(engine.target, ids)
    first = engine.write([request], sampling, inputs.both(reading, watch or stream), reuse=False)
    written = reading.completion(first.stats)
    if watch is not None:
        watch.end()
    if stream is not None:
        stream.end()
    elif not as_json:
        print(written.text, flush=True)
    if watch is not None and trees is not None:
        about = {"prompt": text, "target": target, "drafter": drafter, "policy": policy, "temperature": f"{temperature:g}"}
        viewer.save_picture(trees, watch.steps, about)
    result = Comparison(first.tokens[0], first.stats)
    if baseline:
        with terminal.busy("running plain decoding, to compare"):
            again = inputs.repeatable(options, len(written.tokens)).request(engine.target, ids)
            result = compare(engine, again, sampling, first)
    if as_json:
        more = {} if logprobs is None else {"logprobs": written.logprobs_as_json(engine.tokenizer)}
        drawn = {"trees": [s.as_json() for s in watch.steps[1:]]} if watch is not None and show_trees else {}
        said = {"text": written.text, "token_ids": result.tokens, "ending": written.ending}
        emit({**said, **more, **result.as_json(), **drawn})
    else:
        terminal.show_summary(console, result, stream is not None, engine.keeps_text(sampling))


@app.command(name="list")
def list_parts(as_json: AsJson = False) -> None:
    """List drafters, policies, acceptors and suites, with their knobs and defaults, and how drafters are trained."""
    from draftree import registry, terminal
    from draftree.evaluation import suites

    found: dict[str, dict[str, dict[str, Any]]] = {
        plural: {
            name: {"summary": registry.summary(kind, name), "knobs": registry.knobs(kind, name)}
            for name in registry.names(kind)
        }
        for kind, plural in {"drafter": "drafters", "policy": "policies", "acceptor": "acceptors"}.items()
    }
    found["suites"] = {name: {"summary": suites.load(name).summary, "knobs": {}} for name in suites.names()}
    stages = {name: registry.stages(name) for name in registry.names("drafter")}
    if as_json:
        for name, those in stages.items():
            found["drafters"][name] |= {"training": [asdict(stage) for stage in those]}
        emit(found)
        return
    console = terminal.output()
    for kind, parts in found.items():
        rows = [{"name": name, "about": p["summary"], "knobs": terminal.knobs_text(p["knobs"])} for name, p in parts.items()]
        console.print(terminal.table(kind, rows))
    console.print(terminal.table("training", [terminal.stage_row(name, s) for name, those in stages.items() for s in those]))


@app.command(name="bench")
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
    from draftree import inputs, terminal
    from draftree.engine import usual_drafter
    from draftree.evaluation import report, suites
    from draftree.evaluation.provenance import provenance
    from draftree.evaluation.runner import Bench, Journal, assemble, chosen, paired, product
    from draftree.target import Target

    whole = not pair or given(ctx, "drafter") or given(ctx, "policy")
    pairs = paired(drafter or [usual_drafter(target)[0]], policy, pair, acceptor) if whole else paired([], [], pair, acceptor)
    prompts, fixed, cells = suites.load(suite), inputs.costs_of_each(costs, [d for d, *_ in pairs]), product(pairs, temperature)
    selected = prompts.select(category)
    inputs.writable(out)
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
    work = Bench(cells, engines, requests, seed, repeats)
    with terminal.busy("measuring what a step costs") as say:
        tables = work.price(say)
    said = about | provenance(work.target, seed)
    key = {k: v for k, v in said.items() if k not in ("date", "command")} | {
        "cells": [asdict(c) for c in cells],
        "costs": {d: asdict(c) for d, c in fixed.items()},  # other costs would grow other trees
    }
    journal = Journal(out.with_name(out.name + ".partial"), key)
    with terminal.progress("bench", len(requests)) as tell, interruptible(f"the same command goes on from '{journal.path}'"):
        done = work.run(journal, lambda n: tell(n))
    with terminal.busy("measuring the drafters by themselves"):
        rows = report.rows(done, seed, {d: work.quality(d, done, tables[d]) for d in tables}, tables)
    result = {"provenance": said | {"costs": {d: asdict(c) for d, c in tables.items()}}, "rows": rows}
    report.save(result, out)
    journal.remove()
    if as_json:
        emit(result)
        return
    title = f"{len(requests)} prompts of suite {prompts.name}, at most {max_new_tokens} new tokens; saved in {out}"
    console = terminal.output()
    console.print(terminal.table(title, terminal.narrowed(report.shown(rows), console.width, report.FIRST)))


@app.command(name="costs")
def show_costs(
    target: TargetName = "demo",
    drafter: DrafterSpec = None,
    rows: Annotated[list[int], typer.Option(min=1, help="Texts written at a time, up to a power of two; repeat it.")] = ONE,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write them to a file, for --costs.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them: a file ending in .png, .svg or .pdf.")] = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Show what a draft step and a target pass cost on this machine, by tokens fed, length and number of the rows."""
    from draftree import inputs, plots, terminal
    from draftree.costs import bracket
    from draftree.registry import build
    from draftree.target import Target
    from draftree.timing import identity, measured, store

    if plot is not None:
        plots.check(plot)
    for path in (out, plot):
        if path is not None:
            inputs.writable(path)
    drafter = inputs.drafter(drafter, target)
    method = build("drafter", drafter)
    inputs.quiet()
    with terminal.busy("loading") as tell:
        model = Target.load(target, dtype, device)
        opened = method.open(model)
        for several in dict.fromkeys(map(bracket, rows)):
            found = measured(model, opened, several, refresh, tell)
    if out is not None:
        found.save(out)
    if plot is not None:
        plots.draw_costs(found, f"{drafter} for {target}", plot)
    kept = store(identity(model, opened))
    if as_json:
        emit(asdict(found) | {"ratio": found.ratio, "kept": str(kept)})
    else:
        terminal.show_costs(terminal.output(), f"{drafter} for {target}", found, kept)


@app.command(name="doctor")
def examine_drafter(
    ctx: typer.Context,
    target: TargetName = "demo",
    drafter: DrafterSpec = None,
    data: Annotated[
        Path | None, typer.Option(help="Texts or chats to measure on; by default the target's answers to the shipped prompts.")
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Instead, compare what is written with what the target writes by itself.")
    ] = False,
    policy: Annotated[list[str], typer.Option(help="Of --lossless: a spec; repeat it for several.")] = PCT,
    acceptor: Annotated[
        list[str], typer.Option(help="Of --lossless: a spec; repeat it for several. By default all that are exact.")
    ] = ALL,
    temperature: Annotated[
        list[float], typer.Option(help="Of --lossless: 0 for greedy decoding; repeat it for several.")
    ] = GREEDY_AND_1,
    limit: Annotated[int, typer.Option(min=1, help="Of --lossless: how many texts.")] = 12,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Of --lossless: how many tokens of each may be written.")
    ] = 48,
    trials: Annotated[int, typer.Option(help="Of --lossless: draws behind a root, for the tests of frequencies.")] = 2000,
    costs: CostsFile = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a drafter fits a target and is healthy, and what is likely wrong where it is not.

    With --lossless, say whether the output is the target's own: texts beside plain decoding's, token for token, and for
    rules that promise no more than the distribution a test of frequencies. The exit status is 1 where it is not, and where
    no rule that was asked for promises it; beside others a rule that is lossy by design is only told as such.
    """
    if lossless:
        return examine_output(ctx.params)
    for option in ("policy", "acceptor", "temperature", "limit", "max_new_tokens", "trials"):
        if given(ctx, option):
            raise UserError(f"--{option.replace('_', '-')} was given, allowed is it only with --lossless")
    from draftree import inputs, terminal
    from draftree.evaluation import doctor
    from draftree.registry import build
    from draftree.target import Target
    from draftree.timing import measured

    fixed, drafter = inputs.fixed_costs(costs), inputs.drafter(drafter, target)
    method = build("drafter", drafter)
    inputs.quiet()
    with terminal.busy("loading"):
        model = Target.load(target, dtype, device)
        opened = method.open(model)
    with terminal.busy("letting the target answer some prompts"):
        texts = doctor.answers(model) if data is None else doctor.read(model, data)
    with terminal.busy("measuring what a step costs") as say:
        known = (fixed or measured(model, opened, tell=say)).at(context=0, rows=1)
    with terminal.progress("doctor", doctor.STAGES) as tell:
        done = iter(range(doctor.STAGES + 1))
        report = doctor.examine(model, opened, texts, known, lambda what: tell(next(done), what))
    if as_json:
        emit(report.as_json())
    else:
        terminal.show_report(terminal.output(), f"{drafter} for {target}", report)


def examine_output(given: Mapping[str, Any]) -> None:
    """The doctor command with --lossless, by its options."""
    from draftree import inputs, terminal
    from draftree.engine import UNIT
    from draftree.evaluation import lossless
    from draftree.registry import build
    from draftree.target import Target
    from draftree.timing import measured

    plan = lossless.Plan(given["max_new_tokens"], trials=given["trials"])
    chosen = lossless.cases(given["policy"], given["acceptor"], given["temperature"])
    fixed, drafter = inputs.fixed_costs(given["costs"]), inputs.drafter(given["drafter"], given["target"])
    method = build("drafter", drafter)
    inputs.quiet()
    with terminal.busy("loading") as say:
        model = Target.load(given["target"], given["dtype"], given["device"])
        opened = method.open(model)
        prompts = lossless.prompts(model, given["data"], given["limit"], plan.max_new_tokens)
        if fixed is None and any(c.grown.reads_costs for c in chosen):
            fixed = measured(model, opened, tell=say)
    with terminal.progress("doctor --lossless", None) as tell:
        report = lossless.examine(model, opened, prompts, chosen, plan, fixed or UNIT, tell)
    if given["as_json"]:
        emit(report.as_json())
    else:
        terminal.show_lossless(terminal.output(), f"{drafter} for {given['target']}", report)
    if not report.lossless:
        raise typer.Exit(1)


@app.command(name="train")
def train_drafter(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The method, or a spec of it with its knobs; or a policy: c2t, static.")],
    data: Annotated[list[Path], typer.Option(help="JSONL, JSON, parquet, text, or a folder of them; repeat it for several.")],
    out: Annotated[Path, typer.Option(help="The folder of the checkpoint; of a tree, the file.")],
    target: TargetName = "demo",
    drafter: Annotated[str | None, typer.Option(help="Of a policy: the spec or folder of the drafter it is for.")] = None,
    knobs: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="A knob of the method; repeat it.")] = ALL,
    init_from: Annotated[
        Path | None, typer.Option(help="A checkpoint of the same method whose weights it begins with.")
    ] = None,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="Let the target answer the data's prompts first.")] = False,
    regenerate_tokens: Annotated[int, typer.Option(help="Longest of these answers.")] = 256,
    regenerate_batch: Annotated[int, typer.Option(help="How many are written at a time.")] = 32,
    stage: Annotated[
        str | None, typer.Option(help="Whose numbers: by default the method's first; with --init-from, its last.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help=f"Passes over the data; {THEIRS}.")] = None,
    batch_size: Annotated[int | None, typer.Option(help=f"Samples in a step, of all processes; {THEIRS}.")] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(help="Parts in which a process works on its share of a step; by default of at most 4096 tokens each."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate of AdamW; {THEIRS}.")] = None,
    schedule: Annotated[
        Literal["constant", "cosine", "linear"] | None, typer.Option(help=f"Of the learning rate; {THEIRS}.")
    ] = None,
    floor: Annotated[float | None, typer.Option(help=f"Share of the rate with which cosine and linear end; {THEIRS}.")] = None,
    warmup: Annotated[
        float | None, typer.Option(help=f"Steps of linear warm-up, or below 1 their share of all; {THEIRS}.")
    ] = None,
    betas: Annotated[
        tuple[float, float] | None, typer.Option(metavar="BETA BETA", help=f"Of AdamW's two moments; {THEIRS}.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help=f"Of AdamW; {THEIRS}.")] = None,
    clip: Annotated[float | None, typer.Option(help=f"Bound of the gradient; {THEIRS}.")] = None,
    clip_by: Annotated[
        Literal["norm", "value"] | None, typer.Option(help=f"What is bounded: its norm, or each value; {THEIRS}.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help=f"Longest sample, the target's context at most; {THEIRS}.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the samples that is measured on, 64 at most.")] = 0.02,
    evaluate_every: Annotated[int, typer.Option(help="Steps between two measurements.")] = 250,
    save_every: Annotated[int, typer.Option(help="Steps between two saves of the state to go on from.")] = 250,
    bf16: Annotated[bool, typer.Option("--bf16", help="Forward passes in bfloat16.")] = False,
    cache_features: Annotated[bool, typer.Option("--cache-features", help="Compute the target's features once.")] = False,
    features: Annotated[str, typer.Option(help="The folder of the cached ones; OUT/features by default.")] = "",
    track: Annotated[str, typer.Option(help="An experiment tracker that is installed: tensorboard, wandb, …")] = "",
    costs: CostsFile = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a target; the same command goes on where it was interrupted.

    What is not given is as the method's paper or official code has it: `draftree list` shows the numbers, and the run's first
    line those it takes. An interrupted run keeps the numbers it began with.

    `accelerate launch -m draftree train …` runs it on several processes.

    `draftree train c2t --drafter …` trains a policy's classifier, where what is not given is C2T's: 10 epochs, batches of
    1024, Adam at 1e-3 (1e-4 and a tenth of the prompts with --init-from), 0.05 of the texts held out. Ten epochs may be
    few steps, so it makes 20,000 at least (`--set steps=`), unless held-out AUC has stopped rising before.

    `draftree train static --drafter … --out FILE` finds the best tree of fixed shape, which `static:paths=FILE` reads.
    """
    if name.partition(":")[0] == "static":
        return find_static_tree({option: value for option, value in ctx.params.items() if given(ctx, option)})
    if name.partition(":")[0] == "c2t":
        return train_classifier({option: value for option, value in ctx.params.items() if given(ctx, option)})
    for option, value, where in (("--drafter", drafter, "c2t, static"), ("--costs", costs, "static")):
        if value is not None:
            raise UserError(f"{option} is '{value}', allowed where a policy is trained ({where}), and '{name}' is a drafter")
    if "LOCAL_RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; DDP remarks on what is meant to be so
    try:
        from draftree.training.trainer import Plan
    except ModuleNotFoundError as error:
        raise UserError(f"training needs the package '{error.name}': pip install 'draftree[train]'") from error

    from draftree import inputs
    from draftree.training import command

    with command.one_voice():
        known = {f.name for f in fields(Plan)}
        said = {option: value for option, value in ctx.params.items() if option in known and given(ctx, option)}
        plan = command.planned(inputs.trainable(name, knobs).stages, said, out, init_from is not None)
        answers = command.Regeneration(regenerate_tokens, regenerate_batch) if regenerate else None
        asked = command.Asked(name, knobs, data, out, plan, init_from, answers, track)
        inputs.quiet()
        with interruptible(f"the same command goes on from what is kept in '{out}'"):
            end = command.run(asked, target, device, dtype)
    if end is not None and as_json:
        said = {k: None if v != v else v for k, v in asdict(end).items()}  # no NaN in JSON
        emit({"drafter": name, "out": str(out)} | said)
    elif end is not None:
        command.show(end, out)


def find_static_tree(given: Mapping[str, Any]) -> None:
    """The train command for a static tree, by the options that were given."""
    from draftree import inputs
    from draftree.training import static_trees

    inputs.quiet()
    asked = static_trees.Asked.of(given)
    inputs.writable(asked.out)
    with interruptible(NOTHING_KEPT), locked(asked.out):
        found = static_trees.run(asked)
    if given.get("as_json"):
        emit(found | {"out": str(asked.out)})
    else:
        static_trees.show(found, asked.out)


def given(ctx: typer.Context, option: str) -> bool:
    """Whether an option was set, be it to its default."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def train_classifier(given: Mapping[str, Any]) -> None:
    """The train command for C2T, by the options that were given."""
    from draftree import inputs
    from draftree.training import classifier

    inputs.quiet()
    asked = classifier.Asked.of(given)
    inputs.writable(asked.out, folder=True)
    again = f"the same command goes on from what is kept in '{asked.out}'"
    with interruptible(again), locked(asked.out, inside(asked.out)):
        end = classifier.run(asked)
    if given.get("as_json"):
        emit({"policy": "c2t", "out": str(asked.out)} | asdict(end))
    else:
        classifier.show(end, asked.out)


@app.command(name="export")
def export_drafter(
    drafter: Annotated[str, typer.Argument(help="A checkpoint's folder, ours or published, or a shipped drafter's name.")],
    wanted: Annotated[str, typer.Option("--format", help="speculators, eagle or vllm-medusa.")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    target: Annotated[str | None, typer.Option(help="The drafter's target; by default the one its checkpoint names.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a drafter in the layout that another program reads."""
    from draftree import inputs, terminal
    from draftree.formats.export import export

    inputs.writable(out, folder=True)
    inputs.quiet()
    with terminal.busy("exporting"):
        done = export(drafter, wanted, out, target)
    if as_json:
        emit(asdict(done))
    else:
        told = f"{done.out}: '{done.drafter}' as {done.format}, {done.tensors} tensors, {done.bytes / 1e6:.1f} MB"
        terminal.output().print(told, soft_wrap=True, markup=False, highlight=False)


@datastore.callback(invoke_without_command=True)
def datastore_top(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise UserError("no command was given, known are build, show; draftree datastore --help explains them")


@datastore.command(name="build")
def build_datastore(
    kind: Annotated[str, typer.Option(help="The drafter that will search it.")],
    data: Annotated[
        list[Path],
        typer.Option(help="Text, source code, JSONL, JSON or parquet, or a folder of them; repeat it for several."),
    ],
    out: Annotated[Path, typer.Option(help="The new folder, which --drafter takes.")],
    target: TargetName = "demo",
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="How it is built; repeat it.")] = ALL,
    as_json: AsJson = False,
) -> None:
    """Build a datastore from a corpus, for the targets that have this one's tokenizer."""
    from draftree import inputs
    from draftree.datastores import command

    inputs.quiet()
    with interruptible(NOTHING_KEPT):
        said = command.build(command.Asked(kind, target, data, out, settings))
    if as_json:
        emit({"out": str(out)} | said)
    else:
        command.print_built(out, said)


@datastore.command(name="show")
def show_datastore(folder: Annotated[Path, typer.Argument(help="Of a datastore.")], as_json: AsJson = False) -> None:
    """Show what a datastore was built from, how, and for which tokenizer."""
    from draftree.datastores import command

    said = command.show(folder)
    if as_json:
        emit(said)
    else:
        command.print_note(folder, said)


def emit(found: Mapping[str, Any]) -> None:
    """Prints one JSON object."""
    print(json.dumps(found, allow_nan=False))


NOTHING_KEPT = "nothing was written; the same command begins anew"


@contextmanager
def interruptible(again: str) -> Iterator[None]:
    """After Ctrl-C or another signal inside, says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        tell(again)
        raise


def tell(message: str) -> None:
    """A line on standard error, as long as there is one: a terminal that was closed takes nothing."""
    with suppress(OSError):
        print(f"draftree: {cut(message)}", file=sys.stderr, flush=True)


def fail(message: str, status: int) -> NoReturn:
    """Ends the program with one line."""
    tell(message)
    sys.exit(status)


def mistake(error: typer.TyperException) -> str:
    """What typer says of a mistake on the command line, with what was given where typer leaves that out."""
    from pydantic import ValidationError

    told, cause = error.format_message().rstrip("."), error.__context__
    given = repr(cause.errors()[0]["input"]) if isinstance(cause, ValidationError) else ""
    return told if given in told else f"{told}; got {given}"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and ends the program.

    Args:
        args: what stands behind the program's name; the process's own by default.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries; python -W shows them
        warnings.simplefilter("default", DraftreeWarning)
        warnings.showwarning = lambda message, *_: tell(str(message))
    with raised() as signals:
        try:
            command = typer.main.get_command(app)
            status = command.main(args if args is None else list(args), prog_name="draftree", standalone_mode=False)
        except typer.TyperException as error:
            fail(f"{mistake(error)}; what is allowed is told by --help", 2)
        except DraftreeError as error:
            fail(str(error), 2)
        except Interrupted as ended:
            status = ended.status
        except OSError as error:  # a full disk, a folder of ours that cannot be written
            if not signals:  # else a terminal that was closed
                fail(f"{error.strerror or error}: '{error.filename}'" if error.filename else str(error), 1)
    if signals:
        status = 128 + signals[0]  # typer's own is always that of Ctrl-C
    if status in STATUSES:
        tell("interrupted")
    sys.exit(status or 0)
