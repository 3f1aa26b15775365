"""Train the shipped drafters of the demo target, all on the same text: what the target itself answers.

    python recipes/distil.py --target demo --data gsm8k_train.jsonl --out distilled
    python recipes/demo_drafters.py --data distilled/regenerated.jsonl --chats gsm8k_train.jsonl --out drafters

Beside the distilled answers it takes 1.5 MB of Python's standard library, so that code is not
foreign to the drafters. Each one is an ordinary `draftree train` run of three epochs over 1.6 M
tokens; interrupted, the same command goes on. The target reads the text once, for all of them
(`--cache-features`). From `--chats`, C2T's classifier for `eagle` is trained last.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys

from train_target import stdlib_files

SPECS = {
    "edd": "edd:phase=random",  # the paper's but for the blocks, which begin anywhere
    "vdm": "vdm",
    "eagle": "eagle",
    "eagle3": "eagle3:steps=3,draft_vocab=2048",  # seven passes over a toy cost more than they bring
    "mtp": "mtp",
    "glide": "glide:preset=fast,kv_layer=20",  # what `auto` finds; the top layer of the grown target hardly attends
    "medusa": "medusa",
    "hydra": "hydra",
}

NUMBERS = {
    "--batch-size": "8",
    "--lr": "2e-3",
    "--schedule": "cosine",
    "--floor": "0.05",
    "--warmup": "50",
    "--betas": "0.9 0.999",
    "--weight-decay": "0.01",
    "--clip": "1.0",
    "--clip-by": "norm",
    "--max-tokens": "256",
}
"""The same for all drafters, so that they can be compared; each paper's own are in
docs/how-to/train-a-drafter.md."""


def code(path: pathlib.Path, size: int = 1_500_000) -> None:
    """Writes some of the standard library's files, drawn with a fixed seed, as rows of text."""
    files = list(stdlib_files())
    random.Random(0).shuffle(files)
    with path.open("w") as out:
        while size > 0:
            text = files.pop(0).read_text(errors="ignore")
            out.write(json.dumps({"text": "<|bos|>" + text}) + "\n")
            size -= len(text)


def train(
    name: str, spec: str, data: str, out: pathlib.Path, epochs: float = 3, seed: int = 0
) -> None:
    """Trains one drafter into `out`/`name`, unless it is there."""
    if (out / name / "config.json").is_file():
        return
    if not (out / "code.jsonl").is_file():
        out.mkdir(parents=True, exist_ok=True)
        code(out / "code.jsonl")
    texts = ["--data", data, "--data", str(out / "code.jsonl")]
    kept = ["--cache-features", "--features", str(out / "features")]
    knobs = [
        "--epochs",
        str(epochs),
        "--seed",
        str(seed),
        *" ".join(map(" ".join, NUMBERS.items())).split(),
    ]
    command = [
        sys.executable,
        "-m",
        "draftree",
        "train",
        spec,
        *texts,
        *kept,
        *knobs,
        "--out",
        str(out / name),
    ]
    subprocess.run(command, check=True)


def classify(chats: str, out: pathlib.Path) -> None:
    """Train C2T's classifier for the EAGLE that was trained before."""
    if not (out / "c2t" / "config.json").is_file():
        where = [
            "--drafter",
            str(out / "eagle"),
            "--data",
            chats,
            "--features",
            str(out / "trees"),
            "--out",
            str(out / "c2t"),
        ]
        subprocess.run([sys.executable, "-m", "draftree", "train", "c2t", *where], check=True)


def arguments(about: str) -> argparse.Namespace:
    """`--data`, `--chats` and `--out`."""
    ap = argparse.ArgumentParser(description=about.splitlines()[0])
    ap.add_argument("--data", required=True)
    ap.add_argument("--chats", help="of GSM8K's training set, for C2T's classifier")
    ap.add_argument("--out", type=pathlib.Path, required=True)
    return ap.parse_args()


def main() -> None:
    args = arguments(__doc__ or "")
    for name, spec in SPECS.items():
        train(name, spec, args.data, args.out)
    if args.chats:
        classify(args.chats, args.out)


if __name__ == "__main__":
    main()
