"""Error messages for options that a command does not have."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperOption

from draftree.aliases import FLAG, LOADING, OPTION, canonical_name, nearest, suggestion
from draftree.aliases.flag_hints import FLAG_WORDS
from draftree.aliases.hint_tables import LM_EVALUATION
from draftree.errors import UserError

KINDS = (FLAG, OPTION, LOADING)
"""Kinds of names under which an option is looked up, in this order."""
NAMED_OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
OF_A_PROGRAM = re.compile(re.escape(LM_EVALUATION) + r"|draftree [a-z]+[^;,:]*|\| cat|2>/dev/null")
"""Pattern for a complete command line inside a hint."""
MAX_COMMANDS = 3
"""Largest number of commands that a message lists for an option."""
VALUE_PATTERN = r"'[^']*'|[^\s,;:)]*[^\s,;:).]"
"""Pattern for the value after `name=` in a message."""


Options = tuple[dict[str, TyperOption], dict[str, str]]


def options_of(command: Any) -> Options:
    """Return a command's options by spelling, and the long spelling of each by its Python name.

    An option has several entries in the first mapping, one for each spelling.
    """
    ctx = typer.Context(command, **command.context_settings)
    params = [p for p in command.get_params(ctx) if isinstance(p, TyperOption)]
    own = {flag: p for p in params for flag in (*p.opts, *p.secondary_opts)}
    return own, {
        str(p.name): next((f for f in p.opts if f.startswith("--")), p.opts[0]) for p in params
    }


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands in a group and its subgroups, each as (words that name it, command)."""
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def unknown_option(ctx: Any, name: str, word: str, value: str | None = None) -> UserError:
    """Return the error for an option that a command does not have.

    The message suggests a replacement for another tool's option, lists the commands that have the
    option, or names the option with the most similar spelling.

    Args:
        ctx: context of the command.
        name: typed option.
        word: name of the option without dashes.
        value: the typed argument after the option, if it may be the option's value.
    """
    own, flags = ctx.command.options
    others: dict[str, Options] = {
        told: command.options for told, command in commands(ctx.find_root().command)
    }
    python = suggestion(OPTION, word) or suggestion(LOADING, word)
    if (told := suggestion(FLAG, word)) is None and word in FLAG_WORDS:
        told = FLAG_WORDS[word].replace("{}", value or "VALUE")
    if told is not None:
        told = add_command(as_options(told, flags), own, others)
    elif (told := _elsewhere(name, word, others)) is None and python is not None:
        told = for_command_line(python)
        if not told.startswith("in Python"):
            merged = {
                k: v for _, more in reversed(others.values()) for k, v in more.items()
            } | flags
            told = add_command(as_options(told, merged), own, others)
    if told is not None:
        return UserError(f"unknown option '{name}': {told}")
    typed = {flag.lstrip("-"): flag for flag in own}  # dashes would make all names alike
    near = typed.get(nearest(FLAG, name.lstrip("-"), typed) or "") or flags.get(
        nearest(OPTION, word, flags) or ""
    )
    return UserError(
        f"unknown option '{name}'{f', did you mean {near}?' if near else ''}; --help lists them"
    )


def named_options(hint: str) -> set[str]:
    """Return the options that a hint names, except those in complete command lines."""
    return set(NAMED_OPTION.findall(OF_A_PROGRAM.sub("", hint)))


def add_command(hint: str, own: Mapping[str, Any], others: Mapping[str, Options]) -> str:
    """Return a hint, after the name of another command if only that one has the hint's options.

    Args:
        hint: the hint, which may name options.
        own: options of the typed command.
        others: options of each command.
    """
    if (named := named_options(hint)) <= own.keys():
        return hint
    host = next((told for told, (flags, _) in others.items() if named <= flags.keys()), None)
    return hint if host is None else f"in draftree {host}, {hint}"


def _elsewhere(name: str, word: str, others: Mapping[str, Options]) -> str | None:
    """Return a sentence on the commands that have an option under this or draftree's name.

    Return None if no command has it.
    """
    having: dict[str, list[str]] = {}
    for told, (own, flags) in others.items():
        ours = next(
            (found for kind in KINDS if (found := canonical_name(kind, word, flags)) in flags), None
        )
        if name in own or ours is not None:
            having.setdefault(name if name in own else flags[ours or ""], []).append(told)
    if not having:
        return None
    flag = max(having, key=lambda flag: (len(having[flag]), flag == name))
    first, more = having[flag][:MAX_COMMANDS], len(having[flag]) - MAX_COMMANDS
    if more > 0:
        listed = f"{', '.join(first)} and {more} others have"
    else:
        listed = " and ".join(filter(None, [", ".join(first[:-1]), first[-1]])) + (
            " has" if len(first) == 1 else " have"
        )
    return f"draftree {listed} it" + ("" if flag == name else f", as {flag}")


def for_command_line(hint: str) -> str:
    """Convert a hint about Python arguments for users of the command line."""
    hint = re.sub(
        r"draftree\.load\(…, ([^()]*)\)|engine\.chat\(text, ([^()]*)\)",
        lambda m: m[1] or m[2],
        hint,
    )
    return f"in Python: {hint}" if re.search(r"engine\.|load\(|completion\.", hint) else hint


def as_options(text: str, flags: Mapping[str, str]) -> str:
    """Replace `max_new_tokens=8` and the like in a message by `--max-new-tokens 8`.

    Args:
        text: the message.
        flags: options by their Python names.
    """

    def format_option(found: re.Match[str]) -> str:
        value = found[2].strip("'") if re.fullmatch(r"'[\w:=./-]*'", found[2]) else found[2]
        return flags[found[1]] + ("" if value == "True" else f" {value}")

    names = "|".join(sorted(flags, key=len, reverse=True))
    outside = rf"(?<![\w'./-])({names})"
    text = re.sub(rf"{outside}=({VALUE_PATTERN})", format_option, text)
    listed = rf"{outside}((?:(?:, | and ){outside})+)(?= (?:is|are) given|$)"
    text = re.sub(listed, lambda m: re.sub(rf"\b({names})\b", lambda n: flags[n[1]], m[0]), text)
    text = re.sub(
        rf"{outside}\b(?![\w'./=-])", lambda m: flags[m[1]] if "_" in m[1] else m[1], text
    )
    return re.sub(rf"(?:^|(?<=; ))({names})(?= is )", lambda m: flags[m[1]], text)
