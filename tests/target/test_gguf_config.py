"""What transformers does not read from a GGUF file: rotary scaling, windows, the scale of queries."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Starcoder2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftree.errors import UserError
from draftree.target.gguf_config import complete_config, end_tokens
from draftree.target.target_names import location
from gguf_files import write_gguf

FILE = Path("x.gguf")


def completed(
    config: PreTrainedConfig, arch: str, entries: dict[str, Any], **tensors: list[float]
) -> Any:
    header = {f"{arch}.{name}": value for name, value in entries.items()}
    named = {f"{name}.weight": np.array(values) for name, values in tensors.items()}
    complete_config(FILE, config, header | {"general.architecture": arch}, named)
    return config


def divisors(config: LlamaConfig, factor: float) -> list[float]:
    """By what llama.cpp's converter divides the frequencies of Llama 3."""
    scaled = LlamaConfig(**config.to_dict())
    scaled.rope_parameters = {
        **config.rope_parameters, "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    inverse = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))[0].double()
    count, theta = len(inverse), config.rope_parameters["rope_theta"]
    return [theta ** (-i / count) / float(each) for i, each in enumerate(inverse)]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_tensor(factor: float) -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    found = completed(config, "llama", {}, rope_freqs=divisors(config, factor))
    assert found.rope_parameters["rope_type"] == "llama3"
    assert found.rope_parameters["factor"] == pytest.approx(factor, rel=1e-5)
    plain = completed(LlamaConfig(), "llama", {}, rope_freqs=[1.0] * 64)
    assert plain.rope_parameters["rope_type"] == "default"
    with pytest.raises(
        UserError, match=r"x\.gguf. scales its rotary frequencies, allowed is rope_freqs"
    ):
        completed(LlamaConfig(), "llama", {}, rope_freqs=[1.0, *[3.0] * 63])


def test_entries_of_the_header() -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32768,
    }
    assert completed(Qwen2Config(), "qwen2", yarn).rope_parameters["rope_type"] == "yarn"
    with pytest.raises(UserError, match="type none, linear or yarn, but it is 'ntk'"):
        completed(Qwen2Config(), "qwen2", yarn | {"rope.scaling.type": "ntk"})
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    gemma = completed(Gemma3TextConfig(), "gemma3", linear).rope_parameters
    assert (gemma["full_attention"]["rope_type"], gemma["full_attention"]["factor"]) == (
        "linear",
        8.0,
    )
    assert gemma["sliding_attention"]["rope_type"] == "default"
    assert gemma["sliding_attention"]["rope_theta"] == 10_000
    coder = completed(Starcoder2Config(), "starcoder2", {"rope.freq_base": 999999.4})
    assert coder.rope_parameters["rope_theta"] == 999999.4


@pytest.mark.parametrize(("layers", "scale"), [(46, 144), (42, 256)])
def test_the_queries_of_the_largest_gemma_are_scaled_otherwise(layers: int, scale: int) -> None:
    config = Gemma2Config(hidden_size=4608, num_attention_heads=32, num_hidden_layers=layers)
    assert completed(config, "gemma2", {"block_count": layers}).query_pre_attn_scalar == scale


def test_what_phi_3_has_besides() -> None:
    config = Phi3Config(hidden_size=64, num_attention_heads=4)
    entries = {
        "attention.sliding_window": 5,
        "rope.dimension_count": 12,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": 1.19,
    }
    long, short = [2.0] * 6, [1.5] * 6
    found = completed(config, "phi3", entries, rope_factors_long=long, rope_factors_short=short)
    rope = found.rope_parameters
    assert (found.sliding_window, found.original_max_position_embeddings) == (5, 4096)
    assert (rope["partial_rotary_factor"], rope["rope_type"]) == (0.75, "longrope")
    assert (rope["long_factor"], rope["short_factor"]) == (long, short)
    assert rope["attention_factor"] == 1.19
    with pytest.raises(UserError, match="together"):
        completed(Phi3Config(), "phi3", {}, rope_factors_long=long)


def test_a_file_with_scaled_frequencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    write_gguf(tmp_path / "x.gguf", frequencies=torch.tensor(divisors(config, 8.0)).float())
    folder = Path(location(str(tmp_path / "x.gguf")))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "llama3"
    assert math.isclose(rope["factor"], 8.0, rel_tol=1e-4)


def test_a_falcon_mamba_is_refused() -> None:
    completed(MambaConfig(), "mamba", {"block_count": 2, "ssm.dt_b_c_rms": False})
    with pytest.raises(UserError, match=r"'x\.gguf' is a Falcon-Mamba, which .*: allowed is"):
        completed(MambaConfig(), "mamba", {"ssm.dt_b_c_rms": True})


def test_tokens_that_end_a_turn() -> None:
    entries = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eos", "eot", "bos"))}
    assert end_tokens(entries, {}) == [0, 1]
    assert end_tokens(entries, {"<|im_end|>": 7, "<|end|>": 6, "a": 9}) == [0, 1, 6, 7]
    assert end_tokens({}, {"<|return|>": 5, "<|end|>": 6}) == []  # gpt-oss ends a channel by it
