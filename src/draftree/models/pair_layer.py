"""A decoder layer that reads pairs of token embeddings and features, as EAGLE-3's does.

Shapes: R slots, n tokens a slot, S slots of the cache, H hidden size, D entries of a head.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class PairLayer(nn.Module, ABC):
    """Describe a drafter's layer whose attention reads an embedding and a feature side by side.

    Attributes:
        input_layernorm: the norm of the embedding.
        hidden_norm: the norm of the feature.
        self_attn: the attention, whose input is twice as wide as its output.
        post_attention_layernorm: the norm before the feed-forward layer.
        mlp: the feed-forward layer.
        native: the same layer by native kernels, if they are used.
    """

    input_layernorm: nn.Module
    hidden_norm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    native: Any = None

    def run_modules(
        self,
        pairs: "Pairs",
        residual: Tensor,
        turned: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: Mapping[str, Any],
    ) -> Tensor:
        """Return the layer's output [R, n, H], computed by its torch modules.

        Args:
            pairs: the inputs of the attention.
            residual: [R, n, H] the residual stream to which the attention's output is added.
            turned: [R, n, D] cosines and sines of the positions.
            mask: [R or 1, 1, n, S] added to the scores.
            cache: the cache, as a keyword argument of the attention.
        """
        x = torch.cat(
            (self.input_layernorm(pairs.embeddings), self.hidden_norm(pairs.features)), dim=-1
        )
        attended, _ = self.self_attn(x, position_embeddings=turned, attention_mask=mask, **cache)
        x = residual + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@dataclass(frozen=True)
class Pairs:
    """Hold the inputs of a `PairLayer`.

    Attributes:
        embeddings: [R, n, H] the embedding of each token.
        features: [R, n, H] the feature of each token.
    """

    embeddings: Tensor
    features: Tensor
