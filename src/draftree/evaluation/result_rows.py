"""Rows of figures with bootstrap intervals; read and write saved results.

Shapes: P prompts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftree.acceptors.base import Acceptor
from draftree.costs.cost_table import CostTable, estimate_seconds, estimate_target_seconds
from draftree.costs.step_costs import Costs
from draftree.errors import UserError
from draftree.evaluation import step_codec
from draftree.evaluation.bootstrap import ResultRow, ratio_bounds, samples
from draftree.evaluation.grid import Cell, PromptResult, Quality
from draftree.metrics import Work, repeated_ngrams, total
from draftree.registry import part
from draftree.tree import Floats, Ints
from draftree.utils.files import Entries, as_user_error, read_object, write_text

NGRAM = 8
"""Length in tokens of the n-grams whose repetitions are counted."""


@dataclass(frozen=True)
class Totals:
    """Store totals of each prompt [P]: accepted and drafted nodes, steps, tokens and seconds.

    `seconds` are measured by the clock. `counted` are the seconds that the cost model predicts for
    the same passes; they are 0 without a cost model.
    """

    accepted: Ints
    nodes: Ints
    steps: Ints
    tokens: Ints
    seconds: Floats
    counted: Floats

    @classmethod
    def of(
        cls,
        written: Sequence[PromptResult],
        seconds: Callable[[Sequence[Work]], float] = lambda _: 0.0,
    ) -> "Totals":
        """Return the totals of one cell.

        `seconds` computes the seconds of some work by the cost model.
        """
        stats = [w.stats for w in written]
        columns = (
            [sum(step.accepted for step in s.steps) for s in stats],
            [sum(step.nodes for step in s.steps) for s in stats],
            [len(s.steps) for s in stats],
            [s.new_tokens for s in stats],
            [float(s.seconds) for s in stats],
            [seconds(s.work) for s in stats],
        )
        return cls(*map(np.array, columns))

    @classmethod
    def read(cls, row: "ResultRow", counted: Sequence[float]) -> "Totals":
        """Return the totals of a saved row; `counted` are the seconds [P] by the cost model.

        The measured seconds are 0 if the row does not contain them.
        """
        saved = Entries(row["per_prompt"], "per_prompt")
        columns = (saved.get(name, list[int]) for name in ("accepted", "nodes", "steps", "tokens"))
        return cls(
            *map(
                np.array,
                (*columns, saved.get("seconds", list[float], [0.0] * len(counted)), counted),
            )
        )

    @property
    def per_prompt(self) -> dict[str, list[float] | list[int] | None]:
        """Return the totals as lists over prompts, by name, for paired comparisons."""
        found = {
            name: getattr(self, name).tolist()
            for name in ("accepted", "nodes", "steps", "tokens", "seconds")
        }
        return found | {"counted_seconds": self.counted.tolist() if self.counted.any() else None}


Prices = Mapping[str, Costs | CostTable]
"""Cost models by the spec of the drafter."""


def result_rows(
    done: Sequence[Mapping[Cell, PromptResult]],
    seed: int,
    quality: Mapping[str, Quality] | None = None,
    prices: Prices | None = None,
) -> list[ResultRow]:
    """Return one row of figures for each cell, in the order of the cells.

    `quality` adds the drafter's overlap and cost ratio, and `prices` adds the counted figures.
    """
    by_cell = {cell: [prompt[cell] for prompt in done] for cell in done[0]}
    plain = {cell.temperature: written for cell, written in by_cell.items() if cell.plain}
    own = {
        d: {"overlap": q.overlap, "cost_ratio": q.cost_ratio} for d, q in (quality or {}).items()
    }
    unknown = {"overlap": None, "cost_ratio": None}
    known = prices or {}
    found = [
        row(cell, written, plain[cell.temperature], seed, known.get(cell.drafter or ""))
        | own.get(cell.drafter or "", unknown)
        for cell, written in by_cell.items()
    ]
    return [r | {"expected_speedup": expected_speedup(r)} for r in found]


def expected_speedup(r: ResultRow) -> float | None:
    """Return GLIDE's expected speed-up, (1 − aᵞ⁺¹) / ((1 − a)(γ c + 1)); None for trees.

    The source is section 5.1 of GLIDE, after Leviathan et al. Here a is the overlap, so the
    figure is the speed-up of speculative sampling at temperature 1. c is sₐ/sₜ, the seconds of a
    draft step over those of a target pass, for one token each. γ is the mean length of the chains
    over all steps. A policy that ends a chain where the drafter is unsure has more of its tokens
    accepted than a predicts, and gains more.
    """
    a = r.get("overlap")
    c = r.get("cost_ratio")
    chain = r["nodes_per_step"]
    if a is None or c is None or not chain or chain != r["depth_per_step"]:
        return None
    tokens = (1 - a ** (chain + 1)) / (1 - a) if a < 1 else chain + 1
    return float(tokens / (chain * c + 1))


def row(
    cell: Cell,
    written: Sequence[PromptResult],
    plain: Sequence[PromptResult],
    seed: int,
    costs: Costs | CostTable | None = None,
) -> ResultRow:
    """Return the figures of one cell compared with plain decoding at the same temperature.

    A cell is a drafter with a policy, an acceptor and a temperature. Counts are those of one
    repeat. Seconds are means over all repeats. The speed-up is the ratio of tokens per second, over
    all prompts. The counted speed-up is the same ratio with seconds from the costs, which do not
    depend on the machine's load or on Python. The draft share is the drafter's share of these
    seconds.

    Args:
        cell: the cell.
        written: its results, one for each prompt.
        plain: the results of plain decoding for the same prompts.
        seed: seed of the bootstrap intervals.
        costs: the costs of passes and draft steps; without them, counted figures are left out.
    """
    stats, base = total([w.stats for w in written]), total([w.stats for w in plain])
    different = sum(a.tokens != b.tokens for a, b in zip(written, plain, strict=True))
    mine = Totals.of(written)
    theirs = Totals.of(plain)
    drafting = 0.0
    if costs is not None:
        mine = Totals.of(written, lambda work: estimate_seconds(costs, work)[0])
        theirs = Totals.of(plain, lambda work: estimate_target_seconds(costs, work))
        drafting = sum(estimate_seconds(costs, w.stats.work)[1] for w in written)
    return {
        "drafter": cell.drafter or "plain",
        "policy": cell.policy,
        "temperature": cell.temperature,
        "rule": cell.acceptor,
        "prompts": len(written),
        **stats.as_json(),
        "draft_steps_per_step": stats.draft_steps_per_step,
        "phases": stats.phases,
        "speedup": stats.tokens_per_second / base.tokens_per_second,
        **counted_figures(mine, theirs, drafting),
        "promises_text": promises_text(stats.acceptor),
        "same_output": different == 0,
        "different_prompts": different,
        "repeated_ngrams": float(np.mean([repeated_ngrams(w.tokens, NGRAM) for w in written])),
        "intervals": intervals(mine, theirs, seed),
        "per_prompt": mine.per_prompt | {"counted_plain": theirs.per_prompt["counted_seconds"]},
        "work": step_codec.encode([w.stats for w in written]),
    }


def counted_figures(mine: Totals, base: Totals, drafting: float) -> ResultRow:
    """Return a cell's figures by the cost model: seconds, speed-up over the baseline, draft share.

    `drafting` is the number of counted seconds that the drafter takes.
    """
    spent = float(mine.counted.sum())
    return {
        "counted_seconds": spent if spent else None,
        "counted_speedup": _speedup(mine, base) if spent else None,
        "draft_share": drafting / spent if spent else None,
    }


CLOCKED_FIGURES = (
    "tokens_per_second",
    "speedup",
    "draft_seconds",
    "verify_seconds",
    "seconds",
    "phases",
)
"""Names of the figures that are measured by the clock."""


def without_clock_figures(figures: Mapping[str, Any]) -> ResultRow:
    """Return a copy of a row, without the figures that are measured by the clock.

    A replay cannot measure such figures, and on another machine they would be different.
    """
    inside = {
        k: without_clock_figures(v) if k in ("intervals", "per_prompt") else v
        for k, v in figures.items()
    }
    return {k: v for k, v in inside.items() if k not in CLOCKED_FIGURES}


def intervals(mine: Totals, base: Totals, seed: int) -> dict[str, list[float]]:
    """Return the 95 % interval of each figure by its name, by a paired bootstrap over prompts.

    A bootstrap sample takes the same prompts from both runs.
    """
    chosen = samples(len(mine.steps), seed)
    found = {
        "acceptance_length": ratio_bounds([mine.accepted + mine.steps], [mine.steps], chosen),
        "tokens_per_second": ratio_bounds([mine.tokens], [mine.seconds], chosen),
        "speedup": ratio_bounds([mine.tokens, base.seconds], [mine.seconds, base.tokens], chosen),
    }
    if mine.counted.any():
        found["counted_speedup"] = ratio_bounds(
            [mine.tokens, base.counted], [mine.counted, base.tokens], chosen
        )
    return found


def _speedup(mine: Totals, base: Totals) -> float:
    """Return the ratio of the two rates in tokens per counted second, without the prefill."""
    rates = [t.tokens.sum() / max(t.counted.sum(), 1e-12) for t in (mine, base)]
    return float(rates[0] / rates[1])


NUMBER_ARRAY = re.compile(r"\[\n[^][{}\"]*\]")
"""Pattern for an array of numbers in indented JSON. Strings in JSON contain no line breaks."""


def promises_text(acceptor: str | None) -> bool:
    """Return whether an acceptor generates the same text as plain decoding with the same seed.

    `acceptor` is a spec. None stands for plain decoding, for which the result is true.
    """
    rule: type[Acceptor] | None = None if acceptor is None else part("acceptor", acceptor)
    return rule is None or rule.keeps_text


FORMAT = 2
"""Version of the format of saved results. Version 1 had no work of the steps and no entry
`format`."""


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a result to a file atomically, as JSON."""
    write_text(path, as_text(result))


def as_text(result: Mapping[str, Any]) -> str:
    """Return a result as JSON text with each list of numbers on one line.

    Raises:
        ValueError: a figure is not finite.
    """
    on_a_line = lambda found: "[" + " ".join(found[0][1:-1].split()) + "]"
    return NUMBER_ARRAY.sub(on_a_line, json.dumps(result, indent=1, allow_nan=False)) + "\n"


RESULT = "a result as `draftree bench --out` writes it"
ENTRY_TYPES: Mapping[str, Any] = {
    "simulated": bool,
    "provenance": dict,
    "rows": list[ResultRow],
    "oracle": list[dict[str, Any]],
    "categories": list[str],
    "texts": dict[str, list[dict[str, Any]]],
}
"""Types of a saved result's entries by name."""
ROW_KINDS: Mapping[str, Any] = {
    "drafter": str,
    "policy": str | None,
    "temperature": float,
    "acceptance_length": float,
    "machine": str,
    "intervals": dict,
    "per_prompt": dict,
    "work": dict,
    "phases": dict,
}
"""Types of a row's entries by name."""


@contextmanager
def as_result_error(*paths: Path) -> Iterator[None]:
    """Turn an error inside the context into a `UserError` that names the result files.

    Reading a result checks only the types of its entries. Entries that do not fit together cause
    errors only in computations. Without a path, errors are not changed.

    Raises:
        UserError: an error occurred inside the context.
    """
    names = ", ".join(f"'{path}'" for path in paths)
    with as_user_error(f"{names}: the entries do not match each other") if paths else nullcontext():
        yield


def read_result(path: Path) -> dict[str, Any]:
    """Read a saved result and check the types of its entries.

    Raises:
        UserError: the file is not a saved result.
    """
    result = Entries(read_object(path, RESULT), path)
    if (version := result.get("format", int, 1)) not in range(1, FORMAT + 1):
        raise UserError(
            f"'{path}' is a result of format {version}, allowed is 1 … {FORMAT}: another version has written it"
        )
    if not result.get("rows", list[ResultRow]) or not result.get("provenance", dict):
        raise UserError(f"'{path}' is not {RESULT}: it has no rows or no provenance")
    for name in ENTRY_TYPES.keys() & result.values.keys():
        result.get(name, ENTRY_TYPES[name])
    for number, row in enumerate(result.values["rows"]):
        saved = Entries(row, f"'{path}', row {number}")
        for name in ROW_KINDS.keys() & row.keys():
            saved.get(name, ROW_KINDS[name])
    return dict(result.values)
