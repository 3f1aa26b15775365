"""A drafter whose weights are broken, or whose numbers overflow, finds nothing there, says so once, and changes no text."""

import itertools
import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import EtaLogitsWarper, LogitsProcessor, TemperatureLogitsWarper, TopHLogitsWarper

from draftree.acceptors.base import Acceptor
from draftree.cli.app import main
from draftree.costs.step_costs import Costs
from draftree.drafters._fused import FusedDrafter
from draftree.drafters.base import Drafter
from draftree.drafters.lm import LMDrafter
from draftree.drafters.suffix import Suffix
from draftree.engine import Engine
from draftree.errors import DraftreeWarning, UserError
from draftree.policies.base import Policy
from draftree.policies.chain import Chain
from draftree.registry import check_exact, names, part
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing import TableDrafter, random_table
from draftree.testing.fakes import tiny_target
from draftree.tree import Draw
from draftree.weights import demo_folder

WRONG = {
    "nan": (math.nan,),
    "inf": (math.inf,),
    "minus inf": (-math.inf,),
    "mixed": (math.nan, 0.5, math.inf, -1.0, -math.inf),
}
COSTS = Costs({1: 0.1}, {1: 1.0})
REQUESTS = (Request([3, 1, 4, 3, 1, 4, 3], 9), Request([9, 2, 6, 9, 2], 6, number=1))
SAYS = r"the drafter's output is not finite"


@cache
def target() -> Target:
    """One for all tests, which only read it."""
    return tiny_target()


def broken(name: str, wrong: Sequence[float]) -> Drafter[Any] | None:
    """A method's example with such weights; None for one that has none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter: Drafter[Any] = part("drafter", name)().example(target())
    model = (
        drafter.small.decoder.model
        if isinstance(drafter, LMDrafter)
        else getattr(drafter, "model", None)
    )
    weights = [*model.parameters()] if isinstance(model, nn.Module) else []
    with torch.no_grad():
        for p in weights:
            flat = p.view(-1)
            flat.copy_(torch.tensor(wrong).repeat(len(flat) // len(wrong) + 1)[: len(flat)])
    return drafter if weights else None


NEURAL = tuple(name for name in names("drafter") if broken(name, (1.0,)) is not None)
EVERY = [*itertools.product(NEURAL, WRONG, names("policy"))]
SOME = [EVERY[i] for i in range(5, len(EVERY), len(names("policy")) + 1)]
"""Every drafter with each kind of numbers, under one policy after the other."""


@cache
def plain(sampling: Sampling) -> list[list[int]]:
    """What the target writes alone."""
    return (
        Engine(target(), Suffix().open(target()), Chain(1), costs=COSTS)
        .plain(REQUESTS, sampling)
        .tokens
    )


def same(
    drafter: Drafter[Any], policy: Policy, sampling: Sampling, rule: Acceptor | None = None
) -> Engine:
    """Asserts that the text is the target's, where the rule promises the text."""
    engine = Engine(target(), drafter, policy, rule, costs=COSTS)
    done = engine.write(REQUESTS, sampling)
    if rule is None or rule.keeps_text:
        assert done.tokens == plain(sampling)
    assert [len(t) for t in done.tokens] == [r.max_new_tokens for r in REQUESTS]
    return engine


SAMPLINGS = (Sampling(), Sampling(1.0, seed=5))


def write(name: str, wrong: str, policy: str, samplings: Sequence[Sampling] = SAMPLINGS) -> None:
    for sampling in samplings:
        drafter = broken(name, WRONG[wrong])
        assert drafter is not None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            same(drafter, part("policy", policy)(), sampling)
        assert [w.category for w in said] in ([], [DraftreeWarning]), [str(w.message) for w in said]


def test_the_drafters_with_weights_are_found() -> None:
    assert {"eagle", "eagle3", "edd", "glide", "hydra", "lm", "medusa", "mtp", "vdm"} <= {*NEURAL}


@pytest.mark.parametrize(("name", "wrong", "policy"), SOME)
def test_broken_weights_change_no_text(name: str, wrong: str, policy: str) -> None:
    turn = SOME.index((name, wrong, policy)) % 2
    write(name, wrong, policy, SAMPLINGS[turn : turn + 1])


@pytest.mark.long
@pytest.mark.parametrize(("name", "wrong", "policy"), EVERY)
def test_broken_weights_change_no_text_under_any_policy(name: str, wrong: str, policy: str) -> None:
    write(name, wrong, policy)


@pytest.mark.parametrize("name", NEURAL)
def test_weights_of_nan_are_told_of_in_a_line(name: str) -> None:
    drafter = broken(name, WRONG["nan"])
    assert drafter is not None
    with pytest.warns(DraftreeWarning, match=SAYS) as said:
        stats = same(drafter, Chain(3), Sampling())
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert stats.target.name == "tiny"


def torn(vocab: int, wrong: str, seed: int = 2) -> Tensor:
    """A table q [V, V] that is right after some tokens and wrong after others."""
    q = random_table(vocab, seed)[1].clone()
    values = itertools.cycle(WRONG[wrong])
    for last in range(0, vocab, 2):
        q[last, last] = next(values)
        if wrong == "minus inf":  # one token that cannot come is no fault; none that can is one
            q[last] = 0
    return q


@pytest.mark.parametrize(
    "wrong", [w if w == "mixed" else pytest.param(w, marks=pytest.mark.long) for w in WRONG]
)
@pytest.mark.parametrize("policy", names("policy"))
def test_values_that_are_not_finite_give_no_candidates(policy: str, wrong: str) -> None:
    """Under every rule, beside nodes after which everything is as it should be; and fused with a search."""
    table = TableDrafter(torn(61, wrong))
    for drafter in (table, FusedDrafter([table, Suffix().open(target())])):
        same_under_all(drafter, part("policy", policy)())


def same_under_all(drafter: Drafter[Any], policy: Policy) -> None:
    for name in names("acceptor"):
        rule: Acceptor = part("acceptor", name)()
        try:
            check_exact(policy, rule)
        except UserError:
            continue
        with pytest.warns(DraftreeWarning, match=SAYS):
            same(
                drafter,
                policy,
                Sampling() if rule.greedy and not rule.sampling else Sampling(1.0, seed=5),
                rule,
            )


def noise() -> Keyed:
    return Keyed(3, np.zeros(1, np.int64), np.zeros(1, np.int64))


@pytest.mark.parametrize("kind", Draw)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_no_draw_is_made_of_what_is_not_finite(wrong: float, kind: Draw) -> None:
    """Not even where the request's warpers raise at NaN."""
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    logits[0, 2] = -math.inf  # which a draft vocabulary has for the tokens that it lacks
    if wrong == -math.inf:
        logits[1] = wrong
    else:
        logits[1, 4] = wrong
    steps = (TemperatureLogitsWarper(0.7), EtaLogitsWarper(1e-3), TopHLogitsWarper(0.9))
    drawing = Drawing(kind, [Sampling(1.0, warpers=steps)], None if kind is Draw.POINT else noise())
    found = draw_candidates(logits, 4, drawing, np.zeros(3, np.int64), np.array([0, 1, 2]))
    assert not found.finite
    assert found.log_probs is not None
    assert not found.log_probs.isnan().any()
    assert (found.log_q[1] == -np.inf).all()
    assert (found.log_probs[1] == -torch.inf).all()
    assert (found.log_q[[0, 2], 0] > -np.inf).all()
    assert np.isfinite(found.entropy()).all()
    alone = draw_candidates(logits[2:], 4, drawing, np.zeros(1, np.int64), np.array([2]))
    assert alone.finite
    assert (alone.tokens[0] == found.tokens[2]).all()


class Nothing(LogitsProcessor):
    """Forbids everything after token 4, as a guide does that cannot follow a draft."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(input_ids[:, -1:] == 4, -torch.inf, scores)


@pytest.mark.parametrize("policy", ["cape", "chain", "yield"])
def test_a_drafter_is_not_blamed_for_what_guides_forbid(policy: str) -> None:
    """The target never writes what they forbid, and asks them of nothing else."""
    table = torch.full((61, 61), 1e-3)
    table[:, 4] = 1  # so that it is drafted everywhere
    requests = [replace(r, guides=(Nothing(),)) for r in REQUESTS]
    engine = Engine(target(), TableDrafter(table), part("policy", policy)(), costs=COSTS)
    for sampling in (Sampling(), Sampling(1.0, seed=5, warpers=(EtaLogitsWarper(1e-3),))):
        assert engine.write(requests, sampling).tokens == engine.plain(REQUESTS, sampling).tokens


def test_a_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(demo_folder("edd"), tmp_path / "edd")
    weights = next((tmp_path / "edd").glob("*.safetensors"))
    save_file(
        {k: torch.full_like(v, math.nan) for k, v in load_file(weights).items()},
        weights,
        {"format": "pt"},
    )
    written = []
    for drafter in (str(tmp_path / "edd"), "edd"):
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "generate",
                    "Two and two",
                    "--drafter",
                    drafter,
                    "--policy",
                    "chain",
                    "--max-new-tokens",
                    "8",
                    "--raw",
                ]
            )
        assert ended.value.code in (0, None)
        written.append(capsys.readouterr())
    assert written[0].out.partition("\n\n")[0] == written[1].out.partition("\n\n")[0] != ""
    assert [line for line in written[0].err.splitlines() if "finite" in line] == [
        line
        for line in written[0].err.splitlines()
        if line.startswith("draftree: the drafter's output is not finite: ")
    ]
    assert written[0].err.count("finite") == 1
    assert "finite" not in written[1].err
