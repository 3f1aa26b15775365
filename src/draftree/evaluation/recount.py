"""Prices a saved result on another machine's costs: the steps stay what they were, the seconds of each are counted anew.

That is right for what does not read costs. A policy that does would have grown other trees on
another machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftree.costs.curves import CostTable, counted, counted_plain
from draftree.errors import UnknownName, UserError
from draftree.evaluation import oracle, worklog
from draftree.evaluation.intervals import ResultRow
from draftree.evaluation.machines import Drafting, Machine, varied
from draftree.evaluation.report import (
    Totals,
    counted_figures,
    expected_speedup,
    intervals,
    unclocked,
)
from draftree.registry import build
from draftree.stats import Work

PLAIN = "plain"
"""What a row of the baseline has for a drafter."""
VARIED = [(slope, overhead) for overhead in (0.0, 1.2e-3) for slope in (0.5, 1.0, 2.0)]
"""Factors of what further tokens cost, and seconds of the host added to every step, by which a
machine's costs are varied."""


def drafters(result: Mapping[str, Any]) -> list[str]:
    """Return the drafters of a result, in the order of its rows."""
    return list(dict.fromkeys(r["drafter"] for r in result["rows"] if r["drafter"] != PLAIN))


def recounted(result: Mapping[str, Any], tables: Mapping[str, CostTable]) -> dict[str, Any]:
    """Return the result with its counted figures by other costs, and without those by the clock.

    Args:
        result: a saved one, of format 2.
        tables: the costs of each drafter.

    Raises:
        UserError: the result does not hold its steps' work; a drafter has no costs; or a policy
            reads costs, and others than these were read.
    """
    for row in result["rows"]:
        _check(row, result, tables)
    return _recounted(result, tables)


def on_machines(result: Mapping[str, Any], machines: Sequence[Machine]) -> dict[str, Any]:
    """Return the result recomputed for other machines, with one copy of its rows for each.

    Each row has the name of its `machine`. Its `varied` holds the counted speed-up where further
    tokens cost half or twice as much, and where the host takes time in every step. It is None where
    the policy reads costs.

    Raises:
        UserError: as `recounted`; or the result does not say what its drafters read.
    """
    saved = result["provenance"].get("drafting")
    if saved is None or not set(drafters(result)) <= set(saved):
        raise UserError(
            "the result does not say what its drafters read, which their costs are derived from: measure it anew"
        )
    work, rows, tables = (
        {d: Drafting.read(saved[d]) for d in drafters(result)},
        list[ResultRow](),
        dict[str, CostTable](),
    )
    bounds = list[ResultRow]()
    for machine in machines:
        tables = {d: machine.costs(w) for d, w in work.items()}
        here = recounted(result, tables)
        bounds += [{"machine": machine.name} | bound for bound in here["oracle"]]
        others = [
            [r["counted_speedup"] for r in _recounted(result, _bent(tables, *how), False)["rows"]]
            for how in VARIED
        ]
        for row, *speedups in zip(here["rows"], *others, strict=True):
            known = None if row["policy"] is None or reads_costs(row) else _varied(speedups)
            rows.append({"machine": machine.name} | row | {"varied": known})
    about = {
        **result["provenance"],
        "recounted": True,
        "machines": {m.name: dict(m.table.about) for m in machines},
    }
    return {**result, "provenance": about, "rows": rows, "oracle": bounds, "simulated": True}


def _varied(speedups: Sequence[float]) -> list[dict[str, float]]:
    return [
        {"slope": s, "overhead": o, "counted_speedup": x}
        for (s, o), x in zip(VARIED, speedups, strict=True)
    ]


def _bent(tables: Mapping[str, CostTable], slope: float, overhead: float) -> dict[str, CostTable]:
    return {d: varied(table, slope, overhead) for d, table in tables.items()}


def without(result: Mapping[str, Any], policies: Sequence[str]) -> dict[str, Any]:
    """Return the result without the rows of some policies.

    Raises:
        UnknownName: no row has such a policy.
    """
    there = dict.fromkeys(r["policy"] for r in result["rows"] if r["policy"])
    for name in policies:
        if name not in there:
            raise UnknownName("policy of the result", name, there)
    return {**result, "rows": [r for r in result["rows"] if r["policy"] not in policies]}


def order_changes(rows: Sequence[ResultRow]) -> bool:
    """Return whether changed costs of further tokens or of the host change which row is fastest."""
    known = [r for r in rows if r.get("varied")]
    best = {
        max(range(len(known)), key=lambda i: known[i]["varied"][v]["counted_speedup"])
        for v in range(len(VARIED))
        if known
    }
    return len(best) > 1


def reads_costs(row: ResultRow) -> bool:
    """Return whether the row's policy reads costs, so that its trees depend on them."""
    return row["policy"] is not None and bool(build("policy", row["policy"]).reads_costs)


def _check(row: ResultRow, result: Mapping[str, Any], tables: Mapping[str, CostTable]) -> None:
    drafter = row["drafter"]
    if "machine" in row:
        raise UserError(
            "the result is of several machines already, allowed is one of `bench`, or of `replay` without --machine"
        )
    if "work" not in row:
        raise UserError(
            "the result does not hold the work of its steps, which recounting needs: measure it anew"
        )
    if drafter == PLAIN:
        return
    if drafter not in tables:
        raise UserError(
            f"no costs are given for drafter '{drafter}', allowed is one file for all, or one for each"
        )
    used = (result["provenance"].get("costs") or {}).get(drafter)
    if reads_costs(row) and (used is None or _entries(used) != _entries(asdict(tables[drafter]))):
        told = f"policy '{row['policy']}' reads costs and has grown its trees by others than these"
        raise UserError(
            f"{told}: run it with them (--costs or --machine of bench and replay), or leave it out with --without"
        )


def _entries(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table's costs as JSON has them, with widths as text."""

    def widths(curve: Mapping[Any, float]) -> dict[str, float]:
        return {str(w): s for w, s in curve.items()}

    return [
        {**e, "draft": widths(e["draft"]), "target": widths(e["target"])} for e in table["entries"]
    ]


def _works(row: ResultRow, number: int) -> list[list[Work]]:
    return [work for _, work in worklog.decode(row["work"], f"row {number}")]


def _recounted(
    result: Mapping[str, Any], tables: Mapping[str, CostTable], bounded: bool = True
) -> dict[str, Any]:
    """Run `recounted` without checks; `bounded` is whether to compute intervals."""
    works = [_works(row, i) for i, row in enumerate(result["rows"])]
    plain = {
        r["temperature"]: (r, w)
        for r, w in zip(result["rows"], works, strict=True)
        if r["drafter"] == PLAIN
    }
    seed = result["provenance"].get("seed", 0) if bounded else None
    rows = [
        _row(row, w, plain[row["temperature"]], tables, seed)
        for row, w in zip(result["rows"], works, strict=True)
    ]
    about = result["provenance"] | {
        "costs": {d: asdict(tables[d]) for d in drafters(result)},
        "recounted": True,
    }
    overlap = {r["drafter"]: r.get("overlap") for r in rows}
    logs = [(log, log["drafter"]) for log in result.get("oracle", ()) if log["drafter"] in overlap]
    bounds = [oracle.row(log, tables[d], seed or 0, overlap[d]) for log, d in logs]
    simulated = any(t.simulated for t in tables.values())
    return {**result, "provenance": about, "rows": rows, "oracle": bounds, "simulated": simulated}


def _row(
    row: ResultRow,
    works: Sequence[Sequence[Work]],
    plain: tuple[ResultRow, Sequence[Sequence[Work]]],
    tables: Mapping[str, CostTable],
    seed: int | None,
) -> ResultRow:
    base, base_works = plain
    costs = tables.get(row["drafter"])
    if costs is None:  # the baseline, counted by the costs of each drafter it is compared with
        return unclocked(row)
    mine = Totals.read(row, [counted(costs, work)[0] for work in works])
    theirs = Totals.read(base, [counted_plain(costs, work) for work in base_works])
    figures = counted_figures(mine, theirs, sum(counted(costs, work)[1] for work in works))
    new = unclocked(row) | figures | {"cost_ratio": costs.ratio}
    if seed is not None:
        new["intervals"] = row["intervals"] | intervals(mine, theirs, seed)
    each = {"counted_seconds": mine, "counted_plain": theirs}
    new["per_prompt"] = row["per_prompt"] | {
        name: totals.per_prompt["counted_seconds"] for name, totals in each.items()
    }
    return unclocked(new | {"expected_speedup": expected_speedup(new)})
