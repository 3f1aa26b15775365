"""What a run begins with, and what it leaves in its folder: what it was asked for, and the state it goes on from.

Everything random follows from (seed, step), so that the state is the weights, the optimiser's moments and the step: the
position in the data, the objective's draws and dropout are the same again.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.drafters.base import Trainable, TrainableMethod
from draftree.errors import UserError
from draftree.target import Target

STATE, PLAN, LOG = "training.pt", "training.json", "training.jsonl"

FREE = frozenset({"accumulate", "cache_features", "features", "evaluate_every", "save_every"})
"""What may be another when a run goes on: it does not change what is learnt."""


def check(out: Path, said: Mapping[str, Any]) -> bool:
    """Whether a folder holds an interrupted run, which must be one of the same plan.

    Raises:
        UserError: it holds another run, or a finished drafter.
    """
    if not (out / STATE).is_file():
        if (out / "config.json").is_file():
            raise UserError(f"'{out}' holds a finished drafter: name another folder to train into")
        return False
    try:
        before = json.loads((out / PLAN).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"'{out}' holds an interrupted run without its {PLAN}: use another folder") from error
    if different := [k for k in said if k not in FREE and said[k] != before.get(k)]:
        was = ", ".join(f"{k}={before.get(k)}" for k in different)
        raise UserError(f"'{out}' holds an interrupted run with {was}: go on with the same, or use another folder")
    return True


def note(out: Path, said: Mapping[str, Any], first: int) -> None:
    """Writes down what a run is asked for, and keeps of the log what stands before the step it begins with."""
    out.mkdir(parents=True, exist_ok=True)
    (out / PLAN).write_text(json.dumps(said, indent=1) + "\n")
    if (out / LOG).is_file():
        lines = (out / LOG).read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= first]
        (out / LOG).write_text("".join(kept))


def begun(method: TrainableMethod, given: Collection[str], folder: Path, target: Target) -> Trainable[Any]:
    """A drafter to be trained from another checkpoint's weights on.

    Args:
        method: the knobs asked for.
        given: the names of those that were set; the others are the checkpoint's.
        folder: the checkpoint's.
        target: frozen.

    Raises:
        UserError: the checkpoint is of another method, or its weights do not fit knobs or target.
    """
    opened = replace(method, checkpoint=str(folder)).restored(target)
    opened.model.float()
    if not given:  # a published checkpoint may have a rope or sizes that a fresh drafter would not get
        return opened
    asked = {name: getattr(method, name) for name in given}
    drafter = replace(method.resume(folder, target), **asked, checkpoint="").fresh(target)
    try:
        drafter.model.load_state_dict(opened.model.state_dict())
    except RuntimeError as error:
        told = " ".join(str(error).split())[:200]
        raise UserError(f"'{folder}' cannot begin {drafter.described}: {told}") from error
    return drafter


def own(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that a run changes: all but frozen weights, which come with the target."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def save(out: Path, drafter: Trainable[Any], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes the state after a number of steps; an earlier one stays until this one is whole."""
    partial = out / (STATE + ".partial")
    torch.save({"model": own(drafter.model), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(out / STATE)


def resume(out: Path, drafter: Trainable[Any], optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Loads the state; returns how many steps are done."""
    found = torch.load(out / STATE, map_location=device, weights_only=True)
    drafter.model.load_state_dict(found["model"], strict=False)
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"])
