"""What drafting brings where a grammar constrains the output: by itself, guided by the grammar, and with forced tokens free.

    python benchmarks/structured.py spec_bench.jsonl --limit 20 --out benchmarks/results/structured.json

JSON of one schema is written for math questions by a target, greedily and at temperature 1, each
text once; drafters and policies are replayed along it (`evaluation/replay_target.py`), as the grammar
constrains p itself, whatever is drafted.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftree.cli import terminal
from draftree.cli.arguments import quiet
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode
from draftree.engine import Engine, generate_plain
from draftree.evaluation import result_rows, suites
from draftree.evaluation.provenance import provenance
from draftree.evaluation.replay_target import ReplayTarget
from draftree.evaluation.target_trace import TokenText
from draftree.metrics import Stats, total
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.grammar import Grammar
from draftree.target.target import Target
from draftree.text.options import Options

SCHEMA = {
    "type": "object",
    "properties": {
        "question_kind": {
            "enum": ["addition", "subtraction", "multiplication", "division", "several_steps"]
        },
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9999},
            "minItems": 2,
            "maxItems": 4,
        },
        "explanation": {"type": "string", "maxLength": 60},
        "final_answer": {"type": "integer", "minimum": 0, "maximum": 99999},
        "confident": {"type": "boolean"},
    },
    "required": ["question_kind", "numbers", "explanation", "final_answer", "confident"],
    "additionalProperties": False,
}
COSTS = Costs({1: 0.1}, {1: 1.0, 64: 1.5})
VARIANTS = {
    "drafter alone": (False, False),
    "guided": (True, False),
    "guided, forced tokens free": (True, True),
}


def request(
    target: Target, content: Any, number: int, temperature: float, guided: bool, free: bool
) -> Request:
    """Return a new request, because a grammar caches the masks of the text it is used for."""
    options = Options(
        max_new_tokens=160, temperature=temperature, grammar=Grammar.json_schema(SCHEMA)
    )
    whole = options.request(target, encode(target.tokenizer, content), number)
    return replace(
        whole, guides=whole.guides if guided else (), forced=whole.forced if free else None
    )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    target = Target.load(args.target)
    prompts = suites.load(args.suite).select(["math_reasoning"])[: args.limit]
    engines = {
        (drafter, policy): Engine(
            target, build("drafter", drafter).open(target), build("policy", policy), costs=COSTS
        )
        for drafter, policy in (
            ("edd", "pct:ratio=0.1"),
            ("edd", "chain:length=5"),
            ("pld", "trie"),
        )
    }
    layers = sorted({layer for engine in engines.values() for layer in engine.drafter.needs.hidden})
    rows = []
    for temperature in (0.0, 1.0):
        found: dict[tuple[str, str, str], list[Stats]] = {
            (*pair, name): [] for pair in engines for name in VARIANTS
        }
        with terminal.progress(f"temperature {temperature:g}", len(prompts)) as tell:
            for i, p in enumerate(prompts):
                asked = request(target, p.content, p.number, temperature, False, False)
                text = TokenText(
                    np.array([*asked.prompt, *generate_plain(target, [asked]).tokens[0]], np.int64),
                    len(asked.prompt),
                )
                known = ReplayTarget.along(target, text, layers)
                for pair, engine in engines.items():
                    for name, variant in VARIANTS.items():
                        again = [request(target, p.content, p.number, temperature, *variant)]
                        made = replace(engine, target=known).write(again, reuse=False)
                        assert made.tokens[0] == text.tokens[text.start :].tolist()
                        found[*pair, name].append(made.stats)
                tell(i + 1)
        for (drafter, policy, name), stats in found.items():
            all_of_them = total(stats)
            rows.append(
                {
                    "drafter": drafter,
                    "policy": policy,
                    "temperature": temperature,
                    "draft": name,
                    "acceptance_length": all_of_them.acceptance_length,
                    "nodes_per_step": all_of_them.nodes_per_step,
                    "draft_steps_per_step": all_of_them.draft_steps_per_step,
                }
            )
            print(rows[-1], flush=True)
    result_rows.save(
        {
            "provenance": provenance(target, 0)
            | {"suite": Path(args.suite).name, "limit": args.limit, "replayed": True},
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
