"""Metrics of a drafter on held-out text during training.

Shapes: B batch, T tokens, V vocabulary, M learnt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.data.samples import Sample
from draftree.drafters.base import Batch, Trainable
from draftree.drafters.neural.losses import predicting_positions
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import take_evenly
from draftree.evaluation.tree_acceptance import count_matches, expected_length
from draftree.policies.base import Policy
from draftree.training.distributed import Processes
from draftree.training.teacher import Teacher

CHAIN_LENGTH = 10
"""Length in tokens of the chains that are simulated on held-out texts."""
PHASES = range(0, CHAIN_LENGTH, 3)
"""Phases of the blocks, see `block_starts`. Several are used so that each depth occurs at many
tokens."""
TREE_TEXTS, MAX_TREE_TEXT_TOKENS = 12, 48
"""Number of held-out texts on which trees are measured, and largest number of tokens of each. They
are small, because trees take much more time than chains."""


@dataclass(frozen=True)
class HeldOutMetrics:
    """Store figures that were measured on held-out samples.

    Attributes:
        held_out_loss: mean of the training loss over learnt tokens.
        overlap: mean of Σ min(p, q) over learnt tokens, with the distributions p of the target and
            q of the drafter: the rate at which drafts drawn from q would be accepted at temperature
            1.
        acceptance_length: acceptance length of simulated greedy chains in tokens per step: 1 + Σ_d
            Π_{j ≤ d} r_j, with the rates r_j of `acceptance_by_depth`.
        acceptance_by_depth: rate at which the draft at each depth is the target's choice, given
            that all drafts before it were.
    """

    held_out_loss: float
    overlap: float
    acceptance_length: float
    acceptance_by_depth: tuple[float, ...]


@torch.no_grad()
def evaluate(
    teacher: Teacher,
    drafter: Trainable[Any],
    samples: Sequence[int],
    together: int,
    processes: Processes,
) -> HeldOutMetrics | None:
    """Measure the figures on held-out samples; return None if there are no samples.

    Each process measures a part of the samples.

    Args:
        teacher: object that provides batches of samples.
        drafter: drafter to measure; its model stays in evaluation mode.
        samples: numbers of the held-out samples.
        together: number of samples in a forward pass.
        processes: processes of the run.
    """
    if not samples:
        return None
    drafter.model.eval()
    mine = samples[processes.rank :: processes.world]
    found = np.zeros(2 + 2 * CHAIN_LENGTH)  # loss, overlap, matched and reached by depth
    for i in range(0, len(mine), together):
        found += _sums(drafter, teacher.batch(mine[i : i + together], -1, count=1.0))
    found = processes.sum(torch.from_numpy(found)).cpu().numpy()
    learnt = sum(int(teacher.samples[i].learn.sum()) for i in samples)
    rates = found[2 : 2 + CHAIN_LENGTH] / np.maximum(found[2 + CHAIN_LENGTH :], 1)
    length = float(1 + np.cumprod(rates).sum())
    return HeldOutMetrics(
        float(found[0] / learnt),
        float(found[1] / (learnt * len(PHASES))),
        length,
        tuple(rates.tolist()),
    )


def _sums(drafter: Trainable[Any], batch: Batch) -> np.ndarray:
    """Return [2 + 2 · DEPTHS] figures, summed over a batch.

    They are the loss, the overlap, the matches at each depth, and the number of chains that reached
    each depth.
    """
    at = predicting_positions(batch.learn)
    wanted = batch.target(at).float()
    choice = torch.full_like(batch.tokens, -1)
    choice[at] = wanted.argmax(-1)
    p = wanted.softmax(-1)
    found = np.zeros(2 + 2 * CHAIN_LENGTH)
    found[0] = float(drafter.loss(batch))
    for phase in PHASES:
        draft = drafter.forward(batch, CHAIN_LENGTH, phase)
        found[1] += float(torch.minimum(p, draft[at].float().softmax(-1)).sum())
        found[2:] += np.concatenate(acceptance_by_depth(batch, choice, draft.argmax(-1), phase))
    return found


def acceptance_by_depth(
    batch: Batch, choice: Tensor, guess: Tensor, phase: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count by depth the greedy chains that still match the target's choices.

    A chain is drafted from the first token of each block, given the text's tokens instead of its
    own. So it is followed only as long as the text equals the target's choices, because nothing is
    known after another token.

    Args:
        batch: batch of held-out texts.
        choice: [B, T] the target's likeliest token after each token whose next one is learnt; −1
            elsewhere.
        guess: [B, T] the drafter's likeliest token after each token.
        phase: number of tokens that the first block lacks.

    Returns:
        Two arrays [DEPTHS]: number of chains that match at each depth, and that reached it.
    """
    match = (guess == choice)[:, :-1].cpu().numpy()
    known = (choice[:, :-1] == batch.tokens[:, 1:]).cpu().numpy()
    learn = batch.learn[:, 1:].cpu().numpy()
    matched, reached = np.zeros(CHAIN_LENGTH), np.zeros(CHAIN_LENGTH)
    for start in range(-phase % CHAIN_LENGTH, match.shape[1], CHAIN_LENGTH):
        alive = learn[:, start].copy()
        for depth, at in enumerate(range(start, min(start + CHAIN_LENGTH, match.shape[1]))):
            alive &= learn[:, at]
            reached[depth] += alive.sum()
            alive &= match[:, at]
            matched[depth] += alive.sum()
            alive &= known[:, at]
    return matched, reached


def tree_length(
    teacher: Teacher,
    drafter: Trainable[Any],
    policy: Policy,
    costs: Costs | CostTable,
    samples: Sequence[int],
    processes: Processes,
) -> float | None:
    """Measure the acceptance length of a policy's trees; see `evaluation/tree_acceptance.py`.

    Return None if no sample has learnt tokens after a prompt.

    Args:
        teacher: object that has the samples and the target.
        drafter: drafter to measure; its model stays in evaluation mode.
        policy: policy that grows the trees.
        costs: costs for a policy that reads them.
        samples: numbers of the held-out samples.
        processes: processes of the run; each measures a part of the texts.
    """
    drafter.model.eval()
    texts = [
        text
        for i in take_evenly(samples, TREE_TEXTS)
        if (text := _first_learnt(teacher.samples[i])) is not None
    ]
    mine = texts[processes.rank :: processes.world]
    found = (
        processes.sum(
            torch.from_numpy(np.stack(count_matches(teacher.target, drafter, policy, mine, costs)))
        )
        .cpu()
        .numpy()
    )
    return expected_length(*found) if found[1].any() else None


def _first_learnt(sample: Sample) -> TokenText | None:
    """Return the first learnt part of a sample with the tokens before it as its prompt.

    Return None if this part has fewer than 2 tokens, or no tokens before it.
    """
    start = int(np.flatnonzero(sample.learn)[0])
    end = start + int(
        np.argmin(np.append(sample.learn[start : start + MAX_TREE_TEXT_TOKENS], False))
    )
    return TokenText(sample.tokens[:end], start) if start and end - start > 1 else None
