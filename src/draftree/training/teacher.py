"""Training batches with the frozen target's hidden states and logits.

Shapes: B batch, T tokens, M requested positions, D hidden size, V vocabulary, H key-value heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.data.samples import Sample
from draftree.drafters.base import Batch
from draftree.target.target import LAST, Needs, Target
from draftree.training.feature_cache import Shards, padded, read


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
    shards: Shards | None = None

    def batch(self, chosen: Sequence[int], step: int, count: float | None = None) -> Batch:
        """Return the chosen samples, padded at the end.

        Padding at the end cannot change what the target computes before it.

        Args:
            chosen: [B] sample numbers.
            step: of the run; with seed and sample number it decides what the objective draws.
            count: learnt tokens the loss is divided by; those of this batch by default.
        """
        parts = [self.samples[i] for i in chosen]
        tokens, learn = padded([s.tokens for s in parts]), padded([s.learn for s in parts])
        device = self.target.decoder.device
        ids, learnt = torch.from_numpy(tokens).to(device), torch.from_numpy(learn).to(device)
        features = (
            read(self.target, ids, self.needs) if self.shards is None else self.shards.batch(chosen)
        )
        hidden = {layer: features.hidden[layer] for layer in self.needs.hidden}

        @torch.no_grad()
        def logits(at: Tensor, ids: Tensor | None = None) -> Tensor:
            decoder, states = self.target.decoder, features.hidden[LAST][at]
            return decoder.head(states) if ids is None else decoder.head_for(ids)(states)

        generators, shared = (
            tuple(self._generator(2, step, i) for i in chosen),
            self._generator(4, step),
        )
        total = float(max(learn.sum(), 1) if count is None else count)
        return Batch(ids, learnt, hidden, features.kv, logits, generators, total, shared)

    def _generator(self, purpose: int, step: int, *sample: int) -> torch.Generator:
        seed = np.random.SeedSequence([self.seed, purpose, step % 2**32, *sample]).generate_state(
            1
        )[0]
        return torch.Generator().manual_seed(int(seed))
