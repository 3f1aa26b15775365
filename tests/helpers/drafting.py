"""What the tests of drafters share."""

from typing import Any

import numpy as np
import torch

from architectures import VOCAB
from draftree.drafters.base import Batch, Drafter, Trainable, TrainableMethod
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Ints, Tree
from forests import texts, worst


def perturbed(method: TrainableMethod, t: Target, scale: float = 0.1) -> Trainable[Any]:
    """Return a drafter of the target's dtype with noise on all weights, so that every input matters."""
    torch.manual_seed(1)
    drafter = method.example(t)
    with torch.no_grad():
        for parameter in drafter.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return drafter


def tokens_of(rows: int, count: int, seed: int = 0) -> Ints:
    """Return random texts [rows, count]."""
    return np.stack(texts([count] * rows, np.random.default_rng(seed)))


def after_all(batch: Batch) -> torch.Tensor:
    """[B, T, V] the target's logits after every token."""
    return batch.target(torch.ones_like(batch.learn)).view(*batch.tokens.shape, -1)


def prefix_difference(t: Target, drafter: Drafter[Any]) -> float:
    """How far a drafter's state after truncation and a further prompt is from that of one that read it all."""
    rng = np.random.default_rng(0)
    first = texts([12, 7], rng)
    shared = np.array([5, 3])
    second = [
        np.concatenate((text[:n], rng.integers(3, VOCAB, 6 + n)))
        for text, n in zip(first, shared, strict=True)
    ]
    roots = np.array([4, 5])
    cache = t.new_cache(2, 16)
    state = drafter.start(first, roots, t.prefill(cache, first, drafter.needs).hidden_states)
    _, state = drafter.expand(
        state, Tree.from_roots(np.arange(2), roots), np.arange(2), 2, Drawing()
    )
    cache.truncate(shared)
    state = drafter.truncate(state, shared)
    reused = drafter.start(
        second, roots, t.prefill(cache, second, drafter.needs).hidden_states, state
    )
    fresh = drafter.start(
        second, roots, t.prefill(t.new_cache(2, 16), second, drafter.needs).hidden_states
    )
    tree = Tree.from_roots(np.arange(2), roots)
    one, _ = drafter.expand(reused, tree, np.arange(2), 2, Drawing())
    other, _ = drafter.expand(fresh, tree, np.arange(2), 2, Drawing())
    assert one.log_probs is not None
    assert other.log_probs is not None
    return worst(one.log_probs, other.log_probs)
