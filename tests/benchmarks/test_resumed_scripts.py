"""Scripts that go on where they were stopped: only with the same settings; and what their suites leave out."""

import gzip
import json
import sys
from pathlib import Path

import pytest

import bits
import gpu
import vllm_proposer
from code_suite import drawn_heads
from vllm_suites import answered_prompts


def test_bits_of_other_settings_are_not_kept(tmp_path: Path) -> None:
    kept, about = tmp_path / "bits.json.partial", {"temperature": "0.0"}
    assert bits.finished_lines(kept, about) == []
    kept.write_text("".join(json.dumps(line) + "\n" for line in (about, [0, "pld chain", None])))
    assert bits.finished_lines(kept, about) == [[0, "pld chain", None]]
    assert bits.finished_lines(kept, {"temperature": "1.0"}) == []
    kept.write_text(json.dumps([0, "pld chain", None]) + "\n")  # as earlier versions wrote it
    assert bits.finished_lines(kept, about) == []


def test_rounds_of_other_settings_are_not_kept(tmp_path: Path) -> None:
    out, about = tmp_path / "result.json", {"tokens": 64, "ways": None}
    assert vllm_proposer.finished_rounds(out, about) == []
    out.write_text(json.dumps({"about": about, "rounds": [{"speeds": {}}]}))
    assert vllm_proposer.finished_rounds(out, about) == [{"speeds": {}}]
    assert vllm_proposer.finished_rounds(out, about | {"tokens": 32}) == []


def test_parts_of_another_commit_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[str]()
    words = ("--out", str(tmp_path), "--device", "cpu", "--small", "--only", "demo")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    for commit in ("a", "a", "b"):
        part = lambda commit=commit: measured.append(commit)
        monkeypatch.setattr(gpu, "commit", lambda commit=commit: {"id": commit, "dirty": False})
        monkeypatch.setattr(gpu, "parts", lambda device, small, part=part: {"demo": part})
        gpu.main()
    assert measured == ["a", "b"]


def test_functions_of_answered_prompts_are_left_out(tmp_path: Path) -> None:
    (first, head), *_ = drawn_heads(1)
    prompts = tmp_path / "prompts.jsonl.gz"
    with gzip.open(prompts, "wt") as file:
        file.write(json.dumps({"turns": [f"Explain what this does: {head}"]}) + "\n")
        file.write(json.dumps({"gsm8k": 3}) + "\n")
    ((found, _),) = drawn_heads(1, answered_prompts(prompts))
    assert found != first
