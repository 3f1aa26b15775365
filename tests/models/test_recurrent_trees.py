"""Trees over models that fold the text into a state: every node is what the model says after its path, whoever computes it."""

from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor

from draftree.models.causal_lm import CausalLM
from draftree.models.kv_cache import SlotCache
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import AcceptResult, Candidates, Ints, Tree
from hybrids import FAMILIES, OneByOne, hybrid, in_float64

CLOSE = 1e-10
LENGTHS = (11, 6, 17)


def grown(draw: np.random.Generator, roots: Ints, nodes: int) -> Tree:
    """A random forest: each node below any node before it."""
    tree, none = Tree.from_roots(np.arange(len(roots)), roots), np.zeros(1)
    for _ in range(nodes):
        parent, token = draw.integers(len(tree), size=1), draw.integers(2, 90, size=1)
        tree = tree.append(
            parent, token, none, none, Candidates(np.zeros((1, 1), np.int64), np.zeros((1, 1)))
        )
    return tree


def some_paths(draw: np.random.Generator, tree: Tree) -> AcceptResult:
    """Accepts a path of each row: to any of its nodes, the root included."""
    leaves = [draw.choice(np.flatnonzero(tree.row == row)) for row in range(tree.roots)]
    paths = [np.array([n for n in tree.path(leaf) if n >= tree.roots], np.int64) for leaf in leaves]
    return AcceptResult(tuple(paths), np.zeros(tree.roots, np.int64))


def state_error(cache: SlotCache, stock: Sequence[OneByOne]) -> float:
    """How far the committed states are from those of stock decoding."""
    assert cache.states is not None
    worst = 0.0
    for row, each in enumerate(stock):
        for (layer, which), tail in cache.states.tails.items():
            theirs = each.cache.layers[layer]
            pairs = [(tail[row].mT, theirs.conv_states[which][0])]
            if (base := cache.states.bases.get((layer, which))) is not None:
                pairs.append((base[row], theirs.recurrent_states[which][0]))
            worst = max(worst, *(float((ours - other).abs().max()) for ours, other in pairs))
    return worst


def errors(family: str, steps: int = 2, nodes: int = 8, seed: int = 3) -> tuple[float, float]:
    """The largest error of any node's logits, and of the states, over some steps of two or more ragged rows."""
    model, draw = hybrid(family), np.random.default_rng(seed)
    with in_float64(model):
        target = Target(CausalLM(model), family)
        prompts = [draw.integers(2, 90, n) for n in LENGTHS]
        cache = target.new_cache(len(prompts), 64)
        read = target.prefill(cache, prompts, HiddenStateSpec())
        stock = [OneByOne(model, p.tolist()) for p in prompts]
        wrong = [_off(ours, theirs.logits) for ours, theirs in zip(read.logits, stock, strict=True)]
        states = [state_error(cache, stock)]
        for _ in range(steps):
            tree = grown(draw, draw.integers(2, 90, len(prompts)), nodes)
            logits = target.verify(cache, tree, HiddenStateSpec()).logits
            for node in range(len(tree)):
                reached = stock[tree.row[node]].after(tree.tokens[tree.path(node)].tolist())
                wrong.append(_off(logits[node], reached.logits))
            verdict = some_paths(draw, tree)
            target.commit(cache, tree, verdict)
            stock = [
                each.after(tree.tokens[verdict.committed_nodes(r)].tolist())
                for r, each in enumerate(stock)
            ]
            states.append(state_error(cache, stock))
    return max(wrong), max(states)


def _off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_is_what_stock_decoding_says_along_its_path(family: str) -> None:
    nodes, states = errors(family)
    assert nodes < CLOSE
    assert states < CLOSE
