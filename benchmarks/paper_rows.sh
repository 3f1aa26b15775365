#!/usr/bin/env bash
# Ablations and figures of the papers that the tables of policies leave out, with the demo target, greedily.
#
#     cd FOLDER; …/benchmarks/paper_rows.sh [PART…]      # all parts by default
#
# FOLDER holds spec_bench.jsonl and gsm8k_train.jsonl; datastores and results are written there, to be copied to benchmarks/results.
# Counted figures are by the frozen costs of the tables beside which these stand. A part that was stopped goes on where it was.
#
# LIMIT=20 asks the first 20 of the math questions and not 40, EACH=2 two of each other category and not five.
#
#   paper_edd          PCT without expected gain, both meanings (EDD + PCT, Table 3); EAGLE-2's Table 3; CaPE's sets
#   paper_leaves       both of its rules at several thresholds: leaves by value, nodes by own confidence
#   paper_other_edd    as paper_edd on the questions that nothing here was tuned on
#   paper_eagle        the same with the other drafter
#                      (of these two and of paper_leaves no result is saved, and no page quotes one)
#   aded_math          ADED's ablations and its greedy sentence
#   aded_search        ADED, Figures 6 and 7: iterations, c1 and c2
#   aded_corpora       ADED, Table 2: datastores of an eighth, a quarter, half and all of the chats
#   aded_places        ADED, Figure 4a: acceptance by place in the text, with and without adapting
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
math=(--category math_reasoning --limit "${LIMIT:-40}")
other=(--per-category "${EACH:-5}")
for category in writing roleplay reasoning math coding extraction stem humanities; do other+=(--category "$category"); done
policies=(pct pct:gain=false pct:ratio=0,own={0.03,0.05,0.1,0.2,0.3,0.4}
    eagle2 eagle2:expand_by=confidence,rank_by=confidence eagle2:expand_by=confidence,rank_by=confidence,rerank=false
    cape cape:sets=4)
stored=aded-math

costs() {  # RESULT DRAFTER: the costs that a saved result was counted in, as a file
    python - "$here/results/$1.json" "$2" "costs_$1.json" <<'PY'
import json, sys
saved, drafter, out = sys.argv[1:]
open(out, "w").write(json.dumps(json.load(open(saved))["provenance"]["costs"][drafter]))
PY
    echo "costs_$1.json"
}

bench() {  # NAME COSTS OPTION…
    local name=$1 costs=$2
    shift 2
    draftree bench --suite spec_bench.jsonl --max-new-tokens 128 --costs "$costs" "$@" --out "$name.json"
}

store() {  # NAME CHATS [SETTING]
    [ -d "$1" ] && return
    head -n "$2" gsm8k_train.jsonl >"$1.jsonl"
    draftree datastore build --kind aded --data "$1.jsonl" --out "$1" ${3:+--set "$3"}
}

stores() {
    store $stored 7473
    store aded2-math 7473 n=2
    store aded4-math 7473 n=4
    for chats in 934 1868 3736; do store "aded-$chats" $chats; done
}

paper_edd() { bench $FUNCNAME "$(costs policies_edd edd)" "${math[@]}" --drafter edd "${policies[@]/#/--policy=}"; }
paper_leaves() {
    bench $FUNCNAME "$(costs policies_edd edd)" "${math[@]}" --drafter edd --policy=pct{,:leaf_threshold={0.02,0.03,0.05}} \
        --policy=pct:ratio=0,own={0.07,0.1,0.15}
}
paper_other_edd() { bench $FUNCNAME "$(costs policies_other_edd edd)" "${other[@]}" --drafter edd "${policies[@]/#/--policy=}"; }
paper_eagle() { bench $FUNCNAME "$(costs policies_eagle eagle)" "${math[@]}" --drafter eagle "${policies[@]/#/--policy=}"; }

aded() {  # NAME "DRAFTER POLICY"…
    local name=$1
    shift
    stores
    bench "$name" "$(costs retrieval_math aded-math)" "${math[@]}" "${@/#/--pair=}"
}

aded_math() {
    aded $FUNCNAME "$stored mcts" "$stored mcts:search=greedy" "$stored chain:length=4" \
        "$stored mcts:reward=official,unvisited=first" "aded:datastore=$stored,session=false mcts" \
        "aded:datastore=$stored,adapt=false mcts" "aded2-math mcts" "aded4-math mcts"
}
aded_search() {
    aded $FUNCNAME "$stored mcts:iterations="{10,30,75,150,300,1000} "$stored mcts:c1="{0,0.3,2.414,8,128} "$stored mcts:c2="{0.1,1,100}
}
aded_corpora() { aded $FUNCNAME "aded-"{934,1868,3736}" mcts" "$stored mcts"; }
aded_places() {
    stores
    python "$here/places.py" spec_bench.jsonl "${math[@]}" --policy mcts:c1=2.414 --out $FUNCNAME.json \
        --drafter "aded:datastore=$stored,session=false" --drafter "aded:datastore=$stored,session=false,adapt=false"
}

[ $# -gt 0 ] || set -- paper_edd paper_leaves aded_search aded_places aded_math aded_corpora paper_other_edd paper_eagle
for part in "$@"; do "$part"; done
