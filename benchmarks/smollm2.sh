#!/usr/bin/env bash
# The tables on SmolLM2-135M: 20 questions of each of Spec-Bench's six tasks, 128 new tokens.
#
#     cd FOLDER; …/benchmarks/smollm2.sh [PART…]      # all parts by default
#
# FOLDER holds spec_bench.jsonl; the drafters are the shipped ones. OTHERS names folders of further drafters for the part
# `chains`, and CHATS a file of the model's answers for the datastores (`recipes/smollm2_training.py chats`). EACH is how
# many questions of a task are asked. Results are written to FOLDER, to be copied to benchmarks/results. τ and counted
# speed-ups are replayed along texts that the model writes once; an interrupted part goes on. THREADS=1 lets two parts run
# side by side, but for `costs` and what goes by the clock (`lookahead`): a quiet machine for those.
#
#   costs         seconds of a pass and of a draft step     chains           chains of five of every drafter
#   policies_edd  policies with edd (ten of each task)      policies_eagle3  with eagle3 (ten)
#   untrained     drafting without training (ten)           lookahead        that one, by passes of the model
#   places        τ by place in the answer                  temperature      temperature 1, five of each task
#   structured    JSON of a schema (ten of math)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
each=${EACH:-20}
export OMP_NUM_THREADS=${THREADS:-2}
trained="eagle3 edd eagle vdm ${OTHERS:-}"
policies="pct eagle2 cape opttree ddtree yield"

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

cost() {  # the file with a drafter's costs, measured where it is not there
    local file=costs_$(basename "${1//[+:=,]/-}").json
    [ -f "$file" ] || draftree costs --target smollm2 --drafter "$1" --out "$file" >&2
    echo "$file"
}

cross() { for d in $1; do for p in $2; do echo "$d $p"; done; done; }

replay() {  # NAME [OPTION…], and a line for each pair on standard input
    local options=() pair
    while read -r pair; do options+=(--pair "$pair"); done
    draftree replay --suite tasks.jsonl --target smollm2 --recording recording "${options[@]}" "${@:2}" --out "smollm2_$1.json"
}

live() { draftree bench --target smollm2 --suite tasks.jsonl --max-new-tokens 128 "${@:2}" --out "smollm2_$1.json"; }

stores() {  # datastores of the model's answers
    for kind in rest aded; do
        [ -d "of-$kind" ] || draftree datastore build --kind "$kind" --target smollm2 --data "${CHATS:-chats.jsonl}" --out "of-$kind"
    done
}

costs() { for d in edd eagle3; do cost "$d"; done; }
ten=(--per-category 10)
chains() { cross "$trained suffix pld" chain:length=5 | replay chains; }
policies_edd() { cross edd "$policies static:paths=smollm2/edd c2t:classifier=smollm2" | replay policies_edd --costs "$(cost edd)" "${ten[@]}"; }
policies_eagle3() { cross eagle3 "$policies static:paths=smollm2/eagle3" | replay policies_eagle3 --costs "$(cost eagle3)" "${ten[@]}"; }
untrained() {
    stores
    printf '%s\n' "pld chain:length=10" "suffix trie" "of-rest trie" "of-aded mcts" "pld+suffix trie" {edd,eagle3}"+suffix yield" |
        replay untrained "${ten[@]}"
}
lookahead() { live lookahead --pair "lookahead trie" --pair "suffix trie"; }
temperature() { cross "edd eagle3" "chain:length=5 pct eagle2 yield" | replay temperature --temperature 1 --per-category 5; }
structured() { python "$here/structured.py" tasks.jsonl --target smollm2 --limit 10 --out smollm2_structured.json; }
places() {
    python "$here/places.py" tasks.jsonl --target smollm2 --recording recording --drafter={edd,vdm,eagle,eagle3} --policy chain:length=5 \
        --category math_reasoning --category qa --stretch 20 --max-new-tokens 128 --out smollm2_places.json
}
suite
[ $# -gt 0 ] || set -- costs chains policies_edd policies_eagle3 untrained lookahead places temperature structured
for part in "$@"; do "$part"; done
