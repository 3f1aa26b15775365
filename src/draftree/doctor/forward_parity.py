"""Compare a drafter's distributions in its training forward with those in decoding.

Shapes: B texts, T tokens, V vocabulary.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from draftree.data.samples import Sample
from draftree.drafters.base import Batch, Drafter, Trainable
from draftree.drafters.neural.training_masks import block_starts
from draftree.evaluation.target_trace import Text
from draftree.evaluation.teacher_forcing import replay
from draftree.target.target import Target
from draftree.training.teacher import Teacher
from draftree.tree import Ints


def batch_of(target: Target, drafter: Drafter[Any], tokens: Ints, seed: int = 0) -> Batch:
    """Return a training batch of texts [B, T] with the target's outputs.

    All tokens but the first are learnt.
    """
    samples = [Sample(row, np.arange(len(row)) > 0) for row in tokens]
    return Teacher(target, drafter.needs, samples, seed).batch(range(len(samples)), 0)


@torch.inference_mode()
def decoded(target: Target, drafter: Drafter[Any], tokens: Ints, block: int, phase: int) -> Tensor:
    """Return draft log-probabilities [B, T', V] along texts [B, T].

    Each block's first token is a root, the others are drafted. T' counts from the first root on.
    Every draft is accepted, so each block is one step. The first block that is decoded needs a
    prompt before it, so it is the first one that does not start at the beginning of the text.
    """
    first = int(min(s for s in block_starts(tokens.shape[1], block, phase) if s > 0))
    texts = [
        Text(np.append(row, 0), first) for row in tokens
    ]  # nothing after the last token is used
    blocks = replay(target, drafter, texts, 1, block)
    return torch.stack(
        [cast(Tensor, candidates.log_probs) for step in blocks for _, candidates in step.asked],
        dim=1,
    )


def both(
    target: Target, drafter: Trainable[Any], tokens: Ints, block: int, phase: int
) -> tuple[Tensor, Tensor]:
    """Return [B, T', V] log-probabilities of the training forward, and of decoding."""
    with torch.no_grad():
        logits = drafter.forward(batch_of(target, drafter, tokens), block, phase)
    steps = decoded(target, drafter, tokens, block, phase)
    return torch.log_softmax(logits.to(steps.dtype), dim=-1)[:, -steps.shape[1] :], steps


def apart(target: Target, drafter: Trainable[Any], tokens: Ints, block: int, phase: int) -> float:
    """Return the largest difference of a draft probability between training and decoding."""
    trained, steps = both(target, drafter, tokens, block, phase)
    return float((trained.exp() - steps.exp()).abs().max())
