"""What the five papers claim, as recipes: pairings to be run and compared, or why nothing is run.

A figure of a paper is one claim, or a few, that can be judged: that acceptance rises with
confidence, say, and not each of its ten bars; `benchmarks/analyse.py` draws the bars. Trees have as many
nodes and layers as in the paper, and above temperature 0 its rule. EAGLE-2's figures are those of
Vicuna 7B on MT-bench. Beside `plain` a pairing is compared with plain decoding. A drafter with an
ending (`edd-ce`) must be trained for the claim (`TRAINED` says how), and is then named by `--as`.
"""

from collections.abc import Sequence

from common.paper_claims import PLAIN, By, Claim

EDD_PCT = "EDD + PCT"
EAGLE2 = "EAGLE-2"
GLIDE_CAPE = "GLIDE + CAPE"
C2T = "C2T"
ADED = "ADED"
FIVE, FIXED = "chain:length=5", "static:paths=eagle1/mc_sim_7b_63"
BARE = "eagle2:expand_by=confidence,rank_by=confidence"
WIDE = "eagle2:depth=10,width=15,nodes=100"
SECONDS: By = "counted_seconds"
PLACES: By = "places"
NODES: By = "nodes"
Q1 = "match:coupled=false"
"""The papers' rule for deterministic trees at temperature above 0: q = 1, siblings asked in turn.
"""
PCT, E50, CAPE5 = "edd pct:ratio=0.037", "edd eagle2:nodes=50", "edd cape:length=5,max_nodes=40"
"""Of EDD's paper: sₐ/sₜ of its 7B pair, EAGLE-2's tree of 50, and CaPE five deep (section 4.1)."""
STORE = "needs a datastore of its own: "
RECIPE = "recipes/ablations.py"
SWEEPS = "recipes/sweeps.py"
TRAINED = {
    "edd-ce": f"train edd:loss=ce, {RECIPE}",
    "edd-fixed": f"train edd:min_block=5,max_block=5, {RECIPE}",
    "edd-last": f"train edd:hidden_layer=-1, {SWEEPS}",
    "edd-low": f"train edd:hidden_layer=4, {SWEEPS}",
    "glide-nocross": f"train glide:cross=false, {RECIPE}",
    "glide-low": f"train glide:kv_layer=0, {SWEEPS}",
    "glide-distilled": f"train glide --regenerate, {SWEEPS}",
    "glide-deep": f"train glide:layers=2, {SWEEPS}",
    "glide-narrow": f"train glide:hidden=768, {SWEEPS}",
}
"""By the name of a drafter that none has: how it is trained, for as many passes as what stands
beside it."""
CLASSIFIERS = "needs classifiers trained anew: benchmarks/c2t_ablations.py trains and compares them"
EQUAL = "stands at equal τ, between two curves: benchmarks/c2t_tables.py"
CATEGORIES = "is of categories: `bench` says τ of each, benchmarks/analyse.py draws it, and benchmarks/papers.py judges it"
SMALL = "small"
"""Stands for a smaller model of the target's family, such as `lm:model=FOLDER`; `vdm`, which reads
the text alone with one layer, stands in where there is none."""
CLAIMS = (
    Claim(
        EDD_PCT,
        "1",
        "EDD over a drafter without the target's states",
        "τ 2.73, VDM 1.96",
        f"edd {FIVE}",
        f"vdm {FIVE}",
    ),
    Claim(EDD_PCT, "1", "EDD over Medusa-1", "τ 2.73, 1.71", f"edd {FIVE}", f"medusa {FIVE}"),
    Claim(EDD_PCT, "1", "EDD over EAGLE", "τ 2.73, 2.50", f"edd {FIVE}", f"eagle {FIVE}"),
    Claim(EDD_PCT, "2", "PCT as long as EAGLE-2's tree", "τ 3.99, 3.99", PCT, E50, keeps=True),
    Claim(EDD_PCT, "2", "PCT faster than EAGLE-2's tree", "3.04 ×, 2.87 ×", PCT, E50, SECONDS),
    Claim(EDD_PCT, "2", "PCT faster than CAPE", "3.04 ×, 2.56 ×", PCT, CAPE5, SECONDS),
    Claim(
        EDD_PCT, "2", "PCT faster than a tree of width 3", "3.04 ×, 2.49 ×", PCT, "edd vct", SECONDS
    ),
    Claim(
        EDD_PCT,
        "3",
        "encoded states shorten decoding",
        "τ 3.99, without 3.04",
        PCT,
        "vdm pct:ratio=0.037",
    ),
    Claim(
        EDD_PCT,
        "3",
        "expected gain over confidence",
        "τ 3.99, without 3.45",
        PCT,
        "edd pct:ratio=0,own=0.1",
    ),
    Claim(
        EDD_PCT,
        "3",
        "leaves removed: faster, and τ kept",
        "3.04 ×, without 2.95 ×; τ 3.99, 3.99",
        PCT,
        f"{PCT},leaf_threshold=0",
        SECONDS,
        both=True,
    ),
    Claim(
        EDD_PCT,
        "3",
        "KL divergence over cross-entropy",
        "τ 3.99, without 3.60",
        PCT,
        "edd-ce pct:ratio=0.037",
    ),
    Claim(
        EDD_PCT,
        "3",
        "random block lengths",
        "τ 3.99, without 3.72",
        PCT,
        "edd-fixed pct:ratio=0.037",
    ),
    Claim(
        EDD_PCT,
        "4",
        "EDD over EAGLE at temperature 1",
        "τ 2.55, 2.30",
        f"edd {FIVE} {Q1}",
        f"eagle {FIVE} {Q1}",
        temperature=1.0,
    ),
    Claim(
        EDD_PCT,
        "4",
        "EDD over Medusa-1 at temperature 1",
        "τ 2.55, 1.60",
        f"edd {FIVE} {Q1}",
        f"medusa {FIVE} {Q1}",
        temperature=1.0,
    ),
    Claim(
        EDD_PCT,
        "4",
        "EDD over VDM at temperature 1",
        "τ 2.55, 1.70",
        f"edd {FIVE} {Q1}",
        f"vdm {FIVE} {Q1}",
        temperature=1.0,
    ),
    Claim(
        EDD_PCT,
        "5",
        "PCT faster than EAGLE-2's at T = 1",
        "2.91 ×, 2.67 ×",
        f"{PCT} {Q1}",
        f"{E50} {Q1}",
        SECONDS,
        False,
        1.0,
    ),
    Claim(
        EDD_PCT,
        "5",
        "PCT faster than CAPE at T = 1",
        "2.91 ×, 2.39 ×",
        f"{PCT} {Q1}",
        f"{CAPE5} {Q1}",
        SECONDS,
        False,
        1.0,
    ),
    Claim(
        EDD_PCT,
        "Fig. 3b",
        "the surer, the oftener accepted",
        "rises over ten bins",
        "edd sure",
        "edd unsure",
        PLACES,
    ),
    Claim(
        EDD_PCT,
        "Fig. 3b",
        "confidence is acceptance",
        "ECE 0.019",
        not_run="is a figure: benchmarks/analyse.py says the ECE",
    ),
    Claim(
        EDD_PCT,
        "Fig. 5",
        "a layer near the top over the last one",
        "28th of 32 best",
        f"edd {FIVE}",
        f"edd-last {FIVE}",
    ),
    Claim(
        EDD_PCT, "Fig. 5", "and over a low one", "28th of 32 best", f"edd {FIVE}", f"edd-low {FIVE}"
    ),
    Claim(EDD_PCT, "Fig. 6", "width 5 over width 2", "τ rises to width 5", PCT, f"{PCT},width=2"),
    Claim(
        EDD_PCT,
        "Fig. 6",
        "width 5 as long as width 8",
        "level beyond 5",
        PCT,
        f"{PCT},width=8",
        keeps=True,
    ),
    Claim(
        EDD_PCT,
        "Fig. 6",
        "fewer nodes than EAGLE-2's tree at its τ",
        "about half",
        PCT,
        E50,
        NODES,
        both=True,
    ),
    Claim(
        EDD_PCT, "Fig. 7", "more nodes where more is accepted", "by category", not_run=CATEGORIES
    ),
    Claim(
        EDD_PCT,
        "6",
        "longer accepted runs in an example",
        "a text",
        not_run="is one text: `generate --show-trees` shows one",
    ),
    Claim(
        EAGLE2,
        "1",
        "a dynamic tree over speculative sampling",
        "τ 4.98, SpS 2.36",
        "eagle eagle2",
        f"{SMALL} {FIVE}",
    ),
    Claim(
        EAGLE2,
        "1",
        "a dynamic tree over PLD",
        "τ 4.98, 1.68",
        "eagle eagle2",
        "pld chain:length=10",
    ),
    Claim(
        EAGLE2,
        "1",
        "a dynamic tree over Lookahead",
        "τ 4.98, 1.69",
        not_run="Lookahead sends probes through the target, so it cannot be replayed: bench --drafter lookahead",
    ),
    Claim(
        EAGLE2,
        "1",
        "a dynamic tree over Medusa",
        "τ 4.98, 2.52",
        "eagle eagle2",
        "medusa static:paths=medusa/vicuna_7b_stage1",
    ),
    Claim(
        EAGLE2,
        "1",
        "a dynamic tree over Hydra",
        "τ 4.98, 3.60",
        "eagle eagle2",
        "hydra static:paths=hydra/mc_sim_7b_63",
    ),
    Claim(
        EAGLE2,
        "1",
        "a dynamic tree over EAGLE's fixed one",
        "τ 4.98, 3.94",
        "eagle eagle2",
        f"eagle {FIXED}",
    ),
    Claim(EAGLE2, "1", "faster than plain decoding", "3.62 ×", "eagle eagle2", PLAIN, SECONDS),
    Claim(
        EAGLE2,
        "1",
        "faster than EAGLE",
        "3.62 ×, 2.90 ×",
        "eagle eagle2",
        f"eagle {FIXED}",
        SECONDS,
    ),
    Claim(
        EAGLE2,
        "1",
        "over EAGLE at temperature 1",
        "τ 4.28, 3.17",
        f"eagle eagle2 {Q1}",
        f"eagle {FIXED} {Q1}",
        temperature=1.0,
    ),
    Claim(
        EAGLE2,
        "1",
        "highest on HumanEval, lower on NQ and CNN/DM",
        "by task",
        not_run="needs HumanEval, which is not at hand: bench with six --suite says τ of each",
    ),
    Claim(
        EAGLE2,
        "2",
        "the same on LLaMA3-Instruct 8B and 70B",
        "τ 4.53, 3.65",
        not_run="needs weights of 8 and 70 billion parameters, which are not at hand: Table 1 with --target",
    ),
    Claim(
        EAGLE2,
        "3",
        "value over confidence",
        "τ 4.98, without 4.39",
        "eagle eagle2",
        f"eagle {BARE}",
    ),
    Claim(
        EAGLE2,
        "3",
        "reranking",
        "τ 4.98, without 4.86",
        "eagle eagle2",
        "eagle eagle2:rerank=false",
    ),
    Claim(
        EAGLE2, "3", "both", "τ 4.98, without 3.92", "eagle eagle2", f"eagle {BARE},rerank=false"
    ),
    Claim(
        EAGLE2,
        "Fig. 1, 2",
        "speed-ups of Table 1",
        "bars",
        not_run="draws Table 1, whose claims are judged there",
    ),
    Claim(
        EAGLE2,
        "Fig. 5",
        "acceptance falls towards the lower right",
        "P1 highest, P6 lowest",
        "eagle upper-left",
        "eagle lower-right",
        PLACES,
    ),
    Claim(
        EAGLE2,
        "Fig. 5",
        "and with depth",
        "P1 highest, P6 lowest",
        "eagle upper-left",
        "eagle deep",
        PLACES,
    ),
    Claim(
        EAGLE2,
        "Fig. 5",
        "and hangs on the context, too",
        "spread at each place",
        "eagle closed",
        "eagle open",
        PLACES,
    ),
    Claim(
        EAGLE2,
        "Fig. 6",
        "confidence tells acceptance",
        ".98 above .95, .04 below .05",
        "eagle sure",
        "eagle unsure",
        PLACES,
    ),
    Claim(
        GLIDE_CAPE,
        "1",
        "the target's keys over none",
        "E(Spd.) 1.97, LLaMA-68m 1.46; p < .01",
        f"glide {FIVE}",
        f"vdm {FIVE}",
        level=0.01,
    ),
    Claim(
        GLIDE_CAPE,
        "2",
        "distillation",
        "a .650, without .648",
        f"glide-distilled {FIVE}",
        f"glide {FIVE}",
    ),
    Claim(
        GLIDE_CAPE,
        "3",
        "speculation's milliseconds",
        "chain 5.3, beam 10.9 and 14.8, CAPE 5.5",
        not_run="is by the clock: `draftree bench` with glide's chain, beam:width=4, beam:width=8 and cape",
    ),
    Claim(
        GLIDE_CAPE,
        "4",
        "batches",
        "H800, tokens a second",
        not_run="is of a GPU that a batch fills, and there is none: `bench --batch` measures it in turns",
    ),
    Claim(
        GLIDE_CAPE,
        "5, 6, 7",
        "longer accepted runs in examples",
        "texts",
        not_run="consists of single texts: `generate --show-trees` shows one",
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 1b",
        "the surer, the oftener accepted",
        "rises",
        "glide sure",
        "glide unsure",
        PLACES,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 4",
        "over the Vanilla Drafter",
        "a higher on four sets",
        f"glide {FIVE}",
        f"glide-nocross {FIVE}",
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 5",
        "faster than plain decoding",
        "107, 55 tokens a second",
        f"glide {FIVE}",
        PLAIN,
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 6",
        "CAPE faster than GLIDE alone",
        "2.50 ×, Vicuna 7B",
        "glide cape",
        f"glide {FIVE}",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 6",
        "and than beam search",
        "beam slower",
        "glide cape",
        "glide beam",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 6",
        "beam search slower than GLIDE alone",
        "beam slower",
        f"glide {FIVE}",
        "glide beam",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 6",
        "GLIDE faster than Medusa",
        "bars",
        f"glide {FIVE}",
        "medusa static:paths=medusa/vicuna_7b_stage1",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 6",
        "CAPE over Medusa's heads",
        "bars",
        "medusa cape",
        f"medusa {FIVE}",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "5.4",
        "CAPE's sizes over a fixed four",
        "70.6, 68.4 tokens a second",
        "glide cape",
        "glide cape:sets=4",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 7",
        "upper layers' keys over lower ones'",
        "a rises with the layer",
        f"glide {FIVE}",
        f"glide-low {FIVE}",
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 8",
        "one layer faster than two",
        "targets below 33B",
        f"glide {FIVE}",
        f"glide-deep {FIVE}",
        SECONDS,
    ),
    Claim(
        GLIDE_CAPE,
        "Fig. 9",
        "a wide state over 768",
        "up to 4,096",
        f"glide {FIVE}",
        f"glide-narrow {FIVE}",
        SECONDS,
    ),
    Claim(
        C2T,
        "1",
        "entropy and depth as features",
        "γ .7 M with, .9 M without either",
        not_run=CLASSIFIERS,
    ),
    Claim(
        C2T,
        "2",
        "fewer nodes than EAGLE-2 at its τ",
        "L2 13B: γ 1.9 M, 2.6 M; τ 4.59, 4.58",
        "eagle c2t",
        f"eagle {WIDE}",
        NODES,
        both=True,
    ),
    Claim(
        C2T,
        "2",
        "a net of another target serves",
        "L2 7B's net on 13B and 70B",
        by=NODES,
        keeps=True,
        both=True,
        not_run="needs two targets, and a net of the other: "
        "replay --target smollm2 --pair 'edd c2t:classifier=demo'",
    ),
    Claim(
        C2T,
        "3",
        "fewer nodes than a chain, and DyJoint, at their τ",
        "γ 116,694, 129,876; τ 2.12, 2.12",
        not_run=EQUAL,
    ),
    Claim(
        C2T,
        "4",
        "EAGLE-2 over EAGLE's tree at 26 nodes",
        "τ 3.95, 3.66",
        "eagle eagle2:nodes=26",
        f"eagle {FIXED}",
    ),
    Claim(
        C2T,
        "4",
        "C2T over both with fewer nodes",
        "τ 4.06, 3.95; γ 226,569, 317,668",
        not_run=EQUAL,
    ),
    Claim(
        C2T,
        "5",
        "a second cut saves nodes and keeps τ",
        "γ .78 M, .98 M; τ 3.92, 4.02",
        "eagle c2t",
        "eagle c2t:layer_top=none",
        NODES,
        both=True,
    ),
    Claim(C2T, "6", "entropy over 1,000 tokens is enough", "τ 3.92, 3.92", not_run=CLASSIFIERS),
    Claim(
        C2T,
        "7",
        "fewer nodes over MTP at equal τ",
        "γ 98,141, 156,040; .72 M, .90 M",
        not_run=EQUAL,
    ),
    Claim(
        C2T,
        "Fig. 2",
        "at high entropy the likeliest is better than its q",
        "bias below 0",
        "eagle open",
        "eagle open-said",
        PLACES,
    ),
    Claim(
        C2T,
        "Fig. 2",
        "at low entropy worse",
        "bias above 0",
        "eagle closed-said",
        "eagle closed",
        PLACES,
    ),
    Claim(
        C2T,
        "Fig. 4",
        "fewer nodes than EAGLE-2's tree of 100 at its τ",
        "one curve of τ, lower γ",
        "eagle c2t:beta=0.3",
        f"eagle {WIDE}",
        NODES,
        both=True,
    ),
    Claim(
        C2T,
        "Fig. 5",
        "and faster",
        "18 % less time, 70B",
        "eagle c2t:beta=0.3",
        f"eagle {WIDE}",
        SECONDS,
    ),
    Claim(C2T, "Fig. 6", "12 to 48 hidden units learn alike", "curves", not_run=CLASSIFIERS),
    Claim(
        C2T,
        "Fig. 7",
        "fine-tuning raises recall",
        "curves",
        not_run="needs nets of other texts, some ten minutes of an idle core: benchmarks/c2t_texts.py",
    ),
    Claim(
        C2T,
        "Fig. 8",
        "other texts teach the same",
        "one curve",
        not_run="needs nets of other texts, some ten minutes of an idle core: benchmarks/c2t_texts.py",
    ),
    Claim(
        C2T,
        "Fig. 9, 10",
        "at low P and at high H a shallower node is surer",
        "surfaces",
        not_run="is of the net by itself: benchmarks/papers.py asks the shipped nets",
    ),
    Claim(
        C2T,
        "Fig. 11",
        "the parts of drafting's time",
        "GPU",
        not_run="is of a GPU's time, and there is none: `bench --profile` draws the parts",
    ),
    Claim(ADED, "1", "adaptive retrieval over REST", "τ 2.42, 1.97", "aded mcts", "rest trie"),
    Claim(
        ADED,
        "2",
        "the size of the corpus",
        "τ 2.42, 2.30; 574, 253 MB",
        not_run=STORE + "benchmarks/paper_rows.sh aded_corpora",
    ),
    Claim(
        ADED,
        "3",
        "almost no memory",
        "574 MB, REST 12 GB",
        not_run="is of files: `draftree datastore build` of both kinds says their sizes",
    ),
    Claim(ADED, "Fig. 3", "faster than plain decoding", "1.9 ×", "aded mcts", PLAIN, SECONDS),
    Claim(
        ADED,
        "Fig. 4a",
        "adapting lengthens",
        "at every length of the text",
        "aded mcts",
        "aded:adapt=false mcts",
    ),
    Claim(ADED, "Fig. 4b", "steady over categories", "τ by category", not_run=CATEGORIES),
    Claim(
        ADED,
        "Fig. 5a",
        "top-p changes little",
        "τ level",
        not_run="stands between values of top-p: `replay --top-p`",
    ),
    Claim(
        ADED,
        "Fig. 5b",
        "temperature changes little",
        "τ level from 0 to 1",
        not_run="stands between temperatures: `bench --temperature 0 --temperature 1`, benchmarks/papers.py",
    ),
    Claim(
        ADED, "Fig. 6", "150 searches over 30", "τ rises", "aded mcts", "aded mcts:iterations=30"
    ),
    Claim(
        ADED,
        "Fig. 6",
        "a search over a greedy sentence",
        "τ 2.42, 1.49",
        "aded mcts",
        "aded chain:length=4",
    ),
    Claim(
        ADED,
        "Fig. 7",
        "exploring over hardly any",
        "τ rises with c₁",
        "aded mcts",
        "aded mcts:c1=0.3",
    ),
    Claim(ADED, "Fig. 7", "and over too much", "and falls again", "aded mcts", "aded mcts:c1=512"),
)


def select_claims(papers: Sequence[str], tables: Sequence[str] = ()) -> list[Claim]:
    """Return the claims of the papers that match, in the order of the papers.

    Args:
        papers: parts of names; `eagle2` names EAGLE-2, too.
        tables: numbers of tables or figures, as the claims have them; all by default.
    """
    return [
        c
        for c in CLAIMS
        if (
            not papers
            or any(_letters_and_digits(p) in _letters_and_digits(c.paper) for p in papers)
        )
        and (not tables or _letters_and_digits(c.table) in map(_letters_and_digits, tables))
    ]


def _letters_and_digits(name: str) -> str:
    """Return the letters and digits of a name."""
    return "".join(filter(str.isalnum, name.lower()))
