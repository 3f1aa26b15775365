"""Reads and checks what the command line was given, before any work begins."""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from draftree.cli import terminal
from draftree.cli.console import remark
from draftree.costs import CostTable
from draftree.drafters.base import Drafter
from draftree.engine import usual_drafter
from draftree.errors import UserError
from draftree.models.target import Target
from draftree.registry import build
from draftree.sampling.grammar import Grammar
from draftree.text.options import Options


class Remarks(logging.Handler):
    """Prints the library's log as remarks."""

    def emit(self, record: logging.LogRecord) -> None:
        remark(record.getMessage())


def quiet() -> None:
    """Turns off the logs and progress bars of transformers, whose failures become errors of ours; our own remarks stay."""
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    disable_progress_bar()
    ours = logging.getLogger("draftree")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(Remarks())


def prompt_text(prompt: str) -> str:
    """The prompt, or standard input without its last line end where it is `-`.

    Raises:
        UserError: there is none.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not valid UTF-8: {error}") from error
    if not text:
        raise UserError("the prompt is empty: it has 0 characters, at least 1 is needed")
    return text


def options(given: Mapping[str, Any]) -> Options:
    """The options of a completion, by the values that the command line has.

    Raises:
        UserError: a value is out of its range, or cannot be read.
    """
    asked = {f.name: given[f.name] for f in fields(Options) if f.name in given}
    asked["logit_bias"] = dict(map(bias, asked["logit_bias"]))
    if (schema := asked["json_schema"]) is not None:
        asked["json_schema"] = schema_text(schema)
    if (path := asked.get("grammar")) is not None:
        asked["grammar"] = Grammar.lark(file_text("--grammar", path, "a file with a Lark grammar"))
    return Options(**asked)


def file_text(option: str, path: str | Path, allowed: str) -> str:
    """The text of a file that an option names.

    Raises:
        UserError: it cannot be read; the message says what is `allowed`.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{option} is '{path}', allowed is {allowed}: {error}") from error


def schema_text(given: str) -> str:
    """A JSON schema given as text, or as a file that holds it."""
    if given.lstrip()[:1] in ("{", "[", '"', "") or given.strip() in ("true", "false"):
        return given
    return file_text("--json-schema", given, "JSON, or a file of it")


def bias(item: str) -> tuple[int | str, float]:
    """The token and the bias that an item TOKEN=BIAS names; a token in quotes is text, be it a number.

    Raises:
        UserError: it is no such item.
    """
    token, _, value = item.rpartition("=")
    try:
        named = json.loads(token) if token.startswith('"') else token
        return int(token) if token.isdecimal() else named, float(value)
    except ValueError as error:
        raise UserError(f"--logit-bias is '{item}', allowed is TOKEN=BIAS: an id or a text, and a number") from error


def repeatable(options: Options, tokens: int) -> Options:
    """Options that end a text at so many tokens where time ended it, so that it can be written again."""
    if options.max_time is None:
        return options
    return replace(options, max_time=None, max_new_tokens=tokens, min_new_tokens=min(options.min_new_tokens, tokens))


def fixed_costs(path: Path | None) -> CostTable | None:
    """The costs in a file, if one was named; they may be another machine's."""
    return None if path is None else CostTable.load(path)


def costs_of_each(paths: Sequence[Path], drafters: Sequence[str]) -> dict[str, CostTable]:
    """By drafter, the costs in files: one for all of them, or one for each in their order.

    Raises:
        UserError: there are as many files as neither allows, or one is not a file of costs.
    """
    tables, drafters = [CostTable.load(path) for path in paths], list(dict.fromkeys(drafters))
    if len(tables) not in (0, 1, len(drafters)):
        told = f"{len(tables)} files of costs were given for {len(drafters)} drafters"
        raise UserError(f"{told}, allowed is one for all of them, or one for each in their order")
    return dict(zip(drafters, tables * len(drafters) if len(tables) == 1 else tables, strict=False))


def drafter(spec: str | None, target: str) -> str:
    """The spec of a drafter, by default the usual one for the target; a remark says so if that one is not trained for it."""
    usual, told = usual_drafter(target)
    if spec is None and told:
        remark(told)
    return usual if spec is None else spec


def opened(spec: str | None, target: str, **how: Any) -> tuple[str, Target, Drafter[Any]]:
    """The spec of a drafter (of the usual one where none is given), the target that it is for, and the drafter.

    Raises:
        UserError: one of them does not exist, or they do not fit.
    """
    spec = drafter(spec, target)
    method = build("drafter", spec)
    quiet()
    with terminal.busy("loading"):
        model = Target.load(target, **how)
        return spec, model, method.open(model)
