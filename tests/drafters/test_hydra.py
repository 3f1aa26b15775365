"""Hydra: what it is trained as is what it decodes as, and both published layouts are read and written back."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu
from transformers import LlamaModel

from architectures import VOCAB, target
from drafting import after_all, perturbed
from draftree.costs.step_costs import Costs
from draftree.doctor import forward_parity
from draftree.drafters import hydra
from draftree.drafters.base import Batch
from draftree.drafters.hydra import OFFICIAL_FILE, Arch, Hydra, HydraDrafter
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.policies.vct import VCT
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import CHUNK, HiddenStateSpec, Target
from draftree.tree import AcceptResult, Tree
from forests import NOISE, attach, texts, worst

ARCHS: tuple[Arch, ...] = ("prefix-mlp", "mlp")
WIDTH = 32
INNER = 48
KEYS = 16
LAST = -1
COSTS = Costs({1: 0.1}, {1: 1.0})


def drafter_of(t: Target, **knobs: int | str) -> HydraDrafter:
    return perturbed(Hydra(**{"heads": 3, **knobs}), t, 0.2)  # type: ignore[return-value]


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    t = target("llama")
    drafter, prompts = drafter_of(t), texts([11, 4, 9], np.random.default_rng(4))
    hidden_states = t.prefill(t.new_cache(3, 16), prompts, drafter.needs).hidden_states
    assert max(map(len, prompts)) < CHUNK
    whole = drafter.start(prompts, np.arange(3), hidden_states)
    monkeypatch.setattr(hydra, "CHUNK", 3)
    parts = drafter.start(prompts, np.arange(3), hidden_states)
    assert whole.cache.lengths.tolist() == parts.cache.lengths.tolist() == [11, 4, 9]
    assert worst(whole.prefix, parts.prefix) < NOISE


def test_rows_that_have_ended_keep_their_state() -> None:
    t = target("llama")
    drafter = drafter_of(t)
    prompts = texts([5, 3, 4], np.random.default_rng(2))
    roots = np.array([4, 5, 6])
    cache = t.new_cache(3, 16)
    state = drafter.start(prompts, roots, t.prefill(cache, prompts, drafter.needs).hidden_states)
    live = Tree.from_roots(np.array([0, 2]), roots[[0, 2]])
    verified = t.verify(cache, live, drafter.needs)
    after = drafter.commit(
        state, live, AcceptResult((roots[:0],) * 2, roots[:2]), verified.hidden_states
    )
    assert torch.equal(after.prefix, state.prefix), "nothing is read before a draft is asked for"
    _, after = drafter.expand(after, live, np.arange(2), 1, Drawing())
    assert after.hidden.lengths.tolist() == after.read.tolist() == [6, 3, 5]
    assert torch.equal(after.prefix[1], state.prefix[1])
    assert not torch.equal(after.prefix[[0, 2]], state.prefix[[0, 2]])


def test_siblings_have_continuations_of_their_own_and_the_last_head_none() -> None:
    t = target("llama")
    drafter = drafter_of(t, heads=2)
    prompts, roots = texts([5, 3], np.random.default_rng(2)), np.array([4, 5])
    state = drafter.start(
        prompts, roots, t.prefill(t.new_cache(2, 16), prompts, drafter.needs).hidden_states
    )
    tree = attach(Tree.from_roots(np.arange(2), roots), [0, 0, 1, 2], [3, 4, 3, 6])
    found, _ = drafter.expand(state, tree, np.array([5, 3, 0, 4, 2]), 3, Drawing())
    assert found.log_probs is not None
    assert (found.log_q[0] == -np.inf).all()
    assert (found.tokens[0] == 0).all()
    assert np.allclose(found.log_probs[0].exp(), 1 / VOCAB)
    for one in range(1, 5):
        for other in range(one + 1, 5):
            assert worst(found.log_probs[one], found.log_probs[other]) > 1e-3
    alone = [
        drafter.expand(state, tree, np.array([n]), 3, Drawing())[0].log_probs for n in (3, 0, 4, 2)
    ]
    assert worst(torch.cat([q for q in alone if q is not None]), found.log_probs[1:]) < NOISE


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_the_loss_is_that_of_each_learnt_token_and_head(kind: str, arch: Arch) -> None:
    t = target("llama")
    drafter = drafter_of(t, loss=kind, arch=arch)
    batch = forward_parity.batch_of(t, drafter, np.stack(texts([9, 9], np.random.default_rng(3))))
    learn = torch.tensor(
        [[0, 1, 1, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0, 1]], dtype=torch.bool
    )
    logits = after_all(batch)
    batch = Batch(
        batch.tokens, learn, batch.hidden, {}, lambda at: logits[at], batch.generators, 5.0
    )
    drafts = [forwards_of(drafter, batch, head) for head in range(3)]
    wanted = torch.zeros(())
    for row, place in learn.nonzero().tolist():
        for head in range(min(3, place - 1)):
            q = (
                drafts[head][row, place - 1].float().log_softmax(-1)
            )  # after the token before the learnt one
            p = torch.softmax(logits[row, place - 1].float(), -1)
            ce = cross_entropy(q, batch.tokens[row, place])
            wanted = wanted + (ce if kind == "ce" else (p * (p.log() - q)).sum())
    assert drafter.loss(batch).item() == pytest.approx(wanted.item() / 5, rel=1e-5)


@torch.no_grad()
def forwards_of(drafter: HydraDrafter, batch: Batch, head: int) -> Tensor:
    """[B, T, V] logits of one head wherever it has a block before it: every phase of blocks of its length, put together."""
    found = torch.zeros(*batch.tokens.shape, VOCAB, dtype=torch.float64)
    for phase in range(head + 1):
        at = torch.arange(batch.tokens.shape[1])
        last = (at + phase) % (head + 1) == head
        found[:, last] = drafter.forward(batch, head + 1, phase)[:, last]
    return found


def test_a_fresh_head_ends_in_the_lm_head_and_its_blocks_are_one() -> None:
    t = target("llama")
    drafter = Hydra().fresh(t)
    head = t.decoder.model.get_output_embeddings()
    for mlp, (_, last) in zip(drafter.model.hydra_mlp, drafter.model.hydra_lm_head, strict=True):
        assert torch.equal(last.weight, head.weight.float())
        assert not last.bias.any()
        assert mlp[3] is mlp[5] is mlp[7]
        assert not mlp[1].linear.weight.any()


def test_half_precision_does_not_round_the_positions() -> None:
    t = target("llama")
    drafter = Hydra().fresh(t)
    drafter.model.half()
    frequencies = next(drafter.model.rotary._embedding.buffers())
    assert frequencies.dtype == torch.float32
    assert not torch.equal(frequencies, frequencies.half().float())


def test_drafter_reads_the_last_hidden_state_alone() -> None:
    assert drafter_of(target("llama")).needs == HiddenStateSpec(hidden=(LAST,))


# Checkpoints.


def official(
    arch: Arch = "prefix-mlp",
    heads: int = 4,
    layers: int = 4,
    width: int = WIDTH,
    vocab: int = VOCAB,
) -> dict[str, Tensor]:
    """Random tensors as the official file has them, in float16."""
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()

    def put(name: str, *shape: int) -> None:
        tensors[name] = (0.3 * torch.randn(*shape, generator=generator)).half()

    deep = arch == "prefix-mlp"
    put("input_embed_fn.weight", vocab, width)
    if deep:
        put("prefix_embeding_layer.embed_tokens.weight", vocab, width)
        inside = "prefix_embeding_layer.layers.0."
        for name, shape in (
            ("q", (WIDTH, width)),
            ("k", (KEYS, width)),
            ("v", (KEYS, width)),
            ("o", (width, WIDTH)),
        ):
            put(f"{inside}self_attn.{name}_proj.weight", *shape)
        tensors[f"{inside}self_attn.rotary_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
        for name, shape in (
            ("gate", (INNER, width)),
            ("up", (INNER, width)),
            ("down", (width, INNER)),
        ):
            put(f"{inside}mlp.{name}_proj.weight", *shape)
        for name in (
            f"{inside}input_layernorm",
            f"{inside}post_attention_layernorm",
            "prefix_embeding_layer.norm",
        ):
            put(f"{name}.weight", width)
    for i in range(heads):
        first, *rest = [f"hydra_mlp.{i}.{2 * j + 1 if deep else j}." for j in range(layers)]
        for part in ("linear", "res_connection"):
            put(f"{first}{part}.weight", width, (i + 2) * width)
            put(f"{first}{part}.bias", width)
        put(f"{rest[0]}linear.weight", width, width)
        put(f"{rest[0]}linear.bias", width)
        for name in rest[1:]:
            tensors |= {
                f"{name}linear.{p}": tensors[f"{rest[0]}linear.{p}"] for p in ("weight", "bias")
            }
        put(f"hydra_lm_head.{i}.{'1.' if deep else ''}weight", vocab, width)
        put(f"hydra_lm_head.{i}.{'1.' if deep else ''}bias", vocab)
    return tensors


def published(folder: Path, tensors: dict[str, Tensor], **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": "lmsys/x",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_num_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.save(tensors, folder / "hydra_lm_head.pt")


@torch.no_grad()
def by_hand(
    t: Target, tensors: dict[str, Tensor], arch: Arch, hidden: Tensor, path: list[int]
) -> Tensor:
    """Log q [V] after a path that begins with the root, behind hidden states [N, D]; the prefix layer is a stock Llama."""
    tensors = {k: v.double() for k, v in tensors.items()}
    if arch == "prefix-mlp":
        inside = "prefix_embeding_layer."
        config = t.decoder.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}
        stock = LlamaModel(type(t.decoder.config)(**config)).double()
        names = {
            k.removeprefix(inside): v
            for k, v in tensors.items()
            if k.startswith(inside) and "inv_freq" not in k
        }
        stock.load_state_dict(names)
        hidden = stock(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
    head, deep = len(path) - 1, arch == "prefix-mlp"
    x = torch.cat([hidden[-1], *(tensors["input_embed_fn.weight"][token] for token in path)])

    def apply(name: str, x: Tensor) -> Tensor:
        return linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    first, second = (f"hydra_mlp.{head}.{place}." for place in ((1, 3) if deep else (0, 1)))
    x = apply(f"{first}res_connection", x) + silu(apply(f"{first}linear", x))
    for _ in range(3):
        x = x + silu(apply(f"{second}linear", x))
    return apply(f"hydra_lm_head.{head}" + (".1" if deep else ""), x).log_softmax(-1)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_published_layouts_are_recognised_read_and_written_back(
    arch: Arch, tmp_path: Path
) -> None:
    t, tensors = target("llama"), official(arch)
    published(tmp_path / "there", tensors, hydra_head_arch=arch)
    drafter = build("drafter", str(tmp_path / "there")).open(t)
    assert isinstance(drafter, HydraDrafter)
    assert (drafter.knobs.heads, drafter.knobs.layers, drafter.knobs.arch) == (4, 4, arch), (
        "as the file, not as the config says"
    )
    prompt, path = texts([7], np.random.default_rng(0)), [4, 9, 5, 8]
    hidden_states = t.prefill(t.new_cache(1, 16), prompt, drafter.needs).hidden_states
    state, tree = (
        drafter.start(prompt, np.array(path[:1]), hidden_states),
        attach(Tree.from_roots(np.arange(1), np.array([4])), [0, 1, 2], path[1:]),
    )
    found, _ = drafter.expand(state, tree, np.arange(4), 1, Drawing())
    assert found.log_probs is not None
    for depth in range(4):
        assert (
            worst(
                found.log_probs[depth],
                by_hand(t, tensors, arch, hidden_states.hidden[LAST], path[: depth + 1]),
            )
            < NOISE
        )
    request = Request([5, 6, 7], 6)
    engine = Engine(t, drafter, VCT(2, 3), costs=COSTS)
    assert engine.write([request]).tokens == engine.plain([request]).tokens
    drafter.save(tmp_path / "copy")
    assert sorted(f.name for f in (tmp_path / "copy").iterdir()) == [
        "config.json",
        "hydra_lm_head.pt",
    ]
    assert same(torch.load(tmp_path / "copy" / "hydra_lm_head.pt", weights_only=True), tensors)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (
        config["base_model_name_or_path"],
        config["hydra_num_heads"],
        config["hydra_head_arch"],
    ) == ("lmsys/x", 4, arch)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in theirs
    )


def test_without_an_embedding_of_its_own_it_reads_the_targets(tmp_path: Path) -> None:
    t, tensors = target("llama"), official()
    other = tensors.pop("input_embed_fn.weight")
    embedding = t.decoder.model.get_input_embeddings().weight
    published(tmp_path, tensors)
    drafter = Hydra(str(tmp_path)).open(t)
    assert drafter.model.embed(torch.tensor([4])).equal(embedding[[4]])
    assert not embedding[4].equal(other[4].double())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layers", [1, 3])
def test_ours_is_written_as_published_and_read_back(
    arch: Arch, layers: int, tmp_path: Path
) -> None:
    t = target("qwen3")
    drafter = drafter_of(t, arch=arch, layers=layers, loss="ce")
    drafter.save(tmp_path)
    written = load_file(tmp_path / OFFICIAL_FILE)
    assert not any("embed" in name.removeprefix("prefix_embeding") for name in written)
    if layers > 1:
        assert written.keys() == official(arch, 3, layers).keys() - {
            "input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight",
            "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
        }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hydra_head_arch"], config["hydra_num_heads"], config["hydra_num_layers"]) == (
        arch,
        3,
        layers,
    )
    opened = build("drafter", str(tmp_path)).open(t)
    assert opened.knobs == Hydra(str(tmp_path), 3, layers, arch, "ce")
    for ours, theirs in zip(opened.model.parameters(), drafter.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.half().double())


def broken(change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    tensors = official()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (
            broken(lambda t: t.pop("hydra_mlp.2.5.linear.bias")),
            r"missing tensors: hydra_mlp\.2\.5\.linear\.bias",
        ),
        (
            broken(lambda t: t.pop("hydra_lm_head.3.1.bias")),
            r"missing tensors: hydra_lm_head\.3\.1\.bias",
        ),
        (
            broken(lambda t: t.update({"norm.weight": torch.ones(2)})),
            r"foreign tensors: norm\.weight",
        ),
        (
            broken(lambda t: t.update({"hydra_mlp.1.1.linear.weight": torch.ones(32, 64)})),
            r"mis-shaped tensors: hydra_mlp\.1\.1\.linear\.weight \[32, 64\] \(allowed \[32, 96\]\)",
        ),
        (
            broken(lambda t: t.update({"hydra_mlp.1.7.linear.weight": torch.ones(32, 32)})),
            r"different tensors hydra_mlp\.1\.5\.linear\.weight and hydra_mlp\.1\.7\.linear\.weight",
        ),
        (official(width=16), "hidden_size 16, allowed is the target's: 32"),
        (official(vocab=70), "vocab_size 70, allowed is the target's: 71"),
        ({"fc.weight": torch.zeros(2)}, "no Hydra heads"),
    ],
    ids=[
        "missing",
        "bias-missing",
        "foreign",
        "mis-shaped",
        "aliases",
        "width",
        "vocabulary",
        "no-heads",
    ],
)
def test_unfitting_tensors_are_named(tensors: dict[str, Tensor], told: str, tmp_path: Path) -> None:
    published(tmp_path, tensors)
    with pytest.raises(UserError, match=told):
        Hydra(str(tmp_path)).open(target("llama"))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("grounded_heads", False, "true"),
        ("hidden_state_offset", 1, "0"),
        ("hydra_head_arch", "eagle-attn", "prefix-mlp or mlp"),
    ],
)
def test_variants_that_are_not_decoded_are_refused(
    key: str, value: object, allowed: str, tmp_path: Path
) -> None:
    published(tmp_path, official(), **{key: value})
    with pytest.raises(UserError, match=f"{key} {str(value).lower()}, allowed is {allowed}"):
        Hydra(str(tmp_path)).open(target("llama"))


def test_safetensors_in_the_same_naming_are_read(tmp_path: Path) -> None:
    published(tmp_path, {})
    (tmp_path / "hydra_lm_head.pt").unlink()
    save_file({k: v.clone() for k, v in official().items()}, tmp_path / OFFICIAL_FILE)
    assert Hydra(str(tmp_path)).open(target("llama")).knobs.heads == 4
