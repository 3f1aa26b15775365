"""How many passes `suffix` saves on questions whose answers it has written during the warm-up.

    python benchmarks/warm_up.py --suite math.jsonl --suite tasks.jsonl --per-category 20 3 \\
        --costs costs_eagle3.json --out warm_up.json

Until November 2026, `peers.py` warmed up with the first and the last of the questions that it timed
afterwards, and the default drafter remembers texts. This script counts the passes of the default
over such a run (*timed questions*) and over one that warms up with the questions that `peers.py`
uses now (*other questions*). With fixed costs, here those of the processor of the earlier results,
trees do not depend on the clock. `tables.py` multiplies the speeds of the earlier results by the ratio.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from draftree import Request, Target
from draftree.cli.arguments import fixed_costs
from draftree.data.prompts import encode, question
from draftree.engine import Engine, load
from draftree.evaluation import suites
from draftree.evaluation.provenance import provenance
from peers import WARM_UP_QUESTIONS

NEW_TOKENS = 64


def count(engine: Engine, requests: list[Request], warm_up: list[Request], reuse: bool) -> Any:
    """Return the tokens and the passes of an engine over requests, after a warm-up."""
    for request in warm_up:
        engine.write([request], reuse=reuse)
    texts = [engine.write([request], reuse=reuse) for request in requests]
    passes = sum(len(text.stats.work) + 1 for text in texts)
    return {"tokens": sum(len(text.tokens[0]) for text in texts), "passes": passes}


def main() -> None:
    """Count, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", action="append", required=True, type=Path)
    parser.add_argument("--per-category", nargs="+", required=True, type=int)
    parser.add_argument("--costs", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    asked = parser.parse_args()
    target, rows, costs = Target.load("smollm2", "bfloat16"), [], fixed_costs(asked.costs)
    ask = lambda content: Request(encode(target.tokenizer, content), NEW_TOKENS, target.eos)
    for suite, most in zip(asked.suite, asked.per_category, strict=True):
        prompts = suites.load(str(suite)).prompts
        kinds = sorted({p.category for p in prompts})
        chosen = [p for k in kinds for p in [p for p in prompts if p.category == k][:most]]
        requests = [ask(p.content) for p in chosen]
        others = [ask(question(text)) for text in WARM_UP_QUESTIONS]
        for name, warm_up, reuse in (
            ("timed questions", [requests[0], requests[-1]], True),
            ("other questions", others, False),
        ):
            engine = load(target, "eagle3+suffix", "yield", costs=costs)
            found = count(engine, requests, warm_up, reuse)
            rows.append(
                {"suite": suite.stem, "prompts": len(chosen), "warm-up": name}
                | found
                | {"tokens/pass": found["tokens"] / found["passes"]}
            )
            print(rows[-1], flush=True)
    about = provenance(target, 0) | {"costs": json.loads(asked.costs.read_text())}
    asked.out.write_text(json.dumps({"rows": rows, "provenance": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
