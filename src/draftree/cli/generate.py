"""`draftree generate`: answers or continues a prompt."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.console import emit
from draftree.cli.options import (
    ALL,
    END,
    LIKELY,
    NO_IDS,
    PENALTIES,
    SHAPE,
    AsJson,
    CostsFile,
    Device,
    DrafterSpec,
    DType,
    TargetName,
)
from draftree.errors import UserError


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
    from draftree import viewer
    from draftree.cli import inputs, terminal
    from draftree.data.prompts import encode, question
    from draftree.evaluation.cells import assemble
    from draftree.evaluation.compare import Comparison, compare, warm
    from draftree.models.target import Target
    from draftree.text.completion import Reading

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
        engine = warm(engine, options.request(engine.target, ids), sampling, baseline, say)
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
