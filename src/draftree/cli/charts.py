"""Charts of saved results (matplotlib), in colours that colour-blind readers can tell apart."""

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from draftree.evaluation.report_text import by_category, frontiers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""Colours of Okabe and Ito, which are distinguishable with every kind of colour blindness; dark
ones come first."""
MARKERS = "osD^vP*X"
"""Markers that distinguish lines in addition to the colours, for prints in black and white."""
Picture = tuple[str, "Figure"]
"""Name and figure of a picture."""


def new_figure(width: float, height: float, title: str) -> tuple["Figure", Any]:
    """Return a figure of a width and height in inches, and its axes with a title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def frontier(rows: Sequence[dict[str, Any]], title: str) -> "Figure":
    """Draw tokens per pass (τ) over drafted tokens per pass (γ), with a line for each policy."""
    figure, axes = new_figure(7, 4.6, title)
    for i, (name, points) in enumerate(frontiers(rows).items()):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            "-" if i < len(COLOURS) else ":",
            label=name,
            **style,
        )
    axes.axhline(1, color="#777777", linewidth=1, linestyle="--")
    axes.set(xlabel="drafted tokens per pass (γ)", ylabel="tokens per pass (τ)")
    axes.legend(frameon=False, fontsize="small")
    return figure


def categories(
    rows: Sequence[dict[str, Any]], names: Sequence[str], title: str, of: str = "nodes"
) -> "Figure":
    """Draw box plots over prompts, by category, for each row with drafts (EDD, Figure 7).

    Args:
        rows: of a saved result.
        names: category of each prompt.
        title: title of the picture.
        of: `nodes`, the nodes of a step, or `accepted`, its accepted tokens.
    """
    what = {"nodes": "nodes of a step", "accepted": "accepted tokens of a step"}[of]
    drafting = [r for r in rows if r["policy"]]
    groups = list(dict.fromkeys(n or "all" for n in names))
    figure, axes = new_figure(max(6.0, 1.1 * len(groups) + 2), 4.2, f"{title}\n{what} by category")
    width = 0.8 / max(len(drafting), 1)
    for i, row in enumerate(drafting):
        values, colour = by_category(row, names, of), COLOURS[i % len(COLOURS)]
        at = [g + (i - (len(drafting) - 1) / 2) * width for g in range(len(groups))]
        boxes = axes.boxplot(
            [values[g] for g in groups],
            positions=at,
            widths=0.85 * width,
            patch_artist=True,
            manage_ticks=False,
        )
        for box in boxes["boxes"]:
            box.set(
                facecolor=colour,
                alpha=0.55,
                edgecolor=colour,
                hatch=("", "//", "..", "xx")[i // len(COLOURS) % 4],
            )
        for line in boxes["medians"]:
            line.set(color="black")
        axes.plot([], [], "s", color=colour, label=f"{row['drafter']} {row['policy']}")
    axes.set(ylabel=what)
    axes.set_xticks(range(len(groups)), groups)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def speed(bars: Sequence[Mapping[str, Any]], label: str, title: str) -> "Figure":
    """Draw bars of speed-ups with their intervals, and the oracle's bound for each drafter.

    Args:
        bars: mappings with `name`, `value`, the interval `low` and `high`, and `bound` (or None),
            the fastest first.
        label: label of the axis.
        title: title of the picture.
    """
    figure, axes = new_figure(8, 1.2 + 0.4 * len(bars), title)
    names = [str(b["name"]) for b in bars]
    values = [float(b["value"]) for b in bars]
    spread = [
        [max(v - b["low"], 0) for v, b in zip(values, bars, strict=True)],
        [max(b["high"] - v, 0) for v, b in zip(values, bars, strict=True)],
    ]
    axes.barh(
        names,
        values,
        xerr=spread,
        color=COLOURS[0],
        alpha=0.8,
        error_kw={"ecolor": "black", "capsize": 2, "linewidth": 1},
    )
    known = [(n, b["bound"]) for n, b in zip(names, bars, strict=True) if b["bound"] is not None]
    if known:
        axes.plot(
            [b for _, b in known],
            [n for n, _ in known],
            "D",
            color=COLOURS[1],
            label="oracle: no policy does better over this drafter",
        )
        axes.legend(frameon=False, fontsize="small", loc="lower right")
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def svg(figure: "Figure") -> str:
    """Return a figure as SVG text that can be embedded in a page."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.hashsalt": "draftree"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
