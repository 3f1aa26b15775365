"""Measured costs by context length and batch size, and their file format."""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from draftree.costs.step_costs import CONSTANTS, Costs, interpolate
from draftree.costs.step_timings import StepTimes
from draftree.errors import UserError, format_value
from draftree.kernels.cost_curve import Curve
from draftree.metrics import Work
from draftree.utils.files import Entries, read_object, write_text

MAX_BATCH_SIZE = 64
"""Largest measured batch size; larger batches get the costs of this one."""


@dataclass(frozen=True)
class CostTable:
    """The costs of a target and drafter on one machine, by context length and number of sequences.

    Attributes:
        entries: one for each context and number of sequences, in any order.
        about: a description of the models, the machine and the date; the date is that of the newest
            entry.

    Raises:
        UserError: there are no entries.
    """

    entries: tuple[Costs, ...]
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a table without entries."""
        if not self.entries:
            raise UserError("costs: there are no entries, at least one is needed")

    @property
    def is_simulated(self) -> bool:
        """Return whether the costs come from a publication or were derived, not measured here.

        Results that are computed from such costs are simulated.
        """
        return "kind" in self.about

    @property
    def ratio(self) -> float:
        """Return the cost of a draft step relative to a target pass, for one token each.

        It is that of the fewest sequences and the shortest context.
        """
        return min(self.entries, key=lambda e: (e.rows, e.context)).ratio

    def at(self, context: int, rows: int) -> Costs:
        """Return the costs of a step.

        The entries of the nearest measured number of sequences are used. They are interpolated
        linearly between measured contexts. Outside of these contexts the nearest entry is used.
        """
        if (context, rows) not in self._costs_by_shape:  # needed at every step, so cached
            self._costs_by_shape[context, rows] = self._between(context, rows)
        return self._costs_by_shape[context, rows]

    def expected(self, context: int, rows: int) -> Costs:
        """Return the costs of a step, as `at` does."""
        return self.at(context, rows)

    def needs_plain_step(self) -> bool:
        """Return False, because these costs are fixed."""
        return False

    def observe(self, step: StepTimes) -> None:
        """Ignore a step's timings, because these costs are fixed."""

    def _between(self, context: int, rows: int) -> Costs:
        nearest = min(self.by_rows, key=lambda r: abs(math.log(r / rows)))
        entries = self.by_rows[nearest]
        after = next((i for i, e in enumerate(entries) if e.context >= context), len(entries) - 1)
        before = entries[max(after - 1, 0)]
        span = entries[after].context - before.context
        share = min(max((context - before.context) / span, 0.0), 1.0) if span else 1.0
        return (
            entries[after]
            if share == 1
            else before
            if share == 0
            else _interpolate_costs(before, entries[after], share)
        )

    @cached_property
    def _costs_by_shape(self) -> dict[tuple[int, int], Costs]:
        return {}

    @cached_property
    def by_rows(self) -> dict[int, list[Costs]]:
        """Return the entries by number of sequences, each list in ascending order of context."""
        found: dict[int, list[Costs]] = {}
        for entry in sorted(self.entries, key=lambda e: (e.rows, e.context)):
            found.setdefault(entry.rows, []).append(entry)
        return found

    def save(self, path: Path) -> None:
        """Write the table as JSON, atomically."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, or one written by hand.

        The smallest valid file is `{"entries": [{"draft": {"1": 0.001}, "target": {"1": 0.03}}]}`.
        It stands for one sequence, any context, and a commit without cost.

        Raises:
            UserError: the file is not a table of costs.
        """
        path, what = Path(path), "a file of costs as `draftree costs --out` writes it"
        file = Entries(read_object(path, what), path)
        entries = file.get("entries", list[dict[str, Any]])
        try:
            return cls.of(entries, file.get("about", dict, {}))
        except UserError as error:
            raise UserError(f"'{path}' is not {what}: {error}") from error

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> Self:
        """Return the table that `asdict` turned into these JSON values.

        Raises:
            UserError: an entry has wrong values.
        """
        read = tuple(_parse_costs(Entries(e, f"entry {i}")) for i, e in enumerate(entries))
        return cls(read, {k: str(v) for k, v in about.items()})


def estimate_seconds(costs: Costs | CostTable, work: Iterable[Work]) -> tuple[float, float]:
    """Return the estimated seconds of several steps, and how many of them drafting takes."""
    work = list(work)
    drafting = sum(costs.at(w.context, w.rows).drafting(w) for w in work)
    return drafting + estimate_target_seconds(costs, work), drafting


def estimate_target_seconds(costs: Costs | CostTable, work: Iterable[Work]) -> float:
    """Return the estimated seconds of the target's passes of some steps, without any drafting."""
    return sum(costs.at(w.context, w.rows).target_seconds(w.fed / w.rows) for w in work)


def round_up_batch_size(rows: int) -> int:
    """Return the batch size whose costs stand for a number of sequences.

    The batch size is the next power of two, at most 64.
    """
    return min(1 << (rows - 1).bit_length(), MAX_BATCH_SIZE)


def _parse_costs(entry: Entries) -> Costs:
    draft, target = (
        {_width(w): s for w, s in entry.get(k, dict[str, float]).items()}
        for k in ("draft", "target")
    )
    constants = {name: entry.get(name, float, 0.0) for name in CONSTANTS}
    context, rows = entry.get("context", int, 0), entry.get("rows", int, 1)
    return Costs(draft, target, context=context, rows=rows, **constants)


def _width(text: str) -> float:
    """Return a width as a number; JSON stores it as text."""
    with suppress(ValueError):
        width = float(text)
        return int(width) if width.is_integer() else width
    raise UserError(f"a width is {format_value(text)}, allowed is a number above 0")


def _interpolate_costs(a: Costs, b: Costs, share: float) -> Costs:
    """Interpolate between two entries, with weight `share` of the second.

    The entries may have different widths.
    """

    def between(one: Curve, other: Curve) -> dict[float, float]:
        widths = np.union1d(one[0], other[0])
        seconds = (1 - share) * interpolate(*one, widths) + share * interpolate(*other, widths)
        return dict(zip(widths.tolist(), seconds.tolist(), strict=True))

    draft, target = between(a.draft_curve, b.draft_curve), between(a.target_curve, b.target_curve)
    context = round((1 - share) * a.context + share * b.context)
    constants = {n: (1 - share) * getattr(a, n) + share * getattr(b, n) for n in CONSTANTS}
    return Costs(draft, target, context=context, rows=a.rows, **constants)
