"""What is known of a model, what is refused, and the mask of a feed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from architectures import CONFIGS, MIXED, SCALED, SIZES, SOME, VOCAB, WINDOW, fresh, model, target
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.kv_cache import SlotCache
from draftree.target.model_construction import one_layer
from draftree.target.target import Target
from forests import NOISE, worst

LAUREL = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
PER_LAYER = {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "head_dim": 8,
    "layer_types": MIXED,
}
REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "MiniMax": (
        "minimax",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "lightning attention is computed inside",
    ),
    "RecurrentGemma": ("recurrent_gemma", {}, "its states lie in its modules"),
    "Rwkv": ("rwkv", {}, "its states are lists of its own"),
    "xLSTM": ("xlstm", {"num_heads": 2, "num_blocks": 2}, "its states are an object of its own"),
    "Llama4": ("llama4_text", {"num_local_experts": 2}, "chunked_attention"),
    "Gemma3n": (
        "gemma3n_text",
        {**PER_LAYER, **LAUREL, "num_kv_shared_layers": 2},
        "share the keys and values",
    ),
    "Gemma4": (
        "gemma4_text",
        {**PER_LAYER, "global_head_dim": 8, "num_kv_shared_layers": 2},
        "share the keys and values",
    ),
    "Falcon": ("falcon", {"alibi": True}, "cache slots"),
    "GPTNeo": (
        "gpt_neo",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "cache slots",
    ),
    "Bloom": ("bloom", {}, "takes no position_ids"),
    "Bert": ("bert", {"is_decoder": True}, "encoder by design"),
}
"""Start of the class's name: `model_type`, what differs from the usual sizes, the reason."""


def config_of(model_type: str, changes: Mapping[str, Any]) -> Any:
    """A tiny config, without the keys that the architecture derives from others."""
    derived = ("num_hidden_layers", "num_key_value_heads") if model_type == "gpt_neo" else ()
    return AutoConfig.for_model(
        model_type, **{k: v for k, v in {**SIZES, **changes}.items() if k not in derived}
    )


def on_meta(model_type: str, changes: Mapping[str, Any]) -> PreTrainedModel:
    """A model without weights: what is refused is refused by its kind."""
    with torch.device("meta"):
        built: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(model_type, changes))
    return built


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architectures_are_refused_by_name(name: str) -> None:
    model_type, changes, reason = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        CausalLM(on_meta(model_type, changes))
    said = str(refusal.value)
    assert said.startswith(name)
    assert f"model_type '{model_type}'" in said
    assert reason in said
    assert "\n" not in said


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(config)
    with pytest.raises(
        UserError,
        match=r"^T5ForConditionalGeneration \(model_type 't5'\) is not supported: .*encoder-decoder",
    ):
        CausalLM(t5)


@pytest.mark.parametrize("config", ["t5", "rwkv", "bert", "vit"])
def test_a_refusal_comes_before_the_weights_are_asked_for(config: str, tmp_path: Path) -> None:
    sizes = {} if config in ("t5", "vit") else SIZES
    said = AutoConfig.for_model(config, **sizes).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**said, "model_type": config}))
    with pytest.raises(UserError, match=rf"model_type '{config}'\) is not supported: ") as refusal:
        Target.load(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_model_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^cannot load target '.*' \(allowed: demo, smollm2, a Hugging Face folder, a file \.gguf, a hub id\): ",
    ) as refusal:
        Target.load(str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_properties_of_a_model_are_read(name: str) -> None:
    decoder, config = CausalLM(model(name)), model(name).config
    assert (decoder.vocab, decoder.hidden_size, decoder.context, len(decoder.layers)) == (
        VOCAB,
        32,
        128,
        4,
    )
    assert decoder.hf.window == (
        WINDOW if "sliding" in name or "mixed" in name or "gemma" in name else None
    )
    heads = config.num_attention_heads if name == "gpt_neox" else 2
    width = getattr(config, "head_dim", None) or 8
    assert {(s.heads, s.key, s.value) for s in decoder.shapes} == {(heads, width, width)}
    assert len(decoder.shapes) == 4


@pytest.mark.parametrize("name", SOME)
def test_one_layer_of_a_model_is_a_decoder_with_full_attention_where_types_are_mixed(
    name: str,
) -> None:
    small = CausalLM(one_layer(model(name).config))
    assert type(small.model) is type(model(name))
    assert len(small.layers) == len(small.shapes) == 1
    assert small.hf.window == (WINDOW if name == "mistral-sliding" else None)
    assert small.shapes[0] == CausalLM(model(name)).shapes[0]


def test_hidden_states_are_numbered_as_transformers_does() -> None:
    decoder = CausalLM(model("llama"))
    assert [decoder.hidden_index(i) for i in (0, 4, -1, -4, -5)] == [0, 4, 4, 1, 0]
    for layer in (5, -6):
        with pytest.raises(
            UserError, match=rf"hidden state {layer} does not exist: the target's are -5 … 4"
        ):
            decoder.hidden_index(layer)


@pytest.mark.parametrize("layers", [(0, 1, -4, -1), ()], ids=str)
@pytest.mark.parametrize("name", [*SOME, "gemma3", SCALED])
@torch.inference_mode()
def test_taps_see_a_stock_forward_and_leave_no_hook(name: str, layers: tuple[int, ...]) -> None:
    decoder = CausalLM(fresh(name))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.model.modules()]
    ids = torch.randint(3, VOCAB, (2, 9))
    with decoder.hf.collect_hidden_states(layers) as caught:
        decoder.model(input_ids=ids, use_cache=False)
    assert [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in decoder.model.modules()
    ] == hooks
    stock = decoder.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    assert set(caught) == set(layers)
    for layer in layers:
        assert torch.equal(caught[layer], stock[layer])


@pytest.mark.parametrize("name", SOME)
@torch.inference_mode()
def test_keys_and_values_are_those_the_first_layer_caches(name: str) -> None:
    decoder = target(name).decoder
    cache = decoder.new_cache(2, 4)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 6))
    decoder.forward(ForwardBatch.chains(list(ids), np.zeros(2, np.int64), decoder.device), cache)
    embeds = decoder.model.get_input_embeddings()(torch.from_numpy(ids))
    found = decoder.keys_and_values(embeds, torch.arange(6).expand(2, 6))
    for ours, stored in zip(found, cache.layer(0), strict=True):
        assert torch.allclose(ours, stored[:, :, :6], atol=1e-9)


def holding(decoder: CausalLM, *lengths: int) -> SlotCache:
    """A cache with so many committed tokens in each row."""
    cache = decoder.new_cache(len(lengths), max(lengths))
    cache.lengths = np.array(lengths)
    return cache


def seen(mask: torch.Tensor) -> list[list[list[int]]]:
    """For each row and token, the slots it sees."""
    return [[torch.nonzero(token == 0)[:, 0].tolist() for token in row[0]] for row in mask]


def test_a_mask_shows_what_is_committed_and_what_is_visible() -> None:
    decoder = target("llama").decoder
    visible = [np.array([[1, 0, 0], [1, 0, 1]], np.bool_), np.array([[1]], np.bool_)]
    feed = ForwardBatch.from_sequences(
        [np.array([5, 6]), np.array([7])], [np.array([4, 5]), np.array([1])], np.array([4, 1]), visible,
        [np.array([3, 4, 5]), np.array([1])], decoder.device,
    )  # fmt: skip
    mask = decoder.hf.mask(holding(decoder, 3, 1), feed)  # row 0 holds a scratch token before these
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 1, 2, 6)
    assert seen(mask) == [
        [[0, 1, 2, 3], [0, 1, 2, 3, 5]],
        [[0, 1], [0, 1, 2, 3, 4, 5]],
    ]  # padding sees all


def test_a_window_counts_positions_and_not_slots() -> None:
    """Two siblings lie side by side, their position is the same: a window of 5 ends at the same token for both."""
    decoder = target("gemma2").decoder
    feed = ForwardBatch.from_sequences(
        [np.array([5, 6, 7])], [np.array([6, 7, 7])], np.array([6]), [np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)],
        [np.array([6, 7, 7])], decoder.device,
    )  # fmt: skip
    masks = decoder.hf.mask(holding(decoder, 6), feed)
    assert isinstance(masks, dict)
    assert seen(masks["full_attention"]) == [[[*range(7)], [*range(8)], [*range(7), 8]]]
    assert seen(masks["sliding_attention"]) == [[[2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [3, 4, 5, 6, 8]]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_the_head_gives_the_models_logits_without_a_pass_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caps and scales behind the head included."""
    stock = model(name)
    decoder = CausalLM(stock)
    ids = torch.tensor([[3, 9, 4, 7]])
    with torch.no_grad():
        out = stock(input_ids=ids, output_hidden_states=True, use_cache=False)
        last = out.hidden_states[-1][0]
        decoder.head(last)
        monkeypatch.setattr(
            decoder, "_through_model", None
        )  # asked once, when the head is first used
        assert worst(decoder.head(last), out.logits[0]) < NOISE


def test_a_cap_behind_the_head_is_found_in_half_precision() -> None:
    stock = fresh("gemma2").to(torch.bfloat16)
    decoder, ids = CausalLM(stock), torch.tensor([[3, 9, 4, 7]])
    assert decoder._behind_head is not None, "else every head that is lent runs the whole model"
    with torch.no_grad():
        last = decoder.stack(input_ids=ids, use_cache=False).last_hidden_state[0]
        assert worst(decoder.head(last), stock(input_ids=ids, use_cache=False).logits[0]) < 1e-2


def test_yarn_extends_the_context_by_its_factor() -> None:
    stock = fresh("llama-eager-yarn")
    stock.config.max_position_embeddings = 32
    assert CausalLM(stock).context == 128
