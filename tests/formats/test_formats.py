"""Published layouts are recognised, drafted with, written back bit for bit, and exported to one another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from architectures import VOCAB, fresh, target
from checkpoint_layouts import (
    BIASES,
    EMBED,
    LAYOUTS,
    LLAMA,
    VERIFIER,
    D,
    Tensors,
    nested,
    spoken,
    stored,
    there,
)
from draftree import registry
from draftree.cli.arguments import quiet
from draftree.doctor import forward_parity
from draftree.drafters.eagle import EAGLE
from draftree.drafters.eagle3 import EAGLE3
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.vct import VCT
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target import target_names
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.training import export as export_module
from draftree.training.export import CONVERTERS, export
from folders import target_folder
from forests import texts
from selection import one_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    quiet()
    return target_folder(tmp_path / "target")


def read(folder: Path) -> Tensors:
    file = next(f for f in folder.iterdir() if f.suffix in (".bin", ".safetensors"))
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same(ours: Tensors, theirs: Tensors) -> bool:
    """Names, dtypes and bits."""
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in theirs
    )


def drafts(t: Target, folder: Path) -> Tensor:
    """What a checkpoint drafts along two texts."""
    return forward_parity.draft_log_probs(
        t,
        build("drafter", str(folder)).open(t),
        np.stack(texts([13, 13], np.random.default_rng(1))),
        4,
        1,
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_drafted_with_and_written_back(name: str, tmp_path: Path) -> None:
    t = target("llama")
    folder, method, tensors = there(name, tmp_path / "there")
    drafter = build("drafter", str(folder)).open(t)
    assert build("drafter", str(folder)) == {"eagle": EAGLE, "eagle3": EAGLE3}[method](
        checkpoint=str(folder)
    )
    requests = [Request([5, 6, 7], 7), Request([9, 4, 8, 11, 3], 5, number=1)]
    engine, sampling = Engine(t, drafter, VCT(2, 3), costs=COSTS), Sampling(0.9, seed=2)
    assert engine.write(requests, sampling).tokens == engine.plain(requests, sampling).tokens
    drafter.save(tmp_path / "copy")
    assert same(read(tmp_path / "copy"), tensors)
    config = config_of(tmp_path / "copy")
    assert config.pop("draftree")["drafter"] == method
    assert config == config_of(folder)
    assert torch.equal(drafts(t, tmp_path / "copy"), drafts(t, folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_original_layout_of_any(name: str, tmp_path: Path) -> None:
    t = target("llama")
    folder, method, tensors = there(name, tmp_path / "there")
    done = export(str(folder), "eagle", tmp_path / "out")
    assert (done.drafter, done.tensors) == (method, len(tensors))
    written = load_file(tmp_path / "out" / "model.safetensors")
    config = config_of(tmp_path / "out")
    if name.startswith("speculators"):
        assert same(spoken(written, method), tensors)
        assert config["architectures"] == [
            {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}[method]
        ]
    else:
        assert same(written, tensors)
        assert {
            k: v for k, v in config_of(folder).items() if k != "rope_scaling"
        }.items() <= config.items()
    assert config["bias" if method == "eagle" else "draft_vocab_size"] == (
        any("bias" in k for k in tensors if "fc" in k)
        if method == "eagle"
        else len(tensors["lm_head.weight"])
    )
    assert "draftree" not in config
    assert (config["rope_theta"], config["model_type"]) == (
        500.0,
        LAYOUTS[name][1].get("model_type", "llama"),
    )
    assert torch.equal(drafts(t, tmp_path / "out"), drafts(t, folder))


@pytest.mark.parametrize("name", one_in(2, [n for n in LAYOUTS if n != "eagle, qwen2"]))
def test_the_layout_of_speculators_of_any(name: str, tmp_path: Path) -> None:
    t = target("llama")
    t.decoder.model.config.save_pretrained(tmp_path / "target")
    folder, method, tensors = there(name, tmp_path / "there")
    known = name.startswith("speculators")
    export(
        str(folder), "speculators", tmp_path / "out", None if known else str(tmp_path / "target")
    )
    config = config_of(tmp_path / "out")
    assert config["speculators_model_type"] == method
    named = (
        VERIFIER
        if known
        else {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    )
    assert config["speculators_config"] == nested(method)["speculators_config"] | {
        "verifier": named
    }
    inner = config["transformer_layer_config"]
    assert {k: v for k, v in LLAMA.items() if k != "hidden_size"}.items() <= inner.items()
    assert (
        not {"bias", "draft_vocab_size", "target_hidden_size", "architectures", "draftree"}
        & inner.keys()
    )
    if method == "eagle":
        assert config["fusion_bias"] is ("fusion_fc.bias" in tensors or "fc.bias" in tensors)
        assert config["layernorms"] is False
    else:
        assert config["draft_vocab_size"] == len(tensors["lm_head.weight"])
        assert config["norm_before_residual"] is LAYOUTS[name][1].get("norm_before_residual", False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {k: v for k, v in tensors.items() if not (method == "eagle" and k in EMBED)}
    assert same(written, tensors if known else spoken(wanted, method))
    if len(wanted) == len(tensors):
        assert torch.equal(drafts(t, tmp_path / "out"), drafts(t, folder))
    export(str(tmp_path / "out"), "eagle", tmp_path / "back")
    export(str(folder), "eagle", tmp_path / "direct")
    direct = load_file(tmp_path / "direct" / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert same(back, {k: v for k, v in direct.items() if method == "eagle3" or k not in EMBED})


@pytest.mark.parametrize(
    "name", ["eagle, official", "eagle3, reduced", "speculators eagle3", "eagle, qwen2"]
)
def test_each_tensor_keeps_its_dtype(name: str, tmp_path: Path) -> None:
    """As some files mix half precisions, and drafters compute in their target's dtype."""
    model = fresh("llama").float()
    t, (_, config, tensors, file) = Target(CausalLM(model), "single"), LAYOUTS[name]
    halves = (torch.float16, torch.bfloat16, torch.float32)
    mixed = {
        k: v.to(halves[i % 3]) if v.is_floating_point() else v
        for i, (k, v) in enumerate(tensors.items())
    }
    stored(tmp_path / "there", config, mixed, file)
    drafter = build("drafter", str(tmp_path / "there")).open(t)
    assert {p.dtype for p in drafter.model.parameters()} == {torch.float32}
    drafter.save(tmp_path / "copy")
    assert same(read(tmp_path / "copy"), mixed)
    export(str(tmp_path / "there"), "eagle", tmp_path / "out")
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        v.dtype for v in mixed.values()
    }


def test_biases_of_queries_keys_and_values_are_used(tmp_path: Path) -> None:
    """As transformers' Llama with a bias everywhere, the output's being zero."""
    t, (_, config, tensors, _) = target("llama"), LAYOUTS["eagle, qwen2"]
    ours = drafts(t, stored(tmp_path / "a", config, tensors))
    everywhere = {k: v for k, v in config.items() if k != "qkv_bias"} | {"attention_bias": True}
    whole = tensors | {"layers.0.self_attn.o_proj.bias": torch.zeros(D, dtype=torch.float16)}
    assert torch.equal(ours, drafts(t, stored(tmp_path / "b", everywhere, whole)))
    for name in BIASES:
        other = drafts(t, stored(tmp_path / name, config, tensors | {name: -tensors[name]}))
        assert (other.exp() - ours.exp()).abs().max() > 1e-4


def test_the_residual_behind_the_norm_is_another_network(tmp_path: Path) -> None:
    _, config, tensors, _ = LAYOUTS["speculators eagle3"]
    t, folder = target("llama"), stored(tmp_path / "a", config, tensors)
    other = stored(tmp_path / "b", {**config, "norm_before_residual": False}, tensors)
    assert (drafts(t, folder).exp() - drafts(t, other).exp()).abs().max() > 1e-3


def test_layers_are_those_of_the_config(tmp_path: Path) -> None:
    folder, *_ = there("speculators eagle3, embedding", tmp_path / "there")
    assert build("drafter", str(folder)).open(target("llama")).needs.hidden == (1, 2, 3)


def changed(
    name: str, change: Callable[[dict[str, Any], Tensors], object]
) -> tuple[str, dict[str, Any], Tensors]:
    method, config, tensors, _ = LAYOUTS[name]
    config, tensors = json.loads(json.dumps(config)), dict(tensors)
    change(config, tensors)
    return method, config, tensors


def flag(**values: Any) -> Callable[[dict[str, Any], Tensors], object]:
    return lambda c, t: c.update(values)


EAGLE_1 = "eagle, official"
EAGLE_3 = "eagle3, reduced"
SPEC_1 = "speculators eagle"
SPEC_3 = "speculators eagle3"
Q3 = "layers.0.self_attn.q_proj.weight"
WRONG = {
    "missing": (changed(EAGLE_1, lambda c, t: t.pop("fc.bias")), r"missing tensors: fc\.bias"),
    "foreign": (changed(EAGLE_1, lambda c, t: t.update(x=torch.ones(1))), "foreign tensors: x"),
    "mis-shaped": (changed(EAGLE_1, flag(intermediate_size=40)), r"mlp\.down_proj\.weight \[32, 48\] \(allowed \[32, 40\]\)"),
    "width": (changed(EAGLE_1, flag(hidden_size=16)), "hidden_size 16, allowed is the target's: 32"),
    "vocabulary": (changed(SPEC_1, lambda c, t: c["transformer_layer_config"].update(vocab_size=70)), "vocab_size 70"),
    "no layer config": (changed(SPEC_1, flag(transformer_layer_config=None)), "transformer_layer_config of 'None'"),
    "another layer": (
        changed(SPEC_3, lambda c, t: c["transformer_layer_config"].update(model_type="qwen3")), "'qwen3', allowed is 'llama'"),
    "another kind": (changed(SPEC_1, flag(speculators_model_type="mlp")), "'mlp', allowed is 'eagle'"),
    "norms": (changed(SPEC_1, flag(layernorms=True)), "layernorms true, allowed is false"),
    "norms, original": (changed(EAGLE_1, flag(layernorms=True)), "layernorms true, allowed is false"),
    "norm before fc": (changed(SPEC_3, flag(norm_before_fc=True)), "norm_before_fc true, allowed is false"),
    "fc norm": (changed(SPEC_3, flag(fc_norm=True)), "fc_norm true, allowed is false"),
    "norm of the output": (changed(EAGLE_3, flag(norm_output=True)), "norm_output true, allowed is false"),
    "a later flag": (changed(SPEC_3, flag(something_new=True)), "something_new true, allowed is false"),
    "missing here": (changed(SPEC_1, lambda c, t: t.pop("fusion_fc.bias")), r"missing tensors: fusion_fc\.bias"),
    "foreign here": (changed(SPEC_3, lambda c, t: t.update({"verifier": torch.ones(D)})), "foreign tensors: verifier"),
    "mis-shaped here": (
        changed(SPEC_3, lambda c, t: t.update({Q3: torch.ones(D, D)})), r"layers\.0\.self_attn\.q_proj\.weight \[32, 32\]"),
    "rope": (changed(EAGLE_1, flag(rope_scaling={"type": "su", "factor": 2.0})), "unknown rope type in the drafter's config"),
    "activation": (changed(EAGLE_3, flag(hidden_act="silo")), "unknown hidden_act in the drafter's config.json 'silo'.*'silu'"),
    "no map": (changed(EAGLE_3, lambda c, t: t.pop("d2t")), "missing tensors: d2t"),
    "map beyond": (changed(EAGLE_3, lambda c, t: t.update(d2t=t["d2t"] + VOCAB)), "by its d2t, allowed are 0 … 70"),
    "no embedding": (
        changed("eagle3, own width", lambda c, t: t.pop("embed_tokens.weight")), r"missing tensors: embed_tokens\.weight"),
    "four layers": (changed(SPEC_3, flag(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4])), r"\[1, 2, 3, 4\], allowed are three"),
    "a layer beyond": (changed(SPEC_3, flag(eagle_aux_hidden_state_layer_ids=[1, 2, 9])), "hidden state 9 does not"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_unfitting_checkpoints_are_refused_in_a_line(case: str, tmp_path: Path) -> None:
    (method, config, tensors), told = WRONG[case]
    stored(tmp_path, config, tensors)
    with pytest.raises(UserError, match=told) as raised:
        build("drafter", f"{method}:checkpoint={tmp_path}").open(target("llama"))
    assert "\n" not in str(raised.value)


class Evil:
    """Would run a command where it is unpickled."""

    ran: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.ran,)


@pytest.mark.parametrize("method", [EAGLE, EAGLE3])
def test_a_pickle_of_anything_else_is_refused(method: type[EAGLE | EAGLE3], tmp_path: Path) -> None:
    Evil.ran = tmp_path / "ran"
    stored(tmp_path, LLAMA, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin") as raised:
        method(checkpoint=str(tmp_path)).open(target("llama"))
    assert "\n" not in str(raised.value)
    assert not Evil.ran.exists()


# Export: what it takes and refuses.


def ours(name: str, folder: Path, to: Path) -> Target:
    """Saves a fresh drafter of a target on disk."""
    quiet()
    t = Target.load(str(folder), torch.float32)
    torch.manual_seed(0)
    build("drafter", name).fresh(t).save(to)
    return t


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [("eagle", "eagle"), ("eagle", "speculators"), ("eagle3:draft_vocab=100", "eagle"), ("eagle3", "speculators"),
     ("medusa:heads=2", "vllm-medusa")],
)  # fmt: skip
def test_a_drafter_of_ours_is_exported_and_read_again(
    draftree, folder: Path, tmp_path: Path, spec: str, wanted: str
) -> None:
    t = ours(spec, folder, tmp_path / "drafter")
    out = tmp_path / "new" / "out"
    status, said, err = draftree(
        "export", tmp_path / "drafter", "--format", wanted, "--out", out, "--json"
    )
    assert (status, err) == (0, "")
    found = json.loads(said)
    tensors = load_file(out / "model.safetensors")
    config = config_of(out)
    size = sum(v.numel() * v.element_size() for v in tensors.values())
    name = spec.partition(":")[0]
    assert found == {
        "drafter": name,
        "format": wanted,
        "out": str(out),
        "tensors": len(tensors),
        "bytes": size,
    }
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors"}
    assert {p.name for p in out.parent.iterdir()} == {"out"}
    assert "draftree" not in config
    if wanted == "speculators":
        verifier = {"name_or_path": str(folder), "architectures": ["LlamaForCausalLM"]}
        assert config["speculators_config"]["verifier"] == verifier
    assert torch.equal(drafts(t, out), drafts(t, tmp_path / "drafter"))
    status, said, _ = draftree("generate", "abc", "--target", folder, "--drafter", out, "--policy", "chain", "--baseline",
                               "--max-new-tokens", "8", "--json")  # fmt: skip
    assert json.loads(said)["baseline"]["same_output"] is True


def test_export_is_reported_in_a_line(draftree, tmp_path: Path) -> None:
    path, *_ = there(EAGLE_1, tmp_path / "there")
    (tmp_path / "out").mkdir()
    status, said, err = draftree("export", path, "--format", "eagle", "--out", tmp_path / "out")
    assert (status, err, said.count("\n")) == (0, "", 1)
    assert f"{tmp_path / 'out'}: 'eagle' as eagle, 11 tensors" in said


def test_a_shipped_drafter_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    ours("eagle", folder, tmp_path / "eagle")
    (tmp_path / "eagle" / "config.json").write_text(
        (tmp_path / "eagle" / "config.json").read_text().replace(json.dumps(str(folder)), '"demo"')
    )
    monkeypatch.setattr(target_names, "demo_folder", lambda name="target": tmp_path / name)
    monkeypatch.setattr(
        export_module,
        "shipped_folder",
        lambda _, name: tmp_path / name if name == "eagle" else None,
    )
    export("eagle", "speculators", tmp_path / "out")
    verifier = config_of(tmp_path / "out")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "demo", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(
        UserError,
        match=r"unknown drafter's folder or shipped drafter 'eagl': .*did you mean 'eagle'",
    ):
        export("eagl", "speculators", tmp_path / "more")


def test_scaled_rope_is_written_for_every_reader(tmp_path: Path) -> None:
    t = target("llama-linear-rope")
    EAGLE().fresh(t).save(tmp_path / "there")
    export(str(tmp_path / "there"), "eagle", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert (config["rope_theta"], "rope_parameters" in config) == (10000.0, False)
    assert torch.equal(drafts(t, tmp_path / "out"), drafts(t, tmp_path / "there"))


MISTAKES = {
    "two ways": (("there", "--out", "new", "--format", "eagle", "--standalone"), "--format eagle and --standalone were given"),
    "unknown format": (("there", "--out", "new", "--format", "spekulators"), "did you mean 'speculators'"),
    "not this drafter": (("there", "--out", "new", "--format", "vllm-medusa"), "allowed is speculators or eagle or vllm-eagle"),
    "no format at all": (("pld", "--out", "new", "--format", "eagle"), "unknown drafter's folder"),
    "another method": (("edd", "--out", "new", "--format", "eagle"), "what can be exported: speculators: "),
    "no drafter": (("target", "--out", "new", "--format", "eagle"), "not a drafter's folder"),
    "out is full": (("there", "--out", "target", "--format", "eagle"), "--force overwrites it"),
    "out is a file": (("there", "--out", "file", "--format", "eagle"), "is a file"),
    "no target": (("there", "--out", "new", "--format", "speculators", "--target", "./nowhere"), "nowhere"),
    "no decoder": (("there", "--out", "new", "--format", "speculators", "--target", "t5"), "not a causal language model"),
    "another target": (("there", "--out", "new", "--format", "speculators"), "name the drafter's own with --target"),
    "broken": (("broken", "--out", "new", "--format", "eagle"), "missing tensors: fc.bias"),
    "queries' biases": (("qwen2", "--out", "new", "--format", "speculators", "--target", "llama"), "qkv_bias true"),
    "legacy heads": (("legacy", "--out", "new", "--format", "vllm-medusa"), "lacks 0.1.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(
    draftree, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    args, told = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    there(EAGLE_1, tmp_path / "there")
    there("eagle, qwen2", tmp_path / "qwen2")
    _, config, tensors = changed(EAGLE_1, lambda c, t: t.pop("fc.bias"))
    stored(tmp_path / "broken", config, tensors)
    stored(
        tmp_path / "legacy",
        {},
        {"0.0.linear.weight": torch.ones(D, D), "0.0.linear.bias": torch.ones(D)},
    )
    target("llama").decoder.model.config.save_pretrained(tmp_path / "llama")
    stored(tmp_path / "t5", {"model_type": "t5", "vocab_size": VOCAB, "d_model": D}, {})
    (tmp_path / "file").touch()
    before = sorted(map(str, tmp_path.rglob("*")))
    status, out, err = draftree("export", *args)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path, *_ = there(EAGLE_1, tmp_path / "there")
    monkeypatch.setattr(export_module, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        export(str(path), "eagle", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"there"}


def test_vllm_heads_come_back_as_they_were(tmp_path: Path, folder: Path) -> None:
    ours("medusa:heads=3", folder, tmp_path / "ours")
    export(str(tmp_path / "ours"), "vllm-medusa", tmp_path / "one")
    export(str(tmp_path / "one"), "vllm-medusa", tmp_path / "two")
    assert same(
        load_file(tmp_path / "one" / "model.safetensors"),
        load_file(tmp_path / "two" / "model.safetensors"),
    )
    assert config_of(tmp_path / "one") == config_of(tmp_path / "two")
    theirs = load_file(tmp_path / "ours" / "medusa_lm_head.safetensors")
    assert torch.equal(
        load_file(tmp_path / "one" / "model.safetensors")["lm_heads.2.weight"], theirs["2.1.weight"]
    )


@pytest.mark.parametrize("embedding", [False, True])
def test_the_bias_of_the_fusing_layer_goes_into_an_embedding_for_vllm(
    tmp_path: Path, folder: Path, embedding: bool
) -> None:
    """The only `bias` that vLLM knows is attention's, and it leaves out `fc.bias` without a word."""
    t = ours("eagle", folder, tmp_path / "zero")
    path, config = tmp_path / "zero" / "model.safetensors", config_of(tmp_path / "zero")
    torch.manual_seed(1)
    moved = {name: tensor.float() for name, tensor in load_file(path).items()}
    moved["fc.bias"] = torch.randn(D)
    moved["fc.weight"][:, :D] = 2 * torch.linalg.qr(torch.randn(D, D)).Q  # well conditioned
    if embedding:
        moved |= {"embed_tokens.weight": torch.randn(t.decoder.vocab, D)}
    stored(tmp_path / "ours", config, moved)
    stored(tmp_path / "zero", config, moved | {"fc.bias": torch.zeros(D)})
    export(str(tmp_path / "ours"), "vllm-eagle", tmp_path / "out", str(folder))
    tensors, config = load_file(tmp_path / "out" / "model.safetensors"), config_of(tmp_path / "out")
    assert "fc.bias" not in tensors
    assert config["bias"] is False
    left, right = drafts(t, tmp_path / "out"), drafts(t, tmp_path / "ours")
    # Of a float32 embedding each number is rounded once more.
    assert torch.allclose(left, right, rtol=0, atol=2**-18 * float(right.abs().max()))
    assert not torch.allclose(right, drafts(t, tmp_path / "zero"), atol=1e-2), "the bias counts"


def test_the_formats() -> None:
    declared = {
        name: getattr(registry.part("drafter", name), "formats", ())
        for name in registry.names("drafter")
    }
    assert {
        format: [name for name, known in declared.items() if format in known]
        for format in CONVERTERS
    } == {
        "speculators": ["dflash", "dspark", "eagle", "eagle3", "jetspec", "peagle"],
        "eagle": ["eagle", "eagle3"],
        "vllm-eagle": ["eagle"],
        "vllm-medusa": ["medusa"],
    }
