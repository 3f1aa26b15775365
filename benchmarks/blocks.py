"""Is yield over a drafter of blocks beaten by DDTree at a fixed budget? In counted time, here and on all shipped machines.

    python benchmarks/blocks.py blocks --drafter my-dflash --target smollm2 --suite tasks.jsonl --recording recording

What stands behind the name of the results goes to `draftree replay` (`--drafter` may be repeated).
It runs twice over one recording: counted by the costs of this machine (blocks.json), and by those
of the shipped ones (blocks_machines.json; these figures are simulated). Then paired ratios of
seconds per token are printed as by benchmarks/paired.py. Exit status 1 where some budget is faster
than yield.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from draftree.cli.terminal import table
from draftree.evaluation.result_rows import read_result
from draftree.evaluation.roofline import MACHINES_FOLDER
from paired import lines

BUDGETS = (8, 16, 32, 64, 128)


def replayed(out: Path, given: list[str]) -> int:
    """Run `draftree replay` of `yield` and all budgets; return its exit status."""
    policies = ["yield", *(f"ddtree:nodes={n}" for n in BUDGETS)]
    asked = [word for policy in policies for word in ("--policy", policy)]
    return subprocess.run(
        [sys.executable, "-m", "draftree", "replay", *given, *asked, "--out", str(out)], check=False
    ).returncode


def main() -> int:
    """Replay, print the comparisons, and return the exit status.

    It is 1 if `yield` is slower somewhere, and 2 if something cannot be replayed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="of the results")
    args, given = parser.parse_known_args()
    shipped = [
        word for file in sorted(MACHINES_FOLDER.glob("*.json")) for word in ("--machine", file.stem)
    ]
    slower = False
    for out, machines in (
        (Path(f"{args.name}.json"), []),
        (Path(f"{args.name}_machines.json"), shipped),
    ):
        if status := replayed(out, given + machines):
            return status
        found = lines(read_result(out), "policy", "yield", "counted_seconds")
        Console(width=140).print(
            table(
                f"{out}: yield over each budget, {'simulated' if machines else 'this machine'}",
                found,
            )
        )
        slower |= any(line["it is"] == "slower" for line in found)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
