"""What drafters share whose state is the text itself: each row's committed tokens."""

import numpy as np

from draftree.tree import Ints, Tree, Verdict

Texts = tuple[Ints, ...]


def extended(texts: Texts, tree: Tree, verdict: Verdict) -> Texts:
    """The texts with root and accepted tokens behind them."""
    longer = list(texts)
    for root in range(tree.roots):
        row = int(tree.row[root])
        longer[row] = np.concatenate((longer[row], tree.tokens[verdict.kept(root)]))
    return tuple(longer)


def cut(texts: Texts, lengths: Ints) -> Texts:
    """The first `lengths[r]` tokens of each text."""
    return tuple(t[:n] for t, n in zip(texts, lengths.tolist(), strict=True))
