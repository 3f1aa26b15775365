"""Recompute the seconds of a saved result with the costs of another machine.

That is right for what does not read costs. A policy that does would have grown other trees on
another machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from draftree.costs.cost_table import CostTable, estimate_seconds, estimate_target_seconds
from draftree.costs.step_costs import CONSTANTS, Costs
from draftree.errors import UnknownName, UserError
from draftree.evaluation import oracle, step_codec
from draftree.evaluation.bootstrap import ResultRow
from draftree.evaluation.result_rows import (
    Totals,
    counted_figures,
    expected_speedup,
    intervals,
    without_clock_figures,
)
from draftree.evaluation.roofline import Drafting, Machine
from draftree.metrics import Work
from draftree.registry import build

PLAIN = "plain"
"""What a row of the baseline has for a drafter."""
COST_VARIATIONS = [(slope, overhead) for overhead in (0.0, 1.2e-3) for slope in (0.5, 1.0, 2.0)]
"""Factors of what further tokens cost, and seconds of the host added to every step, by which a
machine's costs are varied."""


def drafters(result: Mapping[str, Any]) -> list[str]:
    """Return the drafters of a result, in the order of its rows."""
    return list(dict.fromkeys(r["drafter"] for r in result["rows"] if r["drafter"] != PLAIN))


def reprice_result(result: Mapping[str, Any], tables: Mapping[str, CostTable]) -> dict[str, Any]:
    """Return the result with its counted figures by other costs, and without those by the clock.

    Args:
        result: a saved one, of format 2.
        tables: the costs of each drafter.

    Raises:
        UserError: the result does not hold its steps' work; a drafter has no costs; or a policy
            reads costs, and others than these were read.
    """
    for row in result["rows"]:
        _check_row(row, result, tables)
    return _recounted(result, tables)


def on_one_curve(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with one curve of target costs for all its drafters.

    The costs of the drafters were measured one after another, so other load on the machine made
    the target seem slower for some drafters. The common curve is the median of all curves at each
    width and context. The costs of a drafter are scaled with the target's, so that sₐ/sₜ (the cost
    of a draft step over that of a target pass, for one token each) stays as measured. The trees of
    policies that read costs are not grown again; their rows get the entry `own_costs`.

    Raises:
        UserError: as `reprice_result`; or the costs are of different contexts or numbers of
            sequences.
    """
    saved = result["provenance"].get("costs") or {}
    if not set(drafters(result)) <= set(saved):
        raise UserError("the result does not hold the costs of its drafters: measure it again")
    tables = one_curve(
        {
            d: CostTable.of(saved[d]["entries"], saved[d].get("about") or {})
            for d in drafters(result)
        }
    )
    for row in result["rows"]:
        _check_row(row, result, tables, grown=True)
    new = _recounted(result, tables)
    rows = [
        row | ({"own_costs": True} if row["policy"] and reads_costs(row) else {})
        for row in new["rows"]
    ]
    about = {"target_curve": "the median of its drafters' curves", "measured_costs": saved}
    return {**new, "rows": rows, "provenance": new["provenance"] | about}


def one_curve(tables: Mapping[str, CostTable]) -> dict[str, CostTable]:
    """Return the costs of each drafter with the median of all target curves.

    Curves that are equal count once. Draft steps and commits are scaled as the target's pass over
    one token.

    Raises:
        UserError: the tables are of different contexts or numbers of sequences.
    """
    contexts = {d: _contexts(t) for d, t in tables.items()}
    if len(set(contexts.values())) > 1:
        told = "; ".join(f"{d}: {several}" for d, several in contexts.items())
        raise UserError(f"costs of different contexts or numbers of sequences: {told}")
    ordered = {d: sorted(t.entries, key=lambda e: (e.rows, e.context)) for d, t in tables.items()}
    found: dict[str, list[Costs]] = {d: [] for d in tables}
    for entries in zip(*ordered.values(), strict=True):
        widths = sorted(set.intersection(*(set(e.target) for e in entries)))
        curves = {tuple(e.target_seconds(w) for w in widths) for e in entries}
        middle = np.median(np.array(sorted(curves)), axis=0)
        curve = dict(zip(widths, map(float, middle), strict=True))
        for drafter, entry in zip(ordered, entries, strict=True):
            found[drafter].append(_scaled(entry, curve))
    return {d: replace(tables[d], entries=tuple(entries)) for d, entries in found.items()}


def _contexts(table: CostTable) -> tuple[tuple[int, int], ...]:
    """Return the context and the number of sequences of each entry, in their order."""
    return tuple(sorted((e.context, e.rows) for e in table.entries))


def _scaled(entry: Costs, curve: Mapping[int, float]) -> Costs:
    """Return an entry with another target curve, and all else scaled as a pass over one token."""
    factor = Costs(entry.draft, curve).target_seconds(1) / entry.target_seconds(1)
    draft = {width: seconds * factor for width, seconds in entry.draft.items()}
    others = {name: getattr(entry, name) * factor for name in CONSTANTS}
    return replace(entry, draft=draft, target=dict(curve), **others)


def on_machines(result: Mapping[str, Any], machines: Sequence[Machine]) -> dict[str, Any]:
    """Return the result recomputed for other machines, with one copy of its rows for each.

    The entry `machine` of a row is the name of the machine. The entry `vary_costs` contains the
    counted speed-up if further tokens cost half or twice as much, and if the host takes time in
    every step. This entry is None if the policy reads costs.

    Raises:
        UserError: as `reprice_result`; or the result does not say what its drafters read.
    """
    saved = result["provenance"].get("drafting")
    if saved is None or not set(drafters(result)) <= set(saved):
        raise UserError(
            "the result does not record what its drafters read, from which costs are derived: measure it again"
        )
    work = {d: Drafting.read(saved[d]) for d in drafters(result)}
    rows = list[ResultRow]()
    tables = dict[str, CostTable]()
    bounds = list[ResultRow]()
    for machine in machines:
        tables = {d: machine.costs(w) for d, w in work.items()}
        here = reprice_result(result, tables)
        bounds += [{"machine": machine.name} | bound for bound in here["oracle"]]
        others = [
            [r["counted_speedup"] for r in _recounted(result, _bent(tables, *how), False)["rows"]]
            for how in COST_VARIATIONS
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


def vary_costs(table: CostTable, slope: float = 1.0, overhead: float = 0.0) -> CostTable:
    """Return a cost table in which further tokens or the host's work cost more or less.

    Args:
        table: cost table to change.
        slope: factor for the difference between the cost of a pass over n tokens and of a pass over
            one token.
        overhead: seconds added to every target pass, including the passes of plain decoding.
    """

    def bent(entry: Costs) -> Costs:
        one = entry.token
        return replace(
            entry, target={n: one + slope * (s - one) + overhead for n, s in entry.target.items()}
        )

    told = {"slope": f"{slope:g}", "overhead": f"{overhead:g}"}
    return CostTable(tuple(map(bent, table.entries)), {**table.about, **told})


def _varied(speedups: Sequence[float]) -> list[dict[str, float]]:
    return [
        {"slope": s, "overhead": o, "counted_speedup": x}
        for (s, o), x in zip(COST_VARIATIONS, speedups, strict=True)
    ]


def _bent(tables: Mapping[str, CostTable], slope: float, overhead: float) -> dict[str, CostTable]:
    return {d: vary_costs(table, slope, overhead) for d, table in tables.items()}


def without_policies(result: Mapping[str, Any], policies: Sequence[str]) -> dict[str, Any]:
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
        for v in range(len(COST_VARIATIONS))
        if known
    }
    return len(best) > 1


def reads_costs(row: ResultRow) -> bool:
    """Return whether the row's policy reads costs, so that its trees depend on them."""
    return row["policy"] is not None and bool(build("policy", row["policy"]).reads_costs)


def _check_row(
    row: ResultRow, result: Mapping[str, Any], tables: Mapping[str, CostTable], grown: bool = False
) -> None:
    """Raise an error for a row that cannot be priced.

    Args:
        row: the row of the result.
        result: the result.
        tables: the costs of each drafter.
        grown: whether rows are allowed whose trees were grown with other costs.
    """
    drafter = row["drafter"]
    if "machine" in row:
        raise UserError(
            "the result is of several machines already, allowed is one of `bench`, or of `replay` without --machine"
        )
    if "work" not in row:
        raise UserError(
            "the result does not hold the work of its steps, which recounting needs: measure it again"
        )
    if drafter == PLAIN:
        return
    if drafter not in tables:
        raise UserError(
            f"no costs are given for drafter '{drafter}', allowed is one file for all, or one for each"
        )
    used = (result["provenance"].get("costs") or {}).get(drafter)
    if (
        not grown
        and reads_costs(row)
        and (used is None or CostTable.of(used["entries"], {}).entries != tables[drafter].entries)
    ):
        told = f"policy '{row['policy']}' reads costs and has grown its trees by others than these"
        raise UserError(
            f"{told}: run it with them (--costs or --machine of bench and replay), or leave it out with --without"
        )


def _works(row: ResultRow, number: int) -> list[list[Work]]:
    return [work for _, work in step_codec.decode_steps(row["work"], f"row {number}")]


def _recounted(
    result: Mapping[str, Any], tables: Mapping[str, CostTable], bounded: bool = True
) -> dict[str, Any]:
    """Return the result that `reprice_result` returns, without its checks.

    Args:
        result: a saved result.
        tables: the costs of each drafter.
        bounded: whether to compute confidence intervals.
    """
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
    simulated = any(t.is_simulated for t in tables.values())
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
        return without_clock_figures(row)
    mine = Totals.read(row, [estimate_seconds(costs, work)[0] for work in works])
    theirs = Totals.read(base, [estimate_target_seconds(costs, work) for work in base_works])
    figures = counted_figures(mine, theirs, sum(estimate_seconds(costs, work)[1] for work in works))
    new = without_clock_figures(row) | figures | {"cost_ratio": costs.ratio}
    if seed is not None:
        new["intervals"] = row["intervals"] | intervals(mine, theirs, seed)
    each = {"counted_seconds": mine, "counted_plain": theirs}
    new["per_prompt"] = row["per_prompt"] | {
        name: totals.per_prompt["counted_seconds"] for name, totals in each.items()
    }
    return without_clock_figures(new | {"expected_speedup": expected_speedup(new)})
