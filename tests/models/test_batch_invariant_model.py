"""Linears whose bits depend on the width of a pass are found, and evened out; then a model's bits do not depend on cuts."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from architectures import CROSSING, fresh
from draftree import Costs, Request, Target, UserError
from draftree.engine import Engine
from draftree.evaluation.provenance import provenance
from draftree.models import batch_invariant_model, invariant_widths
from draftree.models.batch_invariant_model import BatchInvariantModel
from draftree.models.causal_lm import CausalLM
from draftree.models.cpu_linear import use_kernels
from draftree.models.forward_batch import ForwardBatch
from draftree.models.invariant_attention import EXACT
from draftree.models.invariant_widths import Widths, find_elementwise_widths, widths
from draftree.models.kv_cache import SlotCache
from draftree.registry import build
from draftree.target.batch_invariance_choice import first_variant_layer, resolve_exactness
from draftree.tree import Ints
from folders import target_folder
from forests import NOISE, worst
from hybrids import hybrid

DENSE = ("llama", "gemma3", "qwen3", "phi3-sliding", "olmo2", "gpt_neox", "qwen2-mixed")
EXPERTS = ("mixtral-sliding", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v2")
DTYPES = (torch.float32, torch.bfloat16)
KNOWN: dict[tuple[torch.dtype, int], dict[str, Widths | None]] = {}
"""What was found of kinds of layers, by dtype and kernel."""


def from_roots(change: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """A linear of 3 → 3 whose bits depend on the width."""
    return lambda rows: rows * 2 + change(len(rows))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda n: 0, Widths()),
        (lambda n: n >= 8, Widths(8)),
        (lambda n: n < 2, Widths(2)),
        (lambda n: n == 24, Widths(multiple=16)),
        (lambda n: n > 64, Widths(most=64)),
        (lambda n: n % 4 > 0, Widths(multiple=4)),
        (lambda n: n % 2 + (n < 4), Widths(4, 2)),
        (lambda n: (n > 5) + (n == 256), Widths(8, most=64)),
        (lambda n: n == 64, Widths(1, 8, 8)),
        (lambda n: n, Widths(1, 8, 8)),
    ],
)
def test_layers_that_change_with_the_width_are_found(
    change: Callable[[int], int], wanted: Widths | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant_widths, "MIN_COMPARED_ENTRIES", 3)  # every entry changes
    linear = from_roots(change)
    found = widths(linear, 3, torch.float32)
    assert found == wanted
    if found is not None:
        rows = torch.randn(130, 3)
        whole = found.apply(linear, rows)
        assert all(
            torch.equal(found.apply(linear, rows[at : at + n]), whole[at : at + n])
            for n in (1, 3, 9, 64, 70)
            for at in (0, 41)
        )


def test_differences_in_one_of_100_000_entries_are_found() -> None:
    """With AVX-512 BF16, kernels for sums of 32 numbers differ in one of 25,000 entries."""

    def rarely(rows: Tensor) -> Tensor:
        mixed = rows.double() * 1e4 + rows.double().roll(1, -1) * 1e7
        return rows * 2 + (mixed.long() % 100_000 == 9) * (len(rows) >= 8)

    assert widths(rarely, 32, torch.bfloat16) == Widths(8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_place_in_the_pass_that_changes_a_row_is_found(dtype: torch.dtype) -> None:
    def last_is_odd(rows: Tensor) -> Tensor:
        return torch.cat((rows[:-1], rows[-1:] + 1)) if len(rows) > 3 else rows

    assert widths(last_is_odd, 3, dtype) is None


@pytest.mark.parametrize("entries", [3, 8, 48, 576, 50_000])
def test_a_function_of_each_entry_fills_the_lanes_of_one_thread(entries: int) -> None:
    found, seen = find_elementwise_widths(entries), list[int]()

    def lanes(rows: Tensor) -> Tensor:
        seen.append(rows.numel())
        return rows

    rows = torch.randn(130, entries)
    assert torch.equal(found.apply(lanes, rows), rows)
    assert all(count % 64 == 0 for count in seen)
    assert all(count <= 32_768 for count in seen) or entries > 32_768


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("entries", "to"), [(64, 200), (576, 96), (1536, 64)])
def test_linears_of_this_machine_are_evened_out(dtype: torch.dtype, entries: int, to: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(entries, to, bias=to == 200).to(dtype)
    kept, rows = widths(linear, entries, dtype), torch.randn(70, entries).to(dtype)
    assert kept is not None
    with torch.no_grad():
        whole = kept.apply(linear, rows)
        for at, n in ((5, 1), (11, 17), (3, 2), (0, 64)):
            assert torch.equal(whole[at : at + n], kept.apply(linear, rows[at : at + n]))


def read(decoder: CausalLM, cache: SlotCache, parts: list[list[Ints]]) -> None:
    """Reads every row's text in its parts, rows side by side as long as they have some."""
    for row in itertools.zip_longest(*parts, fillvalue=np.zeros(0, np.int64)):
        starts = cache.lengths.copy()
        decoder.forward(ForwardBatch.chains(row, starts, decoder.device), cache)
        for r, part in enumerate(row):
            cache.keep(r, starts[r] + np.arange(len(part)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.long if i // 2 % 2 != j else ())
        for i, name in enumerate([*DENSE, *EXPERTS])
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_a_models_bits_do_not_depend_on_cuts_or_trees(name: str, dtype: torch.dtype) -> None:
    """Nodes of random trees, up to 64 wide, behind prompts cut anywhere, beside other rows, against their path read in one."""
    target = Target.of(fresh(name, layers=2).to(dtype))  # one of each kind
    decoder, draw = target.decoder, np.random.default_rng(0)
    by_turns = (
        [*DENSE, *EXPERTS].index(name) + DTYPES.index(dtype)
    ) % 2  # either kernel, in either dtype
    use_kernels(decoder.model, "packed" if by_turns else "stock")
    known = KNOWN.setdefault((dtype, by_turns), {})  # layers of a kind are in many models
    stable = BatchInvariantModel(decoder, known)
    known |= stable.widths
    assert None not in known.values()
    stable.use(decoder)
    assert first_variant_layer(decoder) is None
    for widths_of_rows in ((1, 2, 7), (64, 16, 33)):
        texts = [draw.integers(3, 70, draw.integers(2, 30)) for _ in widths_of_rows]
        cache = decoder.new_cache(len(texts), 30 + max(widths_of_rows))
        with torch.inference_mode():
            read(
                decoder,
                cache,
                [
                    np.split(t, np.sort(draw.integers(0, len(t) + 1, draw.integers(0, 4))))
                    for t in texts
                ],
            )
            trees = [draw.integers(-1, np.arange(n)) for n in widths_of_rows]  # each node's parent
            paths = [[path(parents, node) for node in range(len(parents))] for parents in trees]
            seen = [np.array([np.isin(np.arange(len(of)), one) for one in of]) for of in paths]
            tokens = [draw.integers(3, 70, n) for n in widths_of_rows]
            starts = cache.lengths.copy()
            places = [
                s + np.array([len(one) - 1 for one in of])
                for s, of in zip(starts, paths, strict=True)
            ]
            batch = ForwardBatch.from_sequences(
                tokens, places, starts, seen, places, decoder.device
            )
            found = decoder.forward(batch, cache).logits
            for r, of in enumerate(paths):
                for node in {0, len(of) // 2, len(of) - 1}:
                    whole = np.concatenate((texts[r], tokens[r][of[node]]))
                    one = ForwardBatch.chains([whole], np.zeros(1, np.int64), decoder.device)
                    alone = decoder.forward(one, decoder.new_cache(1, 96)).logits
                    assert torch.equal(found[batch.firsts[r] + node], alone[-1])
    if dtype is torch.bfloat16:  # where bits are what is promised
        texts_are_plain_decodings(target)


@pytest.mark.parametrize("name", [*CROSSING, "qwen3_5_text"])
def test_every_block_of_a_text_is_rotated_as_in_one_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the length of the whole text where frequencies depend on it, and in three dimensions."""
    monkeypatch.setattr(batch_invariant_model, "ROPE_BLOCK", 8)
    model, ids = (fresh if name in CROSSING else hybrid)(name), np.arange(3, 43)
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        decoder = CausalLM(model)
        BatchInvariantModel(decoder).use(decoder)
        batch = ForwardBatch.chains([ids], np.zeros(1, np.int64), decoder.device)
        assert worst(decoder.forward(batch, decoder.new_cache(1, 40)).logits, wanted) < NOISE


def path(parents: Ints, node: int) -> list[int]:
    """The nodes from the root's child to a node."""
    return [*(path(parents, int(parents[node])) if parents[node] >= 0 else []), node]


def texts_are_plain_decodings(target: Target) -> None:
    """Of a batch of rows, drafted by what its own texts bring."""
    costs = Costs({1: 0.1}, {1: 1.0, 64: 1.5})
    oracle = Engine(
        target, build("drafter", "suffix").open(target), build("policy", "yield"), costs=costs
    )
    prompts = [np.random.default_rng(i).integers(3, 70, 9 + i).tolist() for i in range(3)]
    requests = [Request(p, 16, frozenset(), i) for i, p in enumerate(prompts)]
    plain = [oracle.plain([r]).tokens[0] for r in requests]
    assert oracle.write(requests).tokens == plain
    assert (
        oracle.write(requests, reuse=False).tokens == plain
    )  # what it has learnt drafts long trees now


def test_where_bits_part_is_named() -> None:
    model = fresh("llama").to(torch.bfloat16)
    decoder = CausalLM(model)
    BatchInvariantModel(decoder).use(decoder)

    def odd(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out * (1 + (out.shape[1] > 7) / 64)

    layer = decoder.layers[2]
    assert isinstance(layer, nn.Module)
    hook = layer.mlp.register_forward_hook(odd)  # type: ignore[union-attr, operator]
    assert first_variant_layer(decoder) == "from layer 2 on (LlamaDecoderLayer)"
    hook.remove()
    assert first_variant_layer(decoder) is None


def test_experts_say_what_they_said() -> None:
    for name in ("mixtral-sliding", "gpt_oss"):
        model, ids = fresh(name, layers=2), torch.arange(3, 40)[None]
        with torch.no_grad():
            said = model(ids).logits
            decoder = CausalLM(model)
            BatchInvariantModel(decoder).use(decoder)
            assert torch.equal(model(ids).logits, said)
            assert (decoder.hf.model(ids).logits - said).abs().max() < 1e-5


def test_a_router_that_chooses_otherwise_in_company_is_found() -> None:
    model = fresh("qwen3_moe").float()
    decoder = CausalLM(model)
    first = decoder.layers[0].mlp.gate  # type: ignore[union-attr]

    def flipping(stock: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def flips(rows: Tensor) -> tuple[Tensor, ...]:
            logits, scores, chosen = stock(rows)
            return logits, scores, (chosen + (len(rows) >= 24)) % 4

        return flips

    first.forward = flipping(first.forward)
    stable = BatchInvariantModel(decoder)
    assert stable.widths["Qwen3MoeTopKRouter 32 (4, 32)"] == Widths(32, 16, 8192)
    stable.use(decoder)
    assert first_variant_layer(decoder) is None
    third = decoder.layers[2].mlp.gate  # type: ignore[union-attr]
    third.forward = flipping(third.forward)  # after what was evened out
    assert first_variant_layer(decoder) == "from layer 2 on (Qwen3MoeDecoderLayer)"


def test_models_that_cannot_be_invariant_are_refused_by_name() -> None:
    class Odd(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + torch.arange(rows.shape[-2])[:, None]

    model = fresh("llama").to(torch.bfloat16)
    model.lm_head = Odd(32, 71).to(torch.bfloat16)
    with pytest.raises(
        UserError,
        match=r"^exactness is 'bits', but target 'x' .* in its Odd 32 \(71, 32\) \(71,\): allowed",
    ):
        resolve_exactness(CausalLM(model), "x", "bits")


def test_a_target_is_loaded_so(tmp_path: Path) -> None:
    target_folder(tmp_path)
    target = Target.load(str(tmp_path), dtype="bfloat16", exactness="bits")
    assert target.decoder.config._attn_implementation == EXACT
    assert provenance(target, 0)["target"]["loading"] == {"exactness": "bits"}
    assert first_variant_layer(target.decoder) is None
    ids = torch.arange(3, 12)[None]
    stock: Any = target.decoder.hf.model.generate(ids, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    engine = Engine(target, build("drafter", "suffix").open(target), build("policy", "trie"))
    request = Request(ids[0].tolist(), 12, target.eos)
    for _ in range(2):
        assert engine.write([request]).tokens[0] == stock[0, 9:].tolist()
    with pytest.raises(
        UserError,
        match=r"exactness is 'bits' and attn_implementation 'sdpa', allowed with it is draftree",
    ):
        Target.load(str(tmp_path), exactness="bits", attn_implementation="sdpa")
