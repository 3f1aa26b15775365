"""The benchmark that compares perplexities with llama.cpp's: what it does to weights, and its figures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "perplexity.py"


@pytest.fixture(scope="module")
def perplexity() -> ModuleType:
    pytest.importorskip("gguf")
    spec = importlib.util.spec_from_file_location("perplexity", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def tiny(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="float64",
    )
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) / 4)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_shuffled_model_is_the_same_function(perplexity: ModuleType, tied: bool) -> None:
    ids = torch.arange(24)[None] % 40
    model, same = tiny(tied), tiny(tied)
    perplexity.shuffle(model, 1)
    for name, weight in same.named_parameters():
        assert not torch.equal(model.get_parameter(name), weight), f"{name} was not shuffled"
    wanted = same(ids).logits
    # Transformers' five norms compute in float32 in a model of float64, too: each sums 64 squares.
    rounding = 5 * 64 * torch.finfo(torch.float32).eps / 2
    assert (model(ids).logits - wanted).abs().max() < rounding * wanted.abs().max()


def test_queries_and_keys_are_written_in_pairs(perplexity: ModuleType) -> None:
    model = tiny().float()
    written = dict(perplexity.tensors(model))
    assert len(written) == 2 + 9 * 2
    own = model.model.layers[1].self_attn.k_proj.weight.numpy()
    head = written["blk.1.attn_k.weight"][16:32]  # the second one, of 16 entries
    np.testing.assert_array_equal(head[::2], own[16:24])
    np.testing.assert_array_equal(head[1::2], own[24:32])


def test_bits_of_types_and_a_row(perplexity: ModuleType) -> None:
    bits = [perplexity.bits_of_type(kind) for kind in ("Q4_0", "Q4_1", "Q8_0", "BF16")]
    assert bits == [4.5, 5.0, 8.5, 16.0]
    reference = np.random.default_rng(0).random((6, 5))
    row = perplexity.row("other", (5.0, 16.0), reference + np.log(1.02), reference)
    assert row["quotient [95 %]"] == "1.020 [1.020, 1.020]"
    assert row["perplexity"] == pytest.approx(1.02 * np.exp(reference.mean()), abs=1e-4)
