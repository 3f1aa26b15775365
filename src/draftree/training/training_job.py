"""The training of a drafter from its data to its checkpoint, in each process."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from rich.filesize import decimal
from typing_extensions import override

from draftree.data.decontamination import Excluded
from draftree.data.readers import Skipped
from draftree.data.samples import Sample, read_samples
from draftree.drafters.base import Stage, TrainableMethod, plan_text
from draftree.engine import target_of
from draftree.errors import UnknownName, UserError
from draftree.evaluation.time_estimate import training_seconds
from draftree.registry import build
from draftree.target.target import Target
from draftree.training import resume, trainer
from draftree.training.answer_source import Local
from draftree.training.base import LOG, Fitted, Job, items
from draftree.training.distributed import Processes, check_tracker
from draftree.training.feature_cache import Shards
from draftree.training.generation_run import GenerationRun
from draftree.training.openai_client import Remote, Server
from draftree.training.regenerate import Regeneration, regenerate
from draftree.training.synthesize import Synthesis, synthesize
from draftree.utils.files import check_writable
from draftree.utils.progress_callback import SILENT_SECONDS, Tell, duration, ignore_progress


def make_plan(
    stages: Sequence[Stage], given: Mapping[str, Any], out: Path, later: bool
) -> trainer.TrainingPlan:
    """Return the options of a run, with defaults for those that were not given.

    The defaults are the options of the interrupted run in `out`, or those of a training stage.

    Args:
        stages: training stages of the method.
        given: given options by name.
        out: folder of the run.
        later: whether the run starts from a checkpoint's weights. The default stage is then the
            last one, otherwise the first.

    Raises:
        UserError: the stage does not exist or needs a checkpoint to start from, or a value is out
            of its range.
    """
    begun, names = resume.read_plan(out), [stage.name for stage in stages]
    if begun is None:
        name = given.get("stage", names[-1 if later else 0])
        if name not in names:
            raise UnknownName("stage", name, names)
        if name != names[0] and not later:
            raise UserError(
                f"stage '{name}' goes on from the weights of '{names[0]}', allowed only with --init-from"
            )
        begun = {**asdict(stages[names.index(name)]), "stage": name}
    known = {f.name for f in fields(trainer.TrainingPlan)} - resume.FREE
    try:
        numbers = {k: v for k, v in begun.items() if k in known} | {"betas": tuple(begun["betas"])}
        trainer.TrainingPlan(**numbers)
    except (UserError, TypeError) as error:
        raise UserError(
            f"'{out / resume.PLAN}' does not hold the options of a run: {error}"
        ) from error
    return trainer.TrainingPlan(**numbers | dict(given))


def format_progress(progress: trainer.Progress, measured: trainer.Progress) -> str:
    """Return one line with a run's current loss and its last held-out figures."""
    shown = [f"loss {progress.loss:.3f}"]
    if measured.held_out_loss is not None:
        names = {
            "held-out loss": "held_out_loss",
            "overlap": "overlap",
            "acceptance length": "acceptance_length",
        }
        shown += [f"{name} {getattr(measured, attribute):.3f}" for name, attribute in names.items()]
        if measured.tree_acceptance_length is not None:
            shown.append(f"of trees {measured.tree_acceptance_length:.3f}")
        shown.append(
            "by depth "
            + " ".join(
                f"{rate:.2f}" for rate in (measured.acceptance_by_depth or ())[:SHOWN_DEPTHS]
            )
        )
    return ", ".join(shown)


SHOWN_DEPTHS = 5
WRITING: Mapping[str, Sequence[str]] = {
    "regenerate": ("tokens", "batch", "temperature", "sampled"),
    "synthesize": ("temperature", "top_p", "tokens", "system"),
    "server": ("model", "parallel", "check", "agreement"),
}
"""Options for generating the training texts, by the prefix of their names on the command line."""


def summarise(spec: str, end: trainer.Progress) -> Fitted:
    """Return the result of a training run of the drafter `spec`."""
    figures = {k: None if v != v else v for k, v in asdict(end).items()}  # no NaN in JSON
    return Fitted(
        {"drafter": spec} | figures, [f"{format_progress(end, end)} after {end.steps} steps"]
    )


@dataclass(frozen=True)
class Training(Job):
    """Train the weights of a drafter.

    Attributes:
        method: method of the drafter, with its options.
        numbers: given options of the training by name; for the others see `make_plan`.
        init_from: folder of the checkpoint from whose weights training starts; None for fresh
            weights.
        answers: options for generating answers to prompts.
        regenerates: whether the answers in the data are first replaced by the target's.
        synthesis: options for questions that the target makes up and answers; None for no such
            questions.
        exclude: files of prompts that must not be learnt.
        server: server of the same model that generates texts instead of the local target; None for
            none.
        track: name of an experiment tracker; empty for none.
        spec: spec of the drafter.
        skip_bad_rows: whether unreadable rows of the data are left out instead of causing an error.
    """

    options: ClassVar[frozenset[str]] = frozenset(
        {"init_from", "regenerate", "synthesize", "server", "exclude", "track", "skip_bad_rows"}
        | {*(f.name for f in fields(trainer.TrainingPlan))}
        | {f"{group}_{name}" for group, names in WRITING.items() for name in names}
    )

    method: TrainableMethod
    numbers: Mapping[str, Any] = field(default_factory=dict)
    init_from: Path | None = None
    answers: Regeneration = field(default_factory=Regeneration)
    regenerates: bool = False
    synthesis: Synthesis | None = None
    exclude: tuple[Path, ...] = ()
    server: Server | None = None
    track: str = ""
    spec: str = ""
    skip_bad_rows: bool = False

    @classmethod
    @override
    def of(cls, spec: str, knobs: Sequence[str], options: Mapping[str, Any]) -> Self:
        name, given = spec.partition(":")[0], items(spec, knobs)
        if any(item.partition("=")[0] == "checkpoint" for item in given):
            raise UserError(
                f"'{name}' was given a checkpoint, but training starts from the target's own weights"
            )
        numbers = {
            f.name: options[f.name] for f in fields(trainer.TrainingPlan) if f.name in options
        }
        how = {
            group: {n: options[f"{group}_{n}"] for n in names if f"{group}_{n}" in options}
            for group, names in WRITING.items()
        }
        count = options.get("synthesize")
        url = options.get("server")
        again = bool(options.get("regenerate"))
        if (url is None) != ("model" not in how["server"]):
            raise UserError(
                "--server and --server-model were not both given, allowed are both or none"
            )
        if url is not None and count is None and not again:
            raise UserError("--server was given, allowed only with --regenerate or --synthesize")
        return cls(
            build("drafter", f"{name}:{','.join(given)}"),
            numbers,
            options.get("init_from"),
            Regeneration(**how["regenerate"]),
            again,
            None if count is None else Synthesis(count, **how["synthesize"]),
            tuple(options.get("exclude", ())),
            None if url is None else Server(url, **how["server"]),
            options.get("track", ""),
            spec,
            bool(options.get("skip_bad_rows")),
        )

    @property
    def about(self) -> dict[str, Any]:
        """Return the facts about the run, besides its options, that are stored with it."""
        return {
            "init_from": None if self.init_from is None else str(self.init_from),
            "regenerated_tokens": self.answers.tokens
            if self.regenerates or self.synthesis
            else None,
            "synthesized": None if self.synthesis is None else self.synthesis.count,
            "server_model": None if self.server is None else self.server.model,
            "exclude": [str(path) for path in self.exclude] or None,
        }

    @override
    def fit(
        self,
        target: str | Target,
        data: Sequence[Path],
        out: Path,
        tell: Tell = ignore_progress,
        **how: Any,
    ) -> Fitted:
        plan = make_plan(self.method.stages, self.numbers, out, self.init_from is not None)
        build("policy", plan.policy)  # refused before anything is loaded
        check_writable(out, folder=True)
        check_tracker(self.track)
        processes = Processes.on(how.get("device"))
        with processes.alone(out):
            with processes.share_errors():
                tell(0, "loading")
                # Refused before the target answers or is read, and not by the trainer after it; its
                # context may cut max_tokens.
                plan.together(processes.world)
                resume.is_resumable(
                    out, {k: v for k, v in (asdict(plan) | self.about).items() if k != "max_tokens"}
                )
                device = (
                    processes.device(how.get("device"))
                    if isinstance(target, str)
                    else how.get("device")
                )
                model = target_of(target, **how | {"device": device})
                plan = fit_to_context(plan, out, model.decoder.context)
                torch.manual_seed(plan.seed)  # of the weights it begins with
                begun = self.init_from and resume.start_from(self.method, self.init_from, model)
                drafter = begun or self.method.fresh(model)
                resume.is_resumable(
                    out,
                    asdict(plan)
                    | self.about
                    | {"target": model.name, "drafter": drafter.description},
                )
            samples = self._samples(model, data, out, plan, processes, tell)
            if self.init_from is None:
                learnt = np.concatenate([s.tokens[s.learn] for s in samples])
                drafter.fit_vocabulary(np.bincount(learnt, minlength=model.decoder.vocab))
            settled = drafter.resolve_auto([s.tokens for s in samples])
            for knob, number in settled.items():
                LOG.info("%s is %s, measured on the training data", knob, number)
            with processes.share_errors():
                trainer.split_samples(
                    samples, plan
                )  # refuses too few of them before the target reads them
            plan = plan.with_accumulation(samples, processes.world, model.decoder.device)
            tokens = sum(len(s.tokens) for s in samples)
            seconds = (
                training_seconds(model, drafter, tokens, plan.epochs, plan.cache_features)
                / processes.world
            )
            told = f"{len(samples):,} samples of {tokens:,} tokens, {plan.epochs:g} epochs"
            if seconds >= SILENT_SECONDS:
                LOG.info("%s: about %s estimated from the cost of passes", told, duration(seconds))
            if plan.cache_features:
                home = Path(plan.features or out / "features")
                shards = Shards.at(home, model, samples, drafter.needs)
                if size := shards.size:
                    LOG.info(
                        "features of %s texts take %s in %s",
                        f"{len(samples):,}",
                        decimal(size),
                        home,
                    )
                shards.fill(
                    processes, tell
                )  # before the training, where it can be seen how far this is
            LOG.info("training by %s", plan_text(asdict(plan)))
            measured = [trainer.Progress(0, 0, math.nan)]

            def listen(progress: trainer.Progress) -> None:
                measured[:] = [progress] if progress.held_out_loss is not None else measured
                tell(progress.step, format_progress(progress, measured[0]), progress.steps)

            end = trainer.train(
                model, drafter, samples, plan, out, listen, {**self.about, **settled}, self.track
            )
        return summarise(self.spec, end)

    def _samples(
        self,
        target: Target,
        data: Sequence[Path],
        out: Path,
        plan: trainer.TrainingPlan,
        processes: Processes,
        tell: Tell,
    ) -> list[Sample]:
        how = replace(self.answers, max_tokens=plan.max_tokens, seed=plan.seed)
        unread: Callable[[], Skipped | None] = Skipped if self.skip_bad_rows else lambda: None
        with processes.share_errors():
            excluded = Excluded.of(self.exclude)
            if excluded.runs and data:
                left_out = excluded.num_excluded(data, unread())
                LOG.info(
                    "%s rows of the data are left out, because their prompts are excluded",
                    f"{left_out:,}",
                )
        author = Local(target, how.batch) if self.server is None else Remote(self.server, target)
        run = GenerationRun(processes, tell, author, excluded)
        asked = [*data] if self.regenerates else []
        if self.synthesis is not None:
            made_up = replace(self.synthesis, seed=plan.seed)
            asked.append(synthesize(target, made_up, out, run, data, unread()))
        skipped = unread()  # those of the last reading of the data, whatever was looked for before
        if asked:
            written = regenerate(target, asked, out, how, run, skipped)
            data = [written] if self.regenerates else [*data, written]
        with processes.share_errors():
            tell(0, "reading")
            samples = read_samples(
                data, target.tokenizer, plan.max_tokens, excluded, target.decoder.vocab, skipped
            )
            if skipped and skipped.count:
                LOG.info("%s", skipped)
            return samples


def fit_to_context(plan: trainer.TrainingPlan, out: Path, context: int) -> trainer.TrainingPlan:
    """Return the plan with `max_tokens` limited to the target's context.

    An interrupted run in `out` keeps its value.
    """
    begun = resume.read_plan(out) or {}
    return (
        plan
        if plan.max_tokens == begun.get("max_tokens")
        else replace(plan, max_tokens=min(plan.max_tokens, context))
    )
