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
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.training.feature_cache import Shards, pad, read_features


@dataclass(frozen=True)
class Teacher:
    """Provide batches of samples with the target's hidden states, keys, values and logits.

    Attributes:
        target: the frozen target.
        needs: layers whose hidden states, keys and values the drafter reads.
        samples: all samples; batches refer to them by number.
        seed: seed of the random generators that the training loss gets.
        shards: features on disk; if None, the target computes them for every batch.
    """

    target: Target
    needs: HiddenStateSpec
    samples: Sequence[Sample]
    seed: int = 0
    shards: Shards | None = None

    def batch(self, chosen: Sequence[int], step: int, count: float | None = None) -> Batch:
        """Return a batch of the chosen samples, padded at the end, with the target's outputs.

        Padding at the end does not change the target's outputs before it.

        Args:
            chosen: [B] numbers of the samples.
            step: step of the run. With the seed and the number of a sample it determines the random
                draws of the loss.
            count: number of learnt tokens by which the loss is divided; by default the number in
                this batch.
        """
        parts = [self.samples[i] for i in chosen]
        tokens, learn = pad([s.tokens for s in parts]), pad([s.learn for s in parts])
        device = self.target.decoder.device
        ids, learnt = torch.from_numpy(tokens).to(device), torch.from_numpy(learn).to(device)
        features = (
            read_features(self.target, ids, self.needs)
            if self.shards is None
            else self.shards.batch(chosen)
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
