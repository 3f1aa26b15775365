"""From what was written to rows of figures with intervals, and from saved rows to tables.

Shapes: P prompts, B bootstrap samples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from draftree.errors import UnknownName, UserError
from draftree.evaluation.runner import Cell, Quality, Written
from draftree.stats import repeated_ngrams, total
from draftree.tree import Floats, Ints

SAMPLES = 2000
"""B, bootstrap samples behind an interval."""

NGRAM = 8
"""Length of the n-grams whose repetition is counted."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Totals:
    """Sums of each prompt [P]: tokens a step brought (accepted + 1), steps, new tokens, seconds."""

    accepted: Floats
    steps: Floats
    tokens: Floats
    seconds: Floats

    @classmethod
    def of(cls, written: Sequence[Written]) -> "Totals":
        """Those of one cell."""
        stats = [w.stats for w in written]
        columns = (
            [sum(step.accepted + 1 for step in s.steps) for s in stats],
            [len(s.steps) for s in stats],
            [s.new_tokens for s in stats],
            [s.seconds for s in stats],
        )
        return cls(*(np.array(c, np.float64) for c in columns))

    def acceptance_length(self, chosen: Ints) -> Floats:
        """[B] τ of samples of prompts [B, P]; 1 where no step was taken."""
        steps = self.steps[chosen].sum(-1)
        return np.where(steps > 0, self.accepted[chosen].sum(-1) / np.maximum(steps, 1), 1.0)

    def speed(self, chosen: Ints) -> Floats:
        """[B] tokens per second of samples of prompts [B, P]."""
        speed: Floats = self.tokens[chosen].sum(-1) / np.maximum(self.seconds[chosen].sum(-1), 1e-12)
        return speed


def rows(done: Sequence[Mapping[Cell, Written]], seed: int, quality: Mapping[str, Quality] | None = None) -> list[Row]:
    """A row for each cell, in the order they were given; with a drafter's own figures where they are known."""
    by_cell = {cell: [prompt[cell] for prompt in done] for cell in done[0]}
    plain = {cell.temperature: written for cell, written in by_cell.items() if cell.plain}
    own = {d: asdict(q) for d, q in (quality or {}).items()}
    unknown = {f.name: None for f in fields(Quality)}
    return [
        row(cell, written, plain[cell.temperature], seed) | own.get(cell.drafter or "", unknown)
        for cell, written in by_cell.items()
    ]


def row(cell: Cell, written: Sequence[Written], plain: Sequence[Written], seed: int) -> Row:
    """The figures of one cell beside the baseline's of the same temperature.

    Counts are of one repeat, seconds the mean of all; the speed-up is the ratio of tokens per second over all prompts.
    """
    stats, base = total([w.stats for w in written]), total([w.stats for w in plain])
    different = sum(a.tokens != b.tokens for a, b in zip(written, plain, strict=True))
    return {
        "drafter": cell.drafter or "plain",
        "policy": cell.policy,
        "temperature": cell.temperature,
        "prompts": len(written),
        **stats.as_json(),
        "speedup": stats.tokens_per_second / base.tokens_per_second,
        "same_output": different == 0,
        "different_prompts": different,
        "repeated_ngrams": float(np.mean([repeated_ngrams(w.tokens, NGRAM) for w in written])),
        "intervals": intervals(written, plain, seed),
    }


def intervals(written: Sequence[Written], plain: Sequence[Written], seed: int) -> dict[str, list[float]]:
    """95 % intervals by a bootstrap over prompts, paired: a sample holds the same prompts of both."""
    chosen = np.random.default_rng(seed).integers(0, len(written), (SAMPLES, len(written)))
    mine, base = Totals.of(written), Totals.of(plain)
    sampled = {
        "acceptance_length": mine.acceptance_length(chosen),
        "tokens_per_second": mine.speed(chosen),
        "speedup": mine.speed(chosen) / base.speed(chosen),
    }
    return {name: [float(x) for x in np.quantile(values, (0.025, 0.975))] for name, values in sampled.items()}


def save(result: Mapping[str, Any], path: Path) -> None:
    """Writes a result, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}") from error


def read(path: Path) -> dict[str, Any]:
    """A saved result.

    Raises:
        UserError: the file is not one.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if not found["rows"] or not found["provenance"]:
            raise ValueError("it has no rows or no provenance")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is not a result as `draftree bench --out` writes it: {error}") from error
    return found


def spread(value: float, bounds: Sequence[float]) -> str:
    """A figure with its interval."""
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def cells(r: Row) -> dict[str, str]:
    """A row as text, by the heads of the tables' columns."""
    between = r["intervals"]
    return {
        "drafter": r["drafter"],
        "policy": r["policy"] or "",
        "T": f"{r['temperature']:g}",
        "τ [95 %]": spread(r["acceptance_length"], between["acceptance_length"]),
        "α": figure(r["alpha"]),
        "overlap": figure(r.get("overlap")),
        "sₐ/sₜ": figure(r.get("cost_ratio")),
        "nodes/step": f"{r['nodes_per_step']:.1f}",
        "depth/step": f"{r['depth_per_step']:.1f}",
        "speed-up [95 %]": spread(r["speedup"], between["speedup"]),
        "same output": "yes" if r["same_output"] else f"{r['prompts'] - r['different_prompts']} of {r['prompts']}",
        "tokens/s": f"{r['tokens_per_second']:.1f}",
        "draft s": f"{r['draft_seconds']:.2f}",
        "verify s": f"{r['verify_seconds']:.2f}",
        "seconds": f"{r['seconds']:.2f}",
    }


def figure(value: float | None) -> str:
    """A figure, or nothing."""
    return "" if value is None else f"{value:.2f}"


COLUMNS = ("drafter", "policy", "τ [95 %]", "nodes/step", "depth/step", "speed-up [95 %]", "same output")
"""Of a table in a document; with one for the temperature where there are several."""


FIRST = ("drafter", "policy", "T", "τ [95 %]", "speed-up [95 %]", "same output")
"""What a narrow terminal shows."""


def shown(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Rows as text, τ and nodes first and seconds last; with the temperature where there are several."""
    several = len({r["temperature"] for r in rows}) > 1
    return [{name: text for name, text in cells(r).items() if several or name != "T"} for r in rows]


def markdown(result: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> str:
    """A saved result as a table, under it what was run where.

    Raises:
        UserError: there is no such column.
    """
    rows = shown(result["rows"])
    for column in columns:
        if column not in rows[0]:
            raise UnknownName("column", column, rows[0])
    heads = [name for name in rows[0] if name in (*columns, "T")]
    lines = [heads, ["---"] * len(heads), *([r[h] for h in heads] for r in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{caption(result)}"


def caption(result: Mapping[str, Any]) -> str:
    """What a table's figures are of."""
    said, first = result["provenance"], result["rows"][0]
    suite, hardware, target = said["suite"], said["hardware"], said["target"]
    threads = f", threads: {hardware['threads']}" if hardware["kind"] == "cpu" else ""
    mean_repetition = np.mean([r["repeated_ngrams"] for r in result["rows"]])
    return (
        f"*Target {target['name']} ({target['dtype']}), {first['prompts']} prompts of suite {suite['name']}"
        f"{' (' + ', '.join(suite['categories']) + ')' if suite['categories'] else ''}, at most {said['max_new_tokens']} "
        f"new tokens, times each was written: {said['repeats']}, {hardware['device']}{threads}, {said['date'][:10]}; "
        f"repeated {NGRAM}-grams {mean_repetition:.0%}.*"
    )
