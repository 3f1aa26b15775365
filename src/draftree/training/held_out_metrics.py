"""Metrics of a drafter on held-out text during training.

Shapes: B batch, T tokens, V vocabulary, M learnt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.costs.curves import Costs, CostTable
from draftree.data.samples import Sample
from draftree.drafters.base import Batch, Trainable
from draftree.drafters.neural.losses import before
from draftree.evaluation.target_trace import Text
from draftree.evaluation.teacher_forcing import spread
from draftree.evaluation.tree_acceptance import counted, expected_length
from draftree.policies.base import Policy
from draftree.training.distributed import Processes
from draftree.training.teacher import Teacher

DEPTHS = 10
"""The depth of the simulated chains of held-out text."""
PHASES = range(0, DEPTHS, 3)
"""Offsets at which blocks begin; a few of them, so that each depth is met at many tokens."""
TEXTS, TOKENS = 12, 48
"""Held-out texts along which trees are grown, and tokens of each at most: trees are many times the
work of chains."""


@dataclass(frozen=True)
class Measures:
    """Held-out figures.

    Attributes:
        held_out_loss: the training objective, a mean over learnt tokens.
        overlap: E[Σ min(p, q)] over learnt tokens: how often a draft drawn from q would be accepted
            at temperature 1.
        acceptance_length: of simulated greedy chains, tokens a step: 1 + Σ over depths of the
            product of rates.
        acceptance_by_depth: how often the draft at a depth is the target's choice, where all before
            it were.
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
) -> Measures | None:
    """Measure some samples, each process its share of them; return None where there are none.

    Args:
        teacher: holds the samples.
        drafter: its model is left in evaluation mode.
        samples: their numbers.
        together: samples in a forward pass.
        processes: of the run.
    """
    if not samples:
        return None
    drafter.model.eval()
    mine = samples[processes.rank :: processes.world]
    found = np.zeros(2 + 2 * DEPTHS)  # loss, overlap, matched and reached by depth
    for i in range(0, len(mine), together):
        found += _sums(drafter, teacher.batch(mine[i : i + together], -1, count=1.0))
    found = processes.summed(torch.from_numpy(found)).cpu().numpy()
    learnt = sum(int(teacher.samples[i].learn.sum()) for i in samples)
    rates = found[2 : 2 + DEPTHS] / np.maximum(found[2 + DEPTHS :], 1)
    length = float(1 + np.cumprod(rates).sum())
    return Measures(
        float(found[0] / learnt),
        float(found[1] / (learnt * len(PHASES))),
        length,
        tuple(rates.tolist()),
    )


def _sums(drafter: Trainable[Any], batch: Batch) -> np.ndarray:
    """Return [2 + 2 · depths] figures, summed over a batch.

    These are loss, overlap, and by depth the matches and how often the depth was reached.
    """
    at = before(batch.learn)
    wanted = batch.target(at).float()
    choice = torch.full_like(batch.tokens, -1)
    choice[at] = wanted.argmax(-1)
    p = wanted.softmax(-1)
    found = np.zeros(2 + 2 * DEPTHS)
    found[0] = float(drafter.loss(batch))
    for phase in PHASES:
        draft = drafter.forward(batch, DEPTHS, phase)
        found[1] += float(torch.minimum(p, draft[at].float().softmax(-1)).sum())
        found[2:] += np.concatenate(acceptance_by_depth(batch, choice, draft.argmax(-1), phase))
    return found


def acceptance_by_depth(
    batch: Batch, choice: Tensor, guess: Tensor, phase: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count, by depth, the chains that are still the target's greedy choice.

    A chain is drafted from the first token of each block. The text stands in for the chain's own
    tokens. So a block is followed while the text, too, is what the target would have chosen. Where
    it is not, nothing is known of the depths after it.

    Args:
        batch: held-out text.
        choice: [B, T] the target's likeliest token after each, where the next one is learnt.
        guess: [B, T] the drafter's.
        phase: how many tokens the first block lacks.

    Returns:
        [depths] blocks whose draft matched at that depth, and [depths] blocks that reached it.
    """
    match = (guess == choice)[:, :-1].cpu().numpy()
    known = (choice[:, :-1] == batch.tokens[:, 1:]).cpu().numpy()
    learn = batch.learn[:, 1:].cpu().numpy()
    matched, reached = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for start in range(-phase % DEPTHS, match.shape[1], DEPTHS):
        alive = learn[:, start].copy()
        for depth, at in enumerate(range(start, min(start + DEPTHS, match.shape[1]))):
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
    """Return the acceptance length of a policy's trees, as `evaluation/tree_acceptance.py` has it.

    Return None if nothing is learnt after a prompt.

    Args:
        teacher: holds the samples.
        drafter: its model is left in evaluation mode.
        policy: grows the trees.
        costs: for a policy that reads them.
        samples: numbers of those that may be measured on.
        processes: of the run; each goes along its share of the texts.
    """
    drafter.model.eval()
    texts = [
        text for i in spread(samples, TEXTS) if (text := _first(teacher.samples[i])) is not None
    ]
    mine = texts[processes.rank :: processes.world]
    found = (
        processes.summed(
            torch.from_numpy(np.stack(counted(teacher.target, drafter, policy, mine, costs)))
        )
        .cpu()
        .numpy()
    )
    return expected_length(*found) if found[1].any() else None


def _first(sample: Sample) -> Text | None:
    """Return what is learnt of a sample first, after what comes before it.

    Return None of fewer than 2 tokens.
    """
    start = int(np.flatnonzero(sample.learn)[0])
    end = start + int(np.argmin(np.append(sample.learn[start : start + TOKENS], False)))
    return Text(sample.tokens[:end], start) if start and end - start > 1 else None
