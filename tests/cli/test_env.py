"""What `draftree env` prints, and completion in a shell."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import draftree as public

Run = Callable[..., tuple[int, str, str]]


def test_the_environment_holds_what_a_bug_report_needs(
    draftree: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    status, out, _ = draftree("env", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["draftree"]["version"] == public.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["transformers"]
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] == os.cpu_count()
    assert found["cache_folder"] == str(tmp_path)
    assert found["variables"]["DRAFTREE_CACHE"] == str(tmp_path)
    assert {
        "system",
        "processor",
        "instruction_sets",
        "torch_build",
        "gpus",
        "kernels",
        "python",
        "memory_gb",
    } <= found.keys()


def test_the_environment_is_printed_a_line_for_each_entry(draftree: Run) -> None:
    status, out, _ = draftree("env")
    assert status == 0
    assert [line.partition(":")[0] for line in out.splitlines()][:3] == [
        "draftree",
        "python",
        "system",
    ]
    assert f"torch {torch.__version__}" in out


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").is_file(), reason="the system does not list instruction sets"
)
def test_instruction_sets_are_those_of_the_processor(draftree: Run) -> None:
    from draftree.evaluation.environment import instruction_sets

    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    assert all(name in flags for name in instruction_sets())


@pytest.mark.parametrize(
    ("words", "index", "wanted"),
    [
        ("draftree gen", 1, "generate"),
        ("draftree datastore b", 2, "build"),
        ("draftree bench --po", 2, "--policy"),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, index: int, wanted: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(index), "_DRAFTREE_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", "from draftree.cli.app import main; main([])"],
        env=os.environ | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wanted in done.stdout.split()
