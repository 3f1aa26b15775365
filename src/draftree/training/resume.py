"""Files of a training run: its plan, its log, and the state to resume from.

Everything random follows from (seed, step), so that the state is the weights, the optimiser's
moments and the step: the position in the data, the objective's draws and dropout are the same
again.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.drafters.base import Trainable, TrainableMethod
from draftree.errors import UserError
from draftree.target.target import Target
from draftree.utils.files import as_user_error, read_object, replace_file, write_text

STATE = "training.pt"
PLAN = "training.json"
LOG_FILE = "training.jsonl"

FREE = frozenset(
    {
        "accumulate",
        "cache_features",
        "features",
        "evaluate_every",
        "save_every",
        "keep_every",
        "policy",
    }
)
"""Options that may change when a run is resumed, because they do not affect the trained weights."""


SINCE: Mapping[str, Any] = {
    "stage": "",
    "betas": [0.9, 0.999],
    "weight_decay": 0.01,
    "clip_by": "norm",
    "floor": 0.05,
    "max_seconds": 0.0,
    "group_by_length": 0,
}
"""Values of options for runs that were started before these options were stored."""


def read_plan(out: Path) -> dict[str, Any] | None:
    """Return the stored options of the interrupted run in a folder; None if it has no such run.

    Raises:
        UserError: the options cannot be read.
    """
    if not (out / STATE).is_file():
        return None
    return {
        **SINCE,
        **read_object(
            out / PLAN, "the plan of the interrupted run beside it (train into another folder)"
        ),
    }


def is_resumable(out: Path, said: Mapping[str, Any]) -> bool:
    """Return whether a folder contains an interrupted run, after checking that it can be resumed.

    Raises:
        UserError: the folder contains a run with other options than `said`, or a finished drafter.
    """
    begun = read_plan(out)
    if begun is None:
        if (out / "config.json").is_file():
            raise UserError(f"'{out}' holds a finished drafter: name another folder to train into")
        return False
    said = json.loads(json.dumps(said))  # as it would be read
    if different := [k for k in said if k not in FREE and said[k] != begun.get(k)]:
        was = ", ".join(f"{k}={begun.get(k)}" for k in different)
        raise UserError(
            f"'{out}' holds an interrupted run with {was}: continue with the same options, or use another folder"
        )
    return True


def write_plan(out: Path, said: Mapping[str, Any], first: int) -> None:
    """Store the options of a run, and remove the entries of the log after step `first`.

    These entries belong to steps that the resumed run repeats.
    """
    write_text(out / PLAN, json.dumps(said, indent=1) + "\n")
    if (out / LOG_FILE).is_file():
        lines = (out / LOG_FILE).read_text("utf-8", errors="replace").splitlines()
        write_text(
            out / LOG_FILE, "".join(line + "\n" for line in lines if _is_valid_line(line, first))
        )


def _is_valid_line(line: str, most: int) -> bool:
    """Return whether a line of the log is complete and belongs to a step up to `most`."""
    try:
        return int(json.loads(line)["step"]) <= most
    except (ArithmeticError, ValueError, TypeError, LookupError, RecursionError):
        return False


def start_from(method: TrainableMethod, folder: Path, target: Target) -> Trainable[Any]:
    """Return a drafter for training that starts from the weights of another checkpoint.

    Args:
        method: method with the options that were given; the other options are taken from the
            checkpoint.
        folder: folder of the checkpoint.
        target: the target, which stays frozen.

    Raises:
        UserError: the checkpoint belongs to another method, or its weights do not fit the options
            or the target.
    """
    opened = replace(method, checkpoint=str(folder)).load_drafter(target)
    opened.model.float()
    if (
        not method.named
    ):  # a published checkpoint may have a rope or sizes that a fresh drafter would not get
        return opened
    asked = {name: getattr(method, name) for name in method.named}
    drafter = replace(opened.knobs, **asked, checkpoint="").fresh(target)
    try:
        drafter.model.load_state_dict(opened.model.state_dict())
    except RuntimeError as error:
        told = " ".join(str(error).split())[:200]
        raise UserError(f"'{folder}' cannot begin {drafter.description}: {told}") from error
    return drafter


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a drafter's model that training changes, by name.

    Frozen weights are left out, because they are loaded with the target.
    """
    frozen = {
        name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def save(
    out: Path,
    drafter: Trainable[Any],
    optimizer: torch.optim.Optimizer,
    step: int,
    seconds: float = 0.0,
) -> None:
    """Save the training state after `step` steps that took `seconds`.

    The previous state is kept until the new one is complete.
    """
    kept = {
        "model": trained_tensors(drafter.model),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "seconds": seconds,
    }
    with replace_file(out / STATE) as partial:
        torch.save(kept, partial)


def resume(
    out: Path, drafter: Trainable[Any], optimizer: torch.optim.Optimizer, steps: int
) -> tuple[int, float]:
    """Load the training state, and return the number of finished steps and their seconds.

    Args:
        out: folder of the run.
        drafter: drafter of the run, whose weights are replaced.
        optimizer: optimiser of the drafter's weights, whose moments are replaced.
        steps: number of steps of the whole run.

    Raises:
        UserError: the file is broken, or contains the state of another model.
    """
    path, mine = out / STATE, trained_tensors(drafter.model)
    device = next(iter(mine.values())).device
    with as_user_error(
        f"'{path}' is no state that this run can go on from (without it the run begins anew)"
    ):
        found = torch.load(path, map_location=device, weights_only=True)
        if type(found["step"]) is not int or not 0 <= found["step"] <= steps:
            raise ValueError(f"step is {found['step']!r}, allowed is a whole number in 0 … {steps}")
        seconds = found.get(
            "seconds", 0.0
        )  # runs of earlier versions have no entry for the time bound
        if type(seconds) is not float or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds is {seconds!r}, allowed is a number of at least 0")
        shapes = [
            {name: tuple(t.shape) for name, t in tensors.items()}
            for tensors in (found["model"], mine)
        ]
        if different := sorted(name for name, _ in shapes[0].items() ^ shapes[1].items()):
            raise ValueError(f"its weights belong to another model: {', '.join(different[:4])}")
        drafter.model.load_state_dict(found["model"], strict=False)
        # The groups' settings are this run's own: those of the file could be anything.
        optimizer.load_state_dict(optimizer.state_dict() | {"state": found["optimizer"]["state"]})
        for parameter, moments in optimizer.state.items():
            size = tuple(parameter.shape)
            if {name: tuple(m.shape) for name, m in moments.items()} != {
                "step": (),
                "exp_avg": size,
                "exp_avg_sq": size,
            }:
                raise ValueError("its optimizer state belongs to another model")
    return int(found["step"]), seconds
