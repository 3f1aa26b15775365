"""`draftree advise`: one short run, one verdict: whether to speculate, and how."""

from dataclasses import dataclass

import typer

from draftree.cli.console import NOTHING_KEPT, emit, interruptible
from draftree.cli.options import AsJson, LoadingOptions, Seed, TargetName, dataclass_command
from draftree.utils.validated_dataclass import knob


@dataclass(frozen=True)
class AdviseOptions:
    """Store the options of `draftree advise`."""

    target: TargetName = "demo"
    data: str = knob("demo", help="Prompts like yours: a file, or a shipped suite.")
    drafter: list[str] = knob(
        (), help="A drafter to try; may be repeated. By default the one of generate."
    )
    limit: int = knob(16, min=4, help="Number of prompts, spread evenly over the file.")
    max_new_tokens: int = knob(64, min=2, help="Maximum number of new tokens for each prompt.")
    seed: Seed = 0
    loading: LoadingOptions = knob(None)
    as_json: AsJson = False


@dataclass_command
def advise(ctx: typer.Context, asked: AdviseOptions) -> None:
    """Say whether speculative decoding pays off on this machine for these prompts, and with which drafter and policy."""
    from draftree.cli import arguments, terminal
    from draftree.engine import usual_drafter, usual_policy
    from draftree.evaluation import advice, suites
    from draftree.evaluation.bench import with_fixed_costs
    from draftree.evaluation.grid import assemble, choose_requests
    from draftree.evaluation.teacher_forcing import take_evenly
    from draftree.evaluation.time_estimate import plain_seconds
    from draftree.target.target import Target

    suite = suites.load(asked.data)
    usual = usual_drafter(asked.target)[0], usual_policy(asked.target)
    named = [arguments.drafter(spec, asked.target) for spec in asked.drafter]
    pairs = advice.candidate_pairings(named, usual, bool(named))
    arguments.quiet()
    with terminal.busy("loading"):
        engines = assemble(lambda: Target.load(asked.target, **asked.loading), pairs, None)
        requests, _ = choose_requests(
            suite.prompts, next(iter(engines.values())), asked.max_new_tokens, None
        )
    with terminal.busy("measuring the cost of a step") as tell:
        engines = with_fixed_costs(engines, tell)
    several, some = take_evenly(requests, asked.limit), next(iter(engines.values()))
    # One half is written once and replayed by every pairing, the other half is written twice.
    terminal.forecast(
        f"{len(several)} prompts", 1.5 * plain_seconds(some.target, some.drafter, several)
    )
    with terminal.progress("advise", len(several)) as advance, interruptible(NOTHING_KEPT):
        verdict = advice.advise(engines, several, asked.seed, advance)
    if asked.as_json:
        emit(verdict.as_json())
        return
    rows = [
        {
            "drafter": d,
            "policy": p,
            "τ": f"{r['acceptance_length']:.2f}",
            "counted speed-up": f"{r['counted_speedup']:.2f}",
        }
        for (d, p), r in sorted(
            verdict.counted.items(), key=lambda found: -found[1]["counted_speedup"]
        )
    ]
    half = next(iter(verdict.counted.values()))["prompts"]
    terminal.output().print(
        terminal.table(f"counted on {half} prompts of {suite.name}, to choose a combination", rows)
    )
    terminal.line(advice.format_verdict(verdict, asked.target))
