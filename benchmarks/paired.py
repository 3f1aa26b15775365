"""Is one policy, or one drafter, faster than the others? Paired ratios of seconds per token, from a saved bench.

    python benchmarks/paired.py RESULT.json --policy yield [--by counted_seconds | seconds | steps]
    python benchmarks/paired.py RESULT.json --drafter edd --by steps

For each drafter and temperature the policy's seconds per token over every other policy's, or for each policy the drafter's over
every other drafter's, with a 95 % interval by a bootstrap over the prompts both wrote. Below 1 it is faster; it is called
slower, or faster, where all of the interval is. By `steps` it is target passes that are compared: 1 / τ, but for the prefill.
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
        by: `counted_seconds`, `seconds` on the clock, or `steps`.
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


def compared(result: dict[str, Any], of: str, name: str, by: str) -> Iterator[dict[str, str]]:
    """A line for each other row that differs from one of this name in nothing else, as text.

    Args:
        result: a saved one.
        of: `policy` or `drafter`.
        name: the spec of one of them.
        by: as for `paired`.
    """
    rows = [r for r in result["rows"] if r["policy"] is not None]
    chosen = [r for r in rows if r[of] == name]
    if not chosen:
        raise UnknownName(of, name, {r[of] for r in rows})
    same = lambda row: [row[k] for k in ("drafter", "policy", "temperature") if k != of]
    for mine in chosen:
        for other in rows:
            if other is not mine and same(other) == same(mine):
                found = paired(mine, other, by, result["provenance"].get("seed", 0))
                yield {
                    "with": mine["drafter" if of == "policy" else "policy"],
                    "T": f"{mine['temperature']:g}",
                    "beside": other[of],
                    f"{by.replace('_', ' ')} per token [95 %]": f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]",
                    "it is": verdict(found),
                }


def verdict(found: Paired) -> str:
    return "slower" if found.low > 1 else "faster" if found.high < 1 else "not told apart"


def main() -> int:
    """Prints the comparison; exit status 1 if the policy, or drafter, is slower than another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--policy", help="its spec as it was given to the bench")
    which.add_argument("--drafter", help="its spec, likewise")
    parser.add_argument("--by", choices=("counted_seconds", "seconds", "steps"), default="counted_seconds")
    args = parser.parse_args()
    of, name = ("policy", args.policy) if args.policy else ("drafter", args.drafter)
    try:
        lines = list(compared(read(args.result), of, name, args.by))
    except UserError as error:
        print(f"paired: {error}", file=sys.stderr)
        return 2
    if not lines:
        print(f"paired: '{args.result}' holds no other {of} to compare '{name}' with", file=sys.stderr)
        return 2
    Console().print(table(f"{name}, {args.by.replace('_', ' ')} per token over those of the others", lines))
    return int(any(line["it is"] == "slower" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
