"""Compare vLLM's own drafts, an exported drafter and draftree's proposer inside vLLM, in turns.

    python benchmarks/vllm_proposer.py --model FOLDER --vllm ENV/bin/python --suite NAME=FILE …
        [--answers FILE] [--export FOLDER] [--dtype float32] [--rounds 5] [--out FILE]

The model's folder is one that transformers saved; `--export` is a drafter that `draftree export
--format speculators` wrote for it. `--answers` is a file of JSON lines with answers that the model
has written earlier (`ids`), such as `recipes/smollm2_journal.jsonl.gz`. The way "ours" searches a
datastore of them, and "texts" is the proposer without it. ENV is an environment with vLLM and
draftree (`make build/engines/ready`). A suite is a file of JSON lines with `prompt`, as
`vllm_suites.py` writes them; each round takes other prompts of it. Every way runs in a process of
its own, which stays loaded and waits while another is timed. Finished rounds are kept in the
result, and an interrupted run of the same settings continues.
"""

import argparse
import gzip
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from draftree.errors import UserError, format_value
from draftree.utils.files import as_user_error, write_text
from draftree.utils.hardware import machine
from engines import VllmWorker, versions

BATCHES = (1, 4)
"""Numbers of texts that are written at once."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}
OURS = {
    "method": "custom_class",
    "model": "draftree.integrations.vllm.Proposer",
    "num_speculative_tokens": 16,
}
RIVALS = ("ngram", "suffix")
COMMON = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": max(BATCHES),
    "enable_prefix_caching": False,
}
"""Arguments of `vllm.LLM` that all ways share."""
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


def ways(export: Path | None, datastore: Path | None) -> dict[str, dict[str, Any]]:
    """Return the arguments of `vllm.LLM` that differ between the ways, by name."""
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"speculative_config": NGRAM},
        "suffix": {"speculative_config": SUFFIX},
        "ours": {"speculative_config": OURS},
    }
    if datastore is not None:
        found["texts"] = found["ours"]
        options = {"draftree": {"datastore": str(datastore)}}
        found["ours"] = {"speculative_config": OURS, "additional_config": options}
    if export is not None:
        drafter = {"method": "eagle3", "model": str(export), "num_speculative_tokens": 3}
        found["eagle3"] = {"speculative_config": drafter}
    return found


def build_datastore(answers: Path, model: Path, tokenizer: Any, folder: Path) -> Path:
    """Build a datastore of earlier answers in a new folder within `folder`, and return it."""
    texts, found = folder / "answers.jsonl", folder / "datastore"
    with gzip.open(answers, "rt") as lines, texts.open("w") as written:
        for line in lines:
            text = tokenizer.decode(json.loads(line)["ids"], skip_special_tokens=True)
            written.write(json.dumps({"text": text}) + "\n")
    command = (sys.executable, "-m", "draftree", "datastore", "build", str(model))
    options = ("--kind", "rest", "--data", str(texts), "--out", str(found))
    subprocess.run([*command, *options], check=True, stdout=sys.stderr)
    return found


def prompts(suites: Sequence[str], tokenizer: Any, count: int) -> dict[str, list[list[int]]]:
    """Return the token ids of the first prompts of each suite, by its name.

    Raises:
        UserError: a suite cannot be read, or has too few prompts.
    """
    found = {}
    for each in suites:
        name, _, file = each.partition("=")
        if not file:
            raise UserError(f"suite is {format_value(each)}, allowed is NAME=FILE")
        with as_user_error(f"cannot read suite '{file}'"), open(file) as lines:
            texts = [json.loads(line)["prompt"] for line in islice(lines, count)]
        if len(texts) < count:
            raise UserError(f"suite {name} has {len(texts)} prompts, wanted are {count}")
        found[name] = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    return_dict=True,
                )["input_ids"]
            )
            for text in texts
        ]
    return found


def measure_speed(worker: VllmWorker, asked: Sequence[list[int]], batch: int, tokens: int) -> float:
    """Return the tokens per second of a way on prompts, so many at once."""
    written, seconds = 0, 0.0
    for i in range(0, len(asked), batch):
        texts, took = worker.write(asked[i : i + batch], (), tokens)
        written += sum(map(len, texts))
        seconds += took
    return written / seconds


def one_round(
    workers: dict[str, VllmWorker],
    texts: dict[str, list[list[int]]],
    number: int,
    count: int,
    tokens: int,
) -> dict[str, dict[str, float]]:
    """Return the tokens per second of each way, by suite and batch, on the prompts of a round.

    Another way begins in each round, and the ways take turns at each suite and batch.
    """
    names = list(workers)
    turn = number % len(names)
    speeds: dict[str, dict[str, float]] = {name: {} for name in names}
    for suite, found in texts.items():
        for place, batch in enumerate(BATCHES):
            first = (number * len(BATCHES) + place) * count
            part = found[first : first + count]
            for name in (*names[turn:], *names[:turn]):
                place_speed = measure_speed(workers[name], part, batch, tokens)
                speeds[name][f"{suite}/{batch}"] = place_speed
    return speeds


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median speed of each way, by suite and batch."""
    found: dict[str, dict[str, float]] = {}
    for name in rounds[0]["speeds"]:
        found[name] = {
            place: round(statistics.median(each["speeds"][name][place] for each in rounds), 2)
            for place in rounds[0]["speeds"][name]
        }
    return found


def table(speeds: dict[str, dict[str, float]]) -> str:
    """Return the medians as a table, with the mean ratio to the better rival of each place."""
    places = list(speeds["plain"])
    lines = ["| | " + " | ".join(place.replace("/", ", ") for place in places) + " |"]
    lines.append("|---" * (len(places) + 1) + "|")
    for name, found in speeds.items():
        lines.append(f"| {name} | " + " | ".join(f"{found[place]:.1f}" for place in places) + " |")
    ours = speeds["ours"]
    rivals = [ours[p] / max(speeds[name][p] for name in RIVALS) for p in places]
    plain = [ours[p] / speeds["plain"][p] for p in places]
    lines.append("")
    lines.append(f"ours / better rival: {_ratios(rivals)}")
    lines.append(f"ours / plain: {_ratios(plain)}")
    return "\n".join(lines)


def _ratios(values: Sequence[float]) -> str:
    each = " ".join(f"{value:.3f}" for value in values)
    return f"mean {statistics.mean(values):.3f}; {each}"


def finished_rounds(out: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rounds of a result that has the same settings; none otherwise."""
    kept = json.loads(out.read_text()) if out.is_file() else {}
    rounds: list[dict[str, Any]] = kept["rounds"] if kept.get("about") == about else []
    return rounds


def main() -> int:
    """Run the rounds that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--suite", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--answers", type=Path, help="answers that the model has written")
    parser.add_argument("--export", type=Path, help="an exported eagle3")
    known = tuple(ways(Path(), Path()))
    parser.add_argument("--way", action="append", choices=known, help="only these ways")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=4, help="per suite, batch and round")
    parser.add_argument("--out", type=Path, help="result, with the rounds that were finished")
    asked = parser.parse_args()
    if asked.answers and not asked.answers.is_file():
        parser.error(f"answers file '{asked.answers}' does not exist")
    tokenizer: Any = AutoTokenizer.from_pretrained(asked.model)
    try:
        texts = prompts(asked.suite, tokenizer, asked.rounds * asked.texts * len(BATCHES))
    except UserError as error:
        parser.error(str(error))
    common = {"dtype": asked.dtype, **COMMON}
    about = {
        "machine": machine(torch.device("cpu")),
        "versions": versions(asked.vllm),
        "vllm.LLM": common,
        "tokens": asked.tokens,
        "texts": asked.texts,
        "answers": asked.answers.name if asked.answers else None,
        "model": asked.model.name,
        "export": asked.export.name if asked.export else None,
        "ways": asked.way,
        "suites": {
            name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
            for name, _, file in (each.partition("=") for each in asked.suite)
        },
    }
    done = finished_rounds(asked.out, about) if asked.out else []
    with tempfile.TemporaryDirectory() as cache:
        datastore = None
        if asked.answers is not None:
            datastore = build_datastore(asked.answers, asked.model, tokenizer, Path(cache))
        workers = {
            name: VllmWorker(
                asked.vllm,
                {"model": str(asked.model), **common, **own},
                {**SETTINGS, "DRAFTREE_CACHE": cache},
            )
            for name, own in ways(asked.export, datastore).items()
            if not asked.way or name in asked.way
        }
        for worker in workers.values():  # loads the model and warms up
            worker.write([next(iter(texts.values()))[0][:20]] * max(BATCHES), (), 8)
        for number in range(len(done), asked.rounds):
            done.append({"speeds": one_round(workers, texts, number, asked.texts, asked.tokens)})
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
            if asked.out:
                kept = {"about": about, "rounds": done, "medians": medians(done)}
                write_text(asked.out, json.dumps(kept, indent=1) + "\n")
        for worker in workers.values():
            worker.close()
    found = medians(done)
    if {"plain", "ours", *RIVALS} <= found.keys():
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
