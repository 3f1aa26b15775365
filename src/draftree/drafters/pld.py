"""Prompt lookup: what followed the last few tokens when they stood in the text before (Saxena 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from draftree.drafters._texts import Texts, cut, extended
from draftree.drafters.base import Drafter, Method
from draftree.errors import UserError
from draftree.sampling import Drawing
from draftree.target import Taps, Target
from draftree.tree import Candidates, Ints, Tree, Verdict


@final
@dataclass(frozen=True)
class PLD(Method):
    """Prompt lookup decoding.

    Attributes:
        ngram: longest suffix looked for; shorter ones down to one token are tried after it.
        length: how many tokens of the continuation are drafted.
        confidence: q of every token found; there is no model to ask, and policies that prune by value need a number.
    """

    ngram: int = 3
    length: int = 10
    confidence: float = 0.8

    def __post_init__(self) -> None:
        if self.ngram < 1 or self.length < 1 or not 0 < self.confidence <= 1:
            raise UserError(
                f"pld: got ngram={self.ngram}, length={self.length}, confidence={self.confidence}; "
                "allowed are at least 1, at least 1, and a number in (0, 1]"
            )

    def open(self, target: Target) -> "PLDDrafter":
        return PLDDrafter(self)

    def example(self, target: Target) -> "PLDDrafter":
        return PLDDrafter(self)


@final
class PLDDrafter(Drafter[Texts]):
    """Drafts the continuation of the latest earlier occurrence; its state is each row's committed text."""

    def __init__(self, knobs: PLD) -> None:
        self.knobs = knobs

    def start(self, prompts: Sequence[Ints], roots: Ints, taps: Taps, state: Texts | None = None) -> Texts:
        return tuple(prompts)

    def expand(self, state: Texts, tree: Tree, frontier: Ints, k: int, drawing: Drawing) -> tuple[Candidates, Texts]:
        tokens = np.zeros((len(frontier), 1), np.int64)
        log_q = np.full((len(frontier), 1), -np.inf)
        for i, node in enumerate(frontier):
            path = tree.path(int(node))
            drafted = tree.tokens[path[1:]]
            found = continuation(np.append(state[int(tree.row[node])], tree.tokens[path[0]]), self.knobs)
            if len(found) > len(drafted) and np.array_equal(found[: len(drafted)], drafted):
                tokens[i, 0], log_q[i, 0] = found[len(drafted)], np.log(self.knobs.confidence)
        return Candidates(tokens, log_q), state

    def commit(self, state: Texts, tree: Tree, verdict: Verdict, taps: Taps) -> Texts:
        return extended(state, tree, verdict)

    def truncate(self, state: Texts, lengths: Ints) -> Texts:
        return cut(state, lengths)


def continuation(text: Ints, knobs: PLD) -> Ints:
    """What followed the longest suffix of `text` that stands in it before, at its latest place; empty if none does."""
    for n in range(min(knobs.ngram, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        places = np.flatnonzero((windows == text[-n:]).all(axis=1))
        if places.size:
            after = int(places[-1]) + n
            return text[after : after + knobs.length]
    return text[:0]
