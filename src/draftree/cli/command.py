"""The command class: it accepts the options of other tools and formats its help."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typing_extensions import override

from draftree.aliases import COMMAND, DTYPE, QUANTIZE, SAME, canonical_name, suggestion
from draftree.cli.argv_translation import command_line, rewrite_arguments
from draftree.cli.option_checks import part_names
from draftree.cli.options import TYPED_OPTIONS_KEY
from draftree.cli.unknown_options import Options, as_options, options_of
from draftree.errors import UnknownName, UserError

MAX_HELP_COLUMNS = 100
"""Largest width of help texts in columns; longer lines are hard to read."""
NAME_COLUMNS = 29
"""Width in columns of option names in help texts. The help of a longer name starts on the next
line."""
LAST_PANELS = ("Loading the model",)
"""Groups of options that come last in a help text."""
FIRST_OPTIONS, LAST_OPTIONS = "target", ("force", "as_json", "help")
"""Names of the option that comes first and of those that come last in their group of a help
text."""
EXTRA_ARGUMENTS = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")
"""Pattern for typer's message about too many arguments."""


class Command(TyperCommand):
    """Represent a command that also accepts options of other tools with the same meaning.

    For an option of another tool without an equivalent, the error message suggests a replacement.
    """

    def __init__(self, name: str | None, **more: Any) -> None:
        settings = {
            "help_option_names": ["-h", "--help"],
            **(more.pop("context_settings", None) or {}),
        }
        super().__init__(name, context_settings=settings, **more)

    @cached_property
    def options(self) -> Options:
        """Return the options by spelling, and the long spelling of each by its Python name."""
        return options_of(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace options of other tools by draftree's, and parse the arguments.

        Raises:
            UserError: an option does not exist.
        """
        args = [str(arg) for arg in args]
        own, flags = self.options
        end = args.index("--") if "--" in args else len(args)
        ours = rewrite_arguments(ctx, args[:end])
        typed = [(new.partition("=")[0], arg.partition("=")[0]) for new, arg in ours]
        ctx.meta[TYPED_OPTIONS_KEY] = {own[new].name: arg for new, arg in typed if new in own}
        with spell_as_options(flags):
            values = _translate_values([new for new, _ in ours], own)
        try:
            return super().parse_args(ctx, [*values, *args[end:]])
        except typer.TyperException as error:
            if (found := EXTRA_ARGUMENTS.match(error.format_message())) is None:
                raise
            raise UserError(_superfluous(found[1].split(), own)) from error

    def invoke(self, ctx: Any) -> Any:
        """Run the command; in its errors, options are spelled as on the command line."""
        with spell_as_options(self.options[1]):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text: usage, description, and options with the main ones first."""
        formatter.write(help_text(self, ctx))


class CommandGroup(TyperGroup):
    """Represent a group of commands; for an unknown command, the error suggests another one."""

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = canonical_name(COMMAND, cmd_name, self.commands)
        if not name.startswith("-") and name not in self.commands:
            raise UnknownName(COMMAND, cmd_name, self.commands)
        return super().get_command(ctx, name)

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # completion parses without arguments
            known = ", ".join(sorted(self.commands))
            raise UserError(
                f"no command was given, known are {known}; {ctx.command_path} --help explains them"
            )
        if ctx.parent is None:
            own = {flag for p in self.get_params(ctx) for flag in (*p.opts, *p.secondary_opts)}
            args = command_line(args, self.commands, own)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text: one line for each command, grouped by purpose."""
        width = columns()
        lines = [
            f"Usage: {ctx.command_path} COMMAND …",
            "",
            *_wrap_paragraphs(self.help, width),
            "",
        ]
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            panels.setdefault(panel, []).append((name, command.short_help or command.help or ""))
        for panel, rows in panels.items():
            lines += [panel, *_two_columns(rows, width, 12), ""]
        options = [(_names(p, ctx), getattr(p, "help", None) or "") for p in self.get_params(ctx)]
        lines += ["Options", *_two_columns(options, width, 12), ""]
        formatter.write(
            "\n".join([*lines, f"{ctx.command_path} COMMAND --help explains a command.", ""])
        )


@contextmanager
def spell_as_options(flags: Mapping[str, str]) -> Iterator[None]:
    """Return a context that replaces Python names in a `UserError` by a command's options.

    Args:
        flags: options by their Python names.
    """
    try:
        yield
    except UserError as error:
        if (text := as_options(str(error), flags)) == str(error):
            raise
        raise UserError(text) from error


def _superfluous(words: Sequence[str], own: Mapping[str, Any]) -> str:
    """Return the message about too many arguments, with the option that may be meant."""
    options = [f for f in ("--drafter", "--policy", "--data", "--suite", "--out") if f in own]
    kinds = {"--drafter": part_names("drafter"), "--policy": part_names("policy")}
    named = [f for f in options if f in kinds and words[0] in kinds[f]]
    named += [f for f in options if f not in kinds]
    hint = (
        f"; write {named[0]} {words[0]}"
        if named
        else "; it takes none"
        if not own.keys() - {"--json", "--help", "-h"}
        else ""
    )
    return f"too many arguments: {', '.join(map(repr, words))}{hint}; --help says what is allowed"


ALIASED_VALUES = {"dtype": DTYPE, "quantize": QUANTIZE}
"""Kind of name for the values of options, by the name of the option. These values have other names
in other tools."""


def _translate_values(args: Sequence[str], own: Mapping[str, Any]) -> list[str]:
    """Replace values under other tools' names by draftree's values, and return the arguments.

    Raises:
        UserError: a value of another tool has no equivalent; the message suggests a replacement.
    """
    found = list[str]()
    for arg in args:
        before, (flag, equals, value) = found[-1] if found else "", arg.partition("=")
        if equals and flag in own and own[flag].name in ALIASED_VALUES:
            kind, prefix = ALIASED_VALUES[own[flag].name], f"{flag}="
        elif before in own and own[before].name in ALIASED_VALUES:
            kind = ALIASED_VALUES[own[before].name]
            flag = before
            value = arg
            prefix = ""
        else:
            found.append(arg)
            continue
        if (told := suggestion(kind, value)) is not None:
            raise UserError(f"{flag} is '{value}': {told}")
        found.append(prefix + SAME[kind].get(value.lower(), value))
    return found


def columns() -> int:
    """Return the width of help texts in columns.

    This is the width of the terminal, but at least 40 and at most `MAX_HELP_COLUMNS`.
    """
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, MAX_HELP_COLUMNS))


def help_text(command: TyperCommand, ctx: Any) -> str:
    """Return the help text of a command."""
    width = columns()
    params: list[Any] = [p for p in command.get_params(ctx) if not getattr(p, "hidden", False)]
    arguments = [p for p in params if not isinstance(p, TyperOption)]
    usage = " ".join(
        [ctx.command_path, *(p.metavar or str(p.name).upper() for p in arguments), "[OPTIONS]"]
    )
    lines = [f"Usage: {usage}", "", *_wrap_paragraphs(command.help, width), ""]
    lines += _two_columns(
        [(p.metavar or str(p.name).upper(), p.help or "") for p in arguments], width
    )
    panels: dict[str, list[tuple[str, str]]] = {"Options": []}
    for p in sorted(params, key=lambda p: (p.name in LAST_OPTIONS) - (p.name == FIRST_OPTIONS)):
        if isinstance(p, TyperOption):
            panels.setdefault(p.rich_help_panel or "Options", []).append(
                (_names(p, ctx), _option_help(p, ctx))
            )
    for panel in [
        *(name for name in panels if name not in LAST_PANELS),
        *(name for name in LAST_PANELS if name in panels),
    ]:
        lines += ["", panel, *_two_columns(panels[panel], width)]
    return "\n".join([*lines, ""])


def _names(option: Any, ctx: Any) -> str:
    """Return the spellings of an option and its value, such as `-m, --target MODEL`."""
    short = [flag for flag in option.opts if not flag.startswith("--")]
    long = [flag for flag in option.opts if flag.startswith("--")]
    names = ", ".join([*short, *long, *option.secondary_opts])
    if option.is_flag:
        return names
    value = option.metavar or option.display_type(ctx).strip("<>")
    return f"{names} {SHOWN_TYPES.get(value, value)}"


SHOWN_TYPES = {
    "str": "TEXT",
    "int": "N",
    "float": "X",
    "path": "PATH",
    "list[str]": "TEXT",
    "list[int]": "N",
    "list[float]": "X",
    "list[path]": "PATH",
    "list[Path]": "PATH",
    "int range": "N",
    "float range": "X",
    "file": "FILE",
}
"""Names of value types in help texts, by typer's name."""


def _option_help(option: Any, ctx: Any) -> str:
    """Return the help of an option, with its default unless this is empty or false."""
    default = option.default
    shown = (
        default is not None and default is not False and default not in ("", (), [])
    )  # 0 is a value worth showing
    if option.required:
        return f"{option.help} (required)"
    if not shown or callable(default):
        return option.help or ""
    values = default if isinstance(default, list | tuple) else [default]
    return (
        f"{option.help} [{', '.join(f'{v:g}' if isinstance(v, float) else str(v) for v in values)}]"
    )


def _two_columns(
    rows: Iterable[tuple[str, str]], width: int, names: int = NAME_COLUMNS
) -> list[str]:
    """Return lines with names in one column and explanations in a second column.

    For a name that is too long, the explanation starts on the next line.
    """
    lines = []
    for name, told in rows:
        wrapped = textwrap.wrap(told, width - names - 2) or [""]
        if len(name) > names - 2:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:{names - 2}}  {wrapped.pop(0)}".rstrip())
        lines += [" " * (names + 2) + part for part in wrapped]
    return lines


def _wrap_paragraphs(text: str | None, width: int) -> list[str]:
    """Return the paragraphs of a text as lines of at most `width` columns."""
    paragraphs = [" ".join(part.split()) for part in (text or "").split("\n\n")]
    return "\n\n".join("\n".join(textwrap.wrap(part, width)) for part in paragraphs).splitlines()
