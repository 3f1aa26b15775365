"""Checkpoint layouts of Medusa heads: the official code's and vLLM's."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.formats import checkpoint
from draftree.formats.checkpoint import Checkpoint

HEADS_FILE = "medusa_lm_head.safetensors"
HEADS_FILES, MERGED_MODEL_FILES = (HEADS_FILE, "medusa_lm_head.pt"), checkpoint.WEIGHT_FILES
HEADS_PREFIX = "medusa_head."
"""The prefix of the heads' tensors in a model that was trained with them (Medusa-2)."""
VLLM_ONLY_TENSOR = "blocks.0.layers.0.weight"
"""The name of a tensor that exists only in vLLM's layout."""
VOCABULARY_OFFSETS, VLLM_VOCABULARY = "d2t", "token_map"
"""The tensor of a draft vocabulary in the official layout: offsets from 0, 1, … to target ids.

`VLLM_VOCABULARY` is the corresponding tensor in vLLM's layout, which contains the target ids.
"""
RESIDUAL_WEIGHT_NAME = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
HEAD_WEIGHT_NAME = re.compile(r"^(\d+)\.(\d+)\.weight$")


def load_heads(stored: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the heads' tensors loaded, under their stored names.

    The folder may have the official layout, vLLM's, or that of a merged model, which contains the
    target and the heads. Only the heads of a merged model are loaded.

    Raises:
        UserError: the folder has no file with tensors.
    """
    if any((stored.folder / name).is_file() for name in HEADS_FILES):
        return stored.load_tensors(HEADS_FILES)
    merged = stored.load_tensors(MERGED_MODEL_FILES, lambda key: key.startswith(HEADS_PREFIX))
    if merged.tensors:
        alone = {k.removeprefix(HEADS_PREFIX): v for k, v in merged.tensors.items()}
        return replace(stored, config={}, file=HEADS_FILE, tensors=alone)
    return stored.load_tensors(MERGED_MODEL_FILES)


def count_heads(tensors: dict[str, Tensor], where: Path) -> tuple[int, int]:
    """Return the number of heads, and of blocks per head, in a file of the official layout.

    They are counted from the tensors, because configs are often wrong.

    Raises:
        UserError: the file has no heads, or some are missing.
    """
    found = [m for m in map(RESIDUAL_WEIGHT_NAME.fullmatch, tensors) if m]
    if "0.0.linear.weight" not in tensors:
        raise UserError(f"'{where}' holds no Medusa heads: a tensor 0.0.linear.weight was expected")
    heads, layers = ({int(m[i]) for m in found} for i in (1, 2))
    if max(heads) >= len(heads) or max(layers) >= len(layers):
        gaps = f"of {max(heads) + 1} with {max(layers) + 1} layers some are missing"
        raise UserError(f"'{where}' has Medusa heads with gaps: {gaps}")
    return len(heads), len(layers)


def copy_target_head(stored: Checkpoint, heads: int, layers: int) -> frozenset[str]:
    """Return the names of the heads' output layers if a file has no such layers.

    In the oldest format the heads use the target's LM head.
    """
    last = frozenset(f"{i}.{layers}.weight" for i in range(heads))
    return frozenset() if last & stored.tensors.keys() else last


def convert_from_vllm(stored: Checkpoint) -> Checkpoint:
    """Convert a checkpoint from vLLM's layout to the official one."""
    config, tensors = from_vllm(stored.config, stored.tensors)
    return replace(stored, config=config, tensors=tensors)


def to_vllm(
    config: dict[str, Any], tensors: dict[str, Tensor], vocab: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert config and tensors from the official layout to vLLM's.

    `vocab` is the size of the target's vocabulary, needed if the heads cover only a part of it.
    """
    heads, layers = count_heads(tensors, Path())
    drafted, hidden = tensors[f"0.{layers}.weight"].shape
    blocks = {
        re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name): value
        for name, value in tensors.items()
    }
    renamed = {
        HEAD_WEIGHT_NAME.sub(r"lm_heads.\1.weight", name): value for name, value in blocks.items()
    }
    if (offsets := renamed.pop(VOCABULARY_OFFSETS, None)) is not None:
        renamed[VLLM_VOCABULARY] = offsets + torch.arange(len(offsets))
    kept = {k: v for k, v in config.items() if k == "base_model_name_or_path"}
    sizes = {"hidden_size": hidden, "vocab_size": vocab or drafted, "truncated_vocab_size": drafted}
    return kept | sizes | {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": heads,
        "num_hidden_layers": layers,
        "max_paths": 64,
        "topk": 10,
        "original_lm_head": False,
        "medusa_fc_bias": True,
    }, renamed


def from_vllm(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert config and tensors from vLLM's layout to the official one.

    Blocks without a bias get a bias of zeros.

    Raises:
        UserError: the heads cover only a part of the vocabulary, and the tokens of this part are
            not given.
    """
    part = config.get("truncated_vocab_size", config.get("vocab_size")) != config.get("vocab_size")
    if part and VLLM_VOCABULARY not in tensors:
        got = f"vocab_size={config.get('vocab_size')}, truncated_vocab_size={config.get('truncated_vocab_size')}"
        raise UserError(
            f"medusa: got heads with {got}; allowed are heads over the whole vocabulary, or with a {VLLM_VOCABULARY}"
        )
    if (ids := tensors.get(VLLM_VOCABULARY)) is not None:
        order = ids.argsort()
        mapped = {VOCABULARY_OFFSETS: ids[order] - torch.arange(len(ids))}
        tensors = {
            k: v[order] if k.startswith("lm_head") else v
            for k, v in tensors.items()
            if k != VLLM_VOCABULARY
        } | mapped
    blocks = {
        re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name): value
        for name, value in tensors.items()
    }
    shared = next(
        (tensors[k] for k in ("lm_head.weight", "lm_heads.0.weight") if k in tensors), None
    )
    heads, layers = count_heads(blocks, Path())
    named = {
        re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", k): v
        for k, v in blocks.items()
        if k != "lm_head.weight"
    }
    no_bias = {
        re.sub("weight$", "bias", k): v.new_zeros(len(v))
        for k, v in named.items()
        if RESIDUAL_WEIGHT_NAME.fullmatch(k)
    }
    renamed = no_bias | named
    if config.get("original_lm_head") and shared is not None:
        renamed |= {f"{i}.{layers}.weight": shared for i in range(heads)}
    sizes = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    return {k: v for k, v in config.items() if k == "base_model_name_or_path"} | sizes, renamed
