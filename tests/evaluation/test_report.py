"""The page of a saved result, and the analyses of a drafter with their pictures."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree.cli.app import main
from draftree.costs.curves import Costs, CostTable
from draftree.engine import generate_plain
from draftree.evaluation import report_text, result_rows
from draftree.evaluation.drafter_calibration import (
    BINS,
    CANDIDATES,
    MAX_DEPTHS,
    RANKS,
    CandidateTrace,
    by_category,
    frontiers,
)
from draftree.evaluation.target_trace import TokenText
from draftree.request import Request
from draftree.target.target_names import shipped_folder
from draftree.testing.fakes import Always, tiny_target

pytest.importorskip("jinja2")


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in args])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench of one prompt of each of two categories, one of which would break a page that does not escape."""
    home = tmp_path_factory.mktemp("report")
    CostTable((Costs({1: 0.1}, {1: 1.0, 8: 1.2}),)).save(home / "costs.json")
    rows = [
        {"category": "a", "prompt": "<script>alert(1)</script> one two"},
        {"category": "b", "question": "How many apples?"},
    ]
    (home / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (
        "--pair",
        "vdm chain:length=2",
        "--pair",
        "pld chain",
        "--max-new-tokens",
        10,
        "--costs",
        home / "costs.json",
    )
    assert run("bench", "--suite", home / "p.jsonl", *words, "--out", home / "r.json") == 0
    return home


def test_a_page_stands_by_itself_and_answers(folder: Path, capsys) -> None:
    assert run("report", folder / "r.json", "--out", folder / "r.html") == 0
    said, text = capsys.readouterr().out, (folder / "r.html").read_text()
    result = result_rows.read_result(folder / "r.json")
    assert report_text.advice_text(result) in said
    assert "vdm" in text
    assert "pld" in text
    assert not re.search(r"""(?:src|href)=["'](?!#)|@import|url\((?!#)""", text), (
        "nothing is loaded from anywhere"
    )
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    pieces = re.findall(r'<span class="(drafted|bonus|prefill)">(?!drafted|chosen|read)', text)
    best = report_text.rank_rows(result)[0]
    assert pieces.count("prefill") == 2
    assert len(pieces) == sum(best["per_prompt"]["tokens"])
    assert pieces.count("bonus") <= best["steps"]
    assert run("report", folder / "p.jsonl", "--out", folder / "no.html") == 2
    assert not (folder / "no.html").exists()
    assert run("report", folder / "r.json", "--out", folder / "r.json") == 2


def fake(speedups: dict[str, float], noise: float = 0.02, prompts: int = 20) -> dict[str, Any]:
    """A counted result of some prompts with planted speed-ups."""
    rng, base = np.random.default_rng(0), np.linspace(1, 3, prompts)
    each = {"tokens": [30] * prompts, "counted_plain": base.tolist(), "steps": [9] * prompts}
    row = {
        "temperature": 0.0,
        "nodes_per_step": 4.0,
        "acceptance_length": 2.0,
        "prompts": prompts,
        "drafter": "d",
    }
    rows = [row | {"drafter": "plain", "policy": None, "per_prompt": each}]
    for name, gain in speedups.items():
        spent = base / gain * rng.normal(1, noise, prompts)
        ends = [gain * 0.97, gain * 1.03]
        rows.append(row | {"policy": name, "counted_speedup": gain, "intervals": {"counted_speedup": ends},
                           "per_prompt": each | {"counted_seconds": spent.tolist()}})  # fmt: skip
    about = {"seed": 0, "target": {"name": "t"}, "hardware": {"device": "here"}}
    return {"rows": rows, "provenance": about, "simulated": False, "oracle": [
        {"drafter": "d", "temperature": 0.0, "counted_speedup": 2.0}]}  # fmt: skip


def test_the_last_paragraph_says_what_the_figures_say() -> None:
    assert "speculate with d fast: 1.50 ×" in report_text.advice_text(
        fake({"slow": 1.2, "fast": 1.5})
    )
    assert "No other pairing" in report_text.advice_text(fake({"slow": 1.2, "fast": 1.5}))
    assert "Possibly as good: d near." in report_text.advice_text(fake({"near": 1.49, "fast": 1.5}))
    assert "do not speculate" in report_text.advice_text(fake({"slow": 0.8}))
    assert (
        "too few prompts to say whether to speculate: d some has 1.50 ×"
        in report_text.advice_text(fake({"some": 1.5}, prompts=7))
    )
    assert "nothing was told apart" in report_text.advice_text(fake({"same": 1.001}, 0.2))
    assert "speculate with d sure" in report_text.advice_text(fake({"sure": 1.3}) | {})
    assert "75%" in report_text.gap_sentences(fake({"slow": 1.2, "fast": 1.5}))[0]


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


def test_frontiers_and_categories() -> None:
    row = {"drafter": "d", "nodes_per_step": 9.0, "acceptance_length": 2.0}
    rows = [
        row | {"policy": None},
        row | {"policy": "p:n=9"},
        row | {"policy": "p:n=2", "nodes_per_step": 2.0},
        row | {"policy": "q"},
    ]
    assert frontiers(rows) == {
        "d p": [(2.0, 2.0, "p:n=2"), (9.0, 2.0, "p:n=9")],
        "d q": [(9.0, 2.0, "q")],
    }
    assert by_category(
        {"per_prompt": {"nodes": [4, 9, 8], "steps": [2, 3, 4]}}, ["a", "b", "a"]
    ) == {
        "a": [2.0, 2.0],
        "b": [3.0],
    }


def test_pictures_are_drawn_as_png_and_svg(folder: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = (
        "--drafter",
        "vdm",
        "--limit",
        2,
        "--max-new-tokens",
        8,
        "--result",
        folder / "r.json",
        "--pictures",
        folder / "pictures",
    )
    assert run("analyse", *words, "--json") == 0
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
    assert {p.name for p in (folder / "pictures").iterdir()} == {
        f"{n}.{e}" for n in names for e in ("png", "svg")
    }
    assert (folder / "pictures" / "frontier.svg").read_text().count("<path") > 5


@pytest.mark.parametrize("command", ["report", "recount", "tables", "analyse", "card"])
def test_another_version_is_one_line_and_status_2(
    command: str, folder: Path, tmp_path: Path, capsys
) -> None:
    later = json.loads((folder / "r.json").read_text()) | {"format": result_rows.FORMAT + 1}
    (tmp_path / "later.json").write_text(json.dumps(later))
    words = {
        "report": (tmp_path / "later.json", "--out", tmp_path / "out.html"),
        "recount": (
            tmp_path / "later.json",
            "--machine",
            "h100-8b",
            "--out",
            tmp_path / "out.json",
        ),
        "tables": ("--result", tmp_path / "later.json", "--out", tmp_path / "out.json"),
        "analyse": ("--result", tmp_path / "later.json"),
        "card": (
            shipped_folder("demo", "edd"),
            "--result",
            tmp_path / "later.json",
            "--out",
            tmp_path / "out.md",
        ),
    }[command]
    assert run(command, *words) == 2
    said = capsys.readouterr().err
    assert (
        f"is a result of format {result_rows.FORMAT + 1}, allowed is 1 … {result_rows.FORMAT}"
        in said
    )
    assert said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["later.json"]
