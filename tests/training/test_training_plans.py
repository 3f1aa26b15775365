"""What a method is trained with by default, and that a run keeps what it began with."""

import importlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from draftree.cli import app, console
from draftree.data.samples import Sample
from draftree.drafters.base import Recipe, Stage, number_text
from draftree.drafters.edd import EDD
from draftree.errors import UserError
from draftree.registry import names, part, stages
from draftree.testing.fakes import tiny_target
from draftree.training import resume, trainer
from draftree.training.trainer import Progress, TrainingPlan, learning_rate_factor, train
from draftree.training.training_job import fit_to_context, make_plan
from draftree.utils.files import lock_file_in
from draftree.weights import demo_folder
from folders import target_folder

TRAINED = [name for name in names("drafter") if stages(name)]
NUMBERS = [f.name for f in fields(Recipe)]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-a-drafter.md"


def made() -> tuple[Any, Any, list[Sample]]:
    """A target of 64 positions, a drafter, and samples of 8 to 19 tokens."""
    target, rng = tiny_target(context=64), np.random.default_rng(0)
    torch.manual_seed(1)
    texts = [rng.integers(0, 61, rng.integers(8, 20)) for _ in range(24)]
    return (
        target,
        EDD(hidden_layer=-3).fresh(target),
        [Sample(t, np.arange(len(t)) >= 3) for t in texts],
    )


# What a method says


def test_each_trainable_method_names_its_stages() -> None:
    assert [n for n in names("drafter") if hasattr(part("drafter", n), "fresh")] == TRAINED
    for name in TRAINED:
        assert all(
            stage.source and stage.loss and set(stage.ours) <= set(NUMBERS)
            for stage in stages(name)
        ), name


PAPERS = {
    "edd": {"epochs": 1, "batch_size": 8, "lr": 1e-4},
    "glide": {
        "epochs": 1,
        "batch_size": 64,
        "lr": 5e-4,
        "betas": (0.9, 0.95),
        "weight_decay": 0,
        "warmup": 0.025,
    },
    "eagle": {
        "lr": 3e-5,
        "betas": (0.9, 0.95),
        "clip": 0.5,
        "clip_by": "value",
        "max_tokens": 2048,
    },
    "eagle3": {"lr": 5e-5, "betas": (0.9, 0.95), "clip": 0.5, "clip_by": "norm", "weight_decay": 0},
    "medusa": {"lr": 2e-3, "schedule": "cosine", "warmup": 40, "weight_decay": 0},
    "hydra": {"epochs": 10, "batch_size": 32, "lr": 5e-4, "floor": 0.33, "weight_decay": 0.1},
    "mtp": {"lr": 2.2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_plan_has_the_papers_numbers_where_nothing_is_given(name: str, tmp_path: Path) -> None:
    plan = make_plan(stages(name), {}, tmp_path, later=False)
    assert {key: getattr(plan, key) for key in PAPERS[name]} == PAPERS[name]
    given = make_plan(
        stages(name), {"lr": 0.5, "betas": (0.1, 0.2), "seed": 7}, tmp_path, later=False
    )
    assert (given.lr, given.betas, given.seed) == (0.5, (0.1, 0.2), 7)
    assert (given.epochs, given.clip) == (plan.epochs, plan.clip)


def test_a_stage_is_chosen_by_its_name_or_by_what_the_run_begins_with(tmp_path: Path) -> None:
    both = (
        Stage(name="text", lr=1.0, loss="", source=""),
        Stage(name="chats", lr=2.0, loss="", source=""),
    )
    chosen = lambda given, later: make_plan(both, given, tmp_path, later)
    assert [(p.stage, p.lr) for p in (chosen({}, False), chosen({}, True))] == [
        ("text", 1.0),
        ("chats", 2.0),
    ]
    assert chosen({"stage": "text"}, True).lr == 1.0
    with pytest.raises(
        UserError,
        match="stage 'chats' goes on from the weights of 'text', allowed only with --init-from",
    ):
        chosen({"stage": "chats"}, False)
    with pytest.raises(
        UserError, match="unknown stage 'chat': known are chats, text; did you mean 'chats'"
    ):
        chosen({"stage": "chat"}, True)


# What it does


def test_betas_and_weight_decay_reach_the_optimiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    kept = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: Any) -> Any:
        seen.append(self.param_groups[0])
        return kept(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(
        *made(),
        TrainingPlan(batch_size=8, lr=1e-3, betas=(0.8, 0.7), weight_decay=0.3, epochs=0.2),
        tmp_path,
    )
    assert (seen[0]["betas"], seen[0]["weight_decay"], seen[0]["lr"]) == ((0.8, 0.7), 0.3, 1e-3)


def gradients(plan: TrainingPlan, out: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of the first step, as the optimiser gets them."""
    found: list[torch.Tensor] = []
    spy = lambda self, *_: found.append(
        torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]])
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", spy)
        train(*made(), plan, out)
    return found[0]


def test_the_gradient_is_bounded_by_norm_or_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = lambda name, **how: gradients(
        TrainingPlan(epochs=0.2, **how), tmp_path / name, monkeypatch
    )
    free = of("free", clip=1e9)
    bound = float(free.abs().max()) / 3
    norm, value = of("norm", clip=bound), of("value", clip=bound, clip_by="value")
    torch.testing.assert_close(norm, free * bound / free.norm(), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(value, free.clamp(-bound, bound))


def test_the_rate_rises_over_steps_or_a_share_of_them_and_falls_to_its_floor() -> None:
    rate = lambda step, steps=1000, **how: learning_rate_factor(TrainingPlan(**how), step, steps)
    assert [rate(step, warmup=10) for step in (0, 4, 9, 500)] == [0.1, 0.5, 1, 1]
    assert [rate(step, warmup=0.01) for step in (0, 4, 9, 500)] == [0.1, 0.5, 1, 1]
    assert rate(0, steps=10, warmup=0.025) == 1  # less than a step
    assert rate(0, warmup=1) == 1
    for schedule, middle in (("cosine", 0.5), ("linear", 0.5)):
        assert rate(500, schedule=schedule, floor=0.0) == pytest.approx(middle)
        assert rate(500, schedule=schedule, floor=0.2) == pytest.approx(0.2 + 0.8 * middle)
        assert rate(1000, schedule=schedule, floor=0.2) == pytest.approx(0.2)


def samples(*lengths: int) -> list[Sample]:
    return [Sample(np.zeros(n, np.int64), np.ones(n, np.bool_)) for n in lengths]


@pytest.mark.parametrize(
    ("batch", "longest", "world", "parts"),
    [
        (8, 512, 1, 1),
        (64, 2048, 1, 32),
        (64, 2048, 8, 4),
        (64, 100, 1, 2),
        (6, 1000, 1, 2),
        (4, 9000, 2, 2),
        (7, 2048, 1, 7),
    ],
)
def test_a_large_batch_is_cut_into_parts_of_at_most_4096_tokens(
    batch: int, longest: int, world: int, parts: int
) -> None:
    plan = TrainingPlan(batch_size=batch).with_accumulation(samples(3, longest), world)
    assert plan.accumulate == parts
    size = plan.together(world)
    assert size * longest <= trainer.TOGETHER or size == 1
    assert (
        TrainingPlan(batch_size=batch, accumulate=1)
        .with_accumulation(samples(longest), world)
        .accumulate
        == 1
    )


def test_a_batch_that_is_cut_by_itself_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {}
    for name, tokens in (("whole", 4096), ("cut", 40)):
        monkeypatch.setattr(trainer, "TOGETHER", tokens)
        target, drafter, texts = made()
        drafter.model.double()
        train(target, drafter, texts, TrainingPlan(lr=1e-2), tmp_path / name)
        runs[name] = (
            drafter.model.state_dict(),
            json.loads((tmp_path / name / resume.PLAN).read_text())["accumulate"],
        )
    assert (runs["whole"][1], runs["cut"][1]) == (1, 4)
    for key, value in runs["whole"][0].items():
        torch.testing.assert_close(
            value, runs["cut"][0][key], rtol=1e-6, atol=1e-7
        )  # losses are summed up in float32


def test_lengths_are_cut_to_the_targets_context(tmp_path: Path) -> None:
    assert fit_to_context(TrainingPlan(max_tokens=2048), tmp_path, 64).max_tokens == 64
    assert fit_to_context(TrainingPlan(max_tokens=2048), tmp_path, 4096).max_tokens == 2048


# What a run keeps

LACKING = ("stage", "betas", "weight_decay", "clip_by", "floor")
"""What was not written down by runs before methods had plans of their own."""


def interrupted(out: Path, plan: TrainingPlan, stop: int = 2) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(*made(), plan, out, interrupt)


def aged(out: Path) -> None:
    """Makes a run's note one of before methods had plans of their own."""
    said = json.loads((out / resume.PLAN).read_text())
    (out / resume.PLAN).write_text(
        json.dumps({k: v for k, v in said.items() if k not in LACKING} | {"accumulate": 1})
    )


def test_a_run_of_before_plans_goes_on_with_what_it_had(tmp_path: Path) -> None:
    """Also under a method whose own numbers are others."""
    then = TrainingPlan(
        epochs=2,
        batch_size=4,
        lr=1e-2,
        schedule="cosine",
        warmup=2,
        max_tokens=512,
        seed=3,
        held_out=0.1,
    )
    straight = made()
    train(*straight, then, tmp_path / "straight")
    interrupted(tmp_path / "broken", then)
    aged(tmp_path / "broken")
    plan = make_plan(stages("eagle"), {}, tmp_path / "broken", later=False)
    assert plan == then
    assert make_plan(stages("eagle"), {"save_every": 9}, tmp_path / "broken", False).save_every == 9
    again = made()
    train(*again, plan, tmp_path / "broken")
    for key, value in straight[1].model.state_dict().items():
        assert torch.equal(value, again[1].model.state_dict()[key]), key


@pytest.mark.parametrize(
    "other", [{"betas": (0.9, 0.95)}, {"weight_decay": 0.0}, {"clip_by": "value"}, {"lr": 1.0}]
)
def test_a_run_of_before_plans_does_not_go_on_with_other_numbers(
    other: dict[str, Any], tmp_path: Path
) -> None:
    interrupted(tmp_path, TrainingPlan(lr=1e-2))
    aged(tmp_path)
    plan = make_plan(stages("edd"), other, tmp_path, later=False)
    with pytest.raises(UserError, match=f"holds an interrupted run with {next(iter(other))}="):
        train(*made(), plan, tmp_path)


def test_a_run_goes_on_with_its_stage_and_numbers(tmp_path: Path) -> None:
    interrupted(
        tmp_path, make_plan(stages("glide"), {"lr": 1e-2, "batch_size": 4}, tmp_path, later=False)
    )
    plan = make_plan(stages("glide"), {}, tmp_path, later=False)
    assert (plan.stage, plan.lr, plan.batch_size, plan.betas) == (
        "pretraining",
        1e-2,
        4,
        (0.9, 0.95),
    )
    train(*made(), plan, tmp_path)


def test_a_run_longer_than_the_context_keeps_its_length(tmp_path: Path) -> None:
    interrupted(tmp_path, TrainingPlan(max_tokens=100))
    assert fit_to_context(TrainingPlan(max_tokens=100), tmp_path, 64).max_tokens == 100


@pytest.mark.parametrize("held", ["[1]", "{", '{"lr": "much"}', '{"betas": 3}'])
def test_a_broken_note_is_told_in_a_line(held: str, tmp_path: Path) -> None:
    (tmp_path / resume.STATE).touch()
    (tmp_path / resume.PLAN).write_text(held)
    with pytest.raises(UserError, match=r"training\.json") as told:
        make_plan(stages("edd"), {}, tmp_path, later=False)
    assert "\n" not in str(told.value)


# What is told of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def command(folder: Path, tmp_path: Path, capfd: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs `draftree train` on some texts; returns status, output, errors."""
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{i} and {i * i}. " * 30}) for i in range(8))
    )

    def run(*args: Any) -> tuple[int, str, str]:
        ask = [
            "train",
            *args,
            "--target",
            folder,
            "--data",
            tmp_path / "texts.jsonl",
            "--device",
            "cpu",
        ]
        with pytest.raises(SystemExit) as ended:
            app.main([str(a) for a in ask])
        return (int(ended.value.code or 0), *capfd.readouterr())

    return run


def test_the_command_takes_and_tells_the_methods_numbers(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    glide = ("glide", "--set", "kv_layer=-2", "--batch-size", 8)
    status, _, err = command(
        *glide, "--warmup", 0.5, "--betas", 0.8, 0.7, "--out", tmp_path / "base"
    )
    said = json.loads((tmp_path / "base" / resume.PLAN).read_text())
    assert status == 0
    assert (said["stage"], said["lr"], said["betas"], said["warmup"]) == (
        "pretraining",
        5e-4,
        [0.8, 0.7],
        0.5,
    )
    assert (said["max_tokens"], said["weight_decay"], said["accumulate"]) == (
        160,
        0,
        1,
    )  # of the target's 160 positions
    assert err.startswith(
        "draftree: training by epochs 1, batch_size 8, lr 0.0005, schedule cosine, floor 0, warmup 0.5, betas 0.8 0.7, "
        "weight_decay 0, clip 1, clip_by norm, max_tokens 160, stage pretraining, accumulate 1, "
    )
    status, _, err = command(*glide, "--stage", "tuning", "--out", tmp_path / "early")
    assert (status, err.count("\n")) == (2, 1)
    assert "allowed only with --init-from" in err
    assert command(*glide, "--init-from", tmp_path / "base", "--out", tmp_path / "tuned")[0] == 0
    assert json.loads((tmp_path / "tuned" / resume.PLAN).read_text())["stage"] == "tuning"


def test_a_drafter_is_overwritten_by_its_successor_alone(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    asked = ("glide", "--set", "kv_layer=-2", "--batch-size", 8, "--out", out)
    assert command(*asked)[0] == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    status, _, err = command(*asked, "--force", "--init-from", out)
    assert (status, err.count("\n")) == (2, 1)
    assert "would be overwritten: name a new one with --out" in err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": 3}\n')
    assert command(*asked, "--force", "--data", bad)[0] == 2
    with FileLock(lock_file_in(out)):
        assert command(*asked, "--force")[0] == 2  # a process is writing there
    lock_file_in(out).unlink(missing_ok=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert command(*asked, "--force", "--lr", 0.1)[0] == 0
    assert json.loads((out / resume.PLAN).read_text())["lr"] == 0.1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


MISTAKES = {
    "warm-up": (
        ["--warmup", 1.5],
        "warmup is 1.5, allowed is a whole number of steps, or a share of all below 1",
    ),
    "betas": (["--betas", 0.9, 1.5], "betas is (0.9, 1.5), allowed is two numbers in [0, 1)"),
    "one beta": (["--betas", 0.9], "--betas"),
    "decay": (
        ["--weight-decay", -1],
        "--weight-decay is -1.0, allowed is a finite number of at least 0",
    ),
    "schedule": (["--schedule", "step"], "'step' is not one of 'constant', 'cosine', 'linear'"),
    "stage": (["--stage", "tuning"], "unknown stage 'tuning': known are training"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_a_line(
    case: str, command: Callable[..., Any], tmp_path: Path
) -> None:
    more, told = MISTAKES[case]
    status, out, err = command("edd", "--out", tmp_path / "o", *more)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert not (tmp_path / "o").exists()


def test_help_and_list_show_them(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for args in (["train", "--help"], ["list"], ["list", "--json"]):
        with pytest.raises(SystemExit):
            app.main(args)
    said = capfd.readouterr().out
    for told in (
        "--betas",
        "--weight-decay",
        "--stage",
        "`draftree list` shows them",
        "by default the method's",
    ):
        assert told in " ".join(said.split())
    listed = json.loads(said.splitlines()[-1])["drafters"]
    assert listed["eagle"]["training"][0]["lr"] == 3e-5
    assert [stage["name"] for stage in listed["glide"]["training"]] == ["pretraining", "tuning"]
    assert listed["pld"]["training"] == []
    assert (
        said.count("ours:") >= len(TRAINED) - 1
    )  # all but EAGLE, whose code has a number for everything


# What is shipped

COLUMNS = ("epochs", "batch_size", "lr", "schedule", "warmup", "max_tokens")


def rows_of_the_page() -> list[str]:
    """Return a table row for each stage of each drafter, and one for the shipped drafters."""
    found = []
    for name in TRAINED:
        several = stages(name)
        for stage in several:
            cells = [number_text(getattr(stage, k)) + " *" * (k in stage.ours) for k in COLUMNS]
            found.append(
                (f"`{name}`" + f" ({stage.name})" * (len(several) > 1), stage.floor, cells)
            )
    folders = [demo_folder(n) for n in TRAINED if demo_folder(n).is_dir()]
    plans = [
        {**resume.SINCE, **json.loads((folder / resume.PLAN).read_text())} for folder in folders
    ]
    cells = [" or ".join(sorted({number_text(said[k]) for said in plans})) for k in COLUMNS]
    found.append(("the demo's, as shipped", plans[0]["floor"], cells))
    for _, floor, cells in found:
        if floor and cells[3].startswith("cosine"):
            cells[3] = f"cosine to {number_text(floor)}"
    return ["| " + " | ".join((name, *cells)) + " |" for name, _, cells in found]


def test_the_recipe_of_the_shipped_drafters_names_all_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the methods' own have become."""
    monkeypatch.syspath_prepend(str(PAGE.parents[2] / "recipes"))
    recipe = importlib.import_module("demo_drafters")
    (tmp_path / "code.jsonl").touch()
    seen: dict[str, Any] = {}
    click = app.typer.main.get_command(app.app).commands["train"]

    def run(command: list[str], check: bool) -> None:
        context = click.make_context("train", command[4:])
        seen.update({k: v for k, v in context.params.items() if console.was_given(context, k)})

    monkeypatch.setattr(recipe.subprocess, "run", run)
    recipe.train("edd", recipe.SPECS["edd"], "texts.jsonl", tmp_path)
    said = {**resume.SINCE, **json.loads((demo_folder("edd") / resume.PLAN).read_text())}
    assert {k: seen[k] for k in NUMBERS} == {
        k: tuple(v) if k == "betas" else v for k, v in said.items() if k in NUMBERS
    }


def test_the_page_shows_what_the_code_and_the_shipped_drafters_say() -> None:
    rows = rows_of_the_page()
    assert "\n".join(rows) in PAGE.read_text(), f"{PAGE.name} should hold:\n" + "\n".join(rows)
