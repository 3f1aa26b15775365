"""One verdict on whether to speculate: chosen on one half of the prompts, judged on the other."""

import json

import pytest

from draftree.cli.app import main
from draftree.costs.step_costs import Costs
from draftree.engine import Engine, generate_plain
from draftree.errors import UserError
from draftree.evaluation import advice
from draftree.policies.chain import Chain
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import Always, Never, tiny_target

REQUESTS = [Request([3, 1, n], 12, number=n) for n in range(1, 17)]
CHEAP, DEAR = Costs({1: 0.001}, {1: 1.0, 8: 1.01}), Costs({1: 5.0}, {1: 1.0, 8: 1.01})


@pytest.fixture(scope="module")
def target() -> Target:
    found = tiny_target()
    found.tokenizer = Target.load("demo").tokenizer
    return found


def engines(target: Target, costs: Costs = CHEAP) -> dict[advice.Pair, Engine]:
    plans = [
        [*r.prompt, *w]
        for r, w in zip(REQUESTS, generate_plain(target, REQUESTS).tokens, strict=True)
    ]
    scripts = {"never": Never(plans, 61), "always": Always(plans, 61)}
    return {
        (name, "chain:length=4"): Engine(target, s, Chain(4), costs=costs)
        for name, s in scripts.items()
    }


def test_halves_do_not_hang_on_the_order() -> None:
    first, other = advice.split_in_halves(REQUESTS)
    again = advice.split_in_halves(REQUESTS[::-1])
    assert ([r.number for r in first], [r.number for r in other]) == tuple(
        [r.number for r in half] for half in again
    )
    assert {r.number for r in first} | {r.number for r in other} == set(range(1, 17))
    assert len(first) == len(other) == 8


def test_the_drafter_that_is_right_is_chosen_and_judged_on_other_prompts(target: Target) -> None:
    found = advice.advise(engines(target), REQUESTS)
    assert found.chosen[0] == "always"
    row = found.counted[found.chosen]
    assert row["acceptance_length"] > 3
    assert row["prompts"] == found.judged["prompts"] == 8
    assert found.counted["never", "chain:length=4"]["acceptance_length"] == 1
    assert found.judged["same_output"]
    assert "speedup" not in row
    said = found.as_json()
    assert said["drafter"] == "always"
    assert [r["drafter"] for r in said["counted"]] == ["never", "always"]


def test_a_verdict_is_what_its_interval_says(target: Target) -> None:
    found = advice.advise(engines(target, DEAR), REQUESTS)
    for bounds, wanted, words in (
        ([1.1, 1.4], True, "Speculate with"),
        ([0.5, 0.9], False, "Do not speculate"),
        ([0.9, 1.2], None, "Not told"),
    ):
        judged = found.judged | {"intervals": {"speedup": bounds}}
        verdict = advice.Verdict(found.chosen, found.counted, judged)
        assert verdict.speculate is wanted
        assert advice.format_verdict(verdict, "demo").startswith(words)
        few = advice.Verdict(found.chosen, found.counted, judged | {"prompts": 7})
        assert few.speculate is None
        assert "needed are 8 (--limit 16)" in advice.format_verdict(few, "demo")
    assert found.counted[found.chosen]["counted_speedup"] < 1, "drafting costs more than it brings"


def test_too_few_prompts_are_told(target: Target) -> None:
    with pytest.raises(UserError, match="needed are at least 4 different ones"):
        advice.advise(engines(target), [REQUESTS[0]] * 8)


def test_the_pairings_that_are_tried() -> None:
    assert advice.candidate_pairings([], ("edd", "pct"), False) == [
        ("edd", "pct"),
        ("suffix", "yield"),
        ("pld", "trie"),
    ]
    assert advice.candidate_pairings(["vdm"], ("edd", "pct"), True)[:2] == [
        ("vdm", "yield"),
        ("vdm", "pct"),
    ]


def test_the_command_says_one_verdict(quick: None, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["advise", "--drafter", "vdm", "--limit", "4", "--max-new-tokens", "8", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert {"speculate", "drafter", "policy", "speedup", "interval", "counted"} <= set(said)
    assert len(said["counted"]) == 4
    with pytest.raises(SystemExit, match="2"):
        main(["advise", "--data", "nowhere.jsonl"])
    assert "unknown suite" in capsys.readouterr().err
