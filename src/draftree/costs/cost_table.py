"""Cost curves: seconds of a draft step and of a target pass by number of tokens.

A cost depends on the device, the dtype, both models, how many tokens are fed, how many rows there
are and how long they are; on a GPU a pass over 16 tokens costs what one token costs, on a CPU it
may cost three times as much. Policies read the curves of the step at hand through `Costs`.

Shapes: W measured widths.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from typing_extensions import override

from draftree.costs.step_timings import StepTimes
from draftree.errors import UserError, format_value
from draftree.kernels.tree_growth import between
from draftree.metrics import Work
from draftree.tree import Floats
from draftree.utils.files import Entries, read_object, write_text
from draftree.utils.validated_dataclass import Part, is_finite, knob

MAX_WIDTH = 2**53
"""Largest number of tokens; beyond it, float64 does not represent all integers."""
MAX_SECONDS = sys.float_info.max
"""Largest cost in seconds."""
MAX_BATCH_SIZE = 64
"""Largest measured batch size; larger batches get the costs of this one."""

CONSTANTS = ("commit", "find", "catch_up", "overhead")
"""Names of the costs that do not depend on the number of tokens."""

SecondsByWidth = Mapping[int, float] | Mapping[float, float]
Curve = tuple[Floats, Floats]
"""A curve: [W] numbers of tokens in ascending order, and [W] seconds."""


def _is_in(value: Any, most: float) -> bool:
    """Return whether a value is a number above 0 and at most `most`; True is not a number here.

    Curves are made often, so the two common types are recognised first.
    """
    return (type(value) in (float, int) or is_finite(value)) and 0 < value <= most


@dataclass(frozen=True)
class Costs(Part):
    """Seconds by number of tokens of each sequence, interpolated linearly between measured widths.

    Beyond the last width the last slope continues. Widths of a batch may be fractions: nine tokens
    of eight sequences are 1.125 tokens of each.

    Attributes:
        draft: {f: sₐ(f)}, seconds of a draft step over f frontier nodes of each sequence, after
            another draft step.
        target: {n: sₜ(n)}, seconds of a target pass over n tokens of each sequence, which are the
            root and n − 1 drafted nodes.
        commit: seconds of the drafter's commit after a step.
        context: number of committed tokens of each sequence.
        rows: number of sequences.
        find: seconds in which a fused drafter retrieves candidates for one layer of the tree.
        catch_up: extra seconds of the first draft step after a target pass, including postponed
            commits.
        overhead: seconds that the policy and the loop take in a step in which the policy does not
            pause, beside passes, searches and the commit.

    Raises:
        UserError: a width, a figure, the context or the number of sequences is out of range.
    """

    draft: SecondsByWidth
    target: SecondsByWidth
    commit: float = knob(0.0, least=0)
    context: int = knob(0, least=0)
    rows: int = knob(1, least=1)
    find: float = knob(0.0, least=0)
    catch_up: float = knob(0.0, least=0)
    overhead: float = knob(0.0, least=0)

    @override
    def __post_init__(self) -> None:
        for name, curve in (("draft", self.draft), ("target", self.target)):
            fine = isinstance(curve, Mapping) and all(
                _is_in(w, MAX_WIDTH) and _is_in(s, MAX_SECONDS) for w, s in curve.items()
            )
            if not fine or not curve:
                raise UserError(
                    f"costs: '{name}' is {format_value(curve)}, "
                    "allowed are widths and seconds above 0"
                )
        super().__post_init__()

    @cached_property
    def ratio(self) -> float:
        """Return the seconds of a draft step relative to a target pass, for one token each.

        EDD + PCT, section 4.1, gives 1.1 ms / 29.8 ms for a 7B model.
        """
        return self.draft_seconds(1) / self.token

    @cached_property
    def token(self) -> float:
        """Return the seconds of a plain decoding pass over one token of each sequence."""
        return self.target_seconds(1)

    def draft_seconds(self, tokens: float) -> float:
        """Return the seconds of a draft step over `tokens` tokens of each sequence; 0 for none."""
        return float(self.drafts(np.array([tokens]))[0])

    def target_seconds(self, tokens: float) -> float:
        """Return the seconds of a target pass over `tokens` tokens of each sequence.

        The root is one of them.
        """
        return float(self.targets(np.array([tokens]))[0])

    def drafts(self, tokens: Floats) -> Floats:
        """Return the seconds of draft steps for several numbers of tokens of each sequence."""
        return np.where(tokens > 0, _interpolate(*self.draft_curve, tokens), 0.0)

    def targets(self, tokens: Floats) -> Floats:
        """Return the seconds of a target pass for each number of tokens of a sequence."""
        return _interpolate(*self.target_curve, tokens)

    def step(self, work: Work) -> float:
        """Return the estimated seconds of one step, with all work of the drafter and the policy."""
        return self.drafting(work) + self.target_seconds(work.fed / work.rows)

    def drafting(self, work: Work) -> float:
        """Return the estimated seconds of a step without its target pass; 0 if no drafter ran."""
        if work.paused:
            return 0.0
        drafted = self.drafts(np.array(work.frontiers, np.float64) / work.rows).sum()
        return (
            float(drafted)
            + work.finds * self.find
            + self.commit
            + self.overhead
            + (self.catch_up if work.frontiers else 0.0)
        )

    def beside(self, tokens: float) -> "Costs":
        """Return the costs of a step whose pass also reads prompt tokens.

        Each sequence reads `tokens` of them. Their time is charged to the prompts. A pass over the
        roots therefore costs the same as without prompt tokens. Each further node costs the seconds
        that it adds to the wider pass.
        """
        widths, least = np.array(sorted(self.target), np.float64), min(self.target.values())
        more = self.targets(widths + tokens) - self.target_seconds(1 + tokens)
        seconds = np.maximum(self.token + more, least)
        return replace(self, target=dict(zip(widths.tolist(), seconds.tolist(), strict=True)))

    def at(self, context: int, rows: int) -> "Costs":
        """Return the object itself; costs by context and batch are selected by a `CostTable`."""
        return self

    def needs_plain_step(self) -> bool:
        """Return False, because these costs are fixed."""
        return False

    def observe(self, step: StepTimes) -> None:
        """Ignore a step's timings, because these costs are fixed."""

    @cached_property
    def draft_curve(self) -> Curve:
        """Return the cost curve of draft steps, which is linear between its points."""
        return _curve_arrays(self.draft)

    @cached_property
    def target_curve(self) -> Curve:
        """Return the cost curve of target passes, which is linear between its points."""
        return _curve_arrays(self.target)


class CostSource(Protocol):
    """Provide the costs of a step: fixed costs, a table, or costs learnt from earlier steps."""

    def at(self, context: int, rows: int) -> Costs:
        """Return the costs of a step.

        Args:
            context: number of tokens in the KV cache of the longest sequence.
            rows: the number of sequences.
        """

    def needs_plain_step(self) -> bool:
        """Return whether the next step is to run without drafts, so that its pass is timed.

        Fixed costs never need such a step.
        """

    def observe(self, step: StepTimes) -> None:
        """Learn from the timings of a finished step; fixed costs ignore them."""


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
        """Refuse a table without entries or with incompatible entries."""
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


UNIT_COSTS = Costs({1: 1.0}, {1: 1.0})
"""Constant costs for policies that do not use costs."""


def estimate_seconds(costs: Costs | CostTable, work: Iterable[Work]) -> tuple[float, float]:
    """Return the estimated seconds of several steps, and how many of them drafting takes."""
    work = list(work)
    drafting = sum(costs.at(w.context, w.rows).drafting(w) for w in work)
    return drafting + estimate_target_seconds(costs, work), drafting


def estimate_target_seconds(costs: Costs | CostTable, work: Iterable[Work]) -> float:
    """Return the estimated seconds of the target's passes of some steps, without any drafting."""
    return sum(costs.at(w.context, w.rows).target_seconds(w.fed / w.rows) for w in work)


def monotone(seconds: Sequence[float]) -> list[float]:
    """Return the nearest nondecreasing values, by the pool-adjacent-violators algorithm.

    Falling neighbours are replaced by their mean.
    """
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


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
        seconds = (1 - share) * _interpolate(*one, widths) + share * _interpolate(*other, widths)
        return dict(zip(widths.tolist(), seconds.tolist(), strict=True))

    draft, target = between(a.draft_curve, b.draft_curve), between(a.target_curve, b.target_curve)
    context = round((1 - share) * a.context + share * b.context)
    constants = {n: (1 - share) * getattr(a, n) + share * getattr(b, n) for n in CONSTANTS}
    return Costs(draft, target, context=context, rows=a.rows, **constants)


def _curve_arrays(curve: SecondsByWidth) -> Curve:
    points = sorted(curve.items())
    return np.array([w for w, _ in points], np.float64), np.array([s for _, s in points])


def _interpolate(widths: Floats, seconds: Floats, tokens: Floats) -> Floats:
    """Interpolate linearly between widths; beyond them the last slope continues."""
    return between(widths, seconds, np.asarray(tokens, np.float64))
