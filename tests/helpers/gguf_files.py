"""Write small GGUF files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from folders import SPECIAL, TEMPLATE, byte_tokenizer


def small() -> LlamaForCausalLM:
    """A model whose rows are whole blocks of GGUF's quantisations."""
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=261, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=160, initializer_range=0.3, rms_norm_eps=1e-5,
            bos_token_id=2, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
        )
    )  # fmt: skip


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""llama.cpp's names of transformers' tensors."""


def turned(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in llama.cpp's order: the halves of a head interleaved."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    kind: str = "Q8_0",
    architecture: str = "llama",
    without: str = "-",
    words: bool = True,
    frequencies: Tensor | None = None,
    eot: int | None = None,
) -> dict[str, Tensor]:
    """Write a tiny Llama as a GGUF file; return its weights after the quantisation, in float32.

    `frequencies` divide the rotary frequencies, and `eot` is the token that ends a turn.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    model, said = small(), GGUFWriter(path, architecture)
    c = model.config
    said.add_context_length(c.max_position_embeddings)
    said.add_block_count(c.num_hidden_layers)
    said.add_embedding_length(c.hidden_size)
    said.add_feed_forward_length(c.intermediate_size)
    said.add_head_count(c.num_attention_heads)
    said.add_head_count_kv(c.num_key_value_heads)
    said.add_layer_norm_rms_eps(c.rms_norm_eps)
    said.add_rope_freq_base(10000.0)
    said.add_rope_dimension_count(16)
    said.add_vocab_size(c.vocab_size)
    said.add_eos_token_id(1)
    said.add_bos_token_id(2)
    if eot is not None:
        said.add_eot_token_id(eot)
    if words:
        tokens = byte_tokenizer().get_vocab()
        said.add_tokenizer_model("gpt2")
        said.add_token_list([*sorted(tokens, key=lambda t: tokens[t]), "ab"])
        said.add_token_types([3 if i < len(SPECIAL) else 1 for i in range(c.vocab_size)])
        said.add_token_merges(["a b"])
        said.add_chat_template(TEMPLATE)
    if frequencies is not None:
        said.add_tensor("rope_freqs.weight", frequencies.numpy())
    kept = {}
    for name, value in model.state_dict().items():
        its = name
        for theirs, ours in NAMES.items():
            its = its.replace(theirs, ours)
        heads = (
            c.num_attention_heads
            if "q_proj" in name
            else c.num_key_value_heads
            if "k_proj" in name
            else 0
        )
        stored = (turned(value, heads) if heads else value).numpy()
        sort = GGMLQuantizationType[kind if stored.ndim > 1 else "F32"]
        blocks = quants.quantize(stored, sort)
        whole = torch.from_numpy(
            quants.dequantize(blocks, sort).astype(np.float32).reshape(stored.shape)
        )
        if heads:
            whole = whole.view(heads, -1, 2, whole.shape[1]).transpose(1, 2).reshape(whole.shape)
        kept[name] = whole
        if without not in its:
            said.add_tensor(its, blocks, raw_dtype=sort)
    said.write_header_to_file()
    said.write_kv_data_to_file()
    said.write_tensors_to_file()
    said.close()
    return kept
