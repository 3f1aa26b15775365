#!/usr/bin/env bash
# The tables on SmolLM2-135M: 20 questions of each of Spec-Bench's six tasks, 128 new tokens.
#
#     cd FOLDER; …/benchmarks/smollm2.sh [PART…]      # all parts by default
#
# FOLDER holds spec_bench.jsonl and gsm8k_train.jsonl, and DRAFTERS (by default ./drafters) what recipes/smollm2_drafters.py trained;
# results are written there, to be copied to benchmarks/results. A part that was stopped goes on where it was. THREADS=1
# lets two parts run side by side; figures by the clock want a quiet machine, and PART peers all of it.
#
#   drafters      every drafter with a chain of five and with pct
#   policies_edd  the policies with edd                    policies_eagle3  with eagle3
#   untrained     drafting without training                temperature      temperature 1
#   structured    JSON of a schema                         vocabulary       a draft vocabulary, and none
#   peers         tokens a second beside transformers' own ways
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
drafters=${DRAFTERS:-drafters}
export OMP_NUM_THREADS=${THREADS:-2}
policies=(chain vct pct eagle2 cape yield opttree beam dymax dyjoint c2t static:tree=auto)

suite() {  # the questions: of mt_bench's eight categories three, or two, each
    [ -f tasks.jsonl ] || python - <<'PY'
import json
from collections import Counter
tasks = {"translation", "summarization", "qa", "math_reasoning", "rag"}
seen, kept = Counter(), Counter()
with open("spec_bench.jsonl") as rows, open("tasks.jsonl", "w") as out:
    for row in map(json.loads, rows):
        task = row["category"] if row["category"] in tasks else "mt_bench"
        seen[row["category"]] += 1
        if kept[task] < 20 and (task != "mt_bench" or seen[row["category"]] <= 3):
            kept[task] += 1
            out.write(json.dumps(row | {"category": task}) + "\n")
PY
}

bench() {  # NAME OPTION…
    local name=$1
    shift
    draftree bench --target smollm2 --suite tasks.jsonl --max-new-tokens 128 "$@" --out "smollm2_$name.json"
}

drafters() { bench $FUNCNAME --drafter={edd,eagle,eagle3,vdm} --drafter="$drafters"/{mtp,glide} --drafter=pld --policy=chain --policy=pct; }
policies_edd() { bench $FUNCNAME --drafter edd "${policies[@]/#/--policy=}"; }
policies_eagle3() { bench $FUNCNAME --drafter eagle3 "${policies[@]/#/--policy=}"; }
untrained() { bench $FUNCNAME --pair={"pld chain:length=10","suffix trie","lookahead trie","pld+suffix trie","edd+suffix pct"}; }
temperature() { bench $FUNCNAME --temperature 1 --drafter={edd,eagle3} --policy={chain,pct,eagle2}; }
structured() { python "$here/structured.py" tasks.jsonl --target smollm2 --limit 20 --out smollm2_structured.json; }
vocabulary() { bench $FUNCNAME --drafter=edd --drafter="$drafters/edd-whole" --policy=chain --policy=pct; }
peers() {
    [ -d vdm-alone ] || draftree export vdm --target smollm2 --standalone --out vdm-alone
    python "$here/peers.py" --target smollm2 --suite tasks.jsonl --per-category 20 --assistant vdm-alone \
        --ours "edd pct" --ours "eagle3 pct" --ours "vdm chain" --ours "pld chain:length=10" --out smollm2_peers.json --plot smollm2_peers.svg
}

suite
[ $# -gt 0 ] || set -- peers drafters policies_edd policies_eagle3 untrained temperature structured vocabulary
for part in "$@"; do "$part"; done
