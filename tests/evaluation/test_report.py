"""The page of a saved result."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.evaluation import report_text, result_rows
from draftree.target.target_names import shipped_folder

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


def test_frontiers_and_categories() -> None:
    row = {"drafter": "d", "nodes_per_step": 9.0, "acceptance_length": 2.0}
    rows = [
        row | {"policy": None},
        row | {"policy": "p:n=9"},
        row | {"policy": "p:n=2", "nodes_per_step": 2.0},
        row | {"policy": "q"},
    ]
    assert report_text.frontiers(rows) == {
        "d p": [(2.0, 2.0, "p:n=2"), (9.0, 2.0, "p:n=9")],
        "d q": [(9.0, 2.0, "q")],
    }
    assert report_text.by_category(
        {"per_prompt": {"nodes": [4, 9, 8], "steps": [2, 3, 4]}}, ["a", "b", "a"]
    ) == {
        "a": [2.0, 2.0],
        "b": [3.0],
    }


def test_another_version_is_one_line_and_status_2(folder: Path, tmp_path: Path, capsys) -> None:
    later = json.loads((folder / "r.json").read_text()) | {"format": result_rows.FORMAT + 1}
    (tmp_path / "later.json").write_text(json.dumps(later))
    drafter = shutil.copytree(str(shipped_folder("demo", "edd")), tmp_path / "edd")
    before = sorted(tmp_path.rglob("*"))
    for words in (
        ("report", tmp_path / "later.json", "--out", tmp_path / "out.html"),
        ("push", drafter, "owner/name", "--dry-run", "--result", tmp_path / "later.json"),
    ):
        assert run(*words) == 2
        said = capsys.readouterr().err
        assert f"of format {result_rows.FORMAT + 1}, allowed is 1 … {result_rows.FORMAT}" in said
        assert said.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
