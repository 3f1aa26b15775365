"""Where nodes lie in a draft step, and which tokens are likeliest, beside a plain way to find the same."""

import numpy as np
import pytest
import torch

from draftree.kernels.pass_layout import draft_pass_layout, unfed_nodes
from draftree.kernels.topk import likeliest
from draftree.tree import Candidates, DraftVocab, Tree


def grown(seed: int) -> Tree:
    """A random tree of one row."""
    draw = np.random.default_rng(seed)
    tree = Tree.from_roots(np.zeros(1, np.int64), np.array([7]))
    for _ in range(9):
        at, zero = np.array([draw.integers(len(tree))]), np.zeros(1)
        tree = tree.append(
            at, draw.integers(0, 50, 1), zero, zero, Candidates(at[None], zero[None])
        )
    return tree


@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_were_not_fed_are_found(seed: int) -> None:
    tree, draw = grown(seed), np.random.default_rng(seed)
    fed = np.flatnonzero(tree.ancestors[draw.integers(len(tree))])
    frontier = draw.permutation(len(tree))[:3]
    new, places = unfed_nodes(tree.parents, frontier, fed)
    wanted = tree.ancestors[frontier].any(axis=0) & ~np.isin(np.arange(len(tree)), fed)
    assert new.tolist() == np.flatnonzero(wanted).tolist()
    assert [places[node] for node in fed] == list(range(len(fed)))
    assert (places >= 0).sum() == len(fed)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_node_sees_pending_tokens_and_its_path(seed: int, first: bool) -> None:
    tree = grown(seed)
    pending = np.array([3, 4])
    base = 10
    before = np.zeros(0, np.int64) if first else np.array([0, 1])
    nodes = np.array([0]) if first else np.array([2, 5, 9])
    ids, positions, seen, scratch = draft_pass_layout(
        pending, before, nodes, base, tree.tokens, tree.depth, tree.parents
    )
    waiting, places = (2 if first else 0), np.concatenate((before, nodes))
    assert ids.tolist() == [*pending[:waiting], *tree.tokens[nodes]]
    assert scratch.tolist() == [10, 11, *(12 + tree.depth[places])]
    assert positions.tolist() == [*range(10, 10 + waiting), *(12 + tree.depth[nodes])]
    assert (seen[:waiting] == np.tri(waiting, seen.shape[1], dtype=np.bool_)).all()
    assert seen[waiting:, :2].all()
    assert (seen[waiting:, 2:] == tree.ancestors[np.ix_(nodes, places)]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_the_likeliest_are_those_of_a_stable_sort(dtype: torch.dtype, k: int) -> None:
    values = torch.randint(-9, 9, (5, 30), generator=torch.Generator().manual_seed(0)).to(dtype)
    values[1, 3:] = -torch.inf
    values[2, [4, 20]] = torch.nan
    places, found = likeliest(values.numpy(), k)
    wanted = values.sort(dim=-1, descending=True, stable=True)
    assert places.tolist() == wanted.indices[:, :k].tolist()
    assert np.array_equal(found, wanted.values[:, :k].double().numpy(), equal_nan=True)


def test_log_q_of_a_draft_vocabulary_is_that_of_the_whole_one() -> None:
    logs = torch.log_softmax(torch.arange(6.0).reshape(2, 3), dim=-1)
    narrow = Candidates(
        np.zeros((2, 1), np.int64),
        np.zeros((2, 1)),
        logs,
        drafted=DraftVocab(torch.tensor([1, 4, 5]), 7),
    )
    assert narrow.log_probs is not None
    tokens = np.array([[5, 0], [1, 6]])
    assert np.array_equal(
        narrow.log_of(tokens),
        narrow.log_probs.gather(-1, torch.from_numpy(tokens)).double().numpy(),
    )
