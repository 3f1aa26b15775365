"""The threads of the native kernels: how many there are, and what becomes of them in a child process."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftree.native import cpu_threads, transformer_kernels

CHILD = """
import os, signal, sys
import torch
from draftree.native import cpu_threads, transformer_kernels as dense

torch.set_num_threads(2)
cpu_threads.thread_count = lambda: 2
if sys.argv[1] == "own":
    dense.core.use_openmp(0, 0, 0)
weight, rows = torch.randn(200, 96), torch.randn(5, 96)
packed = dense.pack(weight)
layer = dense.core.Linear(dense.address(packed), 0, 96, 200, dense.code_of(torch.float32))
before = dense.linear(layer, rows)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if torch.equal(dense.linear(layer, rows), before) else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert torch.equal(dense.linear(layer, rows), before)
sys.exit(abs(code))
"""


@pytest.mark.skipif(transformer_kernels.core is None, reason="the native kernels were not built")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("threads", ["torch's", "own"])
def test_a_forked_child_computes_with_threads_of_its_own(threads: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, threads],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def group(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{limit} 100000\n")


def test_the_smallest_quota_of_all_groups_around_counts(tmp_path: Path) -> None:
    group(tmp_path / "a" / "b", "max")
    group(tmp_path / "a", "150000")
    assert cpu_threads.quota(tmp_path, "0::/a/b\n") == 1.5
    group(tmp_path / "a" / "b", "50000")
    assert cpu_threads.quota(tmp_path, "1:cpu:/elsewhere\n0::/a/b\n") == 0.5
    assert cpu_threads.quota(tmp_path, "0::/\n") == math.inf
    group(tmp_path, "300000")
    assert cpu_threads.quota(tmp_path, "0::/missing\n") == 3
    assert cpu_threads.quota(tmp_path, "") == 3


@pytest.mark.parametrize(("limit", "threads"), [(1.5, 2), (0.5, 1), (math.inf, 64)])
def test_threads_follow_the_quota(
    monkeypatch: pytest.MonkeyPatch, limit: float, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cpu_threads, "quota", lambda *_: limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    cpu_threads.processor_share.cache_clear()
    assert cpu_threads.thread_count() == threads
    cpu_threads.processor_share.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity masks")
def test_threads_follow_the_affinity_mask() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
        "from draftree.native import cpu_threads; "
        "cpu_threads.torch.set_num_threads(64); print(cpu_threads.thread_count())"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "1"
    )
