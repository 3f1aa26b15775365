"""`draftree doctor`: finds faults of a drafter, or of the output."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from draftree.cli.console import emit, was_given
from draftree.cli.options import (
    AsJson,
    CostsFile,
    DrafterSpec,
    LoadingOptions,
    TargetName,
    dataclass_command,
)
from draftree.errors import UserError
from draftree.utils.validated_dataclass import knob


@dataclass(frozen=True)
class DoctorOptions:
    """Store the options of `draftree doctor`."""

    target: TargetName = "demo"
    drafter: DrafterSpec = None
    data: Path | None = knob(
        None,
        help="Texts or chats to measure on; by default the model's answers to the shipped prompts.",
    )
    lossless: bool = knob(False, help="Check that the output is the same as plain decoding's.")
    export: Path | None = knob(
        None,
        metavar="FOLDER",
        help="Check an exported drafter, without the engine that will run it.",
    )
    speed: bool = knob(
        False,
        help="Show this device's speed, and the acceptance length needed for a speed-up.",
    )
    exact: bool = knob(
        False, help="Show which layers keep logits bitwise the same, and what that costs."
    )
    policy: list[str] = knob(("pct",), help="With --lossless: a policy; may be repeated.")
    acceptor: list[str] = knob(
        (), help="With --lossless: an acceptor; may be repeated. By default all exact ones."
    )
    temperature: list[float] = knob(
        (0.0, 1.0), least=0, help="With --lossless: 0 for greedy decoding; may be repeated."
    )
    limit: int = knob(12, min=1, help="With --lossless: number of texts.")
    max_new_tokens: int = knob(
        48, min=1, help="With --lossless: maximum number of tokens of each text."
    )
    trials: int = knob(2000, min=100, help="With --lossless: tokens for each frequency test.")
    costs: CostsFile = None
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def examine_drafter(ctx: typer.Context, asked: DoctorOptions) -> None:
    """Say whether a drafter fits a model and is healthy, and what is likely wrong if it is not.

    The exit status is 1 if the verdict is bad.

    With --lossless, compare the output with plain decoding, token for token; acceptors that keep
    only the distribution are tested by frequencies. The exit status is 1 if the output is not
    lossless.

    With --export, check a folder that `draftree export` has written: every tensor, its numbers, and
    the target that it names. The exit status is 1 if an engine could not use it.

    With --speed, show in one screen what to expect on this device; no text is written.

    With --exact, show whether logits are bitwise the same in a tree as in plain decoding
    (--exactness bits), and what it costs.
    """
    modes = [f"--{mode}" for mode in ("lossless", "exact", "speed") if getattr(asked, mode)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} were given, allowed is one of them")
    if asked.export is not None:
        refuse(
            ctx,
            ("drafter", "data", "costs", "exact", "lossless", "speed", *LOSSLESS_OPTIONS),
            "without --export",
        )
        return examine_export(ctx, asked, asked.export)
    if asked.exact:
        refuse(ctx, ("drafter", "data", "costs", *LOSSLESS_OPTIONS), "without --exact")
        return examine_layers(asked)
    if asked.speed:
        refuse(ctx, ("data", "costs", *LOSSLESS_OPTIONS), "without --speed")
        return examine_speed(asked)
    if asked.lossless:
        return examine_output(asked)
    refuse(ctx, LOSSLESS_OPTIONS, "with --lossless")
    from draftree.cli import arguments, doctor_output, terminal
    from draftree.costs.cost_table import CostTable
    from draftree.doctor import drafter_report
    from draftree.evaluation import teacher_forcing
    from draftree.evaluation.time_estimate import batched_seconds
    from draftree.measure_costs import measure, reliable_costs

    fixed = arguments.fixed_costs(asked.costs)
    spec, target, drafter = arguments.open_drafter(asked.drafter, asked.target, **asked.loading)
    # What is written is then read again, a step of the drive after the other, and once more for
    # each suspected fault.
    seconds = 2 * batched_seconds(
        target,
        drafter,
        teacher_forcing.DEFAULT_TEXTS,
        teacher_forcing.DEFAULT_TOKENS,
        teacher_forcing.DEFAULT_TEXTS,
    )
    terminal.forecast(
        f"{teacher_forcing.DEFAULT_TEXTS} answers of {teacher_forcing.DEFAULT_TOKENS} tokens, and their examination",
        seconds,
    )
    with terminal.busy("letting the target answer some prompts"):
        texts = (
            teacher_forcing.suite_answers(target)
            if asked.data is None
            else teacher_forcing.read_texts(target, asked.data)
        )
    with terminal.busy("measuring the cost of a step") as tell:
        costs = (fixed or reliable_costs(target, drafter, tell)).at(context=0, rows=1)
    with terminal.progress("doctor", None) as tell:
        again = (
            None
            if fixed
            else lambda: CostTable(measure(target, drafter, 1, tell)).at(context=0, rows=1)
        )
        report = drafter_report.examine(target, drafter, texts, costs, tell, again)
    if asked.as_json:
        emit(report.as_json())
    else:
        doctor_output.show_report(terminal.output(), f"{spec} for {asked.target}", report)
    if report.bad:
        raise typer.Exit(1)


LOSSLESS_OPTIONS = ("policy", "acceptor", "temperature", "limit", "max_new_tokens", "trials")
"""Names of the options that are allowed only with `--lossless`."""


def refuse(ctx: typer.Context, options: Sequence[str], where: str) -> None:
    """Raise an error for options that are not allowed in this mode.

    Raises:
        UserError: one of the options was given; the message says `where` it is allowed.
    """
    for option in options:
        if was_given(ctx, option):
            raise UserError(f"--{option.replace('_', '-')} was given, allowed only {where}")


def examine_export(ctx: typer.Context, asked: DoctorOptions, folder: Path) -> None:
    """Check an exported drafter; exit with status 1 if an engine could not use it."""
    from draftree.cli import terminal
    from draftree.doctor import export_check

    report = export_check.examine(folder, asked.target if was_given(ctx, "target") else None)
    if asked.as_json:
        emit(report.as_json())
    else:
        verdict = "an engine can use it" if not report.faults else "an engine cannot use it"
        terminal.line(
            f"{folder}: '{report.drafter}' as {report.format}, {report.tensors} tensors: {verdict}"
        )
        for told in (*report.faults, *report.remarks):
            terminal.line(f"  {told}")
    if report.faults:
        raise typer.Exit(1)


def examine_layers(asked: DoctorOptions) -> None:
    """Examine and print whether a target's logits are bitwise reproducible, layer by layer."""
    from draftree.cli import arguments, doctor_output, terminal
    from draftree.doctor import determinism
    from draftree.target.target import Target

    arguments.quiet()
    with terminal.busy("loading") as tell:
        usual = Target.load(
            asked.target, **{**asked.loading, "exactness": None}
        ).decoder.dtype  # it may depend on bits
        target = Target.load(asked.target, **{**asked.loading, "dtype": usual, "exactness": "ties"})
        report = determinism.examine(target, tell)
    if asked.as_json:
        emit(report.as_json())
    else:
        doctor_output.show_exact(
            terminal.output(),
            f"{asked.target} in {target.decoder.dtype}".replace("torch.", ""),
            report,
        )


def examine_speed(asked: DoctorOptions) -> None:
    """Estimate and print the speed of a drafter and a policy on this device."""
    from draftree.cli import arguments, doctor_output, terminal
    from draftree.doctor import expected_speed
    from draftree.engine import usual_policy

    spec, target, drafter = arguments.open_drafter(asked.drafter, asked.target, **asked.loading)
    policy = usual_policy(asked.target, asked.drafter and spec, asked.loading["device"])
    report = expected_speed.examine(target, drafter, policy)
    if asked.as_json:
        emit(report.as_json())
    else:
        doctor_output.show_expected_speed(terminal.output(), f"{spec} for {asked.target}", report)


def examine_output(asked: DoctorOptions) -> None:
    """Compare the output with plain decoding's; exit with status 1 if it is not lossless."""
    from draftree.cli import arguments, doctor_output, terminal
    from draftree.doctor import lossless
    from draftree.doctor.finding import nan_to_null
    from draftree.evaluation.teacher_forcing import read_prompts
    from draftree.evaluation.time_estimate import batched_seconds

    ways = lossless.cases(asked.policy, asked.acceptor, asked.temperature)
    costs, tokens = arguments.fixed_costs(asked.costs), asked.max_new_tokens
    spec, target, drafter = arguments.open_drafter(asked.drafter, asked.target, **asked.loading)
    texts = read_prompts(target, asked.data, asked.limit, tokens)
    seconds = batched_seconds(target, drafter, len(texts) * (len(ways) + 1), tokens)
    terminal.forecast(f"{len(texts)} texts in {len(ways)} ways, and plain decoding", seconds)
    with terminal.progress("doctor --lossless", None) as tell:
        report = lossless.examine(target, drafter, texts, ways, costs, tell, tokens, asked.trials)
    if asked.as_json:
        emit(nan_to_null(report))
    else:
        doctor_output.show_lossless(terminal.output(), f"{spec} for {asked.target}", report)
    if not report["lossless"]:
        raise typer.Exit(1)
