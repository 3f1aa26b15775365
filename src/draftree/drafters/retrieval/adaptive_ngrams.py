"""N-gram counts of a corpus plus increments from the running and earlier texts (ADED).

Shapes: T tokens of a text, C contexts, S successors, N nodes, F frontier nodes, K candidates.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from draftree.drafters.retrieval.continuation_trie import context_of
from draftree.drafters.retrieval.ngram_build import Counts, concatenate, contexts, sum_equal_ngrams
from draftree.drafters.retrieval.ngram_table import Table, number_of, read_successors
from draftree.native import Array, native_as
from draftree.tree import Floats, Ints

IN_TEXTS = 1 << 40
"""Number that is added to the increments of an n-gram for each occurrence in new texts, to mark it.
"""


class Increments(NamedTuple):
    """The increments of n-grams in earlier texts.

    Attributes:
        context: [C] the contexts as numbers, in ascending order.
        start: [C + 1] index of the first successor of each context.
        token: [S] the successors, in ascending order within a context.
        times: [S] the number of increments of each n-gram.
        widest: the largest number of successors of a context.
    """

    context: Array
    start: Array
    token: Array
    times: Array
    widest: int

    @classmethod
    def empty(cls) -> "Increments":
        """Return an object without increments."""
        return cls(
            np.zeros(0, np.uint64),
            np.zeros(1, np.int64),
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
            0,
        )

    def plus(
        self, texts: Iterable["Adapted"], n: int, width: int, most: int, size: int
    ) -> "Increments":
        """Return the number of increments of each n-gram in these and in finished texts together.

        An increment adds a fixed amount to an n-gram's weight; see `Weighting`. This object does
        not change.

        Args:
            texts: the finished texts, with the increments of the n-gram that ends at each token.
            n: number of tokens of an n-gram.
            width: number of bits per token in the encoding of a context; see `ngram_table.py`.
            most: upper bound at which the sums are clipped; more increments would not change the
                weight of an n-gram.
            size: largest number of n-grams that are kept. Those with the fewest increments are
                dropped, among equals those that the texts do not contain.
        """
        runs = [Counts(np.repeat(self.context, np.diff(self.start)), self.token, self.times)]
        for text in texts:
            times = text.times[n - 1 :]
            there = times > 0
            runs.append(
                Counts(
                    contexts(text.tokens, n, width)[there],
                    text.tokens[n - 1 :][there],
                    times[there].astype(np.int64) + IN_TEXTS,
                )
            )
        run = sum_equal_ngrams(concatenate(runs), n, width)
        if len(run.times) > size:
            rank = 2 * np.minimum(run.times % IN_TEXTS, most) + (run.times >= IN_TEXTS)
            kept = np.sort(np.argsort(-rank, kind="stable")[:size])
            run = Counts(*(column[kept] for column in run))
        run = run._replace(times=run.times % IN_TEXTS)
        context, start = np.unique(run.context, return_index=True)
        start = np.append(start, len(run.token)).astype(np.int64)
        widest = int(np.diff(start).max(initial=0))
        return Increments(context, start, run.token, np.minimum(run.times, most), widest)


class Adapted(NamedTuple):
    """A sequence's text with the increments of its n-grams, and an index of their contexts.

    Attributes:
        tokens: [T] the text, which ends with the root.
        times: [T] the number of increments of the n-gram that ends at this token.
        heads: [power of 2] the last position in each bucket of contexts, −1 for none.
        before: [T] the previous position in the same bucket.
    """

    tokens: Ints
    times: Array
    heads: Array
    before: Array

    @classmethod
    def empty(cls) -> "Adapted":
        """Return an object for an empty text."""
        none = np.zeros(0, np.int32)
        return cls(np.zeros(0, np.int64), none, np.full(256, -1, np.int32), none)

    def plus(self, tokens: Ints, n: int) -> "Adapted":
        """Return the text with further tokens appended, without increments for them.

        The arrays of this object do not change.
        """
        old, new = len(self.tokens), len(tokens)
        text = np.concatenate((self.tokens, tokens))
        before = np.concatenate((self.before, np.full(new, -1, np.int32)))
        times = np.concatenate((self.times, np.zeros(new, np.int32)))
        if len(text) > len(self.heads):
            heads = np.full(1 << (2 * len(text)).bit_length(), -1, np.int32)
            index(text, heads, before, 0, n)
        else:
            heads = self.heads.copy()
            index(text, heads, before, old, n)
        return Adapted(text, times, heads, before)

    def with_increments(self, since: int, n: int) -> "Adapted":
        """Return a copy with one more increment for each n-gram that begins at `since` or later.

        Source: Algorithm 2, lines 2-13.
        """
        times = self.times.copy()
        times[max(0, since) + n - 1 :] += 1
        return self._replace(times=times)


def bucket(text: Ints, at: int, n: int, size: int) -> int:
    """Return the bucket of the context before a position in a hash table.

    Args:
        text: the tokens.
        at: the position.
        n: one more than the number of tokens in the context.
        size: the number of buckets, a power of 2.
    """
    mixed = 0
    for i in range(at - n + 1, at):
        mixed = (mixed ^ int(text[i])) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 29
    return mixed & (size - 1)


@native_as("index_contexts")
def index(text: Ints, heads: Array, before: Array, start: int, n: int) -> None:
    """Insert the contexts of the positions from `start` on into the index, in place.

    Args:
        text: the tokens.
        heads: the last position in each bucket.
        before: for each position, the previous position in the same bucket.
        start: the first position to insert.
        n: one more than the number of tokens in a context.
    """
    for at in range(max(start, n - 1), len(text)):
        slot = bucket(text, at, n, len(heads))
        before[at] = heads[slot]
        heads[slot] = at


def _add_increments(tokens: Ints, times: Ints, found: int, token: int, more: int) -> int:
    """Add increments to a token in a list, or append the token; return the length of the list."""
    for i in range(found):
        if tokens[i] == token:
            times[i] += more
            return found
    tokens[found], times[found] = token, more
    return found + 1


def _add_earlier_increments(
    memory: Increments, context: Ints, width: int, tokens: Ints, times: Ints, found: int
) -> int:
    """Add the increments of earlier texts to a list of tokens; return the length of the list."""
    wanted = number_of(context, width)
    place = np.searchsorted(memory.context, wanted)
    if place < len(memory.context) and memory.context[place] == wanted:
        for i in range(memory.start[place], memory.start[place + 1]):
            found = _add_increments(tokens, times, found, memory.token[i], memory.times[i])
    return found


def _add_own_increments(text: Adapted, context: Ints, tokens: Ints, times: Ints, found: int) -> int:
    """Add the increments of the sequence's own text to a list; return the length of the list."""
    n = len(context) + 1
    at = text.heads[bucket(context, n - 1, n, len(text.heads))]
    while at >= 0:
        same = text.times[at] > 0
        for i in range(n - 1):
            same = same and text.tokens[at - n + 1 + i] == context[i]
        if same:
            found = _add_increments(tokens, times, found, text.tokens[at], text.times[at])
        at = text.before[at]
    return found


def _sum(weights: Floats) -> float:
    """Return the sum of weights in order; NumPy adds in another order, which rounds differently."""
    whole = 0.0
    for weight in weights.tolist():
        whole += weight
    return whole


class Weighting(NamedTuple):
    """The numbers by which n-grams are looked up and adapted.

    Attributes:
        n: number of tokens of an n-gram.
        width: number of bits of a token id.
        top: number of successors of a context that are read from the table.
        increment: amount added to a weight for each occurrence (Algorithm 2).
        cap: largest weight.
    """

    n: int
    width: int
    top: int
    increment: float
    cap: float


@native_as("ngram_successors")
def successors(
    table: Table,
    memory: Increments,
    text: Adapted,
    frontier: Ints,
    tokens: Ints,
    parents: Ints,
    k: int,
    by: Weighting,
) -> tuple[Ints, Floats]:
    """Return the most likely tokens after some nodes of one sequence's tree.

    The weight of an n-gram is its share in the table (0 if it is not stored) plus an increment for
    each time that generated text contains it. A weight with increments is at most `by.cap`. q is
    the weight divided by the sum of all weights after the context, including n-grams that the table
    does not store.

    Args:
        table: the n-grams of the corpus.
        memory: the increments of earlier texts.
        text: the increments of this text.
        frontier: [F] the nodes.
        tokens: [N] the tokens of the tree.
        parents: [N] the parents of the tree's nodes.
        k: K, the number of successors to return.
        by: how n-grams are weighted.

    Returns:
        [F, K] tokens and log q, the most likely first, among equals the lower id first; log q is −∞
        in unused places.
    """
    found_tokens, log_q = (
        np.zeros((len(frontier), k), np.int64),
        np.full((len(frontier), k), -np.inf),
    )
    n, width, top, increment, cap = by
    most = min(top, len(table.share)) + memory.widest + len(text.tokens)
    weights = np.empty(most)
    ids, times = np.empty(most, np.int64), np.empty(most, np.int64)
    for row in range(len(frontier)):
        context = context_of(text.tokens[:-1], tokens, parents, frontier[row], n - 1)
        if len(context) < n - 1:
            continue
        stored = read_successors(table, context, width, top, ids, weights)
        pruned = max(0.0, 1 - _sum(weights[:stored])) if stored else 0.0
        times[:stored] = 0
        found = _add_earlier_increments(memory, context, width, ids, times, stored)
        found = _add_own_increments(text, context, ids, times, found)
        for i in range(found):
            weight = weights[i] if i < stored else 0.0
            weights[i] = min(weight + increment * times[i], cap) if times[i] else weight
        whole = pruned + _sum(weights[:found])
        for j in range(min(k, found)):
            best = j
            for i in range(j + 1, found):
                if weights[i] > weights[best] or (
                    weights[i] == weights[best] and ids[i] < ids[best]
                ):
                    best = i
            found_tokens[row, j] = ids[best]
            if weights[best] > 0:
                log_q[row, j] = math.log(weights[best] / whole)
            ids[best], weights[best] = ids[j], weights[j]
    return found_tokens, log_q
