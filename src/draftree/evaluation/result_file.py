"""Assemble the result file of a benchmark or replay."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from draftree.costs.cost_table import CostTable
from draftree.evaluation import oracle, result_rows
from draftree.evaluation.bench import Bench
from draftree.evaluation.bootstrap import ResultRow
from draftree.evaluation.grid import Cell, PromptResult
from draftree.evaluation.result_rows import Prices
from draftree.evaluation.roofline import Machine, count_draft_reads
from draftree.utils.progress_callback import Tell, ignore_progress
from draftree.viewer.token_text import Spellings, mark_line_ends

STORED_TEXTS = 3
"""Number of texts that a result stores for each temperature."""
Run = tuple[Sequence[Mapping[Cell, PromptResult]], Prices]
"""Results by prompt and cell, and the costs by drafter with which their work is counted."""


def assemble_result(
    work: Bench,
    runs: Mapping[str, Run],
    about: Mapping[str, Any],
    categories: Sequence[str],
    tell: Tell = ignore_progress,
) -> dict[str, Any]:
    """Return a benchmark's result as a dict: rows of figures, rows of the oracle, provenance.

    There is a row for each cell, which is a combination of drafter, policy and settings. The
    oracle is an ideal policy that knows the text, see `evaluation.oracle`.

    Args:
        work: the benchmark that has been run.
        runs: runs by the name of the machine; the name is empty for this machine.
        about: entries of the provenance that are already known.
        categories: category of each prompt; empty texts for none.
        tell: called with the number of drafters measured so far.
    """
    done, prices = next(iter(runs.values()))
    quality = {}
    for count, drafter in enumerate(prices):
        tell(count, drafter, of=len(prices))
        quality[drafter] = work.quality(drafter, done, prices[drafter])
    temperature, starts = (
        next(c.temperature for c in work.cells if c.plain),
        [len(r.prompt) for r in work.requests],
    )
    ahead = {d: e.drafter.ahead for (d, _), e in work.engines.items()}
    logs = {
        d: oracle.encode_reach(d, temperature, starts, q.reach, ahead[d])
        for d, q in quality.items()
    }
    rows, bounds = list[ResultRow](), list[ResultRow]()
    for machine, (texts, costs) in runs.items():
        own, name = (
            {d: replace(q, cost_ratio=costs[d].ratio) for d, q in quality.items()},
            machine_field(machine),
        )
        rows += [
            name | row | by_category(row, categories)
            for row in result_rows.result_rows(texts, work.seed, own, costs)
        ]
        bounds += [name | oracle.row(logs[d], costs[d], work.seed, own[d].overlap) for d in own]
    simulated = any(
        isinstance(c, CostTable) and c.is_simulated
        for _, costs in runs.values()
        for c in costs.values()
    )
    if simulated or work.recordings is not None:
        rows = list(
            map(result_rows.without_clock_figures, rows)
        )  # figures by this machine's clock are not compared with simulated ones
    reads = {
        d: asdict(count_draft_reads(work.target, e.drafter)) for (d, _), e in work.engines.items()
    }
    told = {
        **about,
        "drafting": reads,
        "costs": {d: asdict(c) for d, c in (work.read or prices).items()},
    }
    if work.read:
        told["counted_by"] = {d: asdict(c) for d, c in prices.items()}
    if any(runs):
        told["machines"] = {m: dict(Machine.load(m).table.about) for m in runs}
    return {
        "format": result_rows.FORMAT,
        "simulated": simulated,
        "provenance": told,
        "rows": rows,
        "oracle": bounds,
        "categories": list(categories),
        "texts": texts_of(work, done),
    }


def texts_of(
    work: Bench, done: Sequence[Mapping[Cell, PromptResult]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the first `STORED_TEXTS` texts of plain decoding, as lists by temperature.

    An entry has the prompt's text (`prompt`) and the text of each new token (`pieces`).
    """
    tokenizer = work.target.tokenizer
    spelt = Spellings(tokenizer)
    return {
        f"{cell.temperature:g}": [
            {
                "prompt": tokenizer.decode(list(request.prompt)),
                "pieces": [
                    mark_line_ends(spelt.data(token).decode(errors="replace"))
                    for token in written[cell].tokens
                ],
            }
            for request, written in zip(
                work.requests[:STORED_TEXTS], done[:STORED_TEXTS], strict=True
            )
        ]
        for cell in work.cells
        if cell.plain
    }


def machine_field(machine: str) -> ResultRow:
    """Return the field `machine` for the rows of a machine; no field for this machine."""
    return {"machine": machine} if machine else {}


def by_category(row: ResultRow, categories: Sequence[str]) -> ResultRow:
    """Return the acceptance length τ by category; empty if there is only one category."""
    accepted, steps = (np.array(row["per_prompt"][k]) for k in ("accepted", "steps"))
    names = np.array(categories)
    if len(set(categories)) < 2:
        return {}
    return {
        "τ": {
            c: 1 + float(accepted[names == c].sum() / max(steps[names == c].sum(), 1))
            for c in dict.fromkeys(categories)
        }
    }
