"""Format the rows of a benchmark as text tables."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftree.evaluation.bootstrap import ERROR_LEVEL, MIN_PROMPTS, ResultRow, compare_to_plain
from draftree.evaluation.oracle import free_passes
from draftree.evaluation.result_rows import expected_speedup
from draftree.evaluation.step_profile import Part


def interval(value: float, bounds: Sequence[float]) -> str:
    """Return a figure with the bounds of its interval as text."""
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def cells(r: ResultRow) -> dict[str, str]:
    """Return the figures of a result row as texts by column heading.

    A replay has no columns measured by the clock.
    """
    between = r["intervals"]
    counted = r.get("counted_speedup")
    timed = "speedup" in r
    found = {
        "machine": r.get("machine") or "",
        "drafter": r["drafter"],
        "policy": r["policy"] or "",
        "acceptor": r.get("rule") or r.get("acceptor") or "",
        "draws": r.get("draw") or "",
        "T": f"{r['temperature']:g}",
        "τ [95 %]": interval(r["acceptance_length"], between["acceptance_length"]),
        "α": figure(r["alpha"]),
        "α of the bound": figure(r.get("alpha_bound")),
        "overlap": figure(r.get("overlap")),
        "sₐ/sₜ": figure(r.get("cost_ratio")),
        "E(Spd.)": figure(expected_speedup(r)),
        "bound": figure(free_pass_speedup(r)),
        "nodes/step": f"{r['nodes_per_step']:.1f}",
        "depth/step": f"{r['depth_per_step']:.1f}",
        "drafts/step": figure(r.get("draft_steps_per_step")),
        "speed-up [95 %]": interval(r["speedup"], between["speedup"]) if timed else "",
        "counted speed-up [95 %]": ""
        if counted is None
        else interval(counted, between["counted_speedup"]),
        "if varied": speedup_range(r.get("varied")),
        "same output": same_text(r),
        "draft share": figure(r.get("draft_share")),
    }
    if not timed:
        return found
    return found | {
        "tokens/s": f"{r['tokens_per_second']:.1f}",
        "ms/token": f"{1e3 / r['tokens_per_second']:.1f}" if r["tokens_per_second"] else "",
        "draft s": f"{r['draft_seconds']:.2f}",
        "verify s": f"{r['verify_seconds']:.2f}",
        "seconds": f"{r['seconds']:.2f}",
    }


def same_text(r: ResultRow) -> str:
    """Return for how many prompts the output equals that of plain decoding, as text.

    If the acceptor does not guarantee equal output, the text says so.
    """
    if r.get("lossy"):
        return "lossy"
    if not r.get("promises_text", True):
        return "not promised"
    return (
        "yes" if r["same_output"] else f"{r['prompts'] - r['different_prompts']} of {r['prompts']}"
    )


def figure(value: float | None) -> str:
    """Return a figure with two decimals as text; the text is empty for None."""
    return "" if value is None else f"{value:.2f}"


def profile_rows(parts: Sequence[Part]) -> list[dict[str, str]]:
    """Return table rows for the parts of a step, in milliseconds per step.

    The time of the prefill is in milliseconds per generated text.
    """
    return [
        {
            "part": part.name,
            "ms/step": f"{1e3 * part.seconds:.2f}",
            "share": f"{part.share:.0%}",
            "floor, ms": "" if part.floor is None else f"{1e3 * part.floor:.2f}",
        }
        for part in parts
    ]


def free_pass_speedup(r: ResultRow) -> float | None:
    """Return τ / (1 + drafts · sₐ/sₜ), the speed-up if a target pass costs the same for any tree.

    τ is the acceptance length, `drafts` the number of draft steps before a pass, and sₐ/sₜ the cost
    of a draft step over that of a target pass, for one token each.
    """
    drafts, ratio = r.get("draft_steps_per_step"), r.get("cost_ratio")
    return (
        None
        if drafts is None or ratio is None
        else free_passes(r["acceptance_length"], drafts, ratio)
    )


def speedup_range(figures: Sequence[Mapping[str, float]] | None) -> str:
    """Return the range of the counted speed-up over variations of a machine's costs, as text."""
    known = [f["counted_speedup"] for f in figures or () if f["counted_speedup"] is not None]
    return f"{min(known):.2f} … {max(known):.2f}" if known else ""


COUNTED = (
    "machine",
    "drafter",
    "policy",
    "T",
    "τ [95 %]",
    "nodes/step",
    "drafts/step",
    "bound",
    "counted speed-up [95 %]",
    "if varied",
)
"""Columns of a table of counted figures, without those measured by the clock."""
MAIN = (
    "machine",
    "drafter",
    "policy",
    "acceptor",
    "T",
    "tokens/s",
    "speed-up [95 %]",
    "counted speed-up [95 %]",
    "τ [95 %]",
    "nodes/step",
    "same output",
)
"""Columns that are shown first on a screen or a page, in this order."""
FIRST = (
    "drafter",
    "policy",
    "temperature",
    "tokens/s",
    "tokens/pass (τ)",
    "speed-up [95 %]",
    "same output",
)
"""Columns that are shown on a narrow terminal."""
HEADS = {"τ [95 %]": "tokens/pass (τ)", "nodes/step": "drafted/pass", "T": "temperature"}
"""Headings on a screen or a page by the heading in the documentation's tables that they replace."""
COLUMN_EXPLANATIONS = {
    "tokens/s": "new tokens per second, the prompt's pass included",
    "speed-up [95 %]": "plain decoding's seconds over these by the clock, measured in turns; in brackets the 95 % interval",
    "counted speed-up [95 %]": "the same from the passes that were made and what each costs when it is measured by itself: "
    "free of what else the machine does, and without the time between passes",
    "tokens/pass (τ)": "tokens that one pass of the target yields; plain decoding has 1",
    "drafted/pass": "drafted tokens that one pass verifies",
    "same output": "whether every text is the one that plain decoding writes",
    "α": "tokens a pass over the tree's depth, as in EDD + PCT; it can exceed 1",
    "α of the bound": "τ over the deepest layer that the policy allows",
    "overlap": "probability that a token drawn from the drafter is accepted, at temperature 1",
    "sₐ/sₜ": "seconds of a draft step over those of a target pass, for one token each",
    "E(Spd.)": "speed-up of chains by the formula of Leviathan et al., from overlap and sₐ/sₜ",
    "bound": "speed-up if a pass over a tree cost what one over a token costs",
    "depth/step": "depth of the trees",
    "drafts/step": "draft steps before a pass",
    "if varied": "counted speed-up where the machine's costs are varied",
    "draft share": "share of the time that drafting takes",
}
"""Explanations of the columns by heading."""


def readable(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return table rows in the form for a screen or a page.

    The columns `MAIN` come first, the headings `HEADS` are replaced, and τ has no interval.
    """
    names = [
        *(name for name in MAIN if name in rows[0]),
        *(name for name in rows[0] if name not in MAIN),
    ]
    plain = [{**row, "τ [95 %]": row.get("τ [95 %]", "").partition(" [")[0]} for row in rows]
    return [{HEADS.get(name, name): row[name] for name in names} for row in plain]


def legend(names: Collection[str]) -> list[str]:
    """Return a line of explanation for each of the given headings that `COLUMN_EXPLANATIONS` explains."""
    return [
        f"{name.removesuffix(' [95 %]')}: {told}"
        for name, told in COLUMN_EXPLANATIONS.items()
        if name in names
    ]


ORACLE = "oracle (bound)"
"""Text in the policy column of an oracle's row. The oracle knows the text beforehand."""


def oracle_cells(bound: ResultRow) -> dict[str, str]:
    """Return the figures of an oracle's row as texts by column heading."""
    return {
        "machine": bound.get("machine", ""),
        "drafter": bound["drafter"],
        "policy": ORACLE,
        "T": f"{bound['temperature']:g}",
        "τ [95 %]": f"{bound['acceptance_length']:.2f}",
        "depth/step": f"{bound['depth_per_step']:.1f}",
        "nodes/step": f"{bound['depth_per_step']:.1f}",
        "drafts/step": f"{bound['depth_per_step']:.2f}",
        "E(Spd.)": figure(bound["leviathan"]),
        "counted speed-up [95 %]": interval(bound["counted_speedup"], bound["interval"]),
    }


def result_table(
    rows: Sequence[ResultRow], bounds: Sequence[ResultRow] = ()
) -> list[dict[str, str]]:
    """Return the rows of a result as table rows of text.

    The temperature is shown if the rows differ in it, and the acceptor if a row names one. The
    machine is shown if a row names one.

    Args:
        rows: rows of a result.
        bounds: rows of the oracles; they come last.
    """
    hidden = set[str]()
    if len({r["temperature"] for r in rows}) == 1:
        hidden.add("T")
    if all(r.get("rule") is None for r in rows):
        hidden |= {"acceptor", "draws"}
    if not any(r.get("machine") for r in rows):
        hidden |= {"machine", "if varied"}
    found = [{name: text for name, text in cells(r).items() if name not in hidden} for r in rows]
    return found + [
        {name: texts.get(name, "") for name in found[0]} for texts in map(oracle_cells, bounds)
    ]


def counted_table(
    rows: Sequence[ResultRow], bounds: Sequence[ResultRow] = ()
) -> list[dict[str, str]]:
    """Return the rows of a result as table rows with the counted columns only."""
    return [
        {name: row[name] for name in COUNTED if name in row} for row in result_table(rows, bounds)
    ]


def faster_and_slower(result: Mapping[str, Any]) -> str:
    """Return one line that lists the rows that are faster and slower than plain decoding.

    The line also states the number of comparisons.
    """
    clocked, named = "speedup" in result["rows"][0], {"faster": list[str](), "slower": list[str]()}
    found = compare_to_plain(result, "seconds" if clocked else "counted_seconds")
    for c in found:
        if c.ratio.verdict in named:
            also = (
                f"T = {c.mine['temperature']:g}" if c.mine["temperature"] else "",
                c.mine.get("machine"),
            )
            named[c.ratio.verdict].append(
                " ".join(filter(None, (c.mine["drafter"], c.mine["policy"], *also)))
            )
    if found and all(c.ratio.few for c in found):
        return f"No verdict beside plain decoding: at least {MIN_PROMPTS} prompts are needed."
    told = [f"{verdict}: {', '.join(names) or 'none'}" for verdict, names in named.items()]
    how = "by the clock" if clocked else "by counted seconds"
    several = "1 comparison" if len(found) == 1 else f"{len(found)} comparisons"
    return f"Beside plain decoding {how}, {several} at {ERROR_LEVEL:.0%} together (Holm): {'; '.join(told)}."
