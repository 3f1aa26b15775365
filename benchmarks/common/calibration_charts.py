"""Charts of a drafter's calibration (matplotlib), as `benchmarks/analyse.py` draws them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from common.drafter_calibration import CANDIDATES, ENTROPY_LIMITS, CandidateTrace
from draftree.cli.charts import COLOURS, Picture, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reliability(looked: CandidateTrace, title: str) -> "Figure":
    """Draw the acceptance rate over the confidence.

    The area of a point shows its number of positions.
    """
    figure, axes = new_figure(
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
    figure, axes = new_figure(6, 1.4 + 0.34 * len(rows), title)
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
        figure, axes = new_figure(12, 4.2, f"{title}\n{what} by entropy and rank, one draft pass")
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
