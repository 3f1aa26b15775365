"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

PCT, GREEDY, GREEDY_AND_1, ALL, ONE = ["pct"], [0.0], [0.0, 1.0], list[str](), [1]
NO_FILES, NO_IDS = list[Path](), list[int]()
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
LIKELY, PENALTIES, SHAPE, END = "How tokens are chosen", "Penalties and bans", "What the answer must be", "Where it ends"
"""Parts of the help of `generate`."""
