"""GLIDE: what it is trained as is what it decodes as, and published checkpoints stay what they are."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from architectures import VOCAB, fresh, model, target
from drafting import perturbed, tokens_of
from draftree.doctor import forward_parity
from draftree.drafters import glide
from draftree.drafters.glide import GLIDE, GLIDEDrafter
from draftree.drafters.neural.draft_masks import block_starts, earlier_blocks
from draftree.drafters.neural.glide_model import Glimpse
from draftree.drafters.neural.losses import draft_loss
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.params import Sampling
from draftree.target.attention_strength import Attending
from draftree.target.target import Target
from draftree.testing import Case, Suite
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import Always, Coached
from draftree.training.feature_cache import read_features
from draftree.tree import Ints, Tree
from forests import NOISE, grown, random_forest, some_verdict, texts, worst


def drafter_of(t: Target, **knobs: Any) -> GLIDEDrafter:
    return perturbed(GLIDE(**knobs), t, 0.15)  # type: ignore[return-value]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("off", [-1, 1])
def test_the_comparison_sees_a_mask_off_by_one(
    layers: int, off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's own key is leaked, or the last committed one is hidden."""

    def shifted(tokens: int, block: int, phase: int) -> Tensor:
        return torch.arange(tokens)[None, :] < block_starts(tokens, block, phase)[:, None] + off

    monkeypatch.setattr(glide, "earlier_blocks", shifted)
    trained, steps = forward_parity.log_probs_of_both(
        target("llama"), drafter_of(target("llama"), layers=layers), tokens_of(1, 17), 5, 1
    )
    assert worst(steps, trained) > 1e-3


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 24),
    cut=st.integers(1, 9).flatmap(
        lambda block: st.tuples(st.just(block), st.integers(0, block - 1))
    ),
)
def test_the_block_mask_is_its_rule(tokens: int, cut: tuple[int, int]) -> None:
    """Mask_Block: j sees k where block(j) > block(k)."""
    block, phase = cut
    number = (np.arange(tokens) + phase) // block
    assert np.array_equal(
        earlier_blocks(tokens, block, phase).numpy(), number[:, None] > number[None, :]
    )


# What each token sees while decoding, against a forward over its whole text.


def after(t: Target, drafter: GLIDEDrafter, text: Ints, limits: Sequence[int]) -> Tensor:
    """[V] draft log-probabilities after a text of which token j sees the target's first `limits[j]` keys."""
    ids = torch.from_numpy(text)[None]
    kv = read_features(t, ids, drafter.needs).kv
    visible = torch.arange(len(text))[None, :] < torch.tensor(limits)[:, None]
    with torch.no_grad():
        glimpse = Glimpse([kv[layer] for layer in drafter.needs.kv], visible[None, None])
        logits = drafter.model(
            ids, position_ids=torch.arange(len(text))[None], glimpse=glimpse
        ).logits
    return torch.log_softmax(logits[0, -1], dim=-1)


def reading(drafter: GLIDEDrafter, length: int) -> list[int]:
    """What the tokens of a prompt see."""
    block = drafter.knobs.block
    return (
        [length] * length
        if drafter.knobs.variant == "official"
        else [i // block * block for i in range(length)]
    )


def walk(t: Target, drafter: GLIDEDrafter, lengths: Sequence[int], steps: int, seed: int) -> float:
    """How far decoding is from a forward over whole texts, in steps over random forests of which only a part is expanded.

    So accepted paths end in nodes that were never fed. Every third step drafts for the first row
    alone.
    """
    rng = np.random.default_rng(seed)
    committed, rows = texts(lengths, rng), len(lengths)
    limits = [reading(drafter, n) for n in lengths]
    cache, far = t.new_cache(rows, 8), 0.0
    state = drafter.start(
        committed,
        np.zeros(rows, np.int64),
        t.prefill(cache, committed, drafter.needs).hidden_states,
    )
    for step in range(steps):
        tree = random_forest(rows, 6 * rows, rng)
        fed = np.zeros(len(tree), np.bool_)
        for depth in range(int(tree.depth.max())):
            ready = (
                (tree.depth == depth)
                & (fed[tree.parents] | (depth == 0))
                & (rng.random(len(tree)) < 0.8)
            )
            frontier = np.flatnonzero(ready & ((tree.row == 0) | (step % 3 < 2)))
            if not frontier.size:
                break
            candidates, state = drafter.expand(state, tree, frontier, 1, Drawing())
            fed[frontier] = True
            for node, got in zip(frontier.tolist(), candidates.log_probs, strict=True):  # type: ignore[arg-type]
                row, path = int(tree.row[node]), tree.path(node)
                text = np.concatenate((committed[row], tree.tokens[path]))
                want = after(t, drafter, text, [*limits[row], *[len(committed[row])] * len(path)])
                far = max(far, worst(got, want))
        verified, verdict = t.verify(cache, tree, drafter.needs), some_verdict(tree, rng)
        t.commit(cache, tree, verdict)
        kept = np.concatenate([verdict.committed_nodes(root) for root in range(rows)])
        state = drafter.commit(state, tree, verdict, verified.hidden_states.take(kept))
        for row, text in enumerate(grown(committed, tree, verdict)):
            sees = len(text) if drafter.knobs.variant == "official" else len(committed[row])
            limits[row] += [sees] * (len(text) - len(committed[row]))
            committed[row] = text
    return far


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", [[7], [1, 9, 4]])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_every_token_keeps_the_view_it_was_drafted_with(
    name: str, layers: int, lengths: list[int]
) -> None:
    assert (
        walk(
            target(name), drafter_of(target(name), layers=layers, block=3), lengths, 5, seed=layers
        )
        < NOISE
    )


@pytest.mark.parametrize("lengths", [[7], [1, 9, 4]])
def test_official_reads_committed_tokens_again_with_all_the_target_has(lengths: list[int]) -> None:
    """A row that is not drafted for in a step reads its tokens later; in the official code there is only one row."""
    drafter = drafter_of(target("llama"), layers=2, variant="official")
    assert walk(target("llama"), drafter, lengths, 5, seed=3) < NOISE


def test_the_comparison_sees_a_waiting_token_that_sees_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if an accepted node that was not fed in its step belonged to the next one."""
    monkeypatch.setattr(
        glide.GLIDEState,
        "num_visible_tokens",
        lambda s, at: np.broadcast_to(s.roots[:, None], at.shape).copy(),
    )
    assert (
        walk(target("llama"), drafter_of(target("llama"), layers=2, block=3), [7], 5, seed=2) > 1e-3
    )


@pytest.mark.parametrize(("layers", "variant"), [(2, "paper"), (1, "official"), (2, "official")])
def test_text_is_plain_decodings(layers: int, variant: str) -> None:
    suite = Suite()
    with torch.random.fork_rng(devices=[]):
        suite._examples["glide"] = drafter_of(suite.target, layers=layers, variant=variant)
    suite.run(Case("ragged", "glide", "vct", "greedy"))
    suite.run(Case("one", "glide", "cape", "match"))
    if layers == 1:  # with more, what was drafted is remembered otherwise than what was read
        suite.run(Case("caches", "glide", "chain", "greedy"))
        suite.run(Case("reuse", "glide", "chain", "greedy"))
    assert max(suite.coverage.accepted) > 1


# The network.


def test_a_query_that_sees_nothing_gets_nothing() -> None:
    """In the first block: no NaN, neither in the output nor in the gradient."""
    t = target("llama")
    drafter = drafter_of(t)
    batch = forward_parity.batch_of(t, drafter, tokens_of(2, 9))
    first = drafter.forward(batch, 9, 0)
    drafter.model.model.layers[0].cross_attn.o_proj.weight.data.mul_(7.0)  # type: ignore[union-attr]
    assert torch.equal(first, drafter.forward(batch, 9, 0)), "one block: there is nothing to see"
    blocked = drafter.forward(batch, 4, 0)
    assert torch.equal(blocked[:, :4], first[:, :4])
    assert (blocked[:, 4:] - first[:, 4:]).abs().amax(dim=2).min() > 1e-3, (
        "behind it everything is seen"
    )
    blocked.sum().backward()
    assert all(
        bool(p.grad.isfinite().all()) for p in drafter.model.parameters() if p.grad is not None
    )
    assert float(drafter.model.model.layers[0].cross_attn.q_proj.weight.grad.abs().max()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("layers", [1, 2])
def test_without_cross_attention_it_is_a_llama_that_needs_nothing(layers: int) -> None:
    t = target("llama")
    drafter = drafter_of(t, layers=layers, cross=False)
    assert drafter.needs.kv == drafter.needs.hidden == ()
    config = LlamaConfig(**{
        k: getattr(drafter.model.config, k)
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "num_key_value_heads", "rms_norm_eps")
    })  # fmt: skip
    stock = LlamaForCausalLM(config).double()
    stock.load_state_dict(drafter.model.state_dict())
    tokens = tokens_of(2, 11)
    trained, steps = forward_parity.log_probs_of_both(t, drafter, tokens, 4, 1)
    with torch.no_grad():
        want = torch.log_softmax(stock(torch.from_numpy(tokens)).logits, dim=-1)[
            :, -steps.shape[1] :
        ]
    assert worst(steps, trained) < NOISE
    assert worst(steps, want) < NOISE


@pytest.mark.parametrize(
    ("kv_layer", "reads"), [(-1, (2, 3)), (-3, (0, 1)), (2, (1, 2)), (3, (2, 3))]
)
def test_a_draft_layer_reads_the_layer_of_the_target_that_is_named(
    kv_layer: int, reads: tuple[int, int]
) -> None:
    t = target("llama")
    drafter = drafter_of(t, layers=2, kv_layer=kv_layer)
    assert drafter.needs.kv == reads
    batch = forward_parity.batch_of(t, drafter, tokens_of(1, 9))
    ids = torch.from_numpy(tokens_of(1, 9))
    stored = t.new_cache(1, 9)
    t.prefill(stored, [ids[0].numpy()], drafter.needs)
    with torch.no_grad():
        glimpse = Glimpse([stored.layer(i) for i in reads], earlier_blocks(9, 3, 0)[None, None])
        want = drafter.model(ids, position_ids=torch.arange(9)[None], glimpse=glimpse).logits
        assert worst(drafter.forward(batch, 3, 0), want) < NOISE
    trained, steps = forward_parity.log_probs_of_both(t, drafter, tokens_of(1, 14), 5, 2)
    assert worst(steps, trained) < NOISE


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-linear-rope",
        "llama-tied-llama3-rope",
        "llama-eager-yarn",
        "gemma3",
        "gpt_neox",
    ],
)
def test_queries_are_rotated_as_the_targets_keys_are(name: str) -> None:
    t = target(name)
    ours = drafter_of(t, layers=2).model.model.layers
    rotary: Any = next(m for m in model(name).modules() if "RotaryEmbedding" in type(m).__name__)
    for layer, reads in zip(ours, (2, 3), strict=True):
        turning: Any = layer.cross_attn.rotary  # type: ignore[union-attr]
        kind = "" if name != "gemma3" else f"{t.decoder.hf.layer_types[reads]}_"
        assert torch.allclose(turning.inv_freq.float(), getattr(rotary, f"{kind}inv_freq").float())
    queries = torch.randn(1, 3, 4, 8, dtype=torch.float64).transpose(1, 2)
    turned = ours[0].cross_attn._rotate(queries, torch.tensor([[3, 4, 5]]))  # type: ignore[union-attr, operator]
    assert turned.shape == queries.shape
    changed = (turned != queries).any(dim=(0, 1, 2)).tolist()
    assert changed == ([True] * 2 + [False] * 6 if name == "gpt_neox" else [True] * 8)


def test_official_rotates_with_base_10000_whatever_the_target_does() -> None:
    layer = drafter_of(target("llama-tied-llama3-rope"), variant="official").model.model.layers[0]
    rotary: Any = layer.cross_attn.rotary  # type: ignore[union-attr]
    assert torch.allclose(
        rotary.inv_freq.double(), 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    )


# Training.


@torch.no_grad()
def test_blocks_begin_anywhere_and_each_sample_draws_for_itself() -> None:
    t = target("llama")
    drafter = drafter_of(t, block=4, phase="random")
    losses, phases = [], []
    for seed in range(6):
        batch = forward_parity.batch_of(t, drafter, tokens_of(2, 15), seed)
        at = torch.nn.functional.pad(batch.learn[:, 1:], (0, 1))
        drawn = [
            int(torch.randint(4, (), generator=torch.Generator().set_state(g.get_state())))
            for g in batch.generators
        ]
        rows = torch.stack([drafter.forward(batch, 4, p)[i] for i, p in enumerate(drawn)])
        losses.append(float(drafter.loss(batch)) - float(draft_loss("ce", batch, rows[at])))
        phases += drawn
    assert max(map(abs, losses)) < 1e-6
    assert len(set(phases)) > 2
    official = GLIDEDrafter(
        replace(drafter.knobs, variant="official", phase=0), drafter.model, t, drafter._stored
    )
    batch = forward_parity.batch_of(t, official, tokens_of(2, 15))
    logits = official.forward(batch, 4, 0)[:, :-1]
    assert float(official.loss(batch)) == pytest.approx(
        float(draft_loss("ce", batch, logits.flatten(0, 1))), abs=1e-6
    )


@torch.no_grad()
def test_the_loss_against_the_target_is_zero_where_both_agree() -> None:
    t = target("llama")
    drafter = drafter_of(t, loss="kl")
    batch = forward_parity.batch_of(t, drafter, tokens_of(1, 8))
    assert float(drafter.loss(batch)) > 0.1
    own = torch.stack([drafter.forward(batch, 5, p)[0] for p in range(5)])
    phase = int(
        torch.randint(5, (), generator=torch.Generator().set_state(batch.generators[0].get_state()))
    )
    agreed = replace(batch, target=lambda at: own[phase : phase + 1][at])
    assert float(drafter.loss(agreed)) == pytest.approx(0, abs=1e-6)


@torch.no_grad()
def test_a_new_one_begins_with_the_targets_embedding_and_head() -> None:
    t = target("llama")
    drafter, stock = GLIDE(init="target").fresh(t), model("llama")
    assert torch.equal(
        drafter.model.model.embed_tokens.weight, stock.get_input_embeddings().weight.float()
    )  # type: ignore[arg-type]
    assert torch.equal(drafter.model.lm_head.weight, stock.get_output_embeddings().weight.float())  # type: ignore[union-attr]
    assert {p.dtype for p in drafter.model.parameters()} == {torch.float32}
    small = GLIDE(hidden=16).fresh(t)
    assert small.model.model.embed_tokens.weight.shape == (VOCAB, 16)
    assert 0.015 < float(small.model.model.embed_tokens.weight.std()) < 0.025


@torch.no_grad()
def test_from_scratch_nothing_is_the_targets() -> None:
    t, stock = target("llama"), model("llama")
    drafter = GLIDE().fresh(t)
    for ours, theirs in (
        (drafter.model.model.embed_tokens, stock.get_input_embeddings()),
        (drafter.model.lm_head, stock.get_output_embeddings()),
    ):
        assert float((ours.weight - theirs.weight).abs().mean()) > 0.01  # type: ignore[union-attr, operator]
        assert 0.015 < float(ours.weight.std()) < 0.025  # type: ignore[union-attr, operator, arg-type]


# The layer that `auto` finds.


@pytest.mark.parametrize(
    ("layers", "outputs", "found"),
    [
        (
            1,
            [19.0, 0.01, 0.3, 0.01, 0.5, 0.03],
            4,
        ),  # the first adds most of all, and is not of the upper third
        (1, [19.0, 0.9, 0.9, 0.9, 0.2, 0.3], 5),
        (1, [0.1, 0.3], 1),
        (1, [0.3], 0),
        (1, [0.3] * 32, 21),  # where all are alike, the lowest
        (3, [0.9, 0.8, 0.1], 2),  # there have to be two layers below it
    ],
)
def test_auto_is_the_busiest_of_the_upper_third(
    layers: int, outputs: list[float], found: int
) -> None:
    assert (
        GLIDE(layers=layers, kv_layer="auto").busiest(
            [Attending(output, 0.5) for output in outputs]
        )
        == found
    )


def from_roots(name: str, dead: int) -> Target:
    """A target one of whose layers does not attend."""
    copy: Any = fresh(name)
    copy.get_parameter(f"model.layers.{dead}.self_attn.o_proj.weight").data.zero_()
    return Target(CausalLM(copy), name)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dead", [2, 3])
def test_auto_is_settled_by_the_texts_and_saved(
    name: str, layers: int, dead: int, tmp_path: Path
) -> None:
    """In gemma3 its queries are then rotated otherwise than for the layer it would have read."""
    t, reads = from_roots(name, dead), 5 - dead
    drafter = drafter_of(t, layers=layers, kv_layer="auto")
    with pytest.raises(UserError, match="glide: kv_layer is 'auto', allowed is a number"):
        _ = drafter.needs
    assert drafter.resolve_auto(list(tokens_of(4, 12))) == {"kv_layer": reads}
    assert drafter.needs.kv == tuple(range(reads - layers + 1, reads + 1))
    assert drafter.knobs == GLIDE(layers=layers, kv_layer="auto"), (
        "as it was asked for, so that the same command goes on"
    )
    named = drafter_of(t, layers=layers, kv_layer=reads)
    named.model.load_state_dict(drafter.model.state_dict())
    tokens = tokens_of(2, 15, 1)
    trained, steps = forward_parity.log_probs_of_both(t, drafter, tokens, 5, 2)
    assert worst(steps, trained) < NOISE
    assert worst(forward_parity.log_probs_of_both(t, named, tokens, 5, 2)[0], trained) < NOISE
    drafter.save(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["draftree"]["kv_layer"] == reads
    assert build("drafter", str(tmp_path / "a")).open(t).needs == drafter.needs


def test_a_number_and_no_cross_attention_leave_nothing_to_settle() -> None:
    t = target("llama")
    for knobs in ({}, {"kv_layer": 2}, {"kv_layer": "auto", "cross": False}):
        drafter = drafter_of(t, **knobs)
        before = drafter.needs
        assert drafter.resolve_auto(list(tokens_of(2, 9))) == {}
        assert drafter.needs == before


# Checkpoints.


def official(
    folder: Path,
    file: str = "pytorch_model.bin",
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
) -> dict[str, Tensor]:
    """A random checkpoint as the official code writes it, for the `llama` target; returns its tensors."""
    config = {
        "architectures": ["smallLlamaForCausalLM"], "block_size": 5, "hidden_act": "silu", "hidden_size": 24,
        "initializer_range": 0.02, "intermediate_size": 40, "large_head_dim": 8, "large_hidden_size": 32,
        "large_num_attention_heads": 4, "max_position_embeddings": 128, "model_type": "llama", "num_attention_heads": 2,
        "num_hidden_layers": layers, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "transformers_version": "4.36.2", "use_remap": False, "vocab_size": VOCAB,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, 24),
        "model.norm": (24,),
        "lm_head": (VOCAB, 24),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{k}_proj": (24, 24) for k in "qkvo"}
        shapes |= {f"{at}.cross_attn.q_proj": (32, 24), f"{at}.cross_attn.o_proj": (24, 32)}
        shapes |= {f"{at}.mlp.{k}_proj": (40, 24) for k in ("gate", "up")} | {
            f"{at}.mlp.down_proj": (24, 40)
        }
        shapes |= {f"{at}.{k}_layernorm": (24,) for k in ("input", "post_attention")}
    torch.manual_seed(4)
    tensors = {f"{prefix}{k}.weight": torch.randn(shape).to(dtype) for k, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    written = tensors | ({"large_model.lm_head.weight": torch.zeros(3)} if prefix else {})
    if file.endswith(".bin"):
        torch.save(written, folder / file)
    else:
        save_file(written, folder / file)
    return tensors


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("prefix", ["", "small_model."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_published_one_is_opened_as_official_and_written_back_bit_for_bit(
    file: str, prefix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = official(tmp_path / "a", file, prefix, dtype)
    drafter = build("drafter", str(tmp_path / "a")).open(target("llama"))
    assert isinstance(drafter, GLIDEDrafter)
    assert drafter.knobs == GLIDE(str(tmp_path / "a"), layers=2, hidden=24, variant="official")
    embedding = drafter.model.model.embed_tokens.weight
    assert torch.equal(embedding, tensors[f"{prefix}model.embed_tokens.weight"].double())
    drafter.save(tmp_path / "b")
    path = tmp_path / "b" / file
    again = torch.load(path, weights_only=True) if file.endswith(".bin") else load_file(path)
    assert again.keys() == tensors.keys()
    assert all(again[k].dtype == dtype and torch.equal(again[k], v) for k, v in tensors.items())
    before, now = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert {k: v for k, v in now.items() if k != "draftree"} == before
    assert build("drafter", str(tmp_path / "b")).open(target("llama")).knobs.variant == "official"


def test_in_half_precision_rotary_frequencies_and_stored_weights_stay_exact(tmp_path: Path) -> None:
    tensors = official(tmp_path / "a")
    half = Target(type(target("llama").decoder)(draft_copy().to(torch.bfloat16)), "half")
    drafter = GLIDE(str(tmp_path / "a")).open(half)
    assert {p.dtype for p in drafter.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in drafter.model.buffers()} == {torch.float32}
    drafter.save(tmp_path / "b")
    again = torch.load(tmp_path / "b/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(again[k], v) for k, v in tensors.items())
    tokens = texts([9], np.random.default_rng(0))
    cache = half.new_cache(1, 16)
    state = drafter.start(
        tokens, np.array([4]), half.prefill(cache, tokens, drafter.needs).hidden_states
    )
    candidates, _ = drafter.expand(
        state, Tree.from_roots(np.array([0]), np.array([4])), np.array([0]), 3, Drawing()
    )
    assert np.isfinite(candidates.log_q).all()


def draft_copy() -> Any:
    stock = model("llama")
    copy: Any = type(stock)(stock.config)
    copy.load_state_dict(stock.state_dict())
    return copy


def changed(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Changes a checkpoint's config and tensors in place."""
    config = json.loads((folder / "config.json").read_text())
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")


CROSS = "model.layers.1.cross_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c, t: t.pop(CROSS), rf"missing tensors: {CROSS}"),
        (
            lambda c, t: t.update({"model.layers.2.mlp.x.weight": torch.zeros(1)}),
            r"foreign tensors: model.layers.2.mlp.x",
        ),
        (
            lambda c, t: t.update({CROSS: torch.zeros(16, 24)}),
            rf"mis-shaped tensors: {CROSS} \[16, 24\] \(allowed \[32, 24\]\)",
        ),
        (lambda c, t: c.update(vocab_size=99), r"vocab_size 99, allowed is the target's: 71"),
        (
            lambda c, t: c.update(large_hidden_size=64),
            r"large_hidden_size 64, allowed is the target's: 32",
        ),
        (
            lambda c, t: c.update(large_num_attention_heads=8),
            r"large_num_attention_heads 8, allowed is the target's: 4",
        ),
        (
            lambda c, t: c.update(large_head_dim=16),
            r"large_head_dim 16, allowed is the target's: 8",
        ),
        (
            lambda c, t: c.update(num_hidden_layers=9),
            r"kv_layer=-1 with layers=9; of the target's 4 layers",
        ),
        (lambda c, t: c.update(num_hidden_layers=1), r"foreign tensors: model.layers.1"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    official(tmp_path / "a")
    GLIDE(str(tmp_path / "a")).open(target("llama"))
    changed(tmp_path / "a", change)
    with pytest.raises(UserError, match=said):
        GLIDE(str(tmp_path / "a")).open(target("llama"))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"hidden": 12}, r"hidden=12, 4 heads of odd width; allowed is a multiple of 8"),
        (
            {"kv_layer": 4},
            r"kv_layer=4 with layers=1; of the target's 4 layers allowed are 0 … 3 \(or -4 … -1\)",
        ),
        ({"kv_layer": -4, "layers": 2}, r"kv_layer=-4 with layers=2; .* 1 … 3 \(or -3 … -1\)"),
        ({"kv_layer": 0, "layers": 2}, r"kv_layer=0"),
    ],
)
def test_options_that_do_not_fit_the_target_are_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        GLIDE(**knobs).fresh(target("llama"))


# Prefixes, and the end of the context.


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("lengths", [[9], [3, 8, 1]])
def test_a_long_prompt_is_read_in_parts(
    variant: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(target("llama"), layers=2, block=3, variant=variant)
    monkeypatch.setattr(glide, "CHUNK", 4)
    assert walk(target("llama"), drafter, lengths, 1, seed=1) < NOISE


def test_nothing_is_drafted_beyond_its_own_context(tmp_path: Path) -> None:
    t = target("llama")
    official(tmp_path / "a")
    changed(tmp_path / "a", lambda config, _: config.update(max_position_embeddings=12))
    short = GLIDE(str(tmp_path / "a")).open(t)
    for lengths in ((6,), (11,), (12,), (20,), (4, 12, 8)):
        prompts = texts(lengths, np.random.default_rng(0))
        roots, rows = np.full(len(lengths), 4), np.arange(len(lengths))
        cache = t.new_cache(len(lengths), 32)
        state = short.start(prompts, roots, t.prefill(cache, prompts, short.needs).hidden_states)
        known = np.array(lengths) < 12
        assert (state.own.cache.lengths == np.where(known, lengths, 0)).all(), (
            "such a prompt is not read, the others are"
        )
        candidates, _ = short.expand(state, Tree.from_roots(rows, roots), rows, 2, Drawing())
        assert ((candidates.log_q > -np.inf) == known[:, None]).all()
        requests = [Request(p.tolist(), 9, number=n) for n, p in enumerate(prompts)]
        plain = [Engine(t, short, Chain(3), costs=COSTS).plain([r]).tokens[0] for r in requests]
        script = Always([[*r.prompt, *p] for r, p in zip(requests, plain, strict=True)], VOCAB)
        assert (
            Engine(t, Coached(short, script), Chain(3), costs=COSTS).write(requests).tokens == plain
        )


def test_a_text_that_outgrows_its_cache_goes_on() -> None:
    """Beyond the spare slots the cache is laid out anew, in the middle of a text."""
    suite = Suite()
    drafter = drafter_of(suite.target)
    prompt = suite.prompt(5)
    plain = (
        Engine(suite.target, drafter, VCT(2, 2), costs=COSTS).plain([Request(prompt, 20)]).tokens
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glide, "SPARE_SLOTS", 1)
        engine = Engine(suite.target, drafter, VCT(2, 2), costs=COSTS)
        assert engine.write([Request(prompt, 20)], Sampling()).tokens == plain
