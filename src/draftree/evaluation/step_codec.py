"""Run-length coding of the token counts of each step, stored in results for repricing.

Texts are written one at a time, so a step is of one row: it feeds the target its root, its nodes
and its probes.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, groupby, islice
from typing import Any

import numpy as np

from draftree.errors import UserError
from draftree.metrics import Stats, Step, Work
from draftree.utils.files import Entries

Runs = list[int]
"""Run-length encoding of a column of numbers: value, count, value, count, …"""
WorkLog = dict[str, Any]
"""Encoded work of all steps, by name. `shapes` lists the distinct sequences of frontier sizes that
occur in a step. `steps` [P] is the number of steps for each prompt. The other entries are columns
over all steps in order, each encoded as `Runs`: `shape` (index into `shapes`), `fed` (tokens in the
target pass), `context` (increase of the context since the previous step), `accepted`, `depth`,
`finds`, and `paused` (0 or 1). Older results do not have the last two."""
REQUIRED_COLUMNS = ("shape", "fed", "context", "accepted", "depth")
OPTIONAL_COLUMNS = ("finds", "paused")
"""Columns that older results do not have, and that are zeros then."""


def encode_runs(values: Sequence[int]) -> Runs:
    """Return the run-length encoding of a column."""
    return list(chain.from_iterable((value, len(list(same))) for value, same in groupby(values)))


def decode_runs(coded: Runs, length: int, where: str) -> list[int]:
    """Decode a run-length encoding, and return the column.

    Args:
        coded: pairs of a value and its count.
        length: expected length of the column. It is checked before memory for the column is
            allocated.
        where: origin of the column, for error messages.

    Raises:
        UserError: `coded` does not encode a column of this length.
    """
    if len(coded) % 2 or any(count < 1 for count in coded[1::2]):
        raise UserError(
            f"{where}: a column has {len(coded)} numbers, allowed are pairs of a value and a count"
        )
    if sum(coded[1::2]) != length:
        raise UserError(f"{where} is not a log of steps: its columns do not match each other")
    return [
        value for value, count in zip(coded[::2], coded[1::2], strict=True) for _ in range(count)
    ]


def encode(prompts: Sequence[Stats]) -> WorkLog:
    """Encode the steps of each prompt and their work, given one run of each text."""
    work, steps = [w for s in prompts for w in s.work], [step for s in prompts for step in s.steps]
    shapes = list(dict.fromkeys(w.frontiers for w in work))
    columns = (
        [shapes.index(w.frontiers) for w in work],
        [w.fed for w in work],
        np.diff([w.context for w in work], prepend=0).tolist(),
        [step.accepted for step in steps],
        [step.depth for step in steps],
        [w.finds for w in work],
        [int(w.paused) for w in work],
    )
    counts = {"shapes": [list(shape) for shape in shapes], "steps": [len(s.work) for s in prompts]}
    names = (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS)
    return counts | {name: encode_runs(column) for name, column in zip(names, columns, strict=True)}


def decode_steps(log: WorkLog, where: str) -> list[tuple[list[Step], list[Work]]]:
    """Decode a log, and return the steps and their work, prompt by prompt.

    Raises:
        UserError: `log` was not made by `encode`. The message begins with `where`.
    """
    entries = Entries(log, where)
    shapes = [tuple(shape) for shape in entries.get("shapes", list[list[int]])]
    counts = entries.get("steps", list[int], least=0)
    columns = [
        entries.get(name, list[int], least=None if name == "context" else 0)
        for name in REQUIRED_COLUMNS
    ]
    zeros = [0, sum(counts)] if sum(counts) else []
    columns += [entries.get(name, list[int], zeros) for name in OPTIONAL_COLUMNS]
    shape, fed, context, accepted, depth, finds, paused = (
        decode_runs(column, sum(counts), where) for column in columns
    )
    try:
        steps = [Step(a, f - 1, d) for a, f, d in zip(accepted, fed, depth, strict=True)]
        work = [
            Work(shapes[s], f, 1, c, n, bool(p))
            for s, f, c, n, p in zip(shape, fed, accumulate(context), finds, paused, strict=True)
        ]
        several = iter(zip(steps, work, strict=True))
        found = [list(islice(several, count)) for count in counts]
        if next(several, None) is not None:
            raise ValueError
    except (IndexError, ValueError) as error:
        raise UserError(
            f"{where} is not a log of steps: its columns do not match each other"
        ) from error
    return [([step for step, _ in prompt], [w for _, w in prompt]) for prompt in found]
