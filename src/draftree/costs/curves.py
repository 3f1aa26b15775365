"""Cost curves: seconds of a draft step and of a target pass by number of tokens.

A cost depends on the device, the dtype, both models, how many tokens are fed, how many rows there
are and how long they are; on a GPU a pass over 16 tokens costs what one token costs, on a CPU it
may cost three times as much. Policies read the curves of the step at hand through `Costs`.

Shapes: W measured widths.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from typing_extensions import override

from draftree.costs.timings import StepTimes
from draftree.errors import UserError, shown
from draftree.kernels.tree_growth import between
from draftree.metrics import Work
from draftree.tree import Floats
from draftree.utils.files import Entries, read_object, write_text
from draftree.utils.validated_dataclass import Part, knob, real, whole

WIDEST = 2**53
"""Tokens: beyond it, floats do not hold all whole numbers."""
ROWS_AT_MOST = 64
"""Largest measured batch size; larger batches get the costs of this one."""

Curve = tuple[Floats, Floats]
"""[W] widths in order, and [W] seconds."""


@dataclass(frozen=True)
class Costs(Part):
    """Seconds by number of tokens for each sequence, linear between measured widths and beyond.

    Attributes:
        draft: {f: sₐ(f)}, a draft step over f frontier nodes of each sequence, after another draft
            step.
        target: {n: sₜ(n)}, a target pass over n = 1 + γ tokens of each sequence.
        commit: seconds of the drafter's commit after a step.
        context: committed tokens of each sequence.
        rows: number of sequences.
        find: seconds in which a fused drafter searches the retrieval hits of one layer.
        catch_up: seconds of postponed commits, and of what the first draft step after a target pass
            takes more than a later one, in a step that drafts.

    Raises:
        UserError: a width, a figure, the context or the number of sequences is out of range.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]
    commit: float = knob(0.0, least=0)
    context: int = knob(0, least=0)
    rows: int = knob(1, least=1)
    find: float = knob(0.0, least=0)
    catch_up: float = knob(0.0, least=0)

    @override
    def __post_init__(self) -> None:
        for name, curve in (("draft", self.draft), ("target", self.target)):
            fine = isinstance(curve, Mapping) and all(
                whole(w, 1, WIDEST) and real(s) and s > 0 for w, s in curve.items()
            )
            if not fine or not curve:
                raise UserError(
                    f"costs: '{name}' is {shown(curve)}, allowed are widths from 1 on with seconds above 0"
                )
        super().__post_init__()

    @cached_property
    def ratio(self) -> float:
        """Return sₐ/sₜ for one token each.

        EDD + PCT, section 4.1, gives 1.1 ms / 29.8 ms for a 7B.
        """
        return self.draft_seconds(1) / self.token

    @cached_property
    def token(self) -> float:
        """Return sₜ(1), the seconds of plain decoding for one token of each sequence."""
        return self.target_seconds(1)

    def draft_seconds(self, tokens: float) -> float:
        """Return sₐ for that many tokens of each sequence; 0 for none."""
        return float(self.drafts(np.array([tokens]))[0])

    def target_seconds(self, tokens: float) -> float:
        """Return sₜ for that many tokens of each sequence, the root included."""
        return float(self.targets(np.array([tokens]))[0])

    def drafts(self, tokens: Floats) -> Floats:
        """Return sₐ for several numbers of tokens."""
        return np.where(tokens > 0, _between(*self.draft_curve, tokens), 0.0)

    def targets(self, tokens: Floats) -> Floats:
        """Return sₜ for several numbers of tokens."""
        return _between(*self.target_curve, tokens)

    def step(self, work: Work) -> float:
        """Return the estimated seconds of one step: draft steps, target pass and commit."""
        return self.drafting(work) + self.target_seconds(work.fed / work.rows)

    def drafting(self, work: Work) -> float:
        """Return the drafter's part of a step's seconds."""
        drafted = self.drafts(np.array(work.frontiers, np.float64) / work.rows).sum()
        return (
            float(drafted)
            + work.finds * self.find
            + self.commit
            + (self.catch_up if work.frontiers else 0.0)
        )

    def beside(self, tokens: float) -> "Costs":
        """Return the costs of a step whose pass also reads prompt tokens, `tokens` of each row.

        The time of these tokens is charged to the prompts.

        A pass over the roots costs what it does without, and each node what it adds to the wider
        pass.
        """
        widths, least = np.array(sorted(self.target), np.float64), min(self.target.values())
        more = self.targets(widths + tokens) - self.target_seconds(1 + tokens)
        seconds = np.maximum(self.token + more, least)
        return replace(self, target=dict(zip(map(int, widths), seconds.tolist(), strict=True)))

    def at(self, context: int, rows: int) -> "Costs":
        """Return these costs, whatever the context and batch; a `CostTable` selects by them."""
        return self

    def observe(self, step: StepTimes) -> None:
        """Ignore a step's timings: these costs are fixed."""

    @cached_property
    def draft_curve(self) -> Curve:
        """Return sₐ at the measured widths; linear between them."""
        return _sorted(self.draft)

    @cached_property
    def target_curve(self) -> Curve:
        """Return sₜ at the measured widths; linear between them."""
        return _sorted(self.target)


class CostSource(Protocol):
    """Provide the costs of a step: fixed costs, a table, or costs learnt from steps that run."""

    def at(self, context: int, rows: int) -> Costs:
        """Return the costs of a step.

        Args:
            context: tokens in the KV cache of the longest sequence.
            rows: the number of sequences.
        """

    def observe(self, step: StepTimes) -> None:
        """Learn from the timings of a step that has run; fixed costs ignore them."""


@dataclass(frozen=True)
class CostTable:
    """The costs of one pairing on one machine, for several context lengths and numbers of rows.

    Attributes:
        entries: one for each context and number of rows, in any order.
        about: what was measured, where and when; the date is that of the newest entry.

    Raises:
        UserError: there are no entries.
    """

    entries: tuple[Costs, ...]
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a table without entries, and entries that do not fit together."""
        if not self.entries:
            raise UserError("costs: there are no entries, at least one is needed")

    @property
    def simulated(self) -> bool:
        """Return whether the costs were published or derived elsewhere.

        Results that are computed from them are then simulated.
        """
        return "kind" in self.about

    @property
    def ratio(self) -> float:
        """Return sₐ/sₜ for one token each, of the fewest rows and the shortest context."""
        return min(self.entries, key=lambda e: (e.rows, e.context)).ratio

    def at(self, context: int, rows: int) -> Costs:
        """Return the costs of a step.

        They are those of the nearest measured number of sequences, linear between measured
        contexts. Outside the measured contexts they are those of the nearest one.
        """
        if (context, rows) not in self._found:  # needed at every step, so cached
            self._found[context, rows] = self._between(context, rows)
        return self._found[context, rows]

    def observe(self, step: StepTimes) -> None:
        """Ignore a step's timings: these costs are fixed."""

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
            else _mixed(before, entries[after], share)
        )

    @cached_property
    def _found(self) -> dict[tuple[int, int], Costs]:
        return {}

    def has(self, rows: int) -> bool:
        """Return whether the `bracket` of that many sequences was measured."""
        return bracket(rows) in self.by_rows

    @cached_property
    def by_rows(self) -> dict[int, list[Costs]]:
        """Return the entries by number of rows, shortest context first."""
        found: dict[int, list[Costs]] = {}
        for entry in sorted(self.entries, key=lambda e: (e.rows, e.context)):
            found.setdefault(entry.rows, []).append(entry)
        return found

    def save(self, path: Path) -> None:
        """Write the curves as JSON, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote, or a file by hand.

        The least is `{"entries": [{"draft": {"1": 0.001}, "target": {"1": 0.03}}]}`: one row, any
        context, a commit that costs nothing.

        Raises:
            UserError: the file is not one of these.
        """
        path, what = Path(path), "a file of costs as `draftree costs --out` writes it"
        file = Entries(read_object(path, what), path)
        entries = [
            Entries(e, f"entry {i}")
            for i, e in enumerate(file.get("entries", list[dict[str, Any]]))
        ]
        try:
            return cls(
                tuple(_read(entry) for entry in entries),
                {k: str(v) for k, v in file.get("about", dict, {}).items()},
            )
        except UserError as error:
            raise UserError(f"'{path}' is not {what}: {error}") from error


UNIT = Costs({1: 1.0}, {1: 1.0})
"""Costs for policies that do not read any."""


def counted(costs: Costs | CostTable, work: Iterable[Work]) -> tuple[float, float]:
    """Return the estimated seconds of some steps: all of them, and the drafter's part."""
    work = list(work)
    drafting = sum(costs.at(w.context, w.rows).drafting(w) for w in work)
    return drafting + counted_plain(costs, work), drafting


def counted_plain(costs: Costs | CostTable, work: Iterable[Work]) -> float:
    """Return the estimated seconds of the target's passes alone, as in plain decoding."""
    return sum(costs.at(w.context, w.rows).target_seconds(w.fed / w.rows) for w in work)


def monotone(seconds: Sequence[float]) -> list[float]:
    """Return the nearest nondecreasing values by pooling adjacent violators.

    Neighbours that fall are replaced by their mean.
    """
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


def bracket(rows: int) -> int:
    """Return the batch size at which costs are measured: the next power of two, up to 64."""
    return min(1 << (rows - 1).bit_length(), ROWS_AT_MOST)


def _read(entry: Entries) -> Costs:
    draft, target = (
        {_width(w): s for w, s in entry.get(k, dict[str, float]).items()}
        for k in ("draft", "target")
    )
    commit, find, catch_up = (
        entry.get(name, float, 0.0) for name in ("commit", "find", "catch_up")
    )
    return Costs(
        draft,
        target,
        commit,
        entry.get("context", int, 0),
        entry.get("rows", int, 1),
        find,
        catch_up,
    )


def _width(text: str) -> int:
    """Return a width, which JSON can only name as text."""
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"a width is {shown(text)}, allowed is a whole number of at least 1")
    return int(text)


def _mixed(a: Costs, b: Costs, share: float) -> Costs:
    """Interpolate two entries, with weight `share` of the second; their widths may differ."""

    def between(one: Curve, other: Curve) -> dict[int, float]:
        widths = np.union1d(one[0], other[0])
        seconds = (1 - share) * _between(*one, widths) + share * _between(*other, widths)
        return dict(zip(widths.astype(int).tolist(), seconds.tolist(), strict=True))

    draft, target = between(a.draft_curve, b.draft_curve), between(a.target_curve, b.target_curve)
    context = round((1 - share) * a.context + share * b.context)
    each = (a.commit, b.commit), (a.find, b.find), (a.catch_up, b.catch_up)
    commit, find, catch_up = ((1 - share) * x + share * y for x, y in each)
    return Costs(draft, target, commit, context, a.rows, find, catch_up)


def _sorted(curve: Mapping[int, float]) -> Curve:
    widths = sorted(curve)
    return np.array(widths, np.float64), np.array([curve[w] for w in widths])


def _between(widths: Floats, seconds: Floats, tokens: Floats) -> Floats:
    """Interpolate linearly between the widths; the last slope continues."""
    return between(widths, seconds, np.asarray(tokens, np.float64))


def least(a: Costs, b: Costs) -> Costs:
    """Return the minimum of two measurements of the same costs, at the widths of the second.

    Other programs on the machine only add to a measurement.
    """
    return replace(
        b,
        draft={w: min(a.draft_seconds(w), seconds) for w, seconds in b.draft.items()},
        target={w: min(a.target_seconds(w), seconds) for w, seconds in b.target.items()},
        commit=min(a.commit, b.commit),
        find=min(a.find, b.find),
        catch_up=min(a.catch_up, b.catch_up),
    )


def gains_of_chains(lengths: Sequence[float], costs: Costs) -> list[float]:
    """Return the speed-ups of greedy chains of 1, 2, … tokens, from their τ and step costs."""
    steps = [
        costs.step(Work((1,) * n, 1 + n, 1, costs.context)) for n in range(1, len(lengths) + 1)
    ]
    return [tau * costs.token / step for tau, step in zip(lengths, steps, strict=True)]
