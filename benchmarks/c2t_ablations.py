"""C2T's classifier under the paper's ablations: its features (table 1), its hidden units (appendix B.3), M (table 6).

    python benchmarks/c2t_ablations.py --drafter eagle --data CHATS.jsonl --work FOLDER [--trees 5000] [--out RESULT.json]

Every classifier is trained by `draftree train c2t`, on the same trees but where M differs, which the trees' entropies
depend on. What is told is measured on held-out texts, at a confidence of 0.5. Trees and classifiers stay in FOLDER, and the
same command goes on from them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from draftree.evaluation.provenance import provenance
from draftree.policies._classifier import FEATURES
from draftree.target import Target
from draftree.terminal import table
from draftree.tree import ENTROPY_TOP

HIDDEN = (2, 4, 8, 16, 24, 48)
ENTROPY_TOPS = (100, 1000, 4096)


def settings() -> Iterator[dict[str, Any]]:
    """What is set in each training, the paper's setting first."""
    yield from ({"features": features} for features in FEATURES)
    yield {"log_joint": "false"}
    yield from ({"hidden": hidden} for hidden in HIDDEN[:-1])
    yield from ({"entropy_top": top} for top in ENTROPY_TOPS if top != ENTROPY_TOP)


def trained(setting: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What one training came to, as it noted it."""
    name = "-".join(f"{k}={v}" for k, v in setting.items())
    out = args.work / name.replace("+", "_")
    if not (out / "training.json").is_file():
        knobs = {"trees": args.trees, **setting}
        trees = args.work / f"trees-{setting.get('entropy_top', ENTROPY_TOP)}"
        command = [sys.executable, "-m", "draftree", "train", "c2t", "--drafter", args.drafter, "--held-out", "0.2",
                   "--features", str(trees), "--out", str(out)]  # fmt: skip
        command += [item for path in args.data for item in ("--data", str(path))]
        command += [item for k, v in knobs.items() for item in ("--set", f"{k}={v}")]
        subprocess.run(command, check=True)
    return json.loads((out / "training.json").read_text()) | {"setting": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafter", default="eagle")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--trees", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for setting in settings():
        note = trained(setting, args)
        kept = next(e for e in note["history"] if e["epoch"] == note["epoch"])
        wanted = ("setting", "trees", "nodes", "accepted", "epoch")
        rows.append({k: note[k] for k in wanted} | {k: kept[k] for k in ("loss", "recall", "positive_rate")})
    shown = [
        {"setting": r["setting"], "recall": f"{r['recall']:.3f}", "positive rate": f"{r['positive_rate']:.4f}",
         "loss": f"{r['loss']:.3f}"} for r in rows
    ]  # fmt: skip
    Console().print(table(f"C2T's classifier for {args.drafter}, on held-out texts", shown))
    if args.out:
        saved = {"provenance": provenance(Target.load("demo"), 0), "rows": rows}
        args.out.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
