#!/usr/bin/env bash
# The tables on SmolLM2-135M: 20 questions of each of Spec-Bench's six tasks, 128 new tokens.
#
#     cd FOLDER; …/benchmarks/smollm2.sh [PART…]      # all parts by default
#
# FOLDER holds spec_bench.jsonl, and DRAFTERS (by default ./drafters) what recipes/smollm2_drafters.py trained; results are
# written there, to be copied to benchmarks/results. EACH is how many questions of a task are asked. τ and counted speed-ups
# are replayed along texts that the model writes once; an interrupted part goes on. THREADS=1 lets two parts run side by
# side, but for `costs` and what goes by the clock (`peers`, `lookahead`): a quiet machine for those.
#
#   costs         seconds of a pass and of a draft step     peers            tokens a second beside transformers' own ways
#   drafters      chains of every drafter                   earlier          each beside its own earlier weights (math)
#   policies_edd  policies with edd (ten of each task)      policies_eagle3  with eagle3 (ten)
#   untrained     drafting without training (ten)           lookahead        that one, by passes of the model
#   vocabulary    a draft vocabulary, and none (math)       places           τ by place in the answer
#   temperature   temperature 1, five of each task          structured       JSON of a schema (ten of math)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
drafters=${DRAFTERS:-drafters} each=${EACH:-20}
export OMP_NUM_THREADS=${THREADS:-2}
names=(edd eagle eagle3 vdm mtp glide)
trained="${names[*]/#/$drafters/}"
policies="pct eagle2 cape yield"

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

cost() {  # the file with a drafter's costs, measured where it is not there; earlier weights cost what the last ones do
    local weights=${1%%/step-*}
    local file=costs_$(basename "${weights//[+:=,]/-}").json
    [ -f "$file" ] || draftree costs --target smollm2 --drafter "$weights" --out "$file" >&2
    echo "$file"
}

cross() { for d in $1; do for p in $2; do echo "$d $p"; done; done; }

replay() {  # NAME [OPTION…], and a line for each pair on standard input
    local options=() known=" " drafter pair
    while read -r pair; do
        drafter=${pair% *} options+=(--pair "$pair")
        [[ $known == *" $drafter "* ]] || { options+=(--costs "$(cost "$drafter" </dev/null)") known+="$drafter "; }
    done
    draftree replay --suite tasks.jsonl --target smollm2 --recording recording "${options[@]}" "${@:2}" --out "smollm2_$1.json"
}

live() { draftree bench --target smollm2 --suite tasks.jsonl --max-new-tokens 128 "${@:2}" --out "smollm2_$1.json"; }

stores() {  # datastores of what the drafters learnt from
    for kind in rest aded; do
        [ -d "of-$kind" ] || draftree datastore build --kind "$kind" --target smollm2 --data "${DATA:-$drafters/answers-3348.jsonl}" --out "of-$kind"
    done
}

costs() { for d in $trained; do cost "$d"; done; }
math=(--category math_reasoning) ten=(--per-category 10)
drafters() { cross "$trained pld" chain:length=5 | replay drafters; }
earlier() { cross "$(echo "$drafters"/*/step-*) $trained pld" chain:length=5 | replay earlier "${math[@]}"; }
policies_edd() { cross "$drafters/edd" "$policies static:paths=smollm2/edd c2t:classifier=smollm2" | replay policies_edd "${ten[@]}"; }
policies_eagle3() { cross "$drafters/eagle3" "$policies static:paths=smollm2/eagle3" | replay policies_eagle3 "${ten[@]}"; }
untrained() {
    stores
    printf '%s\n' "pld chain:length=10" "suffix trie" "of-rest trie" "of-aded mcts" "pld+suffix trie" "$drafters/"{edd,eagle3}"+suffix yield" |
        replay untrained "${ten[@]}"
}
lookahead() { live lookahead --pair "lookahead trie" --pair "suffix trie"; }
temperature() { cross "$(echo "$drafters"/{edd,eagle3})" "chain:length=5 pct eagle2" | replay temperature --temperature 1 --per-category 5; }
structured() { python "$here/structured.py" tasks.jsonl --target smollm2 --limit 10 --out smollm2_structured.json; }
places() {
    python "$here/places.py" tasks.jsonl --target smollm2 --recording recording --drafter="$drafters"/{edd,vdm,eagle,glide} --policy chain:length=5 \
        --category math_reasoning --category qa --stretch 20 --max-new-tokens 128 --out smollm2_places.json
}
vocabulary() {  # the same weights behind the rows of 8,192 tokens, and behind the whole head
    [ -d edd-whole ] || python - "$drafters/edd" <<'PY'
import json, pathlib, sys
from safetensors.torch import load_file, save_file
made, out = pathlib.Path(sys.argv[1]), pathlib.Path("edd-whole")
out.mkdir()
config = json.loads((made / "config.json").read_text())
config["draftree"]["draft_vocab"] = 0
save_file({k: v for k, v in load_file(made / "model.safetensors").items() if not k.endswith("d2t")}, out / "model.safetensors")
(out / "config.json").write_text(json.dumps(config))
PY
    cross "$drafters/edd edd-whole" "chain:length=5 pct" | replay vocabulary "${math[@]}"
}
peers() {
    [ -d vdm-alone ] || draftree export "$drafters/vdm" --target smollm2 --standalone --out vdm-alone
    python "$here/peers.py" --target smollm2 --suite tasks.jsonl --per-category "$each" --assistant vdm-alone \
        --ours="$drafters/"{"edd pct","edd yield","eagle3 yield","edd+suffix yield","vdm chain"} --ours "pld chain:length=10" \
        --out smollm2_peers.json --plot smollm2_peers.svg
}

suite
[ $# -gt 0 ] || set -- costs peers drafters earlier policies_edd policies_eagle3 untrained lookahead vocabulary places temperature structured
for part in "$@"; do "$part"; done
