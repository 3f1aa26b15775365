"""Small models and files for the tests of reported kinds of faults."""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from architectures import build
from draftree.costs.step_costs import UNIT_COSTS
from draftree.drafters.base import Drafter
from draftree.engine import Engine, generate_plain
from draftree.models.causal_lm import CausalLM
from draftree.registry import build as part
from draftree.request import Request
from draftree.target.target import Target

TRAINED = (
    "edd",
    "vdm",
    "eagle",
    "eagle3",
    "mtp",
    "glide",
    "medusa",
    "hydra",
    "dflash",
    "dspark",
    "jetspec",
    "peagle",
)
PROMPT = [7, 5, 9, 5, 9, 11]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


def target(model_type: str, **changes: Any) -> Target:
    """A random target with the sizes of `architectures.SIZES`, in float64."""
    return Target(CausalLM(build(model_type, changes)), model_type)


def fresh(name: str, to: Target) -> Drafter[Any]:
    """A new drafter with random weights."""
    torch.manual_seed(0)
    method: Any = part("drafter", name)
    drafter: Drafter[Any] = method.fresh(to)
    return drafter


def written(
    to: Target, drafter: Drafter[Any], prompts: list[list[int]], count: int = 12
) -> list[list[int]]:
    """What an engine writes with a drafter."""
    engine = Engine(to, drafter, part("policy", "eagle2"), costs=UNIT_COSTS)
    return engine.write([Request(prompt, count) for prompt in prompts]).tokens


def expected(to: Target, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    """What the target writes alone."""
    return generate_plain(to, [Request(prompt, count) for prompt in prompts]).tokens


def changed(folder: Path, **entries: Any) -> Path:
    """Change entries of a folder's config; those of the layer are given as `transformer_layer_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in entries.items():
        nested = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = config[name] | value if nested else value
    path.write_text(json.dumps(config))
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 261 tokens: four special ones, one per byte, and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_tensors(model: PreTrainedModel) -> dict[str, Any]:
    """The weights of a Llama model with 4 heads and 2 key-value heads under their names in GGUF files."""
    tensors = {}
    for key, value in model.state_dict().items():
        name, count = key, 4 if "q_proj" in key else 2 if "k_proj" in key else 0
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if count:  # GGUF has the two halves of a rotated head interleaved
            value = value.view(count, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        tensors[name] = value.float().contiguous().numpy()
    return tensors


def write_gguf(
    path: Path, tensors: dict[str, Any], split: tuple[int, int, int] | None = None, **header: int
) -> Path:
    """Write a GGUF file of a model of two layers.

    Args:
        path: of the file.
        tensors: under their names there.
        split: number of this part, number of parts, tensors of all parts.
        header: entries `llama.NAME` that differ from the model's own.
    """
    writer = GGUFWriter(path, "llama")
    if split is None or split[0] == 0:
        sizes = {
            "context_length": 256,
            "block_count": 2,
            "embedding_length": 32,
            "feed_forward_length": 48,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "rope.dimension_count": 8,
            "vocab_size": 261,
        }
        for name, value in {
            **sizes,
            **{key.replace("__", "."): value for key, value in header.items()},
        }.items():
            writer.add_uint32(f"llama.{name}", value)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(2)
        writer.add_tokenizer_model("gpt2")
        words = byte_tokenizer().get_vocab()
        writer.add_token_list(sorted(words, key=words.__getitem__))
        writer.add_token_types([3 if index < len(SPECIAL) else 1 for index in range(len(words))])
        writer.add_token_merges(["h e"])
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[2])
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
