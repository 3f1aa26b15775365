"""Speed-ups of chains that measured costs and acceptance lengths allow."""

from collections.abc import Sequence
from dataclasses import replace

from draftree.costs.step_costs import CONSTANTS, Costs
from draftree.metrics import Work


def gains_of_chains(lengths: Sequence[float], costs: Costs) -> list[float]:
    """Return the speed-ups of greedy chains of 1, 2, … tokens, from their acceptance lengths."""
    steps = [
        costs.step(Work((1,) * n, 1 + n, 1, costs.context)) for n in range(1, len(lengths) + 1)
    ]
    return [tau * costs.token / step for tau, step in zip(lengths, steps, strict=True)]


def take_minimum(a: Costs, b: Costs) -> Costs:
    """Return the minimum of two measurements of the same costs, at the second one's widths.

    Other programs on the machine can only increase a measurement.
    """
    return replace(
        b,
        draft={w: min(a.draft_seconds(w), seconds) for w, seconds in b.draft.items()},
        target={w: min(a.target_seconds(w), seconds) for w, seconds in b.target.items()},
        **{name: min(getattr(a, name), getattr(b, name)) for name in CONSTANTS},
    )
