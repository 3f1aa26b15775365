"""Options that several commands share, and commands whose options are the fields of a dataclass."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from draftree.models.sources import ALLOWED, Loading, Source
from draftree.text.parameters import END as LAST

T = TypeVar("T")
TargetName = Annotated[str, typer.Option("--target", help=f"What writes: {ALLOWED}.")]
LoadingOptions = Annotated[Mapping[str, Any], Loading]
SourceOptions = Annotated[Mapping[str, Any], Source]
DrafterSpec = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A spec (name, or name:key=value,…) or a checkpoint's folder; by default edd where one is shipped, else suffix.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", help="A file that `draftree costs --out` wrote; by default they are measured here.")
]
Machines = Annotated[
    list[str],
    typer.Option(
        "--machine", help="A machine that is not here, whose costs stand for --costs: figures are simulated; repeat it."
    ),
]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]


def asks_for(command: Callable[[typer.Context, T], None]) -> Callable[..., None]:
    """Makes a typer command of a function of a context and a dataclass `asked`: each of the dataclass's fields is an option.

    A field is annotated as typer has it, or its metadata (see `knob`) say the option's `help`, `metavar` and `min`, and its
    `flag`, `kind` and `panel` where they are not `--` with the field's name, the field's type, and the general one. A field
    that is annotated with a dataclass stands for all of that one's options, and holds their values by name; panels come there
    in the order of their fields, `LAST` at the end.
    """
    of = get_type_hints(command)["asked"]

    @wraps(command)
    def called(ctx: typer.Context, **given: Any) -> None:
        parts = {f.name: {g.name: given.pop(g.name) for g in fields(part)} for f, _, part in _fields(of) if part}
        command(ctx, of(**given, **parts))

    context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    called.__signature__ = inspect.Signature([context, *_parameters(of)])  # type: ignore[attr-defined]
    return called


def _fields(of: type) -> Iterator[tuple[Field[Any], Any, type | None]]:
    """The fields of a dataclass, each with its type and the dataclass whose options it stands for, if any."""
    hints = get_type_hints(of, include_extras=True)
    for f in fields(of):
        *_, last = get_args(hints[f.name]) or [None]
        yield f, hints[f.name], last if isinstance(last, type) and is_dataclass(last) else None


def _parameters(of: type) -> Iterator[Parameter]:
    for f, hint, part in sorted(_fields(of), key=lambda found: found[0].metadata.get("panel") == LAST):
        if part:
            yield from _parameters(part)
            continue
        more, kind = f.metadata, f.metadata.get("kind", hint)
        if get_origin(kind) is not Annotated:
            flag = more.get("flag", "--" + f.name.replace("_", "-"))
            panel = {"rich_help_panel": more["panel"]} if "panel" in more else {}
            option = typer.Option(flag, help=more["help"], metavar=more.get("metavar"), min=more.get("min"), **panel)
            kind = Annotated[kind, option]
        default: Any = Parameter.empty if f.default is MISSING else f.default
        if get_origin(get_args(kind)[0]) is list and f.default is not MISSING:
            default = list(default or ())
        yield Parameter(f.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
