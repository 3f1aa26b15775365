"""Translate command-line options of other tools to draftree's commands and options."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftree.aliases import (
    FLAG,
    LOADING,
    OPTION,
    asks_for_nothing,
    canonical_name,
    ignorable_hint,
    suggestion,
)
from draftree.aliases.conversions import speculation
from draftree.aliases.flag_hints import (
    COMMAND_WORDS,
    FILE_WORDS,
    FLAG_WORDS,
    OVERRIDDEN,
    THREAD_WORDS,
    WITHOUT_VALUE,
    WRITING,
)
from draftree.cli.console import remark
from draftree.cli.option_checks import is_model
from draftree.cli.unknown_options import KINDS, unknown_option
from draftree.errors import UserError

MIN_THREADS = 3
"""Least value of `-t` that is taken for llama.cpp's number of threads and refused. Smaller values
are temperatures."""
INTERACTIVE_FLAGS = ("-i", "-cnv", "--interactive", "--conversation", "--interactive-first")
"""Options of llama.cpp that start a conversation."""
NO_OPTION = SimpleNamespace(opts=())
"""Placeholder for an option that does not exist."""
YES, NO = ("true", "yes", "1"), ("false", "no", "0")


def command_line(args: Sequence[str], known: Mapping[str, Any], own: set[str]) -> list[str]:
    """Return the arguments with a command of draftree in front.

    If the first argument is a model, a prompt, or another tool's command that generates text, the
    command becomes `generate`. On a terminal without a prompt it becomes `chat`.

    Args:
        args: arguments as they were typed.
        known: draftree's commands by name.
        own: options that may come before a command.
    """
    args = [*map(str, args)]
    first, rest = (args[0], args[1:]) if args else ("", [])
    if not first or first in known or first in own:
        return args
    word = first.replace("-", "_")
    if first == "help":
        return [*rest[:1], "--help"]
    if word in COMMAND_WORDS:
        return [*COMMAND_WORDS[word].split(), *rest]
    if word in WRITING:
        return [_writer(rest), *(arg for arg in rest if arg not in INTERACTIVE_FLAGS)]
    if first.startswith("-") or " " in first or is_model(first):
        return [_writer(args), *(arg for arg in args if arg not in INTERACTIVE_FLAGS)]
    return args


def _writer(args: Sequence[str]) -> str:
    """Return the command for generating text with these arguments: `generate` or `chat`."""
    if any(arg in INTERACTIVE_FLAGS for arg in args):
        return "chat"
    named = any(arg.partition("=")[0] in ("-p", "--prompt", "-f", "--file") for arg in args)
    words = [arg for arg in args[:2] if not arg.startswith("-")]
    prompt = named or (len(words) == 2 and words == [*args[:2]]) or (words and " " in words[0])
    return (
        "generate"
        if prompt or not sys.stdin.isatty() or any(arg in ("-h", "--help") for arg in args)
        else "chat"
    )


def rewrite_arguments(ctx: Any, args: Sequence[str]) -> list[tuple[str, str]]:
    """Replace options of other tools, and return pairs (draftree's argument, typed argument).

    Raises:
        UserError: some options do not exist; the message lists all of them.
    """
    found = list[tuple[str, str]]()
    errors = list[UserError]()
    notes = list[str]()
    own = ctx.command.options[0]
    typed = {
        flag
        for arg in args
        for flag in own.get(accepted_flag(ctx, arg.partition("=")[0]) or "", NO_OPTION).opts
    }
    i = 0
    while i < len(args):
        arg, after = args[i], args[i + 1] if i + 1 < len(args) else None
        i += 1
        try:
            if (
                _is_value(ctx, args[i - 2] if i > 1 else "")
                or (ours := accepted_flag(ctx, arg.partition("=")[0])) == ""
            ):
                found.append((_check_argument(ctx, arg, after), arg))
            elif (
                ours == "--dtype" and (arg.partition("=")[2] if "=" in arg else after) == "auto"
            ):  # the checkpoint's own
                i += "=" not in arg
            elif ours is not None:
                found.append(
                    (_check_argument(ctx, ours + arg[len(arg.partition("=")[0]) :], after), arg)
                )
            else:
                more, took, note = _other(ctx, arg, after, typed)
                found += [(one, arg) for one in more]
                notes += [note] if note else []
                i += took
        except UserError as error:
            errors.append(error)
            i += (
                after is not None
                and not after.startswith("-")
                and "=" not in arg
                and not _takes_none(arg)
            )
    if errors:
        *first, last = map(str, errors)
        raise UserError(
            "; ".join([*(text.removesuffix("; --help lists them") for text in first), last])
        ) from errors[0]
    for note in notes:
        remark(note)
    return found


def _word(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_value(ctx: Any, before: str) -> bool:
    """Return whether the argument after `before` is the value of an option of draftree."""
    name = accepted_flag(ctx, before) if before.startswith("-") and "=" not in before else None
    taken = ctx.command.options[0].get(name) if name else None
    return taken is not None and not taken.is_flag


def accepted_flag(ctx: Any, name: str) -> str | None:
    """Return draftree's spelling of a typed option.

    The result is empty for an argument that is not an option, and None for an unknown option.
    """
    own, flags = ctx.command.options
    if not name.startswith("-") or name == "-" or is_number(name):
        return ""
    if name in own:
        return name
    for kind in KINDS:
        if (ours := canonical_name(kind, _word(name), flags)) in flags:
            return str(flags[ours])
    if not name.startswith("--") and name[:2] in own and is_number(name[2:]):  # -n5
        return name
    return None


def _check_argument(ctx: Any, arg: str, after: str | None) -> str:
    """Return an argument under draftree's name, after checking its value.

    Raises:
        UserError: the argument is `-t` with a number of threads.
    """
    name, equals, value = arg.partition("=")
    given = value if equals else after or ""
    if (
        name == "-t"
        and name in ctx.command.options[0]
        and given.isdecimal()
        and (number := int(given)) >= MIN_THREADS
    ):
        raise UserError(
            f"-t is {number}, but -t is the temperature; --threads {number} is that many threads"
        )
    return arg


def _takes_none(arg: str) -> bool:
    word = _word(arg)
    return word in WITHOUT_VALUE or ("{}" not in FLAG_WORDS[word] if word in FLAG_WORDS else False)


def _other(ctx: Any, arg: str, after: str | None, typed: set[str]) -> tuple[list[str], int, str]:
    """Translate an option of another tool into draftree's arguments.

    Returns:
        The equivalent arguments, the number of following arguments that were the option's value,
        and a note for the user, which may be empty.

    Raises:
        UserError: the option has no equivalent.
    """
    name, equals, value = arg.partition("=")
    word, given = _word(name), value if equals else after
    own = ctx.command.options[0]
    took = int(not equals and given is not None)
    if any(
        asks_for_nothing(kind, word, _literal(given))
        for kind in (OPTION, LOADING)
        if given is not None
    ):
        return [], took, ""
    if word in THREAD_WORDS and given is not None and given.isdecimal() and int(given):
        os.environ["OMP_NUM_THREADS"] = given  # torch, which reads it, is loaded later
        return [], took, ""
    parts = (
        speculation(_literal(given))
        if word in ("speculative_config", "sc", "speculative") and given
        else None
    )
    if parts is not None and "--drafter" in own:
        return [one for part, told in parts.items() for one in (f"--{part}", told)], took, ""
    if (
        word in ("ngl", "n_gpu_layers", "gpu_layers", "num_gpu")
        and given == "0"
        and "--device" in own
    ):
        return ["--device", "cpu"], took, ""
    if word == "format" and given == "json":
        word, given = "json_mode", None
    if (told := FLAG_WORDS.get(word)) is not None:
        valued = "{}" in told
        more = _equivalent_arguments(name, told, given) if given is not None or not valued else []
        options = [one for one in more if one.startswith("--")]
        switched = None if valued or given is None else given.lower()
        if more and set(options) <= own.keys():
            if switched in NO:
                return [], took, ""
            if not typed & {*options}:
                return (
                    more,
                    took if valued or switched in YES or arg.startswith("--format") else 0,
                    "",
                )
            if word in OVERRIDDEN:
                return [], 0, ""
            both = [one for one in options if one in typed]
            raise UserError(
                f"{name} is {told.replace('{}', given or '')}, and {both[0]} is given, allowed is one of them"
            )
    kinds = (OPTION, LOADING) if suggestion(FLAG, word) is None else (FLAG,)
    if (
        why := next(
            (why for kind in kinds if (why := ignorable_hint(kind, word)) is not None), None
        )
    ) is not None:
        alone = word in WITHOUT_VALUE and (given is None or given.lower() not in (*YES, *NO))
        return [], 0 if alone else took, f"{name} is not used: {why}"
    raise unknown_option(ctx, name, word, given)


def _equivalent_arguments(name: str, told: str, value: str | None) -> list[str]:
    """Return the arguments that are equivalent to an option, with its value filled in.

    For an option in `FILE_WORDS`, the value is the text of the file that it names.

    Raises:
        UserError: the file cannot be read.
    """
    if _word(name) in FILE_WORDS and value is not None:
        try:
            value = Path(value).read_text("utf-8").removesuffix("\n")
        except (OSError, UnicodeError) as error:
            raise UserError(f"{name} is '{value}', allowed is a file of text: {error}") from error
    return [part.replace("{}", value or "") for part in told.split(" ")]


def _literal(text: str) -> Any:
    """Return the value of a text that is JSON or a Python constant; otherwise the text itself."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
