"""Are costs that are learnt from running steps as good as costs that were measured explicitly?

    python benchmarks/learnt_costs.py --suite FILE [--target smollm2] [--limit 24] [--tokens 64] [--session 4]

Three engines write the same prompts in turn with the target's usual drafter. The first has costs
that were measured explicitly before. The second has learnt costs that earlier steps have settled
(warm). The third begins from the estimate every few prompts (cold). Printed are ratios of tokens
per second to the first one, with 95 % intervals over prompts.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np

import draftree
from draftree.cost_estimate import draft_size, learnt_costs, target_size
from draftree.costs.cost_table import CostTable
from draftree.costs.machine_probe import machine_speed
from draftree.costs.online_costs import Learner, OnlineCosts
from draftree.engine import Engine
from draftree.evaluation.bootstrap import ratio_bounds, samples
from draftree.evaluation.grid import choose_requests
from draftree.evaluation.suites import load
from draftree.measure_costs import measure
from draftree.utils.hardware import machine


def cold(engine: Engine) -> Engine:
    """Return the engine with learnt costs that know nothing yet and are kept nowhere."""
    decoder = engine.target.decoder
    speed = lambda: machine_speed(decoder.device, decoder.dtype)
    known = learnt_costs(engine.target, engine.drafter).drafter.models
    sizes = {name: model.size for name, model in known.items()} | {
        "draft": draft_size(engine.drafter, decoder)
    }
    target = Learner(None, {}, {"target": target_size(decoder)}, speed)
    found = replace(engine)
    found._learnt = OnlineCosts(target, Learner(None, {}, sizes, speed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--session", type=int, default=4)
    asked = parser.parse_args()
    engine = draftree.load(asked.target, policy="yield")
    requests, _ = choose_requests(
        load(asked.suite).prompts, engine, asked.tokens, asked.limit, asked.per_category
    )
    measured = CostTable(measure(engine.target, engine.drafter))
    engines = {
        "measured": replace(engine, costs=measured),
        "warm": replace(engine),
        "cold": cold(engine),
    }
    for each in engines.values():
        each.write([requests[0]], reuse=False)
    engines["cold"] = cold(engine)
    seconds, nodes = defaultdict(list), defaultdict(list)
    for i, request in enumerate(requests):
        if i % asked.session == 0:
            engines["cold"] = cold(engine)
        names = list(engines)
        for name in (*names[i % 3 :], *names[: i % 3]):
            done = replace(engines[name], learned={}, carried=None)
            done._learnt = engines[name]._learnt
            written = done.write([request], reuse=False)
            seconds[name].append(written.stats.seconds)
            nodes[name].append(written.stats.nodes_per_step)
        print(f"{i + 1} of {len(requests)}", end="\r", flush=True)
    picked = samples(len(requests), 0)
    for name in ("warm", "cold"):
        over, under = np.array(seconds["measured"]), np.array(seconds[name])
        low, high = ratio_bounds([over], [under], picked)
        ratio = over.sum() / under.sum()
        drafted = np.mean(nodes[name])
        usual = np.mean(nodes["measured"])
        print(
            f"{name}: {ratio:.3f} [{low:.3f}, {high:.3f}] × measured, {drafted:.1f} nodes a step, measured {usual:.1f}"
        )
    print(
        json.dumps(
            machine(engine.target.decoder.device)
            | {"prompts": len(requests), "tokens": asked.tokens}
        )
    )


if __name__ == "__main__":
    main()
