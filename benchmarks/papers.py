"""Every table and figure of the five papers: what runs it, and what our saved results say of its claims.

    python benchmarks/papers.py --list
    python benchmarks/papers.py --paper eagle2 --table 1 --target demo --suite questions.jsonl [--limit 40] [--out FOLDER]
    python benchmarks/papers.py --judge

With `--paper` and `--table` everything that the table needs is run: the pairings of its claims,
replayed and judged, beside the paper's own figures; of a figure the picture, too. Other options go
to `benchmarks/paper_tables.py`, such as `--as NAME=SPEC`. `--judge` reads the saved results and writes
`benchmarks/results/papers.json`, of which docs/reference/papers.md is made.
"""

import argparse
import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import analyse
import paper_tables
from common import paper_claims as judging
from common.paper_claims import Claim
from common.paper_recipes import ADED, C2T, CLAIMS, EAGLE2, EDD_PCT, GLIDE_CAPE, select_claims
from draftree.costs.cost_table import CostTable, estimate_seconds
from draftree.costs.step_costs import Costs
from draftree.evaluation import step_codec
from draftree.evaluation.bootstrap import MIN_PROMPTS, ResultRow, holm, paired_ratio
from draftree.evaluation.result_rows import read_result

RESULTS = Path(__file__).with_name("results")
OUT = RESULTS / "papers.json"
SHORT = {"edd": EDD_PCT, "eagle2": EAGLE2, "glide": GLIDE_CAPE, "c2t": C2T, "aded": ADED}
TOY = "demo target, math questions"


@dataclass(frozen=True)
class Item:
    """Describe a table or figure.

    Attributes:
        paper: the paper.
        place: number of the table or figure.
        what: what it shows.
        run: the command where it is none of this script's; `draftree …` or `python …`.
        pictures: whether `benchmarks/analyse.py` draws it.
        reason: why there is nothing to run.
    """

    paper: str
    place: str
    what: str
    run: str = ""
    pictures: bool = False
    reason: str = ""

    @property
    def command(self) -> str:
        """Return the command that a user types."""
        if self.run or self.reason:
            return self.run
        short = next(name for name, paper in SHORT.items() if paper == self.paper)
        return f"python benchmarks/papers.py --paper {short} --table {shlex.quote(self.place)}"


DIAGRAM = "a diagram of the method"
ANALYSE = "python benchmarks/analyse.py --target demo --suite demo --pictures pictures --drafter "
ABLATIONS = (
    "python benchmarks/c2t_ablations.py --data CHATS.jsonl --suite QUESTIONS.jsonl --work FOLDER"
)
TABLES = "python benchmarks/c2t_tables.py {} --suite QUESTIONS.jsonl --work FOLDER"
BATCHES = "draftree bench --suite demo --batch 1 --batch 2 --batch 4 --batch 8 --pair 'glide chain:length=5'"
TEXTS = "python benchmarks/c2t_texts.py --data CHATS.jsonl --other OTHER.jsonl --suite QUESTIONS.jsonl --work FOLDER"
SPEEDS = "draftree bench --pair 'glide chain:length=5' --pair 'glide beam' --pair 'glide beam:width=8' --pair 'glide cape'"
CATEGORY = "draftree bench --suite mt_bench:FILE --pair '{}' --out r.json"
EXAMPLE = "draftree generate 'What is machine learning?' --drafter {} --policy {} --show-trees"
BOTH = "draftree bench --suite demo --pair 'aded:datastore=FOLDER mcts' --temperature 0 --temperature 1"
TOP_P = "draftree bench --suite demo --pair 'aded:datastore=FOLDER mcts match:coupled=false' --temperature 1 --top-p 0.9"
ITEMS = (
    Item(EDD_PCT, "Fig. 1, 2, 3a, 4", "decoding, EDD, its mask, PCT", reason=DIAGRAM),
    Item(EDD_PCT, "Fig. 3b", "acceptance by confidence, ECE", ANALYSE + "edd", pictures=True),
    Item(EDD_PCT, "1", "draft models, chains of 5"),
    Item(EDD_PCT, "2", "policies over EDD"),
    Item(EDD_PCT, "3", "ablations"),
    Item(EDD_PCT, "4", "draft models at temperature 1"),
    Item(EDD_PCT, "5", "policies at temperature 1"),
    Item(EDD_PCT, "6", "examples", EXAMPLE.format("edd", "pct")),
    Item(EDD_PCT, "Fig. 5", "the layer that is read"),
    Item(EDD_PCT, "Fig. 6", "PCT's width: τ and nodes"),
    Item(EDD_PCT, "Fig. 7", "τ and nodes by category", CATEGORY.format("edd pct:ratio=0.037")),
    Item(
        EAGLE2,
        "Fig. 1, 2",
        "speed-ups at temperature 1 and 0",
        "python benchmarks/papers.py --paper eagle2 --table 1",
    ),
    Item(EAGLE2, "Fig. 3, 4, 7, 8", "EAGLE, EAGLE-2", reason=DIAGRAM),
    Item(EAGLE2, "1", "all methods, both temperatures, six tasks"),
    Item(
        EAGLE2,
        "2",
        "LLaMA-2 70B, LLaMA-3 70B and 8B",
        "python benchmarks/papers.py --paper eagle2 --table 1 --target MODEL",
    ),
    Item(EAGLE2, "3", "value, reranking"),
    Item(EAGLE2, "Fig. 5", "acceptance by place", pictures=True),
    Item(EAGLE2, "Fig. 6", "acceptance by confidence", pictures=True),
    Item(GLIDE_CAPE, "Fig. 1a, 2, 3", "GLIDE and CAPE", reason=DIAGRAM),
    Item(GLIDE_CAPE, "Fig. 1b", "acceptance by confidence", pictures=True),
    Item(GLIDE_CAPE, "1", "GLIDE beside draft models without the target's keys"),
    Item(GLIDE_CAPE, "2", "distillation"),
    Item(GLIDE_CAPE, "3", "milliseconds of speculation", SPEEDS),
    Item(GLIDE_CAPE, "4", "batches", BATCHES),
    Item(GLIDE_CAPE, "5, 6, 7", "examples", EXAMPLE.format("glide", "cape")),
    Item(GLIDE_CAPE, "Fig. 4", "beside the Vanilla Drafter"),
    Item(GLIDE_CAPE, "Fig. 5", "speed on MT-bench"),
    Item(GLIDE_CAPE, "Fig. 6", "CAPE, beam search, Medusa"),
    Item(GLIDE_CAPE, "5.4", "sizes by confidence, or four"),
    Item(GLIDE_CAPE, "Fig. 7", "the layer whose keys are read"),
    Item(GLIDE_CAPE, "Fig. 8", "layers of the draft model"),
    Item(GLIDE_CAPE, "Fig. 9", "its width"),
    Item(C2T, "Fig. 1, 3", "EAGLE-2, C2T", reason=DIAGRAM),
    Item(C2T, "1", "features of the classifier", ABLATIONS),
    Item(C2T, "2", "targets"),
    Item(C2T, "3", "chains", TABLES.format(3)),
    Item(C2T, "4", "trees of 26 and 60"),
    Item(C2T, "5", "the second cut"),
    Item(C2T, "6", "tokens of the entropy", ABLATIONS),
    Item(C2T, "7", "over MTP", TABLES.format(7)),
    Item(C2T, "Fig. 2", "acceptance by entropy and rank", pictures=True),
    Item(C2T, "Fig. 4", "γ and τ"),
    Item(C2T, "Fig. 5", "time by γ"),
    Item(C2T, "Fig. 6", "hidden sizes", ABLATIONS),
    Item(C2T, "Fig. 7", "fine-tuning", TEXTS),
    Item(C2T, "Fig. 8", "other texts", TEXTS),
    Item(C2T, "Fig. 9, 10", "answers of the classifier", "python benchmarks/papers.py --surfaces"),
    Item(
        C2T,
        "Fig. 11",
        "parts of drafting's time",
        "draftree bench --suite demo --pair 'eagle c2t' --profile parts.png",
    ),
    Item(ADED, "Fig. 1, 2, 8, 9", "ADED, its data flow", reason=DIAGRAM),
    Item(ADED, "1", "latency and accept length"),
    Item(ADED, "2", "corpus size", "benchmarks/paper_rows.sh aded_corpora"),
    Item(
        ADED,
        "3",
        "memory",
        "python benchmarks/retrieval.py build --work FOLDER --megabytes 100",
    ),
    Item(ADED, "Fig. 3", "throughput"),
    Item(ADED, "Fig. 4a", "adapting"),
    Item(ADED, "Fig. 4b", "categories", CATEGORY.format("aded:datastore=FOLDER mcts")),
    Item(ADED, "Fig. 5a", "top-p", TOP_P),
    Item(ADED, "Fig. 5b", "temperature", BOTH),
    Item(ADED, "Fig. 6", "searches"),
    Item(ADED, "Fig. 7", "c1 and c2"),
)
"""All tables and figures of the papers, in their order."""

D = "drafters/"
FIVE = "chain:length=5"
R10 = "pct:max_depth=10,ratio=0.1"
A = "aded-math"
SAVED: Mapping[tuple[str, str, str], tuple[str, str, str]] = {
    (EDD_PCT, "1", "EDD over a drafter without the target's states"): (
        "draft_models",
        f"edd {FIVE}",
        f"vdm {FIVE}",
    ),
    (EDD_PCT, "3", "encoded states shorten decoding"): (
        "edd_ablations",
        f"{D}edd-e1 {R10}",
        f"{D}vdm-e1 {R10}",
    ),
    (EDD_PCT, "3", "KL divergence over cross-entropy"): (
        "edd_ablations",
        f"{D}edd-e1 {R10}",
        f"{D}edd-ce-e1 {R10}",
    ),
    (EDD_PCT, "3", "random block lengths"): (
        "edd_ablations",
        f"{D}edd-phase0-e1 {R10}",
        f"{D}edd-fixed-phase0-e1 {R10}",
    ),
    (C2T, "Fig. 5", "and faster"): (
        "curves_eagle",
        "eagle c2t:beta=0.3",
        "eagle eagle2:nodes=100,depth=10,width=15",
    ),
    (GLIDE_CAPE, "Fig. 4", "over the Vanilla Drafter"): (
        "draft_models",
        f"glide {FIVE}",
        f"{D}glide-nocross {FIVE}",
    ),
    (ADED, "1", "adaptive retrieval over REST"): ("retrieval_math", f"{A} mcts", "rest-math trie"),
    (ADED, "Fig. 4a", "adapting lengthens"): (
        "aded_math",
        f"{A} mcts",
        f"aded:datastore={A},adapt=false mcts",
    ),
    (ADED, "Fig. 6", "a search over a greedy sentence"): (
        "aded_math",
        f"{A} mcts",
        f"{A} chain:length=4",
    ),
    (ADED, "Fig. 6", "150 searches over 30"): (
        "aded_search",
        f"{A} mcts:iterations=150",
        f"{A} mcts:iterations=30",
    ),
    (ADED, "Fig. 7", "exploring over hardly any"): (
        "aded_search",
        f"{A} mcts:c1=128",
        f"{A} mcts:c1=0.3",
    ),
    (ADED, "2", "the size of the corpus"): ("aded_corpora", f"{A} mcts", "aded-934 mcts"),
    (EAGLE2, "1", "a dynamic tree over Lookahead"): (
        "papers_lookahead",
        "eagle eagle2",
        "lookahead trie",
    ),
}
"""Claims on the demo whose drafters have names of their own in a saved result: its name, and the
two pairings."""


SWEEPS = "papers_sweeps"
"""The saved result of recipes/sweeps.py, whose drafters are named by its folder and their seed."""
TWO_SEEDS: Mapping[tuple[str, str, str], tuple[str, str]] = {
    (EDD_PCT, "Fig. 5", "a layer near the top over the last one"): ("edd", "edd-last"),
    (EDD_PCT, "Fig. 5", "and over a low one"): ("edd", "edd-low"),
    (GLIDE_CAPE, "2", "distillation"): ("glide-distilled", "glide"),
    (GLIDE_CAPE, "Fig. 7", "upper layers' keys over lower ones'"): ("glide", "glide-low"),
    (GLIDE_CAPE, "Fig. 8", "one layer faster than two"): ("glide", "glide-deep"),
    (GLIDE_CAPE, "Fig. 9", "a wide state over 768"): ("glide-scratch", "glide-narrow"),
}
"""Claims about drafters of recipes/sweeps.py: the names of both. Every seed is judged by itself, and a
claim holds or fails if it does so with every seed."""
STANDS_IN: Mapping[tuple[str, str, str], str] = {
    (
        EAGLE2,
        "1",
        "a dynamic tree over speculative sampling",
    ): "`vdm`, one layer that reads the text alone, stands for the small model",
    **{
        (C2T, "2", claim): "SmolLM2: `edd`, 12 questions of mathematics and general knowledge, "
        "β = 0.5, no second cut"
        for claim in ("fewer nodes than EAGLE-2 at its τ", "a net of another target serves")
    },
    **{
        (EDD_PCT, "Fig. 5", claim): "trained on its answers to GSM8K's questions, two passes"
        for claim in ("a layer near the top over the last one", "and over a low one")
    },
    **{
        (GLIDE_CAPE, *place): "drafters of 590 steps, two seeds (recipes/sweeps.py)"
        for place in (
            ("2", "distillation"),
            ("Fig. 7", "upper layers' keys over lower ones'"),
            ("Fig. 8", "one layer faster than two"),
            ("Fig. 9", "a wide state over 768"),
        )
    },
    (
        C2T,
        "Fig. 7",
        "fine-tuning raises recall",
    ): "a net of 400 trees, of general questions, tuned on "
    "three texts of mathematics, judged on eight others; the paper has 8,880 and 888 trees",
    (
        C2T,
        "Fig. 8",
        "other texts teach the same",
    ): "nets of 400 trees each, of general questions and "
    "of mathematics, on ten questions of mathematics",
}
"""What stands in for a model of a paper in the verdict of a claim."""


@dataclass(frozen=True)
class AtEqualTau:
    """Locate in a saved result how many nodes a setting takes at the τ of another.

    Attributes:
        result: name of the result.
        rows: values that select the rows, by column; the claim has one verdict for all of them.
        inverse: whether they are the other's rows; then their nodes are divided by those of the
            claim's own setting.
        keeps: whether the claim states "no more", instead of "fewer".
    """

    result: str
    rows: tuple[Mapping[str, str], ...]
    inverse: bool = False
    keeps: bool = False


SIX, TEN = "eagle2:nodes=…", "eagle2:depth=10,nodes=…,width=15"
"""Curves of EAGLE-2 as published, and as deep and wide as C2T's paper has it."""
EQUAL: Mapping[tuple[str, str, str], AtEqualTau] = {
    (C2T, "1", "entropy and depth as features"): AtEqualTau(
        "c2t_ablations", ({"setting": "features=P+H"}, {"setting": "features=P+d"}), inverse=True
    ),
    (C2T, "3", "fewer nodes than a chain, and DyJoint, at their τ"): AtEqualTau(
        "c2t_table3", ({"policy": "c2t:chain=true,beta=0.85", "beside": "dyjoint"},)
    ),
    (C2T, "4", "C2T over both with fewer nodes"): AtEqualTau(
        "c2t_abstract", ({"policy": "c2t:beta=0.7", "beside": "eagle2"},)
    ),
    (C2T, "6", "entropy over 1,000 tokens is enough"): AtEqualTau(
        "c2t_ablations", ({"setting": "entropy_top=10000"},), inverse=True, keeps=True
    ),
    (C2T, "7", "fewer nodes over MTP at equal τ"): AtEqualTau(
        "c2t_table7", ({"policy": "c2t", "beside": "eagle2"},)
    ),
    (C2T, "Fig. 6", "12 to 48 hidden units learn alike"): AtEqualTau(
        "c2t_ablations", ({"setting": "hidden=12"}, {"setting": "hidden=24"}), keeps=True
    ),
    (EDD_PCT, "Fig. 6", "fewer nodes than EAGLE-2's tree at its τ"): AtEqualTau(
        "equal_tau",
        ({"result": "curves_edd", "policy": "pct:ratio=0.03,leaf_threshold=0.01", "beside": SIX},),
    ),
    (C2T, "2", "fewer nodes than EAGLE-2 at its τ"): AtEqualTau(
        "equal_tau", ({"result": "curves_eagle", "policy": "c2t:beta=0.5", "beside": TEN},)
    ),
    (C2T, "Fig. 4", "fewer nodes than EAGLE-2's tree of 100 at its τ"): AtEqualTau(
        "equal_tau", ({"result": "curves_eagle", "policy": "c2t:beta=0.3", "beside": TEN},)
    ),
}
"""Claims at equal τ, by the saved results of benchmarks/equal_tau.py, c2t_tables.py and
c2t_ablations.py."""
NAIVE = "c2t:classifier={},layer_top=none,beta=0.5"
"""C2T of Table 2, without the second cut, and with the classifier of a target."""
EQUAL_SMOLLM2: Mapping[tuple[str, str, str], AtEqualTau] = {
    (C2T, "2", "fewer nodes than EAGLE-2 at its τ"): AtEqualTau(
        "equal_tau",
        ({"result": "papers_smollm2", "policy": NAIVE.format("smollm2"), "beside": TEN},),
    ),
    (C2T, "2", "a net of another target serves"): AtEqualTau(
        "equal_tau", ({"result": "papers_smollm2", "policy": NAIVE.format("demo"), "beside": TEN},)
    ),
}
"""The same of SmolLM2. The rule was written before the run: at β = 0.5 the whole interval of the nodes
at equal τ is below 1, or above it."""
CONFOUNDED: Mapping[tuple[str, str, str], str] = {
    (
        EDD_PCT,
        "1",
        "EDD over a drafter without the target's states",
    ): "SmolLM2: not judged, `edd` had six passes over 3,348 answers and `vdm` four over 1,848",
    (
        GLIDE_CAPE,
        "1",
        "the target's keys over none",
    ): "SmolLM2: of `preset=fast` with KL and a shared head beside `vdm`, which is no GLIDE without keys",
}
"""Claims that SmolLM2's shipped drafters cannot decide, as they were not trained alike;
recipes/fair.py trains them so."""
NAMES = {
    "small": "vdm",
    "aded": "aded:datastore=aded-math",
    "rest": "rest:datastore=rest-math",
    "c2t": "c2t:classifier=demo",
}
"""Specs for the claims' names in the run of all claims on the demo target."""
FILES = {
    "demo": ("papers_demo", "papers_demo_t1", "draft_models", "policies_again_eagle"),
    "smollm2": ("evidence",),
}
"""Saved results in which the claims' own pairings are searched, by target."""


def verdicts(target: str) -> list[dict[str, Any]]:
    """Return the verdicts of saved results on the claims for a target.

    p is adjusted over the comparisons of a paper.
    """
    found = list[dict[str, Any]]()
    for paper in SHORT.values():
        several = [c for c in CLAIMS if c.paper == paper]
        rows = {c: pairs for c in several if (pairs := saved_pairs(c, target))}
        compared = {
            (pair.key, by): paired_ratio(pair.mine, pair.other, by)
            for pairs in rows.values()
            for pair in pairs
            for *_, by in pair.claim.comparisons
        }
        adjusted = dict(zip(compared, holm(list(compared.values())), strict=True))
        for c, pairs in rows.items():
            seeds = list[dict[str, Any]]()
            for pair in pairs:
                ratios = [adjusted[pair.key, by] for *_, by in pair.claim.comparisons]
                taus = (pair.mine["acceptance_length"], pair.other["acceptance_length"])
                one = judging.with_ratios(judging.JudgedClaim(pair.claim, taus), ratios)
                prompts = len(pair.mine["per_prompt"]["tokens"])
                seeds.append(entry(c, target, one, pair.source, prompts))
            at_costs = at_paper_costs(pairs[0].claim) if target == "demo" else {}
            found.append(every_seed(seeds) | at_costs)
    return found + [e for c in CLAIMS if (e := equal(c, target)) is not None] + special(target)


def at_paper_costs(claim: Claim) -> dict[str, Any]:
    """Return the ratio of seconds by the costs of EDD's paper, where a pass does not depend on the tree.

    These are 1.1 ms for a draft step and 29.8 ms for a pass of LLaMA2-Chat 7B (section 4.1).
    """
    if not (RESULTS / f"{AT_PAPER_COSTS}.json").is_file():
        return {}
    rows = judging.claim_rows(claim, [read_result(RESULTS / f"{AT_PAPER_COSTS}.json")], {})
    if rows is None or claim.paper != EDD_PCT or claim.by != "counted_seconds":
        return {}
    ratio = paired_ratio(rows[0], rows[1], "counted_seconds")
    return {"paper costs": [round(x, 3) for x in (ratio.value, ratio.low, ratio.high)]}


AT_PAPER_COSTS = "papers_edd_costs"
"""The saved result of EDD's policies, counted by the paper's costs."""


def every_seed(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict of a claim by those of several seeds: theirs if they agree, or `ties`."""
    first, *others = seeds
    if not others:
        return first
    words = {s["verdict"] for s in seeds}
    verdict = first["verdict"] if len(words) == 1 else "ties"
    return first | {"verdict": verdict, "other seeds": [s["ratio"] for s in others]}


@dataclass(frozen=True)
class Pair:
    """Hold the two rows of a claim in a saved result."""

    claim: Claim
    mine: ResultRow
    other: ResultRow
    source: str

    @property
    def key(self) -> tuple[str, str, str, float]:
        """Return what distinguishes one comparison from another."""
        return self.source, self.claim.mine, self.claim.other, self.claim.temperature


def saved_pairs(claim: Claim, target: str) -> list[Pair]:
    """Return the rows of a claim on a target, for each seed; none where no result has both."""
    names = TWO_SEEDS.get((claim.paper, claim.table, claim.claim))
    if names is None or target != "demo":
        one = saved_pair(claim, target)
        return [] if one is None else [one]
    found = list[Pair]()
    if (RESULTS / f"{SWEEPS}.json").is_file():
        result = read_result(RESULTS / f"{SWEEPS}.json")
        specs = sorted({r["drafter"] for r in result["rows"] if r["policy"]})
        for seed in range(SEEDS):
            mine, other = (f"sweeps/{name}-s{seed}" for name in names)
            if {mine, other} <= set(specs):
                of = replace(claim, mine=f"{mine} {FIVE}", other=f"{other} {FIVE}")
                rows = judging.claim_rows(of, [result], {})
                assert rows is not None
                found.append(Pair(of, rows[0], rows[1], SWEEPS))
    return found


SEEDS = 2
"""Number of seeds of recipes/sweeps.py."""


def saved_pair(claim: Claim, target: str) -> Pair | None:
    """Return the rows of a claim on a target; None where no result has both."""
    place = (claim.paper, claim.table, claim.claim)
    if place in (EQUAL if target == "demo" else EQUAL_SMOLLM2):
        return None
    if target == "demo" and place in SAVED and (RESULTS / f"{SAVED[place][0]}.json").is_file():
        source, mine, other = SAVED[place]
        claim, files = replace(claim, mine=mine, other=other, not_run=""), [source]
    elif target == "smollm2" and place in CONFOUNDED:
        return None
    else:
        files = [name for name in FILES[target] if (RESULTS / f"{name}.json").is_file()]
    for name in files if claim.mine else ():
        for names in ({}, NAMES):
            if rows := judging.claim_rows(claim, [read_result(RESULTS / f"{name}.json")], names):
                return Pair(claim, rows[0], rows[1], name)
    return None


def entry(
    claim: Claim, target: str, one: judging.JudgedClaim, source: str, prompts: int
) -> dict[str, Any]:
    """Return a verdict as it is saved."""
    ratio = one.ratio
    assert ratio is not None
    figures = {
        "ratio": [round(x, 3) for x in (ratio.value, ratio.low, ratio.high)],
        "p": ratio.p,
        "of": judging.QUANTITY_NAMES[one.claim.by],
    }
    kept = (
        {}
        if one.kept is None
        else {"passes": [round(x, 3) for x in (one.kept.value, one.kept.low, one.kept.high)]}
    )
    taus = [round(t, 2) for t in one.taus]
    said = {"verdict": one.verdict, "taus": taus, "prompts": prompts, "source": source}
    return key(claim) | {"target": target} | said | figures | kept


def key(claim: Claim) -> dict[str, str]:
    """Return the fields that identify a claim."""
    return {"paper": claim.paper, "table": claim.table, "claim": claim.claim}


SHARE = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def share(told: str) -> tuple[float, float, float]:
    """Return a share of nodes and its interval, as a table has them."""
    match = SHARE.match(told)
    assert match is not None
    value, low, high = map(float, match.groups())
    return value, low, high


def equal(claim: Claim, target: str = "demo") -> dict[str, Any] | None:
    """Return the verdict of a claim at equal τ, of the saved share of nodes: fewer than 1 holds."""
    at = EQUAL if target == "demo" else EQUAL_SMOLLM2
    if (of := at.get((claim.paper, claim.table, claim.claim))) is None:
        return None
    if not (RESULTS / f"{of.result}.json").is_file():
        return None
    rows, found = (
        read_result(RESULTS / f"{of.result}.json")["rows"],
        list[tuple[float, float, float]](),
    )
    for wanted in of.rows:
        row = [r for r in rows if wanted.items() <= r.items()][-1]
        value, low, high = row.get("share") or share(row["nodes at equal τ [95 %]"])
        found.append((1 / value, 1 / high, 1 / low) if of.inverse else (value, low, high))
    verdicts = [at_equal(low, high, of.keeps) for _, low, high in found]
    verdict = next(word for word in ("fails", "ties", "holds") if word in verdicts)
    worst = max(found)
    figures = {"ratio": [round(x, 3) for x in worst], "of": "nodes at equal τ", "source": of.result}
    return key(claim) | {"target": target, "verdict": verdict} | figures


def at_equal(low: float, high: float, keeps: bool) -> str:
    """Return the verdict of a share of nodes by its interval."""
    if keeps:
        return (
            "holds"
            if high <= 1 + judging.KEPT_MARGIN
            else "fails"
            if low > 1 + judging.KEPT_MARGIN
            else "ties"
        )
    return "holds" if high < 1 else "fails" if low > 1 else "ties"


def special(target: str) -> list[dict[str, Any]]:
    """Return the verdicts of claims that compare something else.

    They are about ADED at two temperatures, and about C2T's net by itself.
    """
    found, claim = [], next(c for c in CLAIMS if (c.paper, c.table) == (ADED, "Fig. 5b"))
    if target == "smollm2":
        rows = [
            r
            for r in read_result(RESULTS / "evidence.json")["rows"]
            if (r["drafter"], r["policy"]) == ("aded", "mcts")
        ]
        at = {r["temperature"]: r for r in rows}
        ratio = paired_ratio(at[1.0], at[0.0], "steps")
        one = judging.JudgedClaim(
            replace(claim, keeps=True),
            (at[1.0]["acceptance_length"], at[0.0]["acceptance_length"]),
            ratio,
        )
        one = replace(one, verdict=judging.judge_ratio(one.claim, ratio))
        found.append(entry(claim, target, one, "evidence", len(at[1.0]["per_prompt"]["tokens"])))
    found += calibrated(target)
    if target == "demo":
        found += [*spoken(), *stored(), *truncated(), *by_category(), *other_texts()]
    surface = next(c for c in CLAIMS if (c.paper, c.table) == (C2T, "Fig. 9, 10"))
    answers = surfaces(target)
    holds = [answers[P, H, 1] > answers[P, H, 10] for P, H in ((0.05, 1.0), (0.3, 4.0))]
    told = "; ".join(
        f"P {P:g}, H {H:g}: {answers[P, H, 1]:.2f} at depth 1, {answers[P, H, 10]:.2f} at 10"
        for P, H in POINTS
    )
    verdict = "holds" if all(holds) else "fails"
    return [
        *found,
        key(surface)
        | {"target": target, "verdict": verdict, "of": told, "source": "the shipped net"},
    ]


def claim_of(paper: str, table: str, of: str) -> Claim:
    """Return a claim by what names it."""
    return next(c for c in CLAIMS if (c.paper, c.table, c.claim) == (paper, table, of))


def calibrated(target: str) -> list[dict[str, Any]]:
    """Return the verdict on EDD's calibration, of what benchmarks/calibration.py saved."""
    name = f"calibration_{target}"
    if not (RESULTS / f"{name}.json").is_file():
        return []
    saved = read_result(RESULTS / f"{name}.json")
    error, (low, high) = saved["calibration"]["ECE"], saved["calibration"]["interval"]
    after = next(r for r in saved["rows"] if r["q"] == "isotonic")["ECE, other half"]
    verdict = (
        "holds" if high <= judging.KEPT_MARGIN else "fails" if low > judging.KEPT_MARGIN else "ties"
    )
    told = f"ECE {error:.2f} [{low:.2f}, {high:.2f}]; {after:.2f} after isotonic regression, on other texts"
    said = {
        "target": target,
        "verdict": verdict,
        "of": told,
        "source": name,
        "prompts": saved["provenance"]["prompts"],
    }
    return [key(claim_of(EDD_PCT, "Fig. 3b", "confidence is acceptance")) | said]


def spoken() -> list[dict[str, Any]]:
    """Return the verdict on the seconds of GLIDE's drafting.

    CAPE takes no more than a chain, and less than beam search.
    """
    if not (RESULTS / "papers_demo.json").is_file():
        return []
    result = read_result(RESULTS / "papers_demo.json")
    costs = CostTable(
        tuple(costs_read(e) for e in result["provenance"]["costs"]["glide"]["entries"])
    )
    rows = {r["policy"]: draft_row(r, costs) for r in result["rows"] if r["drafter"] == "glide"}
    cape, beam = (
        paired_ratio(rows["cape"], rows[other], "steps") for other in ("chain:length=5", "beam")
    )
    claim = claim_of(GLIDE_CAPE, "3", "speculation's milliseconds")
    one = judging.with_ratios(
        replace(judging.JudgedClaim(claim, (1.0, 1.0)), claim=replace(claim, keeps=True)), [cape]
    )
    both = (one.verdict, judging.judge_ratio(claim, beam))
    verdict = next(word for word in ("fails", "ties", "holds") if word in both)
    shares = [
        f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}] of {of}"
        for r, of in ((cape, "a chain's"), (beam, "beam search's"))
    ]
    told = f"CAPE's draft seconds a step are {' and '.join(shares)}"
    said = {"target": "demo", "verdict": verdict, "of": told, "source": "papers_demo"}
    return [key(claim) | said | {"prompts": len(rows["cape"]["per_prompt"]["tokens"])}]


def draft_row(row: ResultRow, costs: CostTable) -> ResultRow:
    """Return a row of the seconds of drafting (`steps`) per step of the loop (`tokens`)."""
    seconds = [
        estimate_seconds(costs, work)[1] for _, work in step_codec.decode_steps(row["work"], "row")
    ]
    return {"per_prompt": {"tokens": row["per_prompt"]["steps"], "steps": seconds}}


def costs_read(entry: Mapping[str, Any]) -> Costs:
    """Return the costs of a saved result."""
    curves = {name: {int(w): s for w, s in entry[name].items()} for name in ("draft", "target")}
    return Costs(**{**entry, **curves})


def stored() -> list[dict[str, Any]]:
    """Return the verdict on the size of ADED's datastore compared with REST's.

    Both are built from the same 100 MB of text.
    """
    sizes = {
        r["kind"]: r["bytes"] for r in read_result(RESULTS / "retrieval_build_100.json")["rows"]
    }
    share = sizes["aded"] / sizes["rest"]
    told = f"{sizes['aded'] / 1e6:.0f} MB, REST {sizes['rest'] / 1e6:.0f} MB, of 100 MB of text"
    said = {
        "target": "demo",
        "verdict": "holds" if share < 0.1 else "fails",
        "of": told,
        "source": "retrieval_build_100",
    }
    return [key(claim_of(ADED, "3", "almost no memory")) | said]


def other_texts() -> list[dict[str, Any]]:
    """Return the verdicts on C2T's nets of other texts, of what benchmarks/c2t_texts.py saved.

    Its docstring has the rules. The gain in recall is the first half of Figure 7's claim.
    """
    if not (RESULTS / "papers_c2t_texts.json").is_file():
        return []
    saved = read_result(RESULTS / "papers_c2t_texts.json")
    rows, recall = {r["net"]: r for r in saved["rows"]}, saved["recall"]
    _, low, high = rows["other"]["share"]
    ratio = [round(x, 3) for x in rows["other"]["share"]]
    figures = {"ratio": ratio, "of": "nodes at equal τ"}
    said = {"target": "demo", "source": "papers_c2t_texts"}
    questions = len(next(r for r in saved["bench"] if r["policy"])["per_prompt"]["steps"])
    (old, new), (rate, tuned) = recall["recall"], recall["positive rate"]
    value, *ends = rows["tuned"]["share"]
    told = (
        f"recall {old:.2f} before, {new:.2f} after; positive rate {rate:.3f}, {tuned:.3f}; "
        f"{value:.2f} [{ends[0]:.2f}, {ends[1]:.2f}] of its nodes at equal τ"
    )
    tuning = key(claim_of(C2T, "Fig. 7", "fine-tuning raises recall")) | said
    tuning |= {"verdict": recall["verdict"], "of": told, "prompts": recall["texts"]}
    learning = key(claim_of(C2T, "Fig. 8", "other texts teach the same")) | said
    learning |= {"verdict": at_equal(low, high, True), "prompts": questions}
    return [tuning, learning | figures]


def truncated() -> list[dict[str, Any]]:
    """Return the verdicts on ADED's τ at several values of top-p, and at two temperatures.

    The texts differ, so figures of the same prompt are compared.
    """
    rows = {r["top_p"]: r for r in read_result(RESULTS / "papers_top_p.json")["rows"]}
    greedy = next(
        r
        for r in read_result(RESULTS / "papers_demo.json")["rows"]
        if (r["drafter"], r["policy"]) == (NAMES["aded"], "mcts")
    )
    found = []
    for table, of, mine, other, source in (
        ("Fig. 5a", "top-p changes little", rows[1.0], rows[0.7], "papers_top_p"),
        ("Fig. 5b", "temperature changes little", rows[1.0], greedy, "papers_top_p"),
    ):
        claim = claim_of(ADED, table, of)
        ratio = paired_ratio(mine, other, "steps")
        taus = (mine["acceptance_length"], other["acceptance_length"])
        one = judging.JudgedClaim(replace(claim, keeps=True), taus, ratio)
        one = replace(one, verdict=judging.judge_ratio(one.claim, ratio))
        found.append(entry(claim, "demo", one, source, len(mine["per_prompt"]["tokens"])))
    return found


def by_category() -> list[dict[str, Any]]:
    """Return the verdicts on MT-bench's eight categories: that ADED's τ is steady, and that PCT's nodes follow τ.

    Both p are by permutation: of the prompts among the categories, and of the categories.
    """
    result = read_result(RESULTS / "papers_categories.json")
    of = np.array(result["categories"])
    rows = {r["drafter"].partition(":")[0]: r for r in result["rows"] if r["policy"]}
    rng, said = (
        np.random.default_rng(0),
        {"target": "demo", "source": "papers_categories", "prompts": len(of)},
    )
    taus, _ = per_category(rows["aded"], of)
    spread = taus.max() / taus.min()
    by_chance = [per_category(rows["aded"], rng.permutation(of))[0] for _ in range(2000)]
    p = float(np.mean([t.max() / t.min() >= spread for t in by_chance]))
    verdict = "fails" if p < judging.ERROR_LEVEL and spread > 1 + judging.KEPT_MARGIN else "ties"
    told = f"τ from {taus.min():.2f} to {taus.max():.2f}; shuffled prompts spread as much with p = {p:.2f}"
    steady = key(claim_of(ADED, "Fig. 4b", "steady over categories")) | said
    taus, nodes = (ranks(x) for x in per_category(rows["edd"], of))
    r = float(np.corrcoef(taus, nodes)[0, 1])
    shuffled = [np.corrcoef(taus, rng.permutation(nodes))[0, 1] for _ in range(10_000)]
    chance = float(np.mean(np.array(shuffled) >= r))
    follows = "holds" if chance < judging.ERROR_LEVEL and r > 0 else "fails" if r < 0 else "ties"
    correlated = f"rank correlation of τ and nodes over eight categories {r:.2f} (p = {chance:.3f})"
    return [
        steady | {"verdict": verdict, "of": told, "p": p},
        key(claim_of(EDD_PCT, "Fig. 7", "more nodes where more is accepted"))
        | said
        | {"verdict": follows, "of": correlated, "p": chance},
    ]


def per_category(row: ResultRow, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return τ and nodes a step of each category, in the order of their names.

    Args:
        row: of a saved result.
        of: the category of each prompt.
    """
    names, where = np.unique(of, return_inverse=True)
    steps, accepted, nodes = (
        np.bincount(where, row["per_prompt"][k], len(names)) for k in ("steps", "accepted", "nodes")
    )
    return accepted / steps + 1, nodes / steps


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value."""
    return values.argsort().argsort()


POINTS = ((0.05, 1.0), (0.3, 4.0))
"""Where the surfaces are read: at low P, and at high entropy."""


def surfaces(target: str) -> dict[tuple[float, float, int], float]:
    """Return the confidence that the classifier of a target gives, by P, H in nats and depth."""
    from draftree.registry import build

    policy = build("policy", f"c2t:classifier={target}")
    cells = [(P, H, d) for P in (0.05, 0.3, 0.9) for H in (1.0, 2.5, 4.0) for d in (1, 5, 10)]
    P, H, depth = np.array(cells).T
    answers = policy.net.confidence(np.log(P), H, depth)
    return dict(zip(cells, map(float, answers), strict=True))


def run(
    paper: str, table: str, target: str, suites: Sequence[str], out: Path, more: Sequence[str]
) -> int:
    """Run a table or figure, and print its claims next to our figures."""
    items = [i for i in ITEMS if i.paper == paper and i.place.lower() == table.lower()]
    if not items:
        print(
            f"papers: {paper} has no '{table}', allowed are {', '.join(i.place for i in ITEMS if i.paper == paper)}",
            file=sys.stderr,
        )
        return 2
    item = items[0]
    if item.reason or item.run:
        print(f"{paper}, {item.place}: {item.reason or 'run ' + item.run}")
        return 0
    place = [word for suite in suites for word in ("--suite", suite)]
    result = out / f"{'-'.join(re.findall(r'[a-z0-9]+', f'{paper} {item.place}'.lower()))}.json"
    words = [
        "--paper",
        paper,
        "--table",
        item.place,
        "--target",
        target,
        *place,
        "--out",
        str(result),
        "--force",
        *more,
    ]
    status = called(paper_tables.main, words)
    if status == 0 and item.pictures:
        drafter = select_claims([paper], [item.place])[0].mine.partition(" ")[0]
        status = called(
            analyse.main,
            [
                "--target",
                target,
                "--drafter",
                drafter,
                *place,
                "--pictures",
                str(out / result.stem),
                "--force",
            ],
        )
    return status


def called(script: Callable[[Sequence[str]], NoReturn], words: Sequence[str]) -> int:
    """Call another script; return its exit status."""
    try:
        script(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def lists() -> str:
    """Return a line for each table and figure."""
    return "\n".join(
        f"{i.paper:14} {i.place:18} {i.what:52} {i.command or i.reason}" for i in ITEMS
    )


def main() -> int:
    """Run, list or judge; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="list all tables and figures with their commands"
    )
    parser.add_argument(
        "--judge", action="store_true", help="judge the claims by the saved results"
    )
    parser.add_argument(
        "--surfaces",
        metavar="TARGET",
        nargs="?",
        const="demo",
        help="answers of a shipped classifier (C2T, Fig. 9)",
    )
    parser.add_argument("--paper", choices=SHORT)
    parser.add_argument("--table", help="number of a table, or as in 'Fig. 5'")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("papers"))
    args, more = parser.parse_known_args()
    if args.list:
        print(lists())
    elif args.surfaces:
        for (P, H, depth), answer in surfaces(args.surfaces).items():
            print(f"P {P:g}  H {H:g}  depth {depth:2d}  {answer:.2f}")
    elif args.judge:
        rows = [*verdicts("demo"), *verdicts("smollm2")]
        about = {
            "family": "p adjusted by Holm's method over the different comparisons of a paper on a target",
            "least prompts": MIN_PROMPTS,
        }
        OUT.write_text(
            json.dumps({"provenance": about, "rows": rows}, indent=1, ensure_ascii=False) + "\n",
            "utf-8",
        )
        print(f"{OUT}: {len(rows)} verdicts")
    elif args.paper and args.table:
        args.out.mkdir(parents=True, exist_ok=True)
        return run(SHORT[args.paper], args.table, args.target, args.suite, args.out, more)
    else:
        parser.error("allowed are --list, --judge, --surfaces, or --paper with --table")
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `--list | head` ends without a trace
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
