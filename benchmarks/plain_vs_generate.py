"""Is the plain baseline a fair one? Its speed against transformers' own `generate`, on the same model object.

    python benchmarks/plain_vs_generate.py [--target demo] [--tokens 128] [--rounds 9]

Both write the same greedy tokens after the same prompt, in turn, order rotated; the ratio of
medians must be at least 0.95, or speed-ups over plain decoding mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from draftree import Request, Target
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.policies.chain import Chain
from draftree.utils.hardware import machine


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--target", default="demo")
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--rounds", type=int, default=9)
    args = ap.parse_args()
    target = Target.load(args.target)
    engine = Engine(target, PLD().open(target), Chain())
    prompt = [7 + i % 200 for i in range(100)]
    request = [Request(prompt, args.tokens)]
    ids = torch.tensor([prompt], device=target.decoder.device)
    model: Any = target.decoder.model
    theirs = lambda: model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.tokens,
        min_new_tokens=args.tokens,
        do_sample=False,
        eos_token_id=None,
    )[0, len(prompt) :].tolist()
    ours = lambda: engine.plain(request).tokens[0]
    same = theirs() == ours()
    times: dict[str, list[float]] = {"generate": [], "plain": []}
    for i in range(args.rounds):
        for name, work in sorted((("generate", theirs), ("plain", ours)), reverse=bool(i % 2)):
            times[name].append(seconds(work))
    each = {k: statistics.median(v) / args.tokens for k, v in times.items()}
    result = {
        "ratio": each["generate"] / each["plain"],
        "seconds_per_token": each,
        "same_tokens": same,
    }
    print(json.dumps(result | {"machine": machine(target.decoder.device)}, indent=1))


if __name__ == "__main__":
    main()
