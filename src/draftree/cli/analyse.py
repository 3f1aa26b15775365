"""`draftree analyse`: how well a drafter knows when it is right, and what a saved result looks like, in pictures."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import typer

from draftree.boundary.files import writable
from draftree.boundary.knobs import knob
from draftree.cli.console import emit
from draftree.cli.options import AsJson, DrafterSpec, LoadingOptions, TargetName, asks_for
from draftree.errors import UserError

ENDINGS = ("png", "svg")


@dataclass(frozen=True)
class AnalyseOptions:
    """The options of `draftree analyse`."""

    target: TargetName = "demo"
    drafter: DrafterSpec = None
    suite: str = knob("demo", help="Prompts whose answers it is driven along: a suite, a file, or FORMAT:FILE of a benchmark.")
    limit: int = knob(12, min=1, help="How many prompts, evenly spread.")
    max_new_tokens: int = knob(64, min=2, help="How many tokens are written for each.")
    result: Path | None = knob(
        None, help="What `bench` or `replay` saved: its τ against γ, and nodes by category, are drawn too."
    )
    pictures: Path | None = knob(None, help="A folder for the pictures, each as PNG and SVG.")
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@asks_for
def analyse(ctx: typer.Context, asked: AnalyseOptions) -> None:
    """Show a drafter's calibration, and which of its candidates are accepted, by depth and by entropy."""
    from draftree.cli import inputs, terminal
    from draftree.data.prompts import encode
    from draftree.evaluation import report, suites
    from draftree.evaluation.analyses import Looked, reached_by_row
    from draftree.evaluation.driven import answered, fitting, spread

    if asked.pictures is not None:
        writable(asked.pictures / "reliability.png")
        if find_spec("matplotlib") is None:
            raise UserError("drawing needs the package 'matplotlib': pip install 'draftree[plots]'")
    suite, result = suites.load(asked.suite), None if asked.result is None else report.read(asked.result)
    spec, target, drafter = inputs.opened(asked.drafter, asked.target, **asked.loading)
    with terminal.busy("writing texts and driving the drafter along them"):
        encoded = [encode(target.tokenizer, p.content) for p in suite.prompts]
        texts = answered(target, spread(fitting(encoded, target, asked.max_new_tokens), asked.limit), asked.max_new_tokens)
        looked = Looked.along(target, drafter, texts)
    if not len(looked.rank):
        raise UserError(f"drafter '{spec}' drafted nothing along {len(texts)} texts, so that there is nothing to analyse")
    if asked.pictures is not None:
        from draftree.cli import pictures

        drawn = pictures.of_drafter(looked, f"{spec} for {target.name}, {suite.name}")
        if result is not None:
            drawn.append(("frontier", pictures.frontier(result["rows"], str(asked.result))))
            if names := result.get("categories"):
                drawn.append(("nodes_by_category", pictures.categories(result["rows"], names, str(asked.result))))
        asked.pictures.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn:
            for ending in ENDINGS:
                figure.savefig(asked.pictures / f"{name}.{ending}", dpi=150)
    saved = {} if result is None else {"result": reached_by_row(result["rows"])}
    if asked.as_json:
        emit({"drafter": spec, "target": target.name, "suite": suite.name, "texts": len(texts)} | looked.as_json() | saved)
        return
    error, depths = looked.calibration_error, looked.by_depth()
    rows = [
        {"depth": str(d + 1), **{f"rank {r + 1}": f"{s:.2f}" for r, s in enumerate(shares)}, "none": f"{1 - sum(shares):.2f}"}
        for d, shares in enumerate(depths)
        if sum(shares)
    ]
    terminal.output().print(terminal.table(f"{spec}: which candidate was the target's choice, {len(texts)} texts", rows))
    terminal.line(f"Expected calibration error {error or 0:.3f} over {len(looked.rank)} places.")
    if asked.pictures is not None:
        terminal.line(f"Pictures are in '{asked.pictures}'.")
