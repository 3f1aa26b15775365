"""`draftree doctor`: finds what is wrong with a drafter, or with what is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from draftree.cli.console import emit, given
from draftree.cli.options import ALL, GREEDY_AND_1, PCT, AsJson, CostsFile, Device, DrafterSpec, DType, TargetName
from draftree.errors import UserError


def examine_drafter(
    ctx: typer.Context,
    target: TargetName = "demo",
    drafter: DrafterSpec = None,
    data: Annotated[
        Path | None, typer.Option(help="Texts or chats to measure on; by default the target's answers to the shipped prompts.")
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Instead, compare what is written with what the target writes by itself.")
    ] = False,
    policy: Annotated[list[str], typer.Option(help="Of --lossless: a spec; repeat it for several.")] = PCT,
    acceptor: Annotated[
        list[str], typer.Option(help="Of --lossless: a spec; repeat it for several. By default all that are exact.")
    ] = ALL,
    temperature: Annotated[
        list[float], typer.Option(help="Of --lossless: 0 for greedy decoding; repeat it for several.")
    ] = GREEDY_AND_1,
    limit: Annotated[int, typer.Option(min=1, help="Of --lossless: how many texts.")] = 12,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Of --lossless: how many tokens of each may be written.")
    ] = 48,
    trials: Annotated[int, typer.Option(help="Of --lossless: draws behind a root, for the tests of frequencies.")] = 2000,
    costs: CostsFile = None,
    device: Device = None,
    dtype: DType = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a drafter fits a target and is healthy, and what is likely wrong where it is not.

    With --lossless, say whether the output is the target's own: texts beside plain decoding's, token for token, and for
    rules that promise no more than the distribution a test of frequencies. The exit status is 1 where it is not, and where
    no rule that was asked for promises it; beside others a rule that is lossy by design is only told as such.
    """
    if lossless:
        return examine_output(ctx.params)
    for option in ("policy", "acceptor", "temperature", "limit", "max_new_tokens", "trials"):
        if given(ctx, option):
            raise UserError(f"--{option.replace('_', '-')} was given, allowed is it only with --lossless")
    from draftree.cli import inputs, terminal
    from draftree.doctor import fit
    from draftree.evaluation import driven
    from draftree.models.target import Target
    from draftree.registry import build
    from draftree.timing import measured

    fixed, drafter = inputs.fixed_costs(costs), inputs.drafter(drafter, target)
    method = build("drafter", drafter)
    inputs.quiet()
    with terminal.busy("loading"):
        model = Target.load(target, dtype, device)
        opened = method.open(model)
    with terminal.busy("letting the target answer some prompts"):
        texts = driven.answers(model) if data is None else driven.read(model, data)
    with terminal.busy("measuring what a step costs") as say:
        known = (fixed or measured(model, opened, tell=say)).at(context=0, rows=1)
    with terminal.progress("doctor", None) as tell:
        report = fit.examine(model, opened, texts, known, tell)
    if as_json:
        emit(report.as_json())
    else:
        terminal.show_report(terminal.output(), f"{drafter} for {target}", report)


def examine_output(given: Mapping[str, Any]) -> None:
    """The doctor command with --lossless, by its options."""
    from draftree.cli import inputs, terminal
    from draftree.doctor import lossless
    from draftree.doctor.cases import cases
    from draftree.engine import UNIT
    from draftree.models.target import Target
    from draftree.registry import build
    from draftree.timing import measured

    plan = lossless.Extent(given["max_new_tokens"], trials=given["trials"])
    chosen = cases(given["policy"], given["acceptor"], given["temperature"])
    fixed, drafter = inputs.fixed_costs(given["costs"]), inputs.drafter(given["drafter"], given["target"])
    method = build("drafter", drafter)
    inputs.quiet()
    with terminal.busy("loading") as say:
        model = Target.load(given["target"], given["dtype"], given["device"])
        opened = method.open(model)
        prompts = lossless.prompts(model, given["data"], given["limit"], plan.max_new_tokens)
        if fixed is None and any(c.grown.reads_costs for c in chosen):
            fixed = measured(model, opened, tell=say)
    with terminal.progress("doctor --lossless", None) as tell:
        report = lossless.examine(model, opened, prompts, chosen, plan, fixed or UNIT, tell)
    if given["as_json"]:
        emit(report.as_json())
    else:
        terminal.show_lossless(terminal.output(), f"{drafter} for {given['target']}", report)
    if not report.lossless:
        raise typer.Exit(1)
