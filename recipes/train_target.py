"""Train the small demo target: a Llama on Python's standard library and GSM8K answers.

    python recipes/train_target.py --gsm8k gsm8k_train.jsonl --out demo-target --minutes 70

Stops on a wall-clock budget; the learning rate follows a cosine over that budget, so any budget
gives a finished model. Writes an ordinary Hugging Face folder (config, tokenizer, float16 weights).

`--init-from FOLDER` goes on from earlier weights; with a `--layers` above theirs the model is grown
first, by layers that start as the identity. The shipped target is a 12-layer model of 48 minutes,
then

    python recipes/train_target.py --gsm8k gsm8k_train.jsonl --init-from demo-target-12 --layers 24 \
        --lr 2e-3 --bf16 --minutes 45 --out weights/src/draftree_weights/demo/target

each on two CPU cores.
"""

import argparse
import json
import math
import pathlib
import re
import sysconfig
import time

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def gsm8k_texts(path):
    for line in pathlib.Path(path).read_text().splitlines():
        row = json.loads(line)
        answer = re.sub(r"<<[^>]*>>", "", row["answer"])
        yield f"<|bos|><|user|>{row['question'].strip()}<|assistant|>{answer.strip()}<|eos|>"


def stdlib_files():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skip = {
        "test",
        "tests",
        "site-packages",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "encodings",
        "__pycache__",
    }
    for path in sorted(root.rglob("*.py")):
        if not skip & set(path.relative_to(root).parts) and path.stat().st_size <= 150_000:
            yield path


def stdlib_texts():
    for path in stdlib_files():
        yield f"<|bos|>{path.read_text(errors='ignore')}<|eos|>"


def train_tokenizer(texts, vocab_size):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=1024,
    )
    fast.chat_template = CHAT
    return fast


def grown(model, layers):
    """The same function with more layers: identity layers (zero output projections) spread evenly between the old ones."""
    old, config = (
        model.model.layers,
        LlamaConfig(**model.config.to_dict() | {"num_hidden_layers": layers}),
    )
    new = LlamaForCausalLM(config)
    new.load_state_dict(
        {k: v for k, v in model.state_dict().items() if ".layers." not in k}, strict=False
    )
    places = [i * layers // len(old) for i in range(len(old))]
    for place, layer in zip(places, old, strict=True):
        new.model.layers[place].load_state_dict(layer.state_dict())
    for place in set(range(layers)) - set(places):
        torch.nn.init.zeros_(new.model.layers[place].self_attn.o_proj.weight)
        torch.nn.init.zeros_(new.model.layers[place].mlp.down_proj.weight)
    return new


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gsm8k", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--minutes", type=float, default=70)
    ap.add_argument(
        "--init-from",
        help="a folder written by an earlier run: go on from its weights and tokenizer",
    )
    ap.add_argument("--vocab", type=int, default=4096)
    ap.add_argument("--hidden", type=int, default=128)
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--head-dim", type=int, default=32)
    ap.add_argument("--seq", type=int, default=256)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--bf16", action="store_true", help="autocast the forward pass to bfloat16")
    args = ap.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)

    math_texts, code_texts = list(gsm8k_texts(args.gsm8k)), list(stdlib_texts())
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(args.init_from)
        if args.init_from
        else train_tokenizer(math_texts + code_texts, args.vocab)
    )

    def stream(texts):
        return np.concatenate(
            [np.array(tokenizer(t, add_special_tokens=False)["input_ids"], np.int64) for t in texts]
        )

    held_out = rng.permutation(len(math_texts))[:100]
    keep = np.setdiff1d(np.arange(len(math_texts)), held_out)
    math_ids, math_val = (
        stream([math_texts[i] for i in keep]),
        stream([math_texts[i] for i in held_out]),
    )
    code_ids = stream(code_texts)
    code_ids, code_val = code_ids[:-30_000], code_ids[-30_000:]
    print(f"math {len(math_ids):,} tokens, code {len(code_ids):,} tokens", flush=True)

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=int(args.hidden * 2.75) // 32 * 32,
        num_attention_heads=args.hidden // args.head_dim,
        num_key_value_heads=max(1, args.hidden // args.head_dim // 2),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    if args.init_from:
        model = LlamaForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    if args.init_from and args.layers > model.config.num_hidden_layers:
        model = grown(model, args.layers)
    model.train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )

    def batch(size):
        rows = []
        for _ in range(size):
            ids = math_ids if rng.random() < 0.5 else code_ids
            at = rng.integers(0, len(ids) - args.seq - 1)
            rows.append(ids[at : at + args.seq])
        return torch.from_numpy(np.stack(rows))

    @torch.no_grad()
    def evaluate(ids):
        model.eval()
        n = len(ids) // args.seq
        x = torch.from_numpy(ids[: n * args.seq].reshape(n, args.seq))[:64]
        loss = model(input_ids=x, labels=x).loss.item()
        model.train()
        return loss

    start = time.time()
    step = 0
    budget = args.minutes * 60
    while (spent := time.time() - start) < budget:
        fraction = spent / budget
        scale = min(1.0, (step + 1) / 100) * (
            0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * fraction))
        )
        for group in opt.param_groups:
            group["lr"] = args.lr * scale
        x = batch(args.batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % 250 == 0:
            tokens = step * args.batch * args.seq
            line = f"step {step} tokens {tokens:,} loss {loss.item():.3f} {tokens / (time.time() - start):.0f} tok/s"
            if step % 1000 == 0:
                line += f" | math {evaluate(math_val):.3f} code {evaluate(code_val):.3f}"
            print(line, flush=True)
    print(
        f"final: step {step} math {evaluate(math_val):.3f} code {evaluate(code_val):.3f}",
        flush=True,
    )
    model.tie_weights()
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
