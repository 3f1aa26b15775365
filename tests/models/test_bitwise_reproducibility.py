"""Bits are promised where they are asked for or cost next to nothing, looked into once, and kept out of a user's own passes."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import draftree
from architectures import fresh
from draftree import Request, Sampling, Target, UserError
from draftree.doctor import determinism
from draftree.doctor.determinism import describe_layer
from draftree.engine import Engine
from draftree.evaluation.compare import bits
from draftree.models import batch_invariant_model
from draftree.models.batch_invariant_model import BatchInvariantModel
from draftree.models.causal_lm import CausalLM
from draftree.models.invariant_attention import EXACT
from draftree.models.invariant_widths import Widths
from draftree.registry import build
from draftree.target import batch_invariance_choice, kernel_choice
from draftree.target import target as target_module
from draftree.target.batch_invariance_choice import price, probe_batch_invariance, resolve_exactness
from draftree.utils.files import cache_folder
from folders import target_folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is found out stays inside the test."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> str:
    target_folder(tmp_path)
    return str(tmp_path)


def costing(share: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Plants a price; what is returned grows when it is asked for."""
    asked = list[float]()
    monkeypatch.setattr(batch_invariance_choice, "price", lambda *_: asked.append(share) or share)
    return asked


@pytest.mark.parametrize(("share", "dtype", "wanted"), [
    (0.01, "bfloat16", "bits"), (0.006, "bfloat16", "bits"), (0.03, "bfloat16", "ties"), (0.01, "float16", "bits"),
    (0.01, "float32", None),
])  # fmt: skip
def test_by_default_the_price_decides_in_half_precision(
    share: float,
    dtype: str,
    wanted: str | None,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = costing(share, monkeypatch)
    with caplog.at_level(logging.INFO, "draftree"):
        target = Target.load(folder, dtype=dtype)
    assert target.loading.exactness == wanted
    assert (target.decoder.config._attn_implementation == EXACT) == (wanted == "bits")
    assert all(
        f"exactness is '{wanted}'" in m and f"{100 * share:.1f} %" in m for m in caplog.messages
    )
    assert len(caplog.messages) == (len(asked) if share >= 0.01 else 0)  # less is not worth a line
    assert len(asked) == (dtype != "float32")
    assert Target.load(folder, dtype=dtype).loading.exactness == wanted
    assert len(asked) == (dtype != "float32")  # it is not measured again
    assert Target.load(folder, dtype=dtype, exactness="ties").loading.exactness == "ties"
    assert Target.load(folder, dtype=dtype, attn_implementation="eager").loading.exactness is None


def test_a_checkpoint_in_bfloat16_is_computed_so_where_that_is_fast(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(**how: Any) -> tuple[torch.dtype, str | None]:
        target = Target.load(folder, **how)
        return target.decoder.dtype, target.loading.exactness

    fresh("llama").to(torch.bfloat16).save_pretrained(folder)
    for fast, wanted in ((False, (torch.float32, None)), (True, (torch.bfloat16, "bits"))):
        monkeypatch.setattr(
            target_module, "computes_bfloat16_fast", lambda native=True, fast=fast: fast
        )
        assert load() == wanted
    assert load(exactness="bits") == (torch.bfloat16, "bits")
    assert load(exactness="ties") == (torch.float32, "ties")
    assert load(attn_implementation="eager") == (torch.float32, None)
    assert load(dtype="float32") == (torch.float32, None)
    assert load(adapter=None) == (torch.bfloat16, "bits")
    monkeypatch.setattr(
        batch_invariance_choice,
        "probe_batch_invariance",
        lambda *_, **__: (None, batch_invariance_choice.Findings({"Odd": None}, None)),
    )
    assert load() == (torch.float32, None)  # bits cannot be kept
    with pytest.raises(UserError, match="other bits in company, in its Odd"):
        load(exactness="bits")


@pytest.mark.parametrize(
    ("able", "name", "native", "wanted"),
    [
        (True, "off", False, torch.bfloat16),
        (True, "generic", False, torch.bfloat16),
        (False, "avx2", True, torch.bfloat16),
        (False, "avx512", True, torch.bfloat16),
        (False, "avx2", False, torch.float32),
        (False, "generic", True, torch.float32),
        (False, "off", True, torch.float32),
    ],
)
def test_bfloat16_needs_native_kernels_or_instructions(
    able: bool,
    name: str,
    native: bool,
    wanted: torch.dtype,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh("llama").to(torch.bfloat16).save_pretrained(folder)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able})
    monkeypatch.setattr(kernel_choice, "variant", lambda: name)
    monkeypatch.setattr(target_module, "choose_kernels", lambda *_: native)
    target = Target.load(folder)
    assert target.decoder.dtype is wanted
    assert (target.loading.exactness == "bits") == (wanted is torch.bfloat16)


def test_probed_widths_are_cached_and_a_broken_cache_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = CausalLM(fresh("llama").to(torch.bfloat16))
    _, first = probe_batch_invariance(decoder)
    (file,) = (cache_folder() / "exactness").iterdir()
    assert json.loads(file.read_text())["price"] is None
    with monkeypatch.context() as within:
        within.setattr(batch_invariant_model, "widths", lambda *_: pytest.fail("it is known"))
        stable, again = probe_batch_invariance(decoder)
    assert (again, stable.widths) == (first, first.kinds)
    for broken in ("{", '{"kinds": {"a": {"most": "x"}}, "parting": null}'):
        file.write_text(broken)
        assert probe_batch_invariance(decoder)[1] == first
    costing(0.5, monkeypatch)
    assert (
        probe_batch_invariance(decoder, priced=True)[1].price
        == probe_batch_invariance(decoder, priced=True)[1].price
        == 0.5
    )


def test_a_price_is_measured_and_leaves_the_model_as_it_was() -> None:
    decoder = CausalLM(fresh("llama").to(torch.bfloat16))
    before = {name: vars(module).get("forward") for name, module in decoder.model.named_modules()}
    stable = BatchInvariantModel(decoder)
    assert -0.9 < price(decoder, stable, context=16, longest=0.05) < 9
    assert {
        name: vars(module).get("forward") for name, module in decoder.model.named_modules()
    } == before
    assert decoder.config._attn_implementation != EXACT


def test_a_model_that_was_loaded_before_computes_as_before_outside() -> None:
    model: Any = fresh("llama").to(torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        said = model(ids).logits
    engine = draftree.load(
        model, "suffix", "yield", costs=draftree.Costs({1: 1.0}, {1: 1.0}), exactness="bits"
    )
    assert engine.target.loading.exactness == "bits"
    request = Request(list(range(3, 30)), 24, frozenset())
    written = [engine.write([request]).tokens[0] for _ in range(2)]
    assert written == [engine.plain([request]).tokens[0]] * 2
    assert bits(engine, request)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, said)
    assert model.config._attn_implementation != EXACT
    hook = draftree.speculate("suffix", "trie", exactness="bits")
    mine = model.generate(
        ids[:, :27], max_new_tokens=24, do_sample=False, eos_token_id=None, custom_generate=hook
    )
    assert mine[0, 27:].tolist() == written[0]
    with pytest.raises(UserError, match="exactness is 'bit', allowed is none or bits or ties"):
        draftree.speculate("suffix", exactness="bit")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="exactness is 'bit', allowed is none or bits or ties"):
        draftree.load(model, "suffix", exactness="bit")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        pytest.param("llama", torch.float32, marks=pytest.mark.long),
        ("mixtral-sliding", torch.bfloat16),
    ],
)
def test_sampled_texts_are_plain_samplings_in_any_company_and_behind_any_cache(
    name: str, dtype: torch.dtype
) -> None:
    target = Target.of(fresh(name, layers=2).to(dtype), exactness="bits")
    prompts = [np.random.default_rng(i).integers(3, 70, 7 + 3 * i).tolist() for i in range(5)]
    processors = (RepetitionPenaltyLogitsProcessor(1.3),)
    requests = [
        Request(
            ids,
            12,
            frozenset(),
            i,
            processors=processors * (i % 2),
            sampling=Sampling(temperature=0.5 + i / 4, seed=i),
        )
        for i, ids in enumerate(prompts)
    ]
    engine = Engine(
        target,
        build("drafter", "suffix").open(target),
        build("policy", "pct"),
        costs=draftree.Costs({1: 0.1}, {1: 1.0}),
    )
    alone = [engine.plain([request]).tokens[0] for request in requests]
    for _ in range(2):
        assert engine.write(requests).tokens == alone
    turns = [
        replace(r, prompt=[*r.prompt, *text[:7]]) for r, text in zip(requests, alone, strict=True)
    ]
    fresh_ones = [engine.plain([turn]).tokens[0] for turn in turns]
    assert engine.write(turns).tokens == fresh_ones  # their beginnings lie in the cache
    assert engine.write(turns, reuse=False).tokens == fresh_ones


def test_other_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.of(fresh("llama").to(torch.bfloat16), exactness="bits")
    engine = Engine(target, build("drafter", "suffix").open(target), build("policy", "trie"))
    request = Request(list(np.arange(3, 30)), 12, frozenset())
    assert bits(engine, request)
    stock = CausalLM.forward

    def off(decoder: CausalLM, batch: Any, *given: Any) -> Any:
        out = stock(decoder, batch, *given)
        return replace(out, logits=out.logits * (1 + (batch.width > 1) / 128))

    engine.write([request])  # what it remembers is drafted now
    monkeypatch.setattr(CausalLM, "forward", off)
    assert not bits(engine, request)


def test_models_without_reproducible_bits_stay_unless_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        batch_invariance_choice, "first_variant_layer", lambda *_: "from layer 1 on (X)"
    )
    decoder = CausalLM(fresh("llama").to(torch.bfloat16))
    with caplog.at_level(logging.INFO, "draftree"):
        assert resolve_exactness(decoder, "x", None) == (None, "ties")
    assert caplog.messages == [
        "exactness is 'ties': a token's bits depend on the rest of a pass, from layer 1 on (X)"
    ]
    with pytest.raises(
        UserError, match="target 'x' gives a token other bits in company, from layer 1 on"
    ):
        resolve_exactness(decoder, "x", "bits")


def test_the_doctor_says_what_keeps_bits(
    draftree: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(determinism, "MAX_LAYER_SECONDS", 0.001)
    monkeypatch.setattr(determinism, "price", lambda *_: 0.25)
    monkeypatch.setattr(
        determinism, "REPORTED_CONTEXTS", (16, 64, 256)
    )  # the last one is beyond the target's own
    costing(0.01, monkeypatch)
    command = ("doctor", "--exact", "--target", folder, "--dtype", "bfloat16")
    _, out, _ = draftree(*command, "--json")
    found = json.loads(out)
    decoder = CausalLM(fresh("llama"))
    assert (
        sum(layer["count"] for layer in found["layers"])
        == len([m for m in decoder.model.modules() if list(m.parameters(recurse=False))]) - 1
    )
    assert all(layer["more"] == 0 for layer in found["layers"] if layer["done"] == "nothing")
    assert (found["default"], found["parting"]) == ("bits", None)
    assert [p["share"] for p in found["prices"]] == [0.25] * 4
    _, out, _ = draftree(*command)
    assert "where nothing is asked for: --exactness bits" in out
    assert "Linear 32" in out
    code, _, err = draftree(*command, "--policy", "pct")
    assert (code, "--policy was given, allowed only without --exact" in err) == (2, True)


@pytest.mark.parametrize(("widths", "words"), [
    (None, ("at none that was tried", "nothing helps")),
    (Widths(), ("at all", "nothing")),
    (Widths(8), ("from 8 on", "padded to 8")),
    (Widths(1, 16, 16), ("in blocks of 16", "cut into blocks of 16")),
    (Widths(1, 2, 92), ("from 2 on, multiples of 2, up to 92", "padded to 2, cut at 92")),
])  # fmt: skip
def test_widths_in_words(widths: Widths | None, words: tuple[str, str]) -> None:
    assert describe_layer(widths) == words
