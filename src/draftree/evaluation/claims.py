"""The papers' tables as claims: what each says is less of what, its own figures, and what saved results say.

A claim compares two pairings over the same prompts, by the passes, nodes or counted seconds that each takes for a token. The
figures of the papers are of other models, on GPUs; what is compared is the direction, with a paired interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftree.evaluation.intervals import LEVEL, Ratio, ResultRow, holm, paired

By = Literal["steps", "nodes", "counted_seconds"]
WORDS: Mapping[By, str] = {"steps": "passes", "nodes": "nodes", "counted_seconds": "counted seconds"}
KEPT = 0.05
"""By so much more a figure that is said to be kept may be: the whole interval of the ratio must lie below."""


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper's table.

    Attributes:
        paper: it stands in.
        table: number of the table or figure.
        claim: in words.
        figures: the paper's own.
        mine: drafter and policy that it is about; empty where nothing is run.
        other: those beside which they stand.
        by: what is counted, of each token.
        keeps: whether the first is said to take no more; else less.
        temperature: of both.
        not_run: why nothing is run.
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


EDD, EAGLE2, GLIDE, C2T, ADED = "EDD + PCT", "EAGLE-2", "GLIDE + CAPE", "C2T", "ADED"
FIVE, FIXED = "chain:length=5", "static:paths=eagle1/mc_sim_7b_63"
BARE = "eagle2:expand_by=confidence,rank_by=confidence"
SECONDS: By = "counted_seconds"
RETRAIN, STORE = "needs a drafter trained anew: ", "needs a datastore of its own: "
CLAIMS = (
    Claim(EDD, "1", "EDD over a drafter without the target's states", "τ 2.73, VDM 1.96", f"edd {FIVE}", f"vdm {FIVE}"),
    Claim(EDD, "1", "EDD over Medusa-1", "τ 2.73, 1.71", f"edd {FIVE}", f"medusa {FIVE}"),
    Claim(EDD, "1", "EDD over EAGLE", "τ 2.73, 2.50", f"edd {FIVE}", f"eagle {FIVE}"),
    Claim(EDD, "2", "PCT as long as EAGLE-2's tree", "τ 3.99, 3.99", "edd pct", "edd eagle2", keeps=True),
    Claim(EDD, "2", "PCT faster than EAGLE-2's tree", "3.04 ×, 2.87 ×", "edd pct", "edd eagle2", SECONDS),
    Claim(EDD, "2", "PCT faster than CAPE", "3.04 ×, 2.56 ×", "edd pct", "edd cape", SECONDS),
    Claim(EDD, "2", "PCT faster than a tree of width 3", "3.04 ×, 2.49 ×", "edd pct", "edd vct", SECONDS),
    Claim(EDD, "3", "encoded states shorten decoding", "τ 3.99, without 3.04", "edd pct", "vdm pct"),
    Claim(EDD, "3", "expected gain over confidence", "τ 3.99, without 3.45", "edd pct", "edd pct:ratio=0,own=0.1"),
    Claim(EDD, "3", "leaves removed, τ kept", "τ 3.99, without 3.99", "edd pct", "edd pct:leaf_threshold=0", keeps=True),
    Claim(EDD, "3", "and faster for it", "3.04 ×, without 2.95 ×", "edd pct", "edd pct:leaf_threshold=0", SECONDS),
    Claim(EDD, "3", "KL divergence over cross-entropy", "τ 3.99, without 3.60", not_run=RETRAIN + "train edd --set loss=ce"),
    Claim(EDD, "3", "random block lengths", "τ 3.99, without 3.72", not_run=RETRAIN + "train edd, min_block = max_block"),
    Claim(EDD, "4", "EDD over EAGLE at temperature 1", "τ 2.55, 2.30", f"edd {FIVE}", f"eagle {FIVE}", temperature=1.0),
    Claim(EDD, "4", "EDD over Medusa-1 at temperature 1", "τ 2.55, 1.60", f"edd {FIVE}", f"medusa {FIVE}", temperature=1.0),
    Claim(EDD, "5", "PCT faster than EAGLE-2's at T = 1", "2.91 ×, 2.67 ×", "edd pct", "edd eagle2", SECONDS, False, 1.0),
    Claim(EDD, "5", "PCT faster than CAPE at T = 1", "2.91 ×, 2.39 ×", "edd pct", "edd cape", SECONDS, False, 1.0),
    Claim(EAGLE2, "1", "a dynamic tree over PLD", "τ 4.70, 1.43", "eagle eagle2", "pld chain:length=10"),
    Claim(EAGLE2, "1", "a dynamic tree over Lookahead", "τ 4.70, 1.66",
          not_run="Lookahead sends probes through the target, so it cannot be replayed: bench --drafter lookahead"),
    Claim(EAGLE2, "1", "a dynamic tree over EAGLE's fixed one", "τ 4.70, 3.62", "eagle eagle2", f"eagle {FIXED}"),
    Claim(EAGLE2, "2", "the same, LLaMA3-Instruct 8B", "τ 4.53, 3.65", "eagle eagle2", f"eagle {FIXED}"),
    Claim(EAGLE2, "3", "value over confidence", "τ 4.98, without 4.39", "eagle eagle2", f"eagle {BARE}"),
    Claim(EAGLE2, "3", "reranking", "τ 4.98, without 4.86", "eagle eagle2", "eagle eagle2:rerank=false"),
    Claim(EAGLE2, "3", "both", "τ 4.98, without 3.92", "eagle eagle2", f"eagle {BARE},rerank=false"),
    Claim(GLIDE, "1", "the target's keys over none", "E(Spd.) 1.97, LLaMA-68m 1.46", f"glide {FIVE}", f"vdm {FIVE}"),
    Claim(GLIDE, "2", "distillation", "acceptance rates", not_run=RETRAIN + "train glide --regenerate"),
    Claim(GLIDE, "3", "speculation's milliseconds", "H800", not_run="is of that GPU: `draftree costs` measures this machine's"),
    Claim(GLIDE, "4", "batches", "H800, tokens a second", not_run="is of that GPU, and `bench` writes one text at a time"),
    Claim(C2T, "1", "entropy and depth as features", "γ .7 M with, .9 M without either",
          not_run="needs classifiers with fewer features: benchmarks/c2t_ablations.py trains them"),
    Claim(C2T, "2", "the τ of EAGLE-2", "L2 13B: τ 4.59, 4.58", "eagle c2t", "eagle eagle2", keeps=True),
    Claim(C2T, "2", "with fewer nodes", "L2 13B: γ 1.9 M, 2.6 M", "eagle c2t", "eagle eagle2", "nodes"),
    Claim(C2T, "3", "chains as long as DyJoint's", "τ 2.12, 2.12", "eagle c2t:chain=true", "eagle dyjoint", keeps=True),
    Claim(C2T, "3", "with fewer nodes", "γ 116,694, 129,876", "eagle c2t:chain=true", "eagle dyjoint", "nodes"),
    Claim(ADED, "1", "adaptive retrieval over REST", "both from one corpus", "aded mcts", "rest trie"),
    Claim(ADED, "2", "the size of the corpus", "memory and τ", not_run=STORE + "benchmarks/paper_rows.sh aded_corpora"),
    Claim(ADED, "3", "parts left out", "τ without each", not_run=STORE + "benchmarks/paper_rows.sh aded_math"),
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A claim and what was found: τ of both, the ratio of what each takes for a token, and whether the claim holds.

    Attributes:
        claim: of a paper.
        taus: of both, and empty where nothing was run.
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
            ours = f"τ {self.taus[0]:.2f}, {self.taus[1]:.2f}; {r.value:.2f} [{r.low:.2f}, {r.high:.2f}] of its {WORDS[c.by]}"
        return {"paper": c.paper, "table": c.table, "claim": c.claim, "theirs": c.figures, "here": ours, "": self.verdict}


def selected(papers: Sequence[str]) -> list[Claim]:
    """The claims of papers whose names contain some text, in the order of the papers; of all where none is named."""
    return [c for c in CLAIMS if not papers or any(p.lower() in c.paper.lower() for p in papers)]


def named(pairing: str, drafters: Mapping[str, str], policies: Mapping[str, str] | None = None) -> str:
    """A pairing with the drafter (and policy) that stands for the paper's."""
    drafter, _, policy = pairing.partition(" ")
    return f"{drafters.get(drafter, drafter)} {(policies or {}).get(policy, policy)}"


def judged(
    claims: Sequence[Claim], results: Sequence[Mapping[str, Any]], names: Mapping[str, str], missing: Mapping[str, str]
) -> list[Judged]:
    """What saved results say of claims.

    Args:
        claims: of papers.
        results: searched in their order for a pairing's rows.
        names: by a drafter's name in the claims, the spec that stands for it.
        missing: by a drafter's name in the claims, why there is none.
    """
    found, ratios = list[Judged](), list[Ratio]()
    for claim in claims:
        why = claim.not_run or next(
            (missing[d] for p in (claim.mine, claim.other) if (d := p.partition(" ")[0]) in missing), ""
        )
        rows = None if why else _rows(claim, results, names)
        if rows is None:
            found.append(Judged(claim, why=why or "no result has both pairings at this temperature"))
            continue
        mine, other, seed = rows
        ratios.append(paired(mine, other, claim.by, seed))
        found.append(Judged(claim, (mine["acceptance_length"], other["acceptance_length"]), ratios[-1]))
    adjusted = iter(holm(ratios))
    return [j if j.ratio is None else Judged(j.claim, j.taus, r := next(adjusted), verdict(j.claim, r)) for j in found]


def verdict(claim: Claim, ratio: Ratio) -> str:
    """Whether a claim holds, by its interval and its adjusted p-value."""
    if claim.keeps:
        return "holds" if ratio.high <= 1 + KEPT else "fails" if ratio.p < LEVEL and ratio.low > 1 + KEPT else "ties"
    if ratio.p >= LEVEL:
        return "ties"
    return "holds" if ratio.value < 1 else "fails"


def _rows(
    claim: Claim, results: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> tuple[ResultRow, ResultRow, int] | None:
    for result in results:
        of = {(f"{r['drafter']} {r['policy']}", r["temperature"]): r for r in result["rows"] if r["policy"]}
        mine, other = (of.get((named(p, names), claim.temperature)) for p in (claim.mine, claim.other))
        if mine and other:
            return mine, other, int(result["provenance"].get("seed", 0))
    return None


VERDICTS = ("holds", "ties", "fails", "not run")


def summary(found: Sequence[Judged]) -> str:
    """How many claims hold, tie, fail and were not run."""
    told = [f"{word}: {sum(j.verdict == word for j in found)}" for word in VERDICTS]
    ran = sum(j.ratio is not None for j in found)
    return f"{len(found)} claims, {', '.join(told)}; p adjusted by Holm's method for the {ran} that were judged."
