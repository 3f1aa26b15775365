"""Base class of drafters whose only state is the committed text of each sequence.

Shapes: F frontier nodes, K candidates.
"""

from collections.abc import Sequence

import numpy as np

from draftree.drafters.base import replace_slots
from draftree.tree import AcceptResult, Floats, Ints, Tree

Texts = tuple[Ints, ...]
NO_TEXT = np.zeros(0, np.int64)


def extend_texts(texts: Texts, tree: Tree, verdict: AcceptResult) -> Texts:
    """Return the texts with root and accepted tokens appended."""
    longer = list(texts)
    for root in range(tree.roots):
        row = int(tree.row[root])
        longer[row] = np.concatenate((longer[row], tree.tokens[verdict.committed_nodes(root)]))
    return tuple(longer)


def truncate_texts(texts: Texts, lengths: Ints, rows: Ints | None) -> Texts:
    """Return all texts, of which some are cut to their first `lengths[r]` tokens.

    `rows` are the slots of the texts to cut; None stands for all.
    """
    return replace_slots(texts, rows, [t[:n] for t, n in zip(texts, lengths.tolist(), strict=True)])


def pad_candidates(
    candidates: Sequence[tuple[Sequence[int] | Ints, Sequence[float] | Floats]], k: int
) -> tuple[Ints, Floats]:
    """Return lists of candidates as arrays [F, K'] of tokens and values, padded with 0.

    K' is the length of the longest list, at least 1 and at most `k`.
    """
    width = max([1, *(min(k, len(tokens)) for tokens, _ in candidates)])
    tokens, values = (
        np.zeros((len(candidates), width), np.int64),
        np.zeros((len(candidates), width)),
    )
    for i, (some, theirs) in enumerate(candidates):
        n = min(width, len(some))
        tokens[i, :n], values[i, :n] = some[:n], theirs[:n]
    return tokens, values
