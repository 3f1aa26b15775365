#!/usr/bin/env bash
# Forty pairings × temperatures 0 and 1 × 20 prompts × 48 tokens on SmolLM2-135M, on one core: docs/reference/benchmarks/smollm2.md, "Forty pairings".
#
#     cd FOLDER; …/benchmarks/evidence.sh [pairings|machines|recounted|claims…]     # all of them by default
#
# FOLDER holds spec_bench.jsonl, gsm8k_train.jsonl and `drafters`: glide and mtp of recipes/smollm2_drafters.py, and dspark,
# dflash, jetspec, peagle and edd-1848, each taught by its first 1,848 answers (docs/reference/benchmarks/smollm2.md, "Block drafters"). The other
# drafters are shipped. The model writes every text once; all else is replayed along these texts. An interrupted run, killed
# even, goes on where it was by the same command.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=1
asked=(--target smollm2 --suite spec_bench:spec_bench.jsonl --per-category 4 --max-new-tokens 48)
for task in mt_bench summarization qa math_reasoning rag; do asked+=(--category "$task"); done

pairs() {
    cat <<'PAIRS'
edd chain:length=5
edd pct
edd eagle2
edd cape
edd vct
edd opttree
edd ddtree
edd beam
edd dymax
edd dyjoint
edd c2t:classifier=smollm2
edd static:paths=smollm2/edd
edd yield
vdm chain:length=5
vdm pct
eagle chain:length=5
eagle eagle2
eagle static:paths=eagle1/mc_sim_7b_63
eagle eagle2:rerank=false
eagle eagle2:expand_by=confidence,rank_by=confidence
eagle pct
eagle3 eagle2
eagle3 yield
drafters/glide chain:length=5
drafters/glide cape
drafters/mtp chain:length=5
drafters/edd-1848 chain:length=8
drafters/dspark chain:length=8
drafters/dspark yield
drafters/dflash chain:length=8
drafters/dflash ddtree
drafters/jetspec accumlogp
drafters/peagle eagle2
pld chain:length=10
suffix trie
edd+suffix yield
of-rest trie
of-aded mcts
of-aded chain:length=4
of-aded yield
PAIRS
}

stores() {  # of what the drafters learnt from
    for kind in rest aded; do
        [ -d "of-$kind" ] && continue
        [ -f answers.jsonl ] || python - "$here" <<'PY'
import pathlib, sys
sys.path.insert(0, sys.argv[1] + "/../recipes")
from smollm2_drafters import ALL, kept
kept(pathlib.Path("gsm8k_train.jsonl"), ALL, pathlib.Path("answers.jsonl"))
PY
        draftree datastore build --kind "$kind" --target smollm2 --data answers.jsonl --out "of-$kind"
    done
}

replay() {  # OUT [OPTION…], and a line for each pairing on standard input
    local pairing options=()
    while read -r pairing; do options+=(--pair "$pairing"); done
    draftree replay "${asked[@]}" --recording recording "${options[@]}" "${@:2}" --out "$1.json"
    sed -i 's#drafters/##g; s#of-rest#rest#g; s#of-aded#aded#g' "$1.json"  # drafters by their names, not their folders
}

pairings() { pairs | replay evidence --temperature 0 --temperature 1; }
machines() {  # simulated, greedy: policies that read costs draft anew for each machine
    local options=() name
    for name in h100-8b rtx4090-8b-int4 4b300-dsv4flash h200-27b-hybrid; do options+=(--machine "$name"); done
    pairs | grep -E '^(edd (chain|pct|eagle2|cape|opttree|ddtree|yield)|eagle3|suffix)' |
        replay evidence_machines "${options[@]}"
}
recounted() {  # simulated, too: how far the figures of policies that do not read costs hang on a machine's curve
    local name options=()
    python - <<'PY'
import json
result, kept = json.load(open("evidence.json")), {"edd": ("chain", "eagle2", "cape", "ddtree"), "eagle3": ("eagle2",), "suffix": ("trie",)}
some = lambda r: not r["temperature"] and (r["drafter"] == "plain" or (r["policy"] or "").partition(":")[0] in kept.get(r["drafter"], ()))
costs = {d: c for d, c in result["provenance"]["costs"].items() if d in kept}
about = {**result["provenance"], "costs": costs, "drafting": {d: result["provenance"]["drafting"][d] for d in kept}}
oracle = [r for r in result["oracle"] if r["drafter"] in kept]
json.dump({**result, "provenance": about, "rows": [r for r in result["rows"] if some(r)], "oracle": oracle}, open("greedy.json", "w"))
PY
    for name in h100-8b rtx4090-8b-int4 4b300-dsv4flash; do options+=(--machine "$name"); done
    python "$here/recount.py" greedy.json "${options[@]}" --out evidence_varied.json
}
claims() {  # the papers' claims that the pairings answer
    python "$here/paper_tables.py" --target smollm2 --result evidence.json --as glide=glide --as mtp=mtp --as rest=rest --as aded=aded \
        --out claims.json --json | PYTHONPATH="$here" python -c '
import json, sys
from common.paper_claims import Claim, JudgedClaim
from draftree.evaluation.bootstrap import Ratio
names = Claim.__dataclass_fields__
found = [(Claim(**{k: v for k, v in c.items() if k in names}), c) for c in json.load(sys.stdin)["claims"] if c["ratio"]]
rows = [JudgedClaim(of, tuple(c["τ"]), Ratio(**c["ratio"]), c["verdict"]).cells() | {"verdict": c["verdict"]} for of, c in found]
about = {k: v for k, v in json.load(open("evidence.json"))["provenance"].items() if k not in ("costs", "drafting")}
json.dump({"provenance": about, "rows": rows}, open("evidence_claims.json", "w"), indent=1, ensure_ascii=False)'
}

stores
[ $# -gt 0 ] || set -- pairings machines recounted claims
for part in "$@"; do "$part"; done
