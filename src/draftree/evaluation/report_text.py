"""The sentences of an HTML report of a saved result."""

from collections.abc import Mapping, Sequence
from typing import Any

from draftree.evaluation import step_codec
from draftree.evaluation.bootstrap import (
    MIN_PROMPTS,
    TOO_FEW,
    ResultRow,
    RowComparison,
    compare_to_plain,
)

Result = Mapping[str, Any]


def has_clocked_speedups(result: Result) -> bool:
    """Return whether the speed-ups were measured by the clock, and not only counted by costs."""
    return "speedup" in result["rows"][0]


def name_of(row: ResultRow) -> str:
    """Return a row's drafter and policy, and its acceptor, temperature and machine, if any."""
    warm = f"T = {row['temperature']:g}" if row["temperature"] else None
    also = (row.get("rule"), warm, row.get("machine"))
    return " ".join(filter(None, (row["drafter"], row["policy"] or "", *also)))


def measure(result: Result) -> str:
    """Return the key of the speed-up by which rows are ranked."""
    return "speedup" if has_clocked_speedups(result) else "counted_speedup"


def rank_rows(result: Result) -> list[ResultRow]:
    """Return the rows that have a policy and a speed-up, the fastest first."""
    by = measure(result)
    return sorted(
        (r for r in result["rows"] if r["policy"] and r.get(by) is not None), key=lambda r: -r[by]
    )


def bars(result: Result) -> list[dict[str, Any]]:
    """Return the speed-ups with their intervals in the form that the bar chart needs.

    The oracle's bound is added only if the speed-ups are counted, because the bound is counted,
    too.
    """
    by = measure(result)
    bounds = {_place(b): b["counted_speedup"] for b in result.get("oracle", ())}
    return [
        {
            "name": name_of(r),
            "value": r[by],
            "low": r["intervals"][by][0],
            "high": r["intervals"][by][1],
            "bound": None if has_clocked_speedups(result) else bounds.get(_place(r)),
        }
        for r in rank_rows(result)
    ]


def gap_sentences(result: Result) -> list[str]:
    """Return a sentence for each drafter that compares its best counted row with the oracle."""
    found = []
    for bound in result.get("oracle", ()):
        place = _place(bound)
        rows = [
            r
            for r in result["rows"]
            if r["policy"] and _place(r) == place and r.get("counted_speedup")
        ]
        if rows:
            best = max(rows, key=lambda r: r["counted_speedup"])
            share = best["counted_speedup"] / bound["counted_speedup"]
            figures = f"{best['counted_speedup']:.2f} × counted, the oracle {bound['counted_speedup']:.2f} ×"
            found.append(
                f"{name_of(best)}: {figures}, so it has {share:.0%} of what any policy could have."
            )
    return found


def _place(row: ResultRow) -> tuple[Any, ...]:
    """Return the key that a row and the corresponding oracle's row have in common."""
    return row["drafter"], row["temperature"], row.get("machine")


def texts(result: Result, row: ResultRow) -> list[dict[str, Any]]:
    """Return the stored texts in pieces, each with the origin of its token in a row's steps."""
    kept = result.get("texts", {}).get(f"{row['temperature']:g}", ())
    if not kept or not row["promises_text"] or not row["same_output"] or "work" not in row:
        return []
    found = []
    for text, (steps, _) in zip(kept, step_codec.decode_steps(row["work"], "row"), strict=False):
        origins = [
            "prefill",
            *(o for step in steps for o in (*["drafted"] * step.accepted, "bonus")),
        ]
        found.append(
            {"prompt": text["prompt"], "pieces": list(zip(origins, text["pieces"], strict=False))}
        )
    return found


def advice_text(result: Result) -> str:
    """Return sentences that say whether to speculate, how, and with what speed-up."""
    by, rows = measure(result), rank_rows(result)
    if not rows:
        return "Nothing was measured beside plain decoding, so there is nothing to advise."
    target, device = (
        result["provenance"]["target"]["name"],
        result["provenance"]["hardware"].get("device", "this machine"),
    )
    compared = compare_to_plain(
        result, "seconds" if has_clocked_speedups(result) else "counted_seconds"
    )
    faster, others = [c.mine for c in compared if c.ratio.verdict == "faster"], len(compared)
    best = next((r for r in rows if r in faster), rows[0])  # the fastest of which that may be said
    known = next((c for c in compared if c.mine is best), None)
    low, high = best["intervals"][by]
    how = (
        "by the clock"
        if has_clocked_speedups(result)
        else "counted on simulated costs"
        if result["simulated"]
        else "by counted costs"
    )
    where = (
        f"With {target} on {device}"
        if not result["simulated"]
        else f"With {target} on {best.get('machine') or 'that machine'}"
    )
    figure = f"{best[by]:.2f} × [{low:.2f}, {high:.2f}] {how}, on {best['prompts']} prompts"
    if known is not None and known.ratio.verdict == TOO_FEW:
        return f"{where}, too few prompts to say whether to speculate: {name_of(best)} has {figure}, needed are {MIN_PROMPTS}."
    if known is None or known.ratio.verdict == "not told apart":
        untold = f"nothing was told apart from plain decoding in {others} comparisons"
        return (
            f"{where}, {untold}: the best, {name_of(best)}, has {figure}. More prompts may decide."
        )
    if known.ratio.verdict == "slower":
        one = "the only pairing" if others == 1 else f"the best of {others} pairings"
        return f"{where}, do not speculate on text like this: {one}, {name_of(best)}, has {figure}."
    how_much = f"{best['nodes_per_step']:.1f} nodes a step, of which {best['acceptance_length'] - 1:.2f} are accepted"
    return f"{where}, speculate with {name_of(best)}: {figure}, at {how_much}. {_close(rows, known, by)}"


def _close(rows: Sequence[ResultRow], best: RowComparison, by: str) -> str:
    """Return a sentence on the other rows whose intervals reach the best row's speed-up."""
    near = [
        name_of(r) for r in rows if r is not best.mine and r["intervals"][by][1] >= best.mine[by]
    ]
    return (
        f"Possibly as good: {', '.join(near)}."
        if near
        else "No other pairing's interval reaches that."
    )


def frontiers(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """Return (γ, τ, policy spec) of each row, by drafter and kind of policy, sorted by γ.

    γ is the mean number of drafted nodes per step, and τ is the acceptance length.
    """
    found = dict[str, list[tuple[float, float, str]]]()
    for r in (r for r in rows if r["policy"]):
        line = f"{r['drafter']} {r['policy'].partition(':')[0]}"
        found.setdefault(line, []).append(
            (r["nodes_per_step"], r["acceptance_length"], r["policy"])
        )
    return {name: sorted(points) for name, points in found.items()}


def by_category(
    row: dict[str, Any], categories: Sequence[str], name: str = "nodes"
) -> dict[str, list[float]]:
    """Return the nodes (or accepted tokens) per step of each prompt, grouped by its category.

    `name` is the total to divide by the steps, such as `nodes` or `accepted`.
    """
    found = dict[str, list[float]]()
    each = row["per_prompt"]
    for category, count, steps in zip(categories, each[name], each["steps"], strict=True):
        found.setdefault(category or "all", []).append(count / max(steps, 1))
    return found
