"""Medusa: what it is trained as is what it decodes as, and every published layout is read and written back."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from architectures import VOCAB, target
from drafting import after_all, perturbed
from draftree.costs.step_costs import Costs
from draftree.doctor import forward_parity
from draftree.drafters.base import Batch
from draftree.drafters.medusa import Medusa, MedusaDrafter
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.formats.medusa import HEADS_FILE, from_vllm, to_vllm
from draftree.policies.vct import VCT
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import Keyed
from draftree.sampling.params import Sampling
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import Candidates, Draw, Tree
from forests import attach, texts

WIDTH = 32
COSTS = Costs({1: 0.1}, {1: 1.0})
LAST = -1


def drafter_of(t: Target, heads: int = 4, layers: int = 1, **knobs: float) -> MedusaDrafter:
    return perturbed(Medusa(heads=heads, layers=layers, **knobs), t, 0.2)  # type: ignore[return-value]


def test_a_fresh_head_is_the_lm_head_behind_a_small_step() -> None:
    t = target("llama")
    torch.manual_seed(0)
    drafter = Medusa(heads=3, layers=2).fresh(t)
    assert [n for n, _ in drafter.model.named_parameters()][:5] == [
        "0.0.linear.weight", "0.0.linear.bias", "0.1.linear.weight", "0.1.linear.bias", "0.2.weight",
    ]  # fmt: skip
    theirs = t.decoder.model.get_output_embeddings().weight
    for head in drafter.model:
        assert torch.equal(head[-1].weight, theirs.float())
        for block in head[:-1]:
            assert not block.linear.weight.any()
            assert block.linear.bias.any()


def test_heads_are_computed_once_a_step_and_only_where_asked() -> None:
    t = target("llama")
    drafter, calls = drafter_of(t), [0] * 4
    for i, head in enumerate(drafter.model):
        head.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    state, tree = started(t, drafter, [5, 3])
    _, state = drafter.expand(state, tree, np.arange(1), 2, Drawing())
    assert calls == [1, 0, 0, 0]
    tree = attach(tree, [0, 0, 1, 2], [3, 4, 5, 6])
    for frontier in ([1], [2, 3], [0, 4, 5], [4, 5]):
        _, state = drafter.expand(state, tree, np.array(frontier), 2, Drawing())
    assert calls == [1, 1, 1, 0]


def started(t: Target, drafter: MedusaDrafter, lengths: list[int]) -> tuple[object, Tree]:
    prompts, roots = texts(lengths, np.random.default_rng(2)), np.arange(4, 4 + len(lengths))
    hidden_states = t.prefill(t.new_cache(len(lengths), 16), prompts, drafter.needs).hidden_states
    return drafter.start(prompts, roots, hidden_states), Tree.from_roots(
        np.arange(len(lengths)), roots
    )


@pytest.mark.parametrize("kind", list(Draw))
def test_nodes_of_a_depth_and_row_share_one_list_unless_it_is_sampled(kind: Draw) -> None:
    t = target("llama")
    drafter = drafter_of(t, heads=2)
    state, tree = started(t, drafter, [5, 3])
    tree = attach(
        tree, [0, 0, 1, 2, 4], [3, 4, 5, 6, 7]
    )  # nodes 2, 3 and 5 below row 0, 4 below row 1, and one node too deep
    drawing = Drawing(kind, [Sampling(1.0)] * 2, Keyed(0, np.arange(2), np.full(2, 5)))
    found, state = drafter.expand(state, tree, np.array([3, 4, 2, 6, 5, 0]), 3, drawing)
    assert tree.depth[[3, 4, 2, 6, 5, 0]].tolist() == [1, 1, 1, 2, 2, 0]
    assert found.log_probs is not None
    assert found.draw is kind
    assert np.array_equal(found.tokens[0], found.tokens[2]) == (not kind.is_sampled)
    assert torch.equal(found.log_probs[0], found.log_probs[2])
    assert not torch.equal(found.log_probs[0], found.log_probs[1])
    assert not torch.equal(found.log_probs[0], found.log_probs[5])
    assert (found.log_q[3:5] == -np.inf).all()
    assert (found.tokens[3:5] == 0).all()
    if kind is not Draw.COUPLED:  # which knows the noise of these places, too
        assert np.allclose(found.log_probs[3:5].exp(), 1 / VOCAB)
    assert np.isfinite(found.log_q[[0, 1, 2, 5]]).all()
    entropies = Candidates(found.tokens, found.log_q, found.log_probs).entropy()
    assert entropies[0] == entropies[2]


def test_rows_that_have_ended_keep_their_state() -> None:
    t = target("llama")
    drafter = drafter_of(t)
    state, tree = started(t, drafter, [5, 3, 4])
    cache = t.new_cache(3, 16)
    t.prefill(cache, texts([5, 3, 4], np.random.default_rng(2)), drafter.needs)
    live = Tree.from_roots(np.array([0, 2]), tree.tokens[[0, 2]])
    hidden_states = t.verify(cache, live, drafter.needs).hidden_states
    after = drafter.commit(state, live, None, hidden_states)  # type: ignore[arg-type]
    assert torch.equal(after.hidden[1], state.hidden[1])
    assert torch.equal(after.hidden[[0, 2]], hidden_states.hidden[LAST])
    assert after.logits == ()


@pytest.mark.parametrize("distil", [0.0, 0.25, 1.0])
def test_the_loss_is_that_of_each_learnt_token_and_head(distil: float) -> None:
    t = target("llama")
    drafter = drafter_of(t, heads=3, decay=0.7, distil=distil)
    tokens = np.stack(texts([9, 9], np.random.default_rng(3)))
    batch = forward_parity.batch_of(t, drafter, tokens)
    learn = torch.tensor(
        [[0, 1, 1, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0, 1]], dtype=torch.bool
    )
    batch = Batch(batch.tokens, learn, batch.hidden, {}, only(batch), batch.generators, 5.0)
    wanted = torch.zeros(())
    for row, place in learn.nonzero().tolist():
        for i, head in enumerate(drafter.model):
            if (at := place - 2 - i) >= 0:
                logits = head(batch.hidden[LAST][row, at]).float()
                p = torch.softmax(after_all(batch)[row, place - 1].float(), -1)
                ce = cross_entropy(logits, batch.tokens[row, place])
                kl = (p * (p.log() - logits.log_softmax(-1))).sum()
                wanted = wanted + 0.7 ** (i + 1) * ((1 - distil) * ce + distil * kl)
    assert drafter.loss(batch).item() == pytest.approx(wanted.item() / 5, rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_text_shorter_than_the_heads_reach_is_learnt_by_the_first_ones(length: int) -> None:
    t = target("llama")
    drafter = drafter_of(t, heads=5)
    tokens = np.stack(texts([length], np.random.default_rng(3)))
    batch = forward_parity.batch_of(t, drafter, tokens)
    learn = torch.ones(1, length, dtype=torch.bool)
    batch = Batch(batch.tokens, learn, batch.hidden, {}, only(batch), batch.generators, 5.0)
    loss = drafter.loss(batch).item()
    assert loss > 0 if length > 2 else loss == 0


def only(batch: Batch) -> Callable[[Tensor], Tensor]:
    logits = after_all(batch)
    return lambda at: logits[at]


# Checkpoints.

Writer = Callable[[Path, dict[str, Tensor]], dict[str, Tensor]]
"""Writes official tensors into a folder in some layout; returns those that a saved copy must hold.
"""


def official(
    heads: int = 5, layers: int = 1, width: int = WIDTH, vocab: int = VOCAB, seed: int = 0
) -> dict[str, Tensor]:
    """Random tensors as the official file has them."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = 0.3 * torch.randn(width, width, generator=generator)
            tensors[f"{i}.{j}.linear.bias"] = 0.3 * torch.randn(width, generator=generator)
        tensors[f"{i}.{layers}.weight"] = 0.3 * torch.randn(vocab, width, generator=generator)
    return {k: v.bfloat16() for k, v in tensors.items()}


def configure(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))


def v13(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    configure(folder, base_model_name_or_path="lmsys/x", medusa_num_heads=2, medusa_num_layers=1)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return tensors


def safe(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    configure(folder, base_model_name_or_path="lmsys/x")
    save_file(tensors, folder / HEADS_FILE)
    return tensors


def legacy(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return safe(folder, {k: v for k, v in tensors.items() if "linear" in k})


def merged(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    configure(folder, model_type="llama", hidden_size=WIDTH)
    whole = {f"medusa_head.{k}": v for k, v in tensors.items()} | {
        "model.norm.weight": torch.ones(WIDTH)
    }
    save_file(whole, folder / "model.safetensors")
    return tensors


def merged_pickle(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    configure(folder, model_type="llama", hidden_size=WIDTH)
    whole = {f"medusa_head.{k}": v for k, v in tensors.items()} | {
        "model.norm.weight": torch.ones(WIDTH)
    }
    torch.save(whole, folder / "pytorch_model.bin")
    return tensors


def sharded(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In three files; the first holds nothing of the heads."""
    configure(folder, model_type="llama", hidden_size=WIDTH)
    whole = {f"medusa_head.{k}": v for k, v in tensors.items()}
    parts = [
        {"model.norm.weight": torch.ones(WIDTH)},
        dict(list(whole.items())[:7]),
        dict(list(whole.items())[7:]),
    ]
    places = {}
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i}.safetensors")
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tensors


def vllm(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    config, renamed = to_vllm({}, tensors)
    configure(folder, **config)
    save_file(renamed, folder / "model.safetensors")
    return renamed


def vllm_without_biases(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    config, renamed = to_vllm({}, tensors)
    configure(folder, **config | {"medusa_fc_bias": False})
    for name in [n for n in renamed if n.endswith("bias")]:
        del renamed[name]
        tensors[
            name.replace("blocks.", "").replace("layers.", "").replace(".bias", ".linear.bias")
        ].zero_()
    save_file(renamed, folder / "model.safetensors")
    return renamed


def vllm_with_one_head(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    config, renamed = to_vllm({}, tensors)
    configure(folder, **config | {"original_lm_head": True})
    renamed = {
        k: v
        for k, v in renamed.items()
        if not k.startswith("lm_heads.") or k == "lm_heads.0.weight"
    }
    tensors |= {k: tensors["0.1.weight"] for k in tensors if k.endswith(".1.weight")}
    save_file(renamed, folder / "model.safetensors")
    return renamed


WRITERS = (
    v13,
    safe,
    legacy,
    merged,
    merged_pickle,
    sharded,
    vllm,
    vllm_without_biases,
    vllm_with_one_head,
)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
def test_published_layouts_are_recognised_read_and_written_back(
    writer: Writer, tmp_path: Path
) -> None:
    t, tensors = target("llama"), official()
    wanted = writer(tmp_path / "there", tensors)
    drafter = build("drafter", str(tmp_path / "there")).open(t)
    assert isinstance(drafter, MedusaDrafter)
    assert (drafter.knobs.heads, drafter.knobs.layers) == (5, 1), (
        "as many as the file holds, whatever the config says"
    )
    states = torch.randn(3, WIDTH, dtype=torch.float64)
    for i, head in enumerate(drafter.model):
        theirs = by_hand(
            {k: v.double() for k, v in tensors.items()}, i, states, t if writer is legacy else None
        )
        assert (head(states) - theirs).abs().max() < 1e-9
    request = Request([5, 6, 7], 6)
    engine = Engine(t, drafter, VCT(2, 3), costs=COSTS)
    assert engine.write([request]).tokens == engine.plain([request]).tokens
    drafter.save(tmp_path / "copy")
    assert same(stored(tmp_path / "copy"), wanted)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert "model_type" not in config or config["model_type"] == "medusa"
    assert config.get("medusa_num_heads", config.get("num_heads")) == 5
    again = build("drafter", str(tmp_path / "copy")).open(t)
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.model.parameters(), drafter.model.parameters(), strict=True)
    )


def by_hand(tensors: dict[str, Tensor], i: int, x: Tensor, t: Target | None) -> Tensor:
    x = x + silu(x @ tensors[f"{i}.0.linear.weight"].T + tensors[f"{i}.0.linear.bias"])
    return (
        x
        @ (
            tensors[f"{i}.1.weight"]
            if t is None
            else t.decoder.model.get_output_embeddings().weight
        ).T
    )


def stored(folder: Path) -> dict[str, Tensor]:
    files = [f for f in folder.iterdir() if f.suffix in (".pt", ".safetensors", ".bin")]
    assert len(files) == 1
    return (
        load_file(files[0])
        if files[0].suffix == ".safetensors"
        else torch.load(files[0], weights_only=True)
    )


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in theirs
    )


def test_a_file_keeps_its_name(tmp_path: Path) -> None:
    v13(tmp_path / "there", official())
    Medusa(str(tmp_path / "there")).open(target("llama")).save(tmp_path / "copy")
    assert sorted(f.name for f in (tmp_path / "copy").iterdir()) == [
        "config.json",
        "medusa_lm_head.pt",
    ]


def test_merged_model_gives_its_heads_alone(tmp_path: Path) -> None:
    sharded(tmp_path, official())
    (tmp_path / "model-0.safetensors").unlink()
    assert Medusa(str(tmp_path)).open(target("llama")).knobs.heads == 5


@pytest.mark.parametrize("layers", [1, 3])
def test_ours_is_written_as_published_and_read_back(layers: int, tmp_path: Path) -> None:
    t = target("qwen3")
    drafter = drafter_of(t, heads=3, layers=layers, decay=0.9)
    drafter.save(tmp_path)
    assert {k: list(v.shape) for k, v in load_file(tmp_path / HEADS_FILE).items()} == {
        k: list(v.shape) for k, v in official(3, layers).items()
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert {k: config[k] for k in ("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers")} == {
        "base_model_name_or_path": "qwen3", "medusa_num_heads": 3, "medusa_num_layers": layers,
    }  # fmt: skip
    opened = build("drafter", str(tmp_path)).open(t)
    assert (opened.knobs.heads, opened.knobs.layers, opened.knobs.decay) == (3, layers, 0.9)
    for ours, theirs in zip(opened.model.parameters(), drafter.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.half().double())


@pytest.mark.parametrize("layers", [1, 2])
def test_the_layout_of_vllm_is_a_renaming(layers: int) -> None:
    tensors = official(3, layers)
    config, renamed = to_vllm({"base_model_name_or_path": "x", "medusa_num_heads": 2}, tensors)
    assert config["num_heads"] == 3
    assert config["num_hidden_layers"] == layers
    assert (config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]) == (
        WIDTH,
        VOCAB,
        VOCAB,
    )
    assert set(renamed) == {
        f"blocks.{i}.layers.{j}.{p}"
        for i in range(3)
        for j in range(layers)
        for p in ("weight", "bias")
    } | {f"lm_heads.{i}.weight" for i in range(3)}
    back, again = from_vllm(config, renamed)
    assert back == {
        "base_model_name_or_path": "x",
        "medusa_num_heads": 3,
        "medusa_num_layers": layers,
    }
    assert same(again, tensors)


def broken(change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    tensors = official()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (broken(lambda t: t.pop("2.0.linear.bias")), r"missing tensors: 2\.0\.linear\.bias"),
        (broken(lambda t: t.pop("2.1.weight")), r"missing tensors: 2\.1\.weight"),
        (
            broken(lambda t: t.update({"2.1.bias": torch.zeros(VOCAB)})),
            r"foreign tensors: 2\.1\.bias",
        ),
        (
            broken(lambda t: t.update({"3.1.weight": torch.zeros(3, WIDTH)})),
            r"mis-shaped tensors: 3\.1\.weight \[3, 32\]",
        ),
        (official(width=16), "hidden_size 16, allowed is the target's: 32"),
        (official(vocab=70), "vocab_size 70, allowed is the target's: 71"),
        ({"fc.weight": torch.zeros(2)}, "no Medusa heads"),
    ],
    ids=["missing", "linear-missing", "foreign", "mis-shaped", "width", "vocabulary", "no-heads"],
)
def test_unfitting_tensors_are_named(tensors: dict[str, Tensor], told: str, tmp_path: Path) -> None:
    v13(tmp_path, tensors)
    with pytest.raises(UserError, match=told):
        Medusa(str(tmp_path)).open(target("llama"))


def test_heads_over_part_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    vllm(tmp_path, official())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(UserError, match="truncated_vocab_size=71; allowed"):
        Medusa(str(tmp_path)).open(target("llama"))


def test_drafter_reads_the_last_hidden_state_alone() -> None:
    assert drafter_of(target("llama")).needs == HiddenStateSpec(hidden=(LAST,))
    assert isinstance(drafter_of(target("llama")).model, nn.ModuleList)
