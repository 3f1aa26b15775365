"""Train what the sweeps of two papers compare: the layer that EDD reads, and GLIDE's layer, depth, width and text.

    python recipes/distil.py --target demo --data QUESTIONS.jsonl --out distilled
    python recipes/distil.py --target demo --data ALL.jsonl --out distilled-all
    python recipes/sweeps.py --data QUESTIONS.jsonl --answers distilled/regenerated.jsonl \\
        --more-answers distilled-all/regenerated.jsonl --out sweeps
    python recipes/sweeps.py --out sweeps --suite spec_bench.jsonl \\
        --bench benchmarks/results/papers_sweeps.json

EDD + PCT, Figure 5: the fourth-to-last layer, the last one and a low one. GLIDE + CAPE: Table 2
(answers of the target instead of the data's own), Figure 7 (a low layer), Figure 8 (two layers) and
Figure 9 (a quarter of the width; the paper's 768 of 4,096 are 0.19). All learn from the same
questions, in the same steps, from the same seeds, with the target's own embedding and head; only
the two of Figure 9 have none of these, as the width is another. On the demo target GLIDE reads
layer 20, because its top layer hardly attends. QUESTIONS are the first 2,400 of GSM8K, two passes
of which are 590 steps: minutes for each drafter, and far from the shipped drafters' three passes over
1.6 million tokens. ALL are its 7,473 questions, from which the three EDDs learn. Interrupted, the
same command goes on.

The rule of a verdict, which was written before the runs: each seed is judged by itself over the
same prompts (benchmarks/papers.py, with Holm's correction over all comparisons of the paper); a
claim holds or fails if it does so with every seed, and ties otherwise.
"""

import argparse
import pathlib
import sys

from fair import NUMBERS, SEEDS, folder, run

EDD = "edd:shared=true"
GLIDE = "glide:hidden=0,init=shared,kv_layer="
SCRATCH = "glide:init=scratch,kv_layer=20,hidden="
SPECS = {
    "glide": f"{GLIDE}20",
    "glide-low": f"{GLIDE}0",
    "glide-deep": f"{GLIDE}20,layers=2",
    "glide-scratch": f"{SCRATCH}128",
    "glide-narrow": f"{SCRATCH}32",
}
DISTILLED = {"glide-distilled": f"{GLIDE}20"}
"""Learns from the target's answers; `glide` learns from those of the data."""
LAYERS = {
    "edd": EDD,
    "edd-last": f"{EDD},hidden_layer=-1",
    "edd-low": f"{EDD},hidden_layer=4",
}
"""Learn from the target's answers to more questions: EDD learns slowly, and with the questions and
passes of the others all three had a τ of 1.5, whichever layer they read."""
CHAIN = "chain:length=5"


def train(name: str, spec: str, data: pathlib.Path, args: argparse.Namespace, seed: int) -> None:
    """Train one drafter, unless it is there."""
    out = folder(args.out, name, seed)
    if (out / "config.json").is_file():
        return
    place = ["--target", "demo", "--data", data, "--out", out]
    kept = ["--features", args.out / f"features-{data.stem}"]
    numbers = ["--epochs", args.passes, "--seed", seed, *NUMBERS]
    run("train", spec, *place, *kept, *numbers)


def main() -> None:
    """Train the drafters, and compare those that are there."""
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--data", type=pathlib.Path, help="questions with answers")
    ap.add_argument("--answers", type=pathlib.Path, help="what the target answered to them")
    ap.add_argument(
        "--more-answers", type=pathlib.Path, help="what it answered to more questions, for EDD"
    )
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--passes", type=float, default=2)
    ap.add_argument("--only", action="append", help="of the drafters")
    ap.add_argument("--suite", help="questions to compare those that are there on")
    ap.add_argument("--limit", type=int, default=40)
    ap.add_argument("--bench", type=pathlib.Path, help="the result of the comparison")
    args = ap.parse_args()
    for seed in SEEDS:
        for specs, data in (
            (SPECS, args.data),
            (DISTILLED, args.answers),
            (LAYERS, args.more_answers),
        ):
            for name, spec in specs.items() if data else ():
                if not args.only or name in args.only:
                    train(name, spec, data, args, seed)
    if args.bench:
        names = [folder(args.out, n, seed) for seed in SEEDS for n in (*SPECS, *DISTILLED, *LAYERS)]
        pairs = [f"--pair={path} {CHAIN}" for path in names if (path / "config.json").is_file()]
        where = ["--target", "demo", "--suite", args.suite, "--limit", args.limit]
        where += ["--category", "math_reasoning"]
        command = ["replay", *where, *pairs, "--max-new-tokens", 64, "--out", args.bench]
        run(*command, "--force")


if __name__ == "__main__":
    sys.exit(main())
