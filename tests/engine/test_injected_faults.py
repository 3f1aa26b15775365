"""A failure or a signal at every write of a command leaves the old output or the new one, and the next start goes on.

Openings for writing, renamings, makings of folders and flushings below a folder are counted in a
fork of this process; at one of them the disk is full, or a signal comes. The other signals come at
random times.
"""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from test_interrupted_runs import begun, everything, run

from architectures import target as tiny
from conftest import Silent
from draftree.cli import terminal
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.drafters.vdm import VDM
from draftree.utils import files
from folders import target_folder
from gguf_files import write_gguf

Act = Callable[[Any], None]
GENERATE = ["generate", "ab", "--max-new-tokens", "4", "--target"]


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        words: of its command line.
        out: what it writes.
        cached: whether it goes on where its cache cannot be written to.
    """

    words: list[str]
    out: str
    cached: bool = False


CASES = {
    "report": Case(["report", "result.json", "--force", "--out", "OUT/report.html"], "report.html"),
    "trees": Case([*GENERATE, "target", "--drafter", "pld", "--force", "--trees", "OUT/trees.html"], "trees.html"),
    "export": Case(["export", "eagle", "--format", "eagle", "--force", "--out", "OUT/exported"], "exported"),
    "datastore": Case(
        ["datastore", "build", "--kind", "rest", "--data", "chats.jsonl", "--target", "target", "--force", "--out",
         "OUT/store"],
        "store",
    ),
    "bench": Case(
        ["bench", "--suite", "prompts.jsonl", "--target", "target", "--drafter", "pld", "--policy", "chain", "--costs",
         "costs.json", "--max-new-tokens", "4", "--force", "--out", "OUT/result.json"],
        "result.json",
    ),
    "GGUF": Case([*GENERATE, "target.gguf", "--drafter", "pld"], "cache/targets"),
    "load": Case([*GENERATE, "target", "--drafter", "suffix", "--policy", "yield"], "cache", cached=True),
    "push": Case(["push", "pushed", "owner/name"], "uploaded"),
}  # fmt: skip
DATED = ("date", "command", "seconds", "phases", "draft_seconds", "verify_seconds")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    home = tmp_path_factory.mktemp("given")
    target_folder(home / "target")
    write_gguf(home / "target.gguf")
    torch.manual_seed(0)
    for name in ("drafter", "pushed"):
        VDM().fresh(tiny("llama")).save(home / name)
    (home / "pushed" / "README.md").write_text("card")
    (home / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "ab" * (i + 1)}) for i in range(3))
    )
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]}
    (home / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 3))
    CostTable((Costs({1: 0.5, 4: 2.0}, {1: 4.0, 8: 11.0}, commit=0.5),)).save(home / "costs.json")
    assert failure(
        run(
            home, CASES["bench"].words, home / "bench", lambda: setattr(terminal, "CLOCK", Silent())
        )
    ) == (0, [])
    (home / "bench" / "result.json").rename(home / "result.json")
    return home


def uploads(out: Path) -> Any:
    """The hub: what is uploaded comes into a folder."""

    def upload(self: Any, repo_id: str, folder_path: Path, allow_patterns: list[str]) -> None:
        with files.replace_folder(out / "uploaded", overwrite=True) as folder:
            for name in allow_patterns:
                (folder / name).write_bytes((Path(folder_path) / name).read_bytes())

    return mock.patch.multiple(HfApi, create_repo=lambda *_, **__: None, upload_folder=upload)


def at_write(out: Path, number: int, act: Act, hits: Path) -> Callable[[], None]:
    """Return what acts at the number-th write below a folder in the process where it is called; `hits` counts them.

    What Python's audit events tell cannot be undone, so that it is to be called in a fork.
    """
    calls = [0]

    def count(path: Any) -> None:
        if str(path).startswith(str(out)) and not str(path).endswith(".lock"):
            calls[0] += 1
            with hits.open("ab") as file:
                file.write(b".")
            if calls[0] == number:
                act(path)

    def look(event: str, args: tuple[Any, ...]) -> None:
        makes = event == "os.mkdir" and not os.path.exists(
            args[0]
        )  # else pathlib takes no notice of the failure
        if (
            makes
            or event == "os.rename"
            or (event == "open" and bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR)))
        ):
            count(args[0])

    def begin() -> None:
        terminal.CLOCK = Silent()  # a slow command says nothing of how far it is
        os.environ["DRAFTREE_CACHE"] = str(out / "cache")
        uploads(out).start()
        flush = os.fsync

        def fsync(file: int) -> None:
            count(os.readlink(f"/proc/self/fd/{file}"))
            flush(file)

        os.fsync = fsync
        sys.addaudithook(look)

    return begin


def full(path: Any) -> None:
    """Fail as a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def ended_by(number: signal.Signals) -> Act:
    """Return what sends a signal to this process."""
    return lambda _: os.kill(os.getpid(), number)


def content(out: Path, name: str) -> dict[str, Any]:
    """What a command wrote: of files with times and dates in them only whether they are whole."""

    def whole(path: str, held: Any) -> Any:
        if path.endswith(".json") and name in ("bench", "load", "datastore"):
            return sorted(json.loads(held)) if isinstance(held, bytes) else sorted(held)
        return b"</html>" in held if path.endswith(".html") else held

    of = CASES[name].out
    kept = {
        path: held
        for path, held in everything(out).items()
        if path.startswith(of) and ".lock" not in path
    }
    return {
        path: whole(path, held) for path, held in kept.items() if path != "result.json.partial"
    }  # it goes on from that


def moments(count: int, act: str, every: bool) -> list[int]:
    """The writes at which a fault comes: the first, the last and one between; in long tests every one, or of signals most."""
    if not every:
        return sorted({1, (count + 1) // 2, count})
    return list(range(1, count + 1, 1 if act == "full" else 1 + count // 12))


ACTS = {
    "full": (full, 1),
    "SIGINT": (ended_by(signal.SIGINT), 130),
    "SIGTERM": (ended_by(signal.SIGTERM), 143),
}
USUAL = {
    ("report", "full"),
    ("export", "full"),
    ("push", "SIGTERM"),
}  # what `load` writes depends on what it has timed
TOLD = (
    "draftree: dequantising", "draftree: the target is", "Converting and de-quantizing", "draftree: nothing was written; the",
    "draftree: the same command goes on from",
)  # fmt: skip
"""The beginnings of lines that are no errors."""


def failure(result: tuple[int, str]) -> tuple[int, list[str]]:
    """The status of a command, and the lines of its errors."""
    status, told = result
    return status, [
        line for line in told.replace("\r", "\n").split("\n") if line and not line.startswith(TOLD)
    ]


def pairs() -> Iterator[Any]:
    """Every command with every fault."""
    for name in CASES:
        for act in ACTS:
            yield pytest.param(
                name,
                act,
                id=f"{name}-{act}",
                marks=() if (name, act) in USUAL else pytest.mark.long,
            )


@pytest.mark.parametrize(("name", "act"), list(pairs()))
def test_a_fault_at_each_write_leaves_the_old_output_or_the_new_one(
    name: str, act: str, home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case, (fault, failed), hits = CASES[name], ACTS[act], tmp_path / "hits"
    every, tried = request.config.getoption("-m") == "long", 0
    for before in (False, True) if every else (True,):
        out = tmp_path / f"out{before}"
        hits.unlink(missing_ok=True)
        assert failure(run(home, case.words, out, at_write(out, 0, fault, hits))) == (0, [])
        new, count = content(out, name), len(hits.read_bytes())
        assert new
        for number in moments(count, act, every):
            out = tmp_path / f"{before}{number}"
            out.mkdir()
            if before:
                assert failure(run(home, case.words, out, at_write(out, 0, fault, hits))) == (0, [])
            old = content(out, name)
            status, told = failure(run(home, case.words, out, at_write(out, number, fault, hits)))
            tried += 1
            where = (before, number, told)
            assert status in ({0} if case.cached and act == "full" else {0, 2, failed}), where
            assert len(told) == (status != 0), where
            assert "Traceback" not in "".join(told), where
            if status == failed and act == "full":
                assert f"No space left on device: '{out}" in told[0], where
            found = content(out, name)
            assert found in (old, new) or case.cached, where
            left = [p for p in out.rglob(".*") if p.suffix in (".partial", ".replaced", ".lock")]
            assert not left, where
            assert not [p for p in out.rglob("*") if p.is_dir() and not any(p.iterdir())], (
                where,
                "an empty folder is left",
            )
            assert failure(run(home, case.words, out, at_write(out, 0, fault, hits))) == (0, []), (
                where
            )
            assert case.cached or content(out, name) == new, where
    print(f"{name}, {act}: {tried} faults")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_signals_at_random_times_leave_the_old_output_or_the_new_one(
    name: str, home: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    rng = np.random.default_rng(0)
    hits = tmp_path / "hits"
    out, start = tmp_path / "out", time.monotonic()
    assert failure(run(home, case.words, out, at_write(out, 0, full, hits))) == (0, [])
    new, seconds = content(out, name), time.monotonic() - start
    for number in range(12):
        out = tmp_path / str(number)
        signal_ = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL][number % 4]
        running = begun(home, case.words, out, at_write(out, 0, full, hits))
        time.sleep(rng.uniform(0, seconds))
        os.kill(running.pid, signal_)
        status, told = failure(running.end())
        assert status in {0, 128 + signal_, -signal_}, told
        assert "Traceback" not in "".join(told)
        assert content(out, name) in ({}, new) or case.cached
        assert failure(run(home, case.words, out, at_write(out, 0, full, hits))) == (0, [])
        assert case.cached or content(out, name) == new
    print(f"{name}: 12 signals")
