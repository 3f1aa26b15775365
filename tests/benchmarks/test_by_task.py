"""The table of speed-ups by task: ratios of seconds within each task, and their mean."""

import json
from pathlib import Path
from typing import Any

import pytest

import by_task


def make_row(drafter: str, policy: str, seconds: list[float]) -> dict[str, Any]:
    """A result's row with the seconds of each prompt."""
    figures = {"prompts": 3, "tokens_per_second": 10.0, "acceptance_length": 2.0}
    each = {"per_prompt": {"seconds": seconds}, "counted_speedup": 1.5}
    return {"drafter": drafter, "policy": policy} | figures | each


PLAIN, DRAFTED = (
    make_row("plain", "", [2.0, 4.0, 9.0]),
    make_row("suffix", "yield", [1.0, 1.0, 10.0]),
)
CATEGORIES = ["math_reasoning", "math_reasoning", "qa"]


def test_speed_ups_are_ratios_of_the_seconds_of_each_task() -> None:
    assert by_task.speedups(DRAFTED, PLAIN, CATEGORIES) == {"math_reasoning": 3.0, "qa": 0.9}


def test_the_rows_of_several_results_stand_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for kernels in ("avx512_bf16", "avx2"):
        about: dict[str, Any] = {"target": {"dtype": "bfloat16"}, "hardware": {"kernels": kernels}}
        about |= {"max_new_tokens": 8, "command": f"bench {kernels}"}
        result = {"provenance": about, "rows": [PLAIN, DRAFTED], "categories": CATEGORIES}
        files.append(tmp_path / f"{kernels}.json")
        files[-1].write_text(json.dumps(result))
    options = ["--out", str(tmp_path / "table.json")]
    monkeypatch.setattr("sys.argv", ["by_task.py", *map(str, files), *options])
    by_task.main()
    table = json.loads((tmp_path / "table.json").read_text())
    ways = [(row["way"], row["kernels"], row["mean of six tasks"]) for row in table["rows"]]
    assert ways == [
        ("plain decoding", "avx512_bf16", 1.0),
        ("suffix yield", "avx512_bf16", 1.95),
        ("plain decoding", "avx2", 1.0),
        ("suffix yield", "avx2", 1.95),
    ]
    assert table["rows"][1]["lowest task"] == 0.9
    assert table["provenance"]["commands"] == ["bench avx512_bf16", "bench avx2"]
