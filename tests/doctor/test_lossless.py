"""Losslessness as a command: sound pairings pass, planted faults are found, and numerical noise is no fault."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.acceptors.base import Acceptor, proposal, ratio, residual, walk
from draftree.acceptors.match import Match
from draftree.data.prompts import encode, question
from draftree.doctor.finding import Finding, nan_to_null
from draftree.doctor.lossless import (
    ERROR_LEVEL,
    Case,
    Figures,
    cases,
    compare,
    conclude,
    draw_ranks,
    examine,
    generate_one,
    judge_ranks,
    measure_noise,
    stock_logits,
)
from draftree.drafters.lm import LMDrafter
from draftree.engine import Engine, generate_plain
from draftree.errors import UserError
from draftree.evaluation.teacher_forcing import read_prompts
from draftree.models.kv_cache import SlotCache
from draftree.policies.chain import Chain
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.sampling.keyed_noise import Keyed, RandomSource
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from draftree.tree import AcceptResult, Draw, Tree

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3, 2, 3]]
SHORT = {"max_new_tokens": 14, "trials": 400}
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


def finding(report: Figures, name: str) -> Finding:
    return next(f for f in report["findings"] if f.name == name)


def checked(target: Target, chosen: Sequence[Case], **extent: int) -> Figures:
    report = examine(target, imitator(), PROMPTS, chosen, **SHORT | extent)
    json.dumps(nan_to_null(report), allow_nan=False)
    return report


def planted(rule: Acceptor, temperature: float = TEMPERATURE, length: int = 2) -> list[Case]:
    return [Case("planted", temperature, rule, Chain(length), rule.keeps_text)]


def test_a_sound_pairing_is_lossless() -> None:
    told: list[tuple[int, int]] = []
    chosen = cases(["chain", "pct"], [], [0.0, TEMPERATURE])
    report = examine(
        model(),
        imitator(),
        PROMPTS,
        chosen,
        tell=lambda done, what, of: told.append((done, of)),
        **SHORT,
    )
    assert report["lossless"]
    assert {f.verdict for f in report["findings"]} == {"ok"}
    said = "lossless: 24 of 24 texts the same as plain decoding's, 4 of 4 frequency tests passed"
    assert report["summary"] == said
    assert [(c["case"], c["tokens"]) for c in report["compared"]] == [
        ("greedy, chain, T = 0", 4 * 14),
        ("greedy, pct, T = 0", 4 * 14),
        ("match, chain, T = 2", 8 * 14),
        ("match, pct, T = 2", 8 * 14),
    ]
    assert all(0 < c["shift"] <= report["allowed"] < 1e-11 for c in report["compared"])
    assert report["level"] == ERROR_LEVEL / 4
    assert all(t["trials"] == 29 * 13 and t["detectable"] < 0.25 for t in report["frequencies"])
    total = told[0][1]
    assert told == [(done, total) for done in range(total)]  # the bar ends where it said it would
    assert finding(report, "greedy, pct, T = 0").value == "4/4"


def test_rules_get_policies_that_leave_them_exact() -> None:
    tree = "vct:width=2,depth=2"
    assert [c.name for c in cases(["pct"], [], [0.0, 1.0])] == [
        "greedy, pct, T = 0",
        "block, chain, T = 1",
        "match, pct, T = 1",
        f"multiround, {tree}, T = 1",
        "rejection, chain, T = 1",
        f"traversal, {tree}, T = 1",
    ]
    names = [c.name for c in cases(["pct", "static"], ["multiround"], [1.0])]
    assert names == ["multiround, static, T = 1"]
    assert [c.temperature for c in cases(["chain"], ["match"], [0.0, 0.7])] == [0.0, 0.7]
    assert [c.temperature for c in cases(["chain"], ["rejection"], [0.7, 0.0])] == [0.7]


@pytest.mark.parametrize(
    ("policies", "acceptors", "temperatures", "said"),
    [
        (["chian"], [], [0.0], "did you mean 'chain'"),
        (["chain"], ["rejektion"], [1.0], "did you mean 'rejection'"),
        (["chain"], [], [-1.0], "temperature is -1"),
        (["pct"], ["greedy", "rejection"], [0.0], "'rejection' does not serve temperature 0"),
        (
            ["chain"],
            ["greedy"],
            [0.5, 1.0],
            "'greedy' does not serve temperature 1; allowed: match",
        ),
    ],
)
def test_mistakes_are_told(
    policies: list[str], acceptors: list[str], temperatures: list[float], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        cases(policies, acceptors, temperatures)


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
    found = finding(report, "greedy, chain, T = 0")
    assert (found.value, found.verdict) == ("4/4", "bad")
    assert "no noise explains: a mask, a position or a kernel is wrong" in found.text
    assert 1e-7 < report["compared"][0]["shift"] < 1e-5
    assert report["summary"] == "NOT lossless: greedy, chain, T = 0"


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_a_mask_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Every node sees what the one before it sees."""

    def late(mask: Tensor) -> Tensor:
        return torch.cat((mask[:, :, :1], mask[:, :, :-1]), dim=2)

    target = model()
    verifications(target, monkeypatch, late, SlotCache, "mask")
    report = checked(target, cases(["chain"], ["match"], [temperature]))
    assert not report["lossless"]
    assert finding(report, "plain decoding").verdict == "ok"  # the noise is measured without it
    assert report["allowed"] < 1e-11
    parted = report["compared"][0]["parted"]
    assert parted
    assert all(p["margin"] > 1e-3 and p["plain"] != p["ours"] for p in parted)
    assert "a mask, a position or a kernel is wrong" in report["findings"][1].text
    drawn = checked(target, cases(["chain"], ["rejection"], [TEMPERATURE]), trials=1500)
    assert not drawn["lossless"], "frequencies are compared with the stock model's, too"


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
    assert not report["lossless"]


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
    assert report["allowed"] > 4e-6
    assert report["lossless"]
    parted = report["compared"][0]["parted"]
    assert parted
    assert all(0 <= p["margin"] <= report["allowed"] for p in parted)
    assert finding(report, "greedy, chain, T = 0").verdict == "warn"
    n = len(parted)
    said = f"lossless: {4 - n} of 4 texts the same as plain decoding's, {n} parted where the margin is within"
    assert report["summary"].startswith(said)


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
    report = checked(model(), planted(Unprocessed()))
    assert not report["lossless"]
    assert any(p["margin"] > 1e-3 for p in report["compared"][0]["parted"])
    assert "the acceptor is wrong, logits agree" in finding(report, "planted").text
    assert checked(model(), planted(Unprocessed(), temperature=1.0))["lossless"]  # there it is none


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
    chosen = planted(Wrong(fault), 3.0, length=1)
    report = examine(model(), rough, PROMPTS, chosen, max_new_tokens=10, trials=1500)
    assert report["lossless"] is not bool(fault)
    found = finding(report, "planted")
    assert found.verdict == ("bad" if fault else "ok")
    if fault:
        assert report["summary"] == "NOT lossless: planted"
        assert "the acceptor is wrong with this policy or drafter; use match" in found.text


def test_a_lossy_rule_is_told_as_such() -> None:
    report = checked(model(), cases(["chain"], ["typical", "match"], [TEMPERATURE]))
    assert report["lossless"]
    lossy = finding(report, "typical, chain, T = 2")
    assert lossy.verdict == "warn"
    assert "lossy by design" in lossy.text
    assert report["summary"].endswith("; typical, chain, T = 2 is lossy by design")
    assert not any(t["exact"] for t in report["frequencies"])
    alone = checked(model(), cases(["chain"], ["typical"], [TEMPERATURE]))
    assert alone["lossless"] is False, (
        "a script that asks whether the output is the target's is told no"
    )
    told = "NOT lossless: nothing that was asked for promises it; typical, chain, T = 2 is lossy by design"
    assert alone["summary"] == told


def test_texts_of_one_token_test_nothing() -> None:
    report = checked(model(), cases(["chain"], ["rejection"], [1.0]), max_new_tokens=1)
    assert report["lossless"] is False
    assert "nothing that was asked for promises it" in report["summary"]


def test_ranks_are_uniform_just_where_tokens_follow_the_target() -> None:
    """Plain sampling's tokens pass; the same tokens with a token that never comes do not."""
    engine = Engine(model(), imitator(), Chain(), Match())
    requests = [Request(PROMPTS[n % 4], 14, number=n) for n in range(60)]
    ranks = draw_ranks(engine, requests, TEMPERATURE)
    assert len(ranks) == 60 * 13
    assert all(0 <= r <= 1 for r in ranks)
    case = planted(Wrong())[0]
    figures, found = judge_ranks(case, ranks, 1e-3, 0.0)
    assert (found.verdict, figures["trials"]) == ("ok", 780)
    figures, found = judge_ranks(case, [r for r in ranks if r > 0.15], 1e-3, 0.0)
    assert found.verdict == "bad"
    assert figures["distance"] == pytest.approx(0.15, abs=0.02)
    assert judge_ranks(case, [r for r in ranks if r > 0.15], 1e-3, 0.2)[1].verdict == "warn"


def test_rank_tests_have_the_level_and_reach_that_they_state() -> None:
    """By hand: of 2 ranks, 0.5 is far from 0 by a half; and tests of uniform ranks fail rarely."""
    case, rng = planted(Wrong())[0], np.random.default_rng(1)
    figures, _ = judge_ranks(case, [0.5, 0.75], 1e-3, 0.0)
    assert figures["distance"] == 0.5
    assert figures["p_value"] == min(1.0, 2 * math.exp(-4 * 0.25))
    sound = [judge_ranks(case, rng.random(300).tolist(), 0.05, 0.0)[0] for _ in range(400)]
    assert np.mean([f["p_value"] < 0.05 for f in sound]) < 0.07
    assert np.mean([f["distance"] for f in sound]) == pytest.approx(sound[0]["chance"], rel=0.1)
    reach = sound[0]["detectable"]
    wrong = [rng.random(300) * (1 - reach) + reach for _ in range(400)]
    noticed = [judge_ranks(case, r.tolist(), 0.05, 0.0)[0]["p_value"] < 0.05 for r in wrong]
    assert np.mean(noticed) >= 0.99


def test_tokens_that_are_nearly_certain_test_nothing() -> None:
    figures, found = judge_ranks(planted(Wrong())[0], [], 1e-3, 0.0)
    assert set(figures) == {
        "case",
        "trials",
        "p_value",
        "distance",
        "chance",
        "detectable",
        "exact",
    }
    assert (figures["trials"], figures["detectable"], found.verdict) == (0, 1.0, "warn")


def test_the_margin_is_that_of_the_two_tokens_in_logits() -> None:
    """By hand: T · (log p₀ / p₁ + g₀ − g₁), and ∞ where a text had ended."""
    target, sampling = model(), Sampling(0.5, seed=4)
    request = Request(PROMPTS[0], 8, number=2, keep_scores=True)
    base = generate_one(partial(generate_plain, target), request, sampling)
    token = (base[0][3] + 1) % 61
    other = ([*base[0][:3], token], base[1])
    raw = base[1][3].double()
    g = Keyed(4, np.array([2]), np.array([len(PROMPTS[0]) + 2])).gumbel(0, 0, 61)
    by_hand = float(raw[base[0][3]] - raw[token]) + 0.5 * (g[base[0][3]] - g[token])
    found = compare(target, request, sampling, base, other)
    assert found["margin"] == pytest.approx(by_hand, rel=1e-9)
    assert (found["token"], found["plain"], found["ours"]) == (3, base[0][3], token)
    ended = compare(target, request, sampling, base, (base[0][:3], base[1]))
    assert (ended["margin"], ended["ours"]) == (math.inf, None)
    same = compare(target, request, sampling, base, base)
    assert (same["plain"], same["ours"], same["shift"]) == (None, None, 0)


def test_shifts_do_not_count_what_is_common_to_all_tokens() -> None:
    a = torch.tensor([[1.0, 5.0, 2.0, -torch.inf]])
    assert measure_noise(a, a + 3)["logits"] == 0
    assert measure_noise(a, a + torch.tensor([0.0, 0.25, 0.0, 0.0]))["logits"] == 0.25
    assert measure_noise(a, torch.where(a == 2, torch.inf, a))["logits"] == math.inf
    assert set(measure_noise(a[:0], a).values()) == {0.0}


def test_noise_bound_is_at_least_the_dtypes_precision() -> None:
    def allowed(logits: float) -> float:
        noise = {"logits": logits, "p": 0.0, "tv": 0.0, "scale": 10.0}
        found: float = conclude(torch.float32, [noise], [])["allowed"]
        return found

    assert allowed(0.0) == pytest.approx(40 * 2**-23)
    assert allowed(0.5) == 2.0


def test_noise_is_measured_beside_the_stock_model() -> None:
    target = model(torch.float32)
    request = Request(PROMPTS[0], 8, keep_scores=True)
    tokens, logits = generate_one(partial(generate_plain, target), request, Sampling())
    wide = stock_logits(target, PROMPTS[0], tokens)
    assert 0 < measure_noise(logits, wide)["logits"] < 1e-4
    logits[5, int(logits[5].argmax())] += 0.5
    assert measure_noise(logits, wide)["logits"] == pytest.approx(0.5, abs=1e-3)


SMALL = ("--limit", 2, "--max-new-tokens", 6, "--trials", 100, "--policy", "chain:length=2")


def test_the_command_shows_a_table_and_one_last_line(
    draftree: Callable[..., tuple[int, str, str]],
) -> None:
    status, out, err = draftree(
        "doctor", "--lossless", *SMALL, "--acceptor", "match", "--acceptor", "rejection"
    )
    assert status == 0
    announced = (
        "draftree: 2 texts in 3 ways, and plain decoding: at most about"  # on a slow machine
    )
    assert all(line.startswith(announced) for line in err.splitlines())
    said = "lossless: 6 of 6 texts the same as plain decoding's, 1 of 1 frequency tests passed"
    assert out.splitlines()[-1] == said
    for word in (
        "edd for demo, 2 prompts",
        "rejection, chain:length=2, T = 1",
        "plain decoding",
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
    assert {"text", "seed", "token", "plain", "ours", "margin"} < set(
        found["compared"][0]["parted"][0]
    )
    status, out, _ = draftree(*args)
    assert status == 1
    assert "match, chain:length=2, T = 1: text " in out
    assert "which no noise explains: the acceptor is wrong" in out
    assert out.splitlines()[-1] == found["summary"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trials", 500), "--trials was given, allowed only with --lossless"),
        (("--lossless", "--trials", 5), "--trials"),
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
    every = read_prompts(demo, None, 1000)
    assert len(every) == 32
    assert read_prompts(demo, None, 3) == [every[0], every[10], every[21]]
    data = tmp_path / "chats.jsonl"
    chat = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4, as 2 and 2 make 4."},
    ]
    data.write_text(json.dumps({"messages": chat}))
    assert read_prompts(demo, data) == [encode(demo.tokenizer, question("What is 2 + 2?"))]
    with pytest.raises(UserError, match="all 1 prompts are too long"):
        read_prompts(demo, data, tokens=1020)
