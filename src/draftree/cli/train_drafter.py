"""What `draftree train` does between its options and its result, in each process of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from draftree.boundary import files
from draftree.boundary.files import understood
from draftree.cli import inputs, terminal
from draftree.data.samples import Sample, read
from draftree.drafters.base import Stage, Trainable, TrainableMethod
from draftree.errors import UnknownName, UserError
from draftree.models.target import Target
from draftree.training import state, trainer
from draftree.training.processes import Processes, check_tracker, one_voice
from draftree.training.regenerate import Regeneration, regenerate

__all__ = ["Asked", "Regeneration", "one_voice", "planned", "run", "show"]


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        spec: of the method.
        knobs: of it, as key=value.
        data: the files to learn from.
        out: the folder of the checkpoint.
        plan: how it is trained.
        init_from: the folder whose weights it begins with.
        answers: how the target answers the data's prompts first; it does not by default.
        track: the name of a tracker.
    """

    spec: str
    knobs: Sequence[str]
    data: Sequence[Path]
    out: Path
    plan: trainer.Plan
    init_from: Path | None
    answers: Regeneration | None
    track: str

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the knobs that were set."""
        items = [*self.spec.partition(":")[2].split(","), *self.knobs]
        return tuple(item.partition("=")[0] for item in items if item)

    @property
    def about(self) -> dict[str, Any]:
        """What is written down of it beside the plan."""
        regenerated = None if self.answers is None else self.answers.tokens
        return {"init_from": None if self.init_from is None else str(self.init_from), "regenerated_tokens": regenerated}

    def check(self, processes: Processes, known: Mapping[str, str] = {}) -> None:
        """Refuses, before the target answers or is read, what the trainer would refuse after it.

        Args:
            processes: of the run.
            known: what else the run is, as far as that is known yet.

        Raises:
            UserError: a step's samples cannot be dealt out evenly, or `out` holds another run or a finished drafter.
        """
        self.plan.together(processes.world)
        said = {**asdict(self.plan), **self.about, **known}
        if not known:
            del said["max_tokens"]  # may still be cut to the target's context
        state.check(self.out, said)

    def fitted(self, context: int) -> Self:
        """The same for a target with so many positions, which no sample is longer than; a run begun before keeps its length.

        Args:
            context: the target's.
        """
        begun = state.before(self.out) or {}
        longest = self.plan.max_tokens
        if longest != begun.get("max_tokens"):
            longest = min(longest, context)
        answers = None if self.answers is None else replace(self.answers, max_tokens=longest)
        return replace(self, plan=replace(self.plan, max_tokens=longest), answers=answers)


def planned(stages: Sequence[Stage], given: Mapping[str, Any], out: Path, later: bool) -> trainer.Plan:
    """The plan of a run: what was given; for the rest what the interrupted run in `out` began with, or a stage's numbers.

    Args:
        stages: the method's.
        given: values of the plan, by their names.
        out: the folder of the run.
        later: whether it begins with a checkpoint's weights. Then it is the last stage by default, else the first.

    Raises:
        UserError: there is no such stage or it goes on from weights that are lacking, or a value is out of range.
    """
    begun, names = state.before(out), [stage.name for stage in stages]
    if begun is None:
        name = given.get("stage", names[-1 if later else 0])
        if name not in names:
            raise UnknownName("stage", name, names)
        if name != names[0] and not later:
            raise UserError(f"stage '{name}' goes on from the weights of '{names[0]}', allowed is it with --init-from")
        begun = {**asdict(stages[names.index(name)]), "stage": name}
    known = {f.name for f in fields(trainer.Plan)} - state.FREE
    with understood(f"'{out / state.PLAN}' is not what a run was asked for"):
        numbers = {k: v for k, v in begun.items() if k in known} | {"betas": tuple(begun["betas"])}
        return trainer.Plan(**numbers | dict(given))


def run(asked: Asked, target: str, device: str | None, dtype: str | None) -> trainer.Progress | None:
    """Trains; only the main process has something to tell at the end.

    Raises:
        UserError: something that was asked for does not exist or does not fit.
        KeyboardInterrupt: the run was interrupted.
    """
    method = inputs.trainable(asked.spec, asked.knobs)
    files.writable(asked.out, folder=True)
    check_tracker(asked.track)
    processes = Processes.on(device)
    with processes.alone(asked.out):
        return _run(asked, method, processes, target, device, dtype)


def _run(
    asked: Asked, method: TrainableMethod, processes: Processes, target: str, device: str | None, dtype: str | None
) -> trainer.Progress | None:
    with processes.agreed(), terminal.busy("loading"):
        asked.check(processes)
        model = Target.load(target, dtype, processes.device(device))
        asked = asked.fitted(model.decoder.context)
        torch.manual_seed(asked.plan.seed)  # of the weights it begins with
        if asked.init_from is None:
            drafter = method.fresh(model)
        else:
            drafter = state.begun(method, asked.given, asked.init_from, model)
        asked.check(processes, {"target": model.name, "drafter": drafter.described})
    samples = _samples(asked, model, processes)
    if asked.init_from is None:
        learnt = np.concatenate([s.tokens[s.learn] for s in samples])
        drafter.study(np.bincount(learnt, minlength=model.decoder.vocab))
    settled = drafter.settle([s.tokens for s in samples])
    for knob, number in settled.items():
        terminal.remark(f"{knob} is {number}, measured on what is learnt from")
    with processes.agreed():
        trainer.split(samples, asked.plan)  # refuses too few of them before the target reads them
    plan = asked.plan.parted(samples, processes.world)
    if asked.plan.cache_features:
        _cache(asked, model, drafter, samples, processes)
    if processes.main:
        terminal.remark(f"training by {terminal.plan_text(asdict(plan))}")
    with terminal.progress(f"train {asked.spec}", None) as tell:
        text = terminal.TrainingText()
        listen = lambda p: tell(p.step, text(p), p.steps)
        end = trainer.train(model, drafter, samples, plan, asked.out, listen, {**asked.about, **settled}, asked.track)
    return end if processes.main else None


def show(end: trainer.Progress, out: Path) -> None:
    """What a run came to, in a line."""
    terminal.output().print(f"{out}: {terminal.training_text(end)} after {end.steps} steps", soft_wrap=True, markup=False)


def _samples(asked: Asked, target: Target, processes: Processes) -> list[Sample]:
    data = asked.data
    if asked.answers is not None:
        with terminal.progress("regenerate", None) as tell:
            listen = lambda done, of: tell(done, of=of)
            data = [regenerate(target, data, asked.out, asked.answers, processes, listen)]
    with processes.agreed(), terminal.busy("reading"):
        return read(data, target.tokenizer, asked.plan.max_tokens)


def _cache(asked: Asked, target: Target, drafter: Trainable[Any], samples: Sequence[Sample], processes: Processes) -> None:
    """Caches features before the training, where it can be seen how far this is."""
    shards = trainer.cached(target, drafter, samples, asked.plan, asked.out)
    if size := shards.size:
        terminal.remark(terminal.features_text(len(samples), size, shards.folder.parent))
    with terminal.progress("cache features", None) as tell:
        shards.fill(processes, tell)
