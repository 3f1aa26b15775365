"""A drafter's calibration by `benchmarks/analyse.py`, with its pictures."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.drafter_calibration import (
    BINS,
    CANDIDATES,
    MAX_DEPTHS,
    RANKS,
    CandidateTrace,
    share_by_depth,
)
from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.engine import generate_plain
from draftree.evaluation.target_trace import TokenText
from draftree.metrics import Step
from draftree.request import Request
from draftree.testing.fakes import Always, tiny_target
from scripts import run_script


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench of one prompt of each of two categories."""
    home = tmp_path_factory.mktemp("bench")
    CostTable((Costs({1: 0.1}, {1: 1.0, 8: 1.2}),)).save(home / "costs.json")
    rows = [{"category": name, "question": "How many apples?"} for name in "ab"]
    (home / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["bench", "--suite", "p.jsonl", "--pair", "vdm chain:length=2", "--pair", "pld chain"]
    words += ["--max-new-tokens", "10", "--costs", "costs.json", "--out", "r.json"]
    words = [str(home / word) if "." in word else word for word in words]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    return home / "r.json"


def looked(
    rank: list[int],
    sure: list[float],
    reached: list[bool] | None = None,
    entropy: list[float] | None = None,
) -> CandidateTrace:
    count = len(rank)
    return CandidateTrace(np.ones(count, np.int64), np.array(rank), np.array(sure), np.array(entropy or [0.5] * count),
                  np.array(reached or [True] * count), np.array(sure)[:, None] * 0.5 ** np.arange(CANDIDATES))  # fmt: skip


def test_calibration_by_hand() -> None:
    """Three at .9 of which two are right, one at .1 that is wrong; what no chain comes to does not count."""
    found = looked([0, 0, 1, 8, 0], [0.9, 0.9, 0.9, 0.1, 0.1], [True, True, True, True, False])
    assert found.reliability() == [
        {"confidence": pytest.approx(0.1), "accepted": 0.0, "count": 1},
        {"confidence": pytest.approx(0.9), "accepted": pytest.approx(2 / 3), "count": 3},
    ]
    assert found.calibration_error == pytest.approx((0.1 + 3 * (0.9 - 2 / 3)) / 4)
    assert found.by_depth()[0][:2] == [0.6, 0.2]
    assert sum(found.by_depth()[0]) == pytest.approx(0.8), "one was not among the candidates"
    ends, shares = looked([0, 1, 2], [1.0] * 3, None, [0.0, 1.0, 2.0]).by_entropy()
    assert (len(shares), ends[0], ends[-1]) == (len(ends) - 1, 0.0, 2.0)
    assert np.array(shares).sum() == pytest.approx(3)
    assert len(shares) <= BINS


def test_heat_maps_by_hand() -> None:
    """C2T, Figure 2: intervals of a nat, the last one open, and only what one draft pass gives."""
    found = looked([0, 1, 20, 0, 7], [0.8, 0.4, 0.2, 0.1, 0.6], None, [0.2, 0.9, 1.0, 7.5, 0.3])
    found = replace(found, depth=np.array([1, 1, 1, 1, 2]))
    mean_q, accepted, places = found.by_entropy_interval()
    assert places.tolist() == [2, 1, 0, 0, 0, 0, 1], "the fifth is of depth 2"
    assert mean_q[0, :2] == pytest.approx([0.6, 0.3])
    assert accepted[0, :3].tolist() == [0.5, 0.5, 0.0]
    assert accepted[1].sum() == 0, "its token is none of the candidates"
    assert (mean_q[6, 0], accepted[6, 0]) == (pytest.approx(0.1), 1.0)
    assert not mean_q[2:6].any()


def test_a_drafter_that_is_always_right_has_rank_1_at_every_depth() -> None:
    target = tiny_target()
    requests = [Request([3, 1, n], 14, number=n) for n in range(1, 4)]
    written = generate_plain(target, requests).tokens
    plans = [[*r.prompt, *w] for r, w in zip(requests, written, strict=True)]
    found = CandidateTrace.along(
        target, Always(plans, 61), [TokenText(np.array(p), 3) for p in plans]
    )
    assert set(found.rank.tolist()) == {0}
    assert found.reached.all()
    assert max(found.depth) == MAX_DEPTHS
    assert [row[0] for row in found.by_depth()] == [1.0] * MAX_DEPTHS
    assert len(found.by_depth()[0]) == RANKS


def test_steps_are_shared_out_by_the_depth_that_they_accept() -> None:
    steps = [Step(accepted, 3, 3) for accepted in (0, 1, 1, 3)]
    assert share_by_depth(steps) == [0.75, 0.25, 0.25]
    assert share_by_depth([]) == []


def test_pictures_are_drawn_as_png_and_svg(bench: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = (
        "--drafter",
        "vdm",
        "--limit",
        2,
        "--max-new-tokens",
        8,
        "--result",
        bench,
        "--pictures",
        tmp_path / "pictures",
    )
    assert run_script("analyse", *words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["places"] > 0
    assert len(said["rank_by_depth"]) == MAX_DEPTHS
    assert [r["drafter"] for r in said["result"]] == ["vdm", "pld"]
    interval = said["rank_by_interval"]
    assert sum(interval["places"]) > 0
    assert np.shape(interval["q"]) == np.shape(interval["accepted"]) == (7, CANDIDATES)
    names = {"reliability", "rank_by_depth", "rank_by_entropy", "frontier"}
    names |= {f"interval_{of}" for of in ("q", "accepted", "bias")}
    names |= {"nodes_by_category", "accepted_by_category"}
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {
        f"{n}.{e}" for n in names for e in ("png", "svg")
    }
    assert (tmp_path / "pictures" / "frontier.svg").read_text().count("<path") > 5
