"""`draftree doctor`: finds faults of a drafter, or of the output."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from draftree.boundary.knobs import knob
from draftree.cli.console import emit, given
from draftree.cli.options import AsJson, CostsFile, DrafterSpec, LoadingOptions, TargetName, asks_for
from draftree.errors import UserError


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `draftree doctor`."""

    target: TargetName = "demo"
    drafter: DrafterSpec = None
    data: Path | None = knob(None, help="Texts or chats to measure on; by default the target's answers to the shipped prompts.")
    lossless: bool = knob(False, help="Instead, compare what is written with what the target writes by itself.")
    exact: bool = knob(
        False, help="Instead, say for each kind of the target's layers what keeps a token's bits, and its price."
    )
    policy: list[str] = knob(("pct",), help="Of --lossless: a spec; repeat it for several.")
    acceptor: list[str] = knob((), help="Of --lossless: a spec; repeat it for several. By default all that are exact.")
    temperature: list[float] = knob((0.0, 1.0), least=0, help="Of --lossless: 0 for greedy decoding; repeat it for several.")
    limit: int = knob(12, min=1, help="Of --lossless: how many texts.")
    max_new_tokens: int = knob(48, min=1, help="Of --lossless: how many tokens of each may be written.")
    trials: int = knob(2000, least=1, help="Of --lossless: draws behind a root, for the tests of frequencies.")
    costs: CostsFile = None
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@asks_for
def examine_drafter(ctx: typer.Context, asked: DoctorOptions) -> None:
    """Say whether a drafter fits a target and is healthy, and what is likely wrong where it is not.

    The exit status is 1 where the verdict is bad.

    With --lossless, say whether the output is the target's own: texts beside plain decoding's, token for token, and for
    rules that promise no more than the distribution a test of frequencies. The exit status is 1 where it is not, and where
    no rule that was asked for promises it; beside others a rule that is lossy by design is only told as such.

    With --exact, say whether a token's logits have the same bits in a tree as in a step of its own (--exactness bits), what is
    done for it, and what it costs on this machine.
    """
    if asked.lossless and asked.exact:
        raise UserError("--lossless and --exact were given, allowed is one of them")
    if asked.exact:
        refuse(ctx, ("drafter", "data", "costs", *LOSSLESS), "without --exact")
        return examine_layers(asked)
    if asked.lossless:
        return examine_output(asked)
    refuse(ctx, LOSSLESS, "with --lossless")
    from draftree.cli import inputs, terminal
    from draftree.doctor import fit
    from draftree.evaluation import driven
    from draftree.measure_costs import settled_costs

    fixed = inputs.fixed_costs(asked.costs)
    spec, target, drafter = inputs.opened(asked.drafter, asked.target, **asked.loading)
    with terminal.busy("letting the target answer some prompts"):
        texts = driven.answers(target) if asked.data is None else driven.read(target, asked.data)
    with terminal.busy("measuring what a step costs") as tell:
        costs = (fixed or settled_costs(target, drafter, tell)).at(context=0, rows=1)
    with terminal.progress("doctor", None) as tell:
        report = fit.examine(target, drafter, texts, costs, tell)
    if asked.as_json:
        emit(report.as_json())
    else:
        terminal.show_report(terminal.output(), f"{spec} for {asked.target}", report)
    if report.bad:
        raise typer.Exit(1)


LOSSLESS = ("policy", "acceptor", "temperature", "limit", "max_new_tokens", "trials")
"""Options of --lossless alone."""


def refuse(ctx: typer.Context, options: Sequence[str], where: str) -> None:
    """Refuses options that mean nothing here.

    Raises:
        UserError: one was given.
    """
    for option in options:
        if given(ctx, option):
            raise UserError(f"--{option.replace('_', '-')} was given, allowed is it only {where}")


def examine_layers(asked: DoctorOptions) -> None:
    """Says what keeps a token's bits in a target."""
    from draftree.cli import inputs, terminal
    from draftree.doctor import exact
    from draftree.models.target import Target

    inputs.quiet()
    with terminal.busy("loading") as tell:
        usual = Target.load(asked.target, **{**asked.loading, "exactness": None}).decoder.dtype  # it may depend on bits
        target = Target.load(asked.target, **{**asked.loading, "dtype": usual, "exactness": "ties"})
        report = exact.examine(target, tell)
    if asked.as_json:
        emit(report.as_json())
    else:
        terminal.show_exact(terminal.output(), f"{asked.target} in {target.decoder.dtype}".replace("torch.", ""), report)


def examine_output(asked: DoctorOptions) -> None:
    """Compares the output with plain decoding's; ends the program with exit status 1 where it is not the target's own."""
    from draftree.cli import inputs, terminal
    from draftree.costs.curves import UNIT
    from draftree.doctor import lossless
    from draftree.doctor.cases import cases
    from draftree.measure_costs import settled_costs

    plan = lossless.Extent(asked.max_new_tokens, trials=asked.trials)
    chosen, fixed = cases(asked.policy, asked.acceptor, asked.temperature), inputs.fixed_costs(asked.costs)
    spec, target, drafter = inputs.opened(asked.drafter, asked.target, **asked.loading)
    prompts = lossless.prompts(target, asked.data, asked.limit, plan.max_new_tokens)
    if fixed is None and any(c.grown.reads_costs for c in chosen):
        with terminal.busy("measuring what a step costs") as tell:
            fixed = settled_costs(target, drafter, tell)
    with terminal.progress("doctor --lossless", None) as tell:
        report = lossless.examine(target, drafter, prompts, chosen, plan, fixed or UNIT, tell)
    if asked.as_json:
        emit(report.as_json())
    else:
        terminal.show_lossless(terminal.output(), f"{spec} for {asked.target}", report)
    if not report.lossless:
        raise typer.Exit(1)
