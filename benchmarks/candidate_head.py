"""Compare heads of a drafter: its draft vocabulary, all tokens, and candidates that factors of low rank find.

python benchmarks/candidate_head.py tasks.jsonl --per-category 1 --tokens 32 --out
benchmarks/results/candidate_head.json

Each prompt is written with chains of five under every head and by plain decoding, in turns. τ of a
head, the median of seconds over plain decoding's on the same prompt, and seconds of one head over
those of the draft vocabulary's, likewise.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from draftree.cli.arguments import quiet
from draftree.drafters.neural.native_drafter_layers import accelerate
from draftree.drafters.neural.target_modules import TargetHead
from draftree.engine import Engine
from draftree.evaluation import result_rows, suites
from draftree.evaluation.grid import choose_requests
from draftree.evaluation.provenance import provenance
from draftree.policies.chain import Chain
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target

RANKS, COUNTS = (32, 64, 128), (256, 1024)


def opened(drafter: str, target: Target, head: str) -> Any:
    """Return a drafter with a head: `vocabulary`, `all`, or `RANK x CANDIDATES`."""
    if "x" in head:
        rank, count = head.split("x")
        return build("drafter", f"{drafter}:head_rank={rank},head_candidates={count}").open(target)
    found: Any = build("drafter", drafter).open(target)
    if head == "all":
        with_all_tokens(found, target)
    return found


def with_all_tokens(drafter: Any, target: Target) -> None:
    """Give a drafter a head over all tokens.

    Its rows are the drafter's own where it has them, and the target's otherwise.
    """
    if isinstance(getattr(drafter, "_head", None), TargetHead):
        drafter.model.set_output_embeddings(TargetHead(target, raw=True))
        drafter._head = drafter.model.get_output_embeddings()
        return
    net = drafter.model
    rows = target.decoder.head_weight.to(net.lm_head.weight).index_copy(
        0, net.draft_vocabulary.ids, net.lm_head.weight.detach()
    )
    net.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, dtype=rows.dtype)
    net.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    net.d2t = net.t2d = None
    accelerate(net, target.loading.kernels, bool(target.decoder.native_kinds))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of some work, and what it returns."""
    start = perf_counter()
    found = work()
    return perf_counter() - start, found


def compared(
    target: Target, drafter: str, requests: Sequence[Request], rounds: int
) -> list[dict[str, Any]]:
    """Return the figures of each head of a drafter."""
    heads = ["vocabulary", "all", *(f"{rank}x{count}" for rank in RANKS for count in COUNTS)]
    engines = {head: Engine(target, opened(drafter, target, head), Chain(5)) for head in heads}
    seconds: dict[str, list[float]] = {head: [] for head in ("plain", *heads)}
    steps: dict[str, list[int]] = {head: [] for head in heads}
    drafting: dict[str, list[float]] = {head: [] for head in heads}
    for number, request in enumerate(requests):
        works: dict[str, Callable[[], Any]] = {
            "plain": partial(engines["vocabulary"].plain, [request])
        }
        works |= {
            head: partial(engine.write, [request], reuse=False) for head, engine in engines.items()
        }
        for _ in range(rounds):
            order = [*works][number % len(works) :] + [*works][: number % len(works)]
            done = {name: timed(works[name]) for name in order}
            for name, (taken, found) in done.items():
                assert found.tokens == done["plain"][1].tokens, (
                    f"{drafter} with {name} wrote another text"
                )
                seconds[name].append(taken)
                if name in steps:
                    steps[name] += [step.accepted for step in found.stats.steps]
                    drafting[name].append(found.stats.draft_seconds / len(found.stats.steps))
    plain, usual = np.array(seconds["plain"]), np.array(seconds["vocabulary"])
    return [
        {
            "drafter": drafter,
            "head": head,
            "tau": 1 + float(np.mean(steps[head])),
            "speed-up": float(np.median(plain / np.array(seconds[head]))),
            "seconds over the vocabulary's": float(np.median(np.array(seconds[head]) / usual)),
            "drafting of a step over the vocabulary's": float(
                np.median(np.array(drafting[head]) / np.array(drafting["vocabulary"]))
            ),
        }
        for head in heads
    ]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    target, suite = Target.load(args.target), suites.load(args.suite)
    prompts = list(suite.prompts)
    kinds = dict.fromkeys(p.category for p in prompts)
    some = [
        p for kind in kinds for p in [q for q in prompts if q.category == kind][: args.per_category]
    ]
    engine = Engine(target, build("drafter", "pld").open(target), Chain())
    requests, _ = choose_requests(some, engine, args.tokens, len(some))
    requests = [replace(request, max_new_tokens=args.tokens) for request in requests]
    rows = []
    for drafter in args.drafter or ["edd", "eagle3"]:
        rows += compared(target, drafter, requests, args.rounds)
        print(*rows[-2 - len(RANKS) * len(COUNTS) :], sep="\n", flush=True)
    told = {
        "prompts": len(requests),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "dtype": str(target.decoder.dtype),
    }
    saved = (
        {"provenance": provenance(target, 0)}
        | told
        | {"threads": torch.get_num_threads(), "rows": rows}
    )
    result_rows.save(saved, args.out)


if __name__ == "__main__":
    main()
