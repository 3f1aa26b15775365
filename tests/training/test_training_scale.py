"""Training on several processes, in micro-batches, and on what the target writes itself.

Two processes are two forks of this one that meet over gloo, as `accelerate launch` makes them meet;
one test launches it. All but that one, which starts torch three times and is run by hand, compute
in float64, where the sums of a step differ only by their order: weights agree to 1e-12. Losses are
summed up in float32: they agree to 1e-6 of their size.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import tracking
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file

from draftree import Request, Target
from draftree.cli import app
from draftree.data import samples
from draftree.data.samples import Sample
from draftree.drafters.edd import EDD
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.policies.chain import Chain
from draftree.testing.fakes import tiny_target
from draftree.training import distributed, feature_cache, synthesize, trainer
from draftree.training.distributed import Processes
from draftree.training.feature_cache import Shards
from draftree.training.generation_run import GenerationRun
from draftree.training.regenerate import (
    ANSWERS_FILE,
    METADATA_FILE,
    PARTIAL_FILE,
    Regeneration,
    read_prompts,
    regenerate,
)
from draftree.training.teacher import Teacher
from draftree.training.trainer import Progress, TrainingPlan, train
from draftree.utils.progress_callback import Tell, ignore_progress
from folders import byte_tokenizer, talking_folder, target_folder

CLOSE = 1e-12
"""The largest difference of a weight between one process and two."""

Listen = Callable[[int, Progress], None]


def made() -> tuple[Target, Any, list[Sample]]:
    """A float64 target and drafter, and samples of very different lengths."""
    target = tiny_target(context=64)
    torch.manual_seed(1)
    drafter = EDD(hidden_layer=-3, shared=True, init="target", phase="random").fresh(target)
    drafter.model.double()
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 61, rng.integers(6, 40)) for _ in range(30)]
    return target, drafter, [Sample(t, np.arange(len(t)) >= rng.integers(1, len(t))) for t in texts]


def plan(**knobs: Any) -> TrainingPlan:
    return TrainingPlan(
        **{
            "epochs": 2,
            "batch_size": 4,
            "lr": 1e-2,
            "held_out": 0.2,
            "evaluate_every": 5,
            "save_every": 4,
        }
        | knobs
    )


def learn(out: Path, listen: Listen = lambda *_: None, **knobs: Any) -> None:
    """A run in this process, or its part of one; what it came to lies in `out` afterwards."""
    target, drafter, samples = made()
    rank = Processes.on(torch.device("cpu")).rank
    end = train(target, drafter, samples, plan(**knobs), out, lambda p: listen(rank, p))
    torch.save((drafter.model.state_dict(), end), out / f"end{rank}.pt")


def ended(out: Path, rank: int = 0) -> tuple[dict[str, torch.Tensor], Progress]:
    found: tuple[dict[str, torch.Tensor], Progress] = torch.load(
        out / f"end{rank}.pt", weights_only=False
    )
    return found


def apart(a: Path, b: Path) -> float:
    """The largest difference of a weight between the ends of two runs."""
    ours, theirs = ended(a)[0], ended(b)[0]
    return max(float((ours[k] - theirs[k]).abs().max()) for k in ours)


def child(rank: int, port: int, work: Callable[[], None], told: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    AcceleratorState._reset_state(True)  # this fork has inherited that of one process
    PartialState._reset_state()
    try:
        work()
        told.put((rank, "done"))
    except BaseException as error:
        told.put((rank, f"{type(error).__name__}: {error}"))


def on_two(work: Callable[[], None]) -> list[str]:
    """Runs something in two processes; returns how it ended in each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    children = [fork.Process(target=child, args=(rank, port, work, told)) for rank in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking beside threads: torch runs on one here
        for process in children:
            process.start()
    try:
        return [end for _, end in sorted(told.get(timeout=60) for _ in children)]
    finally:
        for process in children:
            process.join(5)
            process.kill()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process that others are compared with."""
    out = tmp_path_factory.mktemp("straight")
    learn(out)
    return out


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of it."""
    out = tmp_path_factory.mktemp("brief")
    learn(out, epochs=1)
    return out


def figures(out: Path) -> list[list[float]]:
    """Everything that was logged."""
    rows = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    return [
        [*(v for v in row.values() if not isinstance(v, list)), *row["acceptance_by_depth"]]
        for row in rows
    ]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
def test_two_processes_learn_what_one_does(accumulate: int, straight: Path, tmp_path: Path) -> None:
    assert on_two(lambda: learn(tmp_path, accumulate=accumulate)) == ["done", "done"]
    assert apart(straight, tmp_path) < CLOSE
    assert figures(tmp_path) == [
        pytest.approx(row, rel=1e-6, abs=1e-6) for row in figures(straight)
    ]
    for key, value in ended(tmp_path, 0)[0].items():
        assert torch.equal(value, ended(tmp_path, 1)[0][key])
    assert ended(tmp_path, 0)[1] == ended(tmp_path, 1)[1]


def own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process divides by its own tokens: the mean of means."""
    batch = Teacher.batch
    monkeypatch.setattr(
        Teacher, "batch", lambda self, chosen, step, count=None: batch(self, chosen, step)
    )


def whole_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each divides by the step's tokens, though gradients are averaged: the loss is halved (clipping would hide it)."""
    batch = Teacher.batch
    half = lambda self, chosen, step, count=None: batch(
        self, chosen, step, count and count * self.samples[0].world
    )
    monkeypatch.setattr(
        Sample, "world", property(lambda _: PartialState().num_processes), raising=False
    )
    monkeypatch.setattr(Teacher, "batch", half)


def own_draws(monkeypatch: pytest.MonkeyPatch, own: Callable[[tuple[int, ...]], bool]) -> None:
    """Some of what is drawn depends on the process."""
    right = Teacher._generator

    def drawn(self: Teacher, purpose: int, step: int, *sample: int) -> torch.Generator:
        return right(
            self, purpose, step + 100 * PartialState().process_index * own(sample), *sample
        )

    monkeypatch.setattr(Teacher, "_generator", drawn)


def own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn for a sample."""
    own_draws(monkeypatch, lambda sample: bool(sample))


def own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn for a step: the block length."""
    own_draws(monkeypatch, lambda sample: not sample)


def no_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are not averaged over processes."""
    monkeypatch.setattr("accelerate.Accelerator.prepare", lambda self, *args: args)


@pytest.mark.parametrize("fault", [own_count, whole_count, own_seed, own_step, no_averaging])
def test_a_planted_fault_is_seen(
    fault: Callable[..., None], brief: Path, tmp_path: Path, monkeypatch
) -> None:
    fault(monkeypatch)
    assert on_two(lambda: learn(tmp_path, epochs=1)) == ["done", "done"]
    assert apart(brief, tmp_path) > 1e-3


def test_micro_batches_learn_what_a_batch_does(straight: Path, tmp_path: Path) -> None:
    learn(tmp_path, accumulate=2)
    assert apart(straight, tmp_path) < CLOSE
    assert ended(tmp_path)[1].loss == pytest.approx(ended(straight)[1].loss, rel=1e-6)


@pytest.mark.parametrize("signalled", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_run_goes_on_with_another_number_of_processes(
    signalled: int, straight: Path, tmp_path: Path
) -> None:
    def interrupt(rank: int, progress: Progress) -> None:
        if rank == signalled and progress.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    assert on_two(lambda: learn(tmp_path, interrupt)) == ["KeyboardInterrupt: "] * 2
    assert torch.load(tmp_path / "training.pt", weights_only=True)["step"] == 6
    learn(tmp_path)
    assert apart(straight, tmp_path) < CLOSE


def test_a_step_must_be_dealt_out_evenly(tmp_path: Path) -> None:
    told = on_two(lambda: learn(tmp_path, batch_size=6, accumulate=2))
    assert (
        told
        == [
            "UserError: batch_size is 6, allowed is a multiple of 4 (processes 2 × accumulate 2), such as 8"
        ]
        * 2
    )
    assert not list(tmp_path.iterdir())


def test_processes_share_the_work_of_caching(straight: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(feature_cache, "SAMPLES_PER_FILE", 7)
    write = Shards._write

    def noted(self: Shards, shard: int, names: Any) -> None:
        (tmp_path / f"by{PartialState().process_index}-{shard}").touch()
        write(self, shard, names)

    monkeypatch.setattr(Shards, "_write", noted)
    assert on_two(lambda: learn(tmp_path, cache_features=True)) == ["done", "done"]
    assert sorted(p.name for p in tmp_path.glob("by*")) == [
        "by0-0",
        "by0-2",
        "by0-4",
        "by1-1",
        "by1-3",
    ]
    assert apart(straight, tmp_path) < CLOSE


def test_failure_of_one_process_ends_all(tmp_path: Path, monkeypatch) -> None:
    def full(self: Shards, shard: int, names: Any) -> None:
        if PartialState().process_index == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(feature_cache, "SAMPLES_PER_FILE", 7)
    monkeypatch.setattr(Shards, "_write", full)
    with_disk = lambda: told_os(lambda: learn(tmp_path, cache_features=True))
    first, second = on_two(with_disk)
    assert first == "UserError: process 1 of 2: [Errno 28] No space left on device"
    assert second == "UserError: own: [Errno 28] No space left on device"


def told_os(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        raise UserError(f"own: {error}") from error


def test_processes_with_other_data_do_not_train(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trainer, "digest", lambda _: str(PartialState().process_index))
    told = on_two(lambda: learn(tmp_path))
    assert (
        told
        == [
            "UserError: the data are not the same in all 2 processes: every machine needs the same files"
        ]
        * 2
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{i} and {i * i}?"},
            {"role": "assistant", "content": "yes, " * (i % 4 + 1)},
        ]
    }
    for i in range(12)
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, CHATS)))
    return path


def command(*args: object) -> int:
    """Runs `draftree`; returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        app.main([str(a) for a in args])
    return int(ended.value.code or 0)


@pytest.mark.long
def test_a_launched_command_trains_as_one_process_does(
    folder: Path, chats: Path, tmp_path: Path, capfd
) -> None:
    """In float32, and kept in float16: figures agree to 1e-5 of their size, weights to a unit in the last place kept."""
    ask = [
        "train",
        "edd",
        "--target",
        folder,
        "--data",
        chats,
        "--batch-size",
        "4",
        "--held-out",
        "0.2",
        "--json",
    ]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "draftree"]  # fmt: skip
    two = subprocess.run(
        [sys.executable, *launch, *map(str, ask), "--device", "cpu", "--cache-features", "--out", tmp_path / "two"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert command(*ask, "--device", "cpu", "--out", tmp_path / "one") == 0
    said, expected = json.loads(two.stdout), json.loads(capfd.readouterr().out)
    assert said.pop("out") != expected.pop("out")
    assert said.pop("drafter") == expected.pop("drafter") == "edd"
    depths = said.pop("acceptance_by_depth"), expected.pop("acceptance_by_depth")
    assert depths[0] == pytest.approx(depths[1])
    assert said == pytest.approx(expected, rel=1e-5)
    assert two.stderr.count("draftree: features of 12 texts take") == 1
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    for key in ours:
        torch.testing.assert_close(ours[key].float(), theirs[key].float(), rtol=2**-10, atol=1e-5)


def test_a_layer_that_is_measured_is_told_and_kept(
    folder: Path, chats: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Also where a run is interrupted and gone on with."""
    out = tmp_path / "out"
    ask = [
        "train",
        "glide:kv_layer=auto",
        "--target",
        folder,
        "--data",
        chats,
        "--batch-size",
        "4",
        "--held-out",
        "0.2",
    ]
    learn_step = trainer.Run.learn
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(run: Any, step: int) -> float:
            signal.raise_signal(signal.SIGINT)
            return learn_step(run, step)

        patch.setattr(trainer.Run, "learn", interrupted)
        assert command(*ask, "--device", "cpu", "--out", out) == 130
    assert command(*ask, "--device", "cpu", "--out", out) == 0
    layer = json.loads((out / "config.json").read_text())["draftree"]["kv_layer"]
    assert layer in (2, 3)
    assert json.loads((out / "training.json").read_text())["kv_layer"] == layer
    assert (
        capfd.readouterr().err.count(
            f"draftree: kv_layer is {layer}, measured on the training data\n"
        )
        == 2
    )


MISTAKES = {
    "of all processes": (["--lr", "0"], "--lr is 0.0, allowed is"),
    "of the data": (["--held-out", "0.99"], "the data have 12 samples, of which 12 are held out"),
    "of one process": (["--cache-features"], "process 1 of 2: the disk is full"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_once(
    case: str, folder: Path, chats: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    def full(self: Shards, shard: int, names: Any) -> None:
        if PartialState().process_index == 1:
            raise UserError("the disk is full")

    monkeypatch.setattr(Shards, "_write", full)
    monkeypatch.setattr(feature_cache, "SAMPLES_PER_FILE", 3)
    args, told = MISTAKES[case]
    ask = [
        "train",
        "edd",
        "--target",
        folder,
        "--data",
        chats,
        "--out",
        tmp_path / "out",
        "--device",
        "cpu",
        *args,
    ]
    assert on_two(lambda: app.main([str(a) for a in ask])) == ["SystemExit: 2"] * 2
    said = capfd.readouterr()
    (line,) = [line for line in said.err.splitlines() if "features of" not in line]
    assert line.startswith(f"draftree: {told}")
    assert said.out == ""


def test_the_size_of_features_is_told_before_they_are_computed(
    folder: Path, chats: Path, tmp_path: Path, capfd
) -> None:
    ask = (
        "train",
        "edd",
        "--target",
        folder,
        "--data",
        chats,
        "--cache-features",
        "--features",
        tmp_path / "kept",
        "--epochs",
        0.2,
    )
    assert command(*ask, "--out", tmp_path / "a") == 0
    tokens = sum(len(s.tokens) for s in samples.read_samples([chats], byte_tokenizer(), 512))
    size = tokens * 2 * 32 * 4  # hidden states of two layers, in float32
    told = capfd.readouterr()
    assert told.err.startswith(
        f"draftree: features of 12 texts take {size / 1000:.1f} kB in {tmp_path}/kept\n"
    )
    assert command(*ask, "--out", tmp_path / "b") == 0
    assert "features of" not in capfd.readouterr().err  # they are there


class Ledger(tracking.GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "ledger"
    requires_logging_directory = False
    tracker = None
    kept: list[Any] = []  # noqa: RUF012 - for all runs of a test

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.kept.append(run_name)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.kept.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.kept.append((step, values))

    def finish(self) -> None:
        self.kept.append("finished")


def test_trackers_are_told_of_every_step(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "ledger", Ledger)
    monkeypatch.setattr(Ledger, "kept", [])
    target, drafter, samples = made()
    end = train(target, drafter, samples, plan(epochs=1), tmp_path, track="ledger")
    name, asked, *told, last = Ledger.kept
    assert (name, asked["lr"], asked["target"], last) == ("draftree", 1e-2, "tiny", "finished")
    assert [step for step, _ in told] == list(range(1, end.steps + 1))
    assert told[0][1].keys() == {"loss", "lr"}
    assert told[4][1].keys() == {
        "loss",
        "lr",
        "held_out_loss",
        "overlap",
        "acceptance_length",
        "tree_acceptance_length",
    } | {f"acceptance_at_depth/{depth}" for depth in range(1, 11)}


def test_a_tracker_that_is_not_installed_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "get_available_trackers", lambda: ["tensorboard"])
    target, drafter, samples = made()
    with pytest.raises(
        UserError, match=r"tracker is 'wnadb', installed are tensorboard of aim, .*wandb"
    ):
        train(target, drafter, samples, plan(), tmp_path, track="wnadb")
    assert not list(tmp_path.iterdir())


def test_tensorboard_is_one_of_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    target, drafter, samples = made()
    train(target, drafter, samples, plan(epochs=0.5), tmp_path, track="tensorboard")
    assert list(tmp_path.rglob("events.out.tfevents*"))


ASKED = [
    {"messages": [{"role": "system", "content": "s"},
                  {"role": "user", "content": "one?"}, {"role": "assistant", "content": "x"},
                  {"role": "user", "content": "two?"}, {"role": "assistant", "content": "y"},
                  {"role": "user", "content": "bye"}]},
    {"text": "a document of some length that the target goes on with"},
    {"prompt": "go on", "completion": "x"},
    {"messages": [{"role": "user", "content": "three?"}, {"role": "assistant", "content": "z"}]},
    {"messages": [{"role": "user", "content": "too long " * 9}, {"role": "assistant", "content": "z"}]},
]  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path) -> list[Path]:
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, ASKED)))
    return [path]


HOW = Regeneration(tokens=12, batch=2, max_tokens=64)


def regenerated(
    folder: Path, asked: list[Path], out: Path, tell: Tell = ignore_progress
) -> list[Any]:
    target = Target.load(str(folder), device="cpu")
    path = regenerate(
        target, asked, out, HOW, GenerationRun(Processes.on(torch.device("cpu")), tell)
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_target_writes_the_answers_anew(
    folder: Path, asked: list[Path], tmp_path: Path
) -> None:
    target = Target.load(str(folder), device="cpu")
    engine = Engine(target, PLD().open(target), Chain())

    def answer(text: str, most: int = 12) -> str:
        ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        written = engine.plain([Request(ids, most, engine.eos)]).tokens[0]
        return str(engine.tokenizer.decode([t for t in written if t not in engine.eos]))

    chat, document, completed, short = regenerated(folder, asked, tmp_path / "out")
    one = "<|system|>s<|user|>one?<|assistant|>"
    first = answer(one)
    assert [m["role"] for m in chat["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert chat["messages"][2]["content"] == first
    assert chat["messages"][4]["content"] == answer(
        f"{one}{first}<eos><|user|>two?<|assistant|>"
    )  # behind its own first one
    begun = ASKED[1]["text"][: 1 + (len(ASKED[1]["text"]) - 1) // 4]
    assert document == {"prompt": begun, "completion": answer(begun)}
    assert completed == {"prompt": "go on", "completion": answer("go on")}
    assert short["messages"][1]["content"] == answer("<|user|>three?<|assistant|>")
    assert json.loads((tmp_path / "out" / METADATA_FILE).read_text())["tokens"] == 12
    assert samples.read_samples([tmp_path / "out" / ANSWERS_FILE], engine.tokenizer, 64)


def test_regeneration_goes_on_where_it_stopped(
    folder: Path, asked: list[Path], tmp_path: Path
) -> None:
    straight = regenerated(folder, asked, tmp_path / "straight")

    def interrupt(done: int, remark: str = "", of: int | None = None) -> None:
        assert of == len(ASKED)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerated(folder, asked, tmp_path / "out", interrupt)
    (part,) = (tmp_path / "out" / PARTIAL_FILE).rglob("0.jsonl")
    with part.open("a") as file:
        file.write('\n{"number": 1, "ro')  # a line that was broken off
    rest: list[int] = []
    assert (
        regenerated(
            folder, asked, tmp_path / "out", lambda done, remark="", of=None: rest.append(of)
        )
        == straight
    )
    assert set(rest) == {len(ASKED) - 1}
    again: list[int] = []
    assert (
        regenerated(
            folder, asked, tmp_path / "out", lambda done, remark="", of=None: again.append(of)
        )
        == straight
    )
    assert (again, list((tmp_path / "out").glob("*.partial"))) == ([], [])
    asked[0].write_text(json.dumps(ASKED[3]))
    assert (
        regenerated(folder, asked, tmp_path / "out") == straight[3:]
    )  # other data are answered anew


def test_a_share_of_the_answers_is_sampled(folder: Path, tmp_path: Path) -> None:
    """Each answer depends on the seed and its number alone; the others stay greedy ones."""
    path = tmp_path / "asked.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "go on", "completion": "x"}) + "\n" for _ in range(12))
    )

    def answers(name: str, **how: Any) -> list[str]:
        target = Target.load(str(folder), device="cpu")
        asked = replace(HOW, **how)
        here = GenerationRun(Processes.on(torch.device("cpu")))
        written = regenerate(target, [path], tmp_path / name, asked, here)
        return [json.loads(line)["completion"] for line in written.read_text().splitlines()]

    (greedy,) = set(answers("greedy"))
    half = answers("half", temperature=1.0, sampled=0.5, seed=3)
    drawn = [
        Regeneration(temperature=1.0, sampled=0.5, seed=3).sampling(i).temperature > 0
        for i in range(12)
    ]
    assert 2 < sum(drawn) < 10
    assert [text == greedy for text in half] == [not sampled for sampled in drawn]
    assert len(set(half)) > 3
    assert answers("again", temperature=1.0, sampled=0.5, seed=3, batch=5) == half
    assert answers("none", temperature=1.0, sampled=0.0) == [greedy] * 12
    assert "temperature" not in json.loads(
        (tmp_path / "none" / METADATA_FILE).read_text()
    )  # as files of before have it
    assert json.loads((tmp_path / "half" / METADATA_FILE).read_text())["temperature"] == 1.0


def test_two_processes_share_the_answers(folder: Path, asked: list[Path], tmp_path: Path) -> None:
    straight = regenerated(folder, asked, tmp_path / "straight")
    assert on_two(lambda: regenerated(folder, asked, tmp_path / "out") and None) == ["done", "done"]
    assert [
        json.loads(line) for line in (tmp_path / "out" / ANSWERS_FILE).read_text().splitlines()
    ] == straight


def test_two_processes_make_up_the_questions_of_one(tmp_path: Path) -> None:
    target = Target.load(str(talking_folder(tmp_path / "target")), dtype="float64", device="cpu")

    def made_up(out: str) -> Path:
        how = synthesize.Synthesis(count=8, tokens=12, rows=4)
        run = GenerationRun(Processes.on(torch.device("cpu")))
        return synthesize.synthesize(target, how, tmp_path / out, run)

    straight = made_up("straight").read_text()
    assert on_two(lambda: made_up("out") and None) == ["done", "done"]
    assert (tmp_path / "out" / synthesize.QUESTIONS_FILE).read_text() == straight


def test_every_window_of_a_text_begins_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqrst")
    assert list(read_prompts([path], byte_tokenizer(), 8)) == ["ab", "ij", "q"]


def test_only_text_with_its_prompt_is_a_prompt_with_its_completion(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "abcdefgh", "completion": "x"}))
    assert list(read_prompts([path], byte_tokenizer(), 8)) == ["ab"]


def test_a_command_trains_on_regenerated_answers_from_other_weights(
    folder: Path, chats: Path, tmp_path: Path, capfd
) -> None:
    ask = ("train", "edd", "--target", folder, "--data", chats, "--epochs", 0.2, "--json")
    assert command(*ask, "--out", tmp_path / "first", "--set", "max_block=7") == 0
    told = command(
        *ask,
        "--out",
        tmp_path / "second",
        "--regenerate",
        "--regenerate-tokens",
        6,
        "--init-from",
        tmp_path / "first",
    )
    assert told == 0
    said = json.loads((tmp_path / "second" / "training.json").read_text())
    assert (said["init_from"], said["regenerated_tokens"]) == (str(tmp_path / "first"), 6)
    assert "max_block=7" in said["drafter"]
    assert len((tmp_path / "second" / ANSWERS_FILE).read_text().splitlines()) == len(CHATS)
    capfd.readouterr()
    assert command(*ask, "--out", tmp_path / "third", "--regenerate", "--regenerate-tokens", 0) == 2
    assert (
        capfd.readouterr().err
        == "draftree: --regenerate-tokens is 0, allowed is a whole number of at least 1\n"
    )
