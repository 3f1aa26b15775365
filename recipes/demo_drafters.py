"""Train the shipped drafters of the demo target, on what the target itself answers.

    python recipes/distil.py --target demo --questions gsm8k_train.jsonl --out distilled.jsonl
    python recipes/demo_drafters.py --data distilled.jsonl --out drafters

Beside the distilled answers it takes 1.5 MB of Python's standard library, so that code is not foreign to the drafters.
Each one is an ordinary `draftree train` run of six epochs; interrupted, the same command goes on.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys

from train_target import stdlib_files


def code(path: pathlib.Path, size: int = 1_500_000) -> None:
    """Writes some of the standard library's files, drawn with a fixed seed, as rows of text."""
    files = list(stdlib_files())
    random.Random(0).shuffle(files)
    with path.open("w") as out:
        while size > 0:
            text = files.pop(0).read_text(errors="ignore")
            out.write(json.dumps({"text": "<|bos|>" + text}) + "\n")
            size -= len(text)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    code(args.out / "code.jsonl")
    for name in ("edd", "vdm"):
        data = ["--data", args.data, "--data", str(args.out / "code.jsonl"), "--max-tokens", "256"]
        knobs = ["--epochs", "6", "--lr", "2e-3", "--schedule", "cosine", "--warmup", "50", "--keep-features"]
        command = [sys.executable, "-m", "draftree", "train", name, *data, "--out", str(args.out / name), *knobs]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
