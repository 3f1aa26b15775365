"""Train the shipped drafters of SmolLM2-135M, their trees and a classifier, on what the model itself asks and answers.

    python recipes/smollm2_drafters.py --data gsm8k_train.jsonl --out drafters [--only edd]
    python recipes/smollm2_drafters.py --data gsm8k_train.jsonl --anew --exclude spec_bench.jsonl --out drafters

`smollm2_answers.jsonl.gz` beside this file holds 3,348 answers of the model: to the first 2,500
questions of GSM8K's training set, which `--data` brings, and to 848 that it made up (`train
--synthesize`), none of them one of Spec-Bench's; 707,000 tokens. With `--anew` the model asks and
answers once more, and `--exclude` names what must not be learnt. Each drafter is an ordinary
`draftree train` run over the answers, or over the first of them: `edd` came last, when there were
more. Features are kept in one folder; then a static tree is found for each, and C2T's classifier
for `edd`. Interrupted, the same command goes on. Two cores take some six hours for all of it. The
shipped `eagle3` is trained by `smollm2_training.py`; its static tree is that of an earlier one.
"""

import argparse
import gzip
import itertools
import json
import pathlib
import subprocess
import sys

ANSWERS = pathlib.Path(__file__).with_name("smollm2_answers.jsonl.gz")
TARGET = ("--target", "smollm2", "--dtype", "bfloat16")
FIRST, ALL = 1848, 3348
SPECS = {
    "edd": ("edd:preset=fast,draft_vocab=8192", 3e-3, 6, ALL),
    "eagle": ("eagle:draft_vocab=8192,token_weight=1", 2e-3, 6, FIRST),
    "vdm": ("vdm:shared=true,draft_vocab=8192", 3e-3, 4, FIRST),
    "mtp": ("mtp:draft_vocab=8192,steps=2", 2e-3, 3, FIRST),
    "glide": ("glide:preset=fast,draft_vocab=8192,init=shared,loss=kl", 2e-3, 3, FIRST),
}
"""Each drafter, its rate, the passes over the data, and how many answers these are."""
NUMBERS = (
    "--batch-size",
    8,
    "--schedule",
    "cosine",
    "--floor",
    0.02,
    "--warmup",
    100,
    "--betas",
    0.9,
    0.95,
    "--weight-decay",
    0.01,
    "--clip",
    1.0,
    "--clip-by",
    "norm",
    "--max-tokens",
    768,
    "--bf16",
    "--cache-features",
    "--accumulate",
    4,
    "--evaluate-every",
    500,
    "--keep-every",
    460,
)
"""The same for all drafters, and not those of each one's paper (docs/how-to/train-a-drafter.md)."""


def run(*command: object) -> None:
    """Runs `draftree` with some arguments."""
    subprocess.run([sys.executable, "-m", "draftree", *map(str, command)], check=True)


def first(path: pathlib.Path, count: int, out: pathlib.Path) -> pathlib.Path:
    """The first lines of a file, as a file."""
    with path.open() as lines:
        out.write_text("".join(itertools.islice(lines, count)))
    return out


def kept(questions: pathlib.Path, count: int, out: pathlib.Path) -> pathlib.Path:
    """The chats of the first answers beside this file, as a file."""
    asked = [json.loads(line)["question"] for line in questions.open()]
    with gzip.open(ANSWERS, "rt") as lines, out.open("w") as chats:
        for row in map(json.loads, itertools.islice(lines, count)):
            question = asked[row["gsm8k"]] if "gsm8k" in row else row["question"]
            chat = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row["answer"]},
            ]
            chats.write(
                json.dumps({"messages": chat} | ({"cut": [1]} if row.get("cut") else {})) + "\n"
            )
    return out


def train(name: str, data: list[object], out: pathlib.Path, seed: int = 0) -> None:
    """Trains one drafter into `out`/`name`, unless it is there."""
    if not (out / name / "config.json").is_file():
        spec, lr, epochs, _ = SPECS[name]
        numbers = [
            "--lr",
            lr,
            "--epochs",
            epochs,
            *NUMBERS,
            "--features",
            out / "features",
            "--seed",
            seed,
        ]
        run("train", spec, *TARGET, *data, *numbers, "--out", out / name)


def fit(
    policy: str, drafter: pathlib.Path, data: list[object], out: pathlib.Path, *knobs: str
) -> None:
    """Fits a policy to a trained drafter, into `out`, unless it is there."""
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        run(
            "train",
            policy,
            *TARGET,
            "--drafter",
            drafter,
            *data,
            *(f"--set={knob}" for knob in knobs),
            "--out",
            out,
        )


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--data", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--only", choices=SPECS, action="append")
    ap.add_argument("--anew", action="store_true", help="let the model ask and answer")
    ap.add_argument("--exclude", type=pathlib.Path, action="append", default=[])
    ap.add_argument("--questions", type=int, default=2500)
    ap.add_argument("--synthesize", type=int, default=850)
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data: dict[int, list[object]] = {}
    if args.anew:
        asked = first(args.data, args.questions, args.out / "questions.jsonl")
        excluded = [f"--exclude={path}" for path in args.exclude]
        writing = [
            "--regenerate",
            "--regenerate-tokens",
            320,
            "--regenerate-batch",
            64,
            "--synthesize",
            args.synthesize,
        ]
        train("edd", ["--data", asked, *excluded, *writing], args.out)
    for count in (FIRST, ALL):
        here = args.out / f"answers-{count}.jsonl"
        data[count] = [
            "--data",
            args.out / "edd" / "regenerated.jsonl" if args.anew else kept(args.data, count, here),
        ]
    for name in args.only or SPECS:
        of = data[SPECS[name][3]]
        train(name, of, args.out)
        fit(
            "static",
            args.out / name,
            of,
            args.out / "trees" / f"{name}.json",
            "nodes=32",
            "prompts=64",
        )
    if (args.out / "edd").is_dir():
        fit(
            "c2t",
            args.out / "edd",
            data[ALL],
            args.out / "policies" / "c2t",
            "trees=2000",
            "positives=7000",
        )


if __name__ == "__main__":
    main()
