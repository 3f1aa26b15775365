"""Training losses over learnt positions.

Shapes: B batch, T tokens, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor

from draftree.drafters.base import Batch


def kl(target_logits: Tensor, draft_logits: Tensor, learn: Tensor) -> Tensor:
    """KL(p‖q) of the target's and the draft's next-token distributions (EDD + PCT, eq. 4).

    Args:
        target_logits: [B, T, V]; its gradient is not taken.
        draft_logits: [B, T, V].
        learn: [B, T] whether token t is learnt; it is predicted from position t − 1.

    Returns:
        The mean over learnt tokens, in nats.
    """
    at = learn[:, 1:]
    log_p = torch.log_softmax(target_logits[:, :-1][at].detach().float(), dim=-1)
    log_q = torch.log_softmax(draft_logits[:, :-1][at].float(), dim=-1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True) / at.sum().clamp(min=1)


def cross_entropy(tokens: Tensor, draft_logits: Tensor, learn: Tensor) -> Tensor:
    """−log q of the text itself (the ablation of EDD + PCT, Table 3), the mean over learnt tokens in nats."""
    at = learn[:, 1:]
    loss = torch.nn.functional.cross_entropy(draft_logits[:, :-1][at].float(), tokens[:, 1:][at], reduction="sum")
    return loss / at.sum().clamp(min=1)


def draft_loss(kind: Literal["kl", "ce"], batch: Batch, draft_logits: Tensor) -> Tensor:
    """The loss of a draft model that predicts the next token: `kl` against the target, or `ce` against the text."""
    if kind == "kl":
        return kl(batch.logits, draft_logits, batch.learn)
    return cross_entropy(batch.tokens, draft_logits, batch.learn)
