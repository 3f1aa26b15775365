"""Layers as machine code: what the model's own give but for rounding, the same bits in any company, its own where not."""

import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import CROSSING, MIXED, WINDOW
from draftree import Request, Target, native
from draftree.cli.app import main
from draftree.drafters.neural import native_drafter_layers
from draftree.drafters.neural.native_drafter_layers import accelerate, layer_kinds, native_layer
from draftree.engine import generate_plain, load
from draftree.errors import UserError
from draftree.evaluation.provenance import provenance
from draftree.kernels.node_table import paths
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.hf_runner import UNNORMED
from draftree.models.kv_cache import KVView, SlotCache
from draftree.models.model_runner import ModelOutput, Outputs
from draftree.models.native_layers import Angles, NativeLayer, agrees, fits, run_layers
from draftree.models.native_linear import NativeLinear, can_pack
from draftree.models.native_runner import NativeRunner
from draftree.models.numeric_agreement import differs_by_rounding, median_distance
from draftree.native import cpu_threads, transformer_kernels
from draftree.registry import build
from draftree.target import kernel_choice
from draftree.target.batch_invariance_choice import first_variant_layer
from draftree.target.kernel_choice import choose_kernels
from draftree.target.load_options import Loading
from draftree.target.load_weights import round_to_four_bits
from draftree.testing import Case, Suite
from draftree.testing.conformance import cases
from draftree.testing.fakes import tiny_target
from draftree.tree import Ints
from folders import resident

pytestmark = pytest.mark.skipif(
    transformer_kernels.core is None, reason="there are no native kernels"
)
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
    "mixed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED[:2]},
    ),
    "some without rotation": (
        "smollm3",
        {"no_rope_layers": [1, 0], "pad_token_id": 0, "bos_token_id": 1},
    ),
    "the first without rotation": (
        "smollm3",
        {"no_rope_layers": [0, 1], "pad_token_id": 0, "bos_token_id": 1},
    ),
    "one head for all": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 96}),
    "fused": ("phi3", {"pad_token_id": 0}),
    "fused with a window": (
        "phi3",
        {"pad_token_id": 0, "sliding_window": WINDOW, "num_key_value_heads": 6},
    ),
}


def model_of(kind: str, dtype: torch.dtype, **sizes: Any) -> PreTrainedModel:
    name, more = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **more, **sizes})
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    )
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:  # which begin as ones, and as zeros
            p.add_(torch.randn(p.shape).to(dtype) / 4)
    return model


def both(kind: str, dtype: torch.dtype, **sizes: Any) -> tuple[CausalLM, CausalLM]:
    own = model_of(kind, dtype, **sizes)
    ours = CausalLM(copy.deepcopy(own))
    assert choose_kernels(ours, Loading(compile=True))
    return CausalLM(own), ours


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_without_weights_run_as_they_are(dtype: torch.dtype) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = AutoConfig.for_model("olmo", **sizes, pad_token_id=0)
    config.hidden_size, config.num_attention_heads = 192, 6
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    decoder = CausalLM(model)
    choose_kernels(decoder, Loading(compile=True))
    assert not isinstance(decoder.runner, NativeRunner)


def test_a_head_that_reads_other_sizes_than_layers_write() -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_attention_heads": 4}
    config = AutoConfig.for_model("opt", vocab_size=61, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert CausalLM(model)._behind_head is not None


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
                made, wanted = (
                    tiled(rows),
                    linear(
                        rows.double(), weight.double(), None if added is None else added.double()
                    ),
                )
                largest = linear(
                    rows.double().abs(),
                    weight.double().abs(),
                    None if added is None else added.double().abs(),
                )
                single = (
                    torch.finfo(torch.float32).eps / 2
                )  # sums are float32's, each addition rounded; then the result is
                assert (
                    (made - wanted).abs() <= (deep + 2) * single * largest + eps / 2 * wanted.abs()
                ).all()
                for n in range(1, 19):
                    assert torch.equal(tiled(rows[1, :n]), made[1, :n])
                    assert torch.equal(tiled(rows[:, 3 : 3 + n]), made[:, 3 : 3 + n])
        assert NativeLinear(weight)(torch.zeros(0, deep, dtype=dtype)).shape == (0, wide)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux alone")
@pytest.mark.parametrize("kind", ["llama", "fused"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_file_are_in_memory_once(
    kind: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    """The packed weights have the checkpoint's size, and of the file hardly anything is left in memory."""
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
    }
    model = model_of(kind, dtype, tie_word_embeddings=tied, **sizes)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("rb+") as opened:
        os.fsync(opened)  # pages that are not yet on the disk stay in memory
    target = Target.load(str(tmp_path), dtype, compile=True, exactness="bits")
    runner = target.decoder.runner
    assert isinstance(runner, NativeRunner)
    found = passes(target.decoder)
    left, size = 1024 * resident(file), file.stat().st_size
    table = 4096 * 256 * dtype.itemsize
    assert runner.bytes <= 1.02 * size - (0 if tied else table)
    assert left <= 0.1 * size + table, "an embedding is read as it is"
    for mine, theirs in zip(found, passes(CausalLM(model)), strict=True):
        assert (mine.logits - theirs.logits).norm() <= (
            8 * torch.finfo(dtype).eps + 1e-5
        ) * theirs.logits.norm()
        assert torch.equal(mine.hidden[0], theirs.hidden[0])


def test_packable_weights_are_told_from_others() -> None:
    assert can_pack(torch.zeros(3, 4), None)
    assert can_pack(torch.zeros(3, 5, dtype=torch.float16), None)
    assert not can_pack(torch.zeros(3, 4, dtype=torch.float64), None)
    assert not can_pack(torch.zeros(3, 4), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_itself_but_for_rounding(kind: str, dtype: torch.dtype) -> None:
    own, ours = both(kind, dtype)
    assert len(ours.native_kinds) == 1
    assert not own.native_kinds
    ids = np.random.default_rng(0).integers(0, own.vocab, 40)
    batch = ForwardBatch.chains([ids], np.zeros(1, np.int64), own.device)
    read = [d.forward(batch, d.new_cache(1, 41), Outputs((1, 2))) for d in (own, ours)]
    (wanted, states), (found, hidden) = ((out.logits, out.hidden) for out in read)
    for mine, theirs in ((found, wanted), (hidden[1], states[1]), (hidden[2], states[2])):
        assert (mine - theirs).norm() <= (8 * torch.finfo(dtype).eps + 1e-5) * theirs.norm()
    assert first_variant_layer(ours) is None, "a token has the same bits, however its text is cut"


def passes(decoder: CausalLM, count: int = 3) -> list[ModelOutput]:
    """Passes over a prompt of two sequences, then over a tree, with logits after some tokens alone."""
    cache, found = decoder.new_cache(2, 16), []
    entries, draw = (0, 1, 2, UNNORMED), np.random.default_rng(0)
    with torch.inference_mode():
        for i in range(count):
            n, starts = (5, 3)[i % 2], cache.lengths.copy()
            seen = [np.tri(n, dtype=np.bool_)] * 2
            if i % 2:
                seen = [np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)] * 2
            places = [s + seen[0].sum(axis=1) - 1 for s in starts]
            ids = [draw.integers(0, 71, n) for _ in range(2)]
            batch = ForwardBatch.from_sequences(ids, places, starts, seen, places, decoder.device)
            wanted = Outputs(entries, np.array([0, 2, 8]) if i == 2 else None)
            found.append(decoder.forward(batch, cache, wanted))
            if i % 2 == 0:
                for row in range(2):
                    cache.keep(row, starts[row] + np.arange(n))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_the_models_own_without_its_modules(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ours = both(kind, dtype)
    wanted = passes(own)
    stack = type(ours.stack)
    monkeypatch.setattr(stack, "forward", lambda *_, **__: pytest.fail("it is not asked"))
    _ = ours.head(torch.zeros(1, 96, dtype=dtype))
    for mine, theirs in zip(passes(ours), wanted, strict=True):
        assert mine.hidden.keys() == theirs.hidden.keys()
        pairs = [(mine.hidden[i], theirs.hidden[i]) for i in mine.hidden]
        for found, states in [(mine.logits, theirs.logits), *pairs]:
            assert (found - states).norm() <= (8 * torch.finfo(dtype).eps + 1e-5) * states.norm()


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    ours = both("llama", torch.float32)[1]
    other = copy.deepcopy(ours.model)
    other.model.layers[1].mlp.up_proj.weight.mul_(2)  # type: ignore[union-attr, operator]
    fresh = model_of("llama", torch.float32)
    fresh.load_state_dict(other.state_dict())
    for mine, theirs in zip(passes(CausalLM(other)), passes(CausalLM(fresh)), strict=True):
        assert torch.allclose(mine.logits, theirs.logits, atol=1e-4)


def test_a_model_that_does_more_keeps_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does around its layers is seen by the trial."""
    decoder = CausalLM(model_of("llama", torch.float32))
    stack: Any = type(decoder.stack)
    own = stack.forward

    def more(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    monkeypatch.setattr(stack, "forward", more)
    assert not decoder.use_native_kernels()
    assert decoder.runner is decoder.hf


def test_heads_that_are_rotated_in_part_keep_their_own_way() -> None:
    partly = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    }
    decoder = CausalLM(model_of("fused", torch.float32, **partly))
    assert not decoder.use_native_kernels()
    assert decoder.runner is decoder.hf


@pytest.mark.parametrize("four", [False, True])
def test_fused_weights_are_those_of_layers_apart(four: bool) -> None:
    """Phi-3's weights, split as Llama has them, give the same bits."""
    fused, apart = (
        model_of(kind, torch.bfloat16, rms_norm_eps=1e-5) for kind in ("fused", "llama")
    )
    weights = fused.state_dict()
    for name in list(weights):
        if name.endswith("qkv_proj.weight"):
            for each, part in zip("qkv", weights.pop(name).split([192, 64, 64]), strict=True):
                weights[name.replace("qkv", each)] = part
        elif name.endswith("gate_up_proj.weight"):
            for each, part in zip(("gate", "up"), weights.pop(name).chunk(2), strict=True):
                weights[name.replace("gate_up", each)] = part
    apart.load_state_dict(weights)
    decoders = []
    for model in (fused, apart):
        if four:
            round_to_four_bits(model)
        decoders.append(CausalLM(model))
        assert choose_kernels(decoders[-1], Loading(compile=True))
    for mine, theirs in zip(*map(passes, decoders), strict=True):
        assert torch.equal(mine.logits, theirs.logits)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_four_bit_layers_has_eight(tied: bool) -> None:
    """Its logits are those of the whole head up to rounding, at every width with the same bits."""
    model = model_of("llama", torch.bfloat16, tie_word_embeddings=tied)
    weight = model.get_output_embeddings().weight.clone()
    round_to_four_bits(model)
    whole, rounded = CausalLM(copy.deepcopy(model)), CausalLM(model)
    assert choose_kernels(whole, Loading(compile=True))
    assert choose_kernels(rounded, Loading(compile=True, quantize="int4"))
    head: Any = model.get_output_embeddings()
    assert head.kernel.eight_bits
    assert torch.equal(head.weight, weight)
    assert (head.weight is model.get_input_embeddings().weight) == tied
    for mine, theirs in zip(passes(rounded), passes(whole), strict=True):
        off = (mine.logits - theirs.logits).float().norm() / theirs.logits.float().norm()
        assert 1e-3 < off < 0.02  # 127 steps of weights and of activations
    states = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = rounded.head(states)
    assert all(torch.equal(rounded.head(states[i : i + 1])[0], logits[i]) for i in range(9))
    ids = torch.tensor([3, 70, 8])
    assert torch.equal(rounded.head_for(ids)(states), logits[:, ids])


def test_one_token_that_amplifies_rounding_is_no_disagreement() -> None:
    """A model may form its largest activations at a token, and what is rounded there decides."""
    wanted = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    found = wanted * 1.01
    found[3] = -wanted[3]
    assert median_distance(found, wanted) == pytest.approx(0.01, rel=1e-3)
    assert median_distance(wanted.roll(1, 0), wanted) > 1


def test_other_heads_stay_whole() -> None:
    head: Any = both("llama", torch.bfloat16)[1].model.get_output_embeddings()
    assert not head.kernel.eight_bits


def test_frequencies_of_fused_layers_change_with_the_length_of_the_text() -> None:
    values = CROSSING["longrope"][1]
    parameters = {
        **values["rope_parameters"],
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + i / 4 for i in range(16)],
    }
    own, ours = both(
        "fused", torch.float32, **{**values, "hidden_size": 192, "rope_parameters": parameters}
    )
    assert ours.native_kinds == ["Phi3DecoderLayer"]
    for mine, theirs in zip(passes(ours, 8), passes(own, 8), strict=True):
        assert torch.allclose(mine.logits, theirs.logits, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_a_batch(dtype: torch.dtype) -> None:
    decoder, draw = both("llama", dtype)[1], np.random.default_rng(0)
    texts = [draw.integers(0, decoder.vocab, n) for n in (33, 0, 70, 5)]  # one has nothing to read

    def read(texts: list[Any]) -> tuple[SlotCache, Tensor]:
        cache = decoder.new_cache(len(texts), 80)
        batch = ForwardBatch.chains(texts, cache.lengths.copy(), decoder.device)
        return cache, batch.pad(decoder.forward(batch, cache).logits)

    many, logits = read(texts)
    for row, text in enumerate(texts):
        if not len(text):
            continue
        one, alone = read([text])
        assert torch.equal(alone[0], logits[row, : len(text)])
        for layer in range(2):
            for mine, theirs in zip(one.layer(layer), many.layer(layer), strict=True):
                assert torch.equal(mine[0, :, : len(text)], theirs[row, :, : len(text)])


def random_tree(draw: np.random.Generator, count: int, share: float) -> Any:
    """Return the parents of a random tree, in which a share of the nodes follow the one before."""
    parents = [-1]
    for node in range(1, count):
        parents.append(node - 1 if node < 3 or draw.random() < share else int(draw.integers(node)))
    return np.array(parents, np.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "a window", "wide heads"])
@pytest.mark.parametrize("length", [0, 1, 17, 29, 31, 32, 33, 62, 90])
def test_a_path_of_a_tree_has_the_bits_of_plain_text(
    length: int, kind: str, dtype: torch.dtype, variant: str
) -> None:
    """The paths end in the same block of 32 slots as the text, or one or two blocks later."""
    decoder, draw = both(kind, dtype)[1], np.random.default_rng(length)
    text, ids = draw.integers(0, 71, length), draw.integers(0, 71, 60)

    def after_text() -> SlotCache:
        cache = decoder.new_cache(1, 200)
        if length:
            decoder.forward(ForwardBatch.chains([text], cache.lengths.copy(), cpu), cache)
            cache.keep(0, np.arange(length))
        return cache

    cpu = decoder.device
    for share in (0.3, 0.9):
        seen = paths(random_tree(draw, len(ids), share))
        depths = seen.sum(axis=1) - 1
        cache = after_text()
        starts, counts = cache.lengths.copy(), np.array([len(ids)])
        batch = ForwardBatch.forest(ids, length + depths, counts, starts, seen.reshape(-1), cpu)
        logits = decoder.forward(batch, cache).logits
        for leaf in (*np.argsort(depths)[[-1, -2, len(ids) // 2]], len(ids) - 1):
            path = np.flatnonzero(seen[leaf])
            plain = after_text()
            for parts in np.array_split(path, min(3, len(path))):
                chain = ForwardBatch.chains([ids[parts]], plain.lengths.copy(), cpu)
                assert torch.equal(decoder.forward(chain, plain).logits, logits[parts])
                plain.keep(0, plain.lengths[0] + np.arange(len(parts)))
        cache.keep(0, length + path)
        after = [
            ForwardBatch.chains([ids[:1]], each.lengths.copy(), cpu) for each in (cache, plain)
        ]
        found, wanted = (
            decoder.forward(each, of).logits for each, of in zip(after, (cache, plain), strict=True)
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [5, 31, 40, 64])
def test_bits_do_not_depend_on_the_cut_of_a_text_longer_than_the_window(
    window: int, dtype: torch.dtype, variant: str
) -> None:
    sizes = {"sliding_window": window, "max_position_embeddings": 512}
    decoder, draw = both("a window", dtype, **sizes)[1], np.random.default_rng(window)
    text, chain, other = (draw.integers(0, 71, n) for n in (120, 2 * window, 2 * window))
    cpu = decoder.device

    def read(tokens: Ints, ends: list[int]) -> tuple[SlotCache, Tensor]:
        cache, logits = decoder.new_cache(1, 300), []
        for part in np.split(tokens, ends):
            batch = ForwardBatch.chains([part], cache.lengths.copy(), cpu)
            logits.append(decoder.forward(batch, cache).logits)
            cache.keep(0, cache.lengths[0] + np.arange(len(part)))
        return cache, torch.cat(logits)

    cache, whole = read(text, [])
    for ends in ([100], [33], [64, 96], [1, 50, 57, 119]):
        assert torch.equal(read(text, ends)[1], whole)
    # Two chains that are longer than the window, side by side in a tree.
    ids = np.stack((chain, other), axis=1).reshape(-1)
    of, depths = np.arange(len(ids)) % 2, np.arange(len(ids)) // 2
    seen = (of[:, None] == of) & (depths[:, None] >= depths)
    starts, counts = cache.lengths.copy(), np.array([len(ids)])
    batch = ForwardBatch.forest(ids, len(text) + depths, counts, starts, seen.reshape(-1), cpu)
    logits = decoder.forward(batch, cache).logits
    for first, tokens in enumerate((chain, other)):
        for ends in ([], [len(text)], [len(text) + window]):
            plain = read(np.concatenate((text, tokens)), ends)[1]
            assert torch.equal(plain[len(text) :], logits[first::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [[], [6], [0, 2, 9], list(range(10))])
@pytest.mark.parametrize("entries", [(1,), (1, 2)])
def test_logits_after_some_tokens_have_the_same_bits(
    entries: tuple[int, ...], tokens: list[int], dtype: torch.dtype
) -> None:
    """Entry 2 is the last hidden state, for which all tokens go through the last layer."""
    decoder, draw = both("llama", dtype)[1], np.random.default_rng(0)
    texts = [draw.integers(0, decoder.vocab, n) for n in (7, 3)]

    def read(tokens: Any) -> tuple[SlotCache, ModelOutput]:
        cache = decoder.new_cache(2, 80)
        batch = ForwardBatch.chains(texts, cache.lengths.copy(), decoder.device)
        return cache, decoder.forward(batch, cache, Outputs(entries, tokens))

    (cache, whole), (own, some) = (read(each) for each in (None, np.array(tokens, np.int64)))
    assert torch.equal(some.logits, whole.logits[tokens])
    for entry in entries:
        assert torch.equal(some.hidden[entry], whole.hidden[entry])
    for layer in range(2):
        for mine, theirs in zip(own.layer(layer), cache.layer(layer), strict=True):
            assert torch.equal(mine[:, :, :3], theirs[:, :, :3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_in_two_parts_has_the_same_bits(dtype: torch.dtype, variant: str) -> None:
    """The second part sees many more slots, so it needs more memory than the first."""
    module: Any = model_of("llama", dtype).model
    layer, (n, slots) = NativeLayer(module.layers[0]), (3, 6000)
    sizes = layer.sizes
    x = torch.randn(1, n, sizes.hidden_size).to(dtype)
    angles = Angles.in_order(module.rotary_emb(x, torch.arange(n)[None]), 1, n)
    shape = (1, sizes.kv_heads, slots, sizes.head_dim)
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    starts = np.array([slots - n])

    def run(parts: list[tuple[int, KVView]]) -> Tensor:
        return [run_layers([layer], x, angles, view, None, part) for part, view in parts][-1]

    whole = KVView(keys.clone(), values.clone(), starts, slots)
    wanted = run([(3, whole)])
    own = KVView(*(t[:, :, :n].contiguous() for t in (keys, values)), None, n)
    with ThreadPoolExecutor(1) as fresh:  # a thread without memory of earlier passes
        found = fresh.submit(run, [(1, own), (2, whole)]).result()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    decoder, before = both("llama", torch.bfloat16)[1], torch.get_num_threads()
    ids = np.arange(50) % decoder.vocab
    batch = ForwardBatch.chains([ids], np.zeros(1, np.int64), decoder.device)
    wanted = decoder.forward(batch, decoder.new_cache(1, 50)).logits
    torch.set_num_threads(threads)
    try:
        found = decoder.forward(batch, decoder.new_cache(1, 50)).logits
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_of_our_own_give_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute where torch brings another OpenMP than GNU's."""
    monkeypatch.setattr(cpu_threads, "thread_count", lambda: threads)
    linear, rows = NativeLinear(torch.randn(640, 32)), torch.randn(300, 32)
    wanted = linear(rows)
    transformer_kernels.core.use_openmp(0, 0, 0)
    try:
        for _ in range(20):
            assert torch.equal(linear(rows), wanted)
    finally:
        cpu_threads.share_torch_threads()


def test_transformers_own_generate_is_its_own() -> None:
    own, ours = both("llama", torch.float32)
    ids = torch.arange(3, 12)[None]
    told: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 16,
        "do_sample": False,
        "pad_token_id": 0,
    }
    wanted, found = own.model.generate(ids, **told), ours.model.generate(ids, **told)  # type: ignore[operator]
    assert torch.equal(found, wanted)
    target = Target(ours, "tiny")
    assert (
        generate_plain(target, [Request(ids[0].tolist(), 16, target.eos)]).tokens[0]
        == wanted[0, 9:].tolist()
    )


@pytest.mark.parametrize("rounds", [True, False])
def test_a_drafters_layer_goes_its_own_way_where_ours_does_not(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_drafter_layers, "rounds_drafters", lambda: rounds)
    layers: Any = model_of("llama", torch.float32).base_model.layers  # type: ignore[union-attr]
    own = copy.deepcopy(layers[0])
    accelerate(layers, None, True)
    module = layers[0]
    assert layer_kinds(layers) == ["LlamaDecoderLayer"]
    assert list(module.state_dict()) == list(own.state_dict())
    x, turned = torch.randn(1, 3, 96), (torch.ones(1, 3, 32), torch.zeros(1, 3, 32))
    given: dict[str, Any] = {
        "position_embeddings": turned,
        "attention_mask": torch.zeros(1, 1, 3, 3),
    }
    wanted = own(x, **given)
    assert module.native.eight_bits is rounds
    if rounds:
        assert differs_by_rounding(module(x, **given), wanted, x, module.native.weight_eps)
    else:
        assert torch.allclose(module(x, **given), wanted, atol=1e-5)
    learning = x.clone().requires_grad_()
    module(learning, **given).sum().backward()
    assert learning.grad is not None
    by_head = given | {"attention_mask": torch.zeros(1, 6, 3, 3)}
    assert torch.equal(module(x, **by_head), own(x, **by_head))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.mlp.up_proj.weight.mul_(2)
        own.mlp.up_proj.weight.mul_(2)
    assert torch.equal(other(x, **given), own(x, **given))


def test_another_layer_of_the_same_look_stays_as_it_is(tmp_path: Path) -> None:
    config = AutoConfig.for_model("granite", **SIZES, residual_multiplier=0.5)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert any(map(fits, model.modules()))
    assert not choose_kernels(CausalLM(model), Loading(compile=True))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="compile is true for a GraniteForCausalLM"):
        Target.load(str(tmp_path), compile=True)


def exchange(layer: NativeLayer, one: str, other: str) -> None:
    mine, theirs = (copy_of(getattr(layer.record, name)) for name in (one, other))
    setattr(layer.record, one, theirs)
    setattr(layer.record, other, mine)


def copy_of(norm: Any) -> Any:
    return transformer_kernels.core.Norm(norm.weight, norm.epsilon)


MISTAKES: dict[str, Callable[[NativeLayer], object]] = {
    "scale": lambda layer: setattr(layer, "sizes", replace(layer.sizes, scale=0.5)),
    "epsilon": lambda layer: setattr(layer.record.input_norm, "epsilon", 0.5),
    "norms": lambda layer: exchange(layer, "input_norm", "post_norm"),
    "queries": lambda layer: setattr(
        layer.record.qkv, "weight", layer.record.qkv.weight + 128 * 32
    ),
    "gate for up": lambda layer: setattr(
        layer.record.gate_up, "weight", layer.record.gate_up.weight + 4 * 32 * 32
    ),
    "no bias": lambda layer: setattr(layer.record.down, "bias", 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_trial_sees_a_mistake(mistake: str, dtype: torch.dtype) -> None:
    module: Any = model_of("with biases", dtype).base_model.layers[0]  # type: ignore[union-attr, index]
    ours = NativeLayer(module)
    assert agrees(module, ours)
    MISTAKES[mistake](ours)
    assert not agrees(module, ours)


@pytest.mark.parametrize("name", ["generic", "avx2"])
@pytest.mark.parametrize("faster", [True, False])
def test_a_large_model_is_compiled_where_that_is_faster(
    faster: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "variant", lambda: name)
    small, large = (CausalLM(model_of("llama", torch.float32)) for _ in range(2))
    assert not choose_kernels(small, Loading()), "it would have to be waited for"
    monkeypatch.setattr(kernel_choice, "MIN_PARAMETERS", 1000)
    timed = lambda topic, about, works: [work() for work in works()] and faster
    monkeypatch.setattr(kernel_choice, "second_is_faster", timed)
    for told in (Loading(kernels="stock"), Loading(attn_implementation="eager")):
        assert not choose_kernels(large, told)
    used = faster or name != "generic"  # generic kernels alone are timed
    assert choose_kernels(large, Loading()) is used
    assert large.native_kinds == ["LlamaDecoderLayer"] * used


@pytest.fixture(scope="module")
def suite() -> Suite:
    """The conformance suite with compiled layers; `python -m draftree.testing --compiled` runs it whole."""
    return Suite(tiny_target(compiled=True))


ALL = cases()
DRAFTERS = ("edd", "eagle", "eagle3", "lm", "mtp")
SOME = list(
    {
        (c.check, c.drafter): c
        for c in ALL
        if c.drafter in DRAFTERS and c.policy in ("eagle2", "yield")
    }.values()
)
"""A case of each check for drafters that have passes of their own."""


@pytest.mark.parametrize("case", SOME, ids=str)
def test_texts_are_plain_ones(suite: Suite, case: Case) -> None:
    assert suite.target.decoder.native_kinds == ["LlamaDecoderLayer"]
    suite.run(case)


@pytest.fixture(params=range(len(native.available())), ids=native.available())
def number_of_variant(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of a variant of the kernels, which is forced."""
    before = native.variant()
    native.core.use_variant(native.available()[request.param])
    yield request.param
    native.core.use_variant(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_conforms_with_each_variant(number_of_variant: int, dtype: torch.dtype) -> None:
    """Run other cases with each variant; `make test-variants` runs a third of the whole product with each."""
    suite = Suite(tiny_target(compiled=True, dtype=dtype))
    assert native.variant() == native.available()[number_of_variant]
    for case in ALL[number_of_variant :: 83 if dtype is torch.float32 else 166]:
        suite.run(case)


@pytest.mark.parametrize("case", [c for c in ALL if c not in SOME], ids=str)
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
    assert (
        engine.write(requests).tokens
        == generate_plain(demo, requests).tokens
        == [generate_plain(demo, [r]).tokens[0] for r in requests]
    )
    said: Any = provenance(demo, 0)["target"]
    assert said["compiled"] == ["LlamaDecoderLayer"]
    assert said["packed"] == ["4096x128 native"]


def test_layers_of_drafters_are_compiled(demo: Target) -> None:
    for name, kinds in (
        ("eagle", ["LlamaDecoderLayer"]),
        ("eagle3", ["EAGLE3Layer"]),
        ("edd", ["LlamaDecoderLayer"]),
    ):
        drafter = build("drafter", name).open(demo)
        decoder = getattr(drafter, "decoder", None)
        assert (layer_kinds(drafter.model) if decoder is None else decoder.native_kinds) == kinds


@pytest.fixture
def eagle3(demo: Target) -> Any:
    return build("drafter", "eagle3").open(demo).model


def pair_pass(network: Any, call: Callable[..., Any]) -> Any:
    """Run a pass over three pairs after two committed ones, with an empty past."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(1, 3, network.width, generator=draw)
    cache = SlotCache((network.shape,), 1, torch.float32, torch.device("cpu"))
    batch = ForwardBatch.chains([np.array([5, 9, 2])], np.array([2]), torch.device("cpu"))
    places = torch.from_numpy(batch.padded_positions)
    writer = cache.writer(batch.starts, 3)
    mask = torch.zeros(1, 1, 3, 5).masked_fill(
        torch.ones(3, 5).tril(2) == 0, torch.finfo(torch.float32).min
    )
    with torch.inference_mode():
        return call(batch.padded_tokens, features, places, mask, writer)


def test_norms_layer_and_head_of_eagle3_are_one_call(
    eagle3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = pair_pass(eagle3, eagle3)
    with torch.inference_mode():
        wanted = eagle3.lm_head(eagle3.norm(out))
    for name in ("linear", "rms_norm"):
        monkeypatch.setattr(transformer_kernels, name, None)
    found, logits = pair_pass(eagle3, eagle3.with_logits)
    assert torch.equal(found, out)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("selected", [[2], [1, 2], [2, 0, 1]])
def test_selected_pairs_have_the_same_results(
    eagle3: Any, selected: list[int], native: bool
) -> None:
    if not native:
        eagle3.midlayer.native = None
    out, logits = pair_pass(eagle3, eagle3.with_logits)
    given = functools.partial(eagle3.with_logits, selected=np.array(selected, np.int64))
    found, its_logits = pair_pass(eagle3, given)
    assert torch.equal(found, out[0, selected])
    assert torch.equal(its_logits, logits[0, selected])


@pytest.mark.parametrize("eight_bits", [True, False])
def test_a_pass_of_eagle3_differs_from_its_modules_by_rounding(
    eagle3: Any, eight_bits: bool
) -> None:
    ours = eagle3.midlayer.native = NativeLayer(eagle3.midlayer, eight_bits)
    assert agrees(eagle3.midlayer, ours)
    out = pair_pass(eagle3, eagle3)
    eagle3.midlayer.native = None
    wanted = pair_pass(eagle3, eagle3)
    assert differs_by_rounding(out, wanted, torch.zeros_like(out), ours.weight_eps)
    assert differs_by_rounding(out, wanted, torch.zeros_like(out)) is not eight_bits
    exchange(ours, "input_norm", "feature_norm")
    assert not agrees(eagle3.midlayer, ours)


def test_a_layer_that_eight_bits_change_keeps_its_own(demo: Target) -> None:
    """One weight in each group is so large that eight bits leave nothing of the others."""
    layer = build("drafter", "eagle").open(demo).model.layers[0].replaced_module
    assert native_layer(layer).eight_bits is (native.variant() != native.GENERIC)
    spoilt = copy.deepcopy(layer)
    with torch.no_grad():
        spoilt.mlp.down_proj.weight[:, ::32] = 100 * spoilt.mlp.down_proj.weight.abs().max()
    assert not native_layer(spoilt).eight_bits


def test_heads_of_drafters_have_eight_bits(demo: Target, eagle3: Any) -> None:
    """They are the drafter's own head, or the target's for a draft vocabulary."""
    assert eagle3.lm_head.kernel.eight_bits
    states = torch.randn(6, eagle3.width, generator=torch.Generator().manual_seed(0))
    exact = linear(states, eagle3.lm_head.weight)
    with torch.inference_mode():
        off = (eagle3.lm_head(states) - exact).norm() / exact.norm()
    assert 1e-3 < off < 0.02  # 127 steps of weights and of activations
    ids = torch.tensor([3, 70, 8])
    with torch.inference_mode():
        whole = demo.decoder.head(states)[:, ids]
        rounded = demo.decoder.head_for(ids, for_drafts=True)(states)
        assert torch.equal(demo.decoder.head_for(ids)(states), whole)
    assert 1e-4 < (rounded - whole).norm() / whole.norm() < 0.03


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "generate",
                "def main(",
                "--compile",
                "--max-new-tokens",
                "8",
                "--raw",
                "--baseline",
                "--json",
            ]
        )
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["baseline"]["same_output"] is True
