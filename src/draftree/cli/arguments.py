"""Parse and check the arguments of commands before any work begins."""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers.utils.logging import disable_progress_bar
from typing_extensions import override

from draftree.cli import terminal
from draftree.cli.console import remark
from draftree.cli.option_checks import bias, is_json
from draftree.costs.cost_table import CostTable
from draftree.drafters.base import Drafter
from draftree.engine import PUBLISHED, Engine, usual_drafter
from draftree.errors import UserError
from draftree.evaluation.roofline import Machine, count_draft_reads
from draftree.formats.known_checkpoints import find_published
from draftree.registry import build
from draftree.sampling.grammar import Grammar
from draftree.target.target import Target
from draftree.text.options import Options
from draftree.utils.progress_callback import Tell

T = TypeVar("T")


class Remarks(logging.Handler):
    """Print log messages of the library as remarks on standard error.

    Messages of the server and tracebacks are printed in full.
    """

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.name.startswith("draftree.serving."):
            with suppress(OSError):
                print(f"draftree: {self.format(record)}", file=sys.stderr, flush=True)
        else:
            remark(record.getMessage())


def quiet() -> None:
    """Turn off transformers' logs and progress bars; print draftree's log on standard error.

    Errors of transformers are reported as draftree's errors.
    """
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    disable_progress_bar()
    ours = logging.getLogger("draftree")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(Remarks())


def prompt_text(prompt: str | None) -> str:
    """Return the prompt; if it is `-` or None, read it from standard input.

    Raises:
        UserError: the prompt is empty or cannot be read.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt in ("-", None) else str(prompt)
        text.encode()
    except UnicodeError as error:
        raise UserError(f"the prompt is not valid UTF-8: {error}") from error
    except OSError as error:
        raise UserError(
            f"there is no prompt, and standard input cannot be read: {error}"
        ) from error
    if not text:
        raise UserError("the prompt is empty: it has 0 characters, at least 1 is needed")
    return text


def options(given: Mapping[str, Any]) -> Options:
    """Return generation options for the values of a command's options.

    Raises:
        UserError: a value is out of its range, or a file cannot be read.
    """
    asked = {f.name: given[f.name] for f in fields(Options) if f.name in given}
    asked["logit_bias"] = dict(map(bias, asked["logit_bias"]))
    if (schema := asked["json_schema"]) is not None:
        asked["json_schema"] = schema_text(schema)
    if (path := asked.get("grammar")) is not None:
        asked["grammar"] = Grammar.lark(file_text("--grammar", path, "a file with a Lark grammar"))
    return Options(**asked)


def file_text(option: str, path: str | Path, allowed: str) -> str:
    """Read the text of a file that an option names.

    Args:
        option: the name of the option, for the message.
        path: the file.
        allowed: words for the message that describe the allowed files.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{option} is '{path}', allowed is {allowed}: {error}") from error


def schema_text(given: str) -> str:
    """Return a JSON schema that is given as text or as the name of a file."""
    if is_json(given):
        return given
    return file_text("--json-schema", given, "JSON, or a file of it")


def repeatable(options: Options, tokens: int) -> Options:
    """Return options that limit the number of tokens to `tokens` instead of the time.

    With them a text that a time limit has ended can be generated again.
    """
    if options.max_time is None:
        return options
    return replace(
        options,
        max_time=None,
        max_new_tokens=tokens,
        min_new_tokens=min(options.min_new_tokens, tokens),
    )


def fixed_costs(path: Path | None) -> CostTable | None:
    """Load costs from a file, possibly of another machine; None if no file is given."""
    return None if path is None else CostTable.load(path)


def costs_of_each(paths: Sequence[Path], drafters: Sequence[str]) -> dict[str, CostTable]:
    """Load the costs by drafter from one file for all drafters, or one file for each.

    Raises:
        UserError: the number of files is neither 1 nor that of the drafters, or a file does not
            contain costs.
    """
    return _of_each([CostTable.load(path) for path in paths], drafters, "files of costs")


def machines_of_each(
    given: Sequence[str], costs: Sequence[Path], drafters: Sequence[str]
) -> dict[str, Machine]:
    """Load simulated machines, and return the machine of each drafter; empty if none is named.

    One machine is used for all drafters. Otherwise each drafter needs its own, in the same order.

    Raises:
        UserError: the number of machines is neither 1 nor that of the drafters, a machine is
            unknown, or files of costs are also given.
    """
    if given and costs:
        raise UserError(
            "--machine and --costs were given, allowed is one of them: a machine is a file of costs by its name"
        )
    return _of_each([Machine.load(name) for name in given], drafters, "machines")


def _of_each(given: Sequence[T], drafters: Sequence[str], what: str) -> dict[str, T]:
    drafters = list(dict.fromkeys(drafters))
    if len(given) not in (0, 1, len(drafters)):
        told = f"{len(given)} {what} were given for {len(drafters)} drafters"
        raise UserError(f"{told}, allowed is one for all of them, or one for each in their order")
    return dict(zip(drafters, [*given] * len(drafters) if len(given) == 1 else given, strict=False))


def with_machines(
    engines: Mapping[tuple[str, str], Engine], machines: Mapping[str, Machine], tell: Tell
) -> tuple[dict[tuple[str, str], Engine], dict[str, CostTable]]:
    """Return copies of engines with the costs of simulated machines, and these costs by drafter."""
    opened = {d: e for (d, _), e in engines.items()}
    tables = {
        d: machines[d].costs(count_draft_reads(e.target, e.drafter, tell))
        for d, e in opened.items()
    }
    return {pair: replace(e, costs=tables[pair[0]]) for pair, e in engines.items()}, tables


def drafter(spec: str | None, target: str) -> str:
    """Return the spec of a drafter; by default the usual one for the target.

    If the usual drafter is not trained for the target, a remark is printed.
    """
    if spec == PUBLISHED:
        return find_published(target)
    usual, told = usual_drafter(target)
    if spec is None and told:
        remark(told)
    return usual if spec is None else spec


def open_drafter(spec: str | None, target: str, **how: Any) -> tuple[str, Target, Drafter[Any]]:
    """Return the spec of the given or default drafter, the loaded target, and the drafter.

    Raises:
        UserError: drafter or target does not exist, or they do not fit.
    """
    spec = drafter(spec, target)
    method = build("drafter", spec)
    quiet()
    with terminal.busy("loading"):
        model = Target.load(target, **how)
        return spec, model, method.open(model)
