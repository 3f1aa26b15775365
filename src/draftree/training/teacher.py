"""What the frozen target says of the texts a drafter learns from.

Shapes: B batch, T tokens, M positions asked for, D hidden size, V vocabulary, H key-value heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftree.data.samples import Sample
from draftree.drafters.base import Batch
from draftree.models.cache import Catcher
from draftree.models.target import LAST, Needs, Target


@dataclass(frozen=True)
class Features:
    """What the target says of a batch of texts: hidden states [B, T, D] (the last one among them), keys and values."""

    hidden: dict[int, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]


class Kept(Protocol):
    """Features that need not be computed again."""

    def batch(self, chosen: Sequence[int]) -> Features:
        """Those of some samples, padded at the end."""


@dataclass(frozen=True)
class Teacher:
    """Batches of samples with the target's internals and logits.

    Attributes:
        target: frozen.
        needs: what the drafter reads of it.
        samples: all of them; batches name them by number.
        seed: of the generators handed to the objective.
        shards: features kept on disk; without them the target reads every batch anew.
    """

    target: Target
    needs: Needs
    samples: Sequence[Sample]
    seed: int = 0
    shards: "Kept | None" = None

    def batch(self, chosen: Sequence[int], step: int, count: float | None = None) -> Batch:
        """The chosen samples, padded at the end; later padding cannot change what the target says before it.

        Args:
            chosen: [B] sample numbers.
            step: of the run; with seed and sample number it decides what the objective draws.
            count: learnt tokens the loss is divided by; those of this batch by default.
        """
        parts = [self.samples[i] for i in chosen]
        tokens, learn = padded([s.tokens for s in parts]), padded([s.learn for s in parts])
        device = self.target.decoder.device
        ids, learnt = torch.from_numpy(tokens).to(device), torch.from_numpy(learn).to(device)
        features = read(self.target, ids, self.needs) if self.shards is None else self.shards.batch(chosen)
        hidden = {layer: features.hidden[layer] for layer in self.needs.hidden}

        @torch.no_grad()
        def logits(at: Tensor) -> Tensor:
            return self.target.decoder.head(features.hidden[LAST][at])

        generators, shared = tuple(self._generator(2, step, i) for i in chosen), self._generator(4, step)
        total = float(max(learn.sum(), 1) if count is None else count)
        return Batch(ids, learnt, hidden, features.kv, logits, generators, total, shared)

    def _generator(self, purpose: int, step: int, *sample: int) -> torch.Generator:
        seed = np.random.SeedSequence([self.seed, purpose, step % 2**32, *sample]).generate_state(1)[0]
        return torch.Generator().manual_seed(int(seed))


@torch.no_grad()
def read(target: Target, ids: Tensor, needs: Needs) -> Features:
    """The internals of a pass over texts [B, T]."""
    count = int(target.decoder.config.num_hidden_layers)
    layers = tuple(dict.fromkeys((*needs.hidden, LAST)))
    catcher = Catcher({layer % count for layer in needs.kv})
    stack: Any = target.decoder.stack
    with target.decoder.tapped(layers) as hidden:
        stack(input_ids=ids, past_key_values=catcher, use_cache=True, **target.decoder.causal(ids))
    return Features(hidden, {layer: catcher.caught[layer % count] for layer in needs.kv})


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[B, T] rows padded with zeros at the end."""
    out = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
