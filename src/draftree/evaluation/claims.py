"""Claims of papers: each says what takes less than what, the paper's figures, and what saved results say of it.

A claim compares two pairings over the same prompts, by the passes, nodes or counted seconds that each takes for a token, or two
groups of a drafter's candidates, by how many of them it takes for one that is right. The figures of the papers are of other
models, on GPUs; what is compared is the direction, with a paired interval. The claims themselves are in papers.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftree.evaluation.intervals import LEVEL, Ratio, ResultRow, holm, paired

By = Literal["steps", "nodes", "counted_seconds", "places"]
WORDS: Mapping[By, str] = {
    "steps": "passes", "nodes": "nodes", "counted_seconds": "counted seconds", "places": "places a right one",
}  # fmt: skip
PLAIN = "plain"
"""Stands for plain decoding beside a pairing, counted on the costs of the pairing's drafter."""
KEPT = 0.05
"""By so much more a figure that is said to be kept may be: the whole interval of the ratio must lie below."""


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper's table.

    Attributes:
        paper: it stands in.
        table: number of the table, or of the figure.
        claim: in words.
        figures: the paper's own.
        mine: drafter and policy that it is about; empty where nothing is run.
        other: those beside which they stand, or `plain`.
        by: what is counted, of each token; of `places` both sides are a drafter and a group of its candidates (analyses.py).
        keeps: whether the first is said to take no more; else less.
        temperature: of both.
        not_run: why nothing is run.
        level: of significance, by Holm's p.
    """

    paper: str
    table: str
    claim: str
    figures: str
    mine: str = ""
    other: str = ""
    by: By = "steps"
    keeps: bool = False
    temperature: float = 0.0
    not_run: str = ""
    level: float = LEVEL

    @property
    def pairings(self) -> tuple[str, ...]:
        """The pairings that must be run for it."""
        return () if self.by == "places" else tuple(p for p in (self.mine, self.other) if p and p != PLAIN)

    @property
    def parts(self) -> set[str]:
        """The names of the drafters and policies that it is about."""
        specs = [self.mine.partition(" ")[0]] if self.by == "places" else [s for p in self.pairings for s in p.split(" ")]
        return {spec.partition(":")[0] for spec in specs if spec}


@dataclass(frozen=True)
class Judged:
    """A claim and what was found: τ of both, the ratio of what each takes for a token, and whether the claim holds.

    Attributes:
        claim: of a paper.
        taus: τ of both, of places the share that is right; empty where nothing was run.
        ratio: its p-value adjusted for all claims that were judged.
        verdict: `holds`, `ties`, `fails` or `not run`.
        why: it was not run.
    """

    claim: Claim
    taus: tuple[float, ...] = ()
    ratio: Ratio | None = None
    verdict: str = "not run"
    why: str = ""

    def cells(self) -> dict[str, str]:
        """As a row of text."""
        c, r = self.claim, self.ratio
        ours = self.why
        if r is not None:
            what = "right" if c.by == "places" else "τ"
            ours = (
                f"{what} {self.taus[0]:.2f}, {self.taus[1]:.2f}; {r.value:.2f} [{r.low:.2f}, {r.high:.2f}] of its {WORDS[c.by]}"
            )
        return {"paper": c.paper, "table": c.table, "claim": c.claim, "theirs": c.figures, "here": ours, "": self.verdict}


def named(pairing: str, names: Mapping[str, str]) -> str:
    """A pairing with the specs that stand for the paper's drafter and policy, the paper's knobs added."""
    return " ".join(_spec(part, names) for part in pairing.split(" "))


def _spec(part: str, names: Mapping[str, str]) -> str:
    name, _, knobs = part.partition(":")
    spec = names.get(name, name)
    return f"{spec}{',' if ':' in spec else ':'}{knobs}" if knobs else spec


def judged(
    claims: Sequence[Claim], results: Sequence[Mapping[str, Any]], names: Mapping[str, str], missing: Mapping[str, str]
) -> list[Judged]:
    """What saved results say of claims.

    Args:
        claims: of papers.
        results: searched in their order for a pairing's rows.
        names: by the name of a drafter or policy in the claims, the spec that stands for it.
        missing: by such a name, why there is none.
    """
    found, ratios = list[Judged](), list[Ratio]()
    for claim in claims:
        why = claim.not_run or next((missing[name] for name in sorted(claim.parts & missing.keys())), "")
        rows = None if why else _rows(claim, results, names)
        if rows is None:
            found.append(Judged(claim, why=why or "no result has both at this temperature"))
            continue
        mine, other, seed = rows
        ratios.append(paired(mine, other, claim.by, seed))
        found.append(Judged(claim, (mine["acceptance_length"], other["acceptance_length"]), ratios[-1]))
    adjusted = iter(holm(ratios))
    return [j if j.ratio is None else Judged(j.claim, j.taus, r := next(adjusted), verdict(j.claim, r)) for j in found]


def verdict(claim: Claim, ratio: Ratio) -> str:
    """Whether a claim holds, by its interval and its adjusted p-value."""
    if claim.keeps:
        return "holds" if ratio.high <= 1 + KEPT else "fails" if ratio.p < claim.level and ratio.low > 1 + KEPT else "ties"
    if ratio.p >= claim.level:
        return "ties"
    return "holds" if ratio.value < 1 else "fails"


def _rows(
    claim: Claim, results: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> tuple[ResultRow, ResultRow, int] | None:
    for result in results:
        rows = [r for r in (*result["rows"], *result.get("places", ())) if r["temperature"] == claim.temperature]
        of = {f"{r['drafter']} {r['policy']}": r for r in rows if r["policy"]}
        mine = of.get(named(claim.mine, names))
        other = _plain(mine) if mine and claim.other == PLAIN else of.get(named(claim.other, names))
        if mine and other:
            return mine, other, int(result["provenance"].get("seed", 0))
    return None


def _plain(row: ResultRow) -> ResultRow:
    """Plain decoding beside a row."""
    each = row["per_prompt"]
    return {"acceptance_length": 1.0, "per_prompt": each | {"counted_seconds": each["counted_plain"]}}


VERDICTS = ("holds", "ties", "fails", "not run")


def summary(found: Sequence[Judged]) -> str:
    """How many claims hold, tie, fail and were not run."""
    told = [f"{word}: {sum(j.verdict == word for j in found)}" for word in VERDICTS]
    ran = sum(j.ratio is not None for j in found)
    return f"{len(found)} claims, {', '.join(told)}; p adjusted by Holm's method for the {ran} that were judged."
