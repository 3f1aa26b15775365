"""τ and counted speed-ups of drafters × policies, along texts that the target writes once.

    python benchmarks/replayed.py SUITE --target smollm2 --texts texts.json --drafter edd --policy chain --policy pct \\
        --costs edd.json --out result.json [--per-category 20] [--pair "pld chain:length=10"]

No layer of the target runs while a cell is measured, so a table takes a tenth of the time that `draftree bench` needs; τ, the
nodes and the work of every step are those of the live run (tests/test_replayed.py), and there are no seconds by the clock.
`--texts` is read where it is there, and written where it is not, so that several tables share it. Above `--temperature` 0 texts
are sampled, and drafted with `match`. An interrupted run goes on.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftree.boundary.files import write_text
from draftree.cli import inputs, terminal
from draftree.engine import Engine, plain
from draftree.evaluation import report, suites, tables
from draftree.evaluation.cells import Cell, PromptResult, assemble, chosen, paired, product
from draftree.evaluation.driven import Text
from draftree.evaluation.journal import Journal
from draftree.evaluation.provenance import provenance
from draftree.evaluation.replayed import Replayed
from draftree.models.target import Target
from draftree.request import Request
from draftree.sampling.settings import Sampling

TOGETHER = 8
"""Texts that the target writes at a time."""


def written(target: Target, requests: Sequence[Request], path: Path) -> list[list[int]]:
    """The target's texts, from a file where they are there."""
    known: dict[str, list[int]] = json.loads(path.read_text()) if path.is_file() else {}

    def key(request: Request) -> str:
        drawn = "" if request.sampling.greedy else f"{request.sampling.temperature} {request.number} "
        return f"{drawn}{request.max_new_tokens} {' '.join(map(str, request.prompt))}"

    missing = sorted((r for r in requests if key(r) not in known), key=lambda r: len(r.prompt))
    with terminal.progress("writing texts", len(missing)) as tell:
        for at in range(0, len(missing), TOGETHER):
            some = missing[at : at + TOGETHER]
            known |= dict(zip(map(key, some), plain(target, some).tokens, strict=True))
            write_text(path, json.dumps(known) + "\n")
            tell(at + len(some))
    return [known[key(request)] for request in requests]


def along(replayed: Replayed, request: Request, engines: dict[Cell, Engine]) -> dict[Cell, PromptResult]:
    """All cells on one text; plain decoding is what costs are counted against. Engines keep what drafters learn from texts."""
    done = {}
    for cell in list(engines):
        here = engines[cell] = replace(engines[cell], target=replayed)
        found = here.plain([request]) if cell.plain else here.write([request], reuse=False)
        done[cell] = PromptResult(found.tokens[0], [found.stats])
    return done


CLOCKED = ("tokens_per_second", "speedup", "draft_seconds", "verify_seconds", "phases", "seconds")
SHOWN = ("drafter", "policy", "τ [95 %]", "nodes/step", "depth/step", "drafts/step", "counted speed-up [95 %]")


def unclocked(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures without those by the clock, which a replay has none of."""
    inside = {k: unclocked(v) if isinstance(v, dict) else v for k, v in figures.items()}
    return {k: v for k, v in inside.items() if k not in CLOCKED}


def by_category(row: dict[str, Any], categories: Sequence[str]) -> dict[str, float]:
    """τ of the prompts of each category."""
    accepted, steps = (np.array(row["per_prompt"][k]) for k in ("accepted", "steps"))
    names = np.array(categories)
    return {c: 1 + float(accepted[names == c].sum() / max(steps[names == c].sum(), 1)) for c in dict.fromkeys(categories)}


def main() -> None:
    """Replays the texts, prints and saves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--pair", action="append", default=[])
    parser.add_argument("--costs", type=Path, action="append", default=[])
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    inputs.quiet()
    pairs, suite = paired(args.drafter, args.policy, args.pair), suites.load(args.suite)
    costs = inputs.costs_of_each(args.costs, [d for d, *_ in pairs])
    opened = assemble(lambda: Target.load(args.target), pairs, costs)
    some = next(iter(opened.values()))
    requests, _ = chosen(suite.select(args.category), some, args.max_new_tokens, None, args.per_category)
    requests = [replace(request, sampling=Sampling(temperature=args.temperature)) for request in requests]
    answers = written(some.target, requests, args.texts)
    engines = {
        c: replace(some if c.plain else opened[c.drafter or "", c.policy or ""]) for c in product(pairs, [args.temperature])
    }
    about = {"suite": {"name": suite.name, "sha256": suite.sha256, "categories": args.category},
             "per_category": args.per_category, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
             "replayed": True,
             "costs": {d: asdict(c) for d, c in costs.items()}}  # fmt: skip
    key = about | {"target": args.target, "cells": [asdict(c) for c in engines]}
    journal = Journal(args.out.with_name(args.out.name + ".partial"), key)
    done, layers = journal.read(list(engines)), sorted({n for e in opened.values() for n in e.drafter.needs.hidden})
    with terminal.progress("replaying", len(requests)) as tell:
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            if i >= len(done):
                text = Text(np.array([*request.prompt, *answer], np.int64), len(request.prompt))
                done.append(along(Replayed.along(some.target, text, layers), request, engines))
                journal.add(done[-1])
            tell(i + 1)
    category = {p.number: p.category for p in suite.prompts}
    of = [category[request.number] for request in requests]
    rows = [row | {"τ": by_category(row, of)} for row in report.rows(done, 0, None, costs)]
    report.save({"provenance": provenance(some.target, 0) | about, "rows": list(map(unclocked, rows))}, args.out)
    journal.remove()
    shown = [{name: row[name] for name in SHOWN} for row in tables.shown(rows)]
    terminal.output().print(terminal.table(f"{len(done)} texts; saved in {args.out}", shown))


if __name__ == "__main__":
    main()
