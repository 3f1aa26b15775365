"""`make gpu` in tiny sizes on a CPU: it goes on where it was stopped, and writes a machine file that is read again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftree.costs.curves import CostTable

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


@pytest.mark.long
def test_it_goes_on_and_writes_a_machine_file(tmp_path: Path) -> None:
    run = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--device", "cpu", "--small"]
    first = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "this is no GPU" in first.stdout
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert [json.loads(line)["part"] for line in lines] == ["ceilings", "demo", "tiny 16", "tiny 32"]
    journal.write_text("".join(lines[:-1]))  # as if it had been stopped
    again = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "4 of 4: tiny 32" in again.stdout
    assert "ceilings" not in again.stdout
    table = CostTable.load(tmp_path / "measured-tiny.json")
    assert [entry.context for entry in table.entries] == [16, 32]
    assert table.about["kind"] == "measured"
    assert json.loads((tmp_path / "report.json").read_text())["parts"]["demo"]["same_text"]
