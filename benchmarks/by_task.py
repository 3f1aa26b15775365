"""Write the table of speed-ups by task from several results of `draftree bench`.

    draftree bench smollm2 --suite tasks.jsonl --pair "suffix yield" --out one.json
    DRAFTREE_NATIVE=avx2 draftree bench smollm2 --suite tasks.jsonl --pair "suffix yield" \\
        --out two.json
    python benchmarks/by_task.py one.json two.json --out smollm2_by_task.json

Each result has one precision and one variant of the kernels.
A speed-up is the ratio of the seconds of plain decoding to those of a way, over the same prompts of
one run. Prompts are included. The mean is that of the tasks, each with the same weight.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftree.evaluation.result_rows import read_result, save

MATH = "math_reasoning"
NOT_NAMED = ("costs", "counted_by", "drafting", "command")
"""Entries of a result's provenance that differ between its runs, or that a table does not need."""


def speedups(
    row: dict[str, Any], plain: dict[str, Any], categories: Sequence[str]
) -> dict[str, float]:
    """Return the speed-up of a way by task."""
    ours, theirs = (np.asarray(each["per_prompt"]["seconds"]) for each in (row, plain))
    tasks = np.asarray(categories)
    return {
        str(task): float(theirs[tasks == task].sum() / ours[tasks == task].sum())
        for task in dict.fromkeys(categories)
    }


def rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table for one result."""
    about, (plain, *_) = result["provenance"], result["rows"]
    for row in result["rows"]:
        tasks = speedups(row, plain, result["categories"])
        name = f"{row['drafter']} {row['policy']}"
        yield {
            "way": "plain decoding" if row is plain else name,
            "precision": about["target"]["dtype"],
            "kernels": about["hardware"]["kernels"],
            "questions": row["prompts"],
            "new tokens": about["max_new_tokens"],
            "tokens/s": round(row["tokens_per_second"], 1),
            "τ": round(row["acceptance_length"], 2),
            "mathematics": round(tasks[MATH], 2) if MATH in tasks else None,
            "mean of six tasks": round(float(np.mean(list(tasks.values()))), 2),
            "lowest task": round(min(tasks.values()), 2),
            "tasks": {task: round(value, 3) for task, value in tasks.items()},
            "counted speed-up": None if row is plain else round(row["counted_speedup"], 2),
        }


def main() -> None:
    """Read the results and save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = [read_result(path) for path in asked.results]
    about = {k: v for k, v in found[0]["provenance"].items() if k not in NOT_NAMED}
    about["commands"] = [result["provenance"]["command"] for result in found]
    save(
        {"provenance": about, "rows": [row for result in found for row in rows(result)]}, asked.out
    )


if __name__ == "__main__":
    main()
