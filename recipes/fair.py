"""Train the drafters of the papers alike, so that their claims about each other are decided by the method alone.

    python recipes/distil.py --target demo --data gsm8k_train.jsonl --out distilled
    python recipes/fair.py --target demo --data distilled/regenerated.jsonl --theirs gsm8k_train.jsonl --out fair
    python recipes/fair.py --target demo --out fair --suite spec_bench.jsonl --bench fair.json

EDD, its Vanilla Draft Model, EAGLE, and GLIDE with and without its cross-attention learn from the
same answers, in the same passes, with the same optimiser and of the same two seeds. All of them
have the target's own embedding and head, which are not trained, and one layer that begins at
random; all but EAGLE, whose loss is part of it, learn KL(p‖q). `edd-ce` is EDD's ablation without
that loss, and the two ending in `-theirs` learn from `--theirs`, text that the target did not
write, on which cross-entropy is not distillation. Interrupted, the same command goes on; other
options go to `draftree train`. For SmolLM2, with the answers that `smollm2_drafters.py` unpacks:
a step of 1,800 tokens takes 0.7 s of one core, and reading 1,000 tokens with the target 1.4 s, so
that two passes over 637 answers (143,000 tokens, 158 steps) take half an hour of an idle core for
ten drafters, and three passes over all 3,348 some three hours:

    python recipes/fair.py --target smollm2 --data answers-3348.jsonl --draft-vocab 8192 --passes 3 --out fair --bf16
"""

import argparse
import pathlib
import subprocess
import sys

GLIDE = "glide:hidden=0,init=shared,loss=kl"
KV_LAYER = {"demo": "auto"}
"""The layer whose keys GLIDE reads is the paper's, the top one, but on the demo: its top layer hardly
attends."""
SPECS = {
    "edd": "edd:shared=true",
    "vdm": "vdm:shared=true",
    "eagle": "eagle",
    "glide": GLIDE,
    "glide-nocross": f"{GLIDE},cross=false",
    "edd-ce": "edd:shared=true,loss=ce",
}
THEIRS = {"edd-theirs": "edd:shared=true", "edd-ce-theirs": "edd:shared=true,loss=ce"}
SEEDS = (0, 1)
NUMBERS = (
    "--batch-size",
    8,
    "--lr",
    2e-3,
    "--schedule",
    "cosine",
    "--floor",
    0.05,
    "--warmup",
    50,
    "--betas",
    0.9,
    0.999,
    "--weight-decay",
    0.01,
    "--clip",
    1.0,
    "--clip-by",
    "norm",
    "--max-tokens",
    256,
    "--cache-features",
    "--held-out",
    0.02,
    "--evaluate-every",
    1000,
)
"""The same for all."""
CHAIN = "chain:length=5"


def run(*command: object) -> None:
    """Run `draftree` with some arguments."""
    subprocess.run([sys.executable, "-m", "draftree", *map(str, command)], check=True)


def folder(out: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """Return the folder of a drafter."""
    return out / f"{name}-s{seed}"


def spec_of(name: str, args: argparse.Namespace) -> str:
    """Return the spec of a drafter with the options of this target."""
    spec = {**SPECS, **THEIRS}[name]
    options = [f"draft_vocab={args.draft_vocab}"] if args.draft_vocab else []
    if name.startswith("glide") and args.target in KV_LAYER:
        options.append(f"kv_layer={KV_LAYER[args.target]}")
    return ("," if ":" in spec else ":").join((spec, ",".join(options))) if options else spec


def train(name: str, data: pathlib.Path, args: argparse.Namespace, seed: int) -> None:
    """Train one drafter, unless it is there."""
    out = folder(args.out, name, seed)
    if not (out / "config.json").is_file():
        features = args.out / f"features-{data.stem}"
        place = ["--target", args.target, "--data", data, "--features", features, "--out", out]
        numbers = ["--epochs", args.passes, "--seed", seed, *NUMBERS, *args.more]
        run("train", spec_of(name, args), *place, *numbers)


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--target", default="demo")
    ap.add_argument("--data", type=pathlib.Path, help="what the target answered")
    ap.add_argument("--theirs", type=pathlib.Path, help="the same questions with answers of others")
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--passes", type=float, default=1)
    ap.add_argument(
        "--draft-vocab", type=int, default=0, help="how many tokens can be drafted; all by default"
    )
    ap.add_argument("--only", action="append", help="of the drafters")
    ap.add_argument("--suite", help="questions to compare those that are there on")
    ap.add_argument("--limit", type=int, default=40)
    ap.add_argument("--bench", type=pathlib.Path, help="the result of the comparison")
    args, args.more = ap.parse_known_args()
    for seed in SEEDS:
        for specs, data in ((SPECS, args.data), (THEIRS, args.theirs)):
            for name in specs if data else ():
                if not args.only or name in args.only:
                    train(name, data, args, seed)
    if args.bench:
        names = [folder(args.out, name, seed) for seed in SEEDS for name in (*SPECS, *THEIRS)]
        pairs = [f"--pair={path} {CHAIN}" for path in names if (path / "config.json").is_file()]
        where = [
            "--target",
            args.target,
            "--suite",
            args.suite,
            "--limit",
            args.limit,
            "--recording",
            args.out / "recording",
        ]
        run("replay", *where, *pairs, "--max-new-tokens", 128, "--out", args.bench, "--force")


if __name__ == "__main__":
    main()
