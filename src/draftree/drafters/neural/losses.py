"""Training losses: sums over learnt tokens, divided by the number of learnt tokens in the batch.

Shapes: B batch, T tokens, M learnt positions, V vocabulary, V′ draft vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from draftree.drafters.base import Batch
from draftree.tree import DraftVocab
from draftree.utils.padding import pad_end


def predicting_positions(learn: Tensor, distance: int = 1) -> Tensor:
    """Return [B, T] whether a position predicts a label that is `distance` tokens ahead."""
    return pad_end(learn[:, distance:], 1, min(distance, learn.shape[1]))


def select_target_logits(batch: Batch, at: Tensor, drafted: DraftVocab | None) -> Tensor:
    """Return the target's logits [M, V′] after the positions marked in `at` [B, T].

    They are restricted to the tokens that can be drafted.
    """
    return batch.target(at) if drafted is None else batch.target(at, drafted.ids)


def kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return KL(p‖q) of next-token distributions [M, V], summed over positions, in nats.

    This is eq. 4 of EDD + PCT. No gradient flows to the target's logits.
    """
    log_p = torch.log_softmax(target_logits.detach().float(), dim=-1)
    return kl_div(
        torch.log_softmax(draft_logits.float(), dim=-1), log_p, reduction="sum", log_target=True
    )


def draft_loss(
    kind: Literal["kl", "ce"],
    batch: Batch,
    draft_logits: Tensor,
    at: Tensor | None = None,
    drafted: DraftVocab | None = None,
) -> Tensor:
    """Return the loss of a draft model that predicts the next token.

    It is the KL divergence from the target (`kl`) or the cross-entropy with the text (`ce`). With a
    draft vocabulary, the target's distribution is restricted to its tokens, and other labels are
    skipped.

    Args:
        kind: `kl` (EDD + PCT, eq. 4) or `ce` (the ablation of its Table 3).
        batch: the training data.
        draft_logits: [M, V′] the draft logits at the M marked positions.
        at: [B, T] the marked positions; by default all positions that predict labels,
            `predicting_positions(batch.learn)`.
        drafted: the draft vocabulary; None for the whole vocabulary.
    """
    at = predicting_positions(batch.learn) if at is None else at
    if kind == "kl":
        return kl(select_target_logits(batch, at, drafted), draft_logits) / batch.count
    wanted = batch.tokens.roll(-1, 1)[at]
    if drafted is not None:
        wanted, draft_logits = drafted.columns(wanted, draft_logits)
    return cross_entropy(draft_logits.float(), wanted, reduction="sum") / batch.count


def soft_cross_entropy(target_logits: Tensor, draft_logits: Tensor, k: int = 0) -> Tensor:
    """Return −Σ p log q of next-token distributions [M, V], summed over positions.

    If k is positive, the sum is over the target's k most likely tokens. Over all tokens it is the
    classification loss of EAGLE and EAGLE-3; over k it is HASS's top-K loss, which does not
    renormalise p.
    """
    p, log_q = (
        torch.softmax(target_logits.detach().float(), dim=-1),
        torch.log_softmax(draft_logits.float(), dim=-1),
    )
    if k:
        p, tokens = p.topk(min(k, p.shape[-1]), dim=-1)
        log_q = log_q.gather(-1, tokens)
    return -(p * log_q).sum()
