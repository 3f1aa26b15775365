"""The layer of DeepSeek-V3's kind, in the target's checkpoint or alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from draftree.acceptors.greedy import Greedy
from draftree.doctor import forward_parity
from draftree.drafters.mtp import (
    INPUT_VARIANTS,
    MTP,
    MTPNet,
    names_in_qwen3_next,
    stack_experts,
    unstack_experts,
)
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.causal_lm import CausalLM
from draftree.policies.chain import Chain
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Tree
from forests import worst
from hybrids import hybrid

PRECISION = 3e-5
"""Of float32: the experts are not computed in float64."""

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers that carries a fourth for multi-token prediction, as DeepSeek-V3's does."""
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    whole = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, num_hidden_layers=4))
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    begin = "model.layers.3."
    tensors |= {
        f"{begin}{n}.weight": 1 + 0.1 * torch.randn(32)
        for n in ("enorm", "hnorm", "shared_head.norm")
    }
    tensors[f"{begin}eh_proj.weight"] = 0.2 * torch.randn(32, 64)
    tensors[f"{begin}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{begin}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_layer_a_checkpoint_carries(deepseek: Path, tmp_path: Path) -> None:
    """It opens from the target's own folder, drafts, is trained as it decodes, and is written back bit for bit."""
    target = Target.load(str(deepseek), torch.float32)
    drafter = build("drafter", str(deepseek)).open(target)
    assert isinstance(drafter.knobs, MTP)
    tokens = np.random.default_rng(0).integers(3, 61, (2, 15))
    assert forward_parity.largest_difference(target, drafter, tokens, 4, 1) < PRECISION
    engine = Engine(target, drafter, Chain(length=3), Greedy())
    request = Request([5, 6, 7, 8], 12, frozenset())
    assert engine.write([request]).tokens == engine.plain([request]).tokens
    drafter.save(tmp_path)
    carried = {
        k: v
        for k, v in load_file(deepseek / "model.safetensors").items()
        if k.startswith("model.layers.3.")
    }
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == carried.keys()
    assert all(torch.equal(written[k], v) for k, v in carried.items())


def test_the_carried_layer_reads_its_tensors_in_their_places(deepseek: Path) -> None:
    """The draft distribution after the root, by hand from the named tensors, for a prompt of one token.

    With one pair attention is the value alone; the layer's other parts are transformers' own.
    """
    target = Target.load(str(deepseek), torch.float32)
    drafter = build("drafter", f"mtp:checkpoint={deepseek},first=normed").open(target)
    raw = {
        k.removeprefix("model.layers.3."): v
        for k, v in load_file(deepseek / "model.safetensors").items()
    }
    verified = target.prefill(target.new_cache(1, 8), [np.array([5])], drafter.needs)
    state = drafter.start([np.array([5])], np.array([9]), verified.hidden_states)
    root = Tree.from_roots(np.zeros(1, np.int64), np.array([9]))
    _, state = drafter.expand(state, root, np.zeros(1, np.int64), 1, Drawing())

    def norm(x: Tensor, name: str) -> Tensor:
        return raw[f"{name}.weight"] * x / torch.sqrt((x * x).mean() + 1e-6)

    embedded = raw["embed_tokens.weight"][9]
    x = raw["eh_proj.weight"] @ torch.cat(
        (norm(embedded, "enorm"), norm(verified.hidden_states.hidden[-1][0], "hnorm"))
    )
    low = raw["self_attn.kv_a_proj_with_mqa.weight"] @ norm(x, "input_layernorm")
    values = (raw["self_attn.kv_b_proj.weight"] @ norm(low[:8], "self_attn.kv_a_layernorm")).view(
        4, 12
    )[:, 4:]
    attended = x + raw["self_attn.o_proj.weight"] @ values.flatten()
    with torch.no_grad():
        out = (
            attended
            + drafter.model.layer.layer.mlp(norm(attended, "post_attention_layernorm")[None, None])[
                0, 0
            ]
        )
        assert worst(out, state.outputs[0]) < PRECISION
        logits = raw["shared_head.head.weight"] @ norm(out, "shared_head.norm")
        assert worst(logits, drafter.model.logits(out[None])[0]) < PRECISION


PUBLISHED: dict[str, dict[str, str]] = {
    "glm4_moe": {
        ".mtp_block.": ".", ".post_norm.": ".shared_head.norm.", "layers.0.": "model.layers.3.",
        "layers.1.": "model.layers.4.",
    },
    "mellum": {
        "layers.0.mtp_block.": "mtp.layers.0.", "layers.0.eh_proj.": "mtp.fc.", "layers.0.post_norm.": "mtp.norm.",
        "layers.0.enorm.": "mtp.pre_fc_norm_embedding.", "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    },
    "inkling": {
        ".mtp_block.": ".transformer_block.", ".enorm.": ".embed_norm.", ".hnorm.": ".hidden_norm.",
        ".eh_proj.": ".input_proj.",
        "layers.": "model.mtp.layers.", "shared_post_norm.": "model.mtp.chain_norm.",
    },
}  # fmt: skip
"""Of transformers' names, those that are published; what is Inkling's is given to layers of GLM-4.
"""


@pytest.mark.parametrize(
    ("names", "count"), [("glm4_moe", 1), ("glm4_moe", 2), ("mellum", 1), ("inkling", 2)]
)
def test_published_layers_are_transformers_own(names: str, count: int, tmp_path: Path) -> None:
    """Draft logits behind true pairs are those of transformers' `MtpModel`, whose tensors lie under the published names."""
    own = {
        "head_dim": 8,
        "num_experts": 4,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": count,
    }
    if names == "mellum":
        own["sliding_window"] = 8
    if names == "inkling":
        own |= {
            "mtp_hidden_states_first": True,
            "chain_hidden_post_norm": True,
            "first_k_dense_replace": 0,
        }
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mellum" if names == "mellum" else "glm4_moe",
        **{
            **SIZES,
            **own,
            "num_hidden_layers": 3,
            "pad_token_id": 0,
            "mtp_layer_types": ["full_attention"],
        },
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    head: Any = MtpModel(model, count).eval()
    tensors = {
        k: v for k, v in head.state_dict().items() if k.startswith(("layers.", "shared_post_norm."))
    }
    published = {}
    for name, tensor in tensors.items():
        torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.3)
        for theirs, ours in PUBLISHED[names].items():
            name = name.replace(theirs, ours) if theirs in name else name
        published[name] = tensor.clone()
    stored = load_file(tmp_path / "model.safetensors") | unstack_experts(published)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = Target.load(str(tmp_path), torch.float32)
    drafter: Any = build("drafter", f"mtp:checkpoint={tmp_path},first=normed,fed=normed").open(
        target
    )
    tokens = np.random.default_rng(0).integers(3, 61, (1, 9))
    ids, out = torch.from_numpy(tokens), []
    with torch.no_grad():
        states, cache = model.model(ids).last_hidden_state[:, :-1], MtpCache(config=head.config)
        for level in range(count):
            at = torch.arange(1 + level, 9)[None]
            states = head.forward_layer(level, states, at, cache, input_ids=ids[:, 1 + level :])
            out.append(model.lm_head(states).log_softmax(-1))
            states = states[:, :-1]
    for phase in range(count):
        ours = forward_parity.log_probs_of_both(target, drafter, tokens, count, phase)[0]
        for i in range(ours.shape[1]):
            place = 9 - ours.shape[1] + i
            level = (place + phase) % count
            assert worst(ours[:, i], out[level][:, place - 1 - level]) < 1e-3
    assert forward_parity.largest_difference(target, drafter, tokens, 4, 1) < PRECISION


def test_first_of_several_carried_layers_may_be_taken(deepseek: Path, tmp_path: Path) -> None:
    tensors = load_file(deepseek / "model.safetensors")
    tensors |= {
        k.replace("layers.3.", "layers.4."): 0 * v for k, v in tensors.items() if "layers.3." in k
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((deepseek / "config.json").read_text())
    spec = f"mtp:checkpoint={tmp_path},first=normed,fed=raw"
    assert build("drafter", spec).open(Target.load(str(deepseek))).model.levels == 2
    drafter: Any = build("drafter", f"{spec},layers=1").open(Target.load(str(deepseek)))
    with pytest.raises(UserError, match=r"layers is 3, allowed is what .* carries: up to 2"):
        build("drafter", f"{spec},layers=3").open(Target.load(str(deepseek)))
    assert torch.equal(
        drafter.model.layer.eh_proj.weight.float(), tensors["model.layers.3.eh_proj.weight"].float()
    )


def test_a_missing_tensor_is_named(deepseek: Path, tmp_path: Path) -> None:
    tensors = load_file(deepseek / "model.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((deepseek / "config.json").read_text())
    with pytest.raises(UserError, match=r"missing tensors: model\.layers\.3\.hnorm\.weight"):
        build("drafter", str(tmp_path)).open(Target.load(str(deepseek)))


def test_experts_are_stacked_and_taken_apart() -> None:
    torch.manual_seed(0)
    tensors = {
        f"l.mlp.experts.{e}.{p}_proj.weight": torch.randn((3, 5) if p != "down" else (5, 3))
        for e in range(11)
        for p in ("gate", "up", "down")
    }
    stacked = stack_experts(tensors | {"l.mlp.gate.weight": torch.ones(2)})
    assert stacked["l.mlp.experts.gate_up_proj"].shape == (11, 6, 5)
    assert torch.equal(
        stacked["l.mlp.experts.gate_up_proj"][10, 3:], tensors["l.mlp.experts.10.up_proj.weight"]
    )
    again = unstack_experts(stacked)
    assert again.keys() == tensors.keys() | {"l.mlp.gate.weight"}
    assert all(torch.equal(again[k], v) for k, v in tensors.items())


def test_a_target_whose_config_calls_its_sizes_otherwise(tmp_path: Path) -> None:
    """GPT-J says n_embd; what was trained for it must open again."""
    target = small("gptj", rotary_dim=4)
    MTP().fresh(target).save(tmp_path)
    assert build("drafter", str(tmp_path)).open(target).model.width == 32


def test_a_target_with_learnt_positions_is_refused() -> None:
    """They lie beside the layers: they would be random, and neither trained nor saved."""
    with pytest.raises(
        UserError, match=r"GPT2LMHeadModel is not supported: beside its layers it has wpe\.weight"
    ):
        MTP().fresh(small("gpt2"))


def small(kind: str, **values: Any) -> Target:
    """A random target of GPT-2's family."""
    config = AutoConfig.for_model(
        kind, vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, **values
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    return Target(CausalLM(model), kind)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 with a head beside it, under the names that it is published with."""
    folder, model = tmp_path_factory.mktemp("qwen"), hybrid("qwen3_5_text", torch.float32)
    lively: Any = model
    lively.model.norm.weight.normal_(std=0.5)  # a norm of a norm is the norm, unless they scale
    model.save_pretrained(folder)
    target = Target(CausalLM(model), "qwen")
    net: Any = MTPNet(target, names=[names_in_qwen3_next()])
    tensors = load_file(folder / "model.safetensors")
    tensors |= {net.name(k): v + 0.3 * torch.randn_like(v) for k, v in net.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("first", ["normed", "raw"])
@pytest.mark.parametrize("fed", ["raw", "normed"])
def test_the_head_beside_a_qwen(qwen: Path, tmp_path: Path, first: str, fed: str) -> None:
    """It opens from the target's folder, drafts, is trained as it decodes, and is written back; each knob drafts otherwise."""
    target = Target.load(str(qwen), torch.float32)
    drafter = build("drafter", f"mtp:checkpoint={qwen},first={first},fed={fed}").open(target)
    names = {
        "mtp.fc.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
    }
    tokens = np.random.default_rng(0).integers(3, 61, (2, 15))
    assert forward_parity.largest_difference(target, drafter, tokens, 4, 1) < PRECISION
    usual: Any = build("drafter", f"mtp:checkpoint={qwen},first=normed,fed=raw").open(target)
    same = torch.allclose(
        *(forward_parity.draft_log_probs(target, d, tokens, 4, 1) for d in (usual, drafter)),
        atol=1e-3,
    )
    assert same == ((first, fed) == ("normed", "raw"))
    engine = Engine(target, drafter, Chain(length=3), Greedy())
    request = Request([5, 6, 7, 8], 12, frozenset())
    assert engine.write([request]).tokens == engine.plain([request]).tokens
    drafter.save(tmp_path)
    carried = {
        k: v for k, v in load_file(qwen / "model.safetensors").items() if k.startswith("mtp.")
    }
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == carried.keys() > names
    assert all(torch.equal(written[k], v) for k, v in carried.items())


@pytest.mark.parametrize("count", [2, 3])
def test_layers_of_a_qwens_layout(qwen: Path, tmp_path: Path, count: int) -> None:
    """Several layers that share all but themselves: trained as they decode, trees and rows included, and written back."""
    target = Target.load(str(qwen), torch.float32)
    tensors, own = load_file(qwen / "model.safetensors"), "mtp.layers.0."
    for level in range(1, count):
        torch.manual_seed(level)
        more = {
            k.replace(own, f"mtp.layers.{level}."): v
            for k, v in tensors.items()
            if k.startswith(own)
        }
        tensors |= {k: v + 0.3 * torch.randn_like(v) for k, v in more.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    drafter = build("drafter", f"mtp:checkpoint={tmp_path},first=normed,fed=raw").open(target)
    tokens = np.random.default_rng(0).integers(3, 61, (2, 15))
    for block, phase in ((5, 1), (4, 3)):
        assert forward_parity.largest_difference(target, drafter, tokens, block, phase) < PRECISION
    prompts = [[5, 6, 7, 8], [9], list(range(10, 31))]
    requests = [Request(p, 12, frozenset(), number=i) for i, p in enumerate(prompts)]
    engine = Engine(target, drafter, EAGLE2(nodes=8, depth=4, width=2), Greedy())
    assert engine.write(requests).tokens == engine.plain(requests).tokens
    drafter.save(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    assert written.keys() == {k for k in tensors if k.startswith("mtp.")}
    assert all(torch.equal(written[k], tensors[k]) for k in written)


TOKENS, MARK, ONE, JUNK = 31, 40, 41, 31
"""A planted target's tokens follow one another in a circle; of its 64 features one is a mark, one
is always 1."""


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 within a model of other media, as it is published; its last norm turns the mark's sign."""
    text = hybrid("qwen3_5_text", torch.float32, vocab_size=32, hidden_size=64, eos_token_id=None)
    tensors = {k: v.clone() for k, v in text.state_dict().items()}
    silent(tensors)
    embedding, head = torch.zeros(32, 64), torch.zeros(32, 64)
    embedding[:, :32], embedding[:, [MARK, ONE]] = torch.eye(32), 1.0
    head[(torch.arange(TOKENS) + 1) % TOKENS, torch.arange(TOKENS)] = 1.0
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors["model.norm.weight"] = torch.zeros(64)
    tensors["model.norm.weight"][MARK] = -2.0  # it scales by one more
    folder = tmp_path_factory.mktemp("circle")
    config = AutoConfig.for_model(
        "qwen3_5", text_config=text.config.to_dict(), tie_word_embeddings=False
    )
    config.save_pretrained(folder)
    named = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def silent(tensors: dict[str, Tensor]) -> None:
    """Layers that add nothing to what goes through them, and norms that scale by 1."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm.weight")):
            tensor.zero_()


@pytest.mark.parametrize(
    ("first", "fed", "dtype"),
    [(*way, torch.float32) for way in INPUT_VARIANTS] + [("raw", "normed", torch.bfloat16)],
)
def test_the_way_is_found_in_which_a_published_head_predicts(
    circle: Path, tmp_path: Path, first: str, fed: str, dtype: torch.dtype
) -> None:
    """A head goes wrong where the mark of what it reads, or of what it is fed on, has another sign than it was made for."""
    target = Target.load(str(circle), dtype)
    net: Any = MTPNet(target, names=[names_in_qwen3_next()])
    tensors = {net.name(k): v.clone() for k, v in net.state_dict().items()}
    silent(tensors)
    read = 1.0 if first == "raw" else -1.0
    made = read if fed == "raw" else -read  # its own norm turns the sign, too
    norms = {
        f"mtp.{name}.weight": torch.zeros(64)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    norms["mtp.norm.weight"][MARK] = -2.0
    along = torch.zeros(64, 64)
    along[(torch.arange(TOKENS) + 1) % TOKENS, torch.arange(TOKENS)] = 1.0
    along[ONE, ONE], along[MARK, ONE] = 1.0, made
    along[JUNK - 1, ONE], along[JUNK - 1, MARK] = 10.0, -10.0 * read
    tensors |= norms | {"mtp.fc.weight": torch.cat((torch.zeros(64, 64), along), 1)}
    (tmp_path / "config.json").write_text((circle / "config.json").read_text())
    save_file(
        load_file(circle / "model.safetensors") | tensors,
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    target = Target.load(str(tmp_path), dtype)
    found: Any = build("drafter", str(tmp_path)).open(target)
    assert (found.knobs.first, found.knobs.fed) == (first, fed)
    out = Engine(target, found, Chain(length=3), Greedy()).write([Request([5, 6], 16, frozenset())])
    assert out.tokens == [[(7 + i) % TOKENS for i in range(16)]]
    assert out.stats.acceptance_length > 3, "the way that was found drafts what the target writes"
    asked: Any = build("drafter", f"mtp:checkpoint={tmp_path},first=raw").open(target)
    assert asked.knobs.first == "raw"
    found.save(tmp_path / "saved")
    again: Any = build("drafter", str(tmp_path / "saved")).open(target)
    assert (again.knobs.first, again.knobs.fed) == (first, fed)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_each_depth_asks_its_own_layer(
    circle: Path, tmp_path: Path, order: tuple[int, int]
) -> None:
    """Of two planted layers the first marks what it makes and says junk of what is marked, the second of what is not."""
    target, seen = Target.load(str(circle), torch.float32), ONE + 1
    net: Any = MTPNet(target, names=[names_in_qwen3_next(0), names_in_qwen3_next(1)])
    tensors = {net.name(k): v.clone() for k, v in net.state_dict().items()}
    silent(tensors)
    tensors |= {
        f"mtp.{name}.weight": torch.zeros(64)
        for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    along = torch.zeros(64, 64)
    along[(torch.arange(TOKENS) + 1) % TOKENS, torch.arange(TOKENS)] = 1.0
    along[ONE, ONE] = along[seen, seen] = 1.0
    tensors["mtp.fc.weight"] = torch.cat((torch.zeros(64, 64), along), 1)
    for level, which in enumerate(order):
        gate = torch.zeros(48, 64)
        up = torch.zeros(48, 64)
        down = torch.zeros(64, 48)
        up[:2, ONE] = 1.0
        if which == 0:
            gate[0, ONE], gate[1, seen], down[seen, 0], down[JUNK - 1, 1] = 1.0, 1.0, 1.0, 10.0
        else:
            gate[0, ONE], gate[0, seen], down[JUNK - 1, 0] = 20.0, -40.0, 10.0
        parts = zip(("gate_proj", "up_proj", "down_proj"), (gate, up, down), strict=True)
        tensors |= {f"mtp.layers.{level}.mlp.{part}.weight": weight for part, weight in parts}
    (tmp_path / "config.json").write_text((circle / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = build("drafter", f"mtp:checkpoint={tmp_path},first=normed,fed=raw").open(target)
    out = Engine(target, found, Chain(length=4), Greedy()).write(
        [Request([5, 6, 7], 21, frozenset())]
    )
    assert out.tokens == [[(8 + i) % TOKENS for i in range(21)]]
    accepted = {(0, 1): 4, (1, 0): 0, (0, 0): 1, (1, 1): 0}[order]
    assert out.stats.acceptance_length == pytest.approx(accepted + 1)
