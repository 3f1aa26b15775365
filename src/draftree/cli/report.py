"""`draftree report`: one page of a saved result, which loads nothing from anywhere."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson, Force, dataclass_command
from draftree.errors import UserError
from draftree.utils.files import write_text
from draftree.utils.validated_dataclass import knob

TEMPLATE = Path(__file__).parent / "report.html"


@dataclass(frozen=True)
class ReportOptions:
    """Store the options of `draftree report`."""

    result: Annotated[Path, typer.Argument(help="A saved result, of bench or replay.")]
    out: Path = knob(Path("report.html"), written=(".html",), short="-o", help="The page.")
    force: Force = False
    as_json: AsJson = False


@dataclass_command
def report(ctx: typer.Context, asked: ReportOptions) -> None:
    """Write a saved result as one page: tables, pictures, texts by the origin of their tokens, and the answer in words."""
    from draftree.cli import terminal
    from draftree.evaluation import report_text
    from draftree.evaluation.result_rows import as_result_error, read_result

    if find_spec("jinja2") is None:
        raise UserError("a report needs the package 'jinja2': pip install 'draftree[report]'")
    result = read_result(asked.result)
    with as_result_error(asked.result):
        text, verdict = render_report(result, str(asked.result)), report_text.advice_text(result)
        text.encode()  # a text of a broken file may hold what is no character
    write_text(asked.out, text)
    if asked.as_json:
        emit({"out": str(asked.out), "verdict": verdict})
    else:
        terminal.line(f"{verdict}\nThe page is '{asked.out}'.")


def render_report(result: "dict[str, object]", source: str) -> str:
    """Return the HTML page of a saved result; without matplotlib it has no pictures."""
    from typing import Any, cast

    from jinja2 import Environment
    from markupsafe import Markup, escape

    from draftree.evaluation import report_text, text_tables

    known = cast("dict[str, Any]", result)
    rows, about = known["rows"], known["provenance"]
    shown = text_tables.readable(
        (
            text_tables.result_table
            if report_text.has_clocked_speedups(known)
            else text_tables.counted_table
        )(rows, known.get("oracle", ()))
    )
    main = [text_tables.HEADS.get(name, name) for name in text_tables.MAIN]
    main = [name for name in main if name in shown[0] and any(row[name] for row in shown)]
    rest = [name for name in shown[0] if name not in main]
    best = next(iter(report_text.rank_rows(known)), None)
    texts = report_text.texts(known, best) if best else []
    suite = (about.get("suite") or {}).get("name", source)
    title = f"{'Simulated: ' if known.get('simulated') else ''}{about['target']['name']} on prompts of {suite}"
    hardware = about.get("hardware", {})
    told = {
        "draftree": about["versions"]["draftree"],
        "commit": ((about.get("commit") or {}).get("id") or "")[:12],
        "date": about["date"],
        "dtype": about["target"]["dtype"],
        "machine": hardware.get("device", ""),
        "threads": hardware.get("threads", ""),
        "seed": about["seed"],
        "command": about["command"],
    }
    environment = Environment(autoescape=True)
    environment.filters["breakable"] = lambda text: Markup(
        re.sub(r"([:,=+])", r"\1<wbr>", str(escape(text)))
    )
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=title,
        about={k: v for k, v in told.items() if v != ""},
        simulated=known.get("simulated"),
        columns=main,
        rest=rest,
        rows=shown,
        legend=text_tables.legend(main),
        more=text_tables.legend(rest),
        claims=text_tables.faster_and_slower(known),
        gaps=report_text.gap_sentences(known),
        texts=texts,
        shown=report_text.name_of(best) if best else "",
        verdict=report_text.advice_text(known),
        pictures=[(name, Markup(svg)) for name, svg in _pictures(known)],
    )


def _pictures(result: "dict[str, object]") -> "list[tuple[str, str]]":
    from typing import Any, cast

    if find_spec("matplotlib") is None:
        return []
    from draftree.cli import charts, cost_charts
    from draftree.evaluation import report_text
    from draftree.evaluation.step_profile import per_token

    known = cast("dict[str, Any]", result)
    rows, drawn = known["rows"], list[charts.Picture]()
    if bars := report_text.bars(known):
        kind = (
            "by the clock"
            if report_text.has_clocked_speedups(known)
            else "simulated"
            if known["simulated"]
            else "counted"
        )
        drawn.append(
            ("speed-up", charts.speed(bars, f"speed-up over plain decoding, {kind}", "Speed"))
        )
        if sum(row["policy"] is not None for row in rows) > 1:
            drawn.append(
                ("what drafting more brings", charts.frontier(rows, "What drafting more brings"))
            )
    if (
        (names := known.get("categories"))
        and len(set(names)) > 1
        and len(names) == rows[0]["prompts"]
        and bars
    ):
        drawn.append(("nodes by category", charts.categories(rows, names, "What is drafted")))
    if report_text.has_clocked_speedups(known) and all("phases" in r for r in rows):
        drawn.append(
            (
                "time",
                cost_charts.profile(
                    {report_text.name_of(r): per_token(r) for r in rows}, "Where the time goes"
                ),
            )
        )
    return [(name, charts.svg(figure)) for name, figure in drawn]
