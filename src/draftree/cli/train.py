"""`draftree train`: trains a drafter, or fits a policy."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftree.cli.console import (
    NOTHING_KEPT,
    emit,
    interruptible,
    is_main_process,
    main_process_only,
    was_given,
)
from draftree.cli.options import (
    AsJson,
    CostsFile,
    Force,
    LoadingOptions,
    Seed,
    TargetName,
    dataclass_command,
)
from draftree.cli.output_files import check_output, default_name
from draftree.errors import UnknownName, UserError
from draftree.target.load_options import Loading
from draftree.utils.files import check_writable, set_aside
from draftree.utils.validated_dataclass import knob

if TYPE_CHECKING:
    from draftree.training.base import Fitted, Job


DATA_PANEL, STEPS_PANEL, SAVING_PANEL = (
    "Training data",
    "Steps of training, by default the method's",
    "Measurements and files",
)
"""Headings of groups of options in the help."""


@dataclass(frozen=True)
class TrainOptions:
    """Store the options of `draftree train`."""

    name: Annotated[
        str,
        typer.Argument(
            help="The drafter to train (edd, eagle3, …), with options as name:key=value,…; or the policy to fit (static, c2t)."
        ),
    ]
    out: Path | None = knob(
        None,
        short="-o",
        help="The checkpoint's folder (of static: file); by default NAME-MODEL in this one.",
    )
    force: Force = False
    data: list[Path] = knob(
        (), help="Texts or chats: JSONL, JSON, parquet, text, or a folder; may be repeated."
    )
    target: TargetName = "demo"
    drafter: str | None = knob(None, help="For a policy: the drafter it will be used with.")
    knobs: list[str] = knob(
        (),
        flag="--set",
        metavar="KEY=VALUE",
        help="An option of the drafter (draftree list); may be repeated.",
    )
    init_from: Path | None = knob(None, help="Start from the weights of this checkpoint.")
    regenerate: bool = knob(
        False, panel=DATA_PANEL, help="Learn from the model's answers to these prompts."
    )
    regenerate_tokens: int = knob(
        256, least=1, panel=DATA_PANEL, help="Maximum tokens of such an answer."
    )
    regenerate_batch: int = knob(32, least=1, panel=DATA_PANEL, help="Answers generated at a time.")
    regenerate_temperature: float = knob(
        0.0, least=0, panel=DATA_PANEL, help="Temperature of sampled answers."
    )
    regenerate_sampled: float = knob(
        1.0, least=0, most=1, panel=DATA_PANEL, help="Share of sampled answers."
    )
    synthesize: int | None = knob(
        None, least=1, panel=DATA_PANEL, help="Let the model write N questions, and answer them."
    )
    synthesize_temperature: float = knob(
        1.0, above=0, panel=DATA_PANEL, help="Temperature of these questions."
    )
    synthesize_top_p: float = knob(
        0.99, above=0, most=1, panel=DATA_PANEL, help="Top-p of these questions."
    )
    synthesize_tokens: int = knob(
        256, least=1, panel=DATA_PANEL, help="Maximum tokens of such a question."
    )
    synthesize_system: str | None = knob(
        None, panel=DATA_PANEL, help="System message for them, not the template's."
    )
    exclude: list[Path] = knob((), panel=DATA_PANEL, help="Prompts to exclude; may be repeated.")
    server: str | None = knob(
        None, panel=DATA_PANEL, help="URL of an OpenAI-compatible server of the model."
    )
    server_model: str | None = knob(
        None, panel=DATA_PANEL, help="Name of the model on that server."
    )
    server_parallel: int = knob(
        16, least=1, panel=DATA_PANEL, help="Concurrent requests to the server."
    )
    server_check: int = knob(
        16, least=0, panel=DATA_PANEL, help="Its answers that the local model checks."
    )
    server_agreement: float = knob(
        0.9, least=0, most=1, panel=DATA_PANEL, help="Share of tokens that must agree."
    )
    stage: str | None = knob(
        None,
        panel=STEPS_PANEL,
        help="Stage whose defaults apply; by default the first, with --init-from the last.",
    )
    epochs: float | None = knob(None, above=0, panel=STEPS_PANEL, help="Passes over the data.")
    batch_size: int | None = knob(
        None, least=1, panel=STEPS_PANEL, help="Samples in a step, over all processes."
    )
    accumulate: int | None = knob(
        None,
        least=1,
        panel=STEPS_PANEL,
        help="Parts of a step; by default of 4096 tokens, on a GPU 16384.",
    )
    lr: float | None = knob(None, above=0, panel=STEPS_PANEL, help="Learning rate of AdamW.")
    schedule: Literal["constant", "cosine", "linear"] | None = knob(
        None,
        metavar="NAME",
        panel=STEPS_PANEL,
        help="Its schedule: constant, cosine, linear.",
    )
    floor: float | None = knob(
        None,
        least=0,
        most=1,
        panel=STEPS_PANEL,
        help="Its share at the end of cosine and linear.",
    )
    warmup: float | None = knob(
        None, least=0, panel=STEPS_PANEL, help="Warm-up steps; below 1, their share of all steps."
    )
    betas: tuple[float, float] | None = knob(
        None, metavar="BETA BETA", panel=STEPS_PANEL, help="The two betas of AdamW."
    )
    weight_decay: float | None = knob(
        None, least=0, panel=STEPS_PANEL, help="Weight decay of AdamW."
    )
    clip: float | None = knob(
        None, above=0, panel=STEPS_PANEL, help="Largest norm or value of the gradient."
    )
    clip_by: Literal["norm", "value"] | None = knob(
        None, panel=STEPS_PANEL, help="Clip the norm of the gradient, or each value."
    )
    max_seconds: float = knob(
        0.0, least=0, panel=STEPS_PANEL, help="Stop after so many seconds; 0: no limit."
    )
    max_tokens: int | None = knob(
        None, least=2, panel=STEPS_PANEL, help="Maximum tokens of a sample."
    )
    skip_bad_rows: bool = knob(False, panel=DATA_PANEL, help="Leave out rows that cannot be read.")
    held_out: float = knob(
        0.02,
        least=0,
        below=1,
        panel=SAVING_PANEL,
        help="Share of samples held out to measure, at most 64.",
    )
    evaluate_every: int = knob(
        250, least=1, panel=SAVING_PANEL, help="Steps between two measurements."
    )
    save_every: int = knob(
        250, least=1, panel=SAVING_PANEL, help="Steps between saves of the state."
    )
    keep_every: int = knob(
        0, least=0, panel=SAVING_PANEL, help="Steps between checkpoints kept in OUT/step-N."
    )
    policy: str = knob(
        "ddtree:nodes=16", metavar="SPEC", panel=SAVING_PANEL, help="Policy of the measured trees."
    )
    group_by_length: int = knob(
        0, least=0, panel=STEPS_PANEL, help="Steps whose samples are sorted by length."
    )
    bf16: bool = knob(False, panel=STEPS_PANEL, help="Compute in bfloat16.")
    cache_features: bool = knob(False, panel=SAVING_PANEL, help="Store the model's hidden states.")
    features: str = knob(
        "", panel=SAVING_PANEL, help="Folder of hidden states, instead of OUT/features."
    )
    track: str = knob("", panel=SAVING_PANEL, help="Experiment tracker: tensorboard, wandb, …")
    costs: CostsFile = None
    seed: Seed = 0
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def train(ctx: typer.Context, asked: TrainOptions) -> None:
    """Train a drafter for a target; the same command goes on where it was interrupted.

    Defaults are those of the method's paper or official code; `draftree list` shows them.
    `accelerate launch -m draftree train …` trains on several GPUs. `draftree train static --drafter
    …` and `train c2t` fit a policy to a drafter.
    """
    if "LOCAL_RANK" in os.environ:
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # torch reads it once; DDP remarks on what is meant to be so
    with main_process_only():
        kind = asked.name.partition(":")[0]
        sort = job(kind)
        said = {
            option: value
            for option, value in ctx.params.items()
            if was_given(ctx, option) and option not in COMMON_OPTIONS | LOAD_OPTIONS
        }
        check_training(kind, sort, said, asked.data)
        from draftree.cli import arguments, terminal

        chosen = sort.of(asked.name, asked.knobs, said)
        ending = "" if sort.resumes else ".json"
        out = asked.out or Path(default_name(kind, asked.target) + ending)
        overwritten = check_finished_result(out, asked.force, folder=sort.resumes)
        if overwritten:
            refuse_inputs_in(out, filter(None, (*asked.data, asked.init_from, asked.features)))
        arguments.quiet()
        again = (
            f"the same command goes on from what is kept in '{out}'"
            if sort.resumes
            else NOTHING_KEPT
        )
        with (
            interruptible(again),
            set_aside(out) if overwritten else nullcontext(),
            terminal.progress(f"train {asked.name}", None) as tell,
        ):
            plain = {
                "exactness": asked.loading.get("exactness") or "ties"
            }  # what is learnt from may have other last bits
            end = chosen.fit(asked.target, asked.data, out, tell, **{**asked.loading, **plain})
    if is_main_process() and asked.as_json:
        emit({**end.figures, "out": str(out)})
    elif is_main_process():
        show(end, out)


RESUME_FILES = ("training.pt", "trees")
"""Files and folders that exist only in the folder of an interrupted run that can be resumed."""


def check_finished_result(out: Path, force: bool, folder: bool) -> bool:
    """Return whether a finished result will be overwritten, or an interrupted run with `--force`.

    Raises:
        UserError: the output cannot be written, or must not be overwritten.
    """
    finished = not folder or (
        (out / "config.json").is_file() and not any((out / n).exists() for n in RESUME_FILES)
    )
    if not force and not finished:
        check_writable(out, folder=folder)
        return False
    if not check_output(out, force, folder=folder):
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"'{out}' exists, and several processes do not overwrite it: remove it first"
        )
    return True


def refuse_inputs_in(out: Path, inputs: Iterable[str | Path]) -> None:
    """Raise an error if a file or folder that a training reads would be overwritten by it.

    Raises:
        UserError: one of the inputs is the output or lies in it.
    """
    for each in map(Path, inputs):
        if each.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"'{each}' is read, and '{out}' would be overwritten: name a new one with --out"
            )


LOAD_OPTIONS = frozenset(f.name for f in fields(Loading))
"""Names of the options for loading a target."""
COMMON_OPTIONS = frozenset({"name", "data", "out", "force", "target", "knobs", "as_json"})
"""Names of the options that all trainings have."""


def job(name: str) -> "type[Job]":
    """Return the class of the job that trains the drafter or tunes the policy `name`.

    Raises:
        UserError: no drafter or policy of this name can be trained, or a package is not installed.
    """
    from draftree.drafters.base import TrainableMethod
    from draftree.registry import names, part, parts
    from draftree.tuning import base as tunings

    if name in tunings.tunable_policies():
        return tunings.part(name)
    drafters = [n for n, method in parts("drafter").items() if issubclass(method, TrainableMethod)]
    if name not in drafters:
        if name in names("drafter"):
            part("drafter", name)  # a plug-in that cannot be used says why
        raise UnknownName(
            "drafter or policy that can be trained", name, [*drafters, *tunings.tunable_policies()]
        )
    try:
        from draftree.training.training_job import Training
    except ModuleNotFoundError as error:
        raise UserError(
            f"training needs the package '{error.name}': pip install 'draftree[train]'"
        ) from error
    return Training


def check_training(
    name: str, sort: "type[Job]", asked: Mapping[str, Any], data: Sequence[Path]
) -> None:
    """Raise an error if options of a training are wrong, or its drafter or data are missing.

    Args:
        name: name of the drafter or policy to train.
        sort: class of the job.
        asked: given options, without those that all trainings have.
        data: files and folders with training data.

    Raises:
        UserError: an option is wrong or missing; the message lists the allowed options.
    """
    if strange := [flag(option) for option in asked if option not in sort.options]:
        allowed = ", ".join(
            sorted(map(flag, (COMMON_OPTIONS | sort.options) - {"name", "as_json"}))
        )
        raise UserError(
            f"train {name} was given {', '.join(strange)}, allowed are {allowed}, and how the target is loaded"
        )
    if "drafter" in sort.options and not asked.get("drafter"):
        raise UserError(
            f"train {name} needs --drafter: the drafter that the policy grows its trees with"
        )
    if not data and asked.get("synthesize") is None:
        instead = (
            ", or --synthesize N: the target makes up the questions"
            if "synthesize" in sort.options
            else ""
        )
        raise UserError(f"train {name} needs --data: files or folders to learn from{instead}")


def flag(option: str) -> str:
    """Return the spelling on the command line of an option with a Python name."""
    return "--set" if option == "knobs" else f"--{option.replace('_', '-')}"


def show(end: "Fitted", out: Path) -> None:
    """Print the result of a job: its tables, and then its lines."""
    from draftree.cli import terminal

    for title, rows in end.tables.items():
        terminal.output().print(terminal.table(title, rows))
    for line in (f"{out}: {end.lines[0]}", *end.lines[1:]):
        terminal.line(line)
