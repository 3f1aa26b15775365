"""Error messages for options that a command does not have."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperOption

from draftree.aliases import FLAG, LOADING, OPTION, accepted, nearest, suggestion
from draftree.aliases.flag_hints import FLAG_WORDS
from draftree.errors import UserError

KINDS = (FLAG, OPTION, LOADING)
"""The kinds of names under which an option is looked up, in this order."""
NAMED_OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
OF_A_PROGRAM = re.compile(r"lm_eval --model draftree|draftree [a-z]+[^;,:]*|\| cat|2>/dev/null")
"""A command line that a hint spells out."""
SHOWN = 3
"""How many commands are named that have an option."""
VALUE = r"'[^']*'|[^\s,;:)]*[^\s,;:).]"
"""The value that follows `name=` in a message."""


Options = tuple[dict[str, TyperOption], dict[str, str]]


def options_of(command: Any) -> Options:
    """Return a command's options by every spelling.

    Also return the long spelling of each by its Python name.
    """
    ctx = typer.Context(command, **command.context_settings)
    params = [p for p in command.get_params(ctx) if isinstance(p, TyperOption)]
    own = {flag: p for p in params for flag in (*p.opts, *p.secondary_opts)}
    return own, {
        str(p.name): next((f for f in p.opts if f.startswith("--")), p.opts[0]) for p in params
    }


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of the groups in it, each with the words that name it."""
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def unknown_option(ctx: Any, name: str, word: str, value: str | None = None) -> UserError:
    """Return the error about an option that a command does not have.

    It says what to write instead of another tool's option, or which commands have it, or which is
    the nearest in spelling.

    Args:
        ctx: the context of the command.
        name: the option as it was typed.
        word: its name without dashes.
        value: what was typed after it, where that may be its value.
    """
    own, flags = ctx.command.options
    others: dict[str, Options] = {
        told: command.options for told, command in commands(ctx.find_root().command)
    }
    python = suggestion(OPTION, word) or suggestion(LOADING, word)
    if (told := suggestion(FLAG, word)) is None and word in FLAG_WORDS:
        told = FLAG_WORDS[word].replace("{}", value or "VALUE")
    if told is not None:
        told = placed(as_options(told, flags), own, others)
    elif (told := _elsewhere(name, word, others)) is None and python is not None:
        told = for_command_line(python)
        if not told.startswith("in Python"):
            merged = {
                k: v for _, more in reversed(others.values()) for k, v in more.items()
            } | flags
            told = placed(as_options(told, merged), own, others)
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
    """Return the options in a hint that belong to the command that shows it."""
    return set(NAMED_OPTION.findall(OF_A_PROGRAM.sub("", hint)))


def placed(hint: str, own: Mapping[str, Any], others: Mapping[str, Options]) -> str:
    """Return a hint with the command that has its options, where the one that was typed has not."""
    if (named := named_options(hint)) <= own.keys():
        return hint
    host = next((told for told, (flags, _) in others.items() if named <= flags.keys()), None)
    return hint if host is None else f"in draftree {host}, {hint}"


def _elsewhere(name: str, word: str, others: Mapping[str, Options]) -> str | None:
    """Return which commands have an option, under this name or under draftree's.

    Return None where none has it.
    """
    having: dict[str, list[str]] = {}
    for told, (own, flags) in others.items():
        ours = next(
            (found for kind in KINDS if (found := accepted(kind, word, flags)) in flags), None
        )
        if name in own or ours is not None:
            having.setdefault(name if name in own else flags[ours or ""], []).append(told)
    if not having:
        return None
    flag = max(having, key=lambda flag: (len(having[flag]), flag == name))
    first, more = having[flag][:SHOWN], len(having[flag]) - SHOWN
    if more > 0:
        listed = f"{', '.join(first)} and {more} others have"
    else:
        listed = " and ".join(filter(None, [", ".join(first[:-1]), first[-1]])) + (
            " has" if len(first) == 1 else " have"
        )
    return f"draftree {listed} it" + ("" if flag == name else f", as {flag}")


def for_command_line(hint: str) -> str:
    """Return a hint about Python arguments without calls that the command line makes itself."""
    hint = re.sub(
        r"draftree\.load\(…, ([^()]*)\)|engine\.chat\(text, ([^()]*)\)",
        lambda m: m[1] or m[2],
        hint,
    )
    return f"in Python: {hint}" if re.search(r"engine\.|load\(|completion\.", hint) else hint


def as_options(text: str, flags: Mapping[str, str]) -> str:
    """Return a message with options spelled `--max-new-tokens 8` instead of `max_new_tokens=8`.

    Args:
        text: the message.
        flags: the options by their Python names.
    """

    def assigned(found: re.Match[str]) -> str:
        value = found[2].strip("'") if re.fullmatch(r"'[\w:=./-]*'", found[2]) else found[2]
        return flags[found[1]] + ("" if value == "True" else f" {value}")

    names = "|".join(sorted(flags, key=len, reverse=True))
    outside = rf"(?<![\w'./-])({names})"
    text = re.sub(rf"{outside}=({VALUE})", assigned, text)
    listed = rf"{outside}((?:(?:, | and ){outside})+)(?= (?:is|are) given|$)"
    text = re.sub(listed, lambda m: re.sub(rf"\b({names})\b", lambda n: flags[n[1]], m[0]), text)
    text = re.sub(
        rf"{outside}\b(?![\w'./=-])", lambda m: flags[m[1]] if "_" in m[1] else m[1], text
    )
    return re.sub(rf"(?:^|(?<=; ))({names})(?= is )", lambda m: flags[m[1]], text)
