"""The registry of the papers' tables and figures: every one has a command that parses, and a verdict or a reason."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import analyse
import papers
from common.command_line import as_program
from common.paper_recipes import CLAIMS, select_claims
from draftree.cli import app

ROOT = Path(__file__).resolve().parents[2]
SAVED = json.loads((ROOT / "benchmarks" / "results" / "papers.json").read_text("utf-8"))["rows"]


def test_every_table_with_a_claim_is_in_the_registry() -> None:
    assert {(c.paper, c.table) for c in CLAIMS} <= {(i.paper, i.place) for i in papers.ITEMS}
    assert len({(i.paper, i.place) for i in papers.ITEMS}) == len(papers.ITEMS)
    assert all(bool(i.reason) is not bool(i.command) for i in papers.ITEMS)
    assert {i.paper for i in papers.ITEMS} == set(papers.SHORT.values())
    assert len(papers.lists().splitlines()) == len(papers.ITEMS)


def options_of(script: Path) -> set[str]:
    """Return the options that a script defines, or one that it imports from its folder."""
    text = script.read_text("utf-8")
    siblings = re.findall(r"^from (\w+) import", text, re.M)
    texts = [
        text,
        *(p.read_text("utf-8") for n in siblings if (p := script.with_name(f"{n}.py")).is_file()),
    ]
    return {flag for t in texts for flag in re.findall(r"\"(--[\w-]+)\"", t)}


def test_every_command_parses() -> None:
    commands = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
    for item in papers.ITEMS:
        words = shlex.split(item.command)
        if words[:1] == ["draftree"]:
            assert (
                commands[words[1]].make_context(words[1], words[2:]).params
            )  # a mistake is raised
        elif words:
            script = words[1] if words[0] == "python" else words[0]
            assert (ROOT / script).is_file(), item.command
            if script == "benchmarks/analyse.py":
                program = typer.main.get_command(as_program(analyse.analyse))
                assert program.make_context("analyse", words[2:]).params
            else:
                known = options_of(ROOT / script)
                assert {w for w in words if w.startswith("--")} <= known, item.command
        if "benchmarks/papers.py" in words and "--table" in words:
            paper, table = (words[words.index(flag) + 1] for flag in ("--paper", "--table"))
            assert any(i.paper == papers.SHORT[paper] and i.place == table for i in papers.ITEMS), (
                item.command
            )


def test_a_table_of_this_script_has_claims_that_can_be_run() -> None:
    for item in (i for i in papers.ITEMS if not i.run and not i.reason):
        assert any(c.mine for c in select_claims([item.paper], [item.place])), item


def test_each_claim_has_a_saved_verdict_or_a_reason() -> None:
    judged = {(r["paper"], r["table"], r["claim"]) for r in SAVED}
    claims = {(c.paper, c.table, c.claim) for c in CLAIMS}
    assert len(claims) == len(CLAIMS), "no two claims have one name"
    assert judged <= claims
    assert papers.SAVED.keys() | papers.EQUAL.keys() | papers.EQUAL_SMOLLM2.keys() <= claims
    assert papers.TWO_SEEDS.keys() | papers.STANDS_IN.keys() | papers.CONFOUNDED.keys() <= claims
    for claim in CLAIMS:
        place = (claim.paper, claim.table, claim.claim)
        reason = claim.not_run
        assert place in judged or len(reason) > 20, f"{place} has neither a verdict nor a reason"
    assert {r["verdict"] for r in SAVED} <= {"holds", "ties", "fails"}
    assert all(r.get("prompts", 8) >= 8 for r in SAVED)


def test_every_verdict_names_a_saved_result() -> None:
    results = ROOT / "benchmarks" / "results"
    assert all(
        (results / f"{r['source']}.json").is_file() or r["source"] == "the shipped net"
        for r in SAVED
    )


def test_seeds_that_disagree_tie() -> None:
    held = {"verdict": "holds", "ratio": [0.8, 0.7, 0.9]}
    failed = {"verdict": "fails", "ratio": [1.2, 1.1, 1.3]}
    assert papers.every_seed([held]) == held
    assert papers.every_seed([held, held])["verdict"] == "holds"
    assert papers.every_seed([failed, failed])["verdict"] == "fails"
    assert papers.every_seed([held, failed])["verdict"] == "ties"
    assert papers.every_seed([held, held | {"verdict": "ties"}])["verdict"] == "ties"
    assert papers.every_seed([held, failed])["other seeds"] == [[1.2, 1.1, 1.3]]


def test_each_seed_of_the_sweeps_is_judged_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names of the recipe's drafters are those of the claims, and both seeds count."""
    recipe = (ROOT / "recipes" / "sweeps.py").read_text("utf-8")
    assert all(f'"{n}": ' in recipe for pair in papers.TWO_SEEDS.values() for n in pair)
    claim = next(c for c in CLAIMS if (c.paper, c.table) == (papers.GLIDE_CAPE, "Fig. 7"))
    each = {"tokens": [64] * 9, "accepted": [40] * 9, "nodes": [80] * 9}
    rows = [
        {
            "drafter": f"sweeps/{name}-s{seed}",
            "policy": papers.FIVE,
            "rule": None,
            "temperature": 0.0,
            "acceptance_length": 64 / steps,
            "per_prompt": each | {"steps": [steps + i % 3 for i in range(9)]},
        }
        for name, seed, steps in (
            ("glide", 0, 20),
            ("glide-low", 0, 40),
            ("glide", 1, 40),
            ("glide-low", 1, 20),
        )
    ]
    (tmp_path / "papers_sweeps.json").write_text(
        json.dumps({"format": 2, "provenance": {"seed": 0}, "rows": rows})
    )
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    pairs = papers.saved_pairs(claim, "demo")
    assert [p.mine["drafter"] for p in pairs] == ["sweeps/glide-s0", "sweeps/glide-s1"]
    assert len({p.key for p in pairs}) == 2
    monkeypatch.setattr(papers, "CLAIMS", (claim,))
    monkeypatch.setattr(papers, "SHORT", {"glide": papers.GLIDE_CAPE})
    monkeypatch.setattr(papers, "special", lambda target: [])
    [found] = papers.verdicts("demo")
    assert found["verdict"] == "ties", "one seed holds, the other fails"
    assert found["ratio"][2] < 1 < found["other seeds"][0][1]


def test_nets_of_other_texts_are_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recall = {"texts": 9, "recall": [0.5, 0.6], "positive rate": [0.01, 0.02], "verdict": "holds"}
    rows = [
        {"net": "other", "beside": "right", "share": [1.2, 1.1, 1.3]},
        {"net": "tuned", "beside": "other", "share": [1.0, 0.9, 1.1]},
    ]
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    assert papers.other_texts() == []
    bench = [{"policy": None}, {"policy": "c2t", "per_prompt": {"steps": [1] * 10}}]
    saved = {"format": 2, "provenance": {"seed": 0}, "rows": rows, "recall": recall}
    saved |= {"bench": bench}
    (tmp_path / "papers_c2t_texts.json").write_text(json.dumps(saved))
    tuning, learning = papers.other_texts()
    assert (tuning["table"], tuning["verdict"]) == ("Fig. 7", "holds")
    assert "recall 0.50 before, 0.60 after" in tuning["of"]
    assert (learning["table"], learning["verdict"]) == ("Fig. 8", "fails"), "1.1 is above 1.05"
    assert (tuning["prompts"], learning["prompts"]) == (9, 10)


def test_a_claim_at_equal_tau_has_one_verdict_for_all_its_rows() -> None:
    assert papers.at_equal(0.7, 0.9, False) == "holds"
    assert papers.at_equal(0.7, 1.1, False) == "ties"
    assert papers.at_equal(1.1, 1.2, False) == "fails"
    assert papers.at_equal(0.9, 1.04, True) == "holds"
    assert papers.at_equal(0.9, 1.2, True) == "ties"
    claim = next(c for c in CLAIMS if c.claim == "entropy and depth as features")
    found = papers.equal(claim)
    assert found["verdict"] == "ties", (
        "without either, 1.04 [0.84, 1.33] and 1.02 [0.87, 1.24] of the nodes"
    )
    assert found["ratio"][1] < 1 < found["ratio"][2]


def test_saved_verdicts_are_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one paper on one target, over again."""
    monkeypatch.setattr(papers, "SHORT", {"aded": papers.ADED})
    again = papers.verdicts("smollm2")
    saved = [r for r in SAVED if r["target"] == "smollm2" and r["paper"] == papers.ADED]
    assert [r for r in again if r["paper"] == papers.ADED] == saved
    assert {r["verdict"] for r in saved} >= {"holds", "fails"}


def test_unknown_table_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert papers.run(papers.EAGLE2, "9", "demo", [], tmp_path, []) == 2
    assert "EAGLE-2 has no '9', allowed are Fig. 1, 2" in capsys.readouterr().err
    assert papers.run(papers.EAGLE2, "Fig. 3, 4, 7, 8", "demo", [], tmp_path, []) == 0
    assert "a diagram of the method" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_table_is_run_by_one_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ["--limit", "2", "-n", "8", "--recording", str(tmp_path / "of")]
    assert papers.run(papers.EAGLE2, "3", "demo", [], tmp_path, more) == 0
    assert "too few prompts" in capsys.readouterr().out
    assert json.loads((tmp_path / "eagle-2-3.json").read_text())["claims"][0]["paper"] == "EAGLE-2"


def test_counted_figures_of_several_drafters_share_a_target_curve() -> None:
    """In every table of the benchmark pages that shows them beside each other."""
    pages = tomllib.loads((ROOT / "benchmarks" / "pages.toml").read_text("utf-8"))["page"]
    shown = [t for page in pages for section in page["section"] for t in section["table"]]
    several = 0
    for table in shown:
        result = json.loads(
            (ROOT / "benchmarks" / "results" / f"{table['result']}.json").read_text()
        )
        costs = (result.get("provenance") or {}).get("costs") or {}
        if not any("counted" in column for column in table.get("columns", ())):
            continue
        curves = {json.dumps([e["target"] for e in c["entries"]]) for c in costs.values()}
        simulated = "machine" in table["columns"]
        assert len(curves) < 2 or simulated, f"{table['result']} has {len(curves)} target curves"
        several += len(costs) > 1
    assert several > 3


def test_claims_of_categories_are_judged_by_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: categories that differ, or not, in τ, and nodes that follow τ, or turn from it."""
    rng, of = np.random.default_rng(0), [name for name in "abcdefgh" for _ in range(10)]

    def row(drafter: str, spread: float, follows: int) -> dict[str, Any]:
        level = 1 + spread * np.repeat(np.arange(8), 10) / 8
        steps = np.full(80, 20)
        accepted = steps * level + rng.normal(0, 1, 80)
        each = {"steps": steps, "accepted": accepted, "nodes": steps * (10 + follows * level)}
        return {"drafter": drafter, "policy": "p", "per_prompt": each}

    for spread, follows, wanted in ((1.0, 1, ("fails", "holds")), (0.0, -1, ("ties", "fails"))):
        other = row("edd", 1.0, follows)
        saved = {"categories": of, "rows": [row("aded:datastore=x", spread, 1), other]}
        monkeypatch.setattr(papers, "read_result", lambda _, saved=saved: saved)
        assert tuple(r["verdict"] for r in papers.by_category()) == wanted
    monkeypatch.undo()
    taus, nodes = papers.per_category(
        {"per_prompt": {"steps": [2, 1, 1], "accepted": [4, 3, 0], "nodes": [8, 5, 4]}},
        np.array(["b", "a", "b"]),
    )
    assert taus.tolist() == [4.0, pytest.approx(7 / 3)]
    assert nodes.tolist() == [5.0, 4.0]


def test_every_doubtful_verdict_of_the_second_reading_is_in_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "papers.md").read_text("utf-8")
    table = page.partition("## Verdicts that have changed")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 29
    for claim, before, now, _ in rows:
        assert claim.strip(), rows
        assert before.strip(), claim
        assert now.strip(), claim
