"""Replay the tables of the papers with a target's drafters, and judge each claim.

    python benchmarks/paper_tables.py --target demo --paper EDD --table 1 --out tables.json
    python benchmarks/paper_tables.py --target demo --result replayed.json --as rest=rest:datastore=FOLDER

Of each claim the paper's figure is shown beside ours, with the verdict: holds, ties or fails.
`--result` judges saved results and runs nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from common.command_line import run
from draftree.cli.console import emit
from draftree.cli.options import AsJson, dataclass_command
from draftree.cli.replay import ReplayOptions, run_replay
from draftree.errors import UserError
from draftree.utils.validated_dataclass import knob

if TYPE_CHECKING:
    from common.paper_claims import Claim
    from draftree.evaluation.bench import Bench
    from draftree.evaluation.bootstrap import ResultRow


@dataclass(frozen=True)
class TablesOptions(ReplayOptions):
    """Store the options of the script: those of `draftree replay`, and the chosen claims."""

    out: Path = knob(
        Path("tables.json"),
        written=(),
        short="-o",
        help="Where the result is saved, as JSON, one file for each temperature beside it.",
    )
    paper: list[str] = knob(
        (),
        help="Only papers whose name contains this: EDD, EAGLE, GLIDE, C2T, ADED; may be repeated.",
    )
    table: list[str] = knob(
        (), help="Only this table or figure of them: 2, 'Fig. 5'; may be repeated."
    )
    named: list[str] = knob(
        (),
        flag="--as",
        metavar="NAME=SPEC",
        help="The drafter or policy that stands for the papers' NAME; may be repeated.",
    )
    result: list[Path] = knob(
        (), help="Read what `bench` or `replay` saved, and run nothing; may be repeated."
    )
    as_json: AsJson = False


@dataclass_command
def tables(ctx: typer.Context, asked: TablesOptions) -> None:
    """Replay the papers' tables with a target's drafters, and say of each claim whether it holds, ties or fails."""
    from common import paper_claims, paper_recipes
    from draftree.cli import terminal
    from draftree.evaluation import result_rows
    from draftree.utils.files import write_text

    chosen = paper_recipes.select_claims(asked.paper, asked.table)
    if not chosen and asked.table and (others := paper_recipes.select_claims(asked.paper)):
        raise UserError(
            f"--table is {', '.join(asked.table)}, allowed are {', '.join(dict.fromkeys(c.table for c in others))}"
        )
    if not chosen:
        there = ", ".join(dict.fromkeys(c.paper for c in paper_recipes.CLAIMS))
        raise UserError(f"no paper is named like {' or '.join(asked.paper)}; there are {there}")
    if asked.drafter or asked.pair:
        raise UserError(
            "tables were given --drafter or --pair, but the recipes say what is run: --as NAME=SPEC names a drafter"
        )
    names, missing = part_specs(chosen, asked)
    results = [result_rows.read_result(path) for path in asked.result]
    if not results:
        for temperature in sorted({c.temperature for c in chosen if c.mine}):
            able = [
                c for c in chosen if c.temperature == temperature and not c.parts & missing.keys()
            ]
            pairs = list(
                dict.fromkeys(paper_claims.fill_pairing(p, names) for c in able for p in c.pairings)
            )
            if pairs:
                path = asked.out.with_name(f"{asked.out.stem}.t{temperature:g}.json")
                now = replace(asked, pair=pairs, temperature=[temperature], out=path)
                result, work = run_replay(ctx, now)
                drafters = {
                    paper_claims.fill_pairing(name, names)
                    for c in able
                    if c.by == "places"
                    for name in c.parts
                }
                results.append(result | ({"places": places(work, drafters)} if drafters else {}))
                result_rows.save(results[-1], path)
    with result_rows.as_result_error(*asked.result):
        found = paper_claims.judge_claims(chosen, results, names, missing)
    rows = [
        asdict(j.claim)
        | {"verdict": j.verdict, "τ": j.taus, "ratio": j.ratio and asdict(j.ratio), "why": j.why}
        for j in found
    ]
    write_text(
        asked.out,
        json.dumps({"claims": rows, "drafters": names}, indent=1, ensure_ascii=False) + "\n",
    )
    if asked.as_json:
        emit({"claims": rows, "drafters": names})
        return
    terminal.output().print(
        terminal.table(f"the papers' claims with {asked.target}", [j.cells() for j in found])
    )
    terminal.line(paper_claims.summary(found))


def places(work: "Bench", drafters: set[str]) -> "list[ResultRow]":
    """Return rows with figures of the candidates of some drafters, in the texts of a replay."""
    from common.drafter_calibration import CandidateTrace, group_figures
    from draftree.cli import terminal

    assert work.recordings is not None
    temperature, rows = next(c.temperature for c in work.cells), list["ResultRow"]()
    with terminal.busy("looking at candidates along the texts"):
        for spec, drafter in {
            d: e.drafter for (d, _), e in work.engines.items() if d in drafters
        }.items():
            read = [
                work.recordings.recording(work.at_temperature(r, temperature))
                for r in work.requests
            ]
            rows += group_figures(
                [CandidateTrace.along(one, drafter, one.texts) for one in read], spec
            )
    return rows


def part_specs(
    chosen: "Sequence[Claim]", asked: TablesOptions
) -> "tuple[dict[str, str], dict[str, str]]":
    """Return the specs of the claims' drafters and policies, and reasons for missing ones.

    Both results are dicts whose keys are the names in the claims.
    """
    from common.paper_recipes import SMALL, TRAINED
    from draftree.registry import names
    from draftree.target.target_names import shipped_drafters, shipped_folder, shipped_name

    given, told = (
        dict(item.partition("=")[::2] for item in asked.named),
        set().union(*(c.parts for c in chosen)),
    )
    for name in given:
        if name not in told:
            raise UserError(f"--as names '{name}', the claims are about {', '.join(sorted(told))}")
    if shipped_folder(asked.target, "c2t"):
        given.setdefault("c2t", f"c2t:classifier={shipped_name(asked.target)}")
    methods = {method for _, method in shipped_drafters(asked.target)}
    if "vdm" in methods:
        given.setdefault(SMALL, "vdm")
    there = methods | {"pld", *names("policy"), *given}
    missing = {
        n: f"no drafter '{n}' for {asked.target}: --as {n}=FOLDER names one" for n in told - there
    }
    return given, missing | {
        n: f"needs a drafter of its own: {TRAINED[n]}; --as {n}=FOLDER"
        for n in missing
        if n in TRAINED
    }


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the script and end the program."""
    run(tables, args)


if __name__ == "__main__":
    main()
