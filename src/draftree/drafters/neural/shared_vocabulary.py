"""The tokens that the vocabularies of a target and of another language model have in common.

Shapes: V vocabulary, V′ shared vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.target.target import Target
from draftree.tree import DraftVocab


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
