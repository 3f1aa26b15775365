"""Is a drafter's confidence its acceptance (EDD + PCT, Figure 3b)? And what does recalibration change for PCT?

    python benchmarks/calibration.py SUITE --target demo --drafter edd --category math_reasoning --limit 24 --out FILE

The expected calibration error (ECE) is that of the likeliest candidate at places that a chain comes
to, over ten bins. Half of the texts fit two maps from q to acceptance, over all candidates: a
temperature (log-odds times a constant) and isotonic regression. On the other half the ECE is
measured again, and PCT grows its trees by the mapped q, beside EAGLE-2's tree of 50 by the
drafter's own.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from common.drafter_calibration import BINS, MAX_DEPTHS, RANKS
from draftree.cli.arguments import quiet
from draftree.costs.step_costs import Costs, monotone
from draftree.data.prompts import encode
from draftree.engine import Engine
from draftree.evaluation import result_rows, suites
from draftree.evaluation.bootstrap import paired_ratio, samples
from draftree.evaluation.provenance import provenance
from draftree.evaluation.replay_target import ReplayTarget
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.evaluation.teacher_forcing import greedy_answers, prompts_that_fit, replay
from draftree.policies.pct import PCT
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target
from draftree.tree import Floats

Map = Callable[[Floats], Floats]
"""A map from q to the probability of acceptance."""
LEAST = 1e-6
"""q below which, and beyond 1 minus which, log-odds do not go."""
TEMPERATURES = np.geomspace(0.2, 5.0, 81)
"""Constants that log-odds are multiplied with."""


@dataclass(frozen=True)
class Seen:
    """Store candidates along one text.

    Attributes:
        q: [M] q of the likeliest candidate, at positions that a chain reaches.
        right: [M] whether it was the text's token.
        every_q: [N] q of all candidates.
        every_right: [N] whether each was the text's token.
    """

    q: Floats
    right: Floats
    every_q: Floats
    every_right: Floats


def seen(target: Target, drafter: Any, text: TokenText) -> Seen:
    """Run a drafter along a text in blocks."""
    source = Recording.of(target, [text], drafter.needs.hidden)
    reached, every = list[tuple[float, bool]](), list[tuple[Floats, Floats]]()
    for block in replay(source, drafter, [text], RANKS, MAX_DEPTHS):
        alive = True
        for nodes, found in block.asked:
            q, hit = np.exp(found.log_q[0]), found.tokens[0] == block.following(nodes)[0]
            every.append((q, hit))
            if alive:
                reached.append((float(q[0]), bool(hit[0])))
            alive = alive and bool(hit[0])
    q, right = np.array(reached, np.float64).T
    return Seen(
        q,
        right,
        np.concatenate([a for a, _ in every]),
        np.concatenate([b for _, b in every]).astype(np.float64),
    )


def error(several: Sequence[Seen], by: Map) -> float:
    """Return the ECE of some texts where q is mapped."""
    q, right = (
        by(np.concatenate([s.q for s in several])),
        np.concatenate([s.right for s in several]),
    )
    bins = np.minimum((q * BINS).astype(np.int64), BINS - 1)
    return float(
        sum(abs(q[bins == b].sum() - right[bins == b].sum()) for b in range(BINS)) / len(q)
    )


def odds(q: Floats) -> Floats:
    """Return log-odds."""
    q = np.clip(q, LEAST, 1 - LEAST)
    return np.log(q / (1 - q))


def temperature(several: Sequence[Seen]) -> tuple[Map, float]:
    """Fit the factor of the log-odds by the likelihood of all candidates."""
    at, right = (
        odds(np.concatenate([s.every_q for s in several])),
        np.concatenate([s.every_right for s in several]),
    )
    losses = [np.logaddexp(0, np.where(right > 0, -a, a) * at).mean() for a in TEMPERATURES]
    best = float(TEMPERATURES[int(np.argmin(losses))])
    return lambda q: 1 / (1 + np.exp(-best * odds(q))), best


def isotonic(several: Sequence[Seen]) -> Map:
    """Fit a nondecreasing map to all candidates, averaged over a thousand equal groups first."""
    q, right = (
        np.concatenate([s.every_q for s in several]),
        np.concatenate([s.every_right for s in several]),
    )
    order = np.argsort(q, kind="stable")
    groups = np.array_split(order, min(1000, len(order)))
    at, mean = (np.array([x[g].mean() for g in groups]) for x in (q, right))
    level = np.array(monotone(mean.tolist()))
    return lambda x: np.interp(x, at, level)


class Mapped(PCT):
    """Grow trees like PCT, with mapped q."""

    by: ClassVar[Map]

    def draft(self, expand: Any, *rest: Any) -> Any:
        def mapped(*asked: Any) -> Any:
            found = expand(*asked)
            q = np.maximum(type(self).by(np.exp(found.log_q)), LEAST)
            return replace(found, log_q=np.where(np.isfinite(found.log_q), np.log(q), -np.inf))

        return super().draft(mapped, *rest)


def row(target: Target, drafter: Any, policy: Any, texts: Sequence[TokenText]) -> dict[str, Any]:
    """Write texts again with a policy: steps, nodes and accepted tokens of each."""
    each: dict[str, list[float]] = {"tokens": [], "steps": [], "nodes": [], "accepted": []}
    for number, text in enumerate(texts):
        source = ReplayTarget.along(target, text, drafter.needs.hidden)
        engine = Engine(source, drafter, policy, costs=Costs({1: 0.037}, {1: 1.0}))
        request = Request(
            text.tokens[: text.start].tolist(), len(text.tokens) - text.start, number=number
        )
        stats = engine.write([request], reuse=False).stats
        each["tokens"].append(len(text.tokens) - text.start)
        each["steps"].append(len(stats.steps))
        each["nodes"].append(sum(s.nodes for s in stats.steps))
        each["accepted"].append(sum(s.accepted for s in stats.steps))
    steps = sum(each["steps"])
    return {
        "per_prompt": each,
        "τ": sum(each["accepted"]) / steps + 1,
        "nodes a step": sum(each["nodes"]) / steps,
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="edd")
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    target, suite = Target.load(args.target), suites.load(args.suite)
    drafter = build("drafter", args.drafter).open(target)
    prompts = [encode(target.tokenizer, p.content) for p in suite.select(args.category)]
    texts = greedy_answers(
        target,
        prompts_that_fit(prompts, target, args.max_new_tokens)[: args.limit],
        args.max_new_tokens,
    )
    looked = [seen(target, drafter, text) for text in texts]
    fitted = looked[::2]
    held = looked[1::2]
    held_texts = texts[1::2]
    warm, constant = temperature(fitted)
    maps: dict[str, Map] = {
        "as it is": lambda q: q,
        "temperature": warm,
        "isotonic": isotonic(fitted),
    }
    drawn = samples(len(looked), 0)
    whole = [error([looked[i] for i in draw], maps["as it is"]) for draw in drawn[:1000]]
    rows = list[dict[str, Any]]()
    for name, by in maps.items():
        Mapped.by = staticmethod(by)
        found = {"q": name, "ECE, other half": error(held, by)} | row(
            target, drafter, Mapped(ratio=0.037), held_texts
        )
        rows.append({"policy": "pct:ratio=0.037"} | found)
    eagle2 = {"policy": "eagle2:nodes=50", "q": "as it is", "ECE, other half": None}
    rows.append(eagle2 | row(target, drafter, build("policy", eagle2["policy"]), held_texts))
    for one in rows[:-1]:
        ratio = paired_ratio(one, rows[-1], "steps")
        one["passes by eagle2's [95 %]"] = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    rows[-1]["passes by eagle2's [95 %]"] = "1"
    about = {
        "suite": suite.name,
        "categories": args.category,
        "prompts": len(texts),
        "max_new_tokens": args.max_new_tokens,
    }
    told = {"drafter": args.drafter, "ECE": error(looked, maps["as it is"]), "constant": constant}
    told["interval"] = np.quantile(whole, (0.025, 0.975)).tolist()
    for one in rows:
        print({k: v for k, v in one.items() if k != "per_prompt"})
    print(told)
    result_rows.save(
        {"provenance": provenance(target, 0) | about, "rows": rows, "calibration": told}, args.out
    )


if __name__ == "__main__":
    main()
