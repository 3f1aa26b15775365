"""`make gpu` in tiny sizes on a CPU: it goes on where it was stopped, and writes a machine file that is read again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftree.costs.cost_table import CostTable

MODES = ("plain", "plain graphs", "assisted", "eager", "graphs", "tree eager", "tree graphs")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.long
def test_benchmark_resumes_and_writes_a_machine_file(tmp_path: Path) -> None:
    run = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--device", "cpu", "--small"]
    first = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "this is no GPU" in first.stdout
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    cells = [
        f"texts tiny × {b}, temperature {t}, {mode}"
        for b in (1, 8)
        for t in (0, 1)
        for mode in MODES
    ]
    parts = ["ceilings", "demo", *cells, "tiny 16", "attention 64", "tiny 64"]
    assert [json.loads(line)["part"] for line in lines] == parts
    journal.write_text("".join(lines[:-1]))  # as if it had been stopped
    again = subprocess.run(run, capture_output=True, text=True, check=True)
    assert f"{len(parts)} of {len(parts)}: tiny 64" in again.stdout
    assert "ceilings" not in again.stdout
    table = CostTable.load(tmp_path / "measured-tiny.json")
    assert [entry.context for entry in table.entries] == [16, 64]
    assert table.about["kind"] == "measured"
    found = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert found["demo"]["same_text"]
    check_cells(found)
    check_table((tmp_path / "table.md").read_text(), found)


def check_cells(found: dict[str, Any]) -> None:
    """Every mode at every temperature and batch, with what is accepted as the weights script it."""
    cells = [cell for name, cell in found.items() if name.startswith("texts tiny")]
    assert [(c["batch"], c["temperature"], c["mode"]) for c in cells] == [
        (batch, temperature, mode)
        for batch in (1, 8)
        for temperature in (0.0, 1.0)
        for mode in MODES
    ]
    for cell in cells:
        if cell["mode"] == "assisted" and cell["batch"] > 1:
            assert "per_second" not in cell
            continue
        assert cell["per_second"] > 0
        least, most = (1, 1) if "plain" in cell["mode"] else (2, 5)
        assert least <= cell["per_pass"] <= most, cell
    for kind in ("", "tree "):
        same = [
            [c["per_pass"] for c in cells if c["mode"] == kind + mode]
            for mode in ("eager", "graphs")
        ]
        assert same[0] == same[1]


def check_table(text: str, found: dict[str, Any]) -> None:
    """A row for each batch and temperature, whose ratios are those of the cells."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| tiny")
    ]
    assert [(row[1], row[2]) for row in rows] == [("1", "0"), ("1", "1"), ("8", "0"), ("8", "1")]
    cells = [
        cell for name, cell in found.items() if name.startswith("texts tiny × 1, temperature 0")
    ]
    speed = {cell["mode"]: cell["per_second"] for cell in cells}
    assert float(rows[0][7]) == pytest.approx(speed["graphs"] / speed["plain"], abs=0.006)
    assert float(rows[0][10]) == pytest.approx(speed["graphs"] / speed["assisted"], abs=0.006)
    assert rows[2][5] == rows[2][10] == "–"
