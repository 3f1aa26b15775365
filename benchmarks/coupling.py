"""How far apart the logits of target and drafter are, for drafts that know the target's noise (GUMBEL_ERROR_SCALE).

python benchmarks/coupling.py spec_bench.jsonl --limit 20 --out benchmarks/results/coupling.json

After every root the drafter says softmax((log q + g) · T / spread) of what the target will choose
with the same noise g. For each drafter and temperature: how often its likeliest token is chosen,
with the noise and without, and the mean −log of what it says of the token that is chosen, for
several spreads. The best spread is the one with the least.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.acceptors.match import Match
from draftree.cli.arguments import quiet
from draftree.costs.step_costs import Costs
from draftree.drafters.base import Drafter
from draftree.engine import Engine
from draftree.evaluation import result_rows, suites
from draftree.evaluation.grid import choose_requests
from draftree.evaluation.provenance import provenance
from draftree.policies.chain import Chain
from draftree.registry import build
from draftree.request import Emitted
from draftree.sampling.draft_sampling import GUMBEL_ERROR_SCALE, Drawing
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree

SPREADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)


@dataclass
class OutputRecorder(Drafter[Any]):
    """A drafter whose words about the token after each root are kept until that token is known."""

    drafter: Drafter[Any]
    said: torch.Tensor | None = None
    surprise: list[list[float]] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    @property
    def needs(self) -> HiddenStateSpec:
        return self.drafter.needs

    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Any = None,
        rows: Ints | None = None,
    ) -> Any:
        return self.drafter.start(prompts, roots, hidden_states, state, rows)

    def expand(
        self, state: Any, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Any]:
        candidates, state = self.drafter.expand(state, tree, frontier, k, drawing)
        if frontier[0] == 0 and candidates.log_probs is not None:
            self.said = candidates.log_probs[0].double()
        return candidates, state

    def commit(
        self, state: Any, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Any:
        return self.drafter.commit(state, tree, verdict, hidden_states)

    def truncate(self, state: Any, lengths: Ints, rows: Ints | None = None) -> Any:
        return self.drafter.truncate(state, lengths, rows)

    def probes(self, state: Any) -> Probes | None:
        return self.drafter.probes(state)

    def hear(self, events: list[Emitted]) -> None:
        """Judges what was said by the first token of a step."""
        if self.said is not None:
            token = events[0].tokens[0]
            self.surprise.append(
                [
                    -float(torch.log_softmax(self.said * (GUMBEL_ERROR_SCALE / s), -1)[token])
                    for s in SPREADS
                ]
            )
            self.right.append(int(self.said.argmax()) == token)
        self.said = None


def measured(
    target: Target, drafter: str, temperature: float, requests: Sequence[Any]
) -> dict[str, Any]:
    """Return the figures of one drafter at one temperature."""
    found: dict[str, Any] = {"drafter": drafter, "temperature": temperature}
    for coupled in (False, True):
        heard = OutputRecorder(build("drafter", drafter).open(target))
        engine = Engine(target, heard, Chain(3), Match(coupled), Costs({1: 0.1}, {1: 1.0}))
        for request in requests:
            engine.write([request], Sampling(temperature), heard.hear, reuse=False)
        found["right with the noise" if coupled else "right without"] = float(np.mean(heard.right))
    mean = np.mean(heard.surprise, axis=0)
    return found | {
        "places": len(heard.right),
        "surprise": dict(zip(map(str, SPREADS), mean.tolist(), strict=True)),
        "best spread": SPREADS[int(mean.argmin())],
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    target = Target.load("demo")
    prompts = suites.load(args.suite).select(["math_reasoning"])
    engine = Engine(target, build("drafter", "pld").open(target), Chain())
    requests, _ = choose_requests(prompts, engine, 128, args.limit)
    rows = []
    for drafter in ("edd", "eagle", "mtp", "vdm", "medusa"):
        for temperature in (0.7, 1.0, 1.3):
            rows.append(measured(target, drafter, temperature, requests))
            print(rows[-1], flush=True)
    result_rows.save(
        {
            "provenance": provenance(target, 0)
            | {"suite": Path(args.suite).name, "limit": args.limit},
            "rows": rows,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
