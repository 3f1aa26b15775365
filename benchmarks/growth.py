"""What growing a tree costs by itself: the policy's own time, without the drafter's.

    python benchmarks/growth.py --out benchmarks/results/growth.json

Candidates are made up beforehand (V = 4,096, rows of random logits), so that an answer takes no
time. Policies grow trees of about 16, 64 and 256 nodes, as near as their knobs come on these
candidates (each row says its size); medians of interleaved runs, one thread, in microseconds per
layer, node and step: when the caches hold other things, as after a pass of a model, and at once
again. At 64 nodes a layer shall take at most 100 and a step 300, and a fusion of a model and a find
200 over its parts: met or missed is said of each.

Shapes: F frontier nodes, K candidates, V vocabulary.
"""

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from draftree.costs.step_costs import Costs
from draftree.drafters._fused import FusedDrafter, FusedState, initial_rates
from draftree.drafters.base import Drafter
from draftree.policies.base import Policy, append
from draftree.registry import build
from draftree.sampling.draft_sampling import Drawing
from draftree.tree import Candidates, Ints, Tree, TreeBudget
from draftree.utils.hardware import machine

POLICIES = {
    16: [
        "chain:length=16",
        "vct:width=2,depth=3",
        "beam:preset=fast,width=4,depth=4",
        "eagle2:nodes=16,depth=4,width=4",
        "pct:ratio=0.12",
        "opttree:nodes=16,threshold=0.1",
        "c2t:beta=0.9",
        "yield",
    ],
    64: [
        "chain:length=64",
        "vct:width=3,depth=3",
        "beam:preset=fast,width=10,depth=6",
        "eagle2:nodes=64,depth=6,width=10",
        "pct:ratio=0.03",
        "opttree:nodes=64,threshold=0.1",
        "c2t:beta=0.65",
        "yield",
    ],
    256: [
        "vct:width=4,depth=4",
        "beam:preset=fast,width=32,depth=8",
        "eagle2:nodes=256,depth=8,width=32",
        "pct:ratio=0.006,width=8",
        "opttree:nodes=256,threshold=0.1",
        "c2t:beta=0.05,layer_top=none",
        "yield",
    ],
}
LAYER, STEP, FUSION = 100.0, 300.0, 200.0
"""Microseconds that a layer, a step and an expansion by a fusion may take."""
PRICES = {16: 0.04, 64: 0.01, 256: 0.002}
"""What a node adds to a pass, in passes, for policies that read costs: the dearer, the smaller the
tree."""


BOUNDED = 64
"""Nodes of the trees that the bounds are for."""


def verdict(took: float, allowed: float) -> str:
    """Return whether a bound is met."""
    return f"{'met' if took <= allowed else 'missed'}, allowed are {allowed:.0f}"


class Ready:
    """Return prepared candidates as a drafter; count its calls and its seconds."""

    def __init__(self, seed: int, rows: int = 512, vocab: int = 4096) -> None:
        logits = torch.from_numpy(
            np.random.default_rng(seed).gumbel(size=(rows, vocab)) * 1.7
        ).float()
        logits[torch.arange(rows), torch.arange(rows) * 7] += 14.0
        self.log_probs = torch.log_softmax(logits, dim=-1)
        top = self.log_probs.topk(64, dim=-1)
        self.tokens, self.log_q = top.indices.numpy(), top.values.double().numpy()
        self.layers, self.seconds = 0, 0.0

    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        start = time.perf_counter()
        at = frontier % len(self.tokens)
        found = Candidates(
            self.tokens[at, :k], self.log_q[at, :k], self.log_probs[torch.from_numpy(at)]
        )
        self.layers += 1
        self.seconds += time.perf_counter() - start
        return found


def grown(policy: Policy, costs: Costs, expand: Ready) -> tuple[float, int, int]:
    """Return the policy's seconds, and the depths and nodes of one tree."""
    expand.layers = 0
    expand.seconds = 0.0
    root = Tree.from_roots(np.zeros(1, np.int64), np.ones(1, np.int64))
    start, memory = time.perf_counter(), policy.start()
    tree = policy.draft(expand, root, costs, TreeBudget(np.array([64]), 512), memory)
    return time.perf_counter() - start - expand.seconds, expand.layers, tree.drafted


def once(policy: Policy, costs: Costs, seed: int) -> tuple[float, int, int, float]:
    """Return the policy's seconds, depths and nodes of a tree, and the seconds to regrow it."""
    ready = Ready(seed)
    return *grown(policy, costs, ready), grown(policy, costs, ready)[0]


class Asked(Drafter[None]):
    """Represent a part of a fusion with prepared candidates.

    Args:
        ready: the candidates.
        finds: whether they are those of a retrieval.
    """

    def __init__(self, ready: Ready, finds: bool) -> None:
        self.searches, self._ready = finds, ready

    def start(self, *_: Any, **__: Any) -> None:
        return None

    def expand(
        self, state: None, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, None]:
        found = self._ready(tree, frontier, k)
        return (replace(found, logs=None) if self.searches else found), None

    def commit(self, *_: Any) -> None:
        return None

    def truncate(self, *_: Any) -> None:
        return None


def fusion(rounds: int) -> float:
    """Return the seconds that fusing a model and a retrieval hit adds to its parts.

    Each of four nodes has eight candidates.
    """
    parts = [Ready(seed) for seed in (0, 1)]
    fused = FusedDrafter((Asked(parts[0], False), Asked(parts[1], True)))
    state = FusedState((None, None), (initial_rates(1), initial_rates(1)))
    tree = Tree.from_roots(np.zeros(1, np.int64), np.ones(1, np.int64))
    tree = append(tree, np.zeros(1, np.int64), parts[0](tree, np.zeros(1, np.int64), 4))
    took = []
    for _ in range(rounds + 3):
        before, start = sum(part.seconds for part in parts), time.perf_counter()
        fused.expand(state, tree, np.arange(1, 5), 8, Drawing())
        took.append(time.perf_counter() - start - (sum(part.seconds for part in parts) - before))
    return statistics.median(took[3:])


def main(out: Annotated[Path, typer.Option()], rounds: Annotated[int, typer.Option()] = 30) -> None:
    torch.set_num_threads(1)
    rows = []
    for size, specs in POLICIES.items():
        costs = Costs({1: 1e-3, 64: 1e-3}, {1: 1.0, 1000: 1.0 + 999 * PRICES[size]})
        policies = {spec: build("policy", spec) for spec in specs}
        for policy in policies.values():
            once(policy, costs, 0)
        runs = [
            {spec: once(policy, costs, seed) for spec, policy in policies.items()}
            for seed in range(rounds)
        ]
        for spec in specs:
            seconds, layers, nodes, again = zip(*(run[spec] for run in runs), strict=True)
            per_layer, per_node, layer_again = (
                round(
                    1e6
                    * statistics.median(s / max(n, 1) for s, n in zip(times, counts, strict=True)),
                    1,
                )
                for times, counts in ((seconds, layers), (seconds, nodes), (again, layers))
            )
            rows.append(
                {
                    "size": size,
                    "policy": spec,
                    "layers": statistics.median(layers),
                    "nodes": statistics.median(nodes),
                    "us_per_layer": per_layer,
                    "us_per_node": per_node,
                    "us_per_step": round(1e6 * statistics.median(seconds), 1),
                    "again_per_layer": layer_again,
                    "again_per_step": round(1e6 * statistics.median(again), 1),
                }
            )
            if size == BOUNDED:
                for of, bound in (("layer", LAYER), ("step", STEP)):
                    rows[-1] |= {
                        f"{at}_{of}": verdict(rows[-1][f"{at}_per_{of}"], bound)
                        for at in ("us", "again")
                    }
            print(rows[-1])
    more = 1e6 * fusion(10 * rounds)
    fused = {"us_over_its_parts": round(more, 1), "bound": verdict(more, FUSION)}
    print("fusion of a model and a find, four nodes:", fused)
    result = {
        "provenance": machine(torch.device("cpu")) | {"rounds": rounds},
        "rows": rows,
        "fusion": fused,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
