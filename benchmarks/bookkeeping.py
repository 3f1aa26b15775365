"""Time what a step does beside its passes, for batches whose trees have 16 nodes a sequence.

    python benchmarks/bookkeeping.py --out bookkeeping.json

Forests are random, of texts of 100 to 400 tokens; about half of the drafts are accepted. The passes
are left out: the target returns logits that were made before. Figures are microseconds of processor
time for a sequence and step, medians over forests, of one thread: `selection` of the nodes to
verify from twice as many, `packing` of the pass, `acceptance` by the tokens that the target
chooses, `commit` to the target's cache of SmolLM2's shape, `noting` of tokens and figures,
`learning` of the policy. Drafting, sampling and text are not among them.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from draftree.acceptors.greedy import Greedy
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.evaluation.provenance import command, provenance
from draftree.kernels.node_table import NodeTable
from draftree.metrics import Work
from draftree.models.model_runner import ModelOutput
from draftree.policies.yield_ import Yield, _Budget
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import Ints, Tree

NODES = 16
SHORTEST = 100
LONGEST = 400
WORTHLESS = -99.0
COSTS = Costs({1: 1e-4, 512: 1e-3}, {1: 0.01, 512: 0.02})
"""So flat that a node of any value pays."""


def forest(draws: np.random.Generator, roots: int, vocab: int) -> Tree:
    """Return draft trees with 2 · NODES nodes a sequence, half of them with a worthless score.

    Nodes are in the order of their depth.
    """
    count = roots * (1 + 2 * NODES)
    parents = np.full(count, -1)
    depth = np.zeros(count, np.int64)
    score = np.zeros(count)
    row = np.arange(count) % roots  # the sequences take turns
    for node in range(roots, count):
        before = np.arange(row[node], node, roots)
        able = before[score[before] > WORTHLESS]
        parent = int(draws.choice(able[-3:]))
        parents[node], depth[node] = parent, depth[parent] + 1
        score[node] = score[parent] - 0.1 if node < roots * (1 + NODES) else WORTHLESS
    tokens = draws.integers(0, vocab, count)
    minus = np.full(count, -1)
    nothing = np.zeros(count)
    source = np.where(parents < 0, -1, 0)
    numbers = np.arange(count)
    return Tree(
        NodeTable(tokens, parents, depth, row, score, score, source, nothing, numbers, minus)
    )


def choices(draws: np.random.Generator, tree: Tree, vocab: int) -> list[int]:
    """Return the target's token after each node: mostly that of a child."""
    found = draws.integers(0, vocab, len(tree))
    for parent in np.unique(tree.parents[tree.roots :]):
        if draws.random() < 0.7:
            found[parent] = tree.tokens[draws.choice(tree.children(int(parent)))]
    return [int(token) for token in found]


class Clock:
    """Collect the processor time of parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Return what the work returns, and note its time."""
        start = time.thread_time()
        result = work()
        self.seconds.setdefault(name, []).append(time.thread_time() - start)
        return result


def step(
    clock: Clock,
    target: Target,
    rows: SequenceBatch,
    tree: Tree,
    draws: np.random.Generator,
    logits: torch.Tensor,
) -> None:
    """Run the parts of one step over a draft tree for each sequence."""
    policy = Yield()
    memory = Yield().start()
    needs = HiddenStateSpec()
    budget = _Budget.of(COSTS, tree.roots, memory)
    tree = clock.time("selection", lambda: budget.select_worthwhile(tree, False))
    told = choices(draws, tree, logits.shape[1])
    clock.time("packing", lambda: target.verify(rows.cache, tree, needs))
    p = Distributions(logits[: len(tree)], told=(told, ()), likeliest=True)
    rule = Greedy()
    verdict = clock.time("acceptance", lambda: rule.accept(tree, p, rows.chance))
    clock.time("commit", lambda: target.commit(rows.cache, tree, verdict))
    work = Work((tree.roots,) * 3, len(tree), tree.roots, rows.context, 0)
    clock.time("learning", lambda: policy.observe(memory, tree, verdict, work, COSTS))
    clock.time("noting", lambda: rows.emit(target, tree, p, verdict))


def measured(
    target: Target, sequences: int, forests: int, logits: torch.Tensor
) -> dict[str, float]:
    """Return microseconds for a sequence and step, by part."""
    draws, clock = np.random.default_rng(0), Clock()
    for _ in range(forests):
        lengths: Ints = draws.integers(SHORTEST, LONGEST, sequences)
        rows = SequenceBatch(target.new_cache(sequences, LONGEST + 64))
        rows.admit([Request([1] * (int(n) + 1), 64) for n in lengths])
        rows.cache.lengths = lengths.copy()
        step(clock, target, rows, forest(draws, sequences, logits.shape[1]), draws, logits)
    warm = forests // 4
    return {
        name: round(1e6 * median(each[warm:]) / sequences, 1)
        for name, each in clock.seconds.items()
    }


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--forests", type=int, default=80)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(args.target, "bfloat16")
    logits = torch.zeros(
        (1 + NODES) * max(args.batches), target.decoder.vocab, dtype=torch.bfloat16
    )
    target.decoder.forward = lambda batch, cache, outputs: ModelOutput(
        logits[: len(batch.positions)], {}
    )  # type: ignore[method-assign]
    figures = {str(n): measured(target, n, args.forests, logits) for n in args.batches}
    for parts in figures.values():
        parts["selection, acceptance, commit"] = round(
            sum(parts[name] for name in ("selection", "acceptance", "commit")), 1
        )
    result = {
        "command": command(),
        "nodes": NODES,
        "microseconds": figures,
        **provenance(target, 0),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
