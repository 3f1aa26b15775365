"""Is one policy faster than the others? Paired ratios of seconds per token, from a saved bench.

    python benchmarks/paired.py RESULT.json --policy yield [--by counted_seconds | seconds]

For each drafter and temperature: the policy's seconds per token over every other policy's, with a 95 % interval by a
bootstrap over the prompts both wrote. Below 1 it is faster; it is called slower, or faster, where all of the interval is.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftree.cli.terminal import table
from draftree.errors import UnknownName, UserError
from draftree.evaluation.report import ResultRow, bounds, rate, read, samples
from draftree.tree import Floats, Ints


@dataclass(frozen=True)
class Paired:
    """One cell's seconds per token over another's, over the same prompts, and its 95 % interval; below 1 it is faster."""

    ratio: float
    low: float
    high: float


def paired(mine: ResultRow, other: ResultRow, by: str = "counted_seconds", seed: int = 0) -> Paired:
    """Compares two rows of one result by a paired bootstrap over prompts.

    Args:
        mine: a row.
        other: of the same prompts.
        by: `counted_seconds`, or `seconds` on the clock.
        seed: of the bootstrap.

    Raises:
        UserError: a row does not say what its prompts took, or they are not as many.
    """
    first, second = ((r.get("per_prompt") or {}) for r in (mine, other))
    if first.get(by) is None or second.get(by) is None:
        raise UserError(f"the result does not say '{by}' of each prompt, which comparing needs: measure it anew")
    if len(first[by]) != len(second[by]):
        raise UserError(f"rows of {len(first[by])} and {len(second[by])} prompts were given, allowed are rows of the same ones")
    tokens, seconds = (tuple(np.array(r[k], np.float64) for r in (first, second)) for k in ("tokens", by))

    def ratio(chosen: Ints) -> Floats:
        return rate(tokens[1], seconds[1], chosen) / rate(tokens[0], seconds[0], chosen)

    return Paired(float(ratio(np.arange(len(tokens[0])))), *bounds(ratio(samples(len(tokens[0]), seed))))


def compared(result: dict[str, Any], policy: str, by: str) -> Iterator[dict[str, str]]:
    """A line for each other policy of the same drafter and temperature, as text."""
    rows = [r for r in result["rows"] if r["policy"] is not None]
    chosen = [r for r in rows if r["policy"] == policy]
    if not chosen:
        raise UnknownName("policy", policy, {r["policy"] for r in rows})
    for mine in chosen:
        for other in rows:
            if other is not mine and (other["drafter"], other["temperature"]) == (mine["drafter"], mine["temperature"]):
                found = paired(mine, other, by, result["provenance"].get("seed", 0))
                yield {
                    "drafter": mine["drafter"],
                    "T": f"{mine['temperature']:g}",
                    "beside": other["policy"],
                    "seconds per token [95 %]": f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]",
                    "it is": verdict(found),
                }


def verdict(found: Paired) -> str:
    return "slower" if found.low > 1 else "faster" if found.high < 1 else "not told apart"


def main() -> int:
    """Prints the comparison; exit status 1 if the policy is slower than another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--policy", required=True, help="its spec as it was given to the bench")
    parser.add_argument("--by", choices=("counted_seconds", "seconds"), default="counted_seconds")
    args = parser.parse_args()
    try:
        lines = list(compared(read(args.result), args.policy, args.by))
    except UserError as error:
        print(f"paired: {error}", file=sys.stderr)
        return 2
    if not lines:
        print(f"paired: '{args.result}' holds no other policy to compare '{args.policy}' with", file=sys.stderr)
        return 2
    Console().print(table(f"{args.policy}, {args.by.replace('_', ' ')} per token over those of the others", lines))
    return int(any(line["it is"] == "slower" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
