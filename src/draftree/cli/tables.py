"""`draftree tables`: the papers' tables as recipes: each paper's figure beside ours, and whether the claim holds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from draftree.boundary.files import writable
from draftree.boundary.knobs import knob
from draftree.cli.console import emit
from draftree.cli.options import AsJson, asks_for
from draftree.cli.replay import ReplayOptions, replayed
from draftree.errors import UserError

if TYPE_CHECKING:
    from draftree.evaluation.claims import Claim


@dataclass(frozen=True)
class TablesOptions(ReplayOptions):
    """The options of `draftree tables`: those of `replay`, but that the recipes say what is run."""

    out: Path = knob(Path("tables.json"), help="Where the result is saved, as JSON, one file for each temperature beside it.")
    suite: str = knob("demo", help="A shipped suite, a file of prompts, or FORMAT:FILE of a benchmark.")
    paper: list[str] = knob((), help="Only papers whose name contains this: EDD, EAGLE, GLIDE, C2T, ADED; repeat it.")
    named: list[str] = knob(
        (), flag="--as", metavar="NAME=SPEC", help="The drafter that stands for the papers' NAME; repeat it."
    )
    result: list[Path] = knob((), help="Read what `bench` or `replay` saved, and run nothing; repeat it.")
    as_json: AsJson = False


@asks_for
def tables(ctx: typer.Context, asked: TablesOptions) -> None:
    """Replay the papers' tables with a target's drafters, and say of each claim whether it holds, ties or fails."""
    from draftree.boundary.files import write_text
    from draftree.cli import terminal
    from draftree.evaluation import claims, report

    chosen = claims.selected(asked.paper)
    if not chosen:
        there = ", ".join(dict.fromkeys(c.paper for c in claims.CLAIMS))
        raise UserError(f"no paper is named like {' or '.join(asked.paper)}; there are {there}")
    if asked.drafter or asked.pair:
        raise UserError(
            "tables were given --drafter or --pair, but the recipes say what is run: --as NAME=SPEC names a drafter"
        )
    writable(asked.out)
    names, missing = drafters(chosen, asked)
    results = [report.read(path) for path in asked.result]
    if not results:
        for temperature in sorted({c.temperature for c in chosen if c.mine}):
            able = [c for c in chosen if c.mine and c.temperature == temperature and not absent(c, missing)]
            pairs = list(dict.fromkeys(claims.named(p, names) for c in able for p in (c.mine, c.other)))
            if pairs:
                path = asked.out.with_name(f"{asked.out.stem}.t{temperature:g}.json")
                now = replace(asked, pair=pairs, temperature=[temperature], out=path)
                results.append(replayed(ctx, now)[0])
                report.save(results[-1], path)
    found = claims.judged(chosen, results, names, missing)
    rows = [
        asdict(j.claim) | {"verdict": j.verdict, "τ": j.taus, "ratio": j.ratio and asdict(j.ratio), "why": j.why} for j in found
    ]
    write_text(asked.out, json.dumps({"claims": rows, "drafters": names}, indent=1, ensure_ascii=False) + "\n")
    if asked.as_json:
        emit({"claims": rows, "drafters": names})
        return
    terminal.output().print(terminal.table(f"the papers' claims with {asked.target}", [j.cells() for j in found]))
    terminal.line(claims.summary(found))


def absent(claim: "Claim", missing: "dict[str, str]") -> bool:
    """True where a drafter of the claim is not there."""
    return any(pairing.partition(" ")[0] in missing for pairing in (claim.mine, claim.other))


def drafters(chosen: "Sequence[Claim]", asked: TablesOptions) -> "tuple[dict[str, str], dict[str, str]]":
    """By a drafter's name in the claims, the spec that stands for it; and why there is none."""
    from draftree.models.sources import shipped

    given = dict(item.partition("=")[::2] for item in asked.named)
    known = {getattr(c, side).partition(" ")[0] for c in chosen for side in ("mine", "other") if c.mine}
    for name in given:
        if name not in known:
            raise UserError(f"--as names '{name}', the claims are about {', '.join(sorted(known))}")
    there = {method for _, method in shipped(asked.target)} | {"pld"}
    missing = {n: f"no drafter '{n}' for {asked.target}: --as {n}=FOLDER names one" for n in known - there - given.keys()}
    return given, missing
