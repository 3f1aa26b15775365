"""`draftree train`: trains a drafter, or fits a policy."""

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftree.boundary.files import inside, locked
from draftree.cli.console import NOTHING_KEPT, emit, given, interruptible
from draftree.cli.options import ALL, THEIRS, AsJson, CostsFile, Device, DType, Seed, TargetName
from draftree.errors import UserError


def train_drafter(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The method, or a spec of it with its knobs; or a policy: c2t, static.")],
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

    `draftree train c2t --drafter …` trains a policy's classifier, where what is not given is C2T's: 10 epochs, batches of
    1024, Adam at 1e-3 (1e-4 and a tenth of the prompts with --init-from), 0.05 of the texts held out. Ten epochs may be
    few steps, so it makes 20,000 at least (`--set steps=`), unless held-out AUC has stopped rising before.

    `draftree train static --drafter … --out FILE` finds the best tree of fixed shape, which `static:paths=FILE` reads.
    """
    if name.partition(":")[0] == "static":
        return find_static_tree({option: value for option, value in ctx.params.items() if given(ctx, option)})
    if name.partition(":")[0] == "c2t":
        return train_classifier({option: value for option, value in ctx.params.items() if given(ctx, option)})
    for option, value, where in (("--drafter", drafter, "c2t, static"), ("--costs", costs, "static")):
        if value is not None:
            raise UserError(f"{option} is '{value}', allowed where a policy is trained ({where}), and '{name}' is a drafter")
    if "LOCAL_RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; DDP remarks on what is meant to be so
    try:
        from draftree.training.trainer import Plan
    except ModuleNotFoundError as error:
        raise UserError(f"training needs the package '{error.name}': pip install 'draftree[train]'") from error

    from draftree.cli import inputs, train_drafter

    with train_drafter.one_voice():
        known = {f.name for f in fields(Plan)}
        said = {option: value for option, value in ctx.params.items() if option in known and given(ctx, option)}
        plan = train_drafter.planned(inputs.trainable(name, knobs).stages, said, out, init_from is not None)
        answers = train_drafter.Regeneration(regenerate_tokens, regenerate_batch) if regenerate else None
        asked = train_drafter.Asked(name, knobs, data, out, plan, init_from, answers, track)
        inputs.quiet()
        with interruptible(f"the same command goes on from what is kept in '{out}'"):
            end = train_drafter.run(asked, target, device, dtype)
    if end is not None and as_json:
        said = {k: None if v != v else v for k, v in asdict(end).items()}  # no NaN in JSON
        emit({"drafter": name, "out": str(out)} | said)
    elif end is not None:
        train_drafter.show(end, out)


def find_static_tree(given: Mapping[str, Any]) -> None:
    """The train command for a static tree, by the options that were given."""
    from draftree.boundary import files
    from draftree.cli import inputs, train_static

    inputs.quiet()
    asked = train_static.Asked.of(given)
    files.writable(asked.out)
    with interruptible(NOTHING_KEPT), locked(asked.out):
        found = train_static.run(asked)
    if given.get("as_json"):
        emit(found | {"out": str(asked.out)})
    else:
        train_static.show(found, asked.out)


def train_classifier(given: Mapping[str, Any]) -> None:
    """The train command for C2T, by the options that were given."""
    from draftree.boundary import files
    from draftree.cli import inputs, train_c2t

    inputs.quiet()
    asked = train_c2t.Asked.of(given)
    files.writable(asked.out, folder=True)
    again = f"the same command goes on from what is kept in '{asked.out}'"
    with interruptible(again), locked(asked.out, inside(asked.out)):
        end = train_c2t.run(asked)
    if given.get("as_json"):
        emit({"policy": "c2t", "out": str(asked.out)} | asdict(end))
    else:
        train_c2t.show(end, asked.out)
