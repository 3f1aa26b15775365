"""`draftree generate`: answers or continues a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.boundary.files import writable
from draftree.boundary.knobs import knob
from draftree.cli.console import emit
from draftree.cli.options import AsJson, CostsFile, DrafterSpec, LoadingOptions, TargetName, asks_for
from draftree.errors import UserError
from draftree.text.parameters import Parameters

if TYPE_CHECKING:
    from draftree.engine import Engine
    from draftree.request import Emitted
    from draftree.text.options import Options


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `draftree generate`."""

    prompt: Annotated[str, typer.Argument(help="What to answer or to continue; - reads it from standard input.")]
    target: TargetName = "demo"
    drafter: DrafterSpec = None
    policy: str | None = knob(None, help="A spec; by default the fastest with the usual drafter, pct with one that is named.")
    acceptor: str | None = knob(None, help="A spec; by default greedy at temperature 0, else match.")
    completion: Annotated[Mapping[str, Any], Parameters] = knob(None)
    raw: bool = knob(False, help="Continue the prompt as it is, without the chat template.")
    baseline: bool = knob(False, help="Run plain decoding too, and compare.")
    show_trees: bool = knob(False, help="Draw each step's tree, or add it to the JSON.")
    profile: bool = knob(False, help="Say where a step's time goes, beside what this machine could do at best.")
    trees: Path | None = knob(None, help="Save a picture of each step's tree: a file .html or .svg.")
    costs: CostsFile = None
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@asks_for
def generate(ctx: typer.Context, asked: GenerateOptions) -> None:
    """Write what the target would write, in fewer passes."""
    from draftree import viewer
    from draftree.cli import inputs, terminal
    from draftree.data.prompts import encode, question
    from draftree.engine import load, usual_policy
    from draftree.evaluation.compare import warm

    options = inputs.options(asked.completion)
    text, fixed = inputs.prompt_text(asked.prompt), inputs.fixed_costs(asked.costs)
    if options.logprobs is not None and not asked.as_json:
        raise UserError("--logprobs was given, allowed is it only with --json")
    if asked.trees is not None:
        writable(asked.trees, endings=viewer.FORMATS)
    drafter = inputs.drafter(asked.drafter, asked.target)
    policy = usual_policy(asked.target, asked.drafter is not None) if asked.policy is None else asked.policy
    inputs.quiet()
    with terminal.busy("loading"):
        engine = load(asked.target, drafter, policy, asked.acceptor, fixed, **asked.loading)
        ids = encode(engine.tokenizer, text if asked.raw else question(text))
        warm(engine, options.request(engine.target, ids), asked.baseline)
    about = {"prompt": text, "target": asked.target, "drafter": drafter, "policy": policy}
    write(engine, options, ids, asked, about | {"temperature": f"{options.sampling.temperature:g}"})


def write(engine: "Engine", options: "Options", ids: list[int], asked: GenerateOptions, about: Mapping[str, str]) -> None:
    """Writes the text, draws its trees and compares it with plain decoding's, as far as that was asked for.

    Args:
        engine: is warm.
        options: of the completion.
        ids: of the prompt.
        asked: what is to be shown.
        about: what writes the text, by name, for the head of a picture.
    """
    from draftree import viewer
    from draftree.cli import inputs, terminal
    from draftree.evaluation.compare import Comparison, compare
    from draftree.evaluation.profile import as_json, profiled
    from draftree.evaluation.tables import profile_rows
    from draftree.text.completion import Reading

    console, reading = terminal.output(), Reading(engine.tokenizer, options.stops(engine.tokenizer))
    draw = partial(viewer.draw, console) if asked.show_trees and not asked.as_json else None
    watch = viewer.Watch(engine.tokenizer, draw) if asked.show_trees or asked.trees is not None else None
    coloured = console.is_terminal and not asked.as_json

    def listen(events: list["Emitted"]) -> None:
        tokens = reading(events)
        if watch is not None:
            watch(events)
        if coloured and draw is None:
            terminal.show_tokens(console, tokens)

    first = engine.write([options.request(engine.target, ids)], on_tokens=listen, reuse=False)
    written = reading.completion(first.stats)
    if coloured:
        terminal.show_tokens(console, reading.tokens if draw else ())  # the text comes behind trees that are drawn
        console.print()
    elif not asked.as_json:
        print(written.text, flush=True)
    if watch is not None and asked.trees is not None:
        viewer.save_picture(asked.trees, watch.steps, about)
    result = Comparison(first.tokens[0], first.stats)
    if asked.baseline:
        with terminal.busy("running plain decoding, to compare"):
            again = inputs.repeatable(options, len(written.tokens)).request(engine.target, ids)
            result = compare(engine, again, first)
    found = profiled(engine.target, result.stats) if asked.profile else []
    if not asked.as_json:
        terminal.show_summary(console, result, coloured, engine.keeps_text(options.sampling))
        if found:
            console.print(terminal.table("where a step's time goes", profile_rows(found)))
        return terminal.show_footprint(console)
    more = {} if options.logprobs is None else {"logprobs": written.logprobs_as_json(engine.tokenizer)}
    trees = {"trees": [s.as_json() for s in watch.steps[1:]]} if watch is not None and asked.show_trees else {}
    text = {"text": written.text, "token_ids": result.tokens, "ending": written.ending}
    emit({**text, **more, **result.as_json(), **trees, **({"profile": as_json(found)} if found else {})})
