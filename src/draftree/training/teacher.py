"""What the frozen target says of the texts a drafter learns from, computed as it is needed or kept in memory.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.base import Batch
from draftree.errors import UserError
from draftree.target import Needs, Target
from draftree.training.data import Sample

LAST = -1
"""`hidden_states[-1]`, which the LM head reads."""


@dataclass
class Teacher:
    """Batches of samples with the target's hidden states and logits.

    Attributes:
        target: frozen.
        needs: what the drafter reads of it.
        keep: whether hidden states are kept in memory, so that later epochs cost the LM head alone. That takes
            4 · D bytes for each token and layer, the last one included.
        seed: of the generators handed to the objective.
    """

    target: Target
    needs: Needs
    keep: bool = False
    seed: int = 0
    _kept: dict[int, dict[int, Tensor]] = field(default_factory=dict, repr=False)

    @torch.no_grad()
    def batch(self, samples: Sequence[Sample], step: int) -> Batch:
        """The samples of a step, padded at the end; later padding cannot change what the target says before it."""
        longest = max(len(s.tokens) for s in samples)
        tokens, learn = np.zeros((len(samples), longest), np.int64), np.zeros((len(samples), longest), np.bool_)
        for i, s in enumerate(samples):
            tokens[i, : len(s.tokens)], learn[i, : len(s.learn)] = s.tokens, s.learn
        device = self.target.decoder.device
        ids, learnt = torch.from_numpy(tokens).to(device), torch.from_numpy(learn).to(device)
        hidden, logits = self._recall(samples, longest) if self.keep else self._read(ids, self.needs.hidden)
        wanted = {layer: hidden[layer] for layer in self.needs.hidden}
        return Batch(ids, learnt, wanted, logits, self._generator(step))

    def _generator(self, step: int) -> torch.Generator:
        seed = np.random.SeedSequence([self.seed, 2, step % 2**32]).generate_state(1)[0]
        return torch.Generator().manual_seed(int(seed))

    def _read(self, ids: Tensor, layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Hidden states [B, T, D] and logits [B, T, V] of a pass."""
        with self.target.decoder.tapped(layers) as hidden:
            logits = self.target.decoder.model(input_ids=ids, use_cache=False).logits
        return hidden, logits

    def _recall(self, samples: Sequence[Sample], longest: int) -> tuple[dict[int, Tensor], Tensor]:
        """The same from memory, where it is filled first for samples seen for the first time."""
        layers = tuple(dict.fromkeys((*self.needs.hidden, LAST)))
        for s in samples:
            if id(s) not in self._kept:
                ids = torch.from_numpy(s.tokens)[None].to(self.target.decoder.device)
                hidden, logits = self._read(ids, layers)
                if not self._kept:
                    self._check_head(hidden[LAST], logits)
                self._kept[id(s)] = {layer: h[0] for layer, h in hidden.items()}
        padded = {
            layer: torch.nn.utils.rnn.pad_sequence([self._kept[id(s)][layer] for s in samples], batch_first=True)
            for layer in layers
        }
        assert padded[LAST].shape[1] == longest
        return padded, self.target.decoder.model.get_output_embeddings()(padded[LAST])

    def _check_head(self, last: Tensor, logits: Tensor) -> None:
        again = self.target.decoder.model.get_output_embeddings()(last)
        if not torch.allclose(again, logits, rtol=1e-3, atol=1e-3):
            raise UserError("this target scales or caps its logits, so they cannot be made again from kept hidden states")
