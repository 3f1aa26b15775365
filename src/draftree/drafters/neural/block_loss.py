"""The training objective of block drafters: losses of the slots after random roots of a text.

Shapes: B batch, T tokens, A anchors, M learnt slots, V′ (draft) vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from draftree.drafters.base import Batch
from draftree.drafters.neural.losses import predicting_positions, select_target_logits
from draftree.tree import DraftVocab


@dataclass(frozen=True)
class AnchoredSlots:
    """The slots that are trained in a batch.

    Attributes:
        anchors: [B, A] positions of the roots. In texts with fewer than A roots, the others are not
            marked in `valid`.
        labels: [B, A, drafts] position of the token that each slot predicts.
        valid: [B, A, drafts] whether the slot's token and all earlier tokens of the block are
            labels.
        weight: [B, A, drafts] weight of each slot in the loss. The loss of a sample becomes the
            weighted mean over its slots times its number of labels, so that a batch may be divided
            among processes.
    """

    anchors: Tensor
    labels: Tensor
    valid: Tensor
    weight: Tensor


def draw_anchors(batch: Batch, drafts: int, count: int, gamma: float) -> AnchoredSlots:
    """Draw roots among the labels of each text, and compute the weights of the slots after them.

    The weight of slot k is exp(−k/γ), for k = 0, 1, ….

    Args:
        batch: the texts.
        drafts: number of drafted tokens in a block.
        count: A, the largest number of roots in a text, drawn without replacement.
        gamma: γ; with 0 all weights are equal.
    """
    learn, device = batch.learn, batch.tokens.device
    able = (learn & predicting_positions(learn)).cpu()
    able[:, 0] = False
    drawn_at = [row.nonzero()[:, 0] for row in able]
    drawn_at = [
        row[torch.randperm(len(row), generator=g)[:count]].sort().values
        for row, g in zip(drawn_at, batch.generators, strict=True)
    ]
    most = max(1, max(map(len, drawn_at)))
    anchors = torch.ones(len(learn), most, dtype=torch.long)
    chosen = torch.zeros(len(learn), most, dtype=torch.bool)
    for i, row in enumerate(drawn_at):
        anchors[i, : len(row)], chosen[i, : len(row)] = row, True
    anchors, chosen = anchors.to(device), chosen.to(device)
    k = torch.arange(drafts, device=device)
    labels = anchors[:, :, None] + 1 + k
    inside = labels.clamp(max=learn.shape[1] - 1)
    valid = (
        chosen[:, :, None]
        & (labels < learn.shape[1])
        & learn.gather(1, inside.flatten(1)).view_as(labels)
    )
    valid = valid.long().cumprod(-1).bool()
    weight = valid * (torch.exp(-k / gamma) if gamma else torch.ones(len(k), device=device))
    total = weight.sum(dim=(1, 2), keepdim=True).clamp(min=1e-9)
    return AnchoredSlots(anchors, inside, valid, weight / total * learn.sum(1)[:, None, None])


def target_logits_at(batch: Batch, places: AnchoredSlots, drafted: DraftVocab | None) -> Tensor:
    """Return the target's logits [M, V′] for the tokens that the valid slots predict, in order."""
    at = places.labels - 1
    marked = torch.zeros_like(batch.learn)
    rows = torch.arange(len(at), device=at.device)[:, None, None].expand_as(at)
    marked[rows[places.valid], at[places.valid]] = True
    number = marked.flatten().long().cumsum(0).view_as(marked) - 1
    return select_target_logits(batch, marked, drafted)[
        number[rows[places.valid], at[places.valid]]
    ]


def marginal_loss(
    kind: Literal["ce", "kl"],
    batch: Batch,
    logits: Tensor,
    places: AnchoredSlots,
    drafted: DraftVocab | None,
) -> Tensor:
    """Return the weighted loss of slots that predict their tokens independently of each other.

    Args:
        kind: `ce`, the cross-entropy with the text, for tokens that can be drafted; or `kl`,
            KL(p‖q) with p from the target.
        batch: the texts.
        logits: [B, A, drafts, V′] the draft logits.
        places: the slots that are trained.
        drafted: the draft vocabulary; None for the whole vocabulary.
    """
    q, weight = logits[places.valid].float(), places.weight[places.valid]
    if kind == "kl":
        log_p = torch.log_softmax(target_logits_at(batch, places, drafted).detach().float(), dim=-1)
        each = kl_div(torch.log_softmax(q, dim=-1), log_p, reduction="none", log_target=True).sum(
            -1
        )
        return (weight * each).sum() / batch.count
    wanted = tokens_at(batch, places)
    if drafted is not None:
        (columns, q), (_, weight) = drafted.columns(wanted, q), drafted.columns(wanted, weight)
        wanted = columns
    return (weight * cross_entropy(q, wanted, reduction="none")).sum() / batch.count


def tokens_at(batch: Batch, places: AnchoredSlots) -> Tensor:
    """Return the text's tokens [M] that the valid slots predict."""
    return batch.tokens.gather(1, places.labels.flatten(1)).view_as(places.labels)[places.valid]
