"""A target as a folder on disk: random weights, a byte-level tokenizer and a chat template."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<|assistant|>"]


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each byte: characters outside ASCII take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*SPECIAL, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def target_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Saves a target with a context of 160 tokens, and returns its folder."""
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def talking_folder(folder: Path) -> Path:
    """Saves a target that writes letters, seldom what is no text, and then the end of a turn."""
    target_folder(folder)
    model, vocab = LlamaForCausalLM.from_pretrained(folder), byte_tokenizer().get_vocab()
    bias = torch.full((260,), -6.0)
    for token, favour in {
        **dict.fromkeys("abcdefghijklmno", 1.0),
        "Ġ": 1.0,
        "<|assistant|>": 1.6,
        "<eos>": 1.0,
    }.items():
        bias[vocab[token]] = favour
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 8  # so that the head's first column is a bias
        model.lm_head.weight[:, 0] = bias
    model.save_pretrained(folder)
    return folder


def resident(path: Path) -> int:
    """Kilobytes of a file that this process has in memory."""
    kept, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            kept += int(line.split()[1])
    return kept
