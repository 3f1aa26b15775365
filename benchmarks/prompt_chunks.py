"""Compare prompts that share the passes of running sequences with prompts that are read in passes of their own.

    python benchmarks/prompt_chunks.py --target smollm2 --dtype bfloat16 --out prompt_chunks.json

Two engines over the same target and drafter take turns in one process. `between`: seconds between
the updates of running sequences, with nothing else and while prompts of `--tokens` tokens are read
one after the other; also the seconds from a long prompt's submission to its first token.
`arrivals`: requests with prompts of 20 to 400 tokens that arrive at random, at a rate that keeps
the machine busy. Ratios are of rounds, in which both engines meet the same load.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from draftree.engine import Engine, load
from draftree.evaluation.arrivals import arrival_times, figures_of_run, serve_arrivals
from draftree.evaluation.provenance import command, provenance
from draftree.request import Request
from draftree.scheduling.handle import Handle

WAYS = {"apart": False, "shared": True}
SHORT, ROOM = 24, 64
"""Tokens of the prompts of running sequences, and of the context that stay free."""


def text(draws: np.random.Generator, tokens: int, vocab: int) -> list[int]:
    """Return a prompt of so many tokens in which phrases come again."""
    phrase = draws.integers(0, vocab, 40)
    return [int(token) for token in phrase[draws.integers(0, len(phrase), tokens)]]


def between(
    engine: Engine, sequences: int, steps: int, long: int, draws: np.random.Generator
) -> dict[str, list[float]]:
    """Measure the seconds between updates of running sequences, alone and with long prompts.

    The seconds to the first tokens of these prompts are returned, too.
    """
    decoder = engine.target.decoder
    most = decoder.context - SHORT - ROOM
    running = [
        engine.submit(Request(text(draws, SHORT, decoder.vocab), most)) for _ in range(sequences)
    ]
    while any(handle.status != "running" for handle in running):
        engine.step()
    for _ in range(8):
        engine.step()
    found: dict[str, list[float]] = {"alone": gaps(engine, steps), "meanwhile": [], "first": []}
    while len(found["meanwhile"]) < steps:
        handle: Handle = engine.submit(Request(text(draws, long, decoder.vocab), 1))
        while not handle.finished:
            found["meanwhile"] += gaps(engine, 1)
        found["first"].append(handle.stats.first_token or 0.0)
    for handle in running:
        engine.cancel(handle)
    engine.step()
    engine.forget()
    return found


def gaps(engine: Engine, steps: int) -> list[float]:
    """Return the seconds of steps, each of which brings tokens to every running sequence."""
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    return found


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    return {
        f"p{share}": round(1000 * float(np.percentile(seconds, share)), 2) for share in (50, 99)
    }


def arrivals(engine: Engine, count: int, rate: float, tokens: int, seed: int) -> dict[str, Any]:
    """Return the figures of requests that arrive at random."""
    draws, vocab = np.random.default_rng(seed), engine.target.decoder.vocab
    requests = [
        Request(text(draws, int(draws.integers(20, 400)), vocab), tokens, number=i)
        for i in range(count)
    ]
    found = figures_of_run(*serve_arrivals(engine, requests, arrival_times(count, rate, seed)))
    engine.forget()
    return found


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    base = load(args.target, dtype=args.dtype)
    long = min(args.tokens, base.target.decoder.context - ROOM)
    engines = {name: Engine(base.target, base.drafter, base.policy) for name in WAYS}
    gathered = {name: {"alone": [], "meanwhile": [], "first": []} for name in WAYS}
    ratios: dict[str, list[float]] = {
        "p50": [],
        "p99": [],
        "first token": [],
        "tokens a second": [],
    }
    rates: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for turn in range(args.rounds + 1):
        order, p = sorted(WAYS, reverse=bool(turn % 2)), dict[str, dict[str, float]]()
        for name in order:
            engines[name].set_limits(share_passes=WAYS[name], max_prefix_tokens=0)
            found = between(
                engines[name], args.sequences, args.steps, long, np.random.default_rng(turn)
            )
            p[name] = spread(found["meanwhile"]) | {"first": median(found["first"])}
            if turn:  # the first round warms up
                for part, seconds in found.items():
                    gathered[name][part] += seconds
                rates[name].append(
                    arrivals(engines[name], args.requests, args.rate, args.new_tokens, turn)
                )
        if turn:
            for part in ("p50", "p99"):
                ratios[part].append(round(p["shared"][part] / p["apart"][part], 3))
            ratios["first token"].append(round(p["shared"]["first"] / p["apart"]["first"], 3))
            a, b = (rates[name][-1]["tokens_per_second"] for name in WAYS)
            ratios["tokens a second"].append(round(b / a, 3))
            print(turn, {name: each[-1] for name, each in ratios.items()}, flush=True)
    figures = {
        name: {part: spread(seconds) for part, seconds in parts.items()}
        for name, parts in gathered.items()
    }
    result = {
        "command": command(),
        "between": figures,
        "ratios": ratios,
        "arrivals": rates,
        "tokens": long,
        **provenance(base.target, 0),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    for name in WAYS:
        p99 = median(each["time_between_updates"]["p99"] for each in rates[name])
        first = median(each["time_to_first_token"]["median"] for each in rates[name])
        print(
            name,
            [round(each["tokens_per_second"], 1) for each in rates[name]],
            f"p99 {p99:.3f} first {first:.3f}",
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
