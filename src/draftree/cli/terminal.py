"""Terminal output of commands: streamed text, tables and progress."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from draftree.cli.console import STARTED, remark
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Recipe, Stage, plan_text
from draftree.evaluation.compare import Comparison
from draftree.request import Origin
from draftree.text.completion import Token
from draftree.utils.progress_callback import Tell, duration
from draftree.utils.progress_callback import mute_announcements as progress_shown

FEW_NODES_PER_STEP = 0.1
"""Number of drafted nodes per step below which a summary says that almost nothing was drafted."""
STYLES: dict[Origin, str] = {
    "drafted": "green",
    "forced": "yellow",
    "bonus": "default",
    "prefill": "default",
}
LEGEND = "[green]■[/green] drafted and accepted  [yellow]■[/yellow] the only token allowed  ■ chosen by the target"

TABLE_COLUMNS = 150
"""Width in columns of tables that are not printed to a terminal."""


LIST_COLUMNS = 100
"""Width in columns of lists that are not printed to a terminal. It is smaller than `TABLE_COLUMNS`, because
their cells are prose, which can be wrapped."""


def output(width: int = TABLE_COLUMNS) -> Console:
    """Return the console of standard output.

    The console has the width of the terminal or of the environment variable `COLUMNS`. If
    `NO_COLOR` is set, the console prints no colours.

    Args:
        width: width in columns if there is neither a terminal nor `COLUMNS`.
    """
    plain: dict[str, Any] = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    console = Console(highlight=False, **plain)
    return (
        console
        if console.is_terminal or "COLUMNS" in os.environ
        else Console(highlight=False, width=width, **plain)
    )


def colours(console: Console) -> bool:
    """Return whether the console supports colours."""
    return console.is_terminal and console.color_system is not None


def line(text: str) -> None:
    """Print a line on standard output, without wrapping or markup."""
    output().print(text, soft_wrap=True, markup=False)


def errors() -> Console:
    """Return the console of standard error, for progress and remarks."""
    plain: dict[str, Any] = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(stderr=True, highlight=False, **plain)


FIGURE_PATTERN = re.compile(r"[\d.]+( \[[\d., ]+\])?")
"""Pattern for a number, with or without an interval in brackets."""


def show_tokens(console: Console, tokens: Iterable[Token]) -> None:
    """Print the text of tokens, coloured by their origin."""
    for origin, run in groupby(tokens, key=attrgetter("origin")):
        console.out(
            "".join(token.text for token in run), style=STYLES[origin], end="", highlight=False
        )


def table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table with the rows' keys as headings; columns of numbers are right-aligned."""
    made = Table(title=escape(title), title_justify="left", header_style="bold")
    for i, name in enumerate(rows[0]):
        figures = i > 0 and all(FIGURE_PATTERN.fullmatch(r[name]) for r in rows)
        made.add_column(heading(name), justify="right" if figures else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row.values()))
    return made


def drop_wide_columns(
    rows: Sequence[Mapping[str, str]], width: int, keep: Collection[str]
) -> list[dict[str, str]]:
    """Return the rows without their last columns, so that a table of them is `width` wide or less.

    The columns in `keep` are never dropped.
    """
    names = list(rows[0])
    widths = {
        n: max(len(part) for r in rows for part in (r[n], *heading(n).splitlines())) for n in names
    }
    for name in [n for n in reversed(names) if n not in keep]:
        if sum(widths[n] + 3 for n in names) + 1 > width:
            names.remove(name)
    return [{n: r[n] for n in names} for r in rows]


def heading(name: str) -> str:
    """Return a column's heading, broken into short lines at units and intervals."""
    return name.replace("/", "\n/").replace(" [", "\n[").replace(" output", "\noutput")


FIRST_PROGRESS_SECONDS, PROGRESS_SECONDS = 2.0, 30.0
"""Seconds until the first message about progress, and between later ones, if standard error is not
a terminal."""


class Clock:
    """Give the time and call functions at intervals; tests replace it by their own clock."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    @contextmanager
    def beating(
        self, beat: Callable[[], None], known: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Return a context in which `beat` is called at intervals from another thread.

        The first call comes after `FIRST_PROGRESS_SECONDS` seconds, and further calls every
        `PROGRESS_SECONDS` seconds. The second call comes early if `known` returns True, which means
        that the remaining time is known.
        """
        ended = threading.Event()

        def wait() -> None:
            seconds = FIRST_PROGRESS_SECONDS
            while not ended.wait(seconds):
                beat()
                seconds = PROGRESS_SECONDS
                while not known():
                    if ended.wait(1.0):
                        return
                    seconds -= 1.0
                    if known() or seconds <= 0:
                        seconds = 0.0
                        break

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


CLOCK = Clock()


@contextmanager
def busy(what: str) -> Iterator[Tell]:
    """Show a label with a spinner during work; the yielded function changes the label.

    Without a terminal, a line is printed at intervals during long work.
    """
    console = errors()
    clock = CLOCK
    doing = [what]
    if console.is_terminal:
        with progress_shown(), console.status(escape(what)) as status:
            yield lambda done, remark="", of=None: status.update(escape(remark))
        return
    start = clock.now()
    with (
        progress_shown(),
        clock.beating(lambda: remark(f"{doing[-1]} … ({duration(clock.now() - start)} so far)")),
    ):
        yield lambda done, remark="", of=None: doing.append(remark)


def forecast(what: str, seconds: float) -> None:
    """Print an upper bound on the time of some work, unless the work is short.

    Work is short if it takes less than `FIRST_PROGRESS_SECONDS` seconds.
    """
    if seconds >= FIRST_PROGRESS_SECONDS:
        remark(f"{what}: at most about {duration(seconds)}")


class _Remarked(Bar):
    """Show a progress bar with its remark on the line below.

    A narrow terminal could not show both on one line.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["remark"]) for task in self.tasks if task.fields["remark"])


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Tell]:
    """Show a progress bar on standard error during work; without a terminal, print lines.

    The yielded function sets the amount of finished work.
    """
    console, clock = errors(), CLOCK
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal
    bar = _Remarked(
        *columns,
        console=console,
        disable=not shown,
        get_time=clock.now,
        speed_estimate_period=RATE_WINDOW_SECONDS,
    )
    task = bar.add_task(what, total=total, remark="")

    def tell(done: int, remark: str = "", of: int | None = total) -> None:
        bar.update(task, completed=done, total=of, remark=remark)

    with (
        progress_shown(),
        bar,
        nullcontext()
        if shown
        else clock.beating(
            lambda: remark(_standing(bar.tasks[0])), lambda: bar.tasks[0].time_remaining is not None
        ),
    ):
        yield tell


RATE_WINDOW_SECONDS = 600.0
"""Number of past seconds from whose progress the remaining time is estimated."""


def _standing(task: Task) -> str:
    """Return one line with the finished work, the total, and the remaining time if it is known."""
    of = "" if task.total is None else f" of {task.total:,.0f}"
    left = [f"about {duration(task.time_remaining)} left"] if task.time_remaining else []
    return ", ".join(
        [
            f"{task.description}: {task.completed:,.0f}{of}",
            *left,
            *filter(None, [task.fields["remark"]]),
        ]
    )


def show_summary(console: Console, result: Comparison, coloured: bool, keeps_text: bool) -> None:
    """Print the figures of one generated text.

    Args:
        console: console to print to.
        result: figures of the text, possibly compared with plain decoding.
        coloured: whether the text was printed in colours, so that a legend is needed.
        keeps_text: whether the acceptor guarantees the same text as plain decoding.
    """
    stats, plain = result.stats, result.plain
    lines = [f"{LEGEND}"] if coloured else []
    lines.append(
        f"{stats.acceptance_length:.2f} tokens per pass (τ) · {stats.new_tokens} tokens in {len(stats.steps) + 1} passes (the "
        f"prompt's and {len(stats.steps)} more) · {stats.nodes_per_step:.1f} drafted a pass, {stats.depth_per_step:.1f} deep"
    )
    if stats.steps and stats.nodes_per_step < FEW_NODES_PER_STEP:
        lines[-1] += " · almost nothing was drafted: the policy found no draft worth its time"
    speed = f"{stats.tokens_per_second:.1f} tokens per second"
    if plain is None:
        lines.append(
            f"{speed} (drafting {stats.draft_seconds:.2f} s, verifying {stats.verify_seconds:.2f} s)"
        )
    else:
        lines.append(
            f"{speed}, plain decoding {plain.tokens_per_second:.1f} · speed-up {result.speedup or 1:.2f} · "
            f"{exactness_phrase(result, keeps_text)}"
        )
        if (parted := result.difference) is not None:
            lines.append(
                f"the outputs part at token {parted.token}, where the two best logits are {parted.margin:.2g} apart"
            )
        lines.append(
            "[dim]after a warm-up both ran twice (drafted, plain, plain, drafted); speeds are means[/dim]"
        )
    if stats.lossy:
        lines.append(
            f"[yellow]LOSSY: acceptor '{stats.acceptor}' may change what the target would have written[/yellow]"
        )
    for line in ("", *lines):
        console.print(line, soft_wrap=True)


def show_footprint(console: Console) -> None:
    """Print the seconds since the start of the program and its peak memory."""
    try:
        import resource
    except ModuleNotFoundError:  # not all systems have it
        return
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    console.print(
        f"[dim]in all {duration(time.monotonic() - STARTED)} and at most {most / 1e9:.1f} GB of memory[/dim]"
    )


def exactness_phrase(result: Comparison, keeps_text: bool) -> str:
    """Return a phrase on whether the output equals plain decoding's.

    If it differs, the phrase states the guarantee of the acceptor.
    """
    if result.same_output:
        return {
            None: "the same output",
            True: "the same bits",
            False: "the same output, but OTHER BITS",
        }[result.same_bits]
    if keeps_text:
        return "ANOTHER output"
    kept = (
        "neither plain decoding's text nor its distribution"
        if result.stats.lossy
        else "its distribution, not its text"
    )
    return f"another text, as acceptor '{result.stats.acceptor}' keeps {kept}"


CONTEXTS_PER_TABLE = 2
"""Number of contexts whose costs are shown side by side, so that they fit into 80 columns."""


def show_costs(console: Console, title: str, measured: CostTable, kept: Path | None = None) -> None:
    """Print measured cost curves as tables.

    There is a table for each batch size, with a line for each number of tokens and a group of
    columns for each context.
    """
    for rows, entries in measured.by_rows.items():
        for i in range(0, len(entries), CONTEXTS_PER_TABLE):
            console.print(
                _curves(
                    f"{title}, {rows} row{'s' * (rows > 1)}", entries[i : i + CONTEXTS_PER_TABLE]
                )
            )
        for costs in entries:
            told = f"at {costs.context:,}: sₐ/sₜ = {costs.ratio:.3f} · a commit of the drafter {1e3 * costs.commit:.2f} ms"
            later = (
                f", and {1e3 * costs.catch_up:.2f} ms before it drafts again"
                if costs.catch_up
                else ""
            )
            console.print(told + later)
    names = {
        "device": "",
        "threads": "threads ",
        "dtype": "",
        "attention": "attention ",
        "torch": "torch ",
        "date": "",
    }
    where = ", ".join(
        f"{label}{measured.about[k]}" for k, label in names.items() if k in measured.about
    )
    if where:
        console.print(f"measured on {escape(where)}", soft_wrap=True)
    if kept is not None:
        where = f"what was learnt in '{escape(str(kept))}' was corrected by them"
        console.print(f"[dim]{where}; --out FILE saves them for --costs[/dim]", soft_wrap=True)


def _curves(title: str, entries: Sequence[Costs]) -> Table:
    """Return a table of measured costs by number of tokens, with columns for each context.

    The columns are the milliseconds of a draft step and of a target pass, and the latter relative
    to a pass over one token.
    """
    curves = Table(title=escape(title), title_justify="left", header_style="bold")
    for name in (
        "tokens",
        *(f"{what}\nat {e.context:,}" for e in entries for what in ("sₐ ms", "sₜ ms", "sₜ/sₜ(1)")),
    ):
        curves.add_column(name, justify="right")
    for n in sorted({w for e in entries for w in (*e.draft, *e.target)}):
        cells = [str(n)]
        for e in entries:
            step, one_pass = e.draft.get(n), e.target.get(n)
            cells += [f"{1e3 * s:.2f}" if s is not None else "" for s in (step, one_pass)]
            cells.append(f"{one_pass / e.token:.2f}" if one_pass is not None else "")
        curves.add_row(*cells)
    return curves


def knobs_text(knobs: Mapping[str, Any]) -> str:
    """Return options and their defaults in the form of a spec: `key=value,…`."""
    return ",".join(f"{k}={v if v != '' else chr(39) * 2}" for k, v in knobs.items())


def stage_row(drafter: str, stage: Stage) -> dict[str, str]:
    """Return a table row with a drafter's default training options in one stage."""
    numbers = plan_text({f.name: getattr(stage, f.name) for f in fields(Recipe)})
    by_us = f"; ours: {', '.join(stage.ours)}" if stage.ours else ""
    told = {"loss": f"{stage.loss}, on {stage.data}", "source": stage.source + by_us}
    return {"name": drafter, "stage": stage.name, "numbers": numbers, **told}
