"""Measure how well a drafter is calibrated, and which of its candidates are right.

    python benchmarks/analyse.py --drafter edd --limit 2 --max-new-tokens 12 --pictures pictures
    python benchmarks/analyse.py --target demo --drafter edd --result result.json --json

The target writes texts, and the drafter is driven along them. `--pictures` draws the figures, and
with `--result` also those of a saved result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from common.command_line import run
from draftree.cli.console import emit
from draftree.cli.options import (
    AsJson,
    DrafterSpec,
    Force,
    LoadingOptions,
    TargetName,
    dataclass_command,
)
from draftree.cli.output_files import check_output
from draftree.errors import UserError
from draftree.utils.files import replace_file
from draftree.utils.validated_dataclass import knob

ENDINGS = ("png", "svg")


@dataclass(frozen=True)
class AnalyseOptions:
    """Hold the options of the script."""

    target: TargetName = "demo"
    drafter: DrafterSpec = None
    suite: list[str] = knob(
        (),
        help="Prompts: a shipped suite (draftree list; by default demo), a file, or FORMAT:FILE; may be repeated.",
    )
    limit: int = knob(12, min=1, help="Number of prompts, spread evenly.")
    max_new_tokens: int = knob(64, min=2, help="Maximum number of new tokens for each prompt.")
    result: Path | None = knob(
        None, help="A result of bench or replay; pictures of it are drawn as well."
    )
    pictures: Path | None = knob(None, help="Folder for pictures, as PNG and SVG.")
    force: Force = False
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def analyse(ctx: typer.Context, asked: AnalyseOptions) -> None:
    """Show how well a drafter is calibrated, and which of its tokens are accepted, by depth and entropy."""
    from common.drafter_calibration import CandidateTrace, share_by_depth_of_rows
    from draftree.cli import arguments, cost_charts, terminal
    from draftree.data.prompts import encode
    from draftree.evaluation import result_rows, suites
    from draftree.evaluation.teacher_forcing import greedy_answers, prompts_that_fit, take_evenly

    if asked.pictures is not None:
        there = sorted(asked.pictures.glob("reliability.*"))
        check_output(
            there[0] if there else asked.pictures / "reliability.png", asked.force, "--pictures"
        )
        cost_charts.require_matplotlib()
    suite, result = (
        suites.join_suites(list(asked.suite) or ["demo"]),
        None if asked.result is None else result_rows.read_result(asked.result),
    )
    spec, target, drafter = arguments.open_drafter(asked.drafter, asked.target, **asked.loading)
    with terminal.busy("writing texts and running the drafter on them"):
        encoded = [encode(target.tokenizer, p.content) for p in suite.prompts]
        texts = greedy_answers(
            target,
            take_evenly(prompts_that_fit(encoded, target, asked.max_new_tokens), asked.limit),
            asked.max_new_tokens,
        )
        looked = CandidateTrace.along(target, drafter, texts)
    if not len(looked.rank):
        raise UserError(
            f"drafter '{spec}' proposed no token along {len(texts)} texts: there is nothing to analyse"
        )
    if asked.pictures is not None:
        from common import calibration_charts
        from draftree.cli import charts

        drawn = calibration_charts.charts_of_drafter(
            looked, f"{spec} for {target.name}, {suite.name}"
        )
        if result is not None:
            drawn.append(("frontier", charts.frontier(result["rows"], str(asked.result))))
            if names := result.get("categories"):
                for of in ("nodes", "accepted"):
                    picture = charts.categories(result["rows"], names, str(asked.result), of)
                    drawn.append((f"{of}_by_category", picture))
        for name, figure in drawn:
            for ending in ENDINGS:
                with replace_file(asked.pictures / f"{name}.{ending}") as partial:
                    figure.savefig(partial, dpi=150, format=ending)
    saved = {} if result is None else {"result": share_by_depth_of_rows(result["rows"])}
    if asked.as_json:
        emit(
            {"drafter": spec, "target": target.name, "suite": suite.name, "texts": len(texts)}
            | looked.as_json()
            | saved
        )
        return
    error, depths = looked.calibration_error, looked.by_depth()
    rows = [
        {
            "depth": str(d + 1),
            **{f"rank {r + 1}": f"{s:.2f}" for r, s in enumerate(shares)},
            "none": f"{1 - sum(shares):.2f}",
        }
        for d, shares in enumerate(depths)
        if sum(shares)
    ]
    terminal.output().print(
        terminal.table(
            f"{spec}: rank of the target's choice among the candidates, {len(texts)} texts", rows
        )
    )
    terminal.line(f"Expected calibration error {error or 0:.3f} over {len(looked.rank)} places.")
    if asked.pictures is not None:
        terminal.line(f"Pictures are in '{asked.pictures}'.")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the script and end the program."""
    run(analyse, args)


if __name__ == "__main__":
    main()
