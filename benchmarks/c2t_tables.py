"""C2T's tables 2 (other models), 3 (chains), 5 (the second cut), 7 (MTP) and its abstract's claim, asked of the demo.

    python benchmarks/c2t_tables.py TABLE --suite QUESTIONS.jsonl --work FOLDER [--limit 20] [--out RESULT.json]
    python benchmarks/c2t_tables.py 2 --data CHATS.jsonl …      # fine-tunes a classifier, which needs prompts

The paper's figures stand beside ours: τ with the target's own token, which the paper leaves out,
and γ as it counts it, all tokens of another benchmark. Where another model is asked for it is
another drafter here: the demo has one target. FOLDER is as in `c2t_ablations.py`, and the same
command goes on from it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from c2t_ablations import asked, bench, checked, draftree
from draftree.cli.terminal import table
from draftree.errors import UserError
from draftree.evaluation import result_rows
from draftree.evaluation.provenance import provenance
from draftree.target.target import Target
from draftree.tuning.c2t import PLAN
from draftree.weights import demo_folder
from equal_tau import Share


class Line(NamedTuple):
    """Describe a line of a table.

    Attributes:
        drafter: its spec.
        policy: its spec; TUNED is the shipped classifier fine-tuned for the drafter.
        paper: figures of the paper's line, if it has one: τ including the bonus token, and γ.
        beside: start of the specs of the policy whose curve gives the nodes at equal τ.
    """

    drafter: str
    policy: str
    paper: str = ""
    beside: str = ""


E2 = "eagle2:nodes={},depth=10,width=15"
WIDE = "c2t:layer_top=none,beta={}"
STOPPED = "c2t:chain=true,beta={}"
TUNED = "classifier=TUNED"
TABLES = {
    "abstract": (
        *(Line("eagle", E2.format(n)) for n in (10, 20, 40, 60, 80, 100)),
        *(Line("eagle", f"c2t:beta={beta}", "", "eagle2") for beta in (0.3, 0.5, 0.7)),
    ),
    "2": (
        *(Line("eagle", E2.format(n)) for n in (30, 60, 100)),
        Line("eagle", E2.format(160), "L2 7B, N = 290: 5.40, 2.6 M"),
        Line("eagle", WIDE.format(0.3), "L2 7B: 5.41, 2.0 M", "eagle2"),
        Line("eagle", WIDE.format(0.5), "", "eagle2"),
        *(Line("mtp", E2.format(n)) for n in (30, 60, 100)),
        Line("mtp", E2.format(160), "L2 13B, N = 300: 5.58, 2.6 M"),
        Line("mtp", WIDE.format(0.3), "L2 13B: 5.59, 1.9 M", "eagle2"),
        Line("mtp", WIDE.format(0.5), "", "eagle2"),
        *(Line("edd", E2.format(n)) for n in (30, 60, 100)),
        Line("edd", E2.format(160), "V 7B, N = 180: 6.25, 1.5 M"),
        Line("edd", WIDE.format(0.3), "V 7B, β = 0.35: 6.30, 1.3 M", "eagle2"),
        Line("edd", WIDE.format(0.5), "", "eagle2"),
        Line("edd", f"{WIDE.format(0.3)},{TUNED}", "V 7B, C2T*, β = 0.25: 6.32, 1.1 M", "eagle2"),
        Line("edd", f"{WIDE.format(0.5)},{TUNED}", "", "eagle2"),
    ),
    "3": (
        *(Line("eagle", f"chain:length={n}") for n in (2, 3, 4)),
        Line("eagle", "chain:length=5", "5: 2.98, 112,231"),
        Line("eagle", "chain:length=6", "6: 3.06, 125,992"),
        Line("eagle", "chain:length=7", "7: 3.10, 140,238"),
        Line("eagle", "chain:length=8", "8: 3.09, 155,420"),
        Line("eagle", "chain:length=9", "9: 3.13, 184,140"),
        Line("eagle", "dymax:threshold=0.3,length=10", "6.10: 3.06, 127,018", "chain"),
        Line("eagle", "dyjoint:threshold=0.02,length=10", "", "chain"),
        Line("eagle", "dyjoint:threshold=0.04,length=10", "", "chain"),
        Line("eagle", "dyjoint:threshold=0.08,length=10", "6.33: 3.12, 129,876", "chain"),
        Line("eagle", "dyjoint:threshold=0.16,length=10", "", "chain"),
        Line("eagle", "dyjoint:threshold=0.32,length=10", "", "chain"),
        Line("eagle", STOPPED.format(0.5), "", "dyjoint"),
        Line("eagle", STOPPED.format(0.7), "", "dyjoint"),
        Line("eagle", STOPPED.format(0.85), "5.46: 3.12, 116,694", "dyjoint"),
    ),
    "5": (
        Line("eagle", "c2t:beta=0.3,layer_top=15", "4.98, 1,026,454"),
        Line("eagle", "c2t:beta=0.3,layer_top=20", "5.15, 1,235,635"),
        Line("eagle", "c2t:beta=0.3,layer_top=25", "5.21, 1,413,190"),
        Line("eagle", "c2t:beta=0.3,layer_top=30", "5.30, 1,568,173"),
        Line("eagle", "c2t:beta=0.3,layer_top=none", "5.41, 2,030,064"),
        Line("eagle", "c2t:beta=0.5,layer_top=15", "4.92, 781,806"),
        Line("eagle", "c2t:beta=0.5,layer_top=20", "5.01, 878,722"),
        Line("eagle", "c2t:beta=0.5,layer_top=25", "5.02, 931,429"),
        Line("eagle", "c2t:beta=0.5,layer_top=30", "5.02, 971,486"),
        Line("eagle", "c2t:beta=0.5,layer_top=none", "5.02, 983,491"),
    ),
    "7": (
        *(Line("eagle", f"chain:length={n}") for n in (2, 4, 6)),
        Line("eagle", "chain:length=8", "C: 2.96, 161,020"),
        Line("eagle", STOPPED.format(0.9), "2.97, 104,141", "chain"),
        *(Line("eagle", E2.format(n)) for n in (30, 60)),
        Line("eagle", E2.format(90), "4.68, 935,280"),
        Line("eagle", "c2t", "4.70, 800,848", "eagle2"),
        *(Line("mtp", f"chain:length={n}") for n in (2, 4, 6)),
        Line("mtp", "chain:length=8", "C: 3.12, 156,040"),
        Line("mtp", STOPPED.format(0.8), "3.10, 98,141", "chain"),
        *(Line("mtp", E2.format(n)) for n in (30, 60)),
        Line("mtp", E2.format(90), "4.86, 900,090"),
        Line("mtp", "c2t", "4.84, 724,913", "eagle2"),
    ),
}
FINE = {"trees": 888, "positives": 3108}
"""A tenth of the paper's trees, as in appendix B.4."""


def tuned(drafter: str, args: argparse.Namespace) -> Path:
    """Return the shipped classifier fine-tuned on a drafter's trees.

    Raises:
        UserError: there are no prompts, or it was not trained to the end.
    """
    out = args.work / f"tuned-{drafter}"
    if not (out / PLAN).is_file():
        if not args.data:
            raise UserError(
                "--data is not given: a classifier is fine-tuned on the answers to such prompts"
            )
        command = [
            "train",
            "c2t",
            "--drafter",
            drafter,
            "--init-from",
            str(demo_folder("c2t")),
            "--out",
            str(out),
        ]
        command += [item for path in args.data for item in ("--data", str(path))]
        draftree(*command, *(item for k, v in FINE.items() for item in ("--set", f"{k}={v}")))
    checked(out)
    return out


def rows(lines: Sequence[Line], benched: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each line, from the bench's rows in the same order."""
    for line, row in zip(lines, benched, strict=True):
        curve = [
            r
            for other, r in zip(lines, benched, strict=True)
            if line.beside
            and other.drafter == line.drafter
            and other.policy.startswith(line.beside)
        ]
        share = str(Share.of(row, curve, np.random.default_rng(0))) if curve else ""
        figures = {
            "τ": row["acceptance_length"],
            "nodes a step": row["nodes_per_step"],
            "γ": sum(row["per_prompt"]["nodes"]),
        }
        yield line._asdict() | figures | {"nodes at equal τ [95 %]": share}


def main() -> int:
    """Decode and print the results."""
    parser = asked((__doc__ or "").splitlines()[0], needs_data=False, limit=20)
    parser.add_argument("table", choices=TABLES)
    args = parser.parse_args()
    lines = TABLES[args.table]
    try:
        folders = {
            line.drafter: str(tuned(line.drafter, args)) for line in lines if TUNED in line.policy
        }
        policies = [line.policy.replace("TUNED", folders.get(line.drafter, "")) for line in lines]
        result = bench(
            [f"{line.drafter} {policy}" for line, policy in zip(lines, policies, strict=True)], args
        )
    except UserError as error:
        print(f"c2t_tables: {error}", file=sys.stderr)
        return 2
    benched = [r for r in result["rows"] if r["policy"]]
    found = list(rows(lines, benched))
    shown = ("drafter", "policy", "τ", "nodes a step", "γ", "nodes at equal τ [95 %]", "paper")
    text = lambda value: f"{value:.2f}" if isinstance(value, float) else str(value)
    Console().print(
        table(f"C2T, table {args.table}", [{k: text(r[k]) for k in shown} for r in found])
    )
    if args.out:
        about = provenance(Target.load("demo"), 0) | {
            "table": args.table,
            "bench": result["provenance"],
        }
        result_rows.save({"provenance": about, "rows": found, "bench": benched}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
