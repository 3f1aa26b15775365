"""EDD: what it is trained as is what it decodes as."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import draftree.drafters.edd
from architectures import target
from drafting import prefix_difference
from draftree.drafters.edd import EDD, EDDDrafter
from draftree.target import Target
from draftree.testing import forwards
from draftree.training.masks import additive, block_starts, dual_block
from forests import NOISE, texts, worst

NAMES = ("llama", "qwen3", "gemma2", "gpt_neox", "mistral-sliding")
DECODED = ("llama", "qwen3", "gemma2", "gpt_neox")


def drafter_of(t: Target) -> EDDDrafter:
    """A fresh float64 drafter whose weights differ from the target's."""
    drafter = EDD(hidden_layer=-3).example(t)
    assert isinstance(drafter, EDDDrafter)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def both(name: str, rows: int, count: int, block: int, phase: int, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the training forward and of decoding, from the first block behind the text's first token on."""
    t = target(name)
    tokens = np.stack(texts([count] * rows, np.random.default_rng(seed)))
    return forwards.both(t, drafter_of(t), tokens, block, phase)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("block", "phase"), [(1, 0), (5, 0), (4, 3), (7, 2)])
def test_the_training_forward_is_the_decoding_forward(name: str, rows: int, block: int, phase: int) -> None:
    trained, steps = both(name, rows, 17, block, phase, seed=block)
    assert worst(steps, trained) < NOISE


@settings(max_examples=15)
@given(
    name=st.sampled_from(DECODED),
    rows=st.sampled_from([1, 3]),
    count=st.integers(9, 20),
    cut=st.integers(1, 8).flatmap(lambda block: st.tuples(st.just(block), st.integers(0, block - 1))),
    seed=st.integers(0, 2**32 - 1),
)
def test_and_so_for_random_blocks_and_phases(name: str, rows: int, count: int, cut: tuple[int, int], seed: int) -> None:
    trained, steps = both(name, rows, count, *cut, seed)
    assert worst(steps, trained) < NOISE


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_sees_a_leaked_root(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that shows the root its own hidden state, which decoding does not have yet, is told apart."""
    monkeypatch.setattr(draftree.drafters.edd, "dual_block", leaked)
    trained, steps = both(name, 1, 17, 4, 1, seed=0)
    assert worst(steps, trained) > 1e-3


def leaked(tokens: int, block: int, phase: int, window: int | None = None) -> Tensor:
    mask = dual_block(tokens, block, phase, window)
    mask[torch.arange(tokens), block_starts(tokens, block, phase)] = True
    return mask


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 24),
    cut=st.integers(1, 9).flatmap(lambda block: st.tuples(st.just(block), st.integers(0, block - 1))),
    window=st.none() | st.integers(1, 8),
)
def test_the_dual_block_mask_is_its_rule(tokens: int, cut: tuple[int, int], window: int | None) -> None:
    """Input i of a block [s, e) sees h_k for k < s, and t_k for s ≤ k ≤ i."""
    block, phase = cut
    edges = [0, *range(block - phase, tokens, block), tokens]
    rule = np.zeros((tokens, 2 * tokens), np.bool_)
    for s, e in pairwise(edges):
        for i in range(s, e):
            for k in range(tokens):
                near = window is None or i - k < window
                rule[i, k] = k < s and near
                rule[i, tokens + k] = s <= k <= i and near
    mask = dual_block(tokens, block, phase, window)
    assert np.array_equal(mask.numpy(), rule)
    starts = block_starts(tokens, block, phase)
    assert not mask[torch.arange(tokens), starts].any()  # the root's own h
    for i, s in enumerate(starts.tolist()):
        assert int(mask[i].sum()) == (i + 1 if window is None else min(i + 1, window))  # every position once
        assert s <= i


def test_an_additive_mask_is_zero_where_visible() -> None:
    mask = additive(torch.tensor([[[[True, False]]]]), torch.float32)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.flatten().tolist() == [0.0, torch.finfo(torch.float32).min]


def test_a_prefix_is_kept_and_the_rest_read_anew() -> None:
    assert prefix_difference(target("llama"), drafter_of(target("llama"))) < NOISE
