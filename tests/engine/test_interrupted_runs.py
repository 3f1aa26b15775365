"""A run that is ended by a signal, killed, or stopped by a full disk: the same command goes on to what it would have been.

Each run is a fork of this process that gets real signals, or writes to a disk that is really full.
It is ended at seeded moments of the time that an undisturbed run takes, and while it writes what it
goes on from: half of that is written then.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import save_file

from draftree.cli import app
from draftree.costs import machine_probe
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.data.samples import Sample
from draftree.drafters.vdm import VDM
from draftree.errors import UserError
from draftree.evaluation import grid, resume
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from draftree.training import regenerate
from draftree.training.distributed import Processes
from draftree.training.feature_cache import Shards
from draftree.training.resume import LOG_FILE, STATE
from draftree.training.trainer import TrainingPlan, train
from draftree.tuning._tree_dataset import Collected
from draftree.utils import files, signals
from folders import target_folder

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL]
TIMED = {"draft_seconds", "verify_seconds", "phases", "seconds", "tokens_per_second", "speedup", "draft_share", "intervals",
         "date", "command"}  # fmt: skip
"""What is of a run and not of its work."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read: a target, chats, prompts, a corpus, costs."""
    home = tmp_path_factory.mktemp("given")
    target_folder(home / "target")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes " * (i % 3 + 1)},
            ]
        }
        for i in range(12)
    ]
    (home / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (home / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "ab" * (i + 1)}) for i in range(8))
    )
    (home / "corpus").mkdir()
    for i in range(20):
        (home / "corpus" / f"{i}.txt").write_text(f"text {i} " * 40)
    CostTable((Costs({1: 0.5, 4: 2.0}, {1: 4.0, 8: 11.0}, commit=0.5),)).save(home / "costs.json")
    return home


TRAIN = ["train", "vdm", "--data", "chats.jsonl", "--batch-size", "2", "--epochs", "2", "--save-every", "2",
         "--evaluate-every", "3", "--held-out", "0.1", "--out", "OUT/drafter"]  # fmt: skip
COMMANDS = {
    "train": [*TRAIN, "--target", "target"],
    "regenerate": [*TRAIN, "--target", "target", "--regenerate", "--regenerate-tokens", "8", "--regenerate-batch", "3"],
    "bench": ["bench", "--suite", "prompts.jsonl", "--target", "target", "--drafter", "pld", "--policy", "chain",
              "--costs", "costs.json", "--max-new-tokens", "8", "--out", "OUT/result.json"],
    "datastore": ["datastore", "build", "--kind", "rest", "--data", "corpus", "--target", "target", "--out", "OUT/store"],
    "export": ["export", "eagle", "--format", "eagle", "--out", "OUT/exported"],
}  # fmt: skip
GOES_ON = [name for name in COMMANDS if name != "export"]
WRITERS = {"train": (torch, "save"), "regenerate": (regenerate, "append"), "bench": (resume, "append"),
           "datastore": (np, "save")}  # fmt: skip
"""What writes the state that a command goes on from."""


PLANNED = "draftree: training by "
"""A run's first line: its numbers."""


@dataclass
class Running:
    """A command in a fork of this process."""

    pid: int
    told: Path

    def end(self) -> tuple[int, str]:
        """Waits: the exit status, or minus the signal that ended it, and what it said on standard error but its plan."""
        _, status = os.waitpid(self.pid, 0)
        said = (
            self.told.read_text() if self.told.exists() else ""
        )  # it may be killed before it opens the file
        told = [line for line in said.splitlines(keepends=True) if not line.startswith(PLANNED)]
        return os.waitstatus_to_exitcode(status), "".join(told)


def begun(
    home: Path, command: str | list[str], out: Path, before: Callable[[], None] = lambda: None
) -> Running:
    """Starts a command whose outputs come into a folder, which is made; `before` is called in the fork."""
    out.mkdir(exist_ok=True)
    told = out.with_name(out.name + ".err")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking beside threads: torch runs on one here
        pid = os.fork()
    return Running(pid or _command(home, command, out, told, before), told)


def _command(
    home: Path, command: str | list[str], out: Path, told: Path, before: Callable[[], None]
) -> NoReturn:
    status = 70
    try:
        for number in signals.ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.chdir(home)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        with told.open("w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
            before()
            try:
                words = (COMMANDS | OTHERS)[command] if isinstance(command, str) else command
                app.main([part.replace("OUT", str(out)) for part in words])
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            for number in signals.ENDING_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # the command has ended
            machine_probe._ONE_AT_A_TIME.shutdown()  # as the end of an interpreter does, which a fork does not reach
    finally:
        os._exit(status)


def run(
    home: Path, command: str | list[str], out: Path, before: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    return begun(home, command, out, before).end()


def untimed(found: Any) -> Any:
    if isinstance(found, dict):
        return {k: untimed(v) for k, v in found.items() if k not in TIMED}
    return [untimed(v) for v in found] if isinstance(found, list) else found


def content(path: Path) -> Any:
    """A file's bytes; of a result and of a datastore's note the JSON, but for what is of the run."""
    says = path.name == "result.json" or (path.parent.name == "store" and path.suffix == ".json")
    return untimed(json.loads(path.read_text())) if says else path.read_bytes()


def everything(out: Path) -> dict[str, Any]:
    """All files below a folder, hidden ones too, and what they hold."""
    return {str(p.relative_to(out)): content(p) for p in sorted(out.rglob("*")) if p.is_file()}


@dataclass
class Undisturbed:
    """What a command comes to where nothing happens to it, and how long that takes."""

    holds: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Undisturbed]:
    known: dict[str, Undisturbed] = {}

    def of(command: str) -> Undisturbed:
        if command not in known:
            out, start = tmp_path_factory.mktemp("undisturbed") / command, time.monotonic()
            assert run(home, command, out) == (0, "")
            known[command] = Undisturbed(everything(out), time.monotonic() - start)
        return known[command]

    return of


def breaking(module: Any, name: str, number: int) -> None:
    """From now on, the second time that something is written, half of it is, and then this process gets a signal."""
    write, calls = getattr(module, name), [0]

    def half(*args: Any) -> None:
        path = next(a for a in args if isinstance(a, Path))
        before = path.stat().st_size if path.exists() else 0
        write(*args)
        calls[0] += 1
        if calls[0] == 2:
            os.truncate(path, before + (path.stat().st_size - before) // 2)
            os.kill(os.getpid(), number)
            os.truncate(path, before)
            write(*args)

    setattr(module, name, half)


MOMENTS = range(5)
"""Four of them at any time, and the last while a state is written."""


def kinds() -> Iterator[Any]:
    """Every command × signal × moment; two signals are always tried, at one moment of each command."""
    for c, command in enumerate(GOES_ON):
        for s, number in enumerate(SIGNALS):
            for moment in MOMENTS:
                always = moment == (4 if c == s else c) and (s - c) % len(SIGNALS) < 2
                name = f"{command}-{signal.Signals(number).name}-{moment}"
                yield pytest.param(
                    command, number, moment, id=name, marks=() if always else pytest.mark.long
                )


def finished(out: Path) -> bool:
    """Whether there is nothing left to do."""
    drafter = out / "drafter"
    if drafter.exists():
        return (drafter / "config.json").exists() and not (drafter / "training.pt").exists()
    result = out / "result.json"
    return (out / "store").exists() or (
        result.exists() and not result.with_name("result.json.partial").exists()
    )


@pytest.mark.parametrize(("command", "number", "moment"), list(kinds()))
def test_a_run_that_was_ended_goes_on_to_the_same(
    command: str,
    number: signal.Signals,
    moment: int,
    home: Path,
    undisturbed: Callable[[str], Undisturbed],
    tmp_path: Path,
) -> None:
    want, out = undisturbed(command), tmp_path / "out"
    writing = moment == MOMENTS[-1]
    running = begun(
        home, command, out, lambda: breaking(*WRITERS[command], number) if writing else None
    )
    if not writing:
        seed = [GOES_ON.index(command), SIGNALS.index(number), moment]
        time.sleep(np.random.default_rng(seed).uniform(0, 1) * want.seconds)
        os.kill(running.pid, number)
    status, told = running.end()
    ended = {-number, 128 + number}
    assert status in ended if writing else status in {0} | ended, told
    assert "Traceback" not in told
    if writing and number != signal.SIGKILL:
        assert status == 128 + number
        assert "the same command" in told
        assert told.endswith("draftree: interrupted\n")
    if not finished(out):
        assert run(home, command, out) == (0, "")
    found = everything(out)
    if (
        status == -signal.SIGKILL and finished(out)
    ) and found != want.holds:  # killed behind its last write
        found = {k: v for k, v in found.items() if not k.endswith(".lock")}
    assert found == want.holds


# Full disks.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], Callable[[], None]]]]:
    """A folder, and what leaves so many bytes there: a small disk, or where none may be mounted a limit on each file.

    What it returns is to be called in the process that writes.
    """
    out = tmp_path / "out"
    out.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)

    def mounted(size: int, flags: int) -> bool:
        return (
            sys.platform == "linux"
            and libc.mount(b"tmpfs", bytes(out), b"tmpfs", flags, f"size={size}".encode()) == 0
        )

    if mounted(4096, 0):
        yield out, lambda size: lambda: None if mounted(size, REMOUNT) else pytest.fail("no disk")
        libc.umount2(bytes(out), DETACH)
    else:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        yield out, lambda size: lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


REMOUNT, DETACH = 32, 2
"""Of mount(2) and umount2(2)."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_told_in_a_line_and_the_same_command_goes_on(
    command: str, home: Path, undisturbed, disk
) -> None:
    want, (out, of) = undisturbed(command), disk
    whole = sum(len(held) if isinstance(held, bytes) else 4096 for held in want.holds.values())
    for size in (4096, whole // 4):
        status, told = run(home, command, out, of(size))
        assert (status, told.count("\n")) == (1, 1), told
        assert "No space left on device: '" in told or "File too large: '" in told
        for name, held in everything(out).items():
            if not name.endswith((".partial", ".jsonl", "training.pt")) and "partial/" not in name:
                assert held == want.holds[name], "under its last name everything is whole"
        assert not list(out.rglob(".*")), "nor is anything else left"
    assert run(home, command, out, of(64 << 20)) == (0, "")
    assert everything(out) == want.holds


TREES = [
    "generate",
    "ab",
    "--target",
    "target",
    "--drafter",
    "pld",
    "--max-new-tokens",
    "4",
    "--trees",
    "OUT/trees.html",
]


def full_at(out: Path, number: int, calls: list[str]) -> Callable[[], None]:
    """Return what makes openings for writing, renaming and making of folders below a folder fail from the number-th on.

    It is called in the process that writes: what Python's audit events tell cannot be undone.
    """

    def look(event: str, args: tuple[Any, ...]) -> None:
        makes = event == "os.mkdir" and not os.path.exists(
            args[0]
        )  # else pathlib takes no notice of the failure
        writes = (
            makes
            or event == "os.rename"
            or (event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR)))
        )
        if writes and str(args[0]).startswith(str(out)):
            calls.append(event)
            if len(calls) >= number:
                (out.parent / f"hit{number}").touch()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), args[0])

    return lambda: sys.addaudithook(look)


INJECTED = {
    "trees": "trees.html",
    "datastore": "store",
    "bench": "result.json",
    "export": "exported",
    "train": "drafter",
}
"""Commands, and what each of them writes."""
STEPS = {"train": 7, "bench": 5, "datastore": 2}
"""Of commands that write often, every so many-th write fails; all of training's took a minute."""


@pytest.mark.parametrize("command", INJECTED)
def test_a_failure_at_each_write_leaves_the_old_output_or_the_new_one(
    command: str, home: Path, tmp_path: Path
) -> None:
    for number in range(1, 60, STEPS.get(command, 1)):
        out = tmp_path / str(number)
        out.mkdir()
        status, told = run(home, command, out, full_at(out, number, []))
        if not (tmp_path / f"hit{number}").exists():
            break
        assert (status, told.count("\n")) == (1, 1), (number, told)
        assert f"No space left on device: '{out}" in told
        assert not list(out.rglob(".*.partial"))
        assert not [p for p in out.rglob("*") if p.is_dir() and not any(p.iterdir())], (
            "an empty folder is left"
        )
        assert run(home, command, out) == (0, ""), "a second start does not go on"
        assert (out / INJECTED[command]).exists()
    assert number > 1, "nothing was written"
    assert status == 0


def test_a_picture_goes_into_a_folder_that_exists(home: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    status, told = run(home, "misspelt", tmp_path / "out")
    assert (status, told.count("\n")) == (2, 1), told
    assert f"there is no folder '{tmp_path / 'out' / 'nowhere'}'" in told
    assert everything(tmp_path / "out") == {}
    assert not (tmp_path / "out" / "nowhere").exists()


def test_an_interruption_while_the_program_is_imported_is_one_line() -> None:
    code = "import draftree.__main__ as m, builtins, os, signal\n" \
           "real = builtins.__import__\n" \
           "def slow(name, *rest):\n" \
           "    if name == 'draftree.cli.app': os.kill(os.getpid(), signal.SIGINT)\n" \
           "    return real(name, *rest)\n" \
           "builtins.__import__ = slow\n" \
           "signal.signal(signal.SIGINT, signal.default_int_handler)\n" \
           "m.main()\n"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "draftree: interrupted\n")


@pytest.mark.parametrize("entering", [True, False])
def test_a_signal_while_handlers_are_set_or_reset_is_one_line(
    entering: bool, draftree, monkeypatch
) -> None:
    @contextmanager
    def raised() -> Iterator[list[int]]:
        if entering:
            raise signals.Interrupted(signal.SIGHUP)
        yield []
        raise signals.Interrupted(signal.SIGHUP)

    monkeypatch.setattr(app, "raise_on_signal", raised)
    status, _, err = draftree("--version")
    assert (status, err) == (129, "draftree: interrupted\n")


# Two processes.


OTHERS = {
    "trees": TREES,
    "misspelt": [*TREES[:-1], "OUT/nowhere/trees.html"],
    "c2t": [
        "train",
        "c2t",
        "--drafter",
        "eagle",
        "--data",
        "prompts.jsonl",
        "--out",
        "OUT/classifier",
    ],
    "static": [
        "train",
        "static",
        "--drafter",
        "eagle",
        "--data",
        "prompts.jsonl",
        "--out",
        "OUT/tree.json",
    ],
}


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS | OTHERS if name not in ("trees", "misspelt")]
)
def test_the_second_process_is_refused_in_a_line(command: str, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    name = next(
        part for part in (COMMANDS | OTHERS)[command] if part.startswith("OUT")
    ).removeprefix("OUT/")
    lock = files.lock_file_in(out / name) if command in ("train", "regenerate", "c2t") else None
    with files.lock_output(out / name, lock):
        status, told = run(home, command, out)
    assert (status, told.count("\n")) == (2, 1), told
    assert f"another process is writing '{out / name}': wait until it ends" in told
    assert everything(out) == {}


def test_a_lock_is_asked_for_again_by_its_thread_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with files.lock_output(out, files.lock_file_in(out)):
        with files.lock_output(out, files.lock_file_in(out)):
            pass
        assert files.lock_file_in(out).exists(), "it is still held"
        with (
            ThreadPoolExecutor() as others,
            pytest.raises(UserError, match="another process is writing"),
        ):
            others.submit(
                lambda: files.lock_output(out, files.lock_file_in(out)).__enter__()
            ).result()
    assert not out.exists()


def test_half_written_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for name in (".a.1.partial", ".b.22.partial", "a.1.partial", "regenerated.partial"):
        (tmp_path / name).touch()
    (tmp_path / ".a.3.partial").mkdir()
    (tmp_path / ".a.3.partial" / "x").touch()
    with files.lock_output(tmp_path / "a"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".b.22.partial",
        "a.1.partial",
        "regenerated.partial",
    ]
    with files.lock_output(tmp_path, files.lock_file_in(tmp_path)):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.1.partial", "regenerated.partial"]


# What is found in a folder.


def made(knobs: Any = VDM) -> tuple[Target, Any, list[Sample]]:
    target = tiny_target(context=64)
    torch.manual_seed(1)
    texts = np.random.default_rng(0).integers(0, 61, (8, 12))
    return target, knobs().fresh(target), [Sample(t, np.arange(12) >= 3) for t in texts]


PLAN = TrainingPlan(batch_size=2, epochs=2, held_out=0, save_every=2, evaluate_every=1)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted behind its third step, of eight."""
    out = tmp_path_factory.mktemp("stopped")
    target, drafter, samples = made()
    with pytest.raises(KeyboardInterrupt):
        train(
            target,
            drafter,
            samples,
            PLAN,
            out,
            lambda p: os.kill(os.getpid(), signal.SIGINT) if p.step == 3 else None,
        )
    return out


def changed(of: str, how: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Something that changes an entry of the state."""

    def change(out: Path) -> None:
        found = torch.load(out / STATE, weights_only=True)
        torch.save(found | {of: how(found[of])}, out / STATE)

    return change


def cut_moments(optimizer: dict[str, Any]) -> dict[str, Any]:
    return optimizer | {
        "state": {
            i: m | {"exp_avg": m["exp_avg"].flatten()[:1]} for i, m in optimizer["state"].items()
        }
    }


def random_bytes(out: Path) -> None:
    (out / STATE).write_bytes(np.random.default_rng(0).bytes(5000))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda out: (out / STATE).write_bytes(b""), "no state that this run can go on from"),
    "half": (
        lambda out: os.truncate(out / STATE, (out / STATE).stat().st_size // 2),
        "no state that",
    ),
    "random": (random_bytes, "no state that"),
    "a list": (lambda out: torch.save([1], out / STATE), "no state that"),
    "no entries": (lambda out: torch.save({}, out / STATE), "no state that"),
    "other names": (
        changed("model", lambda m: {f"x{k}": v for k, v in m.items()}),
        "to another model: ",
    ),
    "other shapes": (
        changed("model", lambda m: {k: v[:1] for k, v in m.items()}),
        "to another model: ",
    ),
    "other moments": (
        changed("optimizer", cut_moments),
        "its optimizer state belongs to another model",
    ),
    "no moments": (changed("optimizer", lambda _: {}), "no state that"),
    "a text for a step": (
        changed("step", lambda _: "3"),
        "step is '3', allowed is a whole number in 0 … 8",
    ),
    "a step behind the last": (changed("step", lambda _: 9), "step is 9"),
    "no plan": (lambda out: (out / "training.json").unlink(), "is not the plan"),
    "half a plan": (lambda out: os.truncate(out / "training.json", 20), "is not the plan"),
    "a plan that is a list": (
        lambda out: (out / "training.json").write_text("[]"),
        "is not the plan",
    ),
    "a deep plan": (lambda out: (out / "training.json").write_text("[" * 10000), "is not the plan"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_state_is_told_in_a_line(case: str, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "out")
    spoil, told = BROKEN[case]
    spoil(tmp_path / "out")
    with pytest.raises(UserError) as refused:
        train(*made(), PLAN, tmp_path / "out")
    assert told in str(refused.value)
    assert str(tmp_path / "out") in str(refused.value)


@pytest.mark.parametrize(
    "rest",
    [
        '{"step": 3, "loss"',
        "\x00\x01",
        "[1]\n{}\n",
        '{"step": []}\n',
        "[" * 10000,
        '{"step": Infinity}\n',
    ],
    ids=range(6),
)
def test_a_broken_log_is_repaired(rest: str, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "out")
    with (tmp_path / "out" / LOG_FILE).open("a") as file:
        file.write(rest)
    train(*made(), PLAN, tmp_path / "out")
    assert [
        json.loads(line)["step"] for line in (tmp_path / "out" / LOG_FILE).read_text().splitlines()
    ] == list(range(1, 9))


def test_kept_features_that_are_broken_are_told_in_a_line(tmp_path: Path) -> None:
    target, drafter, samples = made()
    shards = Shards.at(tmp_path, target, samples, drafter.needs)
    shards.fill(Processes.on(target.decoder.device))
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"half")
    with pytest.raises(UserError, match="does not hold these samples' features"):
        shards.batch([0])


@pytest.mark.parametrize("spoilt", [b"", b"PK\x03\x04half", b"\xff\xfe"], ids=range(3))
def test_kept_trees_that_are_broken_are_told_in_a_line(spoilt: bytes, tmp_path: Path) -> None:
    (tmp_path / "000003.npz").write_bytes(spoilt)
    with pytest.raises(UserError, match="does not hold a text's trees"):
        Collected(tmp_path, {})[3]


@pytest.mark.parametrize(
    "rest", ["\udcff\udc80", "[" * 100_000, "null", "[[1], 2]", '{"a": 1}'], ids=range(5)
)
def test_a_journal_is_read_up_to_what_is_broken(rest: str, tmp_path: Path) -> None:
    cell = grid.Cell(None, None, 0.0)
    done = {cell: grid.PromptResult([1, 2], [])}
    kept = resume.Journal(tmp_path / "j", {"run": 1})
    assert kept.read([cell]) == []
    kept.add(done)
    with kept.path.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(rest + "\n")
    again = resume.Journal(tmp_path / "j", {"run": 1})
    assert again.read([cell]) == [done]
    again.add(done)
    assert resume.Journal(tmp_path / "j", {"run": 1}).read([cell]) == [done, done]


def test_a_signal_in_the_last_step_ends_nothing_that_is_not_done(tmp_path: Path) -> None:
    end = train(
        *made(),
        PLAN,
        tmp_path,
        lambda p: os.kill(os.getpid(), signal.SIGTERM) if p.step == 8 else None,
    )
    assert end.step == 8
    assert not (tmp_path / STATE).exists()
    assert (tmp_path / "config.json").exists()


def test_other_threads_train_without_signals(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as thread:
        assert thread.submit(train, *made(), PLAN, tmp_path).result().step == 8


def test_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.raise_on_signal() as came:
            os.kill(os.getpid(), signal.SIGHUP)
            assert came == []
            with pytest.raises(signals.Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def numbers(path: Path) -> None:
    with path.open("wb") as file:
        np.zeros(100_000).tofile(file)


@pytest.mark.parametrize("write", [
    lambda path: torch.save({"a": torch.zeros(100_000)}, path),
    lambda path: save_file({"a": torch.zeros(100_000)}, path),
    numbers,
    lambda path: path.write_bytes(bytes(400_000)),
], ids=["torch", "safetensors", "numpy", "bytes"])  # fmt: skip
def test_full_disk_is_a_system_error_for_every_library(write: Callable[[Path], Any], disk) -> None:
    out, of = disk
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    of(65536)()
    try:
        with (
            pytest.raises(OSError, match=r"No space left|File too large") as full,
            files.replace_file(out / "file") as partial,
        ):
            write(partial)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(full.value.filename) == str(out / "file")
    assert list(out.iterdir()) == []


def test_other_errors_are_not_blamed_on_the_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"), files.replace_file(tmp_path / "file"):
        raise RuntimeError("a bug")
    with (
        pytest.raises(FileNotFoundError, match="nowhere"),
        files.replace_folder(tmp_path / "folder"),
    ):
        (tmp_path / "nowhere").read_text()
    assert list(tmp_path.iterdir()) == []
