"""A benchmark's rows of figures as text."""

from collections.abc import Sequence

from draftree.evaluation.profile import Part
from draftree.evaluation.report import ResultRow, expected_speedup


def interval(value: float, bounds: Sequence[float]) -> str:
    """A figure with its interval."""
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def cells(r: ResultRow) -> dict[str, str]:
    """A row as text, by the heads of the tables' columns; without those by the clock where a replay had none."""
    between, counted, timed = r["intervals"], r.get("counted_speedup"), "speedup" in r
    found = {
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
        "nodes/step": f"{r['nodes_per_step']:.1f}",
        "depth/step": f"{r['depth_per_step']:.1f}",
        "drafts/step": figure(r.get("draft_steps_per_step")),
        "speed-up [95 %]": interval(r["speedup"], between["speedup"]) if timed else "",
        "counted speed-up [95 %]": "" if counted is None else interval(counted, between["counted_speedup"]),
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
    """Of how many prompts the output is plain decoding's, where the acceptor promises that."""
    if r.get("lossy"):
        return "lossy"
    if not r.get("promises_text", True):
        return "not promised"
    return "yes" if r["same_output"] else f"{r['prompts'] - r['different_prompts']} of {r['prompts']}"


def figure(value: float | None) -> str:
    """A figure, or nothing."""
    return "" if value is None else f"{value:.2f}"


def profile_rows(parts: Sequence[Part]) -> list[dict[str, str]]:
    """The parts of a step as text, in milliseconds; the prompt's is of one text."""
    return [
        {
            "part": part.name,
            "ms/step": f"{1e3 * part.seconds:.2f}",
            "share": f"{part.share:.0%}",
            "floor, ms": "" if part.floor is None else f"{1e3 * part.floor:.2f}",
        }
        for part in parts
    ]


FIRST = ("drafter", "policy", "T", "τ [95 %]", "speed-up [95 %]", "same output")
"""The columns that a narrow terminal shows."""


def shown(rows: Sequence[ResultRow]) -> list[dict[str, str]]:
    """Rows as text, τ and nodes first and seconds last; temperature and acceptor where there are several, or one was named."""
    hidden = set[str]()
    if len({r["temperature"] for r in rows}) == 1:
        hidden.add("T")
    if all(r.get("rule") is None for r in rows):
        hidden |= {"acceptor", "draws"}
    return [{name: text for name, text in cells(r).items() if name not in hidden} for r in rows]
