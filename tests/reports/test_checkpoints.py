"""Checkpoints of drafters: what is read of them, what is missing, and what is exported."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from architectures import target as architecture
from draftree import UserError
from draftree.doctor import forward_parity
from draftree.drafters.eagle3 import EAGLE3
from draftree.drafters.medusa import Medusa
from draftree.engine import Engine, generate_plain, load
from draftree.errors import DraftreeWarning, NotANumber
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import tiny_target
from draftree.training.export import export
from forests import texts
from reports import report

KIND = "Draft checkpoints and exports"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ROPES: Mapping[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def served() -> Target:
    """Return the target that the drafters are made for."""
    return architecture("llama")


def saved(spec: str, folder: Path, t: Target | None = None) -> Path:
    """Save a fresh drafter whose weights differ from one another."""
    t = t or served()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter: Any = build("drafter", spec).fresh(t)
        counts = np.zeros(t.decoder.vocab, np.int64)
        counts[7::2] = 5
        drafter.fit_vocabulary(counts)
        for parameter in drafter.model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    drafter.save(folder)
    return folder


def drafts(folder: Path, t: Target | None = None) -> Tensor:
    """Return what a checkpoint drafts along two texts."""
    t = t or served()
    text = np.stack(texts([13, 13], np.random.default_rng(1)))
    return forward_parity.draft_log_probs(t, build("drafter", str(folder)).open(t), text, 4, 1)


def config_of(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config."""
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return found


def changed(
    folder: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]
) -> Path:
    """Copy a checkpoint with changes to its config and tensors."""
    (file,) = folder.glob("*.safetensors")
    config, tensors = config_of(folder), load_file(file)
    change(config, tensors)
    out.mkdir()
    (out / CONFIG).write_text(json.dumps(config))
    save_file(tensors, out / file.name)
    return out


@report(
    "wejoncy/sfllm#32",
    KIND,
    "The base of the rope stood in a new place of the config, and the drafter fell back to the default.",
)
@pytest.mark.parametrize("kind", ["default", *ROPES])
def test_a_rope_is_read_from_either_place(kind: str, tmp_path: Path) -> None:
    export(str(saved("eagle3", tmp_path / "ours")), "eagle", tmp_path / "there")
    scaling = {"rope_type": kind, **ROPES.get(kind, {})}

    def old(config: dict[str, Any], _: Any) -> None:
        config |= {"rope_theta": 500.0, "rope_scaling": None if kind == "default" else scaling}
        config.pop("rope_parameters", None)

    def new(config: dict[str, Any], _: Any) -> None:
        config.pop("rope_theta")
        config.pop("rope_scaling", None)
        config["rope_parameters"] = {"rope_theta": 500.0, **scaling}

    ours = drafts(changed(tmp_path / "there", tmp_path / "old", old))
    assert torch.equal(ours, drafts(changed(tmp_path / "there", tmp_path / "new", new)))
    assert not torch.equal(ours, drafts(tmp_path / "there")), "another base drafts otherwise"


@report("vllm-project/speculators#574", KIND, "A conversion lost the scaling of the rope.")
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    ("name", "layout"), [("eagle3", "eagle"), ("eagle3", "speculators"), ("eagle", "eagle")]
)
def test_an_export_keeps_the_scaling_of_the_rope(
    kind: str, name: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    t = Target.load(str(folder), torch.float32)
    export(str(saved(name, tmp_path / "ours", t)), "eagle", tmp_path / "plain")

    def scaled(config: dict[str, Any], _: Any) -> None:
        config["rope_scaling"] = {"rope_type": kind, **ROPES[kind]}

    changed(tmp_path / "plain", tmp_path / "scaled", scaled)
    export(str(tmp_path / "scaled"), layout, tmp_path / "out", str(folder))
    assert torch.equal(drafts(tmp_path / "out", t), drafts(tmp_path / "scaled", t))
    assert not torch.equal(drafts(tmp_path / "out", t), drafts(tmp_path / "plain", t))


@report(
    "vllm-project/speculators#1065",
    KIND,
    "A newer checkpoint with further norms and layers was opened as the older network.",
)
@pytest.mark.parametrize(
    "extra", ["norm_output.weight", "midlayer.q_norm.weight", "fc_norm.weight"]
)
def test_tensors_that_the_network_has_not_are_named(extra: str, tmp_path: Path) -> None:
    there = saved("eagle3", tmp_path / "ours")
    changed(there, tmp_path / "newer", lambda _, tensors: tensors.update({extra: torch.ones(32)}))
    with pytest.raises(UserError, match=rf"foreign tensors: {extra}"):
        build("drafter", str(tmp_path / "newer")).open(served())


@report(
    "vllm-project/speculators#1114",
    KIND,
    "Weights that a checkpoint lacks were filled with random numbers, and written as converted.",
)
@report(
    "sgl-project/sglang#27908",
    KIND,
    "A draft head without weights kept its random ones, and no draft was accepted.",
)
@pytest.mark.parametrize("spec", ["eagle", "eagle3", "dflash:block=5", "mtp", "edd"])
def test_missing_weights_are_named_and_never_random(spec: str, tmp_path: Path) -> None:
    there = saved(spec, tmp_path / "ours")
    (file,) = there.glob("*.safetensors")
    for number, name in enumerate(list(load_file(file))[:: max(len(load_file(file)) // 4, 1)]):
        lacking = changed(
            there, tmp_path / str(number), lambda _, tensors, name=name: tensors.pop(name)
        )
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            build("drafter", str(lacking)).open(served())
    if spec == "eagle3":
        with pytest.raises(UserError, match="missing tensors"):
            export(
                str(changed(there, tmp_path / "x", lambda _, t: t.pop("lm_head.weight"))),
                "eagle",
                tmp_path / "out",
            )
        assert not (tmp_path / "out").exists()


@report(
    "ggml-org/llama.cpp#18039",
    KIND,
    "The map from a draft vocabulary to the target's may hold ids out of range, or one twice.",
)
def test_ids_of_a_draft_vocabulary_are_checked(tmp_path: Path) -> None:
    there = saved("eagle3:draft_vocab=20", tmp_path / "ours")
    for number, wrong in enumerate((10**6, -(10**6))):
        bad = changed(
            there,
            tmp_path / str(number),
            lambda _, tensors, wrong=wrong: tensors["d2t"].__setitem__(3, wrong),
        )
        with pytest.raises(UserError, match="d2t"):
            build("drafter", str(bad)).open(served())


@report(
    "NVIDIA-NeMo/Automodel#2447",
    KIND,
    "An exported drafter lacked the map of its draft vocabulary, and ids were taken for the first ones.",
)
@pytest.mark.parametrize("spec", ["eagle3:draft_vocab=20"])
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_an_export_holds_the_map_of_its_vocabulary(
    spec: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    t = Target.load(str(folder), torch.float32)
    there = saved(spec, tmp_path / "ours", t)
    export(str(there), layout, tmp_path / "out", str(folder))
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    ids = torch.arange(20) + tensors["d2t"]
    assert ids.tolist() == list(range(7, 47, 2))
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert config_of(tmp_path / "out")["draft_vocab_size"] == 20


@report(
    "verl-project/verl-SpeCo#66",
    KIND,
    "A smaller draft vocabulary without a map was taken for the first ids of the target.",
)
@pytest.mark.parametrize("lost", ["d2t", "t2d"])
def test_a_draft_vocabulary_without_its_map_is_refused(lost: str, tmp_path: Path) -> None:
    there = saved("eagle3:draft_vocab=20", tmp_path / "ours")

    def drop(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.pop("d2t")
        tensors.pop("t2d", None) if lost == "t2d" else None

    with pytest.raises(UserError, match="d2t"):
        build("drafter", str(changed(there, tmp_path / "lost", drop))).open(served())


@report(
    "lightseekorg/TorchSpec#38", KIND, "Exported checkpoints held an embedding of random numbers."
)
@pytest.mark.parametrize("spec", ["eagle", "eagle3", "dflash:block=5"])
def test_an_exported_embedding_is_the_targets_or_absent(
    spec: str, folder: Path, tmp_path: Path
) -> None:
    t = Target.load(str(folder), torch.float32)
    layout = "speculators" if spec.startswith("dflash") else "eagle"
    export(str(saved(spec, tmp_path / "ours", t)), layout, tmp_path / "out", str(folder))
    stored = load_file(tmp_path / "out" / WEIGHTS).get("embed_tokens.weight")
    assert (stored is not None) == spec.startswith("dflash")
    if stored is not None:
        true = t.decoder.model.get_input_embeddings().weight
        assert torch.equal(stored, true.to(stored.dtype))


@report(
    "vllm-project/vllm#28549",
    KIND,
    "An embedding and a head of the drafter's own were replaced by the target's.",
)
def test_an_embedding_of_the_drafters_own_is_used(tmp_path: Path) -> None:
    there = saved("eagle3", tmp_path / "ours")
    true = served().decoder.model.get_input_embeddings().weight.detach().float()

    def own(scale: float) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
        return lambda _, tensors: tensors.update({"embed_tokens.weight": scale * true})

    same, other = (changed(there, tmp_path / str(s), own(s)) for s in (1.0, -2.0))
    assert torch.allclose(drafts(same), drafts(there))
    assert not torch.allclose(drafts(other), drafts(there))


@report("vllm-project/vllm#17740", KIND, "A drafter of another width than the target failed.")
@report(
    "vllm-project/vllm#18906",
    KIND,
    "A drafter with an embedding of its own width could not be loaded.",
)
def test_a_drafter_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    there = saved("eagle3", tmp_path / "ours")
    narrow = 16

    def cut(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config |= {"hidden_size": narrow, "head_dim": 8, "target_hidden_size": 32}
        config.pop("draftree", None)
        for name, value in list(tensors.items()):
            rows = (
                narrow
                if name in ("fc.weight", "norm.weight")
                or name.endswith(("norm.weight", "o_proj.weight", "down_proj.weight"))
                else None
            )
            value = value[:rows] if rows else value
            if (
                value.dim() == 2
                and name != "fc.weight"
                and not name.endswith(("o_proj.weight", "down_proj.weight"))
            ):
                value = value[:, : value.shape[1] // 2]
            tensors[name] = value.contiguous()
        tensors["embed_tokens.weight"] = torch.randn(
            71, narrow, generator=torch.Generator().manual_seed(1)
        )

    export(str(there), "eagle", tmp_path / "there")
    found = changed(tmp_path / "there", tmp_path / "narrow", cut)
    engine = load(served(), str(found), "chain:length=4", costs=COSTS)
    request = Request([7, 5, 9, 7], 16)
    assert engine.write([request]).tokens == generate_plain(served(), [request]).tokens
    assert torch.isfinite(drafts(found).exp()).all()


@report(
    "vllm-project/vllm#12831",
    KIND,
    "Biases of a drafter's attention were dropped or mixed up when it was loaded.",
)
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_biases_of_a_drafters_attention_are_used(part: str, tmp_path: Path) -> None:
    t = architecture("qwen2")
    there = saved("eagle", tmp_path / "ours", t)
    (file,) = there.glob("*.safetensors")
    name = f"layers.0.self_attn.{part}_proj.bias"
    if name not in load_file(file):
        export(str(there), "eagle", tmp_path / "base")
        sizes = {p: load_file(file)[f"layers.0.self_attn.{p}_proj.weight"].shape[0] for p in "qkv"}

        def biased(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
            config |= {"model_type": "qwen2", "qkv_bias": True}
            tensors |= {
                f"layers.0.self_attn.{p}_proj.bias": torch.zeros(n) for p, n in sizes.items()
            }

        there = changed(tmp_path / "base", tmp_path / "biased", biased)
    moved = changed(
        there,
        tmp_path / "moved",
        lambda _, tensors: tensors[name].add_(torch.linspace(-2, 2, len(tensors[name]))),
    )
    assert not torch.allclose(drafts(moved, t), drafts(there, t))


@report(
    "SafeAILab/EAGLE#258", KIND, "A drafter of another target ran, and garbled words were written."
)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "edd", "medusa", "glide"])
def test_a_drafter_of_another_target_changes_no_text(name: str, tmp_path: Path) -> None:
    there = saved(name, tmp_path / "ours", tiny_target(seed=1))
    other = tiny_target(seed=2)
    with pytest.warns(DraftreeWarning):
        engine = load(other, str(there), "chain:length=3", costs=COSTS)
    request = Request([7, 5, 9, 7], 16)
    assert engine.write([request]).tokens == generate_plain(other, [request]).tokens


@report(
    "SafeAILab/EAGLE#162",
    KIND,
    "Half precision overflowed in the drafter, and trees of logits that are no numbers were invalid.",
)
@report(
    "vllm-project/vllm#45060",
    KIND,
    "Logits of the target that are no numbers led to ids outside the vocabulary.",
)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 6e4])
def test_numbers_that_are_none_change_no_text(wrong: float) -> None:
    target = tiny_target()
    request = Request([7, 5, 9, 7], 12)
    for method in (EAGLE3(), Medusa(heads=2)):
        torch.manual_seed(0)
        drafter: Any = method.example(target)
        with torch.no_grad():
            next(p for p in drafter.model.parameters() if p.dim() == 2)[1] = wrong
        engine = Engine(target, drafter, build("policy", "chain:length=3"), costs=COSTS)
        if wrong == 6e4:
            found = engine.write([request])
        else:
            with pytest.warns(DraftreeWarning, match="the drafter's output is not finite"):
                found = engine.write([request])
        assert found.tokens == generate_plain(target, [request]).tokens
    spoiled = tiny_target()
    with torch.no_grad():
        spoiled.decoder.model.get_output_embeddings().weight[5] = math.nan
    with pytest.raises(NotANumber):
        load(spoiled, "pld", "chain:length=3", costs=COSTS).write([request])


@report(
    "FasterDecoding/Medusa#81",
    KIND,
    "Two or three heads under the usual tree ended in an error of the device.",
)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("tree", ["medusa/mc_sim_7b_63", "eagle1/mc_sim_7b_63"])
def test_a_tree_deeper_than_the_heads_is_cut(heads: int, tree: str) -> None:
    target = tiny_target()
    drafter = Medusa(heads=heads).example(target)
    engine = Engine(target, drafter, build("policy", f"static:paths={tree}"), costs=COSTS)
    request = Request([7, 5, 9, 7], 12)
    found = engine.write([request])
    assert found.tokens == generate_plain(target, [request]).tokens
    assert max(s.depth for s in found.stats.steps) == heads


@report(
    "FasterDecoding/Medusa#140",
    KIND,
    "Two layouts of heads, with and without a linear layer to the vocabulary, were mixed up.",
)
def test_both_layouts_of_heads_are_read(tmp_path: Path) -> None:
    there = saved("medusa:heads=2", tmp_path / "ours")
    head = served().decoder.model.get_output_embeddings().weight.detach().float()

    def full(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors |= {f"{i}.1.weight": head.clone() for i in range(2)}

    def bare(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for i in range(2):
            del tensors[f"{i}.1.weight"]

    whole = changed(there, tmp_path / "whole", full)
    assert torch.allclose(drafts(whole), drafts(changed(there, tmp_path / "bare", bare)), atol=1e-5)
    assert not torch.allclose(drafts(whole), drafts(there))


@report(
    "vllm-project/speculators#456",
    KIND,
    "An exported DFlash said as many draft tokens as its block has slots, one too many.",
)
@pytest.mark.parametrize(("spec", "drafted"), [("dflash:block=8", 7), ("dflash:block=4", 3)])
def test_an_exported_block_says_how_many_tokens_it_drafts(
    spec: str, drafted: int, folder: Path, tmp_path: Path
) -> None:
    t = Target.load(str(folder), torch.float32)
    export(str(saved(spec, tmp_path / "ours", t)), "speculators", tmp_path / "out", str(folder))
    methods = config_of(tmp_path / "out")["speculators_config"]["proposal_methods"]
    assert [m["speculative_tokens"] for m in methods] == [drafted]
    opened: Any = build("drafter", str(tmp_path / "out")).open(t)
    assert opened.ahead == drafted
