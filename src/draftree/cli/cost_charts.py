"""Charts of measured costs and of the phases of a step (matplotlib)."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.errors import UserError
from draftree.utils.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raise an error if pictures cannot be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("drawing needs the package 'matplotlib': pip install 'draftree[plots]'")


def draw_costs(table: CostTable, title: str, path: Path) -> None:
    """Draw the seconds of a target pass sₜ(n) and of a draft step sₐ(f), and save the picture.

    Costs are drawn over the number of tokens, absolute and relative to one token. Each context has
    a colour, and each batch size a row of panels.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.8 + 3.8 * len(table.by_rows)), layout="constrained")
    panels = figure.subplots(len(table.by_rows), 2, squeeze=False)
    for (rows, entries), pair in zip(table.by_rows.items(), panels, strict=True):
        for i, costs in enumerate(entries):
            _draw(pair[0], pair[1], costs, f"C{i}")
        _label(
            pair[0],
            pair[1],
            f"{rows} row{'s' * (rows > 1)}",
            sorted({w for e in entries for w in (*e.draft, *e.target)}),
        )
    where = ", ".join(table.about[k] for k in ("device", "dtype", "date") if k in table.about)
    figure.suptitle(f"{title}\n{where}" if where else title, fontsize="medium")
    _save(figure, path)


def draw_profile(bars: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Save the chart that `profile` draws.

    Raises:
        UserError: the file cannot be written.
    """
    _save(profile(bars, title), path)


def profile(bars: Mapping[str, Mapping[str, float]], title: str) -> "Figure":
    """Draw a chart of milliseconds per token, with a stacked bar for each way to decode.

    Args:
        bars: milliseconds per token by part of a step, for each way to decode, such as a drafter
            with a policy.
        title: title of the chart.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.42 * len(bars)), layout="constrained")
    axes, left = figure.subplots(), dict.fromkeys(bars, 0.0)
    for i, part in enumerate(dict.fromkeys(name for bar in bars.values() for name in bar)):
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(
            list(bars),
            widths,
            left=list(left.values()),
            label=part,
            color=colormaps["tab20"](i),
            edgecolor="white",
        )
        left = {
            name: start + width for (name, start), width in zip(left.items(), widths, strict=True)
        }
    axes.invert_yaxis()
    axes.set_xlabel("ms a token")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _save(figure: "Figure", path: Path) -> None:
    try:
        with replace_file(path) as partial:
            figure.savefig(partial, dpi=150, format=path.suffix[1:])
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}") from error


def _draw(seconds: "Axes", relative: "Axes", costs: Costs, colour: str) -> None:
    for (widths, each), name, style in (
        (costs.target_curve, "sₜ target pass", "-o"),
        (costs.draft_curve, "sₐ draft step", "--s"),
    ):
        label = f"{name}, {costs.context:,} tokens before"
        seconds.plot(widths, 1e3 * each, style, color=colour, markersize=4, label=label)
        relative.plot(widths, each / each[0], style, color=colour, markersize=4)


def _label(seconds: "Axes", relative: "Axes", rows: str, widths: Sequence[int]) -> None:
    seconds.set(yscale="log", ylabel="milliseconds", title=f"{rows}: draft step and target pass")
    relative.set(
        ylabel="times that of one token",
        ylim=(0, None),
        title=f"{rows}: over the cost of one token",
    )
    for panel in (seconds, relative):
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths, [str(w) for w in widths])
        panel.minorticks_off()
        panel.set_xlabel("tokens of each row")
        panel.grid(alpha=0.3)
    low, high = seconds.get_ylim()
    ticks = [m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    seconds.set_yticks(ticks, [f"{t:g}" for t in ticks])
    seconds.legend(fontsize="small", loc="upper left")
