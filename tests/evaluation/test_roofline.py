"""Costs of machines that are not at hand, and what a drafter reads of the target's size."""

import json
from pathlib import Path

import pytest

from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.errors import UserError
from draftree.evaluation import result_rows, roofline
from draftree.evaluation.roofline import Drafting, Machine, Roofline
from draftree.registry import build
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target

pytestmark = pytest.mark.usefixtures("quick")

SAMPLES = Path(__file__).parents[3] / "shared" / "reference" / "machines"


def status(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, args)))
    return int(ended.value.code or 0)


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
def test_bytes_that_a_drafter_reads_are_counted(kernels: str) -> None:
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


def test_a_fake_target_has_its_own_share() -> None:
    target = tiny_target()
    assert roofline.count_draft_reads(target, build("drafter", "pld").open(target)).layers == 0
