"""Charts of saved results (matplotlib), in colours that colour-blind readers can tell apart."""

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from draftree.evaluation.drafter_calibration import (
    CANDIDATES,
    ENTROPY_LIMITS,
    CandidateTrace,
    by_category,
    frontiers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""Colours of Okabe and Ito, which are distinguishable with every kind of colour blindness; dark
ones come first."""
MARKERS = "osD^vP*X"
"""Markers that distinguish lines in addition to the colours, for prints in black and white."""
Picture = tuple[str, "Figure"]
"""Name and figure of a picture."""


def _figure(width: float, height: float, title: str) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def reliability(looked: CandidateTrace, title: str) -> "Figure":
    """Draw the acceptance rate over the confidence.

    The area of a point shows its number of positions.
    """
    figure, axes = _figure(
        5, 4.4, f"{title}\nreliability; calibration error {looked.calibration_error or 0:.3f}"
    )
    bins = looked.reliability()
    most = max((b["count"] for b in bins), default=1)
    axes.plot([0, 1], [0, 1], "--", color="#777777", linewidth=1, label="calibrated")
    x, y = [b["confidence"] for b in bins], [b["accepted"] for b in bins]
    axes.plot(x, y, "-", color=COLOURS[0], linewidth=1)
    axes.scatter(
        x,
        y,
        [15 + 150 * b["count"] / most for b in bins],
        color=COLOURS[0],
        label="area: how many places",
        zorder=3,
    )
    axes.set(
        xlabel="q of the likeliest candidate",
        ylabel="share that was accepted",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axes.legend(frameon=False, fontsize="small")
    return figure


def heat_map(
    shares: Sequence[Sequence[float]], rows: Sequence[str], of: str, title: str
) -> "Figure":
    """Draw a heat map of the shares of each rank, with a line for each of `rows`.

    `of` is the label of the lines' axis.
    """
    figure, axes = _figure(6, 1.4 + 0.34 * len(rows), title)
    shown = axes.imshow(
        shares,
        cmap="cividis",
        vmin=0,
        vmax=max(0.01, max(map(max, shares), default=1)),
        aspect="auto",
    )
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            dark = share < 0.5 * shown.norm.vmax
            axes.text(
                j,
                i,
                f"{share:.2f}",
                ha="center",
                va="center",
                fontsize="x-small",
                color="white" if dark else "black",
            )
    axes.set(xlabel="rank of the candidate", ylabel=of)
    axes.set_xticks(range(len(shares[0])), [str(r + 1) for r in range(len(shares[0]))])
    axes.set_yticks(range(len(rows)), rows)
    return figure


def interval_maps(looked: CandidateTrace, title: str) -> list[Picture]:
    """Draw q, acceptance and q − acceptance by entropy interval and rank (C2T, Figure 2).

    The colours of the first two are logarithmic, as in the paper. In the third one red is a q above
    the acceptance.
    """
    mean_q, accepted, counts = looked.by_entropy_interval()
    last = len(ENTROPY_LIMITS) - 1
    rows = [f"{a:g} – {b:g}" for a, b in pairwise(ENTROPY_LIMITS)] + [f"> {ENTROPY_LIMITS[last]:g}"]
    labels = [f"{row} ({n})" for row, n in zip(rows, counts, strict=True)]
    log = {"cmap": "cividis", "vmin": -4, "vmax": 0}
    bias = mean_q - accepted
    most = max(float(np.abs(bias).max()), 0.01)
    maps = (
        ("interval_q", mean_q, np.log10(np.maximum(mean_q, 1e-4)), log),
        ("interval_accepted", accepted, np.log10(np.maximum(accepted, 1e-4)), log),
        ("interval_bias", bias, bias, {"cmap": "RdBu_r", "vmin": -most, "vmax": most}),
    )
    of = ("mean q", "share accepted", "q − share accepted")
    found = list[Picture]()
    for (name, values, shown, colours), what in zip(maps, of, strict=True):
        figure, axes = _figure(12, 4.2, f"{title}\n{what} by entropy and rank, one draft pass")
        axes.imshow(shown, aspect="auto", **colours)
        for i, j in np.ndindex(values.shape):
            light = name != "interval_bias" and shown[i, j] < -2
            colour = "white" if light else "black"
            text = f"{values[i, j]:.2f}"
            axes.text(j, i, text, ha="center", va="center", fontsize="xx-small", color=colour)
        axes.set(xlabel="rank of the candidate", ylabel="entropy, nats (places)")
        axes.set_xticks(range(CANDIDATES), [str(r + 1) for r in range(CANDIDATES)])
        axes.set_yticks(range(len(labels)), labels)
        found.append((name, figure))
    return found


def charts_of_drafter(looked: CandidateTrace, title: str) -> list[Picture]:
    """Return all pictures of one drafter's calibration."""
    ends, by_entropy = looked.by_entropy()
    depths = [str(d + 1) for d in range(len(looked.by_depth()))]
    bins = [f"{a:.2f} – {b:.2f}" for a, b in pairwise(ends)]
    return [
        ("reliability", reliability(looked, title)),
        (
            "rank_by_depth",
            heat_map(
                looked.by_depth(), depths, "depth", f"{title}\nshare accepted by depth and rank"
            ),
        ),
        (
            "rank_by_entropy",
            heat_map(
                by_entropy, bins, "entropy, nats", f"{title}\nshare accepted by entropy and rank"
            ),
        ),
        *interval_maps(looked, title),
    ]


def frontier(rows: Sequence[dict[str, Any]], title: str) -> "Figure":
    """Draw tokens per pass (τ) over drafted tokens per pass (γ), with a line for each policy."""
    figure, axes = _figure(7, 4.6, title)
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
    figure, axes = _figure(max(6.0, 1.1 * len(groups) + 2), 4.2, f"{title}\n{what} by category")
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
    figure, axes = _figure(8, 1.2 + 0.4 * len(bars), title)
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
