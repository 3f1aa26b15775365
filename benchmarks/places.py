"""How many tokens a step brings, by how much of the text is written when it begins (ADED, Figure 4a).

    python benchmarks/places.py SUITE --category math_reasoning --limit 40 --policy mcts:c1=2.414 \\
        --drafter aded:datastore=FOLDER,session=false --drafter aded:datastore=FOLDER,session=false,adapt=false --out FILE

A row for each drafter: τ of the steps that began in each stretch of a text, and of how many steps
the first token was right, where it is one that stands in the prompt and where it is another, each
with its 95 % interval (bootstrap over prompts, the same ones for all); and behind the first
drafter's row, by how much it is ahead of each of the others. With `--recording` the texts are
replayed, as by `draftree replay`.

Shapes: P prompts, S columns, B bootstrap samples.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftree.batch import Generation
from draftree.cli.arguments import quiet
from draftree.engine import Engine
from draftree.evaluation import result_rows, suites, text_tables
from draftree.evaluation.bootstrap import samples
from draftree.evaluation.grid import choose_requests
from draftree.evaluation.provenance import provenance
from draftree.evaluation.trace_store import Recordings
from draftree.metrics import Step
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.tree import Floats, Ints

COPIED = ("first token right: of the prompt", "first token right: others")


def by_place(
    steps: Sequence[Step], text: Sequence[int], prompt: Sequence[int], stretch: int, stretches: int
) -> Floats:
    """Return [2, S] sums over one text's steps: a count for each column, and the number of steps.

    The columns are stretches of the text. They count the new tokens (accepted + 1) of the steps
    that begin there. The last two columns count how often a token was accepted, by whether the next
    token occurs in the prompt.
    """
    found = np.zeros((2, stretches + 2))
    written = 1
    known = set(prompt)  # the prefill's token is written before the first step
    for step in steps:
        found[:, min(written // stretch, stretches - 1)] += (step.accepted + 1, 1)
        if written < len(text):
            found[:, stretches + (text[written] not in known)] += (step.accepted > 0, 1)
        written += step.accepted + 1
    return found


def lengths(sums: Floats, prompts: Ints) -> Floats:
    """Return ratios […, S] of sums [P, 2, S] over prompts […, P]; NaN where there are no steps."""
    tokens, steps = np.moveaxis(sums[prompts].sum(axis=-3), -2, 0)
    return np.divide(tokens, steps, out=np.full(steps.shape, np.nan), where=steps > 0)


def told(value: Floats, sampled: Floats, stretch: int) -> dict[str, str]:
    """Return a figure [S] by stretch with its interval over samples [B, S].

    It is empty where there are no steps.
    """
    heads = [*(f"{i * stretch}–{(i + 1) * stretch - 1}" for i in range(len(value) - 2)), *COPIED]
    there = ~np.isnan(value)
    ends = np.nanquantile(sampled[:, there], (0.025, 0.975), axis=0)
    shown = iter(
        [
            text_tables.interval(figure, bounds)
            for figure, bounds in zip(value[there], ends.T, strict=True)
        ]
    )
    return {head: next(shown) if known else "" for head, known in zip(heads, there, strict=True)}


def texts(engine: Engine, requests: Sequence[Request], folder: Path | None) -> Iterator[Generation]:
    """Yield the texts of all requests, generated anew or replayed."""
    known = (
        None if folder is None else Recordings.open(folder, engine.target, [engine.drafter.needs])
    )
    if known is not None:
        known.record(known.missing(requests))
    for request in requests:
        source = engine.target if known is None else known.source(request)
        yield replace(engine, target=source).write([request], Sampling(), reuse=False)


def main() -> None:
    """Generate the texts, then print and save the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--stretch", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    target, suite = Target.load(args.target), suites.load(args.suite)
    stretches, sums = -(-args.max_new_tokens // args.stretch), {}
    for drafter in args.drafter:
        engine = Engine(
            target, build("drafter", drafter).open(target), build("policy", args.policy)
        )
        requests, _ = choose_requests(
            suite.select(args.category), engine, args.max_new_tokens, args.limit
        )
        sums[drafter] = np.array(
            [
                by_place(done.stats.steps, done.tokens[0], request.prompt, args.stretch, stretches)
                for request, done in zip(
                    requests, texts(engine, requests, args.recording), strict=True
                )
            ]
        )
    everyone, drawn = np.arange(len(requests)), samples(len(requests), 0)
    tau = {d: (lengths(s, everyone), lengths(s, drawn)) for d, s in sums.items()}
    first = args.drafter[0]
    rows: list[dict[str, Any]] = [
        {"drafter": d, "policy": args.policy} | told(*tau[d], args.stretch) for d in args.drafter
    ]
    for other in args.drafter[1:]:
        ahead = (mine - theirs for mine, theirs in zip(tau[first], tau[other], strict=True))
        rows.append(
            {"drafter": f"{first} − {other}", "policy": args.policy} | told(*ahead, args.stretch)
        )
    for row in rows:
        print(row)
    about = {
        "suite": suite.name,
        "categories": args.category,
        "prompts": len(requests),
        "max_new_tokens": args.max_new_tokens,
    }
    each = {d: s.tolist() for d, s in sums.items()}
    result_rows.save(
        {"provenance": provenance(target, 0) | about, "rows": rows, "per_prompt": each}, args.out
    )


if __name__ == "__main__":
    main()
