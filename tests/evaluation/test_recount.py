"""Saved results priced again: the same figures by the same costs, others by name, and machines that are not here."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.cli.app import main
from draftree.costs.curves import Costs, CostTable
from draftree.errors import UserError
from draftree.evaluation import reprice, result_rows, roofline, step_codec
from draftree.evaluation.roofline import Drafting, Machine, Roofline
from draftree.metrics import Stats, Step, Work
from draftree.registry import build
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target

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
    assert status("recount", str(saved), "--costs", other, "--out", tmp_path / "n.json") == 2
    assert "policy 'pct' reads costs" in capsys.readouterr().err
    assert not (tmp_path / "n.json").exists()
    assert (
        status(
            "recount",
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
    assert status("recount", str(saved), "--costs", other, "--without", "pst") == 2
    assert "did you mean 'pct'?" in capsys.readouterr().err


def test_what_cannot_be_recounted_is_told(saved: Path, tmp_path: Path, capsys) -> None:
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
        assert status("recount", out, "--machine", "h100-8b", "--without", "pct") == 2
        assert told in capsys.readouterr().err
    assert (
        status("recount", saved)
        == status("recount", saved, "--costs", saved, "--machine", "h100-8b")
        == 2
    )
    assert status("recount", saved, "--machine", "h100") == 2
    assert "did you mean 'h100-8b'" in capsys.readouterr().err


def test_a_result_of_format_1_is_read(tmp_path: Path) -> None:
    old = ROOT / "benchmarks" / "results" / "policies_edd.json"
    assert "format" not in json.loads(old.read_text())
    assert result_rows.read_result(old)["rows"]


Columns = st.lists(
    st.tuples(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 4), st.integers(0, 3)),
    max_size=12,
)


@given(prompts=st.lists(Columns, max_size=3), start=st.integers(1, 99))
def test_coded_work_is_the_work(prompts: list[Any], start: int) -> None:
    stats = []
    for prompt in prompts:
        context = start
        steps = []
        work = []
        for widths, nodes, accepted in prompt:
            steps.append(Step(min(accepted, nodes), nodes, nodes))
            work.append(Work(tuple(widths), 1 + nodes, 1, context, finds=len(widths) * accepted))
            context += steps[-1].accepted + 1
        stats.append(Stats(steps=steps, work=work))
    coded = json.loads(json.dumps(step_codec.encode(stats)))
    assert step_codec.decode_steps(coded, "a row") == [(s.steps, s.work) for s in stats]
    del coded["finds"]  # as before they were counted
    assert step_codec.decode_steps(coded, "a row") == [
        (s.steps, [replace(w, finds=0) for w in s.work]) for s in stats
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"fed": [3, 1]},
        {"shape": [0, 1, 2]},
        {"shape": [7, 2]},
        {"depth": [1, -2]},
        {"steps": [1]},
        {"finds": [2, 1]},
    ],
)
def test_a_broken_log_is_told(change: dict[str, list[int]]) -> None:
    log = step_codec.encode(
        [Stats(steps=[Step(1, 2, 2)] * 2, work=[Work((1,), 3, 1, 5), Work((1,), 3, 1, 7)])]
    )
    log |= change  # of two steps
    with pytest.raises(UserError):
        step_codec.decode_steps(log, "a row")


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
    assert machine.table.simulated
    if file["about"]["kind"] == "derived":
        again = roofline.recompute_machine(name)
        assert again == file
        roof = machine.roofline
        assert roof is not None
        more = 2 * roof.parameters / roof.rate + 2 * roof.stash / roof.bandwidth
        assert roof.target(64, 0) - roof.target(1, 0) == pytest.approx(63 * more, rel=1e-9)
        stateless = replace(roof, state=0.0, stash=0.0)
        states = (3 * roof.state + 2 * roof.stash) / roof.bandwidth
        assert roof.target(1, 0) - stateless.target(1, 0) == pytest.approx(states, abs=1e-12)
        assert bool(roof.state) is ("hybrid" in name) is ("state" in file["about"]["formula"])


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the published fits are not here")
@pytest.mark.parametrize(
    ("name", "sample", "context"),
    [("h100-8b", "h100_8b", 500), ("h200-8b", "h200_8b", 0), ("rtx4090-8b-int4", "rtx4090_8b_int4", 0),
     ("4b300-dsv4flash", "b300_dsv4flash", 0)],
)  # fmt: skip
def test_targets_are_those_of_the_published_fits(name: str, sample: str, context: int) -> None:
    known = CostTable.load(SAMPLES / f"costs_{sample}.json").entries[0]
    mine = Machine.load(name).table.at(context, 1)
    for n in (1, 8, 64, 256):
        assert mine.target_seconds(n) == pytest.approx(known.target_seconds(n), rel=1e-3)


@pytest.mark.parametrize("kernels", ["stock", "packed"])
def test_what_a_drafter_reads_is_counted(kernels: str) -> None:
    target = Target.load("demo", kernels=kernels)
    work = {
        d: roofline.count_draft_reads(target, build("drafter", d).open(target))
        for d in ("vdm", "medusa", "suffix", "edd+suffix")
    }
    assert work["vdm"].layers == pytest.approx(1, abs=0.01), (
        "one of the target's layers, without its norms"
    )
    assert work["vdm"].heads == work["medusa"].heads == 1
    assert work["medusa"].layers < 0.2
    assert (work["suffix"].layers, work["suffix"].heads) == (0, 0)
    assert work["suffix"].processor == work["edd+suffix"].processor != {}
    assert work["edd+suffix"].layers > 0
    assert (
        Drafting.read(json.loads(json.dumps({"layers": 1.0, "processor": {"1": 0.5}}))).seconds(1)
        == 0.5
    )
    curves = {name: Machine.load("h100-8b").costs(w).at(0, 1) for name, w in work.items()}
    assert curves["suffix"].draft_seconds(1) == pytest.approx(work["suffix"].seconds(1)), (
        "look-ups take what they take here"
    )
    assert 0.03 < curves["vdm"].ratio < 0.12, "GLIDE and EAGLE say 0.05 to 0.1 of a 7B"


def test_one_run_is_priced_on_several_machines(saved: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "simulated.json"
    asked = ("--machine", "h100-8b", "--machine", "rtx4090-8b-int4", "--without", "pct")
    assert status("recount", saved, *asked, "--out", out) == 0
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


def test_a_bench_on_a_machine_is_simulated_and_grows_its_trees_by_it(
    tmp_path: Path, capsys
) -> None:
    out, asked = (
        tmp_path / "r.json",
        ("bench", "--suite", "demo", "--pair", "vdm pct", "--limit", "1", "--max-new-tokens", "8"),
    )
    assert status(*asked, "--machine", "h100-8b", "--out", out) == 0
    assert "simulated, on h100-8b" in capsys.readouterr().out
    result = result_rows.read_result(out)
    assert result["simulated"]
    assert result["rows"][1]["counted_speedup"] is not None
    assert "speedup" not in result["rows"][1], "nothing clocked stands beside what is simulated"
    assert result["provenance"]["costs"]["vdm"]["about"]["kind"] == "published"
    assert status("recount", out, "--machine", "h100-8b") == 0, (
        "read by its policy were these very costs"
    )
    assert status("recount", out, "--machine", "h200-8b") == 2
    assert status(*asked, "--machine", "h100-8b", "--costs", out, "--out", tmp_path / "no") == 2
    assert status(*asked, "--machine", "h10", "--out", tmp_path / "no") == 2
    assert not (tmp_path / "no").exists()


def test_a_machine_without_a_roofline_has_one_draft_step_for_all_networks() -> None:
    machine = Machine.load("4b300-dsv4flash")
    assert machine.roofline is None
    steps = [machine.costs(Drafting(layers=n)).at(0, 1).draft_seconds(1) for n in (1, 2)]
    assert steps[0] == steps[1] == 0.0009
    assert machine.costs(Drafting(processor={1: 1e-4})).at(0, 1).draft_seconds(1) == pytest.approx(
        1e-4
    )


def test_a_roofline_has_numbers_above_0() -> None:
    with pytest.raises(UserError, match="bandwidth"):
        Roofline(1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1, 1.0, 1.0)


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))  # scripts import each other
        spec.loader.exec_module(module)
    return module


def test_a_simulated_figure_says_so_wherever_it_stands(tables: ModuleType, tmp_path: Path) -> None:
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


def test_no_document_shows_a_simulated_figure_without_the_word(tables: ModuleType) -> None:
    root = Path(__file__).parents[2]
    for path in (root / "README.md", *(root / "docs").rglob("*.md")):
        assert tables.unlabelled(path.read_text("utf-8"), root / "benchmarks" / "results") == [], (
            path
        )


def test_a_fake_target_has_its_own_share() -> None:
    target = tiny_target()
    assert roofline.count_draft_reads(target, build("drafter", "pld").open(target)).layers == 0


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
    assert status("recount", tmp_path / "r.json", "--one-curve", "--out", tmp_path / "o.json") == 0
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
