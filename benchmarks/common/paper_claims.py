"""Claims of papers: each says what takes less than what, the paper's figures, and what saved results say of it.

A claim compares two pairings over the same prompts, by the passes, nodes or counted seconds that
each takes for a token, or two groups of a drafter's candidates, by how many of them it takes for
one that is right. The figures of the papers are of other models, on GPUs; what is compared is the
direction, with a paired interval. The claims themselves are in paper_recipes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftree.evaluation.bootstrap import (
    ERROR_LEVEL,
    MIN_PROMPTS,
    TOO_FEW,
    Ratio,
    ResultRow,
    holm,
    paired_ratio,
)

By = Literal["steps", "nodes", "counted_seconds", "places"]
QUANTITY_NAMES: Mapping[By, str] = {
    "steps": "passes",
    "nodes": "nodes",
    "counted_seconds": "counted seconds",
    "places": "places a right one",
}
PLAIN = "plain"
"""Names plain decoding as the other side of a pairing, counted at the costs of the pairing's
drafter."""
KEPT_MARGIN = 0.05
"""Margin for a figure that is said to be kept: the whole interval of the ratio must be below it."""


@dataclass(frozen=True)
class Claim:
    """Store one statement from a paper's table.

    Attributes:
        paper: the paper.
        table: number of the table, or of the figure.
        claim: the statement in words.
        figures: the paper's own figures.
        mine: drafter and policy that it is about; empty where nothing is run.
        other: drafter and policy that they are compared with, or `plain`.
        by: what is counted per token; for `places`, both sides are a drafter and a group of its
            candidates (drafter_calibration.py).
        keeps: whether the first is said to take no more than the second; otherwise less.
        temperature: of both sides.
        not_run: why nothing is run.
        level: significance level for Holm's p.
        both: whether it also states that passes are kept: fewer nodes, or less time, at the same τ.
            Both get one verdict.
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
    level: float = ERROR_LEVEL
    both: bool = False

    @property
    def comparisons(self) -> tuple["tuple[str, str, float, By]", ...]:
        """Return the comparisons: the pairings, their temperature, and what is counted."""
        bys: tuple[By, ...] = (self.by, "steps") if self.both else (self.by,)
        return (
            tuple((self.mine, self.other, self.temperature, by) for by in bys) if self.mine else ()
        )

    @property
    def pairings(self) -> tuple[str, ...]:
        """Return the pairings that must be run for it."""
        return (
            ()
            if self.by == "places"
            else tuple(p for p in (self.mine, self.other) if p and p != PLAIN)
        )

    @property
    def parts(self) -> set[str]:
        """Return the names of the drafters and policies that it is about."""
        specs = (
            [self.mine.partition(" ")[0]]
            if self.by == "places"
            else [s for p in self.pairings for s in p.split(" ")[:2]]
        )
        return {spec.partition(":")[0] for spec in specs if spec}


@dataclass(frozen=True)
class JudgedClaim:
    """Store a claim with the figures that were measured for it, and whether it holds.

    Attributes:
        claim: the claim of a paper.
        taus: τ of both sides, or the share of correct tokens where positions are compared; empty
            where nothing was run.
        ratio: ratio of the seconds per token of both sides; its p-value is adjusted for all
            comparisons that were judged.
        verdict: `holds`, `ties`, `fails`, `too few prompts` or `not run`.
        why: the reason where it was not run.
        kept: ratio of the passes, for a claim about both.
    """

    claim: Claim
    taus: tuple[float, ...] = ()
    ratio: Ratio | None = None
    verdict: str = "not run"
    why: str = ""
    kept: Ratio | None = None

    def cells(self) -> dict[str, str]:
        """Return a row of a table with the claim and our result: a dict from column to text."""
        c, r = self.claim, self.ratio
        ours = self.why
        if r is not None:
            what = "right" if c.by == "places" else "τ"
            ours = f"{what} {self.taus[0]:.2f}, {self.taus[1]:.2f}; "
            ours += f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}] of its {QUANTITY_NAMES[c.by]}"
            if self.kept is not None:
                ours += f", {self.kept.value:.2f} [{self.kept.low:.2f}, {self.kept.high:.2f}] of its passes"
        return {
            "paper": c.paper,
            "table": c.table,
            "claim": c.claim,
            "theirs": c.figures,
            "here": ours,
            "": self.verdict,
        }


def fill_pairing(pairing: str, names: Mapping[str, str]) -> str:
    """Return a pairing with the specs of a paper's drafter and policy and the paper's options."""
    return " ".join(_spec(part, names) for part in pairing.split(" "))


def _spec(part: str, names: Mapping[str, str]) -> str:
    name, _, knobs = part.partition(":")
    spec = names.get(name, name)
    return f"{spec}{',' if ':' in spec else ':'}{knobs}" if knobs else spec


def judge_claims(
    claims: Sequence[Claim],
    results: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    missing: Mapping[str, str],
) -> list[JudgedClaim]:
    """Judge claims by saved results.

    Args:
        claims: claims of papers.
        results: results in the order in which a pairing's rows are searched.
        names: the spec of a drafter or policy, by its name in the claims.
        missing: why there is none, by its name in the claims.
    """
    found, ratios = list[JudgedClaim](), dict[tuple[str, str, float, By], Ratio]()
    for claim in claims:
        why = claim.not_run or next(
            (missing[name] for name in sorted(claim.parts & missing.keys())), ""
        )
        rows = None if why else claim_rows(claim, results, names)
        if rows is None:
            found.append(JudgedClaim(claim, why=why or "no result has both at this temperature"))
            continue
        mine, other, seed = rows
        for compared in claim.comparisons:
            if compared not in ratios:
                ratios[compared] = paired_ratio(mine, other, compared[-1], seed)
        found.append(JudgedClaim(claim, (mine["acceptance_length"], other["acceptance_length"])))
    adjusted = dict(zip(ratios, holm(list(ratios.values())), strict=True))
    return [
        with_ratios(j, [adjusted[c] for c in j.claim.comparisons]) if j.taus else j for j in found
    ]


def with_ratios(one: JudgedClaim, ratios: Sequence[Ratio]) -> JudgedClaim:
    """Return a claim with the ratios of its comparisons."""
    first, *kept = ratios
    said = [
        judge_ratio(one.claim, first),
        *(judge_ratio(replace(one.claim, keeps=True), r) for r in kept),
    ]
    whole = next((word for word in (TOO_FEW, "fails", "ties") if word in said), "holds")
    return replace(one, ratio=first, verdict=whole, kept=kept[0] if kept else None)


def judge_ratio(claim: Claim, ratio: Ratio) -> str:
    """Return whether a claim holds, by its interval and its adjusted p-value."""
    if ratio.few:
        return TOO_FEW
    if claim.keeps:
        return (
            "holds"
            if ratio.high <= 1 + KEPT_MARGIN
            else "fails"
            if ratio.p < claim.level and ratio.low > 1 + KEPT_MARGIN
            else "ties"
        )
    if ratio.p >= claim.level:
        return "ties"
    return "holds" if ratio.value < 1 else "fails"


def claim_rows(
    claim: Claim, results: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> tuple[ResultRow, ResultRow, int] | None:
    """Return the two rows that a claim compares, and the number of the result with both; else None."""
    for result in results:
        rows = [
            r
            for r in (*result["rows"], *result.get("places", ()))
            if r["temperature"] == claim.temperature
        ]
        of = {
            " ".join(filter(None, (r["drafter"], r["policy"], r.get("rule")))): r
            for r in rows
            if r["policy"]
        }
        mine = of.get(fill_pairing(claim.mine, names))
        other = (
            _plain_row(mine)
            if mine and claim.other == PLAIN
            else of.get(fill_pairing(claim.other, names))
        )
        if mine and other:
            return mine, other, int(result["provenance"].get("seed", 0))
    return None


def _plain_row(row: ResultRow) -> ResultRow | None:
    """Return the row of plain decoding to compare with; None where its cost is not known."""
    each = row["per_prompt"]
    if "counted_plain" not in each:
        return None
    return {
        "acceptance_length": 1.0,
        "per_prompt": each | {"counted_seconds": each["counted_plain"]},
    }


VERDICTS = ("holds", "ties", "fails", TOO_FEW, "not run")


def summary(found: Sequence[JudgedClaim]) -> str:
    """Return how many claims hold, tie, fail and were not run.

    A comparison that occurs in several claims counts once.
    """
    distinct = {
        j.claim.comparisons or (j.claim.paper, j.claim.table, j.claim.claim): j
        for j in reversed(found)
    }
    count = {word: sum(j.verdict == word for j in distinct.values()) for word in VERDICTS}
    told = [f"{word}: {n}" for word, n in count.items() if n or word != TOO_FEW]
    family = {
        c for j in found if j.ratio is not None and not j.ratio.few for c in j.claim.comparisons
    }
    few = f" A verdict needs at least {MIN_PROMPTS} prompts." if count[TOO_FEW] else ""
    several = "the 1 comparison" if len(family) == 1 else f"the {len(family)} different comparisons"
    return f"{len(distinct)} claims, {', '.join(told)}; p adjusted by Holm's method over {several} of this run.{few}"
