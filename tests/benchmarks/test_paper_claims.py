"""The papers' claims: judged by planted rows, not run with a reason, and run on the toy."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.drafter_calibration import CANDIDATES, GROUPS, CandidateTrace, group_figures
from common.paper_claims import PLAIN, Claim, fill_pairing, judge_claims, summary
from common.paper_recipes import CLAIMS, SMALL, TRAINED, select_claims
from draftree.acceptors.match import Match
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.evaluation.bootstrap import TOO_FEW
from draftree.registry import build, names
from scripts import run_script


def result(gains: dict[str, float], noise: float = 0.02) -> dict[str, Any]:
    """Rows whose passes a token are planted."""
    rng, rows = np.random.default_rng(1), []
    for pairing, gain in gains.items():
        drafter, _, policy = pairing.partition(" ")
        steps = 100 / gain * rng.normal(1, noise, 20)
        each = {
            "tokens": [100] * 20,
            "steps": steps.tolist(),
            "nodes": (9 * steps).tolist(),
            "counted_seconds": steps.tolist(),
        }
        rows.append(
            {
                "drafter": drafter,
                "policy": policy,
                "temperature": 0.0,
                "acceptance_length": gain,
                "per_prompt": each,
            }
        )
    return {"rows": rows, "provenance": {"seed": 0}}


@pytest.mark.parametrize(
    ("gains", "keeps", "wanted"),
    [((2.0, 1.5), False, "holds"), ((1.5, 2.0), False, "fails"), ((1.0, 1.0), False, "ties"),
     ((2.0, 2.0), True, "holds"), ((2.0, 1.5), True, "holds"), ((1.5, 2.0), True, "fails")],
)  # fmt: skip
def test_a_claim_holds_ties_or_fails(gains: tuple[float, float], keeps: bool, wanted: str) -> None:
    claim = Claim("P", "1", "c", "f", "a x", "b y", keeps=keeps)
    saved = result(dict(zip(("a x", "b y"), gains, strict=True)), 0.2 if wanted == "ties" else 0.02)
    (found,) = judge_claims([claim], [saved], {}, {})
    assert found.verdict == wanted
    assert found.taus == gains
    assert found.cells()[""] == wanted
    assert found.cells()["theirs"] == "f"


def test_p_values_are_adjusted_for_all_claims_that_were_judged() -> None:
    saved = result({"a x": 1.02, "b y": 1.0}, 0.025)
    alone = judge_claims([Claim("P", "1", "c", "f", "a x", "b y")], [saved], {}, {})[0].ratio
    named = [Claim("P", str(i), "c", "f", "a x", "b y", temperature=0.0) for i in range(30)]
    once = judge_claims(named, [saved], {}, {})
    assert alone is not None
    assert all(j.ratio is not None and j.ratio.p == alone.p for j in once), (
        "the same pairing thirty times is one comparison"
    )
    assert summary(once).startswith("1 claims")
    assert "the 1 comparison of this run" in summary(once)
    others = result({"a x": 1.02, "b y": 1.0} | {f"b y{i}": 1.0 for i in range(29)}, 0.025)
    others["rows"][1:] = [saved["rows"][1] | {"policy": r["policy"]} for r in others["rows"][1:]]
    others["rows"][0] = saved["rows"][0]
    many = judge_claims(
        [Claim("P", "1", "c", "f", "a x", f"b y{i}") for i in range(29)] + named[:1],
        [others],
        {},
        {},
    )
    assert all(
        j.ratio is not None and j.ratio.p == pytest.approx(min(1, 30 * alone.p)) for j in many
    )


def test_both_halves_of_a_claim_have_one_verdict() -> None:
    claim = Claim("P", "1", "fewer nodes at its τ", "f", "a x", "b y", "nodes", both=True)
    kept, longer = result({"a x": 1.0, "b y": 1.0}, 0.01), result({"a x": 0.7, "b y": 1.0}, 0.01)
    for saved, wanted in ((kept, "holds"), (longer, "fails")):
        each = saved["rows"][0]["per_prompt"]
        each["nodes"] = [0.3 * n for n in each["nodes"]]
        (found,) = judge_claims([claim], [saved], {}, {})
        assert found.verdict == wanted, "fewer nodes alone do not make the claim"
        assert "of its passes" in found.cells()["here"]
        assert found.ratio is not None
        assert found.ratio.value < 0.6


@pytest.mark.parametrize(
    ("prompts", "verdict"), [(1, "too few prompts"), (7, "too few prompts"), (8, "holds")]
)
def test_few_prompts_give_no_verdict(prompts: int, verdict: str) -> None:
    saved = result({"a x": 2.0, "b y": 1.0})
    for row in saved["rows"]:
        row["per_prompt"] = {name: values[:prompts] for name, values in row["per_prompt"].items()}
    (found,) = judge_claims([Claim("P", "1", "c", "f", "a x", "b y")], [saved], {}, {})
    assert found.verdict == verdict
    assert f"{verdict}: 1" in summary([found])
    assert ("at least 8 prompts" in summary([found])) == (prompts < 8)


def test_a_pairing_may_name_its_rule() -> None:
    saved = result({"a x": 2.0, "b y": 1.0})
    for row in saved["rows"]:
        row["rule"] = "match:coupled=false"
    plain = result({"a x": 1.0, "b y": 1.0})
    claim = Claim("P", "1", "c", "f", "a x match:coupled=false", "b y match:coupled=false")
    assert claim.parts == {"a", "x", "b", "y"}
    assert judge_claims([claim], [plain, saved], {}, {})[0].taus == (2.0, 1.0)
    assert judge_claims([replace(claim, mine="a x", other="b y")], [saved, plain], {}, {})[
        0
    ].taus == (
        1.0,
        1.0,
    )


def test_a_pairing_is_compared_with_plain_decoding_on_its_own_costs() -> None:
    saved = result({"a x": 2.0})
    saved["rows"][0]["per_prompt"]["counted_plain"] = [100.0] * 20
    claims = [
        Claim("P", "1", "c", "f", "a x", PLAIN, "counted_seconds"),
        Claim("P", "1", "c", "f", "a x", PLAIN, level=1e-9),
    ]
    found = judge_claims(claims, [saved], {}, {})
    assert found[0].verdict == "holds"
    assert found[0].ratio is not None
    assert found[0].ratio.value == pytest.approx(0.5, rel=0.02)
    assert found[0].taus == (2.0, 1.0)
    assert found[1].verdict == "ties", "it is as significant as it must be, or it does not hold"


def test_groups_of_candidates_are_claims_by_their_places() -> None:
    """Six places, of which three are sure, and two of these right; the sixth no chain comes to."""
    one = CandidateTrace(np.array([1, 2, 5, 1, 2, 1]), np.array([0, 0, 1, 0, 8, 0]), np.array([0.9, 0.8, 0.7, 0.1, 0.2, 0.9]),
                 np.array([0.5, 0.5, 0.5, 3.0, 3.0, 3.0]), np.array([True] * 5 + [False]),
                 np.zeros((6, CANDIDATES)))  # fmt: skip
    rows = {r["policy"]: r["per_prompt"] for r in group_figures([one, one], "d")}
    assert {name: (r["places"], r["tokens"]) for name, r in rows.items() if name != "closed-said"} == {
        "sure": ([3, 3], [2.0, 2.0]), "unsure": ([2, 2], [1.0, 1.0]), "upper-left": ([3, 3], [3.0, 3.0]),
        "deep": ([1, 1], [0.0, 0.0]), "lower-right": ([0, 0], [0.0, 0.0]), "open": ([3, 3], [2.0, 2.0]),
        "open-said": ([3, 3], [pytest.approx(1.2)] * 2), "closed": ([3, 3], [2.0, 2.0]),
    }  # fmt: skip
    assert rows["closed-said"]["tokens"] == [pytest.approx(2.4)] * 2
    looked = [
        replace(one, rank=np.where(np.arange(6) == i % 6, 1 - one.rank.clip(0, 1), one.rank))
        for i in range(12)
    ]
    claims = [
        Claim("P", "1", "c", "f", f"d {a}", f"d {b}", "places")
        for a, b in (("sure", "unsure"), ("closed-said", "closed"))
    ]
    found = judge_claims(
        claims, [{"rows": [], "places": group_figures(looked, "d"), "provenance": {}}], {}, {}
    )
    assert [j.ratio is not None and (j.ratio.value < 1) for j in found] == [True, True]
    assert found[0].cells()["here"].startswith("right 0.")


def test_claims_that_are_not_run_have_a_reason() -> None:
    claims = [Claim("P", "1", "c", "f", "a x", "b y"), Claim("P", "2", "c", "f", not_run="needs a GPU"),
              Claim("P", "3", "c", "f", "a x", "z y")]  # fmt: skip
    found = judge_claims(claims, [result({"a x": 1.0})], {}, {"z": "no drafter 'z'"})
    assert [j.verdict for j in found] == ["not run"] * 3
    assert [j.why for j in found] == [
        "no result has both at this temperature",
        "needs a GPU",
        "no drafter 'z'",
    ]
    told = "p adjusted by Holm's method over the 0 different comparisons of this run."
    assert summary(found) == f"3 claims, holds: 0, ties: 0, fails: 0, not run: 3; {told}"
    assert fill_pairing("edd pct", {"edd": "FOLDER"}) == "FOLDER pct"
    assert (
        fill_pairing("a:x=1 c2t:chain=true", {"a": "a:of=F", "c2t": "c2t:c=T"})
        == "a:of=F,x=1 c2t:c=T,chain=true"
    )


def test_every_pairing_of_the_papers_exists() -> None:
    for claim in CLAIMS:
        assert bool(claim.mine) is not bool(claim.not_run)
        for pairing in claim.pairings:
            drafter, policy, *rule = pairing.split(" ")
            assert drafter.partition(":")[0] in {*names("drafter"), *TRAINED, SMALL}
            build("policy", policy)
            assert [build("acceptor", r) for r in rule] == (
                [] if claim.temperature == 0 else [Match(coupled=False)]
            )
        if claim.by == "places":
            assert {side.partition(" ")[2] for side in (claim.mine, claim.other)} <= GROUPS.keys()
        assert claim.mine != PLAIN
    assert {c.paper for c in select_claims(["eagle", "c2t"])} == {"EAGLE-2", "C2T"}


def test_the_command_replays_and_judges(tmp_path: Path, capsys) -> None:
    CostTable((Costs({1: 0.1}, {1: 1.0, 8: 1.2}),)).save(tmp_path / "costs.json")
    words = ["--paper", "GLIDE", "--limit", 2, "--max-new-tokens", 8, "--recording", tmp_path / "of", "--out",
             tmp_path / "t.json", "--costs", tmp_path / "costs.json", "--json"]  # fmt: skip
    assert run_script("paper_tables", *words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "t.json").read_text())
    able = [
        bool(c["mine"])
        and not c["other"].startswith("glide-")
        and not c["mine"].startswith("glide-")
        for c in said["claims"]
    ]
    assert [c["verdict"] for c in said["claims"]] == [TOO_FEW if ran else "not run" for ran in able]
    assert sum(able) >= 8
    assert (tmp_path / "t.t0.json").is_file()
    words = ["--paper", "GLIDE", "--result", tmp_path / "t.t0.json", "--out"]
    assert run_script("paper_tables", *words, tmp_path / "again.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["claims"] == said["claims"]
    for wrong, told in (
        (["--paper", "NOPE"], "no paper is named like NOPE"),
        (["--as", "nope=x"], "--as names 'nope'"),
    ):
        assert run_script("paper_tables", *wrong, "--out", tmp_path / "n.json") == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "n.json").exists()
