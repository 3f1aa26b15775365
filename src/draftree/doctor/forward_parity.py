"""Compare a drafter's distributions in its training forward with those in decoding.

Shapes: B texts, T tokens, V vocabulary.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from draftree.data.samples import Sample
from draftree.drafters.base import Batch, Drafter, Trainable
from draftree.drafters.neural.draft_masks import block_starts
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import replay
from draftree.target.target import Target
from draftree.training.teacher import Teacher
from draftree.tree import Ints


def batch_of(target: Target, drafter: Drafter[Any], tokens: Ints, seed: int = 0) -> Batch:
    """Return a training batch with given texts [B, T] and the target's outputs for them.

    All tokens but the first of each text count in the loss.
    """
    samples = [Sample(row, np.arange(len(row)) > 0) for row in tokens]
    return Teacher(target, drafter.needs, samples, seed).batch(range(len(samples)), 0)


@torch.inference_mode()
def draft_log_probs(
    target: Target, drafter: Drafter[Any], tokens: Ints, block: int, phase: int
) -> Tensor:
    """Return the log-probabilities [B, T', V] that a drafter gives in decoding, in texts [B, T].

    The texts are divided into blocks of `block` tokens with the given `phase`; see `block_starts`.
    The first token of a block is a root, and the others are treated as accepted drafts, so that
    each block is one step. The first decoded block is the first that does not start at the
    beginning of the text, because it needs a prompt before it. T' is the number of tokens from its
    root on.
    """
    first = int(min(s for s in block_starts(tokens.shape[1], block, phase) if s > 0))
    texts = [
        TokenText(np.append(row, 0), first) for row in tokens
    ]  # nothing after the last token is used
    blocks = replay(target, drafter, texts, 1, block)
    return torch.stack(
        [cast(Tensor, candidates.log_probs) for step in blocks for _, candidates in step.asked],
        dim=1,
    )


def log_probs_of_both(
    target: Target, drafter: Trainable[Any], tokens: Ints, block: int, phase: int
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the training forward and of decoding, both [B, T', V].

    For the arguments see `largest_difference`, for T' see `draft_log_probs`.
    """
    with torch.no_grad():
        logits = drafter.forward(batch_of(target, drafter, tokens), block, phase)
    steps = draft_log_probs(target, drafter, tokens, block, phase)
    return torch.log_softmax(logits.to(steps.dtype), dim=-1)[:, -steps.shape[1] :], steps


def largest_difference(
    target: Target, drafter: Trainable[Any], tokens: Ints, block: int, phase: int
) -> float:
    """Return the largest difference between draft probabilities in training and in decoding.

    Args:
        target: the target.
        drafter: the drafter that is compared.
        tokens: [B, T] token ids of the texts.
        block: number of tokens in a block, which decoding reads as one step.
        phase: number of tokens by which the first block is shortened; see `block_starts`.
    """
    trained, steps = log_probs_of_both(target, drafter, tokens, block, phase)
    return float((trained.exp() - steps.exp()).abs().max())
