"""Options that several commands share."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from draftree.text.parameters import END as LAST

PCT, GREEDY, GREEDY_AND_1, ALL, ONE = ["pct"], [0.0], [0.0, 1.0], list[str](), [1]
NO_FILES = list[Path]()
THEIRS = "by default the method's"
TargetName = Annotated[str, typer.Option("--target", help="demo, a Hugging Face folder, or a hub id.")]
DrafterSpec = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A spec (name, or name:key=value,…) or a checkpoint's folder; by default edd for the demo, else suffix.",
    ),
]
Device = Annotated[str | None, typer.Option(help="A torch device; by default a GPU where there is one.")]
DType = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Of the target's weights; by default the checkpoint's own, float32 for half precision on a CPU."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", help="A file that `draftree costs --out` wrote; by default they are measured here.")
]
MaxNew = Annotated[int, typer.Option("--max-new-tokens", help="How many tokens may be written.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]


def asks_for(of: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command's parameter `asked`, a mapping, of options: one for each field of a dataclass, see `knob`.

    A field's metadata says the option's `help` and `metavar`, and its `flag`, `kind` and `panel` where they are not `--` with
    the field's name, the field's type, and the general ones. Panels come in the order of their fields, `LAST` at the end.
    """
    hints = get_type_hints(of)
    made = []
    for f in sorted(fields(of), key=lambda f: f.metadata.get("panel") == LAST):
        more, kind = f.metadata, f.metadata.get("kind", hints[f.name])
        option = typer.Option(
            more.get("flag", "--" + f.name.replace("_", "-")),
            help=more["help"],
            metavar=more.get("metavar"),
            rich_help_panel=more.get("panel"),
        )
        default = [] if get_origin(kind) is list else f.default
        made.append(Parameter(f.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]))

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)

        @wraps(command)
        def called(**given: Any) -> None:
            asked = {one.name: given.pop(one.name) for one in made}
            command(asked=asked, **given)

        before = list(signature.parameters.values())
        at = [one.name for one in before].index("asked")
        called.__signature__ = signature.replace(parameters=[*before[:at], *made, *before[at + 1 :]])  # type: ignore[attr-defined]
        return called

    return decorated
