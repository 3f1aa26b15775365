"""How much the layers of a target attend, against what their modules give in an ordinary pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention

from architectures import CONFIGS, fresh, model, target
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.target import attention_strength
from draftree.target.attention_strength import Attending, measure_attention
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from draftree.tree import Ints
from forests import texts

POST_NORM = ("gemma2", "gemma3", "olmo2")
"""Where attention's output goes through a norm before it is added."""


def some(count: int = 3, length: int = 16) -> list[Ints]:
    return texts([length] * count, np.random.default_rng(0))


def caught(name: str, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each layer what goes in and what its attention adds, [T, D] each, by the module that the architecture has for it."""
    decoder, found = CausalLM(model(name)), []
    scale = getattr(decoder.config, "residual_multiplier", 1.0)
    hooks, inputs = [], dict[int, Tensor]()
    for i, layer in enumerate(decoder.layers):
        parts = dict(layer.named_children())
        adds = (
            parts["post_attention_layernorm"]
            if name in POST_NORM
            else parts.get("self_attn") or parts["attention"]
        )
        hooks.append(
            layer.register_forward_pre_hook(lambda _m, args, i=i: inputs.update({i: args[0][0]}))
        )
        hooks.append(adds.register_forward_hook(
            lambda _m, _a, out, i=i: found.append((inputs[i], scale * (out[0] if isinstance(out, tuple) else out)[0]))
        ))  # fmt: skip
    with torch.no_grad():
        stack: Any = decoder.stack
        stack(input_ids=ids, use_cache=False, **decoder.hf.causal(ids))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_output_is_what_is_added_to_the_residual_stream(name: str) -> None:
    """Whatever the architecture does behind its attention, and where both parts of a layer read the same."""
    read, t = some(), target(name)
    rows = [caught(name, torch.from_numpy(text)[None]) for text in read]
    want = [
        torch.stack([(add.norm(dim=-1) / x.norm(dim=-1))[8:] for x, add in layer])
        for layer in zip(*rows, strict=True)
    ]
    got = [layer.output for layer in measure_attention(t.decoder, read)]
    assert got == pytest.approx([float(w.mean()) for w in want], rel=1e-5)


def changed(name: str, key: str, change: Callable[[Tensor], Any]) -> CausalLM:
    copy = fresh(name)
    for name_, parameter in copy.named_parameters():
        if key in name_:
            change(parameter.data)
    return CausalLM(copy)


@pytest.mark.parametrize(
    "name", ["llama", "mistral-sliding", "gemma2", "gemma3", "qwen2-mixed", "llama-eager-yarn"]
)
def test_the_entropy_is_one_where_it_looks_everywhere_alike(name: str) -> None:
    """Where a window slides, among the keys in it."""
    even = measure_attention(changed(name, "q_proj", lambda w: w.zero_()), some())
    assert [layer.entropy for layer in even] == pytest.approx([1.0] * 4)
    sharp = measure_attention(changed(name, "k_proj", lambda w: w.mul_(1e6)), some())
    assert max(layer.entropy for layer in sharp) < (1 if name in POST_NORM else 0.1), (
        "a cap or a norm leaves some"
    )


def test_the_entropy_is_that_of_the_weights() -> None:
    """Against queries and keys taken to attention by hand, in the first layer of a Llama."""
    ids = torch.from_numpy(some(1)[0])[None]
    stock: Any = model("llama")
    layer = stock.model.layers[0]
    with torch.no_grad():
        states = layer.input_layernorm(stock.model.embed_tokens(ids))
        cos, sin = stock.model.rotary_emb(states, torch.arange(16)[None])
        turn = lambda x: x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin
        q = turn(layer.self_attn.q_proj(states).view(16, 4, 8).transpose(0, 1))
        k = turn(layer.self_attn.k_proj(states).view(16, 2, 8).transpose(0, 1)).repeat_interleave(
            2, 0
        )
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(
            torch.ones(16, 16).triu(1).bool(), -torch.inf
        )
        weights = scores.softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean(0)
    want = float((entropy[8:] / torch.arange(9, 17).log()).mean())
    assert measure_attention(target("llama").decoder, [ids[0].numpy()])[0].entropy == pytest.approx(
        want, rel=1e-5
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3-sliding", "gpt_neox"])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_planted_dead_layer_is_the_only_one(name: str, dead: int) -> None:
    key = f"layers.{dead}.{'attention.dense' if name == 'gpt_neox' else 'self_attn.o_proj'}"
    factor = (
        1e-9 if name == "gemma2" else 0.01
    )  # a norm behind it makes up for what is not next to nothing
    found = measure_attention(changed(name, key, lambda w: w.mul_(factor)), some())
    assert [i for i, layer in enumerate(found) if layer.dead] == [dead]


def test_the_model_is_left_as_it_was() -> None:
    ids = torch.from_numpy(some(1)[0])[None]
    copy = fresh("llama")
    decoder = CausalLM(copy)
    before = copy(ids).logits
    measure_attention(decoder, some())
    assert decoder.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in copy.modules())
    assert torch.equal(copy(ids).logits, before)


def test_a_few_texts_are_read_and_the_same_figures_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, many = target("llama").decoder, some(20)
    monkeypatch.setattr(attention_strength, "READ_TEXTS", 2)
    monkeypatch.setattr(attention_strength, "TOKENS_PER_TEXT", 6)
    found = measure_attention(decoder, many)
    assert (
        found
        == measure_attention(decoder, many)
        == measure_attention(decoder, [many[0][:6], many[10][:6]])
    )
    assert found == measure_attention(decoder, [np.array([3]), *many[:1], np.array([4]), many[10]])


class Mixer(LlamaAttention):
    """What is not called an attention."""


def test_unmeasurable_models_are_refused() -> None:
    decoder = tiny_target().decoder
    for nothing in ([], [np.array([3])]):
        with pytest.raises(UserError, match="texts of at least 2 tokens"):
            measure_attention(decoder, nothing)
    mixing: Any = decoder.layers[0].self_attn
    mixing.__class__ = Mixer
    with pytest.raises(UserError, match="the layers of LlamaForCausalLM attend cannot be measured"):
        measure_attention(decoder, some())


def test_dead_is_below_a_tenth() -> None:
    assert [Attending(output, 0.5).dead for output in (0.09, 0.1, float("nan"))] == [
        True,
        False,
        False,
    ]


def test_compiled_layers_are_measured_like_others() -> None:
    """A compiled layer runs no attention module in its own forward."""
    plain, compiled = (
        Target.load("demo", dtype="float32", compile=chosen).decoder for chosen in (False, True)
    )
    expected, found = measure_attention(plain, some()), measure_attention(compiled, some())
    assert [layer.output for layer in found] == pytest.approx(
        [layer.output for layer in expected], rel=1e-3
    )
    assert [layer.entropy for layer in found] == pytest.approx(
        [layer.entropy for layer in expected], rel=1e-3
    )
