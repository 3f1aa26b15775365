"""A table from each token to its likeliest successors, filled while decoding (Token Recycling).

Shapes: V vocabulary, K successors, N tokens with a line each, M stored lines, F tokens looked up.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from draftree.drafters.retrieval.suffix_match_drafts import Int32s
from draftree.tree import Ints

MISSING = -1
"""Stands for a missing successor or a missing line."""
MIN_LINES = 256
"""Number of lines for which memory is allocated at first."""
MAX_CONFIRMATIONS = 3
"""Largest number of confirmations in a row that is counted for a first successor."""


@dataclass
class Lines:
    """Append-only storage that several versions of a table share.

    Attributes:
        tokens: [M] the token of each line.
        successors: [M, K] the token's successors, the most likely first; `MISSING` in unused places.
        confirmed: [M] the number of times in a row that a new line of the token had the same first
            successor as the line before, at most `MAX_CONFIRMATIONS`.
        earlier: [M] the previous line of the same token; `MISSING` for its first line.
        newest: [V] the last line of each token.
        used: the number of lines.
    """

    tokens: Int32s
    successors: Int32s
    confirmed: Int32s
    earlier: Int32s
    newest: Int32s
    used: int = 0

    @classmethod
    def empty(cls, vocab: int, width: int, room: int) -> Self:
        """Return storage without lines.

        Args:
            vocab: V, the size of the vocabulary.
            width: K, the number of successors in a line.
            room: number of lines for which memory is allocated.
        """
        tokens, confirmed, earlier = np.empty((3, room), np.int32)
        return cls(
            tokens,
            np.empty((room, width), np.int32),
            confirmed,
            earlier,
            np.full(vocab, MISSING, np.int32),
        )

    def append(
        self, tokens: Ints | Int32s, successors: Ints | Int32s, confirmed: Ints | Int32s
    ) -> None:
        """Append lines for N different tokens."""
        at = slice(self.used, self.used + len(tokens))
        self.tokens[at], self.successors[at], self.confirmed[at] = tokens, successors, confirmed
        self.earlier[at] = self.newest[tokens]
        self.newest[tokens] = np.arange(at.start, at.stop)
        self.used = at.stop


@dataclass(frozen=True)
class Adjacency:
    """One version of a table, which consists of the first lines of a storage. It never changes.

    Attributes:
        lines: the storage, to which later versions may have appended lines.
        size: the number of lines of this version.
    """

    lines: Lines
    size: int = 0

    @classmethod
    def empty(cls, vocab: int, width: int) -> Self:
        """Return an empty table for `vocab` tokens with `width` successors each."""
        return cls(Lines.empty(vocab, width, 0))

    def __len__(self) -> int:
        """Return the number of lines."""
        return self.size

    def find(self, tokens: Ints | Int32s) -> Int32s:
        """Return the number of each token's line [F]; `MISSING` for a token without a line."""
        at = self.lines.newest[tokens]
        while (later := at >= self.size).any():
            at = np.where(later, self.lines.earlier[np.where(later, at, 0)], at)
        return at

    def look_up(
        self, tokens: Ints | Int32s, behind: "Adjacency | None" = None
    ) -> tuple[Int32s, Int32s]:
        """Return successors [F, K] of tokens, and how often in a row the first was confirmed.

        Args:
            tokens: [F] token ids.
            behind: a second table, for tokens that have no line in this one; K must be equal.
        """
        if not self.size and behind is not None:
            return behind.look_up(tokens)
        if not self.size:
            return np.full(
                (len(tokens), self.lines.successors.shape[1]), MISSING, np.int32
            ), np.zeros(len(tokens), np.int32)
        at = self.find(tokens)
        successors, confirmed = self.lines.successors[at], self.lines.confirmed[at]
        if (missing := at < 0).any():
            successors[missing], confirmed[missing] = MISSING, 0
            if behind is not None:
                successors[missing], confirmed[missing] = behind.look_up(tokens[missing])
        return successors, confirmed

    def plus(
        self, tokens: Ints, successors: Ints | Int32s, behind: "Adjacency | None" = None
    ) -> "Adjacency":
        """Return the table with new lines, which replace the earlier lines of the same tokens.

        Args:
            tokens: [N] token ids; of equal ones the last is used.
            successors: [N, K] the successors of each token.
            behind: a second table, for tokens that have no line in this one.
        """
        last = len(tokens) - 1 - np.unique(tokens[::-1], return_index=True)[1]
        tokens, successors = tokens[last], successors[last]
        before, confirmed = self.look_up(tokens, behind)
        same = (before[:, 0] == successors[:, 0]) & (before[:, 0] != MISSING)
        return self._plus(
            tokens, successors, np.where(same, np.minimum(confirmed + 1, MAX_CONFIRMATIONS), 0)
        )

    def join(self, other: "Adjacency") -> "Adjacency":
        """Return the table with the lines of another table added.

        They replace earlier lines of the same tokens.
        """
        return self._plus(*other.newest_lines()) if other.size else self

    def newest_lines(self) -> tuple[Int32s, Int32s, Int32s]:
        """Return the newest line of each token that has a line.

        Returns:
            The tokens [N]; their successors [N, K]; and the counts [N]. A count is the number of
            times in a row that the first successor was confirmed.
        """
        lines, size = self.lines, self.size
        last = size - 1 - np.unique(lines.tokens[:size][::-1], return_index=True)[1]
        return lines.tokens[last], lines.successors[last], lines.confirmed[last]

    def _plus(
        self, tokens: Ints | Int32s, successors: Ints | Int32s, confirmed: Ints | Int32s
    ) -> "Adjacency":
        lines = self.lines
        if lines.used != self.size or self.size + len(tokens) > len(
            lines.tokens
        ):  # another version has appended lines, or the storage is full
            mine, (vocab, width) = (
                self.newest_lines(),
                (len(lines.newest), lines.successors.shape[1]),
            )
            lines = Lines.empty(vocab, width, max(MIN_LINES, 2 * (len(mine[0]) + len(tokens))))
            lines.append(*mine)
        lines.append(tokens, successors, confirmed)
        return Adjacency(lines, lines.used)


def pairs_of(text: Ints, width: int) -> tuple[Ints, Int32s]:
    """Return the tokens [N] of a text that have a successor, and their successors [N, K].

    The most recent successor comes first.
    """
    if len(text) < 2:
        return np.zeros(0, np.int64), np.zeros((0, width), np.int32)
    pairs = np.stack((text[:-1], text[1:]), axis=1)[::-1]
    different, first = np.unique(pairs, axis=0, return_index=True)
    order = np.lexsort((first, different[:, 0]))  # by token, the most recent pair first
    tokens, begins, counts = np.unique(different[order, 0], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(begins, counts)
    found, few = np.full((len(tokens), width), MISSING, np.int32), rank < width
    found[np.repeat(np.arange(len(tokens)), counts)[few], rank[few]] = different[order, 1][few]
    return tokens, found


def merge_lists(first: Int32s, then: Int32s) -> Int32s:
    """Return lists [N, K] of the tokens in `first`, followed by tokens in `then`.

    Tokens of `then` that are also in `first` are left out.
    """
    both = np.concatenate((first, then), axis=1)
    again = np.triu(both[:, :, None] == both[:, None, :], k=1).any(axis=1)
    order = np.argsort(again | (both == MISSING), axis=1, kind="stable")[:, : first.shape[1]]
    kept = np.take_along_axis(both, order, axis=1)
    return np.where(np.take_along_axis(again, order, axis=1), np.int32(MISSING), kept)
