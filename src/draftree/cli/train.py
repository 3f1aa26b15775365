"""`draftree train`: trains a drafter, or fits a policy."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftree.boundary.knobs import knob
from draftree.cli.console import NOTHING_KEPT, emit, given, interruptible, one_voice, speaks
from draftree.cli.options import AsJson, CostsFile, LoadingOptions, Seed, TargetName, asks_for
from draftree.errors import UnknownName, UserError
from draftree.models.sources import Loading

if TYPE_CHECKING:
    from draftree.training.job import Fitted, Job


THEIRS = "by default the method's"


@dataclass(frozen=True)
class TrainOptions:
    """The options of `draftree train`."""

    name: Annotated[str, typer.Argument(help="The method, or a spec of it with its knobs; or a policy that can be tuned.")]
    out: Path = knob(help="The folder of the checkpoint; of a tree, the file.")
    data: list[Path] = knob((), help="JSONL, JSON, parquet, text, or a folder of them; repeat it for several.")
    target: TargetName = "demo"
    drafter: str | None = knob(None, help="Of a policy: the spec or folder of the drafter it is for.")
    knobs: list[str] = knob((), flag="--set", metavar="KEY=VALUE", help="A knob of the method; repeat it.")
    init_from: Path | None = knob(None, help="A checkpoint of the same method whose weights it begins with.")
    regenerate: bool = knob(False, help="Let the target answer the data's prompts first.")
    regenerate_tokens: int = knob(256, least=1, help="Longest of these answers.")
    regenerate_batch: int = knob(32, least=1, help="How many texts the target writes at a time.")
    synthesize: int | None = knob(
        None, least=1, help="Let the target make up so many questions, and answer them; needs no data."
    )
    synthesize_temperature: float = knob(1.0, above=0, help="They are sampled at.")
    synthesize_top_p: float = knob(0.99, above=0, most=1, help="Mass of the likeliest tokens they are sampled from.")
    synthesize_tokens: int = knob(256, least=1, help="Longest of them.")
    synthesize_system: str | None = knob(None, help="A system message before them; by default the chat template's own.")
    exclude: list[Path] = knob((), help="A file of prompts that must not be learnt, as an evaluation's; repeat it for several.")
    server: str | None = knob(None, help="URL of an OpenAI-compatible server of the same model, which writes instead.")
    server_model: str | None = knob(None, help="The model's name there.")
    server_parallel: int = knob(16, least=1, help="How many requests are under way at a time.")
    server_check: int = knob(16, least=0, help="How many of its answers are compared with the target at hand.")
    server_agreement: float = knob(0.9, least=0, most=1, help="Share of their tokens that must be the target's own likeliest.")
    stage: str | None = knob(None, help="Whose numbers: by default the method's first; with --init-from, its last.")
    epochs: float | None = knob(None, above=0, help=f"Passes over the data; {THEIRS}.")
    batch_size: int | None = knob(None, least=1, help=f"Samples in a step, of all processes; {THEIRS}.")
    accumulate: int | None = knob(
        None, least=1, help="Parts in which a process works on its share of a step; by default of at most 4096 tokens each."
    )
    lr: float | None = knob(None, above=0, help=f"Learning rate of AdamW; {THEIRS}.")
    schedule: Literal["constant", "cosine", "linear"] | None = knob(None, help=f"Of the learning rate; {THEIRS}.")
    floor: float | None = knob(None, least=0, most=1, help=f"Share of the rate with which cosine and linear end; {THEIRS}.")
    warmup: float | None = knob(None, least=0, help=f"Steps of linear warm-up, or below 1 their share of all; {THEIRS}.")
    betas: tuple[float, float] | None = knob(None, metavar="BETA BETA", help=f"Of AdamW's two moments; {THEIRS}.")
    weight_decay: float | None = knob(None, least=0, help=f"Of AdamW; {THEIRS}.")
    clip: float | None = knob(None, above=0, help=f"Bound of the gradient; {THEIRS}.")
    clip_by: Literal["norm", "value"] | None = knob(None, help=f"What is bounded: its norm, or each value; {THEIRS}.")
    max_tokens: int | None = knob(None, least=2, help=f"Longest sample, the target's context at most; {THEIRS}.")
    held_out: float = knob(0.02, least=0, below=1, help="Share of the samples that is measured on, 64 at most.")
    evaluate_every: int = knob(250, least=1, help="Steps between two measurements.")
    save_every: int = knob(250, least=1, help="Steps between two saves of the state to go on from.")
    keep_every: int = knob(0, least=0, help="Steps between two checkpoints that are kept in OUT/step-N; 0 for none.")
    policy: str = knob("ddtree:nodes=16", metavar="SPEC", help="The acceptance of its trees is measured beside chains'.")
    bf16: bool = knob(False, help="Forward passes in bfloat16.")
    cache_features: bool = knob(False, help="Compute the target's features once.")
    features: str = knob("", help="The folder of the cached ones; OUT/features by default.")
    track: str = knob("", help="An experiment tracker that is installed: tensorboard, wandb, …")
    costs: CostsFile = None
    seed: Seed = 0
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@asks_for
def train(ctx: typer.Context, asked: TrainOptions) -> None:
    """Train a drafter for a target; the same command goes on where it was interrupted.

    What is not given is as the method's paper or official code has it: `draftree list` shows the numbers, and the run's first
    line those it takes. An interrupted run keeps the numbers it began with.

    `accelerate launch -m draftree train …` runs it on several processes.

    `draftree train POLICY --drafter …` fits a policy that can be tuned to a drafter; there, too, what is not given is as the
    paper has it, and `--set` sets its knobs.
    """
    if "LOCAL_RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; DDP remarks on what is meant to be so
    with one_voice():
        kind = asked.name.partition(":")[0]
        sort = job(kind)
        said = {option: value for option, value in ctx.params.items() if given(ctx, option) and option not in COMMON | PLACE}
        check(kind, sort, said, asked.data)
        from draftree.cli import inputs, terminal

        chosen = sort.of(asked.name, asked.knobs, said)
        inputs.quiet()
        again = f"the same command goes on from what is kept in '{asked.out}'" if sort.resumes else NOTHING_KEPT
        with interruptible(again), terminal.progress(f"train {asked.name}", None) as tell:
            plain = {"exactness": asked.loading.get("exactness") or "ties"}  # what is learnt from may have other last bits
            end = chosen.fit(asked.target, asked.data, asked.out, tell, **{**asked.loading, **plain})
    if speaks() and asked.as_json:
        emit({**end.figures, "out": str(asked.out)})
    elif speaks():
        show(end, asked.out)


PLACE = frozenset(f.name for f in fields(Loading))
"""Options of loading a target."""
COMMON = frozenset({"name", "data", "out", "target", "knobs", "as_json"})
"""Options of every training."""


def job(name: str) -> "type[Job]":
    """The class of jobs that train the drafter, or tune the policy, of a name.

    Raises:
        UserError: there is nothing of that name to train, or a package is not installed.
    """
    from draftree.drafters.base import TrainableMethod
    from draftree.registry import names, part, parts
    from draftree.tuning import base as tunings

    if name in tunings.names():
        return tunings.part(name)
    drafters = [n for n, method in parts("drafter").items() if issubclass(method, TrainableMethod)]
    if name not in drafters:
        if name in names("drafter"):
            part("drafter", name)  # a plug-in that cannot be used says why
        raise UnknownName("drafter or policy that can be trained", name, [*drafters, *tunings.names()])
    try:
        from draftree.training.run import Training
    except ModuleNotFoundError as error:
        raise UserError(f"training needs the package '{error.name}': pip install 'draftree[train]'") from error
    return Training


def check(name: str, sort: "type[Job]", asked: Mapping[str, Any], data: Sequence[Path]) -> None:
    """Refuses options that a training does not take, a policy's without a drafter, and one that has nothing to learn from.

    Args:
        name: of what is trained.
        sort: of training.
        asked: the options that were given, beside those of every training.
        data: what it learns from.

    Raises:
        UserError: it says which, and what is allowed.
    """
    if strange := [flag(option) for option in asked if option not in sort.options]:
        allowed = ", ".join(sorted(map(flag, (COMMON | sort.options) - {"name", "as_json"})))
        raise UserError(f"train {name} was given {', '.join(strange)}, allowed are {allowed}, and how the target is loaded")
    if "drafter" in sort.options and not asked.get("drafter"):
        raise UserError(f"train {name} needs --drafter: the drafter that the policy grows its trees with")
    if not data and asked.get("synthesize") is None:
        instead = ", or --synthesize N: the target makes up the questions" if "synthesize" in sort.options else ""
        raise UserError(f"train {name} needs --data: files or folders to learn from{instead}")


def flag(option: str) -> str:
    """An option as it stands on the command line."""
    return "--set" if option == "knobs" else f"--{option.replace('_', '-')}"


def show(end: "Fitted", out: Path) -> None:
    """Prints the outcome of a run: its tables, and the rest in lines."""
    from draftree.cli import terminal

    for title, rows in end.tables.items():
        terminal.output().print(terminal.table(title, rows))
    for line in (f"{out}: {end.lines[0]}", *end.lines[1:]):
        terminal.line(line)
