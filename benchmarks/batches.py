"""Which policy writes the most tokens a second, by batch size and machine? Counted by cost curves, not timed.

    python benchmarks/batches.py --out benchmarks/results/batches.json

Texts are written in batches by the demo target, and every step is counted by a machine's curves:
`cpu` was measured (SmolLM2 135M in bfloat16, AMD EPYC Zen 4 with AVX-512-bf16, 2 cores), the others
are formulas: `h100` a dense 8B model by its roofline, `moe` a staircase of 8 tokens, `linear` a
machine on which no token is cheaper than another. Policies that read no costs are run once and
counted on every machine. The gain is tokens a second over those of plain decoding with as many
sequences as each step had, as in a batch whose free places are taken at once.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftree.batch import Generation
from draftree.costs.cost_table import CostTable, estimate_seconds
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode
from draftree.drafters.base import Drafter
from draftree.engine import Engine, generate_plain
from draftree.evaluation import suites
from draftree.evaluation.provenance import provenance
from draftree.evaluation.result_rows import save
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target

DRAFTERS = ("edd", "eagle3", "medusa", "suffix")
POLICIES = ("chain", "eagle2", "pct", "adaptive", "yield")
SIZES = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (*range(1, 33), 40, 48, 64, 65, 96, 128)
"""Numbers of tokens of each sequence; curves also have a point at every number up to eight."""
SEARCH = 5e-5
"""Seconds of a draft step without a network."""

Curve = Callable[[float], float]


@dataclass(frozen=True)
class Machine:
    """Return the seconds of target passes and draft steps, by tokens of all sequences."""

    target: Curve
    draft: Curve

    def table(self, drafter: Drafter[Any]) -> CostTable:
        """Return the costs of a pairing at every batch size."""
        draft: Curve = (lambda n: SEARCH) if drafter.searches else self.draft
        entries = []
        for rows in SIZES:
            points = sorted({*range(1, 8 * rows), *(w * rows for w in WIDTHS)})
            curves = ({n / rows: curve(n) for n in points} for curve in (draft, self.target))
            entries.append(Costs(*curves, rows=rows))
        return CostTable(tuple(entries))


def measured(tokens: Sequence[int], milliseconds: Sequence[float]) -> Curve:
    """Return a curve through measured points, extrapolated with its last slope."""
    slope = (milliseconds[-1] - milliseconds[-2]) / (tokens[-1] - tokens[-2])
    return lambda n: (
        1e-3 * (float(np.interp(n, tokens, milliseconds)) + max(n - tokens[-1], 0) * slope)
    )


MACHINES = {
    "cpu": Machine(
        measured(
            (1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
            (8.0, 8.1, 8.5, 9.6, 13.1, 16.0, 21.9, 28.9, 43.0, 55.3),
        ),
        measured((1, 4, 8, 16, 24, 32, 48, 64), (0.39, 0.6, 0.75, 1.15, 1.6, 2.1, 3.0, 3.85)),
    ),
    "h100": Machine(lambda n: 6.5e-3 + 2.7e-5 * n, lambda n: 7e-4 + 1e-6 * n),
    "moe": Machine(lambda n: 1e-2 + 3e-3 * ((n - 1) // 8), lambda n: 6e-4 + 1e-6 * n),
    "linear": Machine(lambda n: 1e-3 * n, lambda n: 5e-5 * n),
}


def row(
    target: Target, drafter: str, policy: str, size: int, requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Return the figures of one drafter and policy at one batch size, on every machine."""
    batches = [requests[i : i + size] for i in range(0, len(requests), size)]
    baseline = [generate_plain(target, batch).tokens for batch in batches]
    opened = build("drafter", drafter).open(target)
    found, written = list[dict[str, Any]](), None
    gained = list[int]()  # tokens of each step
    for name, machine in MACHINES.items():
        table, rule = machine.table(opened), build("policy", policy)
        if written is None or rule.reads_costs:
            engine = Engine(target, opened, rule, costs=table)
            written, gained = list[Generation](), []
            for batch in batches:
                told = list[int]()
                note = lambda new, told=told: told.append(sum(len(e.tokens) for e in new))
                written.append(engine.write(batch, on_tokens=note, reuse=False))
                gained += told[1:]  # the first are those of the prefill
        assert [w.tokens for w in written] == baseline, "texts are those of plain decoding"
        work = [step for w in written for step in w.stats.work]
        ours = estimate_seconds(table, work)[0]
        alone = sum(
            n / w.rows * table.at(w.context, w.rows).token
            for n, w in zip(gained, work, strict=True)
        )
        steps = sum(step.rows for step in work)
        drafted = [step.fed > step.rows for step in work]
        found.append(
            {
                "machine": name,
                "drafter": drafter,
                "policy": policy,
                "batch": size,
                "gain": alone / ours,
                "tokens_per_step": sum(w.stats.new_tokens for w in written) / steps,
                "nodes_per_step": sum(step.fed for step in work) / steps - 1,
                "last_drafted": max((i for i, d in enumerate(drafted, 1) if d), default=0),
                "steps": len(work),
            }
        )
    return found


def behind(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `yield` compared with the best of the others and plain decoding, worst ratio first."""
    places = sorted({(r["machine"], r["drafter"], r["batch"]) for r in rows})
    found = []
    for place in places:
        here = {
            r["policy"]: r["gain"]
            for r in rows
            if (r["machine"], r["drafter"], r["batch"]) == place
        }
        mine = here.pop("yield")
        best = max({**here, "plain": 1.0}.items(), key=lambda item: item[1])
        found.append(
            dict(zip(("machine", "drafter", "batch"), place, strict=True))
            | {"yield": mine, "best": best[1], "policy": best[0], "ratio": mine / best[1]}
        )
    return sorted(found, key=lambda f: float(f["ratio"]))


def main() -> None:
    """Count all combinations and save them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", nargs="+", default=DRAFTERS)
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--batch", nargs="+", type=int, default=SIZES)
    parser.add_argument(
        "--texts", type=int, default=16, help="texts at each size, at least one batch"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    target = Target.load("demo")
    prompts = suites.join_suites(["demo"], False, "plain").prompts
    requests = [
        Request(
            encode(target.tokenizer, prompts[i % len(prompts)].content),
            asked.max_new_tokens,
            target.eos,
            i,
        )
        for i in range(max(asked.texts, *asked.batch))
    ]
    rows = list[dict[str, Any]]()
    for size in asked.batch:
        for drafter in asked.drafter:
            for policy in asked.policy:
                rows += row(target, drafter, policy, size, requests[: max(asked.texts, size)])
                print(
                    *(f"{r['machine']} {r['gain']:.3f}" for r in rows[-len(MACHINES) :]),
                    drafter,
                    policy,
                    size,
                    flush=True,
                )
            save(
                {"provenance": provenance(target, 0), "rows": rows, "behind": behind(rows)},
                asked.out,
            )
    print(json.dumps(behind(rows)[:12], indent=1))


if __name__ == "__main__":
    main()
