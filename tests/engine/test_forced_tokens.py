"""Forced tokens: drafted without the drafter, read by it only where something is drafted behind them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftree.costs.step_costs import Costs
from draftree.drafters._fused import FusedDrafter
from draftree.drafters.base import Drafter
from draftree.drafters.edd import EDD
from draftree.drafters.pld import PLD
from draftree.drafters.vdm import VDM
from draftree.engine import Engine
from draftree.policies.base import Policy
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.request import Emitted, Request
from draftree.sampling.params import Sampling
from draftree.testing.fakes import Never, tiny_target
from draftree.tree import Tree
from selection import one_in

SPAN = [50, 51, 52, 53, 54]


class Spelling(LogitsProcessor):
    """After every token below 40 a span has to be spelt out; then anything below 40 may come."""

    def forced(self, ids: Sequence[int]) -> int | None:
        last = ids[-1]
        return 50 if last < 40 else last + 1 if last in SPAN[:-1] else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.forced(input_ids[0].tolist())
        allowed = (
            torch.arange(scores.shape[1]) < 40
            if token is None
            else torch.arange(scores.shape[1]) == token
        )
        return scores.masked_fill(~allowed, -torch.inf)


def written(
    drafter: Drafter[int], policy: Policy, free: bool, temperature: float = 0.0
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The texts of two rows, the tokens of every tree, and how many nodes each draft step was fed."""
    target, rule = tiny_target(), Spelling()
    rows = [
        Request(
            [3, 1, 4], 20, processors=(rule,), guides=(rule,), forced=rule.forced if free else None
        )
    ]
    rows.append(
        Request(
            [9, 50, 51],
            14,
            number=1,
            processors=(rule,),
            guides=(rule,),
            forced=rule.forced if free else None,
        )
    )
    engine, trees = (
        Engine(target, drafter, policy, costs=Costs({1: 0.1}, {1: 1.0})),
        list[list[int]](),
    )

    def told(events: list[Emitted]) -> None:
        trees.append(events[0].tree.tokens.tolist())

    done = engine.write(rows, Sampling(temperature, seed=2), told)
    assert done.tokens == engine.plain(rows, Sampling(temperature, seed=2)).tokens
    return done.tokens, trees, [n for w in done.stats.work for n in w.frontiers]


@pytest.mark.parametrize(
    ("method", "policy", "temperature"),
    one_in(2, [EDD, VDM], [Chain(3), Chain(8), VCT(2, 7)], [0.0, 1.2]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_same_trees_in_fewer_draft_steps(
    method: type[EDD] | type[VDM],
    policy: Policy,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drafter = method().example(tiny_target())
    asked, free = (
        written(drafter, policy, False, temperature),
        written(drafter, policy, True, temperature),
    )
    assert free[:2] == asked[:2], (
        "whether the drafter reads a forced token at once or later, it drafts the same"
    )
    assert len(free[2]) < len(asked[2])
    monkeypatch.setattr(type(drafter), "expands_paths", False)
    by_layer = written(drafter, policy, True, temperature)
    assert by_layer[:2] == asked[:2]
    assert len(free[2]) <= len(by_layer[2]) <= len(asked[2])


def test_a_chain_within_a_span_asks_nobody() -> None:
    nobody = Never([[]], 61)
    rule = Spelling()
    target = tiny_target()
    request = Request([3, 1, 4], 12, processors=(rule,), guides=(rule,), forced=rule.forced)
    stats = Engine(target, nobody, Chain(3), costs=Costs({1: 0.1}, {1: 1.0})).write([request]).stats
    assert any(w.frontiers == () and w.fed == 4 for w in stats.work), (
        "a chain of three forced tokens, and no draft step"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_nothing_that_is_forbidden_is_drafted(temperature: float) -> None:
    """What a fused drafter finds beside its model's candidates is looked at, too."""
    target = tiny_target()
    rule = Spelling()
    seen = 0
    drafter = FusedDrafter([VDM().example(target), PLD().open(target)])
    prompt = [50, 9, 51, 9, 52, 9, 53, 9, 54, 45, 1]  # what follows there is forbidden
    request = Request(prompt, 24, processors=(rule,), guides=(rule,))
    for kept in (True, False):
        engine, told = (
            Engine(target, drafter, VCT(2, 3), costs=Costs({1: 0.1}, {1: 1.0})),
            list[Tree](),
        )
        texts, steps = engine.begin(
            [request if kept else replace(request, guides=())], Sampling(temperature, seed=2)
        )
        told += [event.tree for events in engine.time_steps(steps, texts) for event in events]
        pairs = [
            (t.tokens[t.parents[n]], t.tokens[n]) for t in told for n in range(t.roots, len(t))
        ]
        wrong = [
            (a, b)
            for a, b in pairs
            if b != (rule.forced([a]) or b) or (rule.forced([a]) is None and b >= 40)
        ]
        assert not wrong if kept else wrong
        seen += len(pairs)
    assert seen
