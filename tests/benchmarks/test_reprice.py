"""Saved results priced again: the same figures by the same costs, others by name, and machines that are not here."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import machines
import tables
from common import reprice
from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.errors import UserError
from draftree.evaluation import result_rows, roofline, step_codec
from draftree.evaluation.roofline import Machine
from scripts import run_script

pytestmark = pytest.mark.usefixtures("quick")

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT.parent / "shared" / "reference" / "machines"
COSTS = CostTable(
    (
        Costs({1: 0.5, 4: 2.0}, {1: 4.0, 8: 11.0}, 0.5, 10),
        Costs({1: 0.7}, {1: 5.0, 8: 13.0}, 0.5, 200),
    )
)
OTHER = CostTable((Costs({1: 0.1}, {1: 4.0, 8: 4.5}),))


def status(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, args)))
    return int(ended.value.code or 0)


def recounted(*args: object) -> int:
    """Run `benchmarks/recount.py`, and return its exit status."""
    return run_script("recount", *args)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench of a network and a look-up, with a policy that reads costs among others."""
    folder = tmp_path_factory.mktemp("saved")
    COSTS.save(folder / "costs.json")
    OTHER.save(folder / "other.json")
    pairs = (
        "--pair",
        "edd chain:length=3",
        "--pair",
        "suffix vct:width=2,depth=3",
        "--pair",
        "edd pct",
    )
    asked = (
        "--limit",
        "3",
        "--max-new-tokens",
        "16",
        "--costs",
        folder / "costs.json",
        "--out",
        folder / "r.json",
    )
    assert status("bench", "--suite", "demo", *pairs, *asked) == 0
    return folder / "r.json"


def counted(result: dict[str, Any]) -> list[Any]:
    names = ("counted_seconds", "counted_speedup", "draft_share", "cost_ratio", "expected_speedup")
    of = lambda r: [
        r["intervals"].get("counted_speedup"),
        r["per_prompt"]["counted_seconds"],
        *(r[n] for n in names),
    ]
    return [of(r) for r in result["rows"]]


def test_the_same_costs_give_the_saved_figures(saved: Path) -> None:
    result = result_rows.read_result(saved)
    again = reprice.reprice_result(
        result, {d: CostTable.load(saved.parent / "costs.json") for d in reprice.drafters(result)}
    )
    for mine, before in zip(counted(again), counted(result), strict=True):
        for a, b in zip(mine, before, strict=True):
            assert a == b if a is None else a == pytest.approx(b, abs=1e-12, rel=1e-12)
    text = (
        json.dumps(again["rows"])
        .replace("counted_seconds", "")
        .replace("counted_speedup", "")
        .replace("expected_speedup", "")
    )
    assert not re.search(r"seconds|speedup", text), "nothing is clocked"
    assert [r["acceptance_length"] for r in again["rows"]] == [
        r["acceptance_length"] for r in result["rows"]
    ]


def test_other_costs_give_other_figures_and_refuse_what_reads_them(
    saved: Path, tmp_path: Path, capsys
) -> None:
    other = str(saved.parent / "other.json")
    assert recounted(str(saved), "--costs", other, "--out", tmp_path / "n.json") == 2
    assert "policy 'pct' reads costs" in capsys.readouterr().err
    assert not (tmp_path / "n.json").exists()
    assert (
        recounted(
            str(saved),
            "--costs",
            other,
            "--without",
            "pct",
            "--out",
            tmp_path / "n.json",
        )
        == 0
    )
    new = result_rows.read_result(tmp_path / "n.json")
    assert [r["policy"] for r in new["rows"]] == [None, "chain:length=3", "vct:width=2,depth=3"]
    row = new["rows"][1]
    works = [w for _, works in step_codec.decode_steps(row["work"], "row") for w in works]
    assert row["counted_seconds"] == pytest.approx(
        sum(OTHER.at(w.context, 1).step(w) for w in works)
    )
    assert (
        row["counted_speedup"] == pytest.approx(row["new_tokens"] - 3, rel=1)
        or row["counted_speedup"] > 1
    )
    assert recounted(str(saved), "--costs", other, "--without", "pst") == 2
    assert "did you mean 'pct'?" in capsys.readouterr().err


def test_results_that_cannot_be_repriced_are_refused(saved: Path, tmp_path: Path, capsys) -> None:
    result, out = result_rows.read_result(saved), tmp_path / "old.json"
    for change, told in (
        ({"format": 3}, "of format 3, allowed is 1 … 2"),
        (
            {"rows": [{k: v for k, v in r.items() if k != "work"} for r in result["rows"]]},
            "does not hold the work of its steps",
        ),
        (
            {"provenance": {k: v for k, v in result["provenance"].items() if k != "drafting"}},
            "what its drafters read",
        ),
    ):
        out.write_text(json.dumps(result | change))
        assert recounted(out, "--machine", "h100-8b", "--without", "pct") == 2
        assert told in capsys.readouterr().err
    assert recounted(saved) == recounted(saved, "--costs", saved, "--machine", "h100-8b") == 2
    assert recounted(saved, "--machine", "h100") == 2
    assert "did you mean 'h100-8b'" in capsys.readouterr().err


def test_results_stay_small(saved: Path) -> None:
    row = result_rows.read_result(saved)["rows"][1]
    assert len(json.dumps(row["work"])) < 20 * row["steps"], "columns are run-length coded"
    assert result_rows.read_result(saved)["rows"][0]["work"]["fed"] == [
        1,
        result_rows.read_result(saved)["rows"][0]["steps"],
    ]


@pytest.mark.parametrize("name", roofline.machine_names())
def test_a_derived_file_is_what_its_formula_gives(name: str) -> None:
    file, machine = (
        json.loads((roofline.MACHINES_FOLDER / f"{name}.json").read_text()),
        Machine.load(name),
    )
    assert {"kind", "device", "source", "formula", "assumptions"} == set(file["about"])
    assert file["about"]["kind"] in ("derived", "published", "measured")
    assert machine.table.is_simulated
    if file["about"]["kind"] == "derived":
        again = machines.recompute_machine(machine)
        assert again == file
        roof = machine.roofline
        assert roof is not None
        more = 2 * roof.parameters / roof.rate + 2 * roof.stash / roof.bandwidth
        assert roof.target(64, 0) - roof.target(1, 0) == pytest.approx(63 * more, rel=1e-9)
        stateless = replace(roof, state=0.0, stash=0.0)
        states = (3 * roof.state + 2 * roof.stash) / roof.bandwidth
        assert roof.target(1, 0) - stateless.target(1, 0) == pytest.approx(states, abs=1e-12)
        assert bool(roof.state) is ("hybrid" in name) is ("state" in file["about"]["formula"])


def test_one_run_is_priced_on_several_machines(saved: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "simulated.json"
    asked = ("--machine", "h100-8b", "--machine", "rtx4090-8b-int4", "--without", "pct")
    assert recounted(saved, *asked, "--out", out) == 0
    assert "Simulated: " in capsys.readouterr().out
    result = result_rows.read_result(out)
    assert result["simulated"]
    rows = {(r["machine"], r["drafter"]): r for r in result["rows"] if r["policy"]}
    wide, narrow = rows["h100-8b", "edd"], rows["rtx4090-8b-int4", "edd"]
    assert wide["counted_speedup"] > narrow["counted_speedup"], (
        "further tokens cost more where weights are small"
    )
    same = next(v for v in wide["varied"] if (v["slope"], v["overhead"]) == (1.0, 0.0))
    assert same["counted_speedup"] == pytest.approx(wide["counted_speedup"])
    by_slope = [v["counted_speedup"] for v in narrow["varied"] if v["overhead"] == 0]
    assert by_slope == sorted(by_slope, reverse=True)
    assert "speedup" not in wide
    assert "tokens_per_second" not in wide


def test_a_policy_that_read_a_machine_s_costs_is_priced_on_that_machine_alone(
    tmp_path: Path,
) -> None:
    out = tmp_path / "r.json"
    asked = (
        "bench",
        "--suite",
        "demo",
        "--pair",
        "vdm pct",
        "--limit",
        "1",
        "--max-new-tokens",
        "8",
    )
    assert status(*asked, "--machine", "h100-8b", "--out", out) == 0
    assert recounted(out, "--machine", "h100-8b") == 0
    assert recounted(out, "--machine", "h200-8b") == 2


def test_a_result_of_several_machines_is_refused(saved: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "simulated.json"
    asked = ("--machine", "h100-8b", "--machine", "h200-8b", "--without", "pct")
    assert recounted(saved, *asked, "--out", out) == 0
    assert recounted(out, "--machine", "h100-8b") == 2
    assert "of several machines already" in capsys.readouterr().err


def test_a_simulated_figure_says_so_wherever_it_stands(tmp_path: Path) -> None:
    row = {"drafter": "plain", "policy": None, "x": 2.0}
    about = {"costs": {}, "machines": {"h100-8b": {"device": "H100"}}}
    (tmp_path / "sim.json").write_text(
        json.dumps({"simulated": True, "provenance": about, "rows": [row]})
    )
    block = "## Costs\n\n{}\n\n2.00\n\n*Saved as `benchmarks/results/sim.json`.*\n"
    assert tables.unlabelled(block.format("Words."), tmp_path) == ["sim"]
    assert tables.unlabelled(block.format("Simulated."), tmp_path) == []
    assert tables.unlabelled("On an H100 it is 2.1 × as fast.", tmp_path) == ["h100"]
    assert tables.unlabelled("Simulated on an H100 it is 2.1 × as fast.", tmp_path) == []


def test_no_document_shows_a_simulated_figure_without_the_word() -> None:
    root = Path(__file__).parents[2]
    for path in (root / "README.md", *(root / "docs").rglob("*.md")):
        assert tables.unlabelled(path.read_text("utf-8"), root / "benchmarks" / "results") == [], (
            path
        )


def test_one_curve_prices_the_target_alike_for_all_drafters(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine was twice as slow while one drafter was priced: its speed-ups stay, its seconds do not."""
    result = result_rows.read_result(saved)
    doubled = json.loads(json.dumps(result["provenance"]["costs"]["edd"]))
    for entry in doubled["entries"]:
        for name in ("draft", "target"):
            entry[name] = {width: 2 * s for width, s in entry[name].items()}
        entry["commit"] *= 2
    result["provenance"]["costs"]["suffix"] = doubled
    (tmp_path / "r.json").write_text(json.dumps(result))
    assert recounted(tmp_path / "r.json", "--one-curve", "--out", tmp_path / "o.json") == 0
    capsys.readouterr()
    new = result_rows.read_result(tmp_path / "o.json")
    costs = new["provenance"]["costs"]
    for old, edd, suffix in zip(
        result["provenance"]["costs"]["edd"]["entries"],
        *(costs[d]["entries"] for d in ("edd", "suffix")),
        strict=True,
    ):
        assert edd["target"] == suffix["target"]
        assert edd["target"] == {w: pytest.approx(1.5 * s) for w, s in old["target"].items()}
        assert edd["draft"] == {w: pytest.approx(1.5 * s) for w, s in old["draft"].items()}
        assert edd["draft"] == {w: pytest.approx(s) for w, s in suffix["draft"].items()}
    rows = [
        (was, now) for was, now in zip(result["rows"], new["rows"], strict=True) if was["policy"]
    ]
    for was, now in rows:
        assert now["counted_speedup"] == pytest.approx(was["counted_speedup"])
        assert now.get("own_costs", False) == (was["policy"] == "pct")
        assert now["steps"] == was["steps"]
    plain = {tuple(now["per_prompt"]["counted_plain"]) for _, now in rows}
    assert len(plain) == 1, "plain decoding takes the same seconds beside each drafter"
    assert new["provenance"]["measured_costs"] == result["provenance"]["costs"]


def test_one_curve_is_refused_where_costs_do_not_fit_together(saved: Path) -> None:
    result = result_rows.read_result(saved)
    with pytest.raises(UserError, match=r"different contexts or numbers of sequences: a: .*; b: "):
        reprice.one_curve({"a": COSTS, "b": OTHER})
    assert reprice.one_curve({"a": COSTS, "b": COSTS})["b"].entries == COSTS.entries
    del result["provenance"]["costs"]["suffix"]
    with pytest.raises(UserError, match="does not hold the costs"):
        reprice.on_one_curve(result)
