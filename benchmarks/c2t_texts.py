"""C2T's classifier and the texts that it learnt from: other ones (Figure 8), and a tenth of the right ones (Figure 7).

    python benchmarks/c2t_texts.py --data CHATS.jsonl --other OTHER.jsonl --suite QUESTIONS.jsonl \\
        --work FOLDER [--out RESULT.json]

One net learns from trees along answers to the first texts, one from trees along answers to the
others, and one is the second, fine-tuned on a tenth of the first's trees (appendix B.4). All three
decode the questions at three β. What the net of other texts needs stands beside the curve of the
right ones (Figure 8), and what the tuned net needs beside the curve of the net that it began with
(Figure 7). Recall at β = 0.5 is that of trees that no net has learnt from, text by text.

The rules, which were written before the run: at equal τ the whole 95 % interval of the nodes is at
most 1.05, or it is above 1.05 (`holds`, `fails`, otherwise `ties`); recall rises if the whole
interval of the difference is above 0, or falls if it is below. Trees, nets and the replay stay in
FOLDER, and the same command goes on from them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftree.evaluation import result_rows
from draftree.evaluation.bootstrap import MIN_PROMPTS
from draftree.evaluation.provenance import provenance
from draftree.policies.c2t import Classifier
from draftree.registry import build
from draftree.target.target import Target
from draftree.tuning import _tree_dataset
from draftree.tuning._tree_dataset import Collected, Knobs, Nodes
from draftree.tuning.c2t import Hyperparameters, learn, split
from equal_tau import DRAWS, Share

BETAS, AT = (0.3, 0.5, 0.7), 0.5
TENTH, HELD_OUT = 10, 4
"""Every fourth of the first texts is learnt by none; every tenth of the others tunes a net."""
TUNING_STEPS = 200
"""About the steps that ten epochs over a tenth of the paper's trees have."""


def grow(target: Target, data: Path, knobs: Knobs, args: argparse.Namespace) -> list[Nodes]:
    """Return the trees along the answers to some prompts, by text."""
    drafter = build("drafter", args.drafter).open(target)
    requests, _ = _tree_dataset.prompt_requests(target, [data], knobs)
    about = _tree_dataset.provenance(target, drafter, args.drafter, requests, knobs)
    kept = Collected(args.work / f"trees-{data.stem}", about)
    kept.begin()
    tell = lambda done, remark, of: print(f"{data.stem}: {done} texts, {remark}", flush=True)
    return [
        t for t in _tree_dataset.collect(target, drafter, requests, knobs, kept, tell) if len(t)
    ]


def fit(
    texts: Sequence[Nodes], folder: Path, knobs: Knobs, start: Classifier | None = None
) -> Classifier:
    """Return a net that learnt from some texts; it stays in a folder."""
    if not (folder / "config.json").is_file():
        plan = Hyperparameters(lr=1e-4) if start is not None else Hyperparameters()
        net, rounds = learn(*split(texts, plan), knobs, plan, start)
        net.save(folder)
        print(f"{folder.name}: {rounds[-1].step} steps, {rounds[-1].summary}", flush=True)
    return Classifier.load(folder)


def recalls(net: Classifier, texts: Sequence[Nodes]) -> tuple[np.ndarray, np.ndarray, float]:
    """Return recalled and accepted nodes of each text at β, and the positive rate of all."""
    sure = [net.confidence(t.log_p, t.entropy, t.depth) >= AT for t in texts]
    recalled = np.array([int(s[t.accepted].sum()) for s, t in zip(sure, texts, strict=True)])
    accepted = np.array([int(t.accepted.sum()) for t in texts])
    return recalled, accepted, float(np.concatenate(sure).mean())


def recall_gain(before: Classifier, after: Classifier, texts: Sequence[Nodes]) -> dict[str, Any]:
    """Return both recalls and positive rates, and the interval of the gain in recall over texts."""
    (old, accepted, old_rate), (new, _, new_rate) = (recalls(n, texts) for n in (before, after))
    drawn = np.random.default_rng(0).integers(0, len(texts), (DRAWS, len(texts)))
    gains = (new - old)[drawn].sum(1) / np.maximum(accepted[drawn].sum(1), 1)
    low, high = np.quantile(gains, [0.025, 0.975])
    verdict = "holds" if low > 0 else "fails" if high < 0 else "ties"
    return {
        "texts": len(texts),
        "recall": [old.sum() / accepted.sum(), new.sum() / accepted.sum()],
        "positive rate": [old_rate, new_rate],
        "gain": [float(low), float(high)],
        "verdict": verdict if len(texts) >= MIN_PROMPTS else "too few prompts",
    }


def decode(nets: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return the replay of the questions with each net at each β."""
    out = args.work / "replay.json"
    if not out.is_file():
        specs = [f"c2t:classifier={args.work / n},beta={b}" for n in nets for b in BETAS]
        command = ["replay", "--suite", args.suite, "--limit", str(args.limit), "-n", "64"]
        command += [w for category in args.category for w in ("--category", category)]
        command += [w for spec in specs for w in ("--pair", f"{args.drafter} {spec}")]
        command += ["--recording", str(args.work / "recording"), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "draftree", *command], check=True)
    return result_rows.read(out)


def compare(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes at equal τ of a net at β beside the curve of another."""
    rows = [r for r in result["rows"] if r["policy"]]
    curve = lambda net: [r for r in rows if f"/{net}," in r["policy"]]
    found = []
    for mine, other in (("other", "right"), ("tuned", "other")):
        [row] = [r for r in curve(mine) if r["policy"].endswith(f"beta={AT}")]
        share = Share.of(row, curve(other), np.random.default_rng(0))
        values = [share.whole, share.low, share.high]
        found.append({"net": mine, "beside": other, "share": values, "reached": share.reached})
    return found


def main() -> None:
    """Grow trees, train the nets, decode with them, and print what was found."""
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--data", type=Path, required=True, help="prompts like the questions")
    ap.add_argument("--other", type=Path, required=True, help="other prompts")
    ap.add_argument("--suite", required=True, help="questions to decode")
    ap.add_argument("--category", action="append", default=[])
    ap.add_argument("--limit", type=int, default=12, help="of the questions")
    ap.add_argument("--drafter", default="eagle")
    ap.add_argument("--trees", type=int, default=1000, help="of each kind of text")
    ap.add_argument("--work", type=Path, required=True)
    ap.add_argument("--out", type=Path)
    args = ap.parse_args()
    target = Target.load("demo")
    knobs = Knobs(log_joint=True, steps=4000, trees=args.trees, positives=0, tokens=96)
    right, other = (grow(target, data, knobs, args) for data in (args.data, args.other))
    held = right[::HELD_OUT]
    learnt = [t for i, t in enumerate(right) if i % HELD_OUT]
    fit(learnt, args.work / "right", knobs)
    before = fit(other, args.work / "other", knobs)
    tuning = replace(knobs, steps=TUNING_STEPS)
    after = fit(learnt[::TENTH], args.work / "tuned", tuning, before)
    gain = recall_gain(before, after, held)
    result = decode(("right", "other", "tuned"), args)
    found = compare(result)
    print(json.dumps([gain, *found], indent=1, ensure_ascii=False))
    if args.out:
        about = provenance(target, 0) | {"trees": args.trees, "bench": result["provenance"]}
        saved = {"provenance": about, "recall": gain, "rows": found, "bench": result["rows"]}
        result_rows.save(saved, args.out)


if __name__ == "__main__":
    main()
