"""Is one policy, or one drafter, faster than the others? Paired ratios of seconds per token, from a saved bench.

    python benchmarks/paired.py RESULT.json --policy yield [--by counted_seconds | seconds | steps]
    python benchmarks/paired.py RESULT.json --drafter edd --by steps

For each drafter and temperature the policy's seconds per token over every other policy's, or for
each policy the drafter's over every other drafter's, with a 95 % interval by a bootstrap over the
prompts both wrote. Below 1 it is faster; it is called slower, or faster, where p, adjusted by
Holm's method for all comparisons of the table, is below 5 %. By `steps` it is target passes that
are compared: 1 / τ, but for the prefill.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from draftree.cli.terminal import table
from draftree.errors import UnknownName, UserError
from draftree.evaluation.bootstrap import RowComparison, are_comparable, compare_pairs
from draftree.evaluation.result_rows import read_result


def comparable_pairs(result: Mapping[str, Any], of: str, name: str, by: str) -> list[RowComparison]:
    """Compare rows that differ only in their drafter, or only in their policy.

    The first row of each pair is the one whose drafter or policy is `name`.

    Args:
        result: a saved result.
        of: key in which the rows of a pair differ: `policy` or `drafter`.
        name: spec of the policy or drafter to compare with the others.
        by: the total to compare; see `paired_ratio`.
    """
    rows = [r for r in result["rows"] if r["policy"] is not None]
    if name not in (names := {r[of] for r in rows}):
        raise UnknownName(of, name, names)
    return compare_pairs(
        (
            (mine, other)
            for mine in rows
            if mine[of] == name
            for other in rows
            if other[of] != name and are_comparable(mine, other, of)
        ),
        by,
        result,
    )


def lines(result: dict[str, Any], of: str, name: str, by: str) -> list[dict[str, str]]:
    """Return the comparisons as text."""
    beside = "drafter" if of == "policy" else "policy"
    return [
        {
            "with": c.mine[beside],
            "T": f"{c.mine['temperature']:g}",
            **({"on": c.mine["machine"]} if "machine" in c.mine else {}),
            "beside": c.other[of],
            f"{by.replace('_', ' ')} per token [95 %]": f"{c.ratio.value:.3f} [{c.ratio.low:.3f}, {c.ratio.high:.3f}]",
            "p (Holm)": f"{c.ratio.p:.4f}",
            "it is": c.ratio.verdict,
        }
        for c in comparable_pairs(result, of, name, by)
    ]


def main() -> int:
    """Print the comparison; return 1 if the policy, or drafter, is slower than another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--policy", help="its spec as it was given to the bench")
    which.add_argument("--drafter", help="its spec, likewise")
    parser.add_argument(
        "--by", choices=("counted_seconds", "seconds", "steps"), default="counted_seconds"
    )
    args = parser.parse_args()
    of, name = ("policy", args.policy) if args.policy else ("drafter", args.drafter)
    try:
        found = lines(read_result(args.result), of, name, args.by)
    except UserError as error:
        print(f"paired: {error}", file=sys.stderr)
        return 2
    if not found:
        print(
            f"paired: '{args.result}' holds no other {of} to compare '{name}' with", file=sys.stderr
        )
        return 2
    Console().print(
        table(
            f"{name}, {args.by.replace('_', ' ')} per token over those of the others, {len(found)} comparisons",
            found,
        )
    )
    return int(any(line["it is"] == "slower" for line in found))


if __name__ == "__main__":
    sys.exit(main())
