"""DFlash, DSpark and JetSpec: one pass for a step, trained as what they decode as, opened in every layout, refused in words."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from architectures import target
from drafting import after_all, perturbed, tokens_of
from draftree.doctor import forward_parity
from draftree.doctor.export_check import examine
from draftree.drafters.neural.block_drafter import ParallelDrafter
from draftree.drafters.neural.block_loss import draw_anchors
from draftree.errors import UserError
from draftree.formats import block_drafters
from draftree.formats.block_drafters import Sight, to_speculators
from draftree.formats.checkpoint import Checkpoint
from draftree.registry import build, method_of, part
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec, Target
from draftree.training.export import export
from draftree.training.feature_cache import read_features
from draftree.tree import Candidates, Tree
from forests import NOISE, texts, worst

METHODS = ("dflash", "dspark", "jetspec")
SPECS: dict[str, dict[str, Any]] = {
    "dflash": {"layers": 2, "block": 5},
    "dspark": {"layers": 2, "block": 4, "rank": 6},
    "dspark-gated": {"block": 4, "rank": 6, "markov": "gated", "confidence": False},
    "dspark-rnn": {"block": 4, "rank": 6, "markov": "rnn"},
    "jetspec": {"layers": 2, "block": 5},
}
PATHS = {"layers": 2, "block": 5, "conditioned": True}


def drafter_of(name: str, t: Target, **knobs: Any) -> ParallelDrafter:
    method = part("drafter", name.partition("-")[0])(**(SPECS[name] | knobs))
    return perturbed(method, t)  # type: ignore[return-value]


# What is trained is what decodes.


@pytest.mark.parametrize(("model", "block", "phase"), [("llama", 4, 3), ("gemma2", 7, 0)])
def test_conditioned_training_forward_is_the_decoding_forward(
    model: str, block: int, phase: int
) -> None:
    t = target(model)
    drafter = drafter_of("jetspec", t, **PATHS)
    trained, steps = forward_parity.log_probs_of_both(
        t, drafter, tokens_of(2, 17, block), block, phase
    )
    assert worst(steps, trained) < 10 * NOISE
    marginals = forward_parity.log_probs_of_both(
        t, drafter_of("jetspec", t), tokens_of(2, 17, block), block, phase
    )[0]
    assert worst(marginals.exp(), trained.exp()) > 1e-3


@pytest.mark.parametrize("sight", [Sight(True), Sight(True, 3), Sight(False, 4)], ids=str)
def test_layers_that_see_otherwise(sight: Sight) -> None:
    t = target("llama")
    drafter = drafter_of("dflash", t)
    whole = forward_parity.log_probs_of_both(t, drafter, tokens_of(2, 17, 0), 4, 1)[0]
    drafter.model.layout = replace(drafter.model.layout, sights=(sight, Sight(False)))
    trained, steps = forward_parity.log_probs_of_both(t, drafter, tokens_of(2, 17, 0), 4, 1)
    assert worst(steps, trained) < 10 * NOISE
    assert worst(whole.exp(), trained.exp()) > 1e-3


def test_the_comparison_sees_the_roots_own_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    t = target("llama")
    drafter = drafter_of("dflash", t)
    stock = drafter.model.forward

    def leaking(
        tokens: Tensor, positions: Tensor, keys: Tensor, there: Tensor, cache: Any
    ) -> Tensor:
        return stock(
            tokens, positions, keys, there | (keys[:, None, :] == positions[:, :1, None]), cache
        )

    monkeypatch.setattr(drafter.model, "forward", leaking)
    assert forward_parity.largest_difference(t, drafter, tokens_of(1, 17, 0), 4, 1) > 1e-4


# One pass for a step.


def test_a_depth_shares_its_list_and_a_markov_head_tells_parents_apart() -> None:
    t = target("llama")
    for name, shared in (("dflash", True), ("jetspec", True), ("dspark", False)):
        drafter = drafter_of(name, t)
        text, root = np.array([3, 1, 4, 1, 5]), np.array([9])
        state = drafter.start(
            [text], root, t.prefill(t.new_cache(1, 8), [text], drafter.needs).hidden_states
        )
        tree = Tree.from_roots(np.arange(1), root)
        first, state = drafter.expand(state, tree, np.arange(1), 2, Drawing())
        tree = tree.append(
            np.zeros(2, np.int64), first.tokens[0], first.log_q[0], first.log_q[0], first
        )
        found, _ = drafter.expand(state, tree, np.array([1, 2]), 4, Drawing())
        assert np.array_equal(found.log_q[0], found.log_q[1]) == shared
        assert (found.confidence is None) == (name != "dspark")


def grown(tree: Tree, parents: list[int], tokens: list[int]) -> Tree:
    zero = np.zeros(len(tokens))
    return tree.append(
        np.array(parents), np.array(tokens), zero, zero, Candidates(np.array([tokens]), zero[None])
    )


@pytest.mark.parametrize("window", [None, 3])
def test_paths_over_again_a_whole_block_for_every_node(window: int | None) -> None:
    """The tokens of its path up to a node and masks behind it, alone in a pass over the text."""
    t = target("llama")
    drafter = drafter_of("jetspec", t, **PATHS)
    prompts = texts([5, 9], np.random.default_rng(3))
    roots = np.array([9, 2])
    drafter.model.layout = layout = replace(
        drafter.model.layout, sights=(Sight(True), Sight(True, window))
    )
    state = drafter.start(
        prompts, roots, t.prefill(t.new_cache(2, 12), prompts, drafter.needs).hidden_states
    )
    tree = Tree.from_roots(np.arange(2), roots)
    for parents, tokens in (([0, 0, 1], [7, 8, 6]), ([2, 2, 3], [5, 4, 3]), ([7], [2])):
        tree = grown(tree, parents, tokens)
    frontier = np.array([0, 3, 4, 6, 7, 8])  # of all depths and both rows, one without its root
    assert (drafter.ahead, drafter.passes(state, tree, frontier)) == (1, 6)
    found, _ = drafter.expand(state, tree, frontier, 3, Drawing())
    assert found.log_probs is not None
    for i, node in enumerate(frontier.tolist()):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        text = prompts[tree.row[node]]
        block = torch.tensor(
            [[*tree.tokens[path].tolist(), *[layout.mask] * layout.block][: layout.block]]
        )
        cache, at = DynamicCache(), torch.arange(len(text) + layout.block)[None]
        hidden = read_features(t, torch.from_numpy(text)[None], drafter.needs).hidden
        with torch.no_grad():
            for layer, (keys, values) in enumerate(
                drafter.model.context(hidden, at[:, : len(text)])
            ):
                cache.update(keys, values, layer)
            there = torch.ones(1, layout.block, at.shape[1], dtype=torch.bool)
            out = drafter.model(block, at[:, len(text) :], at, there, cache)
            wanted = drafter.model.head(out[0, len(path)]).log_softmax(-1)
        assert worst(found.log_probs[i], wanted) < 10 * NOISE
    deep = grown(tree, [8], [1])
    assert drafter.passes(state, deep, np.array([9])) == 0, "beyond the block nothing is drafted"
    assert np.isneginf(drafter.expand(state, deep, np.array([9]), 3, Drawing())[0].log_q).all()


def test_every_checkpoint_may_be_read_along_paths_if_its_slots_see_back_alone(
    tmp_path: Path,
) -> None:
    t = target("llama")
    saved("jetspec", t, tmp_path)
    opened = part("drafter", "jetspec")(checkpoint=str(tmp_path), conditioned=True).open(t)
    assert (opened.ahead, build("drafter", str(tmp_path)).open(t).ahead) == (1, 4)
    rewritten(
        tmp_path,
        lambda said: said | {"dflash_config": said["dflash_config"] | {"causal_head": False}},
    )
    with pytest.raises(UserError, match="conditioned is True, allowed is False"):
        part("drafter", "jetspec")(checkpoint=str(tmp_path), conditioned=True).open(t)


def test_the_rnn_head_over_again_on_one_path() -> None:
    """Its equations step by step, along a chain (section 3.2's recurrent variant)."""
    t = target("llama")
    drafter = drafter_of("dspark-rnn", t)
    head = drafter.model.markov_head
    states, tokens = (
        torch.randn(1, 4, t.decoder.hidden_size, dtype=torch.float64),
        torch.tensor([[3, 1, 4, 1]]),
    )
    with torch.no_grad():
        found, s = head(states, tokens)[0], torch.zeros(6, dtype=torch.float64)
        for k in range(4):
            z = (
                head.joint_proj.weight
                @ torch.cat((s, head.markov_w1.weight[tokens[0, k]], states[0, k]))
                + head.joint_proj.bias
            )
            gate = z[:6]
            new = z[6:12]
            out = z[12:]
            assert torch.allclose(found[k], out.tanh(), atol=1e-12)
            s = gate.sigmoid() * s + (1 - gate.sigmoid()) * new.tanh()


def test_the_gated_head_over_again() -> None:
    """The slot's gate of the vector of the token before it, number by number."""
    t = target("llama")
    head = drafter_of("dspark-gated", t).model.markov_head
    states, tokens = torch.randn(1, 4, t.decoder.hidden_size, dtype=torch.float64), [3, 1, 4, 1]
    with torch.no_grad():
        found = head(states, torch.tensor([tokens]))[0]
        weight = head.gate_proj.weight.tolist()
        bias = head.gate_proj.bias.tolist()
        x = head.markov_w1.weight.tolist()
        for k, token in enumerate(tokens):
            read = [*states[0, k].tolist(), *x[token]]
            for i in range(6):
                z = bias[i] + sum(w * v for w, v in zip(weight[i], read, strict=True))
                assert float(found[k, i]) == pytest.approx(
                    x[token][i] / (1 + math.exp(-z)), rel=1e-9
                )


# Objectives.


def by_hand(drafter: ParallelDrafter, batch: Any, kind: str) -> float:
    """The loss of one sample, slot by slot: the sum of weighted losses over the sum of weights, times learnt tokens."""
    knobs: Any = drafter.knobs
    places, after = (
        draw_anchors(batch, drafter.ahead, knobs.anchors, knobs.gamma),
        after_all(batch)[0],
    )
    logits, (states, before) = (
        drafter.blocks(batch, places.anchors)[0],
        drafter.along(batch, places.anchors),
    )
    text = batch.tokens[0]
    total = 0.0
    weights = 0.0
    for a, anchor in enumerate(places.anchors[0].tolist()):
        for k in range(drafter.ahead):
            if anchor + 1 + k >= len(text):
                break
            weight = math.exp(-k / knobs.gamma) if knobs.gamma else 1.0
            q, p = logits[a, k].softmax(-1), after[anchor + k].softmax(-1)
            ce, far = -float(q[text[anchor + 1 + k]].log()), float((p - q).abs().sum())
            loss = ce if kind == "ce" else float((p * (p.log() - q.log())).sum())
            if kind == "dspark":
                model: Any = drafter.model
                sure = float(model.certainty(states[a, k], before[a, k]).sigmoid())
                hit = 1 - far / 2
                loss = 0.1 * ce + 0.9 * far - hit * math.log(sure) - (1 - hit) * math.log(1 - sure)
            total, weights = total + weight * loss, weights + weight
    return total / weights


@pytest.mark.parametrize(
    ("name", "kind"), [("dflash", "ce"), ("dflash", "kl"), ("jetspec", "kl"), ("dspark", "dspark")]
)
def test_the_objective_slot_by_slot(name: str, kind: str) -> None:
    t = target("llama")
    drafter = drafter_of(name, t, anchors=5, **({"loss": kind} if name == "dflash" else {}))
    batch = forward_parity.batch_of(t, drafter, tokens_of(1, 15, 3))
    with torch.no_grad():
        batch = replace(batch, generators=(torch.Generator().manual_seed(1),))
        wanted = by_hand(drafter, batch, kind)
        batch = replace(batch, generators=(torch.Generator().manual_seed(1),))
        assert float(drafter.loss(batch)) == pytest.approx(wanted, rel=1e-4)


def test_roots_are_learnt_tokens_with_a_learnt_one_behind_them() -> None:
    t = target("llama")
    drafter = drafter_of("dflash", t)
    batch = forward_parity.batch_of(t, drafter, tokens_of(2, 20, 3))
    learn = torch.zeros_like(batch.learn)
    learn[0, 6:9], learn[0, 14:17], learn[1, 3:5] = True, True, True
    places = draw_anchors(replace(batch, learn=learn), 4, 10, 2.0)
    assert sorted(places.anchors[0].tolist()) == [6, 7, 14, 15]
    assert places.valid[1].sum() == 1
    assert [int(v.sum()) for v in places.valid[0]] == [2, 1, 2, 1], (
        "a block ends with what is learnt"
    )
    assert places.weight.sum(dim=(1, 2)).tolist() == pytest.approx([6.0, 2.0])


@pytest.mark.parametrize(("model", "same"), [("qwen3", True), ("llama", False)])
def test_a_new_one_reads_the_context_as_the_targets_own_layer(model: str, same: bool) -> None:
    """Values are the target's; so are keys where it norms them, too: else they are of unit size times their usual size."""
    t = target(model)
    layer = (drafter := part("drafter", "jetspec")().fresh(t)).model.layout.reads[-1]
    assert isinstance(drafter, ParallelDrafter)
    ids = torch.from_numpy(tokens_of(2, 9, 3))
    seen = read_features(t, ids, HiddenStateSpec(hidden=drafter.model.layout.reads, kv=(layer,)))
    with torch.no_grad():
        [(keys, values)] = drafter.model.double().context(
            seen.hidden, torch.arange(9).expand(2, -1)
        )
    assert torch.allclose(values, seen.kv[layer][1], atol=1e-6)
    alike = torch.cosine_similarity(keys, seen.kv[layer][0], dim=-1)
    assert torch.allclose(alike, torch.ones_like(alike), atol=1e-6)
    assert torch.allclose(keys, seen.kv[layer][0], atol=1e-6) is same
    assert 0.5 < float(keys.norm() / seen.kv[layer][0].norm()) < 2
    drawn = part("drafter", "jetspec")(init="scratch").fresh(t)
    assert isinstance(drawn, ParallelDrafter)
    assert not torch.equal(
        drawn.model.layers[0].mlp.up_proj.weight, drafter.model.layers[0].mlp.up_proj.weight
    )


def test_the_mask_is_the_token_that_is_never_learnt() -> None:
    t = target("llama")
    drafter = part("drafter", "dflash")().fresh(t)
    counts = np.ones(t.decoder.vocab, np.int64)
    counts[[5, 40]] = 0
    drafter.fit_vocabulary(counts)
    assert (drafter.model.layout.mask, drafter.resolved_knobs.mask) == (40, 40)
    asked = part("drafter", "dflash")(mask=7).fresh(t)
    asked.fit_vocabulary(counts)
    assert asked.resolved_knobs.mask == 7
    with pytest.raises(UserError, match="mask is 71, allowed are 0 … 70"):
        part("drafter", "dflash")(mask=71).fresh(t)


# Folders.


def saved(name: str, t: Target, folder: Path) -> ParallelDrafter:
    """A drafter of float16 weights, stored."""
    drafter = drafter_of(name, t)
    for parameter in drafter.model.parameters():
        parameter.data = parameter.data.half().double()
    drafter.save(folder)
    return drafter


def drafts(drafter: ParallelDrafter, t: Target) -> Tensor:
    return forward_parity.draft_log_probs(t, drafter, tokens_of(1, 15, 5), 4, 1)


def rewritten(
    folder: Path, config: Callable[[dict[str, Any]], dict[str, Any]], **names: Callable[[str], str]
) -> None:
    """Changes a stored config, and the names of its tensors."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(said)))
    if names:
        tensors = load_file(folder / "model.safetensors")
        save_file({names["name"](k): v for k, v in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", SPECS)
def test_a_checkpoint_without_our_entry_is_recognised(name: str, tmp_path: Path) -> None:
    t = target("llama")
    drafter = saved(name, t, tmp_path)
    rewritten(tmp_path, lambda said: {k: v for k, v in said.items() if k != "draftree"})
    assert method_of(tmp_path) == name.partition("-")[0]
    assert torch.equal(drafts(build("drafter", str(tmp_path)).open(t), t), drafts(drafter, t))


def nested(said: dict[str, Any]) -> dict[str, Any]:
    """Block size inside `dflash_config`, mask token outside of it."""
    inner = said["dflash_config"] | {"block_size": said.pop("block_size")}
    return said | {"mask_token_id": inner.pop("mask_token_id"), "dflash_config": inner}


def native(said: dict[str, Any]) -> dict[str, Any]:
    """As transformers' own class has it."""
    return {k: v for k, v in said.items() if k != "dflash_config"} | said["dflash_config"] | {
        "model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"]
    }  # fmt: skip


def deepspec(said: dict[str, Any]) -> dict[str, Any]:
    """As DeepSpec has it."""
    return {k: v for k, v in said.items() if k != "dflash_config"} | said["dflash_config"] | {
        "architectures": ["Qwen3DSparkModel"]
    }  # fmt: skip


NATIVE = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
EARLY = lambda key: (
    f"logit_head.{key}" if key.startswith(("markov_head.", "confidence_head.")) else key
)


@pytest.mark.parametrize(
    ("name", "config", "renamed"),
    [
        ("dflash", nested, str),
        ("jetspec", nested, str),
        ("dflash", native, lambda key: NATIVE.get(key, key)),
        ("dspark", deepspec, str),
        ("dspark-gated", deepspec, str),
        ("dspark", nested, EARLY),
    ],
)
def test_published_layouts(
    name: str, config: Any, renamed: Callable[[str], str], tmp_path: Path
) -> None:
    t = target("llama")
    wanted = drafts(saved(name, t, tmp_path), t)
    rewritten(
        tmp_path,
        lambda said: config({k: v for k, v in said.items() if k != "draftree"}),
        name=renamed,
    )
    assert torch.equal(drafts(build("drafter", str(tmp_path)).open(t), t), wanted)


def test_a_dflash_of_deepspec_is_shifted_and_brings_embedding_and_head(tmp_path: Path) -> None:
    t = target("llama")
    drafter = saved("dflash", t, tmp_path)
    rewritten(
        tmp_path,
        lambda said: (
            deepspec({k: v for k, v in said.items() if k != "draftree"}) | {"markov_rank": 0}
        ),
    )
    model: Any = t.decoder.model
    own = {
        "embed_tokens.weight": model.get_input_embeddings().weight,
        "lm_head.weight": model.get_output_embeddings().weight,
    }
    tensors = load_file(tmp_path / "model.safetensors") | {
        k: v.detach().clone() for k, v in own.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    opened = build("drafter", str(tmp_path)).open(t)
    assert (opened.ahead, drafter.ahead) == (5, 4)
    drafter.model.layout = replace(drafter.model.layout, shifted=True)
    assert worst(drafts(opened, t), drafts(drafter, t)) < NOISE


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("draft_vocab", [0, 30])
def test_an_exported_one_is_the_same_with_layers_counted_from_the_embedding(
    name: str, draft_vocab: int, tmp_path: Path
) -> None:
    t = target("llama")
    folder = tmp_path / "target"
    t.decoder.model.save_pretrained(folder)
    t = Target.load(str(folder), torch.float64, "cpu")
    drafter = drafter_of(name, t, draft_vocab=draft_vocab)
    drafter.fit_vocabulary(np.arange(t.decoder.vocab))
    for parameter in drafter.model.parameters():
        parameter.data = parameter.data.half().double()
    drafter.save(tmp_path / "ours")
    export(str(tmp_path / "ours"), "speculators", tmp_path / "theirs", str(folder))
    said = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert said["speculators_model_type"] == ("dflash" if name == "jetspec" else name)
    sliding = said["transformer_layer_config"]["layer_types"] == ["sliding_attention"] * 2
    assert sliding == (name == "jetspec"), "causal layers are sliding ones there"
    assert said["aux_hidden_state_layer_ids"] == list(drafter.model.layout.reads)
    assert said["sample_from_anchor"] == (name == "dspark")
    assert said["draft_vocab_size"] == (draft_vocab or t.decoder.vocab)
    keys = set(load_file(tmp_path / "theirs" / "model.safetensors"))
    assert {"embed_tokens.weight", "lm_head.weight", "fc.weight"} <= keys
    assert ({"d2t", "t2d"} <= keys) == bool(draft_vocab)
    opened = build("drafter", str(tmp_path / "theirs")).open(t)
    assert worst(drafts(opened, t).exp(), drafts(drafter, t).exp()) < 1e-3, (
        "embedding and head are copies in float16"
    )


@pytest.mark.parametrize(
    ("sights", "told"),
    [((Sight(False, 4), Sight(False)), ""), ((Sight(False), Sight(False)), ""),
     ((Sight(True), Sight(False, 4)), "allowed"), ((Sight(True, 3), Sight(True, 4)), "allowed")],
    ids=str,
)  # fmt: skip
def test_windows_are_exported_or_refused(sights: tuple[Sight, Sight], told: str) -> None:
    layout = replace(drafter_of("dflash", target("llama")).model.layout, sights=sights)
    if told:
        with pytest.raises(UserError, match=told):
            to_speculators(layout, "dflash", {})
        return
    said = to_speculators(layout, "dflash", {})
    assert said["sliding_window_non_causal"] is True
    assert block_drafters._layout(said, Checkpoint(said)).sights == sights


def test_the_doctor_remarks_full_layers_that_vllm_takes_for_causal_ones(tmp_path: Path) -> None:
    t = target("llama")
    t.decoder.model.save_pretrained(tmp_path / "target")
    saved("dflash", t, tmp_path / "ours")
    out = tmp_path / "out"
    export(str(tmp_path / "ours"), "speculators", out, str(tmp_path / "target"))
    config = json.loads((out / "config.json").read_text())
    for both, told in ((True, 0), (False, 1)):
        (out / "config.json").write_text(json.dumps(config | {"sliding_window_non_causal": both}))
        assert sum("causal" in remark for remark in examine(out).remarks) == told


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "holds a DFlash 2"),
        ("dflash", {"block_size": "8"}, "block_size is '8'"),
        ("dflash", {"block_size": 1}, "block_size 1, which drafts nothing"),
        ("dflash", {"hidden_size": 64}, r"hidden_size 64, allowed is the target's: 32"),
        ("dspark", {"markov_head_type": "lstm"}, "markov_head_type .*'lstm'"),
        ("dflash", {"mask_token_id": 71}, r"mask_token_id 71, allowed are 0 … 70"),
        (
            "dflash",
            {"target_layer_ids": [0, 3]},
            r"reads entries \[1, 4\] of hidden_states, allowed are some of 0 … 3",
        ),
        ("dflash", {"layer_types": ["full_attention"]}, "layer_types is .* allowed are 2 of"),
    ],
)
def test_unfitting_config_entries_are_named_in_a_line(
    name: str, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    t = target("llama")
    saved(name, t, tmp_path)
    inner = {
        k: v
        for k, v in config.items()
        if k in ("mask_token_id", "target_layer_ids", "markov_head_type")
    }
    rewritten(
        tmp_path, lambda said: said | config | {"dflash_config": said["dflash_config"] | inner}
    )
    with pytest.raises(UserError, match=told) as error:
        build("drafter", str(tmp_path)).open(t)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("dflash", lambda t: t.pop("fc.weight"), "missing tensors: fc.weight"),
        (
            "dspark",
            lambda t: t.pop("confidence_head.proj.bias"),
            "missing tensors: confidence_head.proj.bias",
        ),
        (
            "dspark",
            lambda t: t.update({"select_head.weight": torch.zeros(3)}),
            "foreign tensors: select_head.weight",
        ),
        (
            "dflash",
            lambda t: t.update({"layers.0.attention_conv.base_kernel": torch.zeros(3)}),
            "holds a DFlash 2",
        ),
        (
            "jetspec",
            lambda t: t.update({"hidden_dim_adapter.proj.weight": torch.zeros(3)}),
            "foreign tensors: hidden_dim",
        ),
    ],
)
def test_a_missing_tensor_or_an_unknown_head_is_named(
    name: str, change: Any, told: str, tmp_path: Path
) -> None:
    t = target("llama")
    saved(name, t, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=told) as error:
        build("drafter", str(tmp_path)).open(t)
    assert "\n" not in str(error.value)
