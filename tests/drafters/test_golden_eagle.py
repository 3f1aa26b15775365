"""EAGLE-2 and EAGLE-3 draft as the official code does, by its traces on tiny weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftree.acceptors.greedy import Greedy
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.neural.feature_drafter import PairDrafter
from draftree.loop import Components, decode
from draftree.policies.eagle2 import EAGLE2
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import AcceptResult, Tree

GOLDENS = Path(__file__).parents[3] / "shared" / "goldens"
NAMES = {"eagle": "eagle2", "eagle3": "eagle3"}
pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason="the traces are not here")


def opened(name: str) -> tuple[Target, PairDrafter]:
    folder = GOLDENS / NAMES[name]
    target = Target.load(str(folder / "target"))
    return target, build("drafter", str(folder / "draft")).open(target)


@pytest.mark.parametrize("name", NAMES)
def test_one_forward(name: str) -> None:
    """The pass over the prompt, and a tree level of the four likeliest tokens."""
    target, drafter = opened(name)
    unit = load_file(GOLDENS / NAMES[name] / "unit.safetensors")
    prompt, root = unit["prompt_ids"][0].long().numpy(), int(unit["draft_input_ids"][0, -1])
    verified = target.prefill(target.new_cache(1, 64), [prompt], drafter.needs)
    state = drafter.start([prompt], np.array([root]), verified.hidden_states)
    tree = Tree.from_roots(np.arange(1), np.array([root]))
    candidates, state = drafter.expand(state, tree, np.arange(1), 4, Drawing())
    worst(state.outputs[0], unit["draft_out"][0, -1])
    keys, values = state.decoding.cache.layer(0)
    worst(keys[0, :, : len(prompt)], unit["kv_key"][0])
    worst(values[0, :, : len(prompt)], unit["kv_value"][0])
    assert sorted(candidates.tokens[0]) == sorted(unit["tree_ids"][0].tolist())
    tree = tree.append(
        np.zeros(4, np.int64),
        unit["tree_ids"][0].long().numpy(),
        np.zeros(4),
        np.zeros(4),
        candidates,
    )
    level, state = drafter.expand(state, tree, np.arange(1, 5), 4, Drawing())
    worst(state.outputs[1:], unit["tree_draft_out"][0])
    assert level.log_probs is not None
    expected = torch.log_softmax(unit["tree_draft_logits"][0], -1)
    if name == "eagle3":
        kept = drafter.model.state_dict()["t2d"].bool()
        assert (level.log_probs[:, ~kept] == -torch.inf).all()
        worst(level.log_probs[:, kept], expected)
    else:
        worst(level.log_probs, expected)


def worst(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 2e-5


RUNS = [(name, setting, run) for name in NAMES for setting in range(1) for run in range(2)]


@pytest.mark.parametrize(("name", "setting", "number"), RUNS)
def test_runs(name: str, setting: int, number: int) -> None:
    """Output, accepted lengths of every step, and the trees of those that the trace holds."""
    said = json.loads((GOLDENS / NAMES[name] / "golden.json").read_text())["settings"][setting]
    run = said["runs"][number]
    target, drafter = opened(name)
    policy = EAGLE2(nodes=said["total_token"] - 1, depth=said["depth"] + 1, width=said["top_k"])
    new = len(run["output"]) - len(run["prompt"])
    texts = SequenceBatch(target.new_cache(1, 256))
    watched = Watched()
    parts = Components(target, drafter, policy, watched, Costs({1: 1.0}, {1: 1.0}))
    steps = decode(parts, texts, [Request(run["prompt"], new + 64)])
    next(steps)
    for _ in run["accept_lengths"]:
        next(steps)
    assert texts.written[0][:new] == run["output"][len(run["prompt"]) :]
    assert [len(v.paths[0]) for _, v in watched.seen[1:]] == run["accept_lengths"]
    for (tree, verdict), step in zip(watched.seen[1:], run["steps"], strict=False):
        same_tree(tree, verdict, step)


class Watched(Greedy):
    """Keeps what it judged."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])

    def accept(self, tree: Tree, p: Any, chance: Any) -> AcceptResult:
        verdict = super().accept(tree, p, chance)
        self.seen.append((tree, verdict))
        return verdict


def same_tree(tree: Tree, verdict: AcceptResult, step: dict[str, Any]) -> None:
    """Nodes, as paths of tokens, and their scores; where the last score kept is a near tie, all but that node."""
    ours = {tuple(tree.tokens[tree.path(n)]): tree.score[n] for n in range(len(tree))}
    theirs: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = []
    for token, parent, score in zip(step["tokens"], step["parents"], step["scores"], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        theirs[paths[-1]] = score
    allowed = 0 if step["rerank_set_margin"] > 1e-4 else 2
    assert len(set(ours) ^ set(theirs)) <= allowed
    assert max(abs(ours[p] - theirs[p]) for p in set(ours) & set(theirs)) < 1e-4
    assert len(verdict.paths[0]) == step["accept_length"]
    assert int(verdict.bonus[0]) == step["bonus"]
