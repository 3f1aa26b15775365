"""`draftree train`: trains a drafter, or fits a policy."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftree.cli.console import NOTHING_KEPT, emit, given, interruptible, one_voice, speaks
from draftree.cli.options import ALL, THEIRS, AsJson, CostsFile, Device, DType, Seed, TargetName
from draftree.errors import UnknownName, UserError

if TYPE_CHECKING:
    from draftree.training.job import Fitted, Job


def train(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The method, or a spec of it with its knobs; or a policy that can be tuned.")],
    data: Annotated[list[Path], typer.Option(help="JSONL, JSON, parquet, text, or a folder of them; repeat it for several.")],
    out: Annotated[Path, typer.Option(help="The folder of the checkpoint; of a tree, the file.")],
    target: TargetName = "demo",
    drafter: Annotated[str | None, typer.Option(help="Of a policy: the spec or folder of the drafter it is for.")] = None,
    knobs: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="A knob of the method; repeat it.")] = ALL,
    init_from: Annotated[
        Path | None, typer.Option(help="A checkpoint of the same method whose weights it begins with.")
    ] = None,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="Let the target answer the data's prompts first.")] = False,
    regenerate_tokens: Annotated[int, typer.Option(help="Longest of these answers.")] = 256,
    regenerate_batch: Annotated[int, typer.Option(help="How many are written at a time.")] = 32,
    stage: Annotated[
        str | None, typer.Option(help="Whose numbers: by default the method's first; with --init-from, its last.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help=f"Passes over the data; {THEIRS}.")] = None,
    batch_size: Annotated[int | None, typer.Option(help=f"Samples in a step, of all processes; {THEIRS}.")] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(help="Parts in which a process works on its share of a step; by default of at most 4096 tokens each."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate of AdamW; {THEIRS}.")] = None,
    schedule: Annotated[
        Literal["constant", "cosine", "linear"] | None, typer.Option(help=f"Of the learning rate; {THEIRS}.")
    ] = None,
    floor: Annotated[float | None, typer.Option(help=f"Share of the rate with which cosine and linear end; {THEIRS}.")] = None,
    warmup: Annotated[
        float | None, typer.Option(help=f"Steps of linear warm-up, or below 1 their share of all; {THEIRS}.")
    ] = None,
    betas: Annotated[
        tuple[float, float] | None, typer.Option(metavar="BETA BETA", help=f"Of AdamW's two moments; {THEIRS}.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help=f"Of AdamW; {THEIRS}.")] = None,
    clip: Annotated[float | None, typer.Option(help=f"Bound of the gradient; {THEIRS}.")] = None,
    clip_by: Annotated[
        Literal["norm", "value"] | None, typer.Option(help=f"What is bounded: its norm, or each value; {THEIRS}.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help=f"Longest sample, the target's context at most; {THEIRS}.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the samples that is measured on, 64 at most.")] = 0.02,
    evaluate_every: Annotated[int, typer.Option(help="Steps between two measurements.")] = 250,
    save_every: Annotated[int, typer.Option(help="Steps between two saves of the state to go on from.")] = 250,
    bf16: Annotated[bool, typer.Option("--bf16", help="Forward passes in bfloat16.")] = False,
    cache_features: Annotated[bool, typer.Option("--cache-features", help="Compute the target's features once.")] = False,
    features: Annotated[str, typer.Option(help="The folder of the cached ones; OUT/features by default.")] = "",
    track: Annotated[str, typer.Option(help="An experiment tracker that is installed: tensorboard, wandb, …")] = "",
    costs: CostsFile = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
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
        kind = name.partition(":")[0]
        sort = job(kind)
        asked = {option: value for option, value in ctx.params.items() if given(ctx, option) and option not in COMMON}
        check(kind, sort, asked)
        from draftree.cli import inputs, terminal

        chosen = sort.of(name, knobs, asked)
        inputs.quiet()
        again = f"the same command goes on from what is kept in '{out}'" if sort.resumes else NOTHING_KEPT
        with interruptible(again), terminal.progress(f"train {name}", None) as tell:
            end = chosen.fit(target, data, out, tell, device=device, dtype=dtype)
    if speaks() and as_json:
        emit({**end.figures, "out": str(out)})
    elif speaks():
        show(end, out)


COMMON = frozenset({"name", "data", "out", "target", "knobs", "device", "dtype", "as_json"})
"""Options of every training."""


def job(name: str) -> "type[Job]":
    """What trains the drafter, or tunes the policy, of a name.

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


def check(name: str, sort: "type[Job]", asked: Mapping[str, Any]) -> None:
    """Refuses options that a training does not take, and a policy's without a drafter.

    Args:
        name: of what is trained.
        sort: of training.
        asked: the options that were given, and their values.

    Raises:
        UserError: it says which, and what is allowed.
    """
    from draftree.tuning import base as tunings

    strange = [option for option in asked if option not in sort.options]
    if strange and name not in tunings.names():
        where = ", ".join(n for n in tunings.names() if strange[0] in tunings.part(n).options)
        told = f"allowed where a policy is trained ({where}), and '{name}' is a drafter"
        raise UserError(f"{flag(strange[0])} is '{asked[strange[0]]}', {told}")
    if strange:
        allowed = ", ".join(sorted(map(flag, (COMMON | sort.options) - {"name", "as_json"})))
        raise UserError(f"train {name} was given {', '.join(map(flag, strange))}, allowed are {allowed}")
    if "drafter" in sort.options and not asked.get("drafter"):
        raise UserError(f"train {name} needs --drafter: the drafter that the policy grows its trees with")


def flag(option: str) -> str:
    """An option as it stands on the command line."""
    return "--set" if option == "knobs" else f"--{option.replace('_', '-')}"


def show(end: "Fitted", out: Path) -> None:
    """What a run came to: its tables, and the rest in lines."""
    from draftree.cli import terminal

    for title, rows in end.tables.items():
        terminal.output().print(terminal.table(title, rows))
    for line in (f"{out}: {end.lines[0]}", *end.lines[1:]):
        terminal.output().print(line, soft_wrap=True, markup=False)
