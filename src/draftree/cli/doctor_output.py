"""Print the reports of `draftree doctor`: figures, verdicts, and a conclusion."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftree.cli.terminal import table

if TYPE_CHECKING:
    from draftree.doctor.determinism import ExactReport
    from draftree.doctor.drafter_report import Report
    from draftree.doctor.expected_speed import ExpectedSpeed
    from draftree.doctor.finding import Finding
    from draftree.target.attention_strength import Attending

SHORT_HEADINGS = {"confidence": "mean q", "calibration": "ECE"}
"""Short headings for columns of the doctor's tables, so that they fit into 80 columns. ECE is the
expected calibration error."""
DEPTH_LEGEND = (
    "agreement: how often the likeliest draft is the target's choice",
    "overlap: how often a draft drawn from q would be accepted at temperature 1",
    "mean q: the mean probability of the likeliest draft; ECE: its expected calibration error",
    "accepted: how often a greedy draft is accepted where all before it were",
)
LAYER_LEGEND = (
    "output/residual: how much attention adds to the residual stream before it",
    "entropy/log n: 1 where attention is spread evenly over n tokens, 0 where it is on one",
)
"""Explanations of the columns in the table of layers."""
VERDICTS = {"ok": "green", "warn": "yellow", "bad": "red"}


def show_report(console: Console, title: str, report: "Report") -> None:
    """Print the report on a drafter: figures, figures by depth, and likely faults."""
    console.print(
        _findings(f"{title}, on {report.tokens} tokens of {report.texts} texts", report.findings)
    )
    if report.depths:
        rows = [
            {
                SHORT_HEADINGS.get(k, k): f"{v:.2f}" if isinstance(v, float) else str(v)
                for k, v in asdict(d).items()
            }
            for d in report.depths
        ]
        console.print(table("by depth", rows))
        console.print("\n".join(DEPTH_LEGEND), highlight=False)
    if report.layers:
        console.print(_attention(report.layers, console.width))
        console.print("\n".join(LAYER_LEGEND), highlight=False)
    for suspect in report.suspects:
        console.print(
            f"[red]{escape(suspect.cause)}[/]: {escape(suspect.evidence)}", soft_wrap=True
        )
    weak = [f.name for f in report.findings if f.verdict == "warn"]
    watch = f"; to be watched: {', '.join(weak)}" if weak else ""
    why = "; ".join(report.bad)
    if report.suspects:
        console.print(f"[red]bad, likely wrong: {escape(why)}[/]", soft_wrap=True)
    elif report.bad:
        console.print(
            f"[red]bad: {escape(why)}, and no known fault explains it{escape(watch)}[/]",
            soft_wrap=True,
        )
    else:
        console.print(f"[green]healthy{escape(watch)}[/]", soft_wrap=True)


def show_exact(console: Console, title: str, report: "ExactReport") -> None:
    """Print which layers are bitwise reproducible, the additional time, and the default."""
    made = Table(title=escape(title), title_justify="left", header_style="bold")
    for name in ("layers", "rows keep their bits", "what is done"):
        made.add_column(name)
    for name in ("ms of a step", "more"):
        made.add_column(name, justify="right")
    for kind in report.layers:
        ms = ["" if s is None else f"{1e3 * s:.2f}" for s in (kind.seconds, kind.more)]
        colour = "red" if kind.done == "nothing helps" else "none"
        made.add_row(
            f"{kind.count} × {escape(kind.name)}", f"[{colour}]{kind.stable}[/]", kind.done, *ms
        )
    console.print(made)
    if report.parting is not None:
        console.print(
            f"[red]a text has other bits if it is split differently, {escape(report.parting)}[/]",
            soft_wrap=True,
        )
    for p in report.prices:
        tokens = f"{p.width} token{'s' * (p.width > 1)}"
        console.print(
            f"a pass over {tokens} behind {p.context:,} takes {100 * p.share:.1f} % longer, attention counted",
            soft_wrap=True,
        )
    console.print(
        f"in half precision by --dtype, where nothing is asked for: --exactness {report.default}",
        soft_wrap=True,
    )


def show_expected_speed(console: Console, title: str, report: "ExpectedSpeed") -> None:
    """Print the expected speed on a device, and the acceptance lengths that pay off."""
    console.print(f"[bold]{escape(title)}, on {escape(report.device)}[/]", soft_wrap=True)
    if report.memory is not None:
        free, whole = (f"{each / 1e9:.1f}" for each in report.memory)
        console.print(f"memory: {free} of {whole} GB free")
    reads = f"{report.bandwidth / 1e9:,.0f} GB/s, {2 * report.rate / 1e12:,.2f} TFLOP/s in {report.dtype}"
    console.print(
        f"device: {reads}, {1e6 * report.overhead:.1f} µs for a small operation", soft_wrap=True
    )
    plain = report.passes[1]
    floor = f"a pass over one token reads {report.bytes / 1e9:,.2f} GB, which takes {1e3 * report.floor:.2f} ms at least"
    console.print(
        f"target: {floor}; computing takes as long from {report.ridge:,.0f} tokens on",
        soft_wrap=True,
    )
    how = (
        "CUDA graphs"
        if report.recorded
        else "native kernels"
        if report.native
        else "transformers' modules"
    )
    known = (
        f"corrected by {report.timings} timings"
        if report.timings
        else "estimates, as no step has run here yet"
    )
    rows = [
        {
            "tokens": str(n),
            "ms": f"{1e3 * s:.2f}",
            "of plain": f"{s / plain:.2f}",
            "of the floor": f"{s / report.floor:.2f}",
        }
        for n, s in report.passes.items()
    ]
    console.print(table(f"passes by {how}; {known}", rows))
    shapes = [
        {
            "tree": s.name,
            "nodes": str(s.nodes),
            "ms": f"{1e3 * s.seconds:.2f}",
            "even at τ": f"{s.even:.2f}",
        }
        | {f"τ = {n:g}": f"{n / s.even:.2f}" for n in report.lengths}
        for s in report.shapes
    ]
    console.print(
        table(
            f"speed-up by acceptance length τ; a draft step takes {1e3 * report.draft:.2f} ms",
            shapes,
        )
    )
    console.print(
        f"plain decoding: {1 / plain:,.0f} tokens a second; `draftree doctor` without --speed measures τ",
        soft_wrap=True,
    )


LAYERS_BESIDE, LAYER_COLUMNS = 3, 30
"""Largest number of layers side by side in a line of the table, and the width in columns that each
of them takes."""


def _attention(layers: Sequence["Attending"], width: int) -> Table:
    """Return a table of the layers' attention, with as many layers side by side as fit."""
    beside = max(1, min(LAYERS_BESIDE, (width - 1) // LAYER_COLUMNS))
    attention = Table(
        title="attention of the target's layers", title_justify="left", header_style="bold"
    )
    for name in ("layer", "output/\nresidual", "entropy/\nlog n") * beside:
        attention.add_column(name, justify="right")
    lines = -(-len(layers) // beside)
    for line in range(lines):
        cells = list[str]()
        for i in range(line, len(layers), lines):
            output = (
                f"[yellow]{layers[i].output:.3f}[/]"
                if layers[i].dead
                else f"{layers[i].output:.3f}"
            )
            cells += [str(i), output, f"{layers[i].entropy:.2f}"]
        attention.add_row(*cells)
    return attention


def _findings(title: str, findings: Sequence["Finding"]) -> Table:
    """Return a table of findings: figures with their verdicts and explanations."""
    made = Table(title=escape(title), title_justify="left", header_style="bold")
    for name in ("", "figure", "verdict", "meaning"):
        made.add_column(name, justify="right" if name == "figure" else "left", overflow="fold")
    for f in findings:
        figure = (
            f"{f.value:.3g}"
            if isinstance(f.value, float)
            else ""
            if f.value is None
            else str(f.value)
        )
        made.add_row(
            escape(f.name), figure, f"[{VERDICTS[f.verdict]}]{f.verdict}[/]", escape(f.text)
        )
    return made


def show_lossless(console: Console, title: str, report: dict[str, Any]) -> None:
    """Print a table with a row for each case, then the failures and the verdict.

    The first row is that of plain decoding.
    """
    bad = [f for f in report["findings"] if f.verdict == "bad"]
    rows = [replace(f, text="see below") if f in bad else f for f in report["findings"]]
    console.print(_findings(f"{title}, {report['texts']} prompts", rows))
    for f in bad:
        console.print(f"[red]{escape(f.name)}[/]: {escape(f.text)}", soft_wrap=True)
    colour = "green" if report["lossless"] else "red"
    console.print(f"[{colour}]{escape(report['summary'])}[/]", soft_wrap=True)
