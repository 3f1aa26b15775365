"""The training objective of block drafters: losses of the slots after random roots of a text.

Shapes: B batch, T tokens, A anchors, M learnt slots, V′ (draft) vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from draftree.drafters.base import Batch
from draftree.drafters.neural.losses import before, said
from draftree.tree import Drafted


@dataclass(frozen=True)
class Anchored:
    """Slots that are learnt in a batch.

    Attributes:
        anchors: [B, A] positions of the roots, fewer than A of them marked in `valid`.
        labels: [B, A, drafts] position of the token that each slot drafts.
        valid: [B, A, drafts] whether that is learnt, and all before it in its block.
        weight: [B, A, drafts] of each slot in the loss; with it the loss of a sample is its
            weighted mean times its learnt tokens, so that a batch may be cut among processes.
    """

    anchors: Tensor
    labels: Tensor
    valid: Tensor
    weight: Tensor


def anchored(batch: Batch, drafts: int, count: int, gamma: float) -> Anchored:
    """Draw roots in the learnt part of each text, and weight the slots after them.

    The weight of slot k is exp(−k/γ), for k = 0, 1, ….

    Args:
        batch: the texts.
        drafts: of a block.
        count: A, how many roots at most in a text, without replacement.
        gamma: γ; 0 weighs all slots alike.
    """
    learn, device = batch.learn, batch.tokens.device
    able = (learn & before(learn)).cpu()
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
    return Anchored(anchors, inside, valid, weight / total * learn.sum(1)[:, None, None])


def said_at(batch: Batch, places: Anchored, drafted: Drafted | None) -> Tensor:
    """Return the target's logits [M, V′] for the tokens of the learnt slots, in their order."""
    at = places.labels - 1
    marked = torch.zeros_like(batch.learn)
    rows = torch.arange(len(at), device=at.device)[:, None, None].expand_as(at)
    marked[rows[places.valid], at[places.valid]] = True
    number = marked.flatten().long().cumsum(0).view_as(marked) - 1
    return said(batch, marked, drafted)[number[rows[places.valid], at[places.valid]]]


def marginal_loss(
    kind: Literal["ce", "kl"],
    batch: Batch,
    logits: Tensor,
    places: Anchored,
    drafted: Drafted | None,
) -> Tensor:
    """Return the weighted loss of slots that each predict a token independently of the others.

    Args:
        kind: `ce` against the text, of a draft vocabulary those tokens that are in it; or `kl`,
            KL(p‖q) to the target.
        batch: the texts.
        logits: [B, A, drafts, V′].
        places: what is learnt.
        drafted: the draft vocabulary; by default it is the whole one.
    """
    q, weight = logits[places.valid].float(), places.weight[places.valid]
    if kind == "kl":
        log_p = torch.log_softmax(said_at(batch, places, drafted).detach().float(), dim=-1)
        each = kl_div(torch.log_softmax(q, dim=-1), log_p, reduction="none", log_target=True).sum(
            -1
        )
        return (weight * each).sum() / batch.count
    wanted = tokens_at(batch, places)
    if drafted is not None:
        (columns, q), (_, weight) = drafted.columns(wanted, q), drafted.columns(wanted, weight)
        wanted = columns
    return (weight * cross_entropy(q, wanted, reduction="none")).sum() / batch.count


def tokens_at(batch: Batch, places: Anchored) -> Tensor:
    """Return the text's tokens [M] of the learnt slots."""
    return batch.tokens.gather(1, places.labels.flatten(1)).view_as(places.labels)[places.valid]
