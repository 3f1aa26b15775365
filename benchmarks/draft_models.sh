#!/usr/bin/env bash
# The tables of draft models, by 40 math questions of Spec-Bench with the demo target, greedily.
#
#     benchmarks/draft_models.sh drafters spec_bench.jsonl
#
# `drafters` is what recipes/ablations.py trained; the drafters that are shipped are named by their methods.
set -euo pipefail
drafters=$1 suite=$2
results=$(dirname "$0")/results

bench() {  # NAME POLICY DRAFTER…
    local out="$results/$1.json" policy=$2
    shift 2
    draftree bench --suite "$suite" --category math_reasoning --limit 40 --max-new-tokens 128 --policy "$policy" \
        "${@/#/--drafter=}" --out "$out"
}

bench draft_models chain:length=5 edd "$drafters/edd-s1" mtp eagle "$drafters/eagle-s1" eagle3 \
    glide "$drafters/glide-s1" "$drafters/glide-nocross" "$drafters/glide-nocross-s1" hydra medusa "$drafters/medusa-s1" vdm "$drafters/vdm-s1"
bench edd_ablations pct:max_depth=10,ratio=0.1 "$drafters/edd-e1" "$drafters/edd-ce-e1" "$drafters/edd-phase0-e1" \
    "$drafters/edd-fixed-e1" "$drafters/edd-fixed-phase0-e1" "$drafters/vdm-e1"
bench edd_layers chain:length=5 "$drafters/edd-l4-e1" "$drafters/edd-l12-e1" "$drafters/edd-e1" "$drafters/edd-l24-e1"
bench glide_layers chain:length=5 "$drafters"/glide-kv{0,10,16,17,18,19,20,21,22,23}-e1 "$drafters/glide-nocross-e1" \
    "$drafters/glide-scratch-e1" "$drafters/glide-nocross-scratch-e1"
