"""Medusa's heads under the names of their official code and of vLLM."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftree.errors import UserError
from draftree.formats import checkpoint
from draftree.formats.checkpoint import Checkpoint

FILE = "medusa_lm_head.safetensors"
FILES, MERGED = (FILE, "medusa_lm_head.pt"), checkpoint.FILES
PREFIX = "medusa_head."
"""Of the heads' tensors in a model that was trained together with them (Medusa-2)."""
VLLM = "blocks.0.layers.0.weight"
"""A tensor of vLLM's layout alone."""
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


def loaded(stored: Checkpoint) -> Checkpoint:
    """A checkpoint in any of the layouts with its tensors, named as they are there; of a merged model the heads alone.

    Raises:
        UserError: there is none.
    """
    if any((stored.folder / name).is_file() for name in FILES):
        return stored.loaded(FILES)
    merged = stored.loaded(MERGED, lambda key: key.startswith(PREFIX))
    if merged.tensors:
        alone = {k.removeprefix(PREFIX): v for k, v in merged.tensors.items()}
        return replace(stored, config={}, file=FILE, tensors=alone)
    return stored.loaded(MERGED)


def counted(tensors: dict[str, Tensor], where: Path) -> tuple[int, int]:
    """How many heads, and blocks a head, a file of the official layout holds; configs are often wrong.

    Raises:
        UserError: it holds no heads, or lacks some.
    """
    found = [m for m in map(BLOCK.fullmatch, tensors) if m]
    if "0.0.linear.weight" not in tensors:
        raise UserError(f"'{where}' holds no Medusa heads: a tensor 0.0.linear.weight was expected")
    heads, layers = ({int(m[i]) for m in found} for i in (1, 2))
    if max(heads) >= len(heads) or max(layers) >= len(layers):
        gaps = f"of {max(heads) + 1} with {max(layers) + 1} layers some are missing"
        raise UserError(f"'{where}' has Medusa heads with gaps: {gaps}")
    return len(heads), len(layers)


def left_to_the_target(stored: Checkpoint, heads: int, layers: int) -> frozenset[str]:
    """The heads' linear layers where a file has none at all: the oldest format ends its heads in the target's LM head."""
    last = frozenset(f"{i}.{layers}.weight" for i in range(heads))
    return frozenset() if last & stored.tensors.keys() else last


def renamed(stored: Checkpoint) -> Checkpoint:
    """A checkpoint of vLLM's layout with config and tensors of the official one."""
    config, tensors = from_vllm(stored.config, stored.tensors)
    return replace(stored, config=config, tensors=tensors)


def to_vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the official layout in vLLM's."""
    heads, layers = counted(tensors, Path())
    vocab, hidden = tensors[f"0.{layers}.weight"].shape
    renamed = {}
    for name, value in tensors.items():
        if block := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
            renamed[f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"] = value
        elif head := HEAD.fullmatch(name):
            renamed[f"lm_heads.{head[1]}.weight"] = value
        else:
            renamed[name] = value
    kept = {k: v for k, v in config.items() if k == "base_model_name_or_path"}
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "truncated_vocab_size": vocab}
    return kept | sizes | {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": heads, "num_hidden_layers": layers,
        "max_paths": 64, "topk": 10, "original_lm_head": False, "medusa_fc_bias": True,
    }, renamed  # fmt: skip


def from_vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of vLLM's layout in the official one; blocks without a bias get a zero one.

    Raises:
        UserError: the heads know only a part of the vocabulary.
    """
    if "token_map" in tensors or config.get("truncated_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        got = f"vocab_size={config.get('vocab_size')}, truncated_vocab_size={config.get('truncated_vocab_size')}"
        raise UserError(f"medusa: got heads with {got}; allowed are heads over the whole vocabulary")
    renamed = {}
    for name, value in tensors.items():
        if block := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            official = f"{block[1]}.{block[2]}.linear."
            renamed[official + block[3]] = value
            if block[3] == "weight" and name.removesuffix("weight") + "bias" not in tensors:
                renamed[official + "bias"] = value.new_zeros(len(value))
    heads, layers = counted(renamed, Path())
    shared = next((tensors[k] for k in ("lm_head.weight", "lm_heads.0.weight") if k in tensors), None)
    for name, value in tensors.items():
        if head := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
            renamed[f"{head[1]}.{layers}.weight"] = value
        elif not name.startswith("blocks.") and name != "lm_head.weight":
            renamed[name] = value
    if config.get("original_lm_head") and shared is not None:
        renamed |= {f"{i}.{layers}.weight": shared for i in range(heads)}
    sizes = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    return {k: v for k, v in config.items() if k == "base_model_name_or_path"} | sizes, renamed
