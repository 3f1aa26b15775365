"""The interface of a forward pass: a packed batch and a cache in, logits and hidden states out.

A runner is chosen once, when a model is loaded. It never changes the modules of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from draftree.models.forward_batch import ForwardBatch
from draftree.models.kv_cache import SlotCache
from draftree.tree import Ints


@dataclass(frozen=True)
class Outputs:
    """Describe the requested results of a forward pass over N tokens.

    Attributes:
        layers: indices into transformers' `hidden_states`; negative ones count from the end.
        tokens: [K] the indices of the tokens after which logits are needed, ascending in a batch of
            one sequence; all by default.
    """

    layers: tuple[int, ...] = ()
    tokens: Ints | None = None


@dataclass(frozen=True)
class ModelOutput:
    """Hold the results of a forward pass.

    Attributes:
        logits: [K, V] logits after the requested tokens.
        hidden: hidden states [N, D] of all tokens, by index into transformers' `hidden_states`.
    """

    logits: Tensor
    hidden: Mapping[int, Tensor]


class ModelRunner(ABC):
    """Run the forward passes of one model.

    Attributes:
        packs: whether passes compute no padding, so that a long chunk of one sequence adds no work
            for the others.
    """

    packs: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self, batch: ForwardBatch, cache: SlotCache, outputs: Outputs = Outputs()
    ) -> ModelOutput:
        """Run a pass over a batch, and write its keys and values into scratch slots of the cache.

        `SlotCache.commit_tokens` commits these slots.
        """
