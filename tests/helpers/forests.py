"""Forests to verify, and what a stock forward over each path says of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import VOCAB
from draftree.tree import AcceptResult, Candidates, Ints, Tree

NOISE = 5e-6
"""float64 models still carry transformers' float32 norms and softmax."""


def attach(tree: Tree, parents: Sequence[int], tokens: Sequence[int]) -> Tree:
    """The tree with drafted nodes whose likelihoods do not matter; a parent may be among the new nodes."""
    for parent, token in zip(parents, tokens, strict=True):
        nothing = np.zeros(1)
        drawn = Candidates(np.array([[token]]), nothing[None])
        tree = tree.append(np.array([parent]), np.array([token]), nothing, nothing, drawn)
    return tree


def from_roots(rows: int, rng: np.random.Generator) -> Tree:
    """A root for each row."""
    return Tree.from_roots(np.arange(rows), rng.integers(3, VOCAB, rows))


def random_forest(rows: int, nodes: int, rng: np.random.Generator, reach: int = 6) -> Tree:
    """Nodes behind random earlier ones, recent ones preferred; the rows' nodes lie mixed."""
    tree = from_roots(rows, rng)
    parents = [int(rng.integers(max(0, n - reach), n)) for n in range(rows, rows + nodes)]
    return attach(tree, parents, rng.integers(3, VOCAB, nodes).tolist())


def full_forest(rows: int, rng: np.random.Generator, width: int = 4, depth: int = 2) -> Tree:
    """Every node down to a depth has `width` children."""
    tree, layer = from_roots(rows, rng), list(range(rows))
    for _ in range(depth):
        parents = [p for p in layer for _ in range(width)]
        layer = list(range(len(tree), len(tree) + len(parents)))
        tree = attach(tree, parents, rng.integers(3, VOCAB, len(parents)).tolist())
    return tree


def chain(rows: int, length: int, rng: np.random.Generator) -> Tree:
    """One path a row."""
    return full_forest(rows, rng, width=1, depth=length)


def texts(lengths: Sequence[int], rng: np.random.Generator) -> list[Ints]:
    """Random committed tokens."""
    return [rng.integers(3, VOCAB, n) for n in lengths]


@torch.inference_mode()
def after(model: PreTrainedModel, text: Sequence[int] | Ints) -> Tensor:
    """[T, V] the stock model's logits after every token of a text it reads at once."""
    logits: Tensor = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def after_paths(model: PreTrainedModel, committed: Sequence[Ints], tree: Tree) -> Tensor:
    """[N, V] the stock model's logits after each node, its whole text fed as a sequence of its own."""
    ids = [
        np.concatenate((committed[tree.row[i]], tree.tokens[tree.path(i)]))
        for i in range(len(tree))
    ]
    padded = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
    for i, text in enumerate(ids):
        padded[i, : len(text)] = torch.from_numpy(text)
    logits: Tensor = model(input_ids=padded, use_cache=False).logits
    return logits[torch.arange(len(ids)), torch.tensor([len(text) - 1 for text in ids])]


def some_verdict(tree: Tree, rng: np.random.Generator) -> AcceptResult:
    """For each root the path to its deepest node, the last of them where several are, so that rejected ones lie before."""
    paths = []
    for root in range(tree.roots):
        mine = tree.of_row(int(tree.row[root]))
        deepest = mine[tree.depth[mine] == tree.depth[mine].max()][-1]
        paths.append(tree.path(int(deepest))[1:])
    return AcceptResult(tuple(paths), rng.integers(3, VOCAB, tree.roots))


def grown(committed: Sequence[Ints], tree: Tree, verdict: AcceptResult) -> list[Ints]:
    """The committed texts with root and accepted nodes."""
    found = list(committed)
    for root, path in enumerate(verdict.paths):
        row = int(tree.row[root])
        found[row] = np.concatenate((found[row], tree.tokens[[root, *path]]))
    return found


def worst(ours: Tensor, stock: Tensor) -> float:
    """The largest difference."""
    assert ours.shape == stock.shape
    return float((ours - stock).abs().max())
