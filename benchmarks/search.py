"""What ADED costs: the search alone, all of a step's drafting, adaptation, and the bytes of its store; and what it finds.

    python benchmarks/search.py --out benchmarks/results/search.json --megabytes 10

The corpus is Python source of this environment in a random order, in the tokenizer of the demo
target; the texts written are other files of it, committed a few tokens a step without any model.
One thread, medians and 99th percentiles in microseconds. For several c1: the correlation of a
node's visits with the product of q along its path, and how much of what is kept a ranking by that
product would keep as well.
"""

import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer

from draftree.costs.step_costs import Costs
from draftree.drafters.aded import ADED, ADEDDrafter, ADEDState
from draftree.drafters.retrieval.ngram_build import GramSettings, build_ngram_table
from draftree.drafters.retrieval.ngram_table import Grams
from draftree.engine import load
from draftree.policies.mcts import MCTS, Local, search
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStates, HiddenStateSpec
from draftree.tree import AcceptResult, Candidates, Ints, Tree, TreeBudget
from draftree.utils.hardware import machine

COSTS = Costs({1: 1.0}, {1: 1.0})
WRITTEN = 3
"""Tokens of a step: two accepted and the bonus."""
CHATS, CHAT_TOKENS = 770_000, 1_300
"""The corpus to extrapolate to: number of chats, and tokens of each (UltraChat's conversations are
some thousand words long)."""
FIELDS = ["search", "draft", "commit", "expand", "nodes"]
EXPLORATION = (0.3, 2.414, 8.0, 32.0, 128.0)
"""c1: the paper's is 32, and 2.414 in two of its figures."""


def documents(tokenizer: Tokenizer, megabytes: float, skip: int) -> Iterator[Ints]:
    """Yield the environment's source files up to a size, all but every `skip`-th."""
    left = megabytes * 1e6
    for number, file in enumerate(sources()):
        if left <= 0:
            return
        if number % skip:
            text = file.read_text(errors="ignore")
            left -= len(text.encode())
            yield np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


@cache
def sources() -> list[Path]:
    """Return Python files in a random order, so that each part resembles the whole."""
    paths = sysconfig.get_paths()
    found = sorted(
        {file for name in ("stdlib", "purelib") for file in Path(paths[name]).rglob("*.py")}
    )
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


class Timed:
    """Provide a drafter to a policy, and sum its time."""

    def __init__(self, drafter: ADEDDrafter, state: ADEDState) -> None:
        self.drafter = drafter
        self.state = state
        self.seconds = 0.0

    def __call__(self, tree: Tree, frontier: Ints, k: int) -> Candidates:
        start = time.perf_counter()
        found, _ = self.drafter.expand(self.state, tree, frontier, k, Drawing())
        self.seconds += time.perf_counter() - start
        return found


def steps(
    drafter: ADEDDrafter, policy: MCTS, text: Ints, hidden_states: HiddenStates, most: int
) -> Iterator[tuple[float, ...]]:
    """Yield seconds and nodes of each step.

    The seconds are those of the search alone, all drafting, adaptation, and the drafter's part.
    """
    at = 200
    state = drafter.start([text[:at]], text[at : at + 1], hidden_states)
    for _ in range(min(most, (len(text) - at - 1) // WRITTEN)):
        roots, expand = (
            Tree.from_roots(np.zeros(1, np.int64), text[at : at + 1]),
            Timed(drafter, state),
        )
        start = time.perf_counter()
        tree = policy.draft(expand, roots, COSTS, TreeBudget(np.array([64]), 512), None)
        drafted, asked = time.perf_counter() - start, expand.seconds
        near = Local.of(*policy._expand_layers(expand, roots, TreeBudget(np.array([64]), 512)))
        start = time.perf_counter()
        search(roots.tokens, near.sentences("paper"), policy.iterations, policy.exploration)
        searched = time.perf_counter() - start
        path = roots
        for token in text[at + 1 : at + WRITTEN]:
            path = path.append(
                np.array([len(path) - 1]),
                np.array([token]),
                np.zeros(1),
                np.zeros(1),
                Candidates(np.zeros((1, 1)), np.zeros((1, 1))),
            )
        verdict = AcceptResult((np.arange(1, len(path)),), text[at + WRITTEN : at + WRITTEN + 1])
        start = time.perf_counter()
        state = drafter.commit(state, path, verdict, hidden_states)
        yield searched, drafted, time.perf_counter() - start, asked, tree.drafted
        at += WRITTEN


def alike(near: Local, policy: MCTS) -> tuple[float, float]:
    """Measure how far a search's visits follow the product of q.

    The figures are their correlation, and the share of kept nodes in common.
    """
    root = near.tree.tokens[:1]
    visits, _ = search(root, near.sentences("paper"), policy.iterations, policy.exploration)
    with np.errstate(divide="ignore"):
        kept = near.best(np.log(visits), policy.continuations)
    both = np.intersect1d(kept, near.best(near.tree.score, policy.continuations))
    return float(np.corrcoef(visits[1:], np.exp(near.tree.score[1:]))[0, 1]), len(both) / len(kept)


def followed(
    drafter: ADEDDrafter, texts: list[Ints], hidden_states: HiddenStates, every: int = 40
) -> dict[str, dict[str, float]]:
    """Return the means of `alike` by c1 at positions of some texts.

    Positions count where the search finds at least twice as many nodes as are kept.
    """
    found: dict[float, list[tuple[float, float]]] = {c1: [] for c1 in EXPLORATION}
    for text in texts:
        for at in range(200, len(text), every):
            state = drafter.start([text[:at]], text[at : at + 1], hidden_states)
            roots, room = (
                Tree.from_roots(np.zeros(1, np.int64), text[at : at + 1]),
                TreeBudget(np.array([64]), 512),
            )
            near = Local.of(*MCTS()._expand_layers(Timed(drafter, state), roots, room))
            for c1 in EXPLORATION if len(near.tree) > 2 * MCTS().continuations else ():
                found[c1].append(alike(near, MCTS(c1=c1)))
    names = ("correlation", "kept in common")
    means = {
        f"{c1:g}": dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        for c1, rows in found.items()
    }
    return means | {"places": {"number": len(found[EXPLORATION[0]])}}


def stored(tokenizer: Tokenizer, megabytes: float, folder: Path) -> dict[str, Any]:
    """Build a store; return its figures, and the seconds to build and to open it."""
    folder.mkdir()
    texts = list(documents(tokenizer, megabytes, 10))
    start = time.perf_counter()
    figures = build_ngram_table(
        texts, GramSettings(3, tokenizer.get_vocab_size()), folder, lambda _: None
    )
    built = time.perf_counter() - start
    start = time.perf_counter()
    Grams.from_folder(folder)
    return figures | {
        "build_s": built,
        "open_ms": 1e3 * (time.perf_counter() - start),
        "bytes_per_distinct": figures["bytes"] / figures["distinct"],
        "bytes_per_stored": figures["bytes"] / figures["stored"],
    }


def extrapolated(sizes: list[dict[str, Any]]) -> dict[str, float]:
    """Estimate the distinct tri-grams of `CHATS` chats by the power law of Heaps.

    The law is fitted to the two largest stores.
    """
    small, large = sizes[-2:]
    power = np.log(large["distinct"] / small["distinct"]) / np.log(
        large["tokens"] / small["tokens"]
    )
    distinct = large["distinct"] * (CHATS * CHAT_TOKENS / large["tokens"]) ** power
    return {
        "power": float(power),
        "distinct": float(distinct),
        "bytes": float(distinct * large["bytes_per_distinct"]),
    }


def main(
    out: Annotated[Path, typer.Option()],
    megabytes: Annotated[float, typer.Option()] = 10,
    texts: Annotated[int, typer.Option()] = 12,
    most: Annotated[int, typer.Option()] = 80,
) -> None:
    torch.set_num_threads(1)
    engine = load("demo", "pld", "chain")
    tokenizer = engine.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    hidden_states = engine.target.prefill(
        engine.target.new_cache(1, 1), [np.array([1])], HiddenStateSpec()
    ).hidden_states
    with tempfile.TemporaryDirectory() as scratch:
        sizes = [
            stored(tokenizer, megabytes * part, Path(scratch) / str(part))
            for part in (0.25, 0.5, 1)
        ]
        drafter = ADEDDrafter(ADED(), Grams.from_folder(Path(scratch) / "1"))
        held = [f.read_text(errors="ignore") for f in sources()[::10]]
        ids = [
            np.array(tokenizer.encode(t, add_special_tokens=False).ids)
            for t in held
            if 3_000 < len(t) < 30_000
        ][:texts]
        for first in ids[:1]:
            list(steps(drafter, MCTS(), first, hidden_states, 2))  # compiled and warm
        rows = [row for text in ids for row in steps(drafter, MCTS(), text, hidden_states, most)]
        visits = followed(drafter, ids, hidden_states)
    columns = dict(zip(FIELDS, zip(*rows, strict=True), strict=True))
    micro = {
        name: {"median": 1e6 * statistics.median(v), "p99": 1e6 * float(np.quantile(v, 0.99))}
        for name, v in columns.items()
    }
    nodes = {"median": statistics.median(columns["nodes"]), "most": max(columns["nodes"])}
    result = {
        "provenance": machine(torch.device("cpu"))
        | {"megabytes": str(megabytes), "steps": str(len(rows))},
        "us": {name: micro[name] for name in FIELDS[:-1]},
        "nodes": nodes,
        "visits": visits,
        "stores": sizes,
        "chats": extrapolated(sizes),
    }
    assert all(a["tokens"] < b["tokens"] for a, b in pairwise(sizes)), (
        "there is not that much source text"
    )
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
