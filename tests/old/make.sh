#!/usr/bin/env bash
# How the files in this folder were made, with draftree as it was at commit df120e6 (PYTHONPATH=that/src:that/tests).
# They are not made anew: what later versions write is tested elsewhere, and what these hold has to stay readable.
set -euo pipefail
python - <<'PYTHON'
import torch
from folders import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=260, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=96, initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
)
LlamaForCausalLM(config).save_pretrained("target")
byte_tokenizer().save_pretrained("target")
with open("texts.jsonl", "w") as file:
    for n in range(24):
        file.write('{"prompt": "count from %d", "completion": "%s"}\n' % (n, " ".join(str(n + i) for i in range(12))))
PYTHON
for method in edd glide; do
    python -m draftree train $method --target target --data texts.jsonl --out $method --epochs 1 --batch-size 8
done
for kind in rest aded; do
    python -m draftree datastore build --kind $kind --target target --data texts.jsonl --out $kind
done
python -m draftree train static --target target --drafter edd --data texts.jsonl --out tree.json
python -m draftree costs --target target --drafter edd --out costs.json
python -m draftree bench --suite texts.jsonl --target target --drafter edd --drafter rest --policy chain:length=3 --policy vct:width=2,depth=2 \
    --max-new-tokens 24 --limit 3 --costs costs.json --costs costs.json --out result.json
python - <<'PYTHON'
import json

import numpy as np
from draftree.registry import build
from draftree.sampling import Drawing
from draftree.target import Target
from draftree.tree import Tree

target, told = Target.load("target"), {}
text = np.array(target.tokenizer.encode("2 3 4 5 6 7 8"))
for name in ("edd", "glide", "rest", "aded"):
    drafter = build("drafter", name).open(target)
    verified = target.prefill(target.new_cache(1, 8), [text[:-1]], drafter.needs)
    state = drafter.start([text[:-1]], text[-1:], verified.taps)
    found, _ = drafter.expand(state, Tree.planted(np.arange(1), text[-1:]), np.arange(1), 3, Drawing())
    there = np.isfinite(found.log_q[0])
    told[name] = {"tokens": found.tokens[0][there].tolist(), "log_q": np.round(found.log_q[0][there], 6).tolist()}
with open("drafted.json", "w") as file:
    json.dump(told, file)
PYTHON
