"""How many nodes does a policy need for the τ that another reaches? From saved benches of both at several settings.

    python benchmarks/equal_tau.py RESULT.json --policy c2t:beta --beside eagle2:nodes
    python benchmarks/equal_tau.py RESULT.json                     # every curve that it has
    python benchmarks/equal_tau.py benchmarks/results/*.json --out benchmarks/results/equal_tau.json

Policies are named by how their specs begin. For every row of the first, the nodes a step that the
second needs for the same τ are interpolated on its curve, between the two settings around it,
geometrically (τ grows about with their logarithm); where the curve does not reach, there is no
figure. Intervals: 95 %, bootstrap over prompts, the same ones for both.

Without the two options, settings of a policy that differ in one number are a curve, and every row
of another policy with the same drafter, temperature and acceptor stands beside it. Results without
figures of each prompt, of fewer than 8 prompts, or without a curve are named at the end.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftree.cli.terminal import table
from draftree.errors import UnknownName, UserError
from draftree.evaluation.bootstrap import MIN_PROMPTS
from draftree.evaluation.result_rows import read_result

Row = dict[str, Any]
DRAWS = 2000


def figures(row: Row, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return τ and nodes per step, each [draws].

    Args:
        row: of a saved result.
        weights: how often each draw has each prompt, [draws, prompts].
    """
    each = row["per_prompt"]
    steps, accepted, nodes = (
        weights @ np.array(each[k], np.float64) for k in ("steps", "accepted", "nodes")
    )
    return accepted / steps + 1, nodes / steps


def share(row: Row, curve: Sequence[Row], weights: np.ndarray) -> np.ndarray:
    """Return the row's nodes over those that the curve needs for its τ, [draws]; NaN beyond its ends."""
    tau, nodes = figures(row, weights)
    if not curve:
        return np.full_like(tau, np.nan)
    taus, needed = (
        np.array(values).T for values in zip(*(figures(r, weights) for r in curve), strict=True)
    )
    order = np.lexsort((needed, taus))
    at, logs = (np.take_along_axis(x, order, 1) for x in (taus, np.log(needed)))
    found = [
        np.interp(t, a, n, left=np.nan, right=np.nan) for t, a, n in zip(tau, at, logs, strict=True)
    ]
    return nodes / np.exp(found)


def drawn_weights(prompts: int, drawn: np.random.Generator) -> np.ndarray:
    """Return how often each of the bootstrap's draws has each prompt, [draws, prompts]."""
    chosen = drawn.integers(0, prompts, (DRAWS, prompts))
    return np.stack([np.bincount(draw, minlength=prompts) for draw in chosen]).astype(np.float64)


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
        spread = share(row, curve, drawn_weights(n, drawn))
        reached = 1 - float(np.isnan(spread).mean())  # near the curve's ends some draws leave it
        low, high = np.nanquantile(spread, [0.025, 0.975]) if reached else (np.nan, np.nan)
        whole = float(share(row, curve, np.ones((1, n)))[0])
        return cls(whole, float(low), float(high), reached)

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
        tau, nodes = figures(row, np.ones((1, len(row["per_prompt"]["steps"]))))
        found.append(
            {
                "drafter": row["drafter"],
                "policy": row["policy"],
                "τ": f"{tau[0]:.2f}",
                "nodes/step": f"{nodes[0]:.1f}",
                "nodes at equal τ, by the other's [95 %]": str(Share.of(row, curve, drawn)),
            }
        )
    return found


def options(policy: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of a policy's spec."""
    name, _, rest = policy.partition(":")
    return name, dict(part.partition("=")[::2] for part in rest.split(",") if part)


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each policy whose settings differ in one number, by spec with `…` for it."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        name, values = options(row["policy"])
        for varied, value in values.items():
            if value.replace(".", "", 1).isdigit():
                rest = [f"{k}={'…' if k == varied else v}" for k, v in sorted(values.items())]
                found.setdefault(f"{name}:{','.join(rest)}", []).append(row)
    several = {s: r for s, r in found.items() if len({row["policy"] for row in r}) > 1}
    return several


def every(result: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return every row of a result beside every curve of another policy, where the curve reaches its τ.

    Args:
        result: a saved one.
        name: of the result.

    Raises:
        UserError: it has no figures of each prompt, too few prompts, or no curve.
    """
    rows = [
        r
        for r in result.get("rows", ())
        if isinstance(r, dict) and {"policy", "per_prompt"} <= r.keys()
    ]
    rows = [
        r for r in rows if r["policy"] and r["per_prompt"].keys() >= {"steps", "nodes", "accepted"}
    ]
    if not rows:
        raise UserError("it has no figures of each prompt")
    if (prompts := len(rows[0]["per_prompt"]["steps"])) < MIN_PROMPTS:
        raise UserError(f"it has {prompts} prompts, a verdict needs {MIN_PROMPTS}")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        same = tuple(row.get(k) for k in ("machine", "drafter", "temperature", "rule"))
        groups.setdefault(same, []).append(row)
    found, known = [], 0
    for (machine, drafter, temperature, rule), several in groups.items():
        for spec, curve in curves(several).items():
            known += 1
            for row in several:
                if options(row["policy"])[0] == options(spec)[0]:
                    continue
                one = Share.of(row, curve, np.random.default_rng(0))
                if np.isnan(one.whole):
                    continue
                tau, nodes = figures(row, np.ones((1, prompts)))
                where = {"result": name, "drafter": drafter, "temperature": temperature}
                where |= {k: v for k, v in (("rule", rule), ("machine", machine)) if v}
                found.append(
                    where
                    | {
                        "policy": row["policy"],
                        "τ": round(float(tau[0]), 3),
                        "nodes/step": round(float(nodes[0]), 2),
                        "beside": spec,
                        "prompts": prompts,
                        "share": [round(x, 3) for x in (one.whole, one.low, one.high)],
                        "reached": round(one.reached, 3),
                    }
                )
    if not known:
        raise UserError("no policy of it has two settings that differ in one number")
    if not found:
        raise UserError("no τ of another policy lies on a curve of it")
    return found


def all_of(paths: Sequence[Path], out: Path | None) -> int:
    """Print or save the comparisons of several results; return the exit status."""
    found, without = list[dict[str, Any]](), dict[str, list[str]]()
    for path in (p for p in paths if out is None or p.resolve() != out.resolve()):
        try:
            found += every(read_result(path), path.stem)
        except UserError as error:
            without.setdefault(str(error), []).append(path.stem)
    if out is not None:
        about = {"draws": DRAWS, "left out": without}
        text = json.dumps({"provenance": about, "rows": found}, indent=1, ensure_ascii=False)
        out.write_text(text + "\n", "utf-8")
    else:
        shown = [
            {k: str(v) for k, v in row.items() if k not in ("share", "reached")}
            | {"nodes, by the curve's": "{:.2f} [{:.2f}, {:.2f}]".format(*row["share"])}
            for row in found
        ]
        Console().print(table("nodes at equal τ", shown))
    for why, names in without.items():
        print(f"left out, {why}: {', '.join(names)}", file=sys.stderr)
    return 0 if found else 2


def main() -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, nargs="+")
    parser.add_argument("--policy", help="how its specs begin")
    parser.add_argument("--beside", help="how the specs of the other policy's curve begin")
    parser.add_argument(
        "--with", dest="containing", default="", help="only specs of the curve that contain this"
    )
    parser.add_argument("--without", help="no specs of the curve that contain this")
    parser.add_argument("--out", type=Path, help="file for all comparisons, as JSON")
    args = parser.parse_args()
    if args.policy is None and args.beside is None:
        return all_of(args.result, args.out)
    if args.policy is None or args.beside is None or len(args.result) > 1 or args.out:
        parser.error("--policy and --beside go together, with one result and without --out")
    return between(args)


def between(args: argparse.Namespace) -> int:
    """Print the rows of one policy beside the curve of another; return the exit status."""
    mine = lambda spec: spec.startswith(args.policy)
    left_out = lambda spec: args.without is not None and args.without in spec
    theirs = lambda spec: (
        spec.startswith(args.beside) and args.containing in spec and not left_out(spec)
    )
    try:
        rows = read_result(args.result[0])["rows"]
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
