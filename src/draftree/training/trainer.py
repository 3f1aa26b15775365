"""Trains a drafter against its frozen target; a run that was interrupted goes on to the same weights.

Everything a step needs follows from (seed, step): which samples, in which order, and what the objective draws.

Shapes: B batch, T tokens, V vocabulary.
"""

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftree.drafters.base import Batch, Trainable
from draftree.errors import UserError
from draftree.target import Target
from draftree.training.data import Sample, digest
from draftree.training.features import Shards
from draftree.training.teacher import Teacher

STATE, PLAN, LOG = "training.pt", "training.json", "training.jsonl"


@dataclass(frozen=True)
class Plan:
    """How a drafter is trained; the defaults are EDD's (EDD + PCT, section 4.1).

    Attributes:
        epochs: passes over the data.
        batch_size: samples in a step.
        lr: of AdamW.
        schedule: `constant`, or `cosine` down to 5 % of it.
        warmup: steps of linear warm-up.
        clip: largest norm of the gradient.
        max_tokens: longest sample.
        held_out: share of the samples that is measured on instead of learnt, 64 samples at most.
        evaluate_every: steps between two measurements.
        save_every: steps between two saves of the state to resume from.
        bf16: whether forwards run in bfloat16 autocast.
        cache_features: whether the target's internals are computed once and kept in `features`.
        features: the folder of the kept ones; `features` in the checkpoint's folder by default.
        seed: of everything that is drawn.
    """

    epochs: float = 1.0
    batch_size: int = 8
    lr: float = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    clip: float = 1.0
    max_tokens: int = 512
    held_out: float = 0.02
    evaluate_every: int = 250
    save_every: int = 250
    bf16: bool = False
    cache_features: bool = False
    features: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr", "clip", "evaluate_every", "save_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}, allowed is a finite number above 0")
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out is {self.held_out}, allowed is a number in [0, 1)")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed is {self.seed}, allowed is a whole number in 0 … 2⁶⁴ − 1")
        if self.warmup < 0:
            raise UserError(f"warmup is {self.warmup}, allowed is a whole number of at least 0")
        if self.max_tokens < 2:
            raise UserError(f"max_tokens is {self.max_tokens}, allowed is a whole number of at least 2")


@dataclass(frozen=True)
class Progress:
    """Where a run stands: its loss, and on held-out text the loss and the acceptance length of greedy chains."""

    step: int
    steps: int
    loss: float
    held_out_loss: float | None = None
    acceptance_length: float | None = None


class Objective(nn.Module):
    """A drafter's loss as a module, so that accelerate can wrap its weights."""

    def __init__(self, drafter: Trainable[Any]) -> None:
        super().__init__()
        self.drafter, self.model = drafter, drafter.model

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return self.drafter.loss(batch)


def train(
    target: Target,
    drafter: Trainable[Any],
    samples: Sequence[Sample],
    plan: Plan,
    out: Path,
    listen: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Trains into a folder, which is a drafter's checkpoint when the run has ended.

    Args:
        target: frozen.
        drafter: its weights are updated.
        samples: all data; the held-out part is taken from it.
        plan: must be the interrupted run's where `out` holds one.
        out: also holds the state to resume from until the run has ended.
        listen: told every step.

    Raises:
        UserError: `out` holds a run with another plan, or there is too little data.
        KeyboardInterrupt: the run was interrupted; its state was saved.
    """
    learnt, measured = split(samples, plan)
    steps = max(1, math.ceil(plan.epochs * len(learnt) / plan.batch_size))
    accelerator = Accelerator(mixed_precision="bf16" if plan.bf16 else "no", cpu=target.decoder.device.type == "cpu")
    optimizer = torch.optim.AdamW(drafter.model.parameters(), lr=plan.lr)
    objective, optimizer = accelerator.prepare(Objective(drafter), optimizer)
    shards = Shards.at(Path(plan.features) if plan.features else out / "features", target, samples, drafter.needs)
    if plan.cache_features:
        shards.fill()
    teacher = Teacher(target, drafter.needs, samples, plan.seed, shards if plan.cache_features else None)
    said = asdict(plan) | {"target": target.name, "drafter": drafter.described, "data": digest(samples)}
    first = _resume(out, said, target, drafter, optimizer)
    progress = Progress(first, steps, math.nan)
    with _interruptible() as stopped, (out / LOG).open("a") as log:
        for step in range(first, steps):
            drafter.model.train()
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * scale(plan, step, steps)
            loss = objective(teacher.batch(_chosen(learnt, plan, step), step))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(drafter.model.parameters(), plan.clip)
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            progress = Progress(done, steps, float(loss.detach()))
            if not math.isfinite(progress.loss):
                raise UserError(f"training diverged: the loss is {progress.loss} at step {done}; try a smaller lr")
            if done % plan.evaluate_every == 0 or done == steps:
                progress = Progress(done, steps, progress.loss, *evaluate(teacher, drafter, measured, plan))
                log.write(json.dumps(asdict(progress)) + "\n")
                log.flush()
            listen(progress)
            if stopped.is_set() or (done % plan.save_every == 0 and done < steps):
                _save_state(out, drafter, optimizer, done)
            if stopped.is_set():
                raise KeyboardInterrupt
    drafter.model.eval()
    drafter.save(out)
    (out / STATE).unlink(missing_ok=True)
    return progress


def split(samples: Sequence[Sample], plan: Plan) -> tuple[list[int], list[int]]:
    """The numbers of the samples to learn, and of those held out."""
    order = np.random.default_rng([plan.seed, 0]).permutation(len(samples))
    held = min(64, math.ceil(plan.held_out * len(samples))) if plan.held_out else 0
    if len(samples) - held < 1:
        raise UserError(f"the data have {len(samples)} samples, of which {held} are held out; at least 1 must be left")
    return order[held:].tolist(), order[:held].tolist()


def _chosen(samples: Sequence[int], plan: Plan, step: int) -> list[int]:
    """The samples of a step: consecutive ones of an order drawn anew each epoch."""
    at = step * plan.batch_size + np.arange(plan.batch_size)
    orders = {e: np.random.default_rng([plan.seed, 1, e]).permutation(len(samples)) for e in set((at // len(samples)).tolist())}
    return [samples[orders[i // len(samples)][i % len(samples)]] for i in at.tolist()]


def scale(plan: Plan, step: int, steps: int) -> float:
    """The factor of the learning rate at a step."""
    warm = min(1.0, (step + 1) / plan.warmup) if plan.warmup else 1.0
    decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)) if plan.schedule == "cosine" else 1.0
    return warm * decay


@torch.no_grad()
def evaluate(
    teacher: Teacher, drafter: Trainable[Any], samples: Sequence[int], plan: Plan
) -> tuple[float | None, float | None]:
    """Loss and acceptance length on held-out samples; None where there are none."""
    if not samples:
        return None, None
    drafter.model.eval()
    losses, matched, reached = [], np.zeros(DEPTHS), np.zeros(DEPTHS)
    for i in range(0, len(samples), plan.batch_size):
        batch = teacher.batch(samples[i : i + plan.batch_size], -1)
        losses.append(float(drafter.loss(batch)))
        for phase in range(0, DEPTHS, 3):
            hit, seen = acceptance_by_depth(batch, drafter.forward(batch, DEPTHS, phase), phase)
            matched, reached = matched + hit, reached + seen
    rates = matched / np.maximum(reached, 1)
    return float(np.mean(losses)), float(1 + np.cumprod(rates).sum())


DEPTHS = 10
"""How deep the simulated chains of held-out text are."""


def acceptance_by_depth(batch: Batch, draft: Tensor, phase: int) -> tuple[np.ndarray, np.ndarray]:
    """How often a chain drafted from each block's first token is still the target's greedy choice, by depth.

    The text stands in for the chain's own tokens, so a block is followed while the text, too, is what the target would
    have chosen; where it is not, nothing is known of the depths behind.

    Returns:
        [depths] blocks whose draft matched at that depth, and [depths] blocks that reached it.
    """
    choice, guess = batch.logits.argmax(-1)[:, :-1], draft.argmax(-1)[:, :-1]
    match, known = (guess == choice).cpu().numpy(), (choice == batch.tokens[:, 1:]).cpu().numpy()
    learn = batch.learn[:, 1:].cpu().numpy()
    matched, reached = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for start in range(-phase % DEPTHS, match.shape[1], DEPTHS):
        alive = learn[:, start].copy()
        for depth, at in enumerate(range(start, min(start + DEPTHS, match.shape[1]))):
            alive &= learn[:, at]
            reached[depth] += alive.sum()
            alive &= match[:, at]
            matched[depth] += alive.sum()
            alive &= known[:, at]
    return matched, reached


def _resume(out: Path, said: dict[str, Any], target: Target, drafter: Trainable[Any], optimizer: torch.optim.Optimizer) -> int:
    """Loads the state of an interrupted run, if there is one; returns the step to go on with."""
    if (out / STATE).is_file():
        before = json.loads((out / PLAN).read_text())
        if different := [k for k in said if said[k] != before.get(k)]:
            was = ", ".join(f"{k}={before.get(k)}" for k in different)
            raise UserError(f"'{out}' holds an interrupted run with {was}: go on with the same, or use another folder")
        state = torch.load(out / STATE, map_location=target.decoder.device, weights_only=True)
        drafter.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    if (out / "config.json").is_file():
        raise UserError(f"'{out}' holds a finished drafter: name another folder to train into")
    out.mkdir(parents=True, exist_ok=True)
    (out / PLAN).write_text(json.dumps(said, indent=1) + "\n")
    return 0


def _save_state(out: Path, drafter: Trainable[Any], optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = out / (STATE + ".partial")
    torch.save({"model": drafter.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(out / STATE)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Inside, Ctrl-C asks for an end after the step in hand instead of breaking it off."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
