"""Layers as machine code: what the model's own give but for rounding, the same bits in any company, its own where not."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from architectures import MIXED, WINDOW
from draftree import Request, Target
from draftree.cli.app import main
from draftree.engine import load, plain
from draftree.errors import UserError
from draftree.evaluation.provenance import provenance
from draftree.models import compiling
from draftree.models.cache import SlotCache
from draftree.models.compiling import agrees, compile_layers, compiled_kinds, fits, hasten, is_compiled
from draftree.models.decoder import UNNORMED, Decoder
from draftree.models.feed import Feed
from draftree.models.native_layers import Layer
from draftree.models.native_linear import NativeLinear, can_pack
from draftree.models.sources import Loading
from draftree.models.stable import parting
from draftree.native import dense
from draftree.registry import build
from draftree.testing import Case, Suite
from draftree.testing.conformance import cases
from draftree.testing.fakes import tiny_target

pytestmark = pytest.mark.skipif(dense.core is None, reason="there are no native kernels")
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {"vocab_size": 71, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "eos_token_id": 2,
         "initializer_range": 0.2}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biases of queries": ("qwen2", {}),
    "normed heads": ("qwen3", {}),
    "a window": ("mistral", {"sliding_window": WINDOW}),
    "mixed": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED[:2]}),
    "one head for all": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 96}),
}


def model_of(kind: str, dtype: torch.dtype, **sizes: Any) -> PreTrainedModel:
    name, more = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **more, **sizes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:  # which begin as ones, and as zeros
            p.add_(torch.randn(p.shape).to(dtype) / 4)
    return model


def both(kind: str, dtype: torch.dtype, **sizes: Any) -> tuple[Decoder, Decoder]:
    own = model_of(kind, dtype, **sizes)
    ours = copy.deepcopy(own)
    hasten(ours, Loading(), True)
    return Decoder(own), Decoder(ours)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_product_is_torchs_and_keeps_its_bits(dtype: torch.dtype, threads: int) -> None:
    before, eps = torch.get_num_threads(), torch.finfo(dtype).eps
    torch.set_num_threads(threads)
    try:
        for wide, deep in ((33, 48), (64, 2), (7, 130)):
            weight, bias = torch.randn(wide, deep).to(dtype), torch.randn(wide).to(dtype)
            for added in (None, bias):
                tiled, rows = NativeLinear(weight, added), torch.randn(2, 19, deep).to(dtype)
                made, wanted = tiled(rows), linear(rows.double(), weight.double(), None if added is None else added.double())
                largest = linear(rows.double().abs(), weight.double().abs(), None if added is None else added.double().abs())
                single = torch.finfo(torch.float32).eps / 2  # sums are float32's, each addition rounded; then the result is
                assert ((made - wanted).abs() <= (deep + 2) * single * largest + eps / 2 * wanted.abs()).all()
                for n in range(1, 19):
                    assert torch.equal(tiled(rows[1, :n]), made[1, :n])
                    assert torch.equal(tiled(rows[:, 3 : 3 + n]), made[:, 3 : 3 + n])
        assert NativeLinear(weight)(torch.zeros(0, deep, dtype=dtype)).shape == (0, wide)
    finally:
        torch.set_num_threads(before)


def test_what_is_not_for_it() -> None:
    assert can_pack(torch.zeros(3, 4), None)
    assert can_pack(torch.zeros(3, 5, dtype=torch.float16), None)
    assert not can_pack(torch.zeros(3, 4, dtype=torch.float64), None)
    assert not can_pack(torch.zeros(3, 4), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_itself_but_for_rounding(kind: str, dtype: torch.dtype) -> None:
    own, ours = both(kind, dtype)
    assert len(compiled_kinds(ours.model)) == 1
    assert not compiled_kinds(own.model)
    ids = np.random.default_rng(0).integers(0, own.vocab, 40)
    read = [d.read(d.new_cache(1, 41), Feed.chains([ids], np.zeros(1, np.int64), d.device), layers=(1, 2)) for d in (own, ours)]
    (wanted, states), (found, hidden) = read
    for mine, theirs in ((found, wanted), (hidden[1], states[1]), (hidden[2], states[2])):
        assert (mine - theirs).norm() <= (8 * torch.finfo(dtype).eps + 1e-5) * theirs.norm()
    assert parting(ours) is None, "a token has the same bits, however its text is cut"


def passes(decoder: Decoder, count: int = 3) -> list[tuple[Tensor, dict[int, Tensor]]]:
    """Logits and hidden states of passes over a prompt of two rows, then over a tree, with some columns of the head alone."""
    cache, found = decoder.new_cache(2, 16), []
    entries, draw = (0, 1, 2, UNNORMED), np.random.default_rng(0)
    with torch.inference_mode():
        for i in range(count):
            n, starts = (5, 3)[i % 2], cache.lengths.copy()
            seen = [np.tri(n, dtype=np.bool_)] * 2
            if i % 2:
                seen = [np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)] * 2
            places = [s + seen[0].sum(axis=1) - 1 for s in starts]
            feed = Feed.packed([draw.integers(0, 71, n) for _ in range(2)], places, starts, seen, places, decoder.device)
            found.append(decoder.read(cache, feed, torch.tensor([0, 2]) if i == 2 else 0, entries))
            if i % 2 == 0:
                for row in range(2):
                    cache.keep(row, starts[row] + np.arange(n))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_passes_go_straight_with_the_same_bits(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass goes the model's own way, too; then none does, unless somebody looks at what goes in."""
    ours, stack, calls = both(kind, dtype)[1], type(both(kind, dtype)[1].stack), list[int]()
    own: Any = stack.forward
    monkeypatch.setattr(stack, "forward", lambda self, *args, **kwargs: (calls.append(1), own(self, *args, **kwargs))[1])
    _ = ours.shapes, ours.head(torch.zeros(1, 96, dtype=dtype))
    calls.clear()
    straight = passes(ours)
    assert len(calls) == (3 if kind == "mixed" else 1)
    hook = ours.model.register_forward_pre_hook(lambda *_: None)
    calls.clear()
    watched = passes(ours)
    assert len(calls) == 3
    hook.remove()
    for (logits, states), (other, others) in zip(straight, watched, strict=True):
        assert torch.equal(logits, other)
        assert states.keys() == others.keys()
        assert all(torch.equal(states[i], others[i]) for i in states)


def test_a_copy_goes_through_its_own_weights() -> None:
    ours = both("llama", torch.float32)[1]
    passes(ours)
    other = copy.deepcopy(ours.model)
    other.model.layers[1].mlp.up_proj.weight.mul_(2)  # type: ignore[union-attr, operator]
    fresh = model_of("llama", torch.float32)
    fresh.load_state_dict(other.state_dict())
    for (logits, _), (wanted, _) in zip(passes(Decoder(other)), passes(Decoder(fresh)), strict=True):
        assert torch.allclose(logits, wanted, atol=1e-4)


def test_a_part_that_is_replaced_is_the_one_that_computes() -> None:
    ours, fresh = both("llama", torch.float32)[1], model_of("llama", torch.float32)
    passes(ours)
    for model in (ours.model, fresh):
        layer: Any = model.base_model.layers[1]  # type: ignore[union-attr, index]
        layer.mlp = copy.deepcopy(layer.mlp)
        layer.mlp.up_proj.weight.mul_(2)
    for (logits, _), (wanted, _) in zip(passes(ours), passes(Decoder(fresh)), strict=True):
        assert torch.allclose(logits, wanted, atol=1e-4)


def test_a_model_that_does_more_keeps_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does around its layers is seen by the first pass, which goes both ways."""
    plain, ours = both("llama", torch.float32)
    stack: Any = type(ours.stack)
    own = stack.forward

    def more(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    monkeypatch.setattr(stack, "forward", more)
    for (logits, _), (wanted, _) in zip(passes(ours), passes(plain), strict=True):
        assert torch.allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_a_batch(dtype: torch.dtype) -> None:
    decoder, draw = both("llama", dtype)[1], np.random.default_rng(0)
    texts = [draw.integers(0, decoder.vocab, n) for n in (33, 70, 5)]

    def read(texts: list[Any]) -> tuple[SlotCache, Tensor]:
        cache = decoder.new_cache(len(texts), 80)
        return cache, decoder.forward(cache, Feed.chains(texts, cache.lengths.copy(), decoder.device))

    many, logits = read(texts)
    for row, text in enumerate(texts):
        one, alone = read([text])
        assert torch.equal(alone[0], logits[row, : len(text)])
        for layer in range(2):
            for mine, theirs in zip(one.layer(layer), many.layer(layer), strict=True):
                assert torch.equal(mine[0, :, : len(text)], theirs[row, :, : len(text)])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    decoder, before = both("llama", torch.bfloat16)[1], torch.get_num_threads()
    ids = np.arange(50) % decoder.vocab
    wanted = decoder.forward(decoder.new_cache(1, 50), Feed.chains([ids], np.zeros(1, np.int64), decoder.device))
    torch.set_num_threads(threads)
    try:
        found = decoder.forward(decoder.new_cache(1, 50), Feed.chains([ids], np.zeros(1, np.int64), decoder.device))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_of_our_own_give_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute where torch brings another OpenMP than GNU's."""
    monkeypatch.setattr(dense, "thread_count", lambda: threads)
    linear, rows = NativeLinear(torch.randn(640, 32)), torch.randn(300, 32)
    wanted = linear(rows)
    dense.core.use_openmp(0, 0, 0)
    try:
        for _ in range(20):
            assert torch.equal(linear(rows), wanted)
    finally:
        dense.share_torch_threads()


def test_transformers_own_generate_goes_the_same_way() -> None:
    own, ours = both("llama", torch.float32)
    ids = torch.arange(3, 12)[None]
    told: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    wanted, found = own.model.generate(ids, **told), ours.model.generate(ids, **told)  # type: ignore[operator]
    assert torch.equal(found, wanted)
    target = Target(ours, "tiny")
    assert plain(target, [Request(ids[0].tolist(), 16, target.eos)]).tokens[0] == wanted[0, 9:].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformers_padded_batches_keep_bits(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("llama", dtype).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), str(dtype).removeprefix("torch."), compile=True, exactness="bits")
    stock: list[Any] = []
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda *_, **__: stock.append(1))
    model: Any = target.decoder.model
    texts = [torch.arange(3, 3 + n) for n in (5, 12)]
    with torch.inference_mode():
        alone = [model(text[None]).logits[0, -1] for text in texts]
        ids, seen = (pad_sequence(t, batch_first=True, padding_side="left") for t in (texts, list(map(torch.ones_like, texts))))
        out = model(ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0))
    assert not stock, "a pass that falls back has other bits"
    assert torch.equal(out.logits[:, -1], torch.stack(alone))


def test_a_layer_goes_its_own_way_where_ours_does_not() -> None:
    module: Any = model_of("llama", torch.float32).base_model.layers[0]  # type: ignore[union-attr, index]
    own = copy.deepcopy(module)
    compile_layers(module)
    assert is_compiled(module)
    x, turned = torch.randn(1, 3, 96), (torch.ones(1, 3, 32), torch.zeros(1, 3, 32))
    given: dict[str, Any] = {"position_embeddings": turned, "attention_mask": torch.zeros(1, 1, 3, 3)}
    wanted = own(x, **given)
    assert torch.allclose(module(x, **given), wanted, atol=1e-5)
    learning = x.clone().requires_grad_()
    module(learning, **given).sum().backward()
    assert learning.grad is not None
    by_head = given | {"attention_mask": torch.zeros(1, 6, 3, 3)}
    assert torch.equal(module(x, **by_head), own(x, **by_head))
    other = copy.deepcopy(module)
    for each in (module, other):
        with torch.no_grad():
            each.mlp.up_proj.weight.mul_(2)
            own.mlp.up_proj.weight.copy_(each.mlp.up_proj.weight)
        assert torch.equal(each(x, **given), own(x, **given))
        each.double()
        assert each(x.double(), position_embeddings=tuple(t.double() for t in turned)).dtype is torch.float64


def test_another_layer_of_the_same_look_stays_as_it_is(tmp_path: Path) -> None:
    config = AutoConfig.for_model("granite", **SIZES, residual_multiplier=0.5)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert any(map(fits, model.modules()))
    assert not compile_layers(model)
    assert not hasten(model, Loading(), True)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="compile is true for a GraniteForCausalLM"):
        Target.load(str(tmp_path), compile=True)


def exchange(layer: Layer, one: str, other: str) -> None:
    mine, theirs = (copy_of(getattr(layer.record, name)) for name in (one, other))
    setattr(layer.record, one, theirs)
    setattr(layer.record, other, mine)


def copy_of(norm: Any) -> Any:
    return dense.core.Norm(norm.weight, norm.epsilon)


MISTAKES: dict[str, Callable[[Layer], object]] = {
    "scale": lambda layer: setattr(layer, "sizes", replace(layer.sizes, scale=0.5)),
    "epsilon": lambda layer: setattr(layer.record.input_norm, "epsilon", 0.5),
    "norms": lambda layer: exchange(layer, "input_norm", "post_norm"),
    "queries": lambda layer: setattr(layer.record.qkv, "weight", layer.record.qkv.weight + 128 * 32),
    "gate for up": lambda layer: setattr(layer.record.gate_up, "weight", layer.record.gate_up.weight + 4 * 32 * 32),
    "no bias": lambda layer: setattr(layer.record.down, "bias", 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_trial_sees_a_mistake(mistake: str, dtype: torch.dtype) -> None:
    module: Any = model_of("with biases", dtype).base_model.layers[0]  # type: ignore[union-attr, index]
    ours = Layer(module)
    assert agrees(module, ours)
    MISTAKES[mistake](ours)
    assert not agrees(module, ours)


@pytest.mark.parametrize("name", ["generic", "avx2"])
@pytest.mark.parametrize("faster", [True, False])
def test_a_large_model_is_compiled_where_that_is_faster(faster: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "variant", lambda: name)
    small, model = model_of("llama", torch.float32), model_of("llama", torch.float32)
    assert not hasten(small, Loading(), None), "it would have to be waited for"
    monkeypatch.setattr(compiling, "LARGE", 1000)
    monkeypatch.setattr(compiling, "quicker", lambda topic, about, works: [work() for work in works()] and faster)
    for told in (Loading(kernels="stock"), Loading(attn_implementation="eager")):
        assert not hasten(model, told, None)
    used = faster or name != "generic"  # generic kernels alone are timed
    assert hasten(model, Loading(), None) is used
    assert compiled_kinds(model) == ["LlamaDecoderLayer"] * used


@pytest.fixture(scope="module")
def suite() -> Suite:
    """The conformance suite with compiled layers; `python -m draftree.testing --compiled` runs it whole."""
    return Suite(tiny_target(compiled=True))


def some() -> list[Case]:
    """A case of each check for drafters that have passes of their own."""
    wanted = ("edd", "eagle", "eagle3", "lm", "mtp")
    return list({(c.check, c.drafter): c for c in cases() if c.drafter in wanted and c.policy in ("eagle2", "yield")}.values())


@pytest.mark.parametrize("case", some(), ids=str)
def test_texts_are_plain_ones(suite: Suite, case: Case) -> None:
    assert compiled_kinds(suite.target.decoder.model) == ["LlamaDecoderLayer"]
    suite.run(case)


@pytest.mark.parametrize("case", [c for c in cases() if c not in some()], ids=str)
@pytest.mark.long
def test_texts_are_plain_ones_with_all_parts(suite: Suite, case: Case) -> None:
    suite.run(case)


@pytest.fixture(scope="module")
def demo() -> Target:
    return Target.load("demo", compile=True)


@pytest.mark.parametrize("drafter", ["edd", "eagle", "eagle3+suffix", "mtp"])
def test_the_demo(demo: Target, drafter: str) -> None:
    engine = load(demo, drafter, "yield")
    ids = demo.tokenizer.encode("def main(")
    requests = [Request(ids, 40, demo.eos), Request(ids[:2], 24, demo.eos)]
    assert engine.write(requests).tokens == plain(demo, requests).tokens == [plain(demo, [r]).tokens[0] for r in requests]
    said: Any = provenance(demo, 0)["target"]
    assert said["compiled"] == ["LlamaDecoderLayer"]
    assert said["packed"] == ["4096x128 native"]


def test_layers_of_drafters_are_compiled(demo: Target) -> None:
    for name, kinds in (("eagle", ["LlamaDecoderLayer"]), ("eagle3", ["EAGLE3Layer"]), ("edd", ["LlamaDecoderLayer"])):
        assert compiled_kinds(build("drafter", name).open(demo).model) == kinds


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "def main(", "--compile", "--max-new-tokens", "8", "--raw", "--baseline", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["baseline"]["same_output"] is True
