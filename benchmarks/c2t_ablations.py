"""C2T's classifier under the paper's ablations, by how it decodes: features (table 1), hidden units (B.3), M (table 6).

    python benchmarks/c2t_ablations.py --data CHATS.jsonl --suite QUESTIONS.jsonl --work FOLDER [--out RESULT.json]

The trees are grown once and serve all; every classifier is trained by `draftree train c2t`, and one
that was not trained to the end is refused. Then `draftree bench` decodes with each at several β,
because a β is another with every classifier: what is compared is τ and nodes a step at β = 0.5, and
the nodes it takes for the τ that the paper's features have there (`equal_tau.py`). Trees,
classifiers and benches stay in FOLDER, and the same command goes on from them.
"""

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftree.cli.terminal import table
from draftree.errors import UserError
from draftree.evaluation import result_rows
from draftree.evaluation.provenance import provenance
from draftree.policies.c2t import FEATURES
from draftree.registry import build
from draftree.target.target import Target
from draftree.tree import ENTROPY_TOP
from draftree.tuning import _tree_dataset
from draftree.tuning._tree_dataset import Collected, Knobs
from draftree.tuning.c2t import PLAN
from draftree.utils.files import read_object
from equal_tau import Share

USUAL = {"log_joint": "true", "steps": _tree_dataset.MIN_ADAM_STEPS}
"""Nets are compared that read log P: they decode like those that read P, and take a fifth of the
steps."""
HIDDEN = (2, 6, 12, 24, 36)
ENTROPY_TOPS = (100, 500, ENTROPY_TOP, 10_000)
"""M of the paper; of a vocabulary that is not larger the last one is all of it."""
BETAS, AT = (0.3, 0.5, 0.7), 0.5
SIZES = (20, 40, 60, 100)
"""Nodes of EAGLE-2, which the paper gives C2T's depth and width for the comparison."""
BESIDE = "eagle2:nodes={},depth=10,width=15"
PAPER = {
    "features=P+H+d": "τ 4.92, γ 1",
    "features=P+H": "τ 4.92, γ 1.29",
    "features=P+d": "τ 4.92, γ 1.29",
    "features=H+d": "τ 1.98, γ 4.71",
    "eagle2": "τ 4.89, γ 1.43",
    "hidden=2": "τ 4.91 of 5.02",
    "hidden=6": "τ 4.97 of 5.02",
    "hidden=12": "τ 5.02 of 5.02",
    "hidden=24": "τ 5.03 of 5.02",
    "hidden=36": "τ 5.02 of 5.02",
    "entropy_top=100": "τ 4.70, γ 1.04",
    "entropy_top=500": "τ 4.89, γ 1.02",
    "entropy_top=10000": "τ 4.92, γ 1.00",
}
"""τ with the target's own token, which the paper leaves out; γ by that of the paper's setting (B.3
has alike γ)."""


def settings() -> Iterator[dict[str, Any]]:
    """Yield the options of each training in addition to `USUAL`, all three features first."""
    yield from ({"features": features} for features in FEATURES)
    yield from ({"log_joint": "false"}, {"log_joint": "false", "steps": Knobs.steps})
    yield from ({"hidden": hidden} for hidden in HIDDEN)
    yield from ({"entropy_top": top} for top in ENTROPY_TOPS if top != ENTROPY_TOP)


def told(setting: Mapping[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in setting.items())


def grow(args: argparse.Namespace) -> None:
    """Grow the trees once, with the entropies of every M."""
    target, knobs = Target.load("demo"), Knobs(trees=args.trees)
    drafter = build("drafter", args.drafter).open(target)
    requests, _ = _tree_dataset.prompt_requests(target, args.data, knobs)
    kept = []
    for top in ENTROPY_TOPS:
        said = _tree_dataset.provenance(
            target, drafter, args.drafter, requests, replace(knobs, entropy_top=top)
        )
        kept.append(Collected(args.work / f"trees-{top}", said))
        kept[-1].begin()
    trees = positives = 0
    for number, request in enumerate(requests):
        if knobs.trees and trees >= knobs.trees and positives >= knobs.positives:
            break
        if any(k[number] is None for k in kept):
            for k, nodes in zip(
                kept,
                _tree_dataset.grow_entries(target, drafter, request, knobs, ENTROPY_TOPS),
                strict=True,
            ):
                k[number] = nodes
        found = kept[0][number]
        assert found is not None
        trees, positives = trees + found.trees, positives + int(found.accepted.sum())


def trained(setting: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the recorded result of one training, and its folder.

    Raises:
        UserError: it was not trained to the end.
    """
    out = args.work / told(setting).replace("=", "-").replace("+", "").replace(",", "-")
    if not (out / PLAN).is_file():
        trees = args.work / f"trees-{setting.get('entropy_top', ENTROPY_TOP)}"
        command = [
            "train",
            "c2t",
            "--drafter",
            args.drafter,
            "--features",
            str(trees),
            "--out",
            str(out),
        ]
        command += [item for path in args.data for item in ("--data", str(path))]
        command += [
            item
            for k, v in {"trees": args.trees, **USUAL, **setting}.items()
            for item in ("--set", f"{k}={v}")
        ]
        draftree(*command)
    return checked(out) | {"folder": str(out)}


def checked(folder: Path) -> dict[str, Any]:
    """Return the record of a training.

    Raises:
        UserError: there is none, or it does not state that the classifier was trained to the end.
    """
    note = read_object(folder / PLAN, "the note of a training")
    if note.get("to_the_end") is not True:
        steps = next(
            (r["step"] for r in reversed(note.get("history", ())) if "step" in r),
            "an unknown number of",
        )
        raise UserError(
            f"'{folder}' is not trained: it was stopped after {steps} steps, while held-out AUC may still rise; "
            "remove it, or name another --work"
        )
    return note


def draftree(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "draftree", *command], check=True)


def bench(pairs: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return the bench of some pairs of drafter and policy.

    An interrupted one is resumed, and a finished one is read.
    """
    command = ["bench", "--suite", str(args.suite), "--limit", str(args.limit)]
    command += [item for category in args.category for item in ("--category", category)]
    command += [] if args.per_category is None else ["--per-category", str(args.per_category)]
    command += [item for pair in pairs for item in ("--pair", pair)]
    out = args.work / f"bench-{hashlib.sha256(repr(command).encode()).hexdigest()[:12]}.json"
    if not out.is_file():
        draftree(*command, "--out", str(out))
    return result_rows.read_result(out)


def rows(
    notes: Mapping[str, dict[str, Any]], benched: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each classifier and one for EAGLE-2.

    Args:
        notes: records of the trainings, by their setting, the paper's setting first.
        benched: the rows of the bench.
    """
    of = lambda start: [r for r in benched if r["policy"] and r["policy"].startswith(start)]
    curves = {name: of(f"c2t:classifier={note['folder']},") for name, note in notes.items()} | {
        "eagle2": of("eagle2")
    }
    [reference] = [r for r in next(iter(curves.values())) if r["policy"].endswith(f"beta={AT}")]
    for name, curve in curves.items():
        found = {"setting": name, "paper": PAPER.get(name, "")}
        if note := notes.get(name):
            kept = next(r for r in note["history"] if r["step"] == note["step"])
            found |= {
                "AUC": f"{kept['auc']:.4f}",
                "recall": kept["recall"],
                "positive rate": f"{kept['positive_rate']:.4f}",
                "steps": note["history"][-1]["step"],
                "ending": note["ending"],
            }
            [at] = [r for r in curve if r["policy"].endswith(f"beta={AT}")]
        else:
            found |= dict.fromkeys(("AUC", "recall", "positive rate", "steps", "ending"), "")
            at = max(curve, key=lambda r: r["nodes_per_step"])
        needed = Share.of(reference, curve, np.random.default_rng(0)).inverse
        yield found | {
            "policy": at["policy"],
            "τ": at["acceptance_length"],
            "nodes a step": at["nodes_per_step"],
            "nodes at equal τ [95 %]": "1" if at is reference else str(needed),
        }


def asked(what: str, needs_data: bool, limit: int) -> argparse.ArgumentParser:
    """Return the options of this script and of `c2t_tables.py`."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        required=needs_data,
        help="prompts whose trees are learnt",
    )
    parser.add_argument("--suite", required=True, help="questions to decode")
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--limit", type=int, default=limit, help="of the questions")
    parser.add_argument("--per-category", type=int, help="of the questions")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> int:
    """Train, decode and print the results."""
    parser = asked((__doc__ or "").splitlines()[0], needs_data=True, limit=12)
    parser.add_argument("--drafter", default="eagle")
    parser.add_argument("--trees", type=int, default=Knobs.trees)
    parser.add_argument(
        "--beta", type=float, action="append", help=f"beside {AT}; by default {BETAS}"
    )
    args = parser.parse_args()
    betas = sorted({AT, *(args.beta or BETAS)})
    try:
        grow(args)
        notes = {told(setting): trained(setting, args) for setting in settings()}
        policies = [
            f"c2t:classifier={note['folder']},beta={beta}"
            for note in notes.values()
            for beta in betas
        ]
        policies += [BESIDE.format(nodes) for nodes in SIZES]
        result = bench([f"{args.drafter} {policy}" for policy in policies], args)
    except UserError as error:
        print(f"c2t_ablations: {error}", file=sys.stderr)
        return 2
    found = list(rows(notes, result["rows"]))
    shown = (
        "setting",
        "AUC",
        "recall",
        "steps",
        "τ",
        "nodes a step",
        "nodes at equal τ [95 %]",
        "paper",
    )
    text = lambda value: f"{value:.2f}" if isinstance(value, float) else str(value)
    Console().print(
        table(
            f"C2T's classifier for {args.drafter}", [{k: text(r[k]) for k in shown} for r in found]
        )
    )
    if args.out:
        about = provenance(Target.load("demo"), 0) | {
            "trees": args.trees,
            "bench": result["provenance"],
        }
        result_rows.save({"provenance": about, "rows": found, "bench": result["rows"]}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
