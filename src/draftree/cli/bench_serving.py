"""Tables of `draftree bench --arrivals` and `draftree bench --batch`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftree.engine import Engine
    from draftree.evaluation.grid import Cell
    from draftree.request import Request
    from draftree.scheduling.options import SchedulerOptions
    from draftree.utils.progress_callback import Tell


def serve_arrivals(
    engines: "Mapping[Cell, Engine]",
    requests: "Mapping[Cell, list[Request]]",
    rate: float,
    seed: int,
    limits: "SchedulerOptions",
) -> list[dict[str, Any]]:
    """Measure all cells with requests that arrive at the same random times; return their rows."""
    from draftree.cli import terminal
    from draftree.evaluation import arrivals

    rows, count = list[dict[str, Any]](), len(next(iter(requests.values())))
    times = arrivals.arrival_times(count, rate, seed)
    with terminal.progress("arrivals", len(engines) * count) as tell:
        for number, (cell, engine) in enumerate(engines.items()):
            found = arrivals.measure_arrivals(
                engine, requests[cell], times, limits, partial(_tell_more, tell, number * count)
            )
            rows.append(cell_fields(cell) | found)
    return rows


def serve_batches(
    engines: "Mapping[Cell, Engine]",
    requests: "Mapping[Cell, list[Request]]",
    sizes: Sequence[int],
    limits: "SchedulerOptions",
) -> list[dict[str, Any]]:
    """Measure all cells at each batch size, and return their rows.

    Speed-ups are relative to plain decoding at the same temperature.
    """
    from draftree.cli import terminal
    from draftree.evaluation import arrivals

    rows, count = list[dict[str, Any]](), len(next(iter(requests.values())))
    for size in sizes:
        with terminal.progress(f"batches of {size}", len(engines) * (count // size) * size) as tell:
            found = arrivals.measure_batches(
                engines, requests, size, limits, partial(_tell_more, tell, 0)
            )
        plain = {cell.temperature: found[cell] for cell in engines if cell.plain}
        for cell, figures in found.items():
            gain = figures["tokens_per_second"] / plain[cell.temperature]["tokens_per_second"]
            rows.append(cell_fields(cell) | {"batch": size, "speedup": gain} | figures)
    return rows


def cell_fields(cell: "Cell") -> dict[str, Any]:
    """Return the fields of a row that identify its cell: drafter, policy, temperature, acceptor.

    For plain decoding, drafter and policy are None. The acceptor's field `rule` is None if no
    acceptor was named.
    """
    return {
        "drafter": cell.drafter,
        "policy": cell.policy,
        "temperature": cell.temperature,
        "rule": cell.acceptor,
    }


def _tell_more(tell: "Tell", done: int, more: int) -> None:
    tell(done + more)


def served_row(row: Mapping[str, Any], acceptors: bool = False) -> dict[str, str]:
    """Return a row of figures of served requests as texts by column heading.

    Times are in milliseconds, as median and 99th percentile. `acceptors` adds a column of them.
    """

    def times(name: str) -> str:
        return (
            "none"
            if row[name] is None
            else " / ".join(f"{1000 * row[name][each]:.0f}" for each in ("median", "p99"))
        )

    batch = {"batch": str(row["batch"])} if "batch" in row else {}
    gain = {"speedup": f"{row['speedup']:.2f}"} if "speedup" in row else {}
    return {
        **batch,
        "drafter": row["drafter"] or "plain",
        "policy": row["policy"] or "",
        **({"acceptor": row["rule"] or ""} if acceptors else {}),
        "T": f"{row['temperature']:g}",
        "tokens/s": f"{row['tokens_per_second']:.1f}",
        **gain,
        "first token, ms": times("time_to_first_token"),
        "between tokens, ms": times("time_between_tokens"),
        "between updates, ms": times("time_between_updates"),
        "tokens per step": f"{row['tokens_per_step']:.2f}",
    }
