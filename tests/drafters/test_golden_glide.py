"""GLIDE and CaPE against traces of the official code on tiny random weights."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftree.acceptors.base import Acceptor
from draftree.acceptors.greedy import Greedy
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.drafters.glide import GLIDE, GLIDEDrafter
from draftree.drafters.neural.glide_model import Glimpse
from draftree.loop import Components, decode
from draftree.policies.cape import CAPE
from draftree.request import Request
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import Drawing
from draftree.sampling.keyed_noise import RandomSource
from draftree.target.target import Target
from draftree.tree import AcceptResult, Candidates, Draw, Ints, Tree

FOLDER = Path(__file__).parents[3] / "shared" / "goldens" / "glide"
GAP = 1e-4
"""Draft scores nearer than this may come in another order on another machine."""

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the traces are not here")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(str(FOLDER / "target"), device="cpu")


@pytest.fixture(scope="module")
def drafter(target: Target) -> GLIDEDrafter:
    return GLIDE(checkpoint=str(FOLDER / "draft")).open(target)


@pytest.fixture(scope="module")
def unit() -> dict[str, Tensor]:
    return load_file(FOLDER / "unit.safetensors")


def test_a_published_checkpoint_is_opened_as_official(drafter: GLIDEDrafter) -> None:
    assert drafter.knobs.variant == "official"
    assert drafter.needs.kv == (6, 7)


def test_the_network_gives_the_official_logits(
    drafter: GLIDEDrafter, unit: dict[str, Tensor]
) -> None:
    """All positions of prompt and root see the keys of the whole prompt, as in the official code."""
    ids = unit["draft_input_ids"].long()
    count = ids.shape[1]
    kv = [(unit[f"target_key_layer{i}"], unit[f"target_value_layer{i}"]) for i in drafter.needs.kv]
    glimpse = Glimpse(kv, torch.ones(1, 1, count, count - 1, dtype=torch.bool))
    with torch.no_grad():
        logits = drafter.model(ids, position_ids=torch.arange(count)[None], glimpse=glimpse).logits
    assert float((logits - unit["draft_logits"]).abs().max()) < 5e-5


def check_two_steps(drafter: GLIDEDrafter, state: Any, root: Ints, unit: dict[str, Tensor]) -> None:
    """Compare what is drafted after a root [1], and after the likeliest token there, with a trace."""
    tree = Tree.from_roots(np.array([0]), root)
    first, state = drafter.expand(state, tree, np.array([0]), 1, Drawing())
    assert first.tokens.item() == unit["draft_step2_id"].item()
    nothing = np.zeros(1)
    tree = tree.append(
        np.array([0]), first.tokens[0], nothing, nothing, Candidates(first.tokens, nothing[None])
    )
    second, _ = drafter.expand(state, tree, np.array([1]), 1, Drawing())
    for got, want in (
        (first, unit["draft_logits"][:, -1]),
        (second, unit["draft_step2_logits"][:, -1]),
    ):
        assert got.log_probs is not None
        assert got.log_probs.shape == want.shape
        assert float((got.log_probs - torch.log_softmax(want, dim=-1)).abs().max()) < 5e-5


def test_the_drafter_gives_the_official_first_and_second_step(
    target: Target, drafter: GLIDEDrafter, unit: dict[str, Tensor]
) -> None:
    prompt, root = (
        unit["prompt_ids"][0].long().numpy(),
        unit["draft_input_ids"][0, -1:].long().numpy(),
    )
    cache = target.new_cache(1, 64)
    verified = target.prefill(cache, [prompt], drafter.needs)
    for i in drafter.needs.kv:
        for got, want in zip(
            cache.layer(i),
            (unit[f"target_key_layer{i}"], unit[f"target_value_layer{i}"]),
            strict=True,
        ):
            assert float((got[:, :, : len(prompt)] - want).abs().max()) < 1e-5
    state = drafter.start([prompt], root, verified.hidden_states)
    check_two_steps(drafter, state, root, unit)


class Recorded(Acceptor):
    """Greedy acceptance that remembers what it was given and what it said."""

    exact_for: ClassVar[frozenset[Draw]] = Greedy.exact_for
    survives_pruning: ClassVar[bool] = Greedy.survives_pruning

    def __init__(self) -> None:
        self.steps: list[tuple[Tree, AcceptResult]] = []

    def accept(self, tree: Tree, p: Distributions, chance: RandomSource) -> AcceptResult:
        verdict = Greedy().accept(tree, p, chance)
        if len(tree) > 1:
            self.steps.append((tree, verdict))
        return verdict


def runs() -> list[Any]:
    if not FOLDER.is_dir():
        return []
    said = json.loads((FOLDER / "golden.json").read_text())["settings"]
    named = [(s["bins"], s["propose_num"], run) for s in said for run in s["runs"]]
    return [pytest.param(*values, id=str(i)) for i, values in enumerate(named)]


def followed(
    target: Target, drafter: GLIDEDrafter, policy: CAPE, run: dict[str, Any]
) -> tuple[Recorded, list[int]]:
    """The trees of a run, and its output; some tokens more are asked for, so that the last steps are not cut short."""
    wanted = len(run["output"]) - len(run["prompt"])
    texts = SequenceBatch(target.new_cache(1, 8))
    recorded = Recorded()
    parts = Components(target, drafter, policy, recorded, Costs({1: 1.0}, {1: 1.0}))
    for _ in decode(parts, texts, [Request(run["prompt"], wanted + 8)]):
        pass
    return recorded, texts.written[0][:wanted]


@pytest.mark.parametrize(("bins", "length", "run"), runs())
def test_greedy_runs_are_the_official_ones(
    bins: list[int], length: int, run: dict[str, Any], target: Target, drafter: GLIDEDrafter
) -> None:
    assert bins == [8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 2], "the official bins"
    recorded, output = followed(target, drafter, CAPE(length=length, bins="official"), run)
    assert (
        output
        == run["output"][len(run["prompt"]) :]
        == run["hf_greedy_continuation"][: len(output)]
    )
    accepted = [len(verdict.paths[0]) for _, verdict in recorded.steps]
    assert accepted[: run["n_steps"]] == run["accept_lengths"]
    compared = 0
    for (tree, verdict), step in zip(recorded.steps, run["steps"], strict=False):
        assert tree.tokens[0] == step["root"]
        assert tree.tokens[verdict.committed_nodes(0)].tolist() == step["emitted"]
        assert verdict.bonus.tolist() == [step["bonus"]]
        if step["draft_min_top8_gap"] > GAP:
            compared += 1
            assert paths(tree.tokens, tree.parents) == paths(
                np.array(step["tokens"]), np.array(step["parents"])
            )
            chain = [
                i for i in range(1, len(tree)) if tree.children(i).size or i == best_leaf(tree)
            ]
            assert tree.tokens[chain].tolist() == step["draft_chain"]
            assert np.abs(np.exp(tree.log_q[chain]) - step["draft_max_probs"]).max() < 1e-5
    assert compared >= 9


def paths(tokens: np.ndarray, parents: np.ndarray) -> set[tuple[int, ...]]:
    """Every node of a tree by the tokens that lead to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return set(found)


def best_leaf(tree: Tree) -> int:
    """The chain's end: the likeliest of the deepest nodes."""
    deepest = np.flatnonzero(tree.depth == tree.depth.max())
    return int(deepest[tree.log_q[deepest].argmax()])


def test_the_paper_variant_writes_the_same_text(target: Target) -> None:
    """The output is the target's, whatever is drafted; a checkpoint of our own keeps what it was trained as."""
    drafter = GLIDE(checkpoint=str(FOLDER / "draft")).open(target)
    drafter.knobs = GLIDE(layers=2, hidden=48)
    run = json.loads((FOLDER / "golden.json").read_text())["settings"][0]["runs"][0]
    recorded, output = followed(target, drafter, CAPE(length=4, bins="official"), run)
    assert output == run["output"][len(run["prompt"]) :]
    accepted = [len(verdict.paths[0]) for _, verdict in recorded.steps]
    assert accepted[: run["n_steps"]] != run["accept_lengths"], (
        "the variants are told apart by what they draft"
    )
