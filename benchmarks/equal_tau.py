"""How many nodes does a policy need for the τ that another reaches? From a saved bench of both at several settings.

    python benchmarks/equal_tau.py RESULT.json --policy c2t:beta --beside eagle2:nodes

Policies are named by how their specs begin. For every row of the first, the nodes a step that the
second needs for the same τ are interpolated on its curve, between the two settings around it,
geometrically (τ grows about with their logarithm); where the curve does not reach, there is no
figure. Intervals: 95 %, bootstrap over prompts, the same ones for both.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftree.cli.terminal import table
from draftree.errors import UnknownName, UserError
from draftree.evaluation.report import read

Row = dict[str, Any]
DRAWS = 2000


def figures(row: Row, prompts: np.ndarray) -> tuple[float, float]:
    """Return τ and nodes per step over some prompts."""
    each = row["per_prompt"]
    steps, accepted, nodes = (
        np.array(each[k], np.float64)[prompts].sum() for k in ("steps", "accepted", "nodes")
    )
    return float(accepted / steps + 1), float(nodes / steps)


def share(row: Row, curve: Sequence[Row], prompts: np.ndarray) -> float:
    """Return the row's nodes over those that the curve needs for its τ; NaN beyond its ends."""
    tau, nodes = figures(row, prompts)
    points = sorted(figures(r, prompts) for r in curve)
    if not points:
        return float("nan")
    at, needed = np.array(points).T
    return nodes / float(np.exp(np.interp(tau, at, np.log(needed), left=np.nan, right=np.nan)))


@dataclass(frozen=True)
class Share:
    """Store a row's nodes over those that a curve needs for its τ; NaN beyond the curve's ends.

    Attributes:
        whole: over all prompts.
        low: lower end of the 95 % interval.
        high: upper end of the interval.
        reached: share of bootstrap draws within the curve.
    """

    whole: float
    low: float
    high: float
    reached: float

    @classmethod
    def of(cls, row: Row, curve: Sequence[Row], drawn: np.random.Generator) -> "Share":
        """Return the share of a row."""
        n = len(row["per_prompt"]["steps"])
        spread = [share(row, curve, drawn.integers(0, n, n)) for _ in range(DRAWS)]
        reached = 1 - float(np.isnan(spread).mean())  # near the curve's ends some draws leave it
        low, high = np.nanquantile(spread, [0.025, 0.975]) if reached else (np.nan, np.nan)
        return cls(share(row, curve, np.arange(n)), float(low), float(high), reached)

    @property
    def inverse(self) -> "Share":
        """Return the nodes that the curve needs over the row's nodes."""
        return Share(1 / self.whole, 1 / self.high, 1 / self.low, self.reached)

    def __str__(self) -> str:
        if np.isnan(self.whole):
            return "beyond the curve"
        sure = f", {self.reached:.0%} of draws" if self.reached < 1 else ""
        return f"{self.whole:.2f} [{self.low:.2f}, {self.high:.2f}]{sure}"


def lines(
    rows: Sequence[Row], mine: Callable[[str], bool], theirs: Callable[[str], bool], seed: int
) -> list[dict[str, str]]:
    """Return a line for each setting of the policy, by drafter."""
    found = []
    drawn = np.random.default_rng(seed)
    for row in (r for r in rows if r["policy"] and mine(r["policy"])):
        same = lambda r, row=row: (
            (r["drafter"], r["temperature"]) == (row["drafter"], row["temperature"])
        )
        curve = [r for r in rows if r["policy"] and theirs(r["policy"]) and same(r)]
        tau, nodes = figures(row, np.arange(len(row["per_prompt"]["steps"])))
        found.append({"drafter": row["drafter"], "policy": row["policy"], "τ": f"{tau:.2f}", "nodes/step": f"{nodes:.1f}",
                      "nodes at equal τ, by the other's [95 %]": str(Share.of(row, curve, drawn))})  # fmt: skip
    return found


def main() -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--policy", required=True, help="how its specs begin")
    parser.add_argument(
        "--beside", required=True, help="how the specs of the other policy's curve begin"
    )
    parser.add_argument(
        "--with", dest="containing", default="", help="only specs of the curve that contain this"
    )
    parser.add_argument("--without", help="no specs of the curve that contain this")
    args = parser.parse_args()
    mine = lambda spec: spec.startswith(args.policy)
    left_out = lambda spec: args.without is not None and args.without in spec
    theirs = lambda spec: (
        spec.startswith(args.beside) and args.containing in spec and not left_out(spec)
    )
    try:
        rows = read(args.result)["rows"]
        for name, wanted in ((args.policy, mine), (args.beside, theirs)):
            if not any(r["policy"] and wanted(r["policy"]) for r in rows):
                raise UnknownName("policy", name, {r["policy"] for r in rows if r["policy"]})
    except UserError as error:
        print(f"equal_tau: {error}", file=sys.stderr)
        return 2
    title = f"nodes of {args.policy}… at the τ it reaches, by those of {args.beside}…"
    Console().print(table(title, lines(rows, mine, theirs, 0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
