"""Time a ragged batch beside one sequence with the same number of tokens in its linear layers.

    python benchmarks/ragged_batches.py --target smollm2 --dtype bfloat16 --out ragged.json

A step verifies trees of several sequences after texts of 20 to 600 tokens; the one sequence has as
many tokens as all of them, after a text of the mean length. A prompt pass reads texts of these
lengths; the one sequence is as long as all of them, so its attention sees more. All ways take
turns; figures are medians in milliseconds.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from draftree.evaluation.provenance import command, provenance
from draftree.models.forward_batch import ForwardBatch
from draftree.models.model_runner import ModelRunner
from draftree.target.target import HiddenStateSpec, Target

SEQUENCES = 8
SHORTEST = 20
LONGEST = 600


def step(
    target: Target, runner: ModelRunner, lengths: list[int], counts: list[int]
) -> Callable[[], Any]:
    """Return a pass over so many tokens of each sequence, after texts of these lengths."""
    decoder = target.decoder
    cache = decoder.new_cache(len(lengths), max(lengths) + max(counts))
    target.prefill(cache, [np.arange(n) % decoder.vocab for n in lengths], HiddenStateSpec())
    ids = [np.arange(n) % decoder.vocab for n in counts]
    batch = ForwardBatch.chains(ids, cache.lengths.copy(), decoder.device)
    return lambda: runner.forward(batch, cache)


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = Target.load(args.target, args.dtype, compile=True, exactness="bits")
    decoder = target.decoder
    lengths = np.linspace(SHORTEST, LONGEST, SEQUENCES).round().astype(int).tolist()
    mean = round(sum(lengths) / len(lengths))
    trees = [1, 2, 4, 8, 8, 12, 16, 13]
    runner = decoder.runner
    ways = {
        "step, ragged batch": step(target, runner, lengths, trees),
        "step, one sequence": step(target, runner, [mean], [sum(trees)]),
        "step, ragged batch, padded": step(target, decoder.hf, lengths, trees),
        "prompts, ragged batch": step(target, runner, [1] * SEQUENCES, lengths),
        "prompts, one sequence": step(target, runner, [1], [sum(lengths)]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(args.rounds):
            for name, work in ways.items():
                start = perf_counter()
                work()
                seconds[name].append(perf_counter() - start)
    found = {name: round(1000 * median(each[1:]), 3) for name, each in seconds.items()}
    ratios = {
        kind: found[f"{kind}, ragged batch"] / found[f"{kind}, one sequence"]
        for kind in ("step", "prompts")
    }
    result = {
        "command": command(),
        "lengths": lengths,
        "trees": trees,
        "ms": found,
        "ratios": ratios,
        **provenance(target, 0),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"ms": found, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
