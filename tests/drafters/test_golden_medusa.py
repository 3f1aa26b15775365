"""Medusa against traces of the official code on tiny weights: the same lists, trees, accepted lengths and texts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftree.acceptors.base import Acceptor
from draftree.acceptors.greedy import Greedy
from draftree.costs.step_costs import Costs
from draftree.drafters.medusa import Medusa, MedusaDrafter
from draftree.engine import Engine
from draftree.policies.static import Static
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import RandomSource
from draftree.target.target import Target
from draftree.tree import AcceptResult, Ints, Tree
from forests import attach

GOLDEN = Path(__file__).parents[3] / "shared" / "goldens" / "medusa1"
COSTS = Costs({1: 0.1}, {1: 1.0})
FLOAT32 = 1e-4
"""How far logits of magnitude 10 may lie apart between float32 passes of different width."""

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the official traces are not here")


@cache
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "golden.json").read_text())


def target() -> Target:
    return Target.load(str(GOLDEN / "target"), torch.float32, "cpu")


def drafter_for(t: Target) -> MedusaDrafter:
    drafter = build("drafter", str(GOLDEN / "draft")).open(t)
    assert isinstance(drafter, MedusaDrafter)
    return drafter


class Recording(Acceptor):
    """The greedy rule; keeps what it saw."""

    exact_for = Greedy.exact_for
    survives_pruning = Greedy.survives_pruning

    def __init__(self) -> None:
        self.steps: list[tuple[Tree, AcceptResult, list[int]]] = []

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        verdict = Greedy().accept(tree, p, chance)
        if tree.drafted:
            self.steps.append((tree, verdict, [p.argmax(i) for i in range(len(tree))]))
        return verdict


def test_the_config_says_two_heads_and_the_file_holds_five() -> None:
    assert json.loads((GOLDEN / "draft" / "config.json").read_text())["medusa_num_heads"] == 2
    assert drafter_for(target()).knobs == Medusa(str(GOLDEN / "draft"), heads=5)


def test_logits_of_all_heads() -> None:
    unit, t = load_file(GOLDEN / "unit.safetensors"), target()
    drafter = drafter_for(t)
    hidden_states = t.prefill(
        t.new_cache(1, 64), [unit["prompt_ids"][0].numpy().astype(np.int64)], drafter.needs
    ).hidden_states
    assert (hidden_states.hidden[-1] - unit["target_last_hidden"][0]).abs().max() < 1e-5
    with torch.inference_mode():
        ours = torch.stack([head(hidden_states.hidden[-1]) for head in drafter.model])
    assert (ours - unit["medusa_logits"]).abs().max() < 2e-5


@pytest.mark.parametrize("run", [0, 1])
def test_a_greedy_run(run: int) -> None:
    setting = golden()["settings"][0]
    wanted, parents = setting["runs"][run], golden()["trees"][setting["tree"]]["parents"]
    rule, count = Recording(), len(wanted["output"]) - len(wanted["prompt"])
    t = target()
    engine = Engine(t, drafter_for(t), Static(f"medusa/{setting['tree']}"), rule, COSTS)
    # Our trees end where the text ends, theirs do not: leave room behind their last step.
    written = engine.write([Request(wanted["prompt"], count + 8)]).tokens[0]
    assert (
        written[:count]
        == wanted["output"][len(wanted["prompt"]) :]
        == wanted["hf_greedy_continuation"][:count]
    )
    steps = rule.steps[: wanted["n_steps"]]
    assert [len(v.paths[0]) for _, v, _ in steps] == wanted["accept_lengths"]
    assert len(wanted["steps"]) > 5
    for (tree, verdict, choice), step in zip(steps, wanted["steps"], strict=False):
        assert tree.tokens.tolist() == step["tokens"]
        assert tree.parents.tolist() == parents
        assert choice == step["target_argmax"]
        assert verdict.committed_nodes(0).tolist() == step["accepted_nodes"]


@pytest.mark.parametrize("run", [0, 1])
def test_the_lists_of_all_heads(run: int) -> None:
    wanted, t = golden()["settings"][0]["runs"][run], target()
    drafter = drafter_for(t)
    for step in wanted["steps"]:
        assert step["min_head_topk_gap"] > FLOAT32, "near-equal logits have no order"
        text = np.array(wanted["output"][: step["base_len"]])
        ranked, logits = lists(t, drafter, text, step["root"])
        assert ranked == step["head_topk"]
        assert np.allclose(logits, step["head_topk_logits"], rtol=0, atol=FLOAT32)


def lists(
    t: Target, drafter: MedusaDrafter, text: Ints, root: int
) -> tuple[list[list[int]], Tensor]:
    """The ten likeliest tokens of every head [5, 10] in order, as `expand` gives them, and their logits."""
    state = drafter.start(
        [text], np.array([root]), t.prefill(t.new_cache(1, 64), [text], drafter.needs).hidden_states
    )
    tree = attach(Tree.from_roots(np.arange(1), np.array([root])), range(4), [3] * 4)
    found, state = drafter.expand(state, tree, np.arange(5), 10, Drawing())
    return found.tokens.tolist(), torch.stack([head[0].topk(10).values for head in state.logits])


def test_the_pad_of_the_official_code_is_not_accepted() -> None:
    """With a frequent token as id 0, the official code takes the pad of a short path for an accepted token 0."""
    t, common = target(), 173
    drafter = drafter_for(t)
    embedding, head = (
        t.decoder.model.get_input_embeddings(),
        t.decoder.model.get_output_embeddings(),
    )
    with torch.no_grad():
        for weight in (embedding.weight, head.weight, *(h[-1].weight for h in drafter.model)):
            weight[[0, common]] = weight[[common, 0]]
    rng, rule = np.random.default_rng(777), Recording()
    engine = Engine(t, drafter, Static("medusa/mc_sim_7b_63"), rule, COSTS)
    for number in range(7):
        request = Request(rng.integers(3, 256, 20).tolist(), 60, number=number)
        assert engine.write([request], reuse=False).tokens == engine.plain([request]).tokens
    deepest = golden()["trees"]["mc_sim_7b_63"]["position_offsets"][-1]
    ends = [
        (tree, v.paths[0])
        for tree, v, _ in rule.steps
        if v.bonus[0] == 0 and 0 < len(v.paths[0]) < deepest
    ]
    tempted = [tree for tree, path in ends if not tree.children(path[-1]).size]
    assert len(tempted) >= 2, (
        "no short path of the tree was accepted to its end and followed by token 0"
    )
