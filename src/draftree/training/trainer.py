"""Train a drafter against its frozen target, on one process or several; runs can be resumed.

Everything a step needs follows from (seed, step): which samples, in which order, what the objective
draws, and dropout. So a step is the same sum over the same samples however it is cut: among
processes, and among micro-batches of a process.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import UNIT_COSTS, Costs
from draftree.data.samples import Sample, digest
from draftree.drafters.base import Batch, Recipe, Trainable
from draftree.errors import UserError
from draftree.formats.checkpoint import CONFIG
from draftree.measure_costs import reliable_costs
from draftree.models.sdpa_backends import unplanned_attention
from draftree.policies.base import Policy
from draftree.registry import build
from draftree.target.target import Target
from draftree.training import resume
from draftree.training.distributed import Processes, accelerator_of, check_tracker
from draftree.training.feature_cache import Shards
from draftree.training.held_out_metrics import evaluate, tree_length
from draftree.training.sample_order import SampleOrder
from draftree.training.teacher import Teacher
from draftree.training.time_limit import Clock
from draftree.utils.files import append, fill_folder
from draftree.utils.hardware import keep_memory, return_memory
from draftree.utils.signals import Interrupted, postpone_signals
from draftree.utils.validated_dataclass import knob

TOGETHER, ON_GPU = 4096, 16384
"""Largest number of tokens, including padding, in a micro-batch if `accumulate` is not set: on a
CPU, and on a GPU, which smaller batches would not keep busy."""


@dataclass(frozen=True)
class TrainingPlan(Recipe):
    """Set the options of a training run; the defaults are those of EDD (EDD + PCT, section 4.1).

    Attributes:
        stage: name of the method's training stage from which the defaults of the other options
            come.
        accumulate: number of micro-batches into which a process divides its share of a step, to
            save memory. By default it is chosen so that a micro-batch has at most `TOGETHER`
            tokens, or `ON_GPU` on a GPU.
        held_out: share of the samples that are used for measurements instead of learning, at most
            64 samples. Samples of one row of the data are not divided, unless there are too many.
        evaluate_every: number of steps between two measurements.
        save_every: number of steps between two saves of the state for resuming.
        keep_every: number of steps between two additional checkpoints, which are kept in folders
            `step-N`; 0 for none.
        policy: spec of a policy; the acceptance length of its trees is measured, too.
        group_by_length: number of steps among which samples are sorted by length, so that the
            samples of a step have similar lengths and need little padding; 0 to leave them in
            random order.
        bf16: whether forward passes run in bfloat16 autocast.
        cache_features: whether the target's hidden states, keys and values are computed once and
            stored in `features`.
        features: folder for these tensors; by default `features` in the run's folder.
        max_seconds: time limit for all steps; 0 for none. If it is reached before the last step,
            the learning rate falls with the time instead of the steps, so that it reaches its final
            value. The trained weights then depend on the speed of the machine.
        seed: seed of all random numbers.
    """

    stage: str = ""
    accumulate: int | None = knob(None, least=1)
    held_out: float = knob(0.02, least=0, below=1)
    evaluate_every: int = knob(250, least=1)
    save_every: int = knob(250, least=1)
    keep_every: int = knob(0, least=0)
    policy: str = "ddtree:nodes=16"
    group_by_length: int = knob(0, least=0)
    bf16: bool = False
    cache_features: bool = False
    features: str = ""
    max_seconds: float = knob(0.0, least=0)
    seed: int = knob(0, least=0, most=2**64 - 1)

    @property
    def parts(self) -> int:
        """Return the number of micro-batches in a process's share of a step."""
        return self.accumulate or 1

    def with_accumulation(
        self, samples: Sequence[Sample], world: int, on: torch.device = torch.device("cpu")
    ) -> Self:
        """Return the plan with `accumulate` chosen, if it was None.

        Args:
            samples: the samples; the longest one decides.
            world: number of processes.
            on: device of a process.
        """
        if self.accumulate is not None:
            return self
        most = ON_GPU if on.type == "cuda" else TOGETHER
        share, fit = self.batch_size // world, most // max(len(s.tokens) for s in samples)
        return replace(
            self,
            accumulate=next(
                n for n in range(1, share + 1) if share % n == 0 and share // n <= max(fit, 1)
            ),
        )

    def together(self, world: int) -> int:
        """Return the number of samples in a micro-batch of each process.

        Args:
            world: number of processes.

        Raises:
            UserError: the samples of a step cannot be divided evenly.
        """
        parts = world * self.parts
        if self.batch_size % parts:
            raise UserError(
                f"batch_size is {self.batch_size}, allowed is a multiple of {parts} (processes {world} × accumulate "
                f"{self.parts}), such as {-(-self.batch_size // parts) * parts}"
            )
        return self.batch_size // parts


@dataclass(frozen=True)
class Progress:
    """Store the progress of a run: the number of finished steps, and the last loss.

    After a measurement it also contains the held-out figures of `Measures`, and the acceptance
    length of the policy's trees.
    """

    step: int
    steps: int
    loss: float
    held_out_loss: float | None = None
    overlap: float | None = None
    acceptance_length: float | None = None
    acceptance_by_depth: tuple[float, ...] | None = None
    tree_acceptance_length: float | None = None


class Objective(nn.Module):
    """Wrap a drafter's loss as a module, so that accelerate can wrap its weights."""

    def __init__(self, drafter: Trainable[Any]) -> None:
        super().__init__()
        self.drafter, self.model = drafter, drafter.model

    def forward(self, batch: Batch) -> Tensor:
        """Return the drafter's loss on a batch."""
        return self.drafter.loss(batch)


def train(
    target: Target,
    drafter: Trainable[Any],
    samples: Sequence[Sample],
    plan: TrainingPlan,
    out: Path,
    listen: Callable[[Progress], None] = lambda _: None,
    about: Mapping[str, Any] = {},
    track: str = "",
) -> Progress:
    """Train a drafter, and write its checkpoint into a folder when the run has ended.

    Every process of a run calls this function; only the main process writes.

    Args:
        target: the target, which stays frozen.
        drafter: drafter whose weights with `requires_grad` are updated.
        samples: all samples, including those that will be held out.
        plan: options of the run. If `out` contains an interrupted run, they must be the same.
        out: folder of the run. Until the end, it contains the state for resuming.
        listen: called with the progress after every step.
        about: further facts that are stored with the options and must be the same when the run is
            resumed.
        track: name of an experiment tracker that accelerate supports; empty for none.

    Raises:
        UserError: `out` contains another run or is in use by another process, there are too few
            samples, they cannot be divided evenly, or training diverged.
        OSError: the disk is full; the run can be resumed from the last saved state.
        KeyboardInterrupt: the run was interrupted by Ctrl-C, SIGTERM or SIGHUP. The current step
            was finished and the state was saved before. If the program does not handle SIGTERM or
            SIGHUP, the signal then ends the process.
    """
    devices = [target.decoder.device] if target.decoder.device.type == "cuda" else []
    if target.decoder.device.type == "cpu":
        keep_memory()
    with Processes.on(target.decoder.device).alone(out):
        run = Run.start_or_resume(target, drafter, samples, plan, out, about, track)
        progress = Progress(run.first, run.steps, math.nan)
        with (
            postpone_signals() as signals,
            torch.random.fork_rng(devices),
            unplanned_attention(target.decoder.device),
            run.open_trackers(),
        ):
            for step in range(run.first, run.steps):
                loss = run.learn(step)
                progress = run.measure(
                    Progress(step + 1, step + 1 if run.clock.over else run.steps, loss)
                )
                run.log(progress)
                listen(progress)
                stopped = run.processes.any(bool(signals))
                if progress.step == progress.steps:
                    break
                if plan.keep_every and progress.step % plan.keep_every == 0:
                    run.keep(progress.step)
                if stopped or progress.step % plan.save_every == 0:
                    run.save(progress.step)
                    if stopped:
                        signals[:] = [max(run.processes.gather(max(signals, default=0)))]
                        raise Interrupted(*signals)
            run.finish()
            return_memory()
            signals.clear()  # nothing is left that they could end
    return progress


@dataclass(frozen=True)
class Run:
    """Store the parts of a training run in one process.

    Attributes:
        plan: options of the run.
        out: folder of the run.
        drafter: drafter that is trained.
        teacher: object that provides batches with the target's outputs.
        accelerator: accelerate's object that averages gradients over processes.
        processes: all processes of the run.
        objective: module that computes the loss, wrapped by accelerate.
        optimizer: optimiser of the trained weights.
        learnt: indices of the samples that are used for learning.
        order: the order in which they are used.
        held: indices of the held-out samples, which are used for measurements.
        first: number of steps that were done before this process started.
        steps: number of steps of the whole run.
        said: options and facts that are stored with the run.
        policy: policy for whose trees the acceptance length is measured.
        costs: costs of target and drafter, for a policy that reads them.
        clock: clock for the run's time limit.
    """

    plan: TrainingPlan
    out: Path
    drafter: Trainable[Any]
    teacher: Teacher
    accelerator: Accelerator
    processes: Processes
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    learnt: Sequence[int]
    order: SampleOrder
    held: Sequence[int]
    first: int
    steps: int
    said: Mapping[str, Any]
    policy: Policy
    costs: Costs | CostTable
    clock: Clock

    @classmethod
    def start_or_resume(
        cls,
        target: Target,
        drafter: Trainable[Any],
        samples: Sequence[Sample],
        plan: TrainingPlan,
        out: Path,
        about: Mapping[str, Any],
        track: str,
    ) -> Self:
        """Start a run in a folder, or resume the interrupted run in it."""
        device = target.decoder.device
        cast(Any, target.decoder.model).requires_grad_(
            False
        )  # a drafter's loss may go through its embedding and head
        processes = Processes.on(device)
        about = {
            "target": target.name,
            **target.loading.explicit_options,
            "drafter": drafter.description,
            "data": digest(samples),
            **about,
        }
        processes.same(about["data"], "the data")
        with processes.share_errors():
            check_tracker(track)
            plan.together(processes.world)
            plan = plan.with_accumulation(samples, processes.world, device)
            learnt, held = split_samples(samples, plan)
            said = asdict(plan) | dict(about)
            going_on = resume.is_resumable(out, said)
        lengths = np.array([len(samples[i].tokens) for i in learnt])
        steps = max(1, math.ceil(plan.epochs * len(learnt) / plan.batch_size))
        home = Path(plan.features or out / "features")
        shards = Shards.at(home, target, samples, drafter.needs) if plan.cache_features else None
        if shards is not None:
            shards.fill(processes)
        accelerator = accelerator_of(device, out, track)
        parameters = [p for p in drafter.model.parameters() if p.requires_grad]
        adam = torch.optim.AdamW(parameters, plan.lr, plan.betas, weight_decay=plan.weight_decay)
        objective, optimizer = accelerator.prepare(Objective(drafter), adam)
        with processes.share_errors():
            first, spent = resume.resume(out, drafter, optimizer, steps) if going_on else (0, 0.0)
            if processes.main:
                resume.write_plan(out, said, first)
        processes.same(first, "the states to go on from")
        teacher, policy = (
            Teacher(target, drafter.needs, samples, plan.seed, shards),
            build("policy", plan.policy),
        )
        costs = (
            reliable_costs(target, drafter) if policy.reads_costs else UNIT_COSTS
        )  # in float32: they are of this run alone
        return cls(
            plan,
            out,
            drafter,
            teacher,
            accelerator,
            processes,
            objective,
            optimizer,
            learnt,
            SampleOrder(lengths, plan.batch_size, plan.group_by_length, plan.seed),
            held,
            first,
            steps,
            said,
            policy,
            costs,
            Clock(plan.max_seconds, spent, processes),
        )

    def learn(self, step: int) -> float:
        """Run one step of the optimiser, and return the mean loss over all processes.

        Raises:
            UserError: the loss is not finite.
        """
        self.drafter.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * learning_rate_factor(
                self.plan, step, self.steps, self.clock.share
            )
        own = torch.tensor(self._gradients(step), dtype=torch.float64)
        loss = float(self.processes.sum(own)) / self.processes.world
        if not math.isfinite(loss):
            raise UserError(
                f"training diverged: the loss is {loss} at step {step + 1}; try a smaller lr"
            )
        clip = (
            self.accelerator.clip_grad_norm_
            if self.plan.clip_by == "norm"
            else self.accelerator.clip_grad_value_
        )
        clip(self.drafter.model.parameters(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.look()
        return loss

    def _gradients(self, step: int) -> float:
        """Compute the gradients of this process's share of a step, and return its loss.

        The share is processed in micro-batches. Gradients are averaged over processes, so each
        process divides its loss by the number of learnt tokens in the whole step over the number of
        processes.
        """
        world, rank = self.processes.world, self.processes.rank
        chosen = [self.learnt[i] for i in self.order.of_step(step)]
        size = self.plan.together(world)
        chosen.sort(
            key=lambda i: len(self.teacher.samples[i].tokens)
        )  # a part then holds little padding
        count = sum(int(self.teacher.samples[i].learn.sum()) for i in chosen) / world
        mine = chosen[rank::world]
        torch.manual_seed(
            int(np.random.SeedSequence([self.plan.seed, 3, step, rank]).generate_state(1)[0])
        )  # of dropout
        loss = 0.0
        for part in range(self.plan.parts):
            last = part + 1 == self.plan.parts
            with nullcontext() if last else self.accelerator.no_sync(self.objective):
                batch = self.teacher.batch(mine[part * size : (part + 1) * size], step, count)
                with self._precision():
                    found = self.objective(batch)
                self.accelerator.backward(found)
                loss += float(found.detach())
        return loss

    def _precision(self) -> torch.autocast:
        return torch.autocast(
            self.teacher.target.decoder.device.type, torch.bfloat16, enabled=self.plan.bf16
        )

    def measure(self, progress: Progress) -> Progress:
        """Return the progress, with held-out figures if this step ends with a measurement."""
        if progress.step % self.plan.evaluate_every and progress.step < progress.steps:
            return progress
        together = self.plan.together(self.processes.world)
        with self._precision():
            found = evaluate(self.teacher, self.drafter, self.held, together, self.processes)
        if found is None:
            return progress
        length = tree_length(
            self.teacher, self.drafter, self.policy, self.costs, self.held, self.processes
        )
        return replace(progress, **asdict(found), tree_acceptance_length=length)

    def log(self, progress: Progress) -> None:
        """Send the progress to the trackers, and write it to the log if it has measurements."""
        figures = {k: v for k, v in asdict(progress).items() if isinstance(v, float)}
        depths = {
            f"acceptance_at_depth/{i}": rate
            for i, rate in enumerate(progress.acceptance_by_depth or (), 1)
        }
        lr = {"lr": self.optimizer.param_groups[0]["lr"]}
        self.accelerator.log(figures | depths | lr, step=progress.step)
        if progress.step % self.plan.evaluate_every == 0 or progress.step == progress.steps:
            with self.processes.share_errors():
                if self.processes.main:
                    append(self.out / resume.LOG_FILE, json.dumps(asdict(progress)) + "\n")

    @contextmanager
    def open_trackers(self) -> Iterator[None]:
        """Return a context in which the experiment trackers are active."""
        self.accelerator.init_trackers(
            "draftree", {k: v for k, v in self.said.items() if isinstance(v, str | int | float)}
        )
        try:
            yield
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def save(self, step: int) -> None:
        """Save the state from which an interrupted run can be resumed."""
        with self.processes.share_errors():
            if self.processes.main:
                resume.save(self.out, self.drafter, self.optimizer, step, self.clock.seconds)

    def keep(self, step: int) -> None:
        """Write an additional checkpoint with the weights after this step, in `step-N`."""
        with self.processes.share_errors():
            if self.processes.main:
                self.drafter.save(self.out / f"step-{step}")

    def finish(self) -> None:
        """Write the final checkpoint, and delete the state for resuming."""
        self.drafter.model.eval()
        with self.processes.share_errors():
            if self.processes.main:
                with fill_folder(self.out, last=CONFIG) as folder:
                    self.drafter.save(folder)
                (self.out / resume.STATE).unlink(missing_ok=True)


def split_samples(samples: Sequence[Sample], plan: TrainingPlan) -> tuple[list[int], list[int]]:
    """Return two lists: the indices of the samples for learning, and of the held-out samples.

    The samples of a row of the data are in the same list, unless the row has more samples than are
    held out, as a long text has.
    """
    most = min(64, math.ceil(plan.held_out * len(samples))) if plan.held_out else 0
    if len(samples) - most < 1:
        raise UserError(
            f"the data have {len(samples)} samples, of which {most} are held out; at least 1 must be left"
        )
    counts = Counter(sample.row for sample in samples)
    rows: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        divided = sample.row is None or counts[sample.row] > most
        rows.setdefault((None, i) if divided else sample.row, []).append(i)
    groups, learnt, held = list(rows.values()), list[int](), list[int]()
    for group in np.random.default_rng([plan.seed, 0]).permutation(len(groups)).tolist():
        side = held if len(held) + len(groups[group]) <= most else learnt
        side += groups[group]
    return learnt, held


def learning_rate_factor(plan: TrainingPlan, step: int, steps: int, over: float = 0.0) -> float:
    """Return the factor by which the plan's learning rate is multiplied at a step.

    It is the product of the warmup and the decay. The decay depends on the progress of the run,
    which is the larger of `step / steps` and `over`.

    Args:
        plan: the plan, which contains the warmup, the schedule and the floor of the decay.
        step: the index of the step, from 0.
        steps: the number of steps of the run.
        over: the share of the run's time limit that has passed.
    """
    warmup = plan.warmup if plan.warmup >= 1 else plan.warmup * steps
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    past = min(max(step / steps, over), 1.0)
    left = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * past)), "linear": 1 - past}
    decay = plan.floor + (1 - plan.floor) * left[plan.schedule]
    return warm * decay
