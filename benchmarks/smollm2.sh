#!/usr/bin/env bash
# The tables on SmolLM2-135M: 20 questions of each of Spec-Bench's six tasks, 128 new tokens.
#
#     cd FOLDER; …/benchmarks/smollm2.sh [PART…]      # all parts by default
#
# FOLDER holds spec_bench.jsonl, and DRAFTERS (by default ./drafters) what recipes/smollm2_drafters.py trained; results are
# written there, to be copied to benchmarks/results. EACH is how many questions of a task are asked. τ and counted speed-ups
# are replayed along texts that the model writes once; an interrupted part goes on. THREADS=1 lets two parts run side by
# side; COSTS, PEERS, TEMPERATURE and STRUCTURED go by the clock and want a quiet machine.
#
#   costs         seconds of a pass and of a draft step     peers           tokens a second beside transformers' own ways
#   drafters      every drafter with a chain of five, pct   places          τ by place in the answer
#   policies_edd  the policies with edd                     policies_eagle3 with eagle3
#   untrained     drafting without training                 earlier         each drafter beside its own earlier weights
#   vocabulary    a draft vocabulary, and none              temperature     temperature 1
#   structured    JSON of a schema
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
drafters=${DRAFTERS:-drafters} each=${EACH:-20}
export OMP_NUM_THREADS=${THREADS:-2}
trained=(edd eagle eagle3 vdm "$drafters/mtp" "$drafters/glide")

suite() {  # the questions: of mt_bench's eight categories two or three each
    [ -f tasks.jsonl ] || python - "$each" <<'PY'
import json, sys
from collections import Counter
each, tasks = int(sys.argv[1]), {"translation", "summarization", "qa", "math_reasoning", "rag"}
seen, kept = Counter(), Counter()
with open("spec_bench.jsonl") as rows, open("tasks.jsonl", "w") as out:
    for row in map(json.loads, rows):
        task = row["category"] if row["category"] in tasks else "mt_bench"
        seen[row["category"]] += 1
        if kept[task] < each and (task != "mt_bench" or seen[row["category"]] <= -(-each // 8)):
            kept[task] += 1
            out.write(json.dumps(row | {"category": task}) + "\n")
PY
}

costs_of() { echo "costs_$(basename "$1").json"; }
costs() { for d in "${trained[@]}"; do [ -f "$(costs_of "$d")" ] || draftree costs --target smollm2 --drafter "$d" --out "$(costs_of "$d")"; done; }

replay() {  # NAME "DRAFTER…" OPTION…: every drafter with its costs
    local name=$1 options=() d
    for d in $2; do options+=(--drafter "$d" --costs "$(costs_of "${d%%/step-*}")"); done
    shift 2
    python "$here/replayed.py" tasks.jsonl --target smollm2 --texts texts.json "${options[@]}" "$@" --out "smollm2_$name.json"
}

policies() {  # NAME
    local policy=(chain dymax dyjoint vct pct eagle2 cape yield opttree beam:width=4 c2t:classifier=smollm2 "static:paths=smollm2/$1")
    replay "policies_$1" "$1" "${policy[@]/#/--policy=}"
}

drafters() { replay drafters "${trained[*]}" --policy=chain --policy=pct --policy=eagle2; }
policies_edd() { policies edd; }
policies_eagle3() { policies eagle3; }
untrained() { draftree bench --target smollm2 --suite tasks.jsonl --max-new-tokens 128 --out smollm2_untrained.json \
    --pair={"pld chain:length=10","suffix trie","lookahead trie","pld+suffix trie","edd+suffix pct"}; }
earlier() { for d in edd eagle eagle3 vdm mtp glide; do replay "earlier_$d" "$(echo "$drafters/$d/step-"*) $drafters/$d" --policy=chain; done; }
vocabulary() { replay vocabulary "$drafters/edd $drafters/edd-whole" --policy=chain --policy=pct; }
places() { python "$here/places.py" tasks.jsonl --target smollm2 --texts texts.json --drafter={edd,eagle,vdm} --policy chain --stretch 20 --max-new-tokens 128 --out smollm2_places.json; }
temperature() { draftree bench --target smollm2 --suite tasks.jsonl --max-new-tokens 128 --temperature 1 --drafter={edd,eagle3} \
    --policy={chain,pct,eagle2} --out smollm2_temperature.json; }
structured() { python "$here/structured.py" tasks.jsonl --target smollm2 --limit 20 --out smollm2_structured.json; }
peers() {
    [ -d vdm-alone ] || draftree export vdm --target smollm2 --standalone --out vdm-alone
    python "$here/peers.py" --target smollm2 --suite tasks.jsonl --per-category "$each" --assistant vdm-alone --ours "edd pct" \
        --ours "edd yield" --ours "eagle3 yield" --ours "edd+suffix yield" --ours "vdm chain" --ours "pld chain:length=10" \
        --out smollm2_peers.json --plot smollm2_peers.svg
}

suite
[ $# -gt 0 ] || set -- costs peers drafters policies_edd policies_eagle3 untrained earlier vocabulary places temperature structured
for part in "$@"; do "$part"; done
