"""Options that several commands share, and commands built from a dataclass of options."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from os.path import exists
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from draftree.cli.option_checks import check_options
from draftree.errors import UserError
from draftree.target.load_options import Loading, Source
from draftree.target.target_names import ALLOWED

T = TypeVar("T")
TYPED_OPTIONS_KEY = "draftree.typed"
"""Key in a context's `meta` under which the typed spelling of each option is stored by Python
name."""
NO_COMMANDS = ("throughput", "latency", "serve", "startup", "sweep")
"""Sub-commands of `vllm bench`, which draftree does not have."""
TargetName = Annotated[
    str, typer.Option("-m", "--target", metavar="MODEL", help=f"The model: {ALLOWED}.")
]
Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model, as --target takes it.")
]
LoadingOptions = Annotated[Mapping[str, Any], Loading]
SourceOptions = Annotated[Mapping[str, Any], Source]
DrafterSpec = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="SPEC",
        help="A name (draftree list), name:key=value,…, a folder or hub id, or published; by default the model's fastest.",
    ),
]
PolicySpec = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="SPEC",
        help="How draft trees grow: a name, name:key=value,…; "
        "by default yield, on a GPU the drafter's own.",
    ),
]
AcceptorSpec = Annotated[
    str | None,
    typer.Option(
        "--acceptor",
        metavar="SPEC",
        help="Which drafted tokens are kept; by default greedy at temperature 0, else match.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing outputs without asking.")]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Costs saved by draftree costs, not learnt ones."),
]
Machines = Annotated[
    list[str],
    typer.Option(
        "--machine",
        help="Simulate another machine by its saved costs (draftree list); may be repeated.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]


def dataclass_command(command: Callable[[typer.Context, T], None]) -> Callable[..., None]:
    """Turn a function of a context and a dataclass `asked` into a typer command.

    Each field of the dataclass becomes an option. A field is either annotated as for typer, or
    described by its metadata (see `knob`): `help`, `metavar`, `min`, and optionally `flag` (by
    default `--` and the field's name), `kind` (by default the field's type) and `panel` (by default
    the general group). A field that is annotated with another dataclass stands for all options of
    that dataclass; its value is a mapping of their values by name. A command with a field `target`
    and without positional arguments also accepts the model as its first argument.
    """
    of = get_type_hints(command)["asked"]

    takes_model = _takes_model(of)

    @wraps(command)
    def call(ctx: typer.Context, **given: Any) -> None:
        if takes_model:
            given["target"] = one_model(ctx, given.pop("model"), given["target"])
        several = {f.name: part for f, _, part in _fields(of) if part}
        parts = {
            name: {g.name: given.pop(g.name) for g in fields(part)}
            for name, part in several.items()
        }
        check_options(of, given | parts, several)
        command(ctx, of(**given, **parts))

    context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    model = (
        [Parameter("model", Parameter.KEYWORD_ONLY, default=None, annotation=Model)]
        if takes_model
        else []
    )
    call.__signature__ = inspect.Signature([context, *model, *_parameters(of)])  # type: ignore[attr-defined]
    return call


def _fields(of: type) -> Iterator[tuple[Field[Any], Any, type | None]]:
    """Yield each field of a dataclass with its type and its dataclass of options.

    The third value is None for a field that is a single option.
    """
    hints = get_type_hints(of, include_extras=True)
    for f in fields(of):
        *_, last = get_args(hints[f.name]) or [None]
        yield f, hints[f.name], last if isinstance(last, type) and is_dataclass(last) else None


def _takes_model(of: type) -> bool:
    """Return whether a command has an option `target` and no positional arguments."""
    hints = {f.name: hint for f, hint, part in _fields(of) if not part}
    return "target" in hints and not any(_is_argument(hint) for hint in hints.values())


def _is_argument(hint: Any) -> bool:
    return any(
        isinstance(more, typer.models.ArgumentInfo) for more in getattr(hint, "__metadata__", ())
    )


def one_model(ctx: typer.Context, argument: str | None, option: str) -> str:
    """Return the model, which is named either as an argument or as an option.

    Raises:
        UserError: the model is named twice.
    """
    if argument is None:
        return option
    typed = ctx.meta.get(TYPED_OPTIONS_KEY, {}).get("target", "--target")
    if argument in NO_COMMANDS and ctx.info_name == "bench" and not exists(argument):
        told = f"draftree bench has no sub-commands, and '{argument}' was read as the model"
        raise UserError(f"{told}: type draftree bench {option} …")
    source = ctx.get_parameter_source("target")
    if source is not None and source.name == "COMMANDLINE":
        raise UserError(
            f"the model is given twice, as '{argument}' and as {typed} '{option}', allowed is once"
        )
    return argument


def _parameters(of: type) -> Iterator[Parameter]:
    for f, hint, part in _fields(of):
        if part:
            yield from _parameters(part)
            continue
        more, kind = f.metadata, f.metadata.get("kind", hint)
        if get_origin(kind) is not Annotated:
            flags = [
                *filter(None, [more.get("short")]),
                more.get("flag", "--" + f.name.replace("_", "-")),
            ]
            panel = {"rich_help_panel": more["panel"]} if more.get("panel") else {}
            option = typer.Option(
                *flags, help=more["help"], metavar=more.get("metavar"), min=more.get("min"), **panel
            )
            kind = Annotated[kind, option]
        default: Any = Parameter.empty if f.default is MISSING else f.default
        if get_origin(get_args(kind)[0]) is list and f.default is not MISSING:
            default = list(default or ())
        yield Parameter(f.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
