"""Base class of drafters with one head per depth on the target's last hidden state.

Shapes: R slots, F frontier nodes, K candidates, B batch, T tokens, M learnt positions, D hidden
size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from draftree.drafters.base import Batch, State, Trainable
from draftree.drafters.neural.draft_masks import block_starts
from draftree.drafters.neural.draft_vocabulary import (
    expand_logits,
    most_frequent_tokens,
    offsets,
    vocabulary_from_offsets,
)
from draftree.drafters.neural.losses import kl, predicting_positions, select_target_logits
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.tree import Candidates, DraftVocab, Ints, Tree
from draftree.utils.hardware import to_device


class ResBlock(nn.Module):
    """A residual block: x + SiLU(W x + b).

    With further inputs (conditions), a linear map of all inputs replaces the first x.

    W is initialised with zeros, as in the official codes. At first only SiLU(b) is added.

    Args:
        width: D, the size of the output.
        conditions: the number of further vectors of size D in the input.
    """

    def __init__(self, width: int, conditions: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + conditions) * width, width)
        self.res_connection = (
            nn.Linear((1 + conditions) * width, width) if conditions else nn.Identity()
        )
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output […, D] for an input […, (1 + conditions) · D]."""
        out: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return out


def lm_head(target: Target, bias: bool, draft_vocab: int = 0) -> nn.Linear:
    """Return a float32 linear layer [V or V′, D] that is initialised as the target's LM head.

    The bias is initialised with the bias of the LM head, or with zeros.
    """
    theirs: Any = target.decoder.model.get_output_embeddings()
    vocab, width = target.decoder.head_weight.shape
    head = nn.Linear(width, draft_vocab or vocab, bias=bias)
    copy_head_rows(head, theirs, slice(draft_vocab or vocab))
    return head


@torch.no_grad()
def copy_head_rows(head: nn.Linear, theirs: nn.Linear, ids: Tensor | slice) -> None:
    """Copy the rows of the target's LM head for the given ids into a head."""
    head.weight.copy_(theirs.weight[ids])
    if head.bias is not None:
        head.bias.zero_() if theirs.bias is None else head.bias.copy_(theirs.bias[ids])


def latest_by_sequence(rows: Ints, values: Tensor, old: Tensor) -> Tensor:
    """Return [R, D] the last of the values [T, D] of each sequence; `rows` [T] gives their slots.

    Sequences without a value keep the old one.
    """
    present, from_end = np.unique(rows[::-1], return_index=True)
    found = old.clone()
    found[to_device(present, old.device)] = values[to_device(len(rows) - 1 - from_end, old.device)]
    return found


def group_by_depth(tree: Tree, frontier: Ints) -> tuple[Ints, Ints]:
    """Return one node for each depth and sequence of a frontier, and its index for each node [F].

    This saves work if all nodes of the same depth and sequence have the same candidates.
    """
    places = np.stack((tree.depth[frontier], tree.row[frontier]))
    _, first, which = np.unique(places, axis=1, return_index=True, return_inverse=True)
    return frontier[first], np.asarray(which.ravel(), np.int64)


def make_candidates(
    logits: Tensor,
    heads: int,
    k: int,
    drawing: Drawing,
    rows: Ints,
    depths: Ints,
    drafted: DraftVocab | None,
) -> Candidates:
    """Return the candidates that follow from logits [F, V′].

    Nodes whose depth is `heads` or larger have no candidates.
    """
    found = draw_candidates(logits, k, drawing, rows, depths, drafted)
    beyond = (depths >= heads)[:, None]
    return replace(
        found,
        tokens=np.where(beyond, 0, found.tokens),
        log_q=np.where(beyond, -np.inf, found.log_q),
    )


class HeadsNet(nn.Module, ABC):
    """The weights of the heads.

    Attributes:
        d2t: [V′] differences between the target's ids of the tokens that can be drafted and 0 … V′
            − 1; None if all tokens can be drafted.
    """

    d2t: Tensor | None

    def map(self, draft_vocab: int) -> None:
        """Allocate the map `d2t` of a draft vocabulary; 0 stands for the whole vocabulary."""
        self.register_buffer(
            "d2t", torch.zeros(draft_vocab, dtype=torch.long) if draft_vocab else None
        )

    @property
    @abstractmethod
    def last(self) -> Sequence[nn.Linear]:
        """Return the linear layer of each head that computes its logits."""


class HeadsDrafter(Trainable[State]):
    """Base class of drafters with a separate head for each depth."""

    model: "HeadsNet"
    needs = HiddenStateSpec(hidden=(LAST,))

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the tokens that can be drafted; None for all."""
        return vocabulary_from_offsets(self.model.d2t, self._target)

    @final
    def fit_vocabulary(self, counts: Ints) -> None:
        """Choose the most frequent tokens as the draft vocabulary.

        The heads are initialised with the rows of the target's LM head for these tokens.
        """
        if self.model.d2t is not None:
            ids = torch.from_numpy(most_frequent_tokens(counts, len(self.model.d2t)))
            self.model.d2t.copy_(offsets(ids))
            theirs: Any = self._target.decoder.model.get_output_embeddings()
            for head in self.model.last:
                copy_head_rows(head, theirs, ids.to(theirs.weight.device))

    @abstractmethod
    def readers(self, batch: Batch) -> Sequence[Callable[[Any], Tensor]]:
        """Return, for each head, a function that computes its logits [N, V′] at N positions.

        The argument of the function is an index into [B, T] that selects these positions.
        """

    @abstractmethod
    def weights(self, head: int) -> tuple[float, float]:
        """Return the weights of a head's cross-entropy with the text and of its KL(p‖q)."""

    @final
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        """Return logits [B, T, V].

        They are 0 below the last head and in the first block of a text.
        """
        count = batch.tokens.shape[1]
        start, at = block_starts(count, block, phase), torch.arange(count)
        drafted = self.draft_vocabulary
        vocab = self._target.decoder.vocab if drafted is None else len(drafted.ids)
        logits = self._like.new_zeros(*batch.tokens.shape, vocab)
        for depth, read in enumerate(self.readers(batch)[:block]):
            begun = start[(at - start == depth) & (start > 0)]  # decoding begins after a prompt
            logits[:, begun + depth] = read((slice(None), begun - 1)).to(logits.dtype)
        return expand_logits(logits, drafted)

    @final
    def loss(self, batch: Batch) -> Tensor:
        """Return the heads' weighted losses, summed over labels and divided by `batch.count`."""
        total = self._like.new_zeros(())
        learnt = predicting_positions(batch.learn)
        drafted = self.draft_vocabulary
        theirs = select_target_logits(batch, learnt, drafted) if self.weights(0)[1] else None
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(
            batch.learn
        )
        for head, read in enumerate(self.readers(batch)):
            distance, (text, target) = 2 + head, self.weights(head)
            at = predicting_positions(batch.learn, distance)
            logits = read(at).float()
            if text:
                wanted = batch.tokens.roll(-distance, 1)[at]
                columns, known = (
                    (wanted, logits) if drafted is None else drafted.columns(wanted, logits)
                )
                total = total + text * cross_entropy(known, columns, reduction="sum")
            if theirs is not None:  # labels with a position at this distance before them
                total = total + target * kl(theirs[(places > head)[learnt]], logits)
        return total / batch.count
