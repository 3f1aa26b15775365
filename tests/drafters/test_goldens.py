"""Draft networks, trees and acceptance as official implementations have them, by the traces in `goldens`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_golden_glide import check_two_steps
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from answers import Answers
from draftree.acceptors.greedy import Greedy
from draftree.drafters.glide import GLIDEDrafter
from draftree.drafters.medusa import MedusaDrafter
from draftree.drafters.neural.feature_drafter import PairDrafter
from draftree.drafters.neural.glide_model import Glimpse
from draftree.policies.base import Expand, Policy
from draftree.policies.cape import CAPE
from draftree.policies.eagle2 import EAGLE2
from draftree.policies.static import Static
from draftree.registry import build
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import LAST, HiddenStates, Target
from draftree.tree import Candidates, Ints, Tree
from grown_trees import grown

GOLDENS = Path(__file__).parents[1] / "goldens"
TRACES = json.loads((GOLDENS / "traces.json").read_text("utf-8"))
NEAR = 1e-4
"""Scores nearer than this may come in another order on another machine."""
VOCAB, HEADS = 256, {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    **HEADS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle2": {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 128, "rope_theta": 10000.0},
    "eagle3": {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 96, "rope_theta": 50000.0,
               "architectures": ["LlamaForCausalLMEagle3"]},
    "medusa1": {"medusa_num_heads": 2, "medusa_num_layers": 1},
    "glide": {**LLAMA, "num_hidden_layers": 2, "intermediate_size": 96, "hidden_size": 48, "num_key_value_heads": 4,
              "large_hidden_size": 64, "large_head_dim": 16, "large_num_attention_heads": 4, "block_size": 5,
              "rope_theta": 10000.0, "architectures": ["smallLlamaForCausalLM"]},
}  # fmt: skip
"""The configs of the official checkpoints; that of Medusa says two heads whatever its file holds,
as published ones do."""
FILES = {"medusa1": "medusa_lm_head.safetensors"}


def traced(name: str) -> dict[str, Tensor]:
    """The tensors of a trace."""
    return load_file(GOLDENS / f"{name}.safetensors")


def opened(name: str, tensors: dict[str, Tensor], folder: Path) -> tuple[Target, Any]:
    """A target of the right shape with the traced embedding and head, and the drafter from its official checkpoint."""
    draft = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
    vocab = len(
        tensors.get(
            "target.embed_tokens.weight", draft.get("lm_head.weight", draft.get("0.1.weight"))
        )
    )
    config = CONFIGS[name] | {"vocab_size": vocab}
    if name == "eagle2":
        draft["embed_tokens.weight"] = tensors["target.embed_tokens.weight"].clone()
    if name == "eagle3":
        config["draft_vocab_size"] = len(draft["d2t"])
    torch.manual_seed(0)
    theta = config.get("rope_theta", 10000.0)
    shape = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=16, num_hidden_layers=8, max_position_embeddings=512,
        rms_norm_eps=1e-5, rope_theta=theta, **HEADS,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()
    with torch.no_grad():
        for key, module in (("embed_tokens", model.model.embed_tokens), ("lm_head", model.lm_head)):
            if (weight := tensors.get(f"target.{key}.weight")) is not None:
                module.weight.copy_(weight)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(draft, folder / FILES.get(name, "model.safetensors"))
    target = Target.of(model)
    return target, build("drafter", str(folder)).open(target)


def worst(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


# Draft networks.


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
def test_eagle_s_network(name: str, tmp_path: Path) -> None:
    """The pass over a prompt, and a level of the four likeliest tokens."""
    unit = traced(name)
    target, drafter = opened(name, unit, tmp_path)
    assert isinstance(drafter, PairDrafter)
    prompt, root = unit["prompt_ids"][0].long().numpy(), int(unit["draft_input_ids"][0, -1])
    count = len(prompt)
    layers = drafter.needs.hidden
    assert layers == ((2, 4, 5) if name == "eagle3" else (LAST,))
    hidden = dict(zip(layers, unit["features"][0].chunk(len(layers), dim=-1), strict=True))
    hidden_states = HiddenStates(
        hidden, np.zeros(count, np.int64), np.arange(count), prompt, target.new_cache(1, 64)
    )
    state = drafter.start([prompt], np.array([root]), hidden_states)
    tree = Tree.from_roots(np.arange(1), np.array([root]))
    candidates, state = drafter.expand(state, tree, np.arange(1), 4, Drawing())
    assert worst(state.outputs[0], unit["draft_out"][0]) < 2e-5
    for ours, theirs in zip(
        state.decoding.cache.layer(0), (unit["kv_key"], unit["kv_value"]), strict=True
    ):
        assert worst(ours[:, :, :count], theirs) < 2e-5
    four = unit["tree_ids"][0].long().numpy()
    tree = tree.append(np.zeros(4, np.int64), four, np.zeros(4), np.zeros(4), candidates)
    level, state = drafter.expand(state, tree, np.arange(1, 5), 4, Drawing())
    assert worst(state.outputs[1:], unit["tree_draft_out"][0]) < 2e-5
    for got, want in ((candidates, unit["draft_logits"]), (level, unit["tree_draft_logits"][0])):
        assert got.log_probs is not None
        known = (
            drafter.model.state_dict()["t2d"].bool()
            if name == "eagle3"
            else torch.ones(got.log_probs.shape[1]).bool()
        )
        assert (got.log_probs[:, ~known] == -torch.inf).all()
        assert worst(got.log_probs[:, known], torch.log_softmax(want, -1)) < 2e-5


def test_medusa_s_heads(tmp_path: Path) -> None:
    unit = traced("medusa1")
    _, drafter = opened("medusa1", unit, tmp_path)
    assert isinstance(drafter, MedusaDrafter)
    assert len(drafter.model) == 4, "the config says two heads, the file holds four"
    with torch.inference_mode():
        ours = torch.stack([head(unit["target_last_hidden"][0]) for head in drafter.model])
    assert worst(ours, unit["medusa_logits"]) < 2e-5


def test_glide_s_network(tmp_path: Path) -> None:
    """All positions of prompt and root see the keys of the whole prompt, as in the official code; then a step of the chain."""
    unit = traced("glide")
    target, drafter = opened("glide", unit, tmp_path)
    assert isinstance(drafter, GLIDEDrafter)
    assert drafter.knobs.variant == "official"
    assert drafter.needs.kv == (6, 7)
    ids = unit["draft_input_ids"].long()
    count = ids.shape[1]
    kv = [(unit[f"target_key_layer{i}"], unit[f"target_value_layer{i}"]) for i in drafter.needs.kv]
    glimpse = Glimpse(kv, torch.ones(1, 1, count, count - 1, dtype=torch.bool))
    with torch.inference_mode():
        logits = drafter.model(ids, position_ids=torch.arange(count)[None], glimpse=glimpse).logits
    assert worst(logits, unit["draft_logits"]) < 5e-5
    prompt, root = unit["prompt_ids"][0].long().numpy(), ids[0, -1:].numpy()
    cache = target.new_cache(1, 64)
    for layer, pair in zip(drafter.needs.kv, kv, strict=True):
        for stored, traced_ in zip(cache.layer(layer), pair, strict=True):
            stored[:, :, : len(prompt)] = traced_
    cache.keep(0, np.arange(len(prompt)))
    state = drafter.start(
        [prompt],
        root,
        HiddenStates({}, np.zeros(0, np.int64), np.zeros(0, np.int64), prompt[:0], cache),
    )
    check_two_steps(drafter, state, root, unit)


# Trees and acceptance.

Lists = dict[tuple[int, ...], tuple[list[int], list[float]]]
"""By the tokens from below the root to a node: what is proposed after it, and log q."""


def steps(name: str) -> list[Any]:
    """The steps of a method's runs, each with what is said of all of them."""
    trace = TRACES[name]
    return [
        pytest.param(trace, step, id=f"{r}-{i}")
        for r, run in enumerate(trace["runs"])
        for i, step in enumerate(run["steps"])
    ]


def proposing(lists: Lists) -> Expand:
    """A drafter that proposes what is listed."""

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        found = [lists[tuple(tree.tokens[tree.path(int(n))[1:]].tolist())] for n in frontier]
        return Candidates(np.array([t[:k] for t, _ in found]), np.array([q[:k] for _, q in found]))

    return expand


def node_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node; the root comes first."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def draft(policy: Policy, lists: Lists) -> Tree:
    """What a policy makes of the proposals after a root."""
    return grown(policy, proposing(lists))


def accepted(tree: Tree, likeliest: dict[tuple[int, ...], int]) -> tuple[list[int], int]:
    """Tokens that are accepted where the target's likeliest are known by path, and the next root."""
    logits = torch.zeros(len(tree), VOCAB)
    for node, path in enumerate(node_paths(tree.tokens.tolist(), tree.parents.tolist())):
        logits[node, likeliest[path]] = 9.0
    verdict = Greedy().accept(tree, Distributions(logits), Answers())
    return tree.tokens[verdict.paths[0]].tolist(), int(verdict.bonus[0])


def level_lists(step: dict[str, Any], k: int) -> Lists:
    """EAGLE-2's candidates by path: a level lists k of each node of the last frontier, whose flat numbers are k + … k²."""
    lists = Lists()
    frontier = [()]
    before = [0.0]
    path_of, score_of = dict[int, tuple[int, ...]](), dict[int, float]()
    for depth, level in enumerate(step["levels"]):
        start = 0 if depth == 0 else k + (depth - 1) * k * k
        for rank, (path, score) in enumerate(zip(frontier, before, strict=True)):
            of = slice(rank * k, rank * k + k)
            lists[path] = level["tokens"][of], [s - score for s in level["scores"][of]]
            for child, (token, worth) in enumerate(
                zip(level["tokens"][of], level["scores"][of], strict=True)
            ):
                path_of[start + rank * k + child], score_of[start + rank * k + child] = (
                    (*path, token),
                    worth,
                )
        frontier, before = (
            [path_of[i] for i in level["frontier"]],
            [score_of[i] for i in level["frontier"]],
        )
    return lists


@pytest.mark.parametrize(("trace", "step"), [*steps("eagle2"), *steps("eagle3")])
def test_eagle_2_s_tree(trace: dict[str, Any], step: dict[str, Any]) -> None:
    assert min(level["margin"] for level in step["levels"]) > NEAR, (
        "which nodes are expanded hangs on no near tie"
    )
    lists = level_lists(step, trace["top_k"])
    tree = draft(
        EAGLE2(nodes=trace["total_token"] - 1, depth=trace["depth"] + 1, width=trace["top_k"]),
        lists,
    )
    theirs = dict(zip(node_paths(step["tokens"], step["parents"]), step["scores"], strict=True))
    ours = dict(
        zip(
            node_paths(tree.tokens.tolist(), tree.parents.tolist()),
            tree.score.tolist(),
            strict=True,
        )
    )
    assert step["rerank_set_margin"] > NEAR
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[p] - theirs[p]) for p in ours) < 1e-5
    same_verdict(tree, step)


@pytest.mark.parametrize(("trace", "step"), steps("glide"))
def test_cape_s_tree(trace: dict[str, Any], step: dict[str, Any]) -> None:
    assert trace["bins"] == [8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 2]
    assert step["draft_min_top8_gap"] > NEAR
    lists, path = Lists(), ()
    for tokens, logits, most in zip(
        step["draft_top8"], step["draft_top8_logits"], step["draft_max_probs"], strict=True
    ):
        lists[path] = tokens, [float(np.log(most) + logit - logits[0]) for logit in logits]
        path = (*path, tokens[0])
    tree = draft(CAPE(length=trace["propose_num"], bins="official"), lists)
    assert list(path) == step["draft_chain"]
    wanted = node_paths(step["tokens"], step["parents"])
    assert sorted(node_paths(tree.tokens.tolist(), tree.parents.tolist())) == sorted(wanted)
    same_verdict(tree, step)


@pytest.mark.parametrize(("trace", "step"), steps("medusa1"))
def test_medusa_s_tree(trace: dict[str, Any], step: dict[str, Any]) -> None:
    assert step["min_head_topk_gap"] > NEAR
    heads = list(zip(step["head_topk"], step["head_topk_logits"], strict=True))
    step = step | {"parents": trace["parents"]}
    lists = {
        path: heads[len(path)]
        for path in node_paths(step["tokens"], step["parents"])
        if len(path) < len(heads)
    }
    tree = draft(Static(f"medusa/{trace['tree']}"), lists)
    assert tree.tokens[1:].tolist() == step["tokens"][1:]
    assert tree.parents.tolist() == step["parents"]
    same_verdict(tree, step)


def same_verdict(tree: Tree, step: dict[str, Any]) -> None:
    """What is accepted, and the next root where it is said."""
    theirs = node_paths(step["tokens"], step["parents"])
    tokens, bonus = accepted(tree, dict(zip(theirs, step["target_argmax"], strict=True)))
    assert tokens == list(theirs[step["accepted_nodes"][-1]])
    assert bonus == step.get("bonus", bonus)
