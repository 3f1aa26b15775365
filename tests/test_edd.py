"""EDD: what it is trained as is what it decodes as."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import draftree.drafters._decoding as decoding
import draftree.drafters.edd
from architectures import VOCAB, model, target
from draftree.drafters.base import Batch
from draftree.drafters.edd import EDD, EDDDrafter
from draftree.sampling import Drawing
from draftree.target import Target
from draftree.training.masks import additive, block_starts, dual_block
from draftree.tree import Ints, Tree, Verdict
from forests import NOISE, attach, texts, worst

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


@torch.no_grad()
def batch_of(t: Target, drafter: EDDDrafter, tokens: Ints) -> Batch:
    """Texts [B, T] and what the stock target says of them."""
    ids = torch.from_numpy(tokens)
    out = model(t.name)(input_ids=ids, output_hidden_states=True, use_cache=False)
    hidden = {layer: out.hidden_states[layer] for layer in drafter.needs.hidden}
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), hidden, out.logits, torch.Generator())


@torch.inference_mode()
def decoded(t: Target, drafter: EDDDrafter, tokens: Ints, block: int, phase: int) -> Tensor:
    """[B, T', V] draft logits along texts [B, T], block by block: the root is a block's first token, the rest is drafted.

    The first block's root is the token behind a prompt, which therefore starts at the first block that does not begin
    the text.
    """
    rows, count = tokens.shape
    edges = [*sorted({int(s) for s in block_starts(count, block, phase)} - {0}), count]
    cache = t.new_cache(rows, count + block)
    verified = t.prefill(cache, [row[: edges[0]] for row in tokens], drafter.needs)
    state = drafter.start([row[: edges[0]] for row in tokens], tokens[:, edges[0]], verified.taps)
    found: list[Tensor] = []
    for start, end in pairwise(edges):
        tree = Tree.planted(np.arange(rows), tokens[:, start])
        frontier = np.arange(rows)
        for position in range(start, end):
            candidates, state = drafter.expand(state, tree, frontier, 1, Drawing())
            assert candidates.log_probs is not None
            found.append(candidates.log_probs)
            if position + 1 < end:
                tree = attach(tree, frontier.tolist(), tokens[:, position + 1].tolist())
                frontier = np.arange(len(tree) - rows, len(tree))
        verified = t.verify(cache, tree, drafter.needs)
        paths = [tree.of_row(row)[1:] for row in range(rows)]
        verdict = Verdict(tuple(paths), np.zeros(rows, np.int64))
        t.commit(cache, tree, verdict)
        kept = np.concatenate([np.append(row, path) for row, path in enumerate(paths)])
        state = drafter.commit(state, tree, verdict, verified.taps.take(kept))
    return torch.stack(found, dim=1)


def both(name: str, rows: int, count: int, block: int, phase: int, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the training forward and of decoding, from the first block behind the text's first token on."""
    t = target(name)
    drafter = drafter_of(t)
    tokens = np.stack(texts([count] * rows, np.random.default_rng(seed)))
    trained = torch.log_softmax(drafter.forward(batch_of(t, drafter, tokens), block, phase).double(), dim=-1)
    steps = decoded(t, drafter, tokens, block, phase)
    return trained[:, count - steps.shape[1] :].detach(), steps


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft log-probabilities are float32 by design; here they are compared closer than that."""
    stock = decoding.drawn

    def exact(logits: Tensor, k: int, drawing: Drawing, rows: Ints, depths: Ints) -> object:
        found = stock(logits, k, drawing, rows, depths)
        object.__setattr__(found, "log_probs", torch.log_softmax(logits.double(), dim=-1))
        return found

    monkeypatch.setattr(decoding, "drawn", exact)


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
    mask = additive(torch.tensor([[True, False]]), torch.float32)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.flatten().tolist() == [0.0, torch.finfo(torch.float32).min]


def test_a_prefix_is_kept_and_the_rest_read_anew() -> None:
    """The drafter's state after truncation and a further prompt equals that of a drafter that read it all."""
    rng = np.random.default_rng(0)
    t = target("llama")
    drafter = drafter_of(t)
    first = texts([12, 7], rng)
    shared = np.array([5, 3])
    second = [np.concatenate((text[:n], rng.integers(3, VOCAB, 6 + n))) for text, n in zip(first, shared, strict=True)]
    roots = np.array([4, 5])
    cache = t.new_cache(2, 16)
    state = drafter.start(first, roots, t.prefill(cache, first, drafter.needs).taps)
    _, state = drafter.expand(state, Tree.planted(np.arange(2), roots), np.arange(2), 2, Drawing())
    cache.truncate(shared)
    state = drafter.truncate(state, shared)
    reused = drafter.start(second, roots, t.prefill(cache, second, drafter.needs).taps, state)
    fresh = drafter.start(second, roots, t.prefill(t.new_cache(2, 16), second, drafter.needs).taps)
    tree = Tree.planted(np.arange(2), roots)
    one, _ = drafter.expand(reused, tree, np.arange(2), 2, Drawing())
    other, _ = drafter.expand(fresh, tree, np.arange(2), 2, Drawing())
    assert one.log_probs is not None
    assert other.log_probs is not None
    assert worst(one.log_probs, other.log_probs) < NOISE
