"""`draftree generate`: answers or continues a prompt."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson, CostsFile, Device, DrafterSpec, DType, TargetName, asks_for
from draftree.errors import UserError
from draftree.text.parameters import Parameters


@asks_for(Parameters)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer or to continue; - reads it from standard input.")],
    *,
    target: TargetName = "demo",
    drafter: DrafterSpec = None,
    policy: Annotated[str, typer.Option(help="A spec.")] = "pct",
    acceptor: Annotated[str | None, typer.Option(help="A spec; by default greedy at temperature 0, else match.")] = None,
    asked: Mapping[str, Any],
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

    options = inputs.options(asked)
    sampling = options.sampling
    text, fixed = inputs.prompt_text(prompt), inputs.fixed_costs(costs)
    if options.logprobs is not None and not as_json:
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
        about = {"prompt": text, "target": target, "drafter": drafter, "policy": policy}
        viewer.save_picture(trees, watch.steps, about | {"temperature": f"{sampling.temperature:g}"})
    result = Comparison(first.tokens[0], first.stats)
    if baseline:
        with terminal.busy("running plain decoding, to compare"):
            again = inputs.repeatable(options, len(written.tokens)).request(engine.target, ids)
            result = compare(engine, again, sampling, first)
    if as_json:
        more = {} if options.logprobs is None else {"logprobs": written.logprobs_as_json(engine.tokenizer)}
        drawn = {"trees": [s.as_json() for s in watch.steps[1:]]} if watch is not None and show_trees else {}
        said = {"text": written.text, "token_ids": result.tokens, "ending": written.ending}
        emit({**said, **more, **result.as_json(), **drawn})
    else:
        terminal.show_summary(console, result, stream is not None, engine.keeps_text(sampling))
