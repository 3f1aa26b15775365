"""`draftree generate`: answers or continues a prompt."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.console import emit
from draftree.cli.option_checks import check_target, is_model
from draftree.cli.options import (
    AcceptorSpec,
    AsJson,
    CostsFile,
    DrafterSpec,
    Force,
    LoadingOptions,
    PolicySpec,
    TargetName,
    dataclass_command,
    one_model,
)
from draftree.errors import UserError
from draftree.text.option_fields import MORE_PANEL, Parameters
from draftree.utils.validated_dataclass import knob

if TYPE_CHECKING:
    from draftree.engine import Engine
    from draftree.request import Emitted
    from draftree.text.options import Options


@dataclass(frozen=True)
class GenerateOptions:
    """Store the options of `draftree generate`."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="The model, as for --target, and the prompt; standard input is read without a prompt, or with -.",
        ),
    ] = None
    target: TargetName = "demo"
    prompt: str | None = knob(None, short="-p", help="Prompt, instead of the argument.")
    drafter: DrafterSpec = None
    policy: PolicySpec = None
    acceptor: AcceptorSpec = None
    completion: Annotated[Mapping[str, Any], Parameters] = knob(None)
    stream: bool = knob(False, help="Print the text as it is written, even in a pipe.")
    raw: bool = knob(False, help="Continue the prompt, without the chat template.")
    baseline: bool = knob(False, help="Compare text and speed with plain decoding.")
    as_json: AsJson = False
    show_trees: bool = knob(
        False, panel=MORE_PANEL, help="Draw the tree of each step, or add it to the JSON."
    )
    profile: bool = knob(False, panel=MORE_PANEL, help="Show where the time of a step goes.")
    trees: Path | None = knob(
        None,
        written=(".html", ".svg"),
        panel=MORE_PANEL,
        help="Save a picture of all trees: .html or .svg.",
    )
    force: Force = False
    costs: CostsFile = None
    loading: LoadingOptions = knob(None)


def model_and_prompt(ctx: typer.Context, asked: GenerateOptions) -> GenerateOptions:
    """Return the options with the model and the prompt from the positional arguments.

    Raises:
        UserError: there are too many arguments, or the model or the prompt is given twice or not at
            all.
    """
    words, prompt = asked.words or [], asked.prompt
    if len(words) > 2:
        raise UserError(
            f"{len(words)} arguments were given, allowed are MODEL and PROMPT: put the prompt into quotes"
        )
    source = ctx.get_parameter_source("target")
    has_target = source is not None and source.name == "COMMANDLINE"
    first_is_model = len(words) == 2 or (
        len(words) == 1 and (prompt is not None or (not has_target and is_model(words[0])))
    )
    target = one_model(ctx, words.pop(0), asked.target) if first_is_model else asked.target
    if words and prompt is not None:
        raise UserError(
            f"the prompt is given twice, as '{words[0]}' and as --prompt, allowed is once"
        )
    check_target(target, asked.loading)
    prompt = words[0] if words else prompt
    if prompt is None and sys.stdin.isatty():
        raise UserError(
            f"there is no prompt: draftree generate {target} 'PROMPT', or a pipe into it"
        )
    return replace(asked, target=target, prompt="-" if prompt is None else prompt)


@dataclass_command
def generate(ctx: typer.Context, asked: GenerateOptions) -> None:
    """Write exactly what the model would write, in fewer forward passes."""
    asked = model_and_prompt(ctx, asked)
    from draftree.cli import arguments, terminal
    from draftree.data.prompts import encode, question
    from draftree.engine import load, usual_policy
    from draftree.evaluation.compare import warm_up

    options = arguments.options(asked.completion)
    text, fixed = arguments.prompt_text(asked.prompt), arguments.fixed_costs(asked.costs)
    if asked.raw and asked.loading["system"] is not None:
        raise UserError(
            "--system and --raw were given, allowed is one of them: a system message needs the chat template"
        )
    if options.logprobs is not None and not asked.as_json:
        raise UserError("--logprobs was given, allowed only with --json")
    drafter = arguments.drafter(asked.drafter, asked.target)
    policy = asked.policy
    if policy is None:
        policy = usual_policy(asked.target, asked.drafter and drafter, asked.loading["device"])
    arguments.quiet()
    with terminal.busy("loading"):
        engine = load(asked.target, drafter, policy, asked.acceptor, fixed, **asked.loading)
        ids = encode(engine.tokenizer, text if asked.raw else question(text))
        warm_up(engine, options.request(engine.target, ids), asked.baseline)
    about = {"prompt": text, "target": asked.target, "drafter": drafter, "policy": policy}
    write(engine, options, ids, asked, about | {"temperature": f"{options.sampling.temperature:g}"})


def write(
    engine: "Engine",
    options: "Options",
    ids: list[int],
    asked: GenerateOptions,
    about: Mapping[str, str],
) -> None:
    """Generate a text; as requested, draw its trees and compare it with plain decoding.

    Args:
        engine: engine after a warm-up.
        options: options of the completion.
        ids: token ids of the prompt.
        asked: options of the command, which determine the output.
        about: names of the target, the drafter and the policy by kind, for the head of a picture.
    """
    from draftree import viewer
    from draftree.cli import arguments, terminal
    from draftree.evaluation.compare import Comparison, compare
    from draftree.evaluation.step_profile import as_json, profile_step
    from draftree.evaluation.text_tables import profile_rows
    from draftree.text.completion import Reading

    console, reading = terminal.output(), Reading(engine.tokenizer, options.stops(engine.tokenizer))
    draw = partial(viewer.draw, console) if asked.show_trees and not asked.as_json else None
    streams = (asked.stream or console.is_terminal) and not asked.as_json and draw is None
    plain_stream = streams and not terminal.colours(console)
    watch = (
        viewer.Watch(engine.tokenizer, draw)
        if asked.show_trees or asked.trees is not None
        else None
    )
    coloured = terminal.colours(console) and not asked.as_json

    def listen(events: list["Emitted"]) -> None:
        tokens = reading(events)
        if watch is not None:
            watch(events)
        if coloured and draw is None:
            terminal.show_tokens(console, tokens)
        elif plain_stream:
            print("".join(token.text for token in tokens), end="", flush=True)

    first = engine.write([options.request(engine.target, ids)], on_tokens=listen, reuse=False)
    written = reading.completion(first.stats)
    if coloured:
        terminal.show_tokens(
            console, reading.tokens if draw else ()
        )  # the text comes after the trees that were drawn
        console.print()
    elif not asked.as_json:
        print("" if plain_stream else written.text, flush=True)
    if watch is not None and asked.trees is not None:
        viewer.save_picture(asked.trees, watch.steps, about)
    result = Comparison(first.tokens[0], first.stats)
    if asked.baseline:
        with terminal.busy("running plain decoding, to compare"):
            again = arguments.repeatable(options, len(written.tokens)).request(engine.target, ids)
            result = compare(engine, again, first)
    found = profile_step(engine.target, result.stats) if asked.profile else []
    if not asked.as_json:
        terminal.show_summary(console, result, coloured, engine.keeps_text(options.sampling))
        if found:
            console.print(terminal.table("where a step's time goes", profile_rows(found)))
        return terminal.show_footprint(console)
    more = (
        {} if options.logprobs is None else {"logprobs": written.logprobs_as_json(engine.tokenizer)}
    )
    trees = (
        {"trees": [s.as_json() for s in watch.steps[1:]]}
        if watch is not None and asked.show_trees
        else {}
    )
    text = {"text": written.text, "token_ids": result.tokens, "ending": written.ending}
    emit(
        {
            **text,
            **more,
            **result.as_json(),
            **trees,
            **({"profile": as_json(found)} if found else {}),
        }
    )
