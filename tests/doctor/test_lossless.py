"""Losslessness as a command: sound pairings pass, planted faults are found, and numerical noise is no fault."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.acceptors.base import Acceptor, proposal, ratio, residual, walk
from draftree.acceptors.match import Match
from draftree.data.prompts import encode, question
from draftree.doctor.finding import Finding
from draftree.doctor.lossless import ERROR_LEVEL, Extent, examine, load_prompts
from draftree.doctor.lossless_cases import Case, cases
from draftree.doctor.lossless_report import Report
from draftree.doctor.numerical_noise import (
    Noise,
    OutputRecorder,
    frequency_distance,
    logit_shift,
    margin_at_difference,
    measure_noise,
)
from draftree.drafters.lm import LMDrafter
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.kv_cache import SlotCache
from draftree.policies.chain import Chain
from draftree.request import Request, Scores
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import Keyed, RandomSource
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from draftree.tree import AcceptResult, Draw, Tree

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3, 2, 3]]
SHORT = Extent(max_new_tokens=14, seeds=1, trials=120)
TEMPERATURE = 2.0
"""At which the tiny target's next token is open."""


def model(dtype: torch.dtype = torch.float64) -> Target:
    target = tiny_target()
    target.decoder.model.to(dtype)
    return target


def imitator(noise: float = 0.25) -> LMDrafter:
    """Drafts with a language model that is nearly the target."""
    small = tiny_target()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        head = small.decoder.model.get_output_embeddings().weight
        head += noise * torch.randn_like(head)
    return LMDrafter(small)


def finding(report: Report, name: str) -> Finding:
    return next(f for f in report.findings if f.name == name)


def checked(target: Target, chosen: Sequence[Case], plan: Extent = SHORT) -> Report:
    report = examine(target, imitator(), PROMPTS, chosen, plan)
    json.dumps(report.as_json(), allow_nan=False)
    return report


def from_roots(rule: Acceptor, temperature: float = TEMPERATURE, length: int = 2) -> list[Case]:
    return [Case("planted", "chain", temperature, rule, Chain(length))]


def test_a_sound_pairing_is_lossless() -> None:
    told: list[tuple[int, int]] = []
    chosen = cases(["chain", "pct"], [], [0.0, TEMPERATURE])
    report = examine(
        model(), imitator(), PROMPTS, chosen, SHORT, tell=lambda done, what, of: told.append((done, of))
    )  # fmt: skip
    assert report.lossless
    assert {f.verdict for f in report.findings} == {"ok"}
    assert (
        report.summary
        == "lossless: 16 of 16 texts the same as plain decoding's, 8 of 8 frequency tests passed"
    )
    assert [c.case for c in report.compared] == [
        "greedy, chain, T = 0", "greedy, pct, T = 0", "match, chain, T = 2", "match, pct, T = 2"
    ]  # fmt: skip
    assert all(
        c.tokens == 4 * 14 and 0 < c.shift <= report.allowed < 1e-11 for c in report.compared
    )
    assert report.level == ERROR_LEVEL / 8
    assert all(
        t.trials == 120 and t.detectable and t.detectable < 1 and t.dof > 3
        for t in report.frequencies
    )
    assert [done for done, _ in told] == list(
        range(told[0][1])
    )  # the bar ends where it said it would
    assert {of for _, of in told} == {len(told)}
    assert finding(report, "greedy, pct, T = 0").value == "4/4"


def test_rules_get_policies_that_leave_them_exact() -> None:
    found = [(c.acceptor, c.policy, c.temperature) for c in cases(["pct"], [], [0.0, 1.0])]
    tree = "vct:width=2,depth=2"
    assert found == [
        ("greedy", "pct", 0.0), ("block", "chain", 1.0), ("match", "pct", 1.0), ("multiround", tree, 1.0),
        ("rejection", "chain", 1.0), ("traversal", tree, 1.0),
    ]  # fmt: skip
    assert [c.policy for c in cases(["pct", "static"], ["multiround"], [1.0])] == ["static"]
    assert "pct" in cases(["pct"], ["rejection"], [1.0])[0].instead
    assert [c.temperature for c in cases(["chain"], ["match"], [0.0, 0.7])] == [0.0, 0.7]


@pytest.mark.parametrize(
    ("policies", "acceptors", "temperatures", "said"),
    [
        (["chian"], [], [0.0], "did you mean 'chain'"),
        (["chain"], ["rejektion"], [1.0], "did you mean 'rejection'"),
        (["chain"], [], [-1.0], "temperature is -1"),
        (
            ["chain"],
            ["greedy", "rejection"],
            [0.0],
            "acceptor 'rejection' serves none of the temperatures 0; allowed: above 0",
        ),
        (
            ["chain"],
            ["greedy"],
            [0.5, 1.0],
            "acceptor 'greedy' serves none of the temperatures 0.5, 1; allowed: 0",
        ),
    ],
)
def test_mistakes_are_told(
    policies: list[str], acceptors: list[str], temperatures: list[float], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        cases(policies, acceptors, temperatures)


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="trials is 0, allowed is a whole number of at least 100"):
        Extent(trials=0)


def verifications(
    target: Target, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any], of: Any, what: str
) -> None:
    """Spoils the mask of passes over trees with drafts in them, or what they read, and of no others."""
    inside = [False]
    verify, inner = target.verify, getattr(of, what)

    def watched(cache: Any, tree: Tree, *rest: Any) -> Any:
        inside[0] = len(tree) > tree.roots
        found = verify(cache, tree, *rest)
        inside[0] = False
        return found

    monkeypatch.setattr(target, "verify", watched)
    monkeypatch.setattr(
        of, what, lambda *a, **k: spoil(inner(*a, **k)) if inside[0] else inner(*a, **k)
    )


def test_a_bias_in_verifications_is_found_before_it_changes_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = model()
    bias = 1e-6 * torch.randn(61, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verifications(
        target,
        monkeypatch,
        lambda out: replace(out, logits=out.logits + bias),
        target.decoder,
        "forward",
    )
    report = checked(target, cases(["chain"], ["greedy"], [0.0]))
    assert finding(report, "greedy, chain, T = 0").value == "4/4"
    assert finding(report, "greedy, chain, T = 0").verdict == "bad"
    assert "which no noise explains" in finding(report, "greedy, chain, T = 0").text
    assert 1e-7 < report.compared[0].shift < 1e-5
    assert report.summary == "NOT lossless: greedy, chain, T = 0"


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_a_mask_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Every node sees what the one before it sees."""

    def late(mask: Tensor) -> Tensor:
        return torch.cat((mask[:, :, :1], mask[:, :, :-1]), dim=2)

    target = model()
    verifications(target, monkeypatch, late, SlotCache, "mask")
    report = checked(target, cases(["chain"], ["match"], [temperature]))
    assert not report.lossless
    assert finding(report, "plain decoding").verdict == "ok"  # the noise is measured without it
    assert report.allowed < 1e-11
    parted = report.compared[0].parted
    assert parted
    assert all(p.margin > 1e-3 and p.plain != p.ours for p in parted)


def test_plain_decoding_that_is_not_the_stock_model_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pass sees the text's first token."""
    target = model()
    inner = SlotCache.mask

    def blind(*given: Any) -> Tensor:
        found = inner(*given)
        found[..., 0] = torch.finfo(found.dtype).min
        return found

    monkeypatch.setattr(SlotCache, "mask", blind)
    report = checked(target, cases(["chain"], ["greedy"], [0.0]))
    assert finding(report, "plain decoding").verdict == "bad"
    assert not report.lossless


def test_a_tie_is_told_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring tokens have the same row in the LM head, and tree passes favour the second by less than the noise."""
    target = model(torch.float32)
    head = target.decoder.model.get_output_embeddings().weight
    with torch.no_grad():
        head[1::2] = head[:-1:2]
    favour = torch.zeros(61)
    favour[1::2] = 4e-6
    verifications(
        target,
        monkeypatch,
        lambda out: replace(out, logits=out.logits + favour),
        target.decoder,
        "forward",
    )
    report = checked(target, cases(["chain"], ["greedy"], [0.0]))
    assert report.allowed > 4e-6
    assert report.lossless
    parted = report.compared[0].parted
    assert parted
    assert all(0 <= p.margin <= report.allowed for p in parted)
    assert finding(report, "greedy, chain, T = 0").verdict == "warn"
    n = len(parted)
    said = f"lossless: {4 - n} of 4 texts the same as plain decoding's, {n} parted where the margin is within"
    assert report.summary.startswith(said)


@dataclass(frozen=True)
class Unprocessed(Acceptor):
    """Matching, but the bonus comes from the logits as they are: a bug of two official implementations."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        found = Match().accept(tree, p, chance)
        bonus = []
        for root, path in enumerate(found.paths):
            last = int(path[-1]) if len(path) else root
            raw = torch.softmax(p.raw(last).double(), -1)
            bonus.append(chance.categorical(raw, int(tree.row[root]), int(tree.depth[last])))
        return AcceptResult(found.paths, np.array(bonus))


def test_a_bonus_without_temperature_is_found() -> None:
    report = checked(model(), from_roots(Unprocessed()))
    assert not report.lossless
    assert any(p.margin > 1e-3 for p in report.compared[0].parted)
    assert checked(model(), from_roots(Unprocessed(), temperature=1.0)).lossless  # there it is none


@dataclass(frozen=True)
class Wrong(Acceptor):
    """Rejection with one thing wrong."""

    exact_for: ClassVar[frozenset[Draw]] = frozenset(Draw)
    survives_pruning: ClassVar[bool] = False
    greedy: ClassVar[bool] = False

    fault: str = ""

    @property
    def draw(self) -> Draw:
        return Draw.WITH_REPLACEMENT

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        paths, bonus = [], []
        for root in range(tree.roots):
            node = root
            path = []
            row = int(tree.row[root])
            while True:
                here, children = p(node), tree.children(node)
                if not children.size:
                    break
                child, q = int(children[0]), proposal(tree, int(children[0]), len(here))
                certain = torch.ones_like(q) if self.fault == "q is 1" else q
                kept = min(1.0, ratio(here, certain, int(tree.tokens[child])))
                if not chance.bernoulli(kept, row, int(tree.depth[node])):
                    here = here if self.fault == "no residual" else residual(here, q)
                    break
                node, path = child, [*path, child]
            paths.append(np.array(path, np.int64))
            bonus.append(chance.categorical(here, row, int(tree.depth[node])))
        return AcceptResult(tuple(paths), np.array(bonus))


@pytest.mark.parametrize("fault", ["", "q is 1", "no residual"])
def test_a_wrong_rejection_is_found(fault: str) -> None:
    rough = LMDrafter(tiny_target(seed=5))  # drafts what the target would not
    plan = replace(
        SHORT, max_new_tokens=10, trials=1500
    )  # 600 miss a fault under two seeds of three
    report = examine(model(), rough, PROMPTS, from_roots(Wrong(fault), 3.0, length=1), plan)
    assert report.lossless is not bool(fault)
    assert finding(report, "planted, chain, T = 3").verdict == ("bad" if fault else "ok")
    if fault:
        assert report.summary == "NOT lossless: planted, chain, T = 3"
        assert "otherwise than in plain sampling" in finding(report, "planted, chain, T = 3").text


def test_a_lossy_rule_is_told_as_such() -> None:
    report = checked(model(), cases(["chain"], ["typical", "match"], [TEMPERATURE]))
    assert report.lossless
    lossy = finding(report, "typical, chain, T = 2")
    assert lossy.verdict == "warn"
    assert "lossy by design" in lossy.text
    assert report.summary.endswith("; typical, chain, T = 2 is lossy by design")
    assert not any(t.exact for t in report.frequencies)
    assert report.as_json()["lossless"] is True
    alone = replace(report, compared=(), findings=(lossy,))
    assert alone.as_json()["lossless"] is False, (
        "a script that asks whether the output is the target's is told no"
    )
    told = "NOT lossless: nothing that was asked for promises it; typical, chain, T = 2 is lossy by design"
    assert alone.summary == told


def test_texts_of_one_token_cannot_be_drawn_behind() -> None:
    with pytest.raises(UserError, match="no second token can be drawn"):
        checked(model(), cases(["chain"], ["rejection"], [1.0]), replace(SHORT, max_new_tokens=1))


def test_the_margin_is_that_of_the_two_tokens_in_logits() -> None:
    """By hand: (3 − 1) / T + g₀ − g₁, and in logits T times that."""
    base, ours = OutputRecorder(), OutputRecorder()
    raw = torch.tensor([3.0, 1.0, -torch.inf])
    base.tokens, ours.tokens = [7, 0], [7, 1]
    base.scores = [Scores(raw, raw), Scores(raw, raw / 0.5)]
    keyed = Keyed(4, np.array([2]), np.array([9]))
    g = keyed.gumbel(0, 0, 3)
    assert margin_at_difference(base, ours, 1, Sampling(0.5), keyed) == pytest.approx(
        abs(2 + 0.5 * (g[0] - g[1]))
    )
    base.scores[1] = base.scores[0]
    assert margin_at_difference(base, ours, 1, Sampling(), keyed) == 2
    ours.tokens = [7, 2]
    assert margin_at_difference(base, ours, 1, Sampling(), keyed) == math.inf
    ours.tokens = [7]
    assert margin_at_difference(base, ours, 1, Sampling(), keyed) == math.inf


def test_shifts_do_not_count_what_is_common_to_all_tokens() -> None:
    a = torch.tensor([[1.0, 5.0, 2.0, -torch.inf]])
    assert logit_shift(a, a + 3) == 0
    assert logit_shift(a, a + torch.tensor([0.0, 0.25, 0.0, 0.0])) == 0.25
    assert logit_shift(a, torch.where(a == 2, torch.inf, a)) == math.inf


def test_distances_of_samples() -> None:
    """|3/4 − 1/4| twice, halved; and two samples of a fair coin."""
    found, expected = frequency_distance(np.array([3.0, 1.0]), np.array([1.0, 3.0]))
    assert found == 0.5
    assert expected == pytest.approx(2 * math.sqrt(0.25 * 0.5) * math.sqrt(2 / math.pi) / 2)
    assert frequency_distance(np.array([4.0, 0.0]), np.array([8.0, 0.0])) == (0, 0)


def test_noise_bound_is_at_least_the_dtypes_precision() -> None:
    assert Noise(0.0, scale=10.0).allowed(torch.float32) == pytest.approx(40 * 2**-23)
    assert Noise(0.5, scale=10.0).allowed(torch.float32) == 2.0
    assert Noise(1.0, 2.0, 3.0, 4.0).joined(Noise(4.0, 3.0, 2.0, 1.0)) == Noise(4.0, 3.0, 3.0, 4.0)


def test_noise_is_measured_beside_the_stock_model() -> None:
    target, heard = model(torch.float32), OutputRecorder()
    engine = Engine(target, imitator(), Chain())
    engine.plain([Request(PROMPTS[0], 8, keep_scores=True)], Sampling(), heard)
    found = measure_noise(target, PROMPTS[0], heard)
    assert 0 < found.logits < 1e-4
    moved = torch.zeros(61)
    moved[int(heard.scores[5].raw.argmax())] = 0.5
    heard.scores[5] = replace(heard.scores[5], raw=heard.scores[5].raw + moved)
    assert measure_noise(target, PROMPTS[0], heard).logits == pytest.approx(0.5, abs=1e-3)


SMALL = ("--limit", 2, "--max-new-tokens", 6, "--trials", 100, "--policy", "chain:length=2")


def test_the_command_shows_a_table_and_one_last_line(
    draftree: Callable[..., tuple[int, str, str]],
) -> None:
    status, out, err = draftree(
        "doctor", "--lossless", *SMALL, "--acceptor", "match", "--acceptor", "rejection"
    )
    assert (status, err) == (0, "")
    said = "lossless: 6 of 6 texts the same as plain decoding's, 2 of 2 frequency tests passed"
    assert out.splitlines()[-1] == said
    for word in (
        "edd for demo, 2 prompts",
        "rejection, chain:length=2, T = 1",
        "noise",
        "2/2",
        "4/4",
    ):
        assert word in out


def test_the_command_fails_where_the_output_is_another(
    draftree: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(self: Match, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        return walk(
            tree,
            lambda node: (
                int(p.processed_logits(node).topk(2).indices[1]) if tree.drafted else p.argmax(node)
            ),
        )

    monkeypatch.setattr(Match, "accept", second)
    args = ("doctor", "--lossless", *SMALL, "--acceptor", "match", "--temperature", 1)
    status, out, err = draftree(*args, "--json")
    assert (status, err) == (1, "")
    found = json.loads(out)
    assert found["lossless"] is False
    assert found["summary"] == "NOT lossless: match, chain:length=2, T = 1"
    assert set(found) == {
        "target", "drafter", "texts", "noise", "allowed", "level", "findings", "compared", "frequencies", "lossy", "lossless",
        "summary",
    }  # fmt: skip
    assert {"text", "seed", "token", "plain", "ours", "margin"} == set(
        found["compared"][0]["parted"][0]
    )
    status, out, _ = draftree(*args)
    assert status == 1
    assert "no noise explains it" in out
    assert out.splitlines()[-1] == found["summary"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trials", 500), "--trials was given, allowed only with --lossless"),
        (("--lossless", "--trials", 5), "trials is 5"),
        (("--lossless", "--acceptor", "typcal"), "did you mean 'typical'"),
        (("--lossless", "--limit", 0), "--limit"),
        (("--lossless", "--max-new-tokens", 1020), "all 32 prompts are too long"),
    ],
)
def test_mistakes_of_the_command_are_told_in_a_line(
    draftree: Callable[..., tuple[int, str, str]], args: tuple[object, ...], said: str
) -> None:
    status, out, err = draftree("doctor", *args)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_prompts_are_spread_over_what_there_is(tmp_path: Path) -> None:
    demo = Target.load("demo")
    every = load_prompts(demo, count=1000)
    assert len(every) == 32
    assert load_prompts(demo, count=3) == [every[0], every[10], every[21]]
    data = tmp_path / "chats.jsonl"
    chat = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4, as 2 and 2 make 4."},
    ]
    data.write_text(json.dumps({"messages": chat}))
    assert load_prompts(demo, data) == [encode(demo.tokenizer, question("What is 2 + 2?"))]
    with pytest.raises(UserError, match="all 1 prompts are too long"):
        load_prompts(demo, data, tokens=1020)
