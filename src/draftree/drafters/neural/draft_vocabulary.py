"""The tokens that a drafter can draft, if they are only a part of the target's vocabulary.

A draft vocabulary is the tokens that are most frequent in the training data. The head is computed
for these alone, which in a small drafter is most of a pass; a token outside cannot be drafted, and
is written by the target itself. So nothing is lost but, where such a token comes, the rest of a
chain.

Shapes: V vocabulary, V′ draft vocabulary.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.target.target import Target
from draftree.tree import DraftVocab, Ints

CACHE_ATTRIBUTE = "draftree_drafted"
"""Name of an attribute of a map `d2t`: the map's version and its `DraftVocab` object."""


def most_frequent_tokens(counts: Ints, size: int) -> Ints:
    """Return the `size` tokens with the highest counts [V], in ascending order of their ids.

    Among tokens with equal counts, lower ids are preferred.
    """
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def offsets(ids: Tensor) -> Tensor:
    """Return the differences [V′] between the target's ids and the indices 0 … V′ − 1.

    Checkpoints store them as `d2t`.
    """
    return ids - torch.arange(len(ids), device=ids.device)


def offsets_to_ids(d2t: Tensor) -> Tensor:
    """Return the target's ids [V′] for a map `d2t` of offsets; this is the inverse of `offsets`."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def vocabulary_from_offsets(d2t: Tensor | None, target: Target) -> DraftVocab | None:
    """Return the draft vocabulary for a map of offsets [V′], or None if there is no map.

    See `offsets`.
    """
    if d2t is None:
        return None
    state, known = (
        None if d2t.is_inference() else d2t._version,
        vars(d2t).get(CACHE_ATTRIBUTE),
    )  # needed in every pass
    if known is None or state is None or known[0] != state:
        known = state, DraftVocab(offsets_to_ids(d2t), target.decoder.vocab)
        setattr(d2t, CACHE_ATTRIBUTE, known)
    found: DraftVocab = known[1]
    return found


def expand_logits(logits: Tensor, drafted: DraftVocab | None) -> Tensor:
    """Expand logits […, V′] of a draft vocabulary to […, V], with −∞ for other tokens."""
    return logits if drafted is None else drafted.whole(logits)


def check_size(method: str, size: int, target: Target) -> None:
    """Check that a draft vocabulary is not larger than the target's vocabulary.

    Raises:
        UserError: it is larger.
    """
    if size > target.decoder.vocab:
        allowed = f"at most the target's vocabulary: {target.decoder.vocab}"
        raise UserError(f"{method}: draft_vocab is {size}, allowed is {allowed}")


def check_map(d2t: Tensor | None, target: Target, folder: Path) -> None:
    """Check that a map [V′] of offsets leads to ids in the target's vocabulary.

    Raises:
        UserError: it leads to other ids.
    """
    if d2t is not None and not d2t.is_meta:
        ids = offsets_to_ids(d2t)
        if ids.min() < 0 or ids.max() >= target.decoder.vocab:
            got = f"token ids {int(ids.min())} … {int(ids.max())}"
            raise UserError(
                f"'{folder}' drafts {got} by its d2t, allowed are 0 … {target.decoder.vocab - 1}"
            )
