"""Sampling functions of tensors alone, which can be captured in a CUDA graph.

Shapes: R rows, F nodes of a frontier, n verified nodes, D depths, V vocabulary, V′ tokens that can
be drafted.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from draftree.kernels.log_probs import log_softmax
from draftree.sampling.distributions import likeliest
from draftree.sampling.draft_sampling import GUMBEL_ERROR_SCALE, warp_finite_rows
from draftree.sampling.params import GREEDY, Sampling
from draftree.sampling.warpers import apply_warpers


@final
@dataclass(frozen=True)
class TokenChoice:
    """Choose tokens for all sequences in a recorded pass; equal objects choose in the same way.

    Attributes:
        setting: temperature and cuts such as top-k, without a seed.
        coupled: whether drafts are conditioned on the noise that samples the target's tokens.
        vocab: V, the size of the vocabulary.
    """

    setting: Sampling = GREEDY
    coupled: bool = False
    vocab: int = 0

    def log_q(
        self, logits: Tensor, noise: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return log q [R, F, V] of draft logits, as the host computes it, and its token ids.

        The ids are None if log q covers all tokens.

        Args:
            logits: [R, F, V′] the drafter's logits.
            noise: [R, 1, V] the noise with which the target's tokens after these nodes are sampled.
            ids: [V′] the tokens of the logits' columns; None for all tokens.
        """
        if not self.coupled:
            logits = logits if logits.dtype is torch.float64 else logits.float()
            return log_softmax(warp_finite_rows(logits, self.setting)), ids
        if ids is not None:  # noise and cuts need all tokens
            whole = logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf)
            logits = whole.index_copy(-1, ids, logits)
        log_q = torch.log_softmax(warp_finite_rows(logits.double(), self.setting), dim=-1)
        return torch.log_softmax(
            (log_q + noise) * (self.setting.temperature / GUMBEL_ERROR_SCALE), dim=-1
        ), None

    def __call__(self, logits: Tensor, noise: Tensor, depth: Tensor) -> Tensor:
        """Return [R, 2n] the likeliest token after each node, then the sampled ones; −1 for none.

        Args:
            logits: [R, n, V] the target's logits.
            noise: [R, D, V] the sampling noise by depth.
            depth: [R, n] the depth of each node.
        """
        best = likeliest(logits)
        if self.setting.greedy:
            return torch.cat((best, torch.full_like(best, -1)), dim=1)
        of_each = noise.gather(
            1, depth.clamp(max=noise.shape[1] - 1)[..., None].expand(-1, -1, self.vocab)
        )
        scores = apply_warpers(logits.flatten(0, 1), self.setting.processors).view(logits.shape)
        return torch.cat((best, likeliest(scores.double() + of_each)), dim=1)


LIKELIEST = TokenChoice()
"""Greedy decoding, which chooses the likeliest token after each node."""
