"""Costs of one step: seconds of a draft step and of a target pass, by number of tokens.

The costs depend on the device, the dtype, both models, the number of tokens, the number of
sequences and their length. On a GPU a pass over 16 tokens may cost what one token costs; on a CPU
it may cost three times as much.

Shapes: W measured widths.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from draftree.costs.step_timings import StepTimes
from draftree.errors import UserError, format_value
from draftree.kernels.cost_curve import Curve, between
from draftree.metrics import Work
from draftree.tree import Floats
from draftree.utils.validated_dataclass import Part, is_finite, knob

MAX_WIDTH = 2**53
"""Largest number of tokens; beyond it, float64 does not represent all integers."""
MAX_SECONDS = sys.float_info.max
"""Largest cost in seconds."""
CONSTANTS = ("commit", "find", "catch_up", "overhead")
"""Names of the costs that do not depend on the number of tokens."""
SecondsByWidth = Mapping[int, float] | Mapping[float, float]


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
        return np.where(tokens > 0, interpolate(*self.draft_curve, tokens), 0.0)

    def targets(self, tokens: Floats) -> Floats:
        """Return the seconds of a target pass for each number of tokens of a sequence."""
        return interpolate(*self.target_curve, tokens)

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

    def beside(self, tokens: float, plain: float) -> "Costs":
        """Return the costs of a step whose pass also reads prompt tokens.

        The time of the prompt tokens is charged to the prompts. Each node costs the seconds that it
        adds to the wider pass, but at least the average of the tokens before it: passes become
        dearer with their width, and few wide ones have been timed. The roots cost what their tokens
        would cost in the steps after the prompts have been read, because a token that is drafted
        now saves a part of such a step.

        Args:
            tokens: number of prompt tokens for each sequence.
            plain: seconds in which these steps generate a token of each sequence without drafts.
        """
        widths, least = np.array(sorted(self.target), np.float64), min(self.target.values())
        before = self.target_seconds(1 + tokens)
        average = (before - self.token) / tokens
        more = np.maximum(self.targets(widths + tokens) - before, (widths - 1) * average)
        seconds = np.maximum(plain + more, min(least, plain))
        return replace(self, target=dict(zip(widths.tolist(), seconds.tolist(), strict=True)))

    def at(self, context: int, rows: int) -> "Costs":
        """Return the object itself; costs by context and batch are selected by a `CostTable`."""
        return self

    def expected(self, context: int, rows: int) -> "Costs":
        """Return the object itself, as `at` does."""
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

    def expected(self, context: int, rows: int) -> Costs:
        """Return the expected costs of a step that explores nothing; arguments as for `at`."""

    def needs_plain_step(self) -> bool:
        """Return whether the next step is to run without drafts, so that its pass is timed.

        Fixed costs never need such a step.
        """

    def observe(self, step: StepTimes) -> None:
        """Learn from the timings of a finished step; fixed costs ignore them."""


UNIT_COSTS = Costs({1: 1.0}, {1: 1.0})
"""Constant costs for policies that do not use costs."""


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


def _curve_arrays(curve: SecondsByWidth) -> Curve:
    points = sorted(curve.items())
    return np.array([w for w, _ in points], np.float64), np.array([s for _, s in points])


def interpolate(widths: Floats, seconds: Floats, tokens: Floats) -> Floats:
    """Interpolate linearly between widths; beyond them the last slope continues."""
    return between(widths, seconds, np.asarray(tokens, np.float64))
