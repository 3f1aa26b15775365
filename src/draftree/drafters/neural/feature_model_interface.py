"""The interface of the network of a feature drafter.

Shapes: R slots, n tokens a slot, M selected pairs, D hidden size, V vocabulary, S slots.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn
from transformers import Cache

from draftree.models.kv_cache import LayerShape
from draftree.target.target import LAST
from draftree.tree import DraftVocab, Ints
from draftree.utils.hardware import to_device


def select_pairs(out: Tensor, logits: Tensor, selected: Ints | None) -> tuple[Tensor, Tensor]:
    """Return outputs [R, n, D] and logits [R, n, V′] of pairs, or those of selected pairs alone.

    torch may round a product of fewer rows otherwise. So the logits of all pairs are computed, as
    in recorded passes.

    Args:
        out: the outputs.
        logits: the logits.
        selected: [M] indices of pairs from 0 to R n − 1; None for all.
    """
    if selected is None:
        return out, logits
    at = to_device(selected, out.device)
    return out.flatten(0, 1)[at], logits.flatten(0, 1)[at]


class PairNet(nn.Module, ABC):
    """A network that reads pairs of a token and a feature.

    Attributes:
        shape: the shape of the keys and values that a layer stores for a pair.
        width: D, the size of the features.
        depth: number of layers.
        levels: K, the number of networks, one for each depth of a draft. The last one serves all
            larger depths too.
    """

    shape: LayerShape
    width: int
    depth: int = 1
    levels: int = 1

    def at(self, level: int) -> "PairNet":
        """Return the network of a level; by default there is only one network."""
        return self

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """Return features […, D] computed from the target's hidden states […, D′] by layer.

        By default they are the last hidden states.
        """
        return hidden[LAST]

    @abstractmethod
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        """Return the output [R, n, D] for pairs.

        Args:
            tokens: [R, n] the tokens of the pairs.
            features: [R, n, D] the features of the pairs.
            positions: [R, n] the positions of the pairs.
            mask: [R, 1, n, S] the additive attention mask.
            cache: the KV cache.
        """

    def with_logits(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Cache,
        selected: Ints | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `forward`, and the draft logits [R, n, V′] computed from it.

        With `selected` [M], indices of pairs from 0 to R n − 1, return the outputs [M, D] and the
        logits [M, V′] of these pairs alone. The keys and values of all pairs are cached.
        """
        out: Tensor = self(tokens, features, positions, mask, cache)
        return select_pairs(out, self.logits(out), selected)

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """Return draft logits […, V′] for outputs […, D], for the tokens that can be drafted."""

    @property
    @abstractmethod
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the tokens that can be drafted; None for all."""
