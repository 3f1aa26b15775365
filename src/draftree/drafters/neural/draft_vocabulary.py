"""Draft vocabulary, and the embedding and LM head that a drafter shares with its target.

A draft vocabulary is the tokens that are most frequent in the training data. The head is computed
for these alone, which in a small drafter is most of a pass; a token outside cannot be drafted, and
is written by the target itself. So nothing is lost but, where such a token comes, the rest of a
chain.

Shapes: M positions, D hidden size, V vocabulary, V′ draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn

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


@final
class TargetEmbedding(nn.Module):
    """A module that calls the target's embedding and has no weights.

    Args:
        target: the target.
        like: returns a tensor that has the dtype of the result.
    """

    def __init__(self, target: Target, like: Callable[[], Tensor]) -> None:
        super().__init__()
        self._target, self._like = target, like

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [R, n, D] of tokens [R, n]."""
        return self._target.decoder.embed(tokens).to(self._like().dtype)


@final
class TargetHead(nn.Module):
    """A module that computes the target's LM head, for a draft vocabulary or for all tokens.

    It has no weights except the map `d2t` from V′ to V.

    Args:
        target: the target.
        size: V′, the size of the draft vocabulary; 0 for all tokens.
        raw: whether to omit computations that the target applies to its logits, such as scaling.
            The network that contains this module then does them.

    Attributes:
        d2t: [V′] differences between the target's ids and 0 … V′ − 1, as in EAGLE-3's checkpoints;
            None for the whole vocabulary.
    """

    d2t: Tensor | None

    def __init__(self, target: Target, size: int = 0, raw: bool = False) -> None:
        super().__init__()
        self._target, self._raw = target, raw
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long) if size else None)
        self._rows: Callable[[Tensor], Tensor] | None = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._rows = None  # of another map

    @property
    def weight(self) -> Tensor:
        """Return the target's weight [V, D], from whose shape callers read the vocabulary size."""
        return self._target.decoder.head_weight

    @property
    def draft_vocabulary(self) -> DraftVocab | None:
        """Return the draft vocabulary; None if all tokens can be drafted."""
        return vocabulary_from_offsets(self.d2t, self._target)

    def fit_vocabulary(self, counts: Ints) -> None:
        """Choose the tokens with the highest counts [V] as the draft vocabulary."""
        if self.d2t is not None:
            self.d2t.copy_(offsets(torch.from_numpy(most_frequent_tokens(counts, len(self.d2t)))))
            self._rows = None

    def forward(self, states: Tensor) -> Tensor:
        """Return logits […, V′] in the target's dtype.

        The input […, D] is in the space of the output of the target's final norm.
        """
        if self._rows is None:
            part = self.draft_vocabulary
            self._rows = self._target.decoder.head_for(
                None if part is None else part.ids, self._raw, for_drafts=True
            )
        return self._rows(states.to(self._target.decoder.dtype))


@final
@dataclass(frozen=True)
class Shared:
    """The tokens that two vocabularies have in common.

    This is token-level intersection (TLI: Timor et al., arXiv 2502.05202).

    Attributes:
        drafted: their ids in the target's vocabulary; only these tokens can be drafted.
        columns: [V′] their ids in the drafter's vocabulary.
        reads: [V] the drafter's token for each target token. If the drafter lacks the token, it is
            the last token of the drafter's encoding of the same text.
    """

    drafted: DraftVocab
    columns: Tensor
    reads: Tensor

    @classmethod
    def of(cls, target: Target, small: Target) -> Self:
        """Return the shared tokens of a target and a language model, found by their tokenizers.

        Raises:
            UserError: one of the models has no tokenizer, or they have no token in common.
        """
        theirs, ours = target.tokenizer, small.tokenizer
        space, own = _space(theirs), _space(ours)
        known: dict[str, int] = {}
        for token, number in ours.get_vocab().items():
            alike = space + token[len(own) :] if own and space and token.startswith(own) else token
            if number < small.decoder.vocab:
                known.setdefault(alike, number)
        vocab = {
            number: token
            for token, number in theirs.get_vocab().items()
            if number < target.decoder.vocab
        }
        shared = sorted(number for number, token in vocab.items() if token in known)
        if not shared:
            raise UserError(
                f"drafter '{small.name}' and target '{target.name}' have no token in common, allowed is at least one"
            )
        reads = np.zeros(target.decoder.vocab, np.int64)
        for number, token in vocab.items():
            if token in known:
                reads[number] = known[token]
            elif pieces := ours.encode(theirs.decode([number]), add_special_tokens=False):
                reads[number] = pieces[-1]
        device = small.decoder.device
        ids = DraftVocab(torch.tensor(shared, device=device), target.decoder.vocab)
        columns = torch.tensor([known[vocab[number]] for number in shared], device=device)
        return cls(ids, columns, torch.from_numpy(reads).to(device))


def _space(tokenizer: Any) -> str:
    """Return the character by which a tokenizer represents a space."""
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(" ", add_special_tokens=False))
    return str(pieces[0])[:1] if pieces else ""
