"""What the five papers claim, as recipes: pairings to be run and compared, or why nothing is run.

A figure of a paper is one claim, or a few, that can be judged: that acceptance rises with confidence, say, and not each of its
ten bars; `draftree analyse` draws the bars. Beside `plain` a pairing is compared with plain decoding. A drafter with an ending
(`edd-ce`) must be trained for the claim (`TRAINED` says how), and is then named by `--as`.
"""

from collections.abc import Sequence

from draftree.evaluation.claims import PLAIN, By, Claim

EDD, EAGLE2, GLIDE, C2T, ADED = "EDD + PCT", "EAGLE-2", "GLIDE + CAPE", "C2T", "ADED"
FIVE, FIXED = "chain:length=5", "static:paths=eagle1/mc_sim_7b_63"
BARE = "eagle2:expand_by=confidence,rank_by=confidence"
WIDE = "eagle2:depth=10,width=15,nodes=100"
SECONDS: By = "counted_seconds"
PLACES: By = "places"
STORE = "needs a datastore of its own: "
RECIPE = "recipes/ablations.py"
TRAINED = {
    "edd-ce": f"train edd:loss=ce, {RECIPE}",
    "edd-fixed": f"train edd:min_block=5,max_block=5, {RECIPE}",
    "edd-last": f"train edd:hidden_layer=-1, {RECIPE}",
    "edd-low": f"train edd:hidden_layer=1, {RECIPE}",
    "glide-nocross": f"train glide:cross=false, {RECIPE}",
    "glide-low": f"train glide:kv_layer=0, {RECIPE}",
    "glide-distilled": "train glide --regenerate, recipes/distil.py",
    "glide-deep": "train glide:layers=2",
    "glide-narrow": "train glide:hidden=768",
}
"""By the name of a drafter that none has: how it is trained."""
CLASSIFIERS = "needs classifiers trained anew: benchmarks/c2t_ablations.py trains and compares them"
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
    Claim(EDD, "3", "KL divergence over cross-entropy", "τ 3.99, without 3.60", "edd pct", "edd-ce pct"),
    Claim(EDD, "3", "random block lengths", "τ 3.99, without 3.72", "edd pct", "edd-fixed pct"),
    Claim(EDD, "4", "EDD over EAGLE at temperature 1", "τ 2.55, 2.30", f"edd {FIVE}", f"eagle {FIVE}", temperature=1.0),
    Claim(EDD, "4", "EDD over Medusa-1 at temperature 1", "τ 2.55, 1.60", f"edd {FIVE}", f"medusa {FIVE}", temperature=1.0),
    Claim(EDD, "5", "PCT faster than EAGLE-2's at T = 1", "2.91 ×, 2.67 ×", "edd pct", "edd eagle2", SECONDS, False, 1.0),
    Claim(EDD, "5", "PCT faster than CAPE at T = 1", "2.91 ×, 2.39 ×", "edd pct", "edd cape", SECONDS, False, 1.0),
    Claim(EDD, "Fig. 3b", "the surer, the oftener accepted", "rises over ten bins", "edd sure", "edd unsure", PLACES),
    Claim(EDD, "Fig. 5", "a layer near the top over the last one", "28th of 32 best", f"edd {FIVE}", f"edd-last {FIVE}"),
    Claim(EDD, "Fig. 5", "and over a low one", "28th of 32 best", f"edd {FIVE}", f"edd-low {FIVE}"),
    Claim(EDD, "Fig. 6", "width 5 over width 2", "τ rises to width 5", "edd pct", "edd pct:width=2"),
    Claim(EDD, "Fig. 6", "width 5 as long as width 8", "level beyond 5", "edd pct", "edd pct:width=8", keeps=True),
    Claim(EDD, "Fig. 6", "fewer nodes than EAGLE-2's tree", "about half", "edd pct", "edd eagle2", "nodes"),
    Claim(EDD, "Fig. 7", "more nodes where more is accepted", "by category", not_run="is a picture of categories: "
          "`analyse --result` draws it, and `bench` says τ of each"),
    Claim(EAGLE2, "1", "a dynamic tree over PLD", "τ 4.70, 1.43", "eagle eagle2", "pld chain:length=10"),
    Claim(EAGLE2, "1", "a dynamic tree over Lookahead", "τ 4.70, 1.66",
          not_run="Lookahead sends probes through the target, so it cannot be replayed: bench --drafter lookahead"),
    Claim(EAGLE2, "1", "a dynamic tree over EAGLE's fixed one", "τ 4.70, 3.62", "eagle eagle2", f"eagle {FIXED}"),
    Claim(EAGLE2, "2", "the same, LLaMA3-Instruct 8B", "τ 4.53, 3.65", "eagle eagle2", f"eagle {FIXED}"),
    Claim(EAGLE2, "3", "value over confidence", "τ 4.98, without 4.39", "eagle eagle2", f"eagle {BARE}"),
    Claim(EAGLE2, "3", "reranking", "τ 4.98, without 4.86", "eagle eagle2", "eagle eagle2:rerank=false"),
    Claim(EAGLE2, "3", "both", "τ 4.98, without 3.92", "eagle eagle2", f"eagle {BARE},rerank=false"),
    Claim(EAGLE2, "Fig. 5", "acceptance falls towards the lower right", "P1 highest, P6 lowest", "eagle upper-left",
          "eagle lower-right", PLACES),
    Claim(EAGLE2, "Fig. 5", "and with depth", "P1 highest, P6 lowest", "eagle upper-left", "eagle deep", PLACES),
    Claim(EAGLE2, "Fig. 6", "confidence tells acceptance", ".98 above .95, .04 below .05", "eagle sure", "eagle unsure",
          PLACES),
    Claim(GLIDE, "1", "the target's keys over none", "E(Spd.) 1.97, LLaMA-68m 1.46", f"glide {FIVE}", f"vdm {FIVE}"),
    Claim(GLIDE, "1", "significantly, p < .01", "all targets and sets", f"glide {FIVE}", f"vdm {FIVE}", level=0.01),
    Claim(GLIDE, "2", "distillation", "a .650, without .648", f"glide-distilled {FIVE}", f"glide {FIVE}"),
    Claim(GLIDE, "3", "speculation's milliseconds", "chain 5.3, beam 10.9, CAPE 5.5",
          not_run="is by the clock: `draftree bench --profile` with glide's chain, beam:width=4 and cape"),
    Claim(GLIDE, "4", "batches", "H800, tokens a second", not_run="is of that GPU, and `bench` writes one text at a time"),
    Claim(GLIDE, "Fig. 1b", "the surer, the oftener accepted", "rises", "glide sure", "glide unsure", PLACES),
    Claim(GLIDE, "Fig. 4", "over the Vanilla Drafter", "a higher on four sets", f"glide {FIVE}", f"glide-nocross {FIVE}"),
    Claim(GLIDE, "Fig. 5", "faster than plain decoding", "107, 55 tokens a second", f"glide {FIVE}", PLAIN, SECONDS),
    Claim(GLIDE, "Fig. 6", "CAPE faster than GLIDE alone", "2.50 ×, Vicuna 7B", "glide cape", f"glide {FIVE}", SECONDS),
    Claim(GLIDE, "Fig. 6", "and than beam search", "beam slower", "glide cape", "glide beam:width=4", SECONDS),
    Claim(GLIDE, "Fig. 7", "upper layers' keys over lower ones'", "a rises with the layer", f"glide {FIVE}",
          f"glide-low {FIVE}"),
    Claim(GLIDE, "Fig. 8", "one layer faster than two", "targets below 33B", f"glide {FIVE}", f"glide-deep {FIVE}", SECONDS),
    Claim(GLIDE, "Fig. 9", "a wide state over 768", "up to 4,096", f"glide {FIVE}", f"glide-narrow {FIVE}", SECONDS),
    Claim(C2T, "1", "entropy and depth as features", "γ .7 M with, .9 M without either", not_run=CLASSIFIERS),
    Claim(C2T, "2", "the τ of EAGLE-2", "L2 13B: τ 4.59, 4.58", "eagle c2t", "eagle eagle2", keeps=True),
    Claim(C2T, "2", "with fewer nodes", "L2 13B: γ 1.9 M, 2.6 M", "eagle c2t", "eagle eagle2", "nodes"),
    Claim(C2T, "3", "chains as long as DyJoint's", "τ 2.12, 2.12", "eagle c2t:chain=true", "eagle dyjoint", keeps=True),
    Claim(C2T, "3", "with fewer nodes", "γ 116,694, 129,876", "eagle c2t:chain=true", "eagle dyjoint", "nodes"),
    Claim(C2T, "4", "EAGLE-2 over EAGLE's tree at 26 nodes", "τ 3.95, 3.66", "eagle eagle2:nodes=26",
          "eagle static:paths=eagle1/mc_sim_7b_63"),
    Claim(C2T, "4", "C2T as long as that", "τ 4.06, 3.95", "eagle c2t:beta=0.85,depth=6,width=10", "eagle eagle2:nodes=26",
          keeps=True),
    Claim(C2T, "4", "with fewer nodes", "γ 226,569, 317,668", "eagle c2t:beta=0.85,depth=6,width=10", "eagle eagle2:nodes=26",
          "nodes"),
    Claim(C2T, "5", "a second cut saves nodes", "γ .78 M, .98 M", "eagle c2t", "eagle c2t:layer_top=none", "nodes"),
    Claim(C2T, "5", "and keeps τ", "τ 3.92, 4.02", "eagle c2t", "eagle c2t:layer_top=none", keeps=True),
    Claim(C2T, "6", "entropy over 1,000 tokens is enough", "τ 3.92, 3.92", not_run=CLASSIFIERS),
    Claim(C2T, "7", "C2T's chain over MTP keeps τ", "τ 2.10, 2.12", "mtp c2t:chain=true", "mtp chain:length=10", keeps=True),
    Claim(C2T, "7", "with fewer nodes", "γ 98,141, 156,040", "mtp c2t:chain=true", "mtp chain:length=10", "nodes"),
    Claim(C2T, "7", "its tree over MTP keeps τ", "τ 3.84, 3.86", "mtp c2t", f"mtp {WIDE}", keeps=True),
    Claim(C2T, "7", "with fewer nodes", "γ .72 M, .90 M", "mtp c2t", f"mtp {WIDE}", "nodes"),
    Claim(C2T, "Fig. 2", "at high entropy the likeliest is better than its q", "bias below 0", "eagle open", "eagle open-said",
          PLACES),
    Claim(C2T, "Fig. 2", "at low entropy worse", "bias above 0", "eagle closed-said", "eagle closed", PLACES),
    Claim(C2T, "Fig. 4", "as long as EAGLE-2's tree of 100", "one curve of τ", "eagle c2t:beta=0.3", f"eagle {WIDE}",
          keeps=True),
    Claim(C2T, "Fig. 4", "with fewer nodes", "lower γ", "eagle c2t:beta=0.3", f"eagle {WIDE}", "nodes"),
    Claim(C2T, "Fig. 5", "and faster", "18 % less time, 70B", "eagle c2t:beta=0.3", f"eagle {WIDE}", SECONDS),
    Claim(C2T, "Fig. 6", "12 to 48 hidden units learn alike", "curves", not_run=CLASSIFIERS),
    Claim(C2T, "Fig. 7", "fine-tuning raises recall", "curves", not_run="needs a classifier fine-tuned for another drafter: "
          "benchmarks/c2t_tables.py 2 --data"),
    Claim(C2T, "Fig. 8", "other texts teach the same", "one curve",
          not_run="needs classifiers of other texts: train c2t --data"),
    Claim(C2T, "Fig. 9, 10", "what the classifier answers", "surfaces",
          not_run="shows the net by itself, at no text: nothing is "
          "claimed of a target"),
    Claim(C2T, "Fig. 11", "the parts of drafting's time", "GPU",
          not_run="is by the clock: `draftree bench --profile` draws it"),
    Claim(ADED, "1", "adaptive retrieval over REST", "τ 2.42, 1.97", "aded mcts", "rest trie"),
    Claim(ADED, "2", "the size of the corpus", "τ 2.42, 2.30; 574, 253 MB",
          not_run=STORE + "benchmarks/paper_rows.sh aded_corpora"),
    Claim(ADED, "3", "almost no memory", "574 MB, REST 12 GB",
          not_run="is of files: `draftree datastore build` of both kinds says "
          "their sizes, docs/reference/benchmarks/toy.md"),
    Claim(ADED, "Fig. 3", "faster than plain decoding", "1.9 ×", "aded mcts", PLAIN, SECONDS),
    Claim(ADED, "Fig. 4a", "adapting lengthens", "at every length of the text", "aded mcts", "aded:adapt=false mcts"),
    Claim(ADED, "Fig. 4b", "steady over categories", "τ by category",
          not_run="is a picture of categories: `bench` says τ of each"),
    Claim(ADED, "Fig. 5", "top-p changes little", "τ level", not_run="`replay` draws without top-p: generate --top-p"),
    Claim(ADED, "Fig. 5", "faster at temperature 1, too", "τ level", "aded mcts", PLAIN, SECONDS, False, 1.0),
    Claim(ADED, "Fig. 6", "150 searches over 30", "τ rises", "aded mcts", "aded mcts:iterations=30"),
    Claim(ADED, "Fig. 6", "a search over a greedy sentence", "τ 2.42, 1.49", "aded mcts", "aded chain:length=4"),
    Claim(ADED, "Fig. 7", "exploring over hardly any", "τ rises with c₁", "aded mcts", "aded mcts:c1=0.3"),
    Claim(ADED, "Fig. 7", "and over too much", "and falls again", "aded mcts", "aded mcts:c1=512"),
)  # fmt: skip


def selected(papers: Sequence[str]) -> list[Claim]:
    """The claims of papers whose names contain some text, in the order of the papers; of all where none is named."""
    return [c for c in CLAIMS if not papers or any(p.lower() in c.paper.lower() for p in papers)]
