"""Complete the config of a GGUF file by what transformers does not read from it.

llama.cpp keeps the scaling of rotary frequencies in entries `rope.scaling.*` of the header or, for
Llama 3.1 to 3.3 and Phi-3, in tensors. transformers leaves out both, and some other entries.
Without them a model runs with other frequencies, and nothing notices.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from transformers import PreTrainedConfig

from draftree.errors import UserError, format_value
from draftree.tree import Floats

FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Tensors by which rotary frequencies are divided: at any length, or in long and short texts."""
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of Llama 3.1 to 3.3, without its factor."""
TURN_ENDS = ("<|end|>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>")
"""Tokens that end a turn of a chat, at which llama.cpp stops by their names."""
SCALED_QUERIES = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose scores are scaled by hidden size over heads."""


def complete_config(
    path: Path,
    config: PreTrainedConfig,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Floats],
) -> None:
    """Set the rotary embedding, window and scale of queries as the file has them.

    Args:
        path: the file.
        config: the config that transformers has read; it is changed.
        entries: the entries of the header.
        tensors: the tensors `FREQUENCIES`, `LONG_FACTORS` and `SHORT_FACTORS`, as far as the file has them.

    Raises:
        UserError: the file scales frequencies in a way that is not known, or is a Falcon-Mamba.
    """
    if entries.get("mamba.ssm.dt_b_c_rms"):
        told = "is a Falcon-Mamba, which transformers would run as a Mamba"
        raise UserError(f"'{path}' {told}: allowed is a folder of its safetensors")
    text: Any = config.get_text_config(decoder=True)
    arch = entries.get("general.architecture")
    rope = text.rope_parameters if isinstance(getattr(text, "rope_parameters", None), dict) else {}
    scaled = rope.get("full_attention", rope)  # in Gemma 3, layers with a window are not scaled
    if scaled is rope and (base := entries.get(f"{arch}.rope.freq_base")) is not None:
        rope["rope_theta"] = float(base)
    if arch == "phi3":
        _complete_phi3(text, rope, entries)
    if scaled.get("rope_type", "default") == "default":
        scaled |= _scaling(path, arch, entries, tensors, scaled)
    if SCALED_QUERIES.get(str(arch)) == entries.get(f"{arch}.block_count"):
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads


def end_tokens(entries: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[int]:
    """Return the ids of the tokens that end a text or a turn of a chat.

    Args:
        entries: the entries of the header.
        vocabulary: the tokens' ids. With gpt-oss's `<|return|>`, the first of `TURN_ENDS` ends only
            a part of a turn.
    """
    known = (entries.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    names = TURN_ENDS[1:] if "<|return|>" in vocabulary else TURN_ENDS
    named = (vocabulary.get(name) for name in names)
    return sorted({int(each) for each in (*known, *named) if each is not None})


def _complete_phi3(text: Any, rope: dict[str, Any], entries: Mapping[str, Any]) -> None:
    if (window := entries.get("phi3.attention.sliding_window")) and text.sliding_window is None:
        text.sliding_window = int(window)
    if (turned := entries.get("phi3.rope.dimension_count")) is not None:
        rope["partial_rotary_factor"] = turned * text.num_attention_heads / text.hidden_size
    known = entries.get("phi3.rope.scaling.original_context_length")
    if known is not None:
        text.original_max_position_embeddings = int(known)


def _scaling(
    path: Path,
    arch: Any,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Floats],
    rope: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the scaling of rotary frequencies in transformers' form; empty if there is none."""
    scaling = f"{arch}.rope.scaling"
    kind = entries.get(f"{scaling}.type", "none")
    factor, known = (
        entries.get(f"{scaling}.{name}") for name in ("factor", "original_context_length")
    )
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        if LONG_FACTORS not in tensors or SHORT_FACTORS not in tensors or known is None:
            _refuse(
                path,
                f"{LONG_FACTORS}, {SHORT_FACTORS} and {scaling}.original_context_length together",
            )
        found = {"rope_type": "longrope", "original_max_position_embeddings": int(known)}
        found |= {
            "long_factor": tensors[LONG_FACTORS].tolist(),
            "short_factor": tensors[SHORT_FACTORS].tolist(),
        }
        if (attention := entries.get(f"{scaling}.attn_factor")) is not None:
            found["attention_factor"] = float(attention)
        return found
    if FREQUENCIES in tensors:
        return _llama3(path, tensors[FREQUENCIES], float(rope.get("rope_theta", 10000.0)))
    if kind == "none" or factor in (None, 0, 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and known is not None:
        return {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(known),
        }
    _refuse(path, f"{scaling}.type none, linear or yarn, but it is {format_value(kind)}")


def _llama3(path: Path, divisors: Floats, theta: float) -> dict[str, Any]:
    """Return the scaling of Llama 3 that has these divisors of frequencies."""
    if np.all(divisors == 1):
        return {}
    found = {**LLAMA3, "factor": float(divisors.max())}
    count = len(divisors)
    waves = 2 * math.pi * theta ** (np.arange(count) / count)
    known, low, high = (
        found[name]
        for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = np.clip((known / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / found["factor"] + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        _refuse(path, f"{FREQUENCIES} with the scaling of Llama 3")
    return found


def _refuse(path: Path, allowed: str) -> NoReturn:
    raise UserError(f"'{path}' scales its rotary frequencies, allowed is {allowed}")
