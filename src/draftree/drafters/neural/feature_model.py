"""The interface of the network of a feature drafter.

Shapes: R slots, n tokens a slot, D hidden size, V vocabulary, S slots.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn
from transformers import Cache

from draftree.models.kv_cache import LayerShape
from draftree.target.target import LAST
from draftree.tree import Drafted


class PairNet(nn.Module, ABC):
    """A network over pairs.

    Attributes:
        shape: of what its layer stores for a pair.
        width: D of the features it is fed.
        depth: how many layers it has.
        levels: K, how many networks it is made of: one for each depth of a draft, the last for all
            deeper ones.
    """

    shape: LayerShape
    width: int
    depth: int = 1
    levels: int = 1

    def at(self, level: int) -> "PairNet":
        """Return the network of a level; by default there is one."""
        return self

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """Return the features […, D] of the target's hidden states […, D′] of the layers needed.

        By default they are the last hidden states.
        """
        return hidden[LAST]

    @abstractmethod
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        """Return the output [R, n, D] of pairs.

        Given are tokens [R, n], features [R, n, D], positions [R, n] and the additive mask [R, 1,
        n, S].
        """

    def with_logits(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward` gives, and the draft logits [R, n, V′] of it."""
        out: Tensor = self(tokens, features, positions, mask, cache)
        return out, self.logits(out)

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """Draft logits […, V′] of outputs […, D], for the tokens that can be drafted."""

    @property
    @abstractmethod
    def drafted(self) -> Drafted | None:
        """Return the tokens that can be drafted; None where all can."""
