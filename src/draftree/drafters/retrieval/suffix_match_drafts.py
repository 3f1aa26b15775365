"""Drafts of suffix matches in the running text and in earlier outputs, by their frequencies.

Of a suffix tree only the parts that the next draft reads are computed. The occurrences of the last
p tokens are the leaves below that pattern's node. The search for the longest match also finds the
occurrences of all shorter patterns. The children of a node are counted by splitting its positions
by the token after them. The text itself therefore needs no index: it is scanned once for its last
token, which at 10,000 tokens takes less time than one call from Python. Earlier outputs are stored
in blocks. Each block has its positions sorted by the text before them, read backwards (the leaves
of a suffix tree of the reversed text). So the occurrences of all suffixes of a text are around one
position, which bisection finds. A finished block is never changed, so an older state stays valid.

Shapes: N tokens of memory, P places with a continuation, B blocks, M drafted tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftree.native import native_as
from draftree.tree import MAX_NODES, Floats, Ints

Int32s = NDArray[np.int32]
Occurrences = tuple[Int32s, Int32s]
"""Positions at which a match ends, and the number of tokens that match there; longest first."""
Draft = tuple[Int32s, Floats]
"""A draft: [M, 2] tokens and their parents, and [M] q of each token given its parent.

The parent −1 is the end of the pattern.
"""

END = -1
"""The token that follows every document of the memory."""
MIN_BLOCKS = 8
"""The size of a block of the memory is at most 1/`MIN_BLOCKS` of the size of the memory.

The memory is dropped block by block.
"""


class Limits(NamedTuple):
    """Bounds of a draft.

    Attributes:
        longest: largest number of tokens of a pattern.
        length: largest number of tokens of a continuation.
        factor: number of drafted tokens for each token of the pattern.
        least: smallest probability of a drafted token along its path.
        places: largest number of occurrences of a pattern that are counted.
    """

    longest: int
    length: int
    factor: float
    least: float
    places: int


class Outputs(NamedTuple):
    """Earlier outputs, oldest first.

    Attributes:
        tokens: [N] the tokens of all documents, with `END` after each document.
        order: [P] the positions of tokens that have a successor. In each block they are sorted by
            the text before them, read backwards.
        blocks: [B + 1] index in `tokens` at which each block begins.
        sorted_blocks: [B + 1] index in `order` at which each block begins.
    """

    tokens: Int32s
    order: Int32s
    blocks: Ints
    sorted_blocks: Ints

    @classmethod
    def empty(cls) -> "Outputs":
        """Return a memory without texts."""
        none, first = np.zeros(0, np.int32), np.zeros(1, np.int64)
        return cls(none, none, first, first)

    def remember(self, documents: Sequence[Ints], longest: int, size: int) -> "Outputs":
        """Return the memory with further documents.

        The oldest blocks are dropped while the memory exceeds its size. Blocks are merged like the
        digits of a binary counter, so that a token is sorted again only when its block doubles.

        Args:
            documents: the token ids of each document; only the end of a document longer than a
                block is stored.
            longest: largest number of tokens of a pattern.
            size: largest number of tokens, including the ends of documents.
        """
        allowed = max(size // MIN_BLOCKS, 3)  # in a smaller block no token would have a successor
        new = [np.append(d[1 - allowed :], END).astype(np.int32) for d in documents if len(d) > 1]
        if not new:
            return self
        blocks = np.split(self.tokens, self.blocks[1:-1]) if len(self.tokens) else []
        orders = np.split(
            self.order - np.repeat(self.blocks[:-1], np.diff(self.sorted_blocks)),
            self.sorted_blocks[1:-1],
        )
        for document in _join_documents(new, allowed):
            while (
                blocks
                and len(blocks[-1]) < 2 * len(document)
                and len(blocks[-1]) + len(document) <= allowed
            ):
                document = np.concatenate((blocks.pop(), document))
            blocks.append(document)
            orders[len(blocks) - 1 :] = [sort_by_context(document, longest)]
        while sum(map(len, blocks)) > size and len(blocks) > 1:
            del blocks[0], orders[0]
        starts, sorted_starts = (np.cumsum([0, *map(len, x)]) for x in (blocks, orders))
        order = np.concatenate(orders) + np.repeat(starts[:-1], np.diff(sorted_starts))
        return Outputs(np.concatenate(blocks), order.astype(np.int32), starts, sorted_starts)


def _join_documents(documents: Sequence[Int32s], allowed: int) -> list[Int32s]:
    """Join consecutive documents into blocks of at most `allowed` tokens.

    A document with more tokens becomes a block of its own.
    """
    blocks = list[Int32s]()
    for document in documents:
        if blocks and len(blocks[-1]) + len(document) <= allowed:
            blocks[-1] = np.concatenate((blocks[-1], document))
        else:
            blocks.append(document)
    return blocks


def sort_by_context(tokens: Int32s, longest: int) -> Int32s:
    """Return the positions of tokens that have a successor, sorted by the text before them.

    The text is read backwards, and at least `longest` tokens of it determine the order. The
    algorithm is prefix doubling (Manber and Myers 1990) on the reversed text, so that the number of
    tokens read is the next power of two. Among equal contexts the earlier position comes first.
    """
    _, rank = np.unique(tokens, return_inverse=True)
    rank, width = rank.astype(np.int64), 1
    while width < longest and rank.max() < len(tokens) - 1:
        before = np.concatenate((np.zeros(width, np.int64), rank[:-width] + 1))[: len(tokens)]
        _, rank = np.unique(rank * (len(tokens) + 1) + before, return_inverse=True)
        width *= 2
    places = np.argsort(rank, kind="stable")
    followed = np.append(tokens[1:] != END, False) & (tokens != END)
    order: Int32s = places[followed[places]].astype(np.int32)
    return order


def match_in_text(text: Int32s, end: int, limits: Limits) -> Occurrences:
    """Return the earlier positions in a text at which its last tokens occur.

    The longest matches come first, and of equally long ones the latest.

    Args:
        text: the text; only its first `end` tokens are read.
        end: the number of tokens.
        limits: bounds of patterns.
    """
    places, lengths = np.empty(end, np.int32), np.empty(end, np.int32)
    found = 0
    whole = 0
    last = text[end - 1]
    for place in range(end - 2, -1, -1):
        if text[place] != last:
            continue
        n = 1
        while n < limits.longest and n <= place and text[place - n] == text[end - 1 - n]:
            n += 1
        places[found], lengths[found] = place, n
        found += 1
        whole += n == limits.longest
        if whole == limits.places:  # earlier matches cannot be longer
            break
    return longest_first(places[:found], lengths[:found], limits)


def longest_first(places: Int32s, lengths: Int32s, limits: Limits) -> Occurrences:
    """Return the first `limits.places` occurrences in descending order of length.

    Occurrences of equal length keep their order.
    """
    begin = np.zeros(limits.longest + 2, np.int64)
    for n in lengths:
        begin[limits.longest - n + 1] += 1
    for n in range(limits.longest + 1):
        begin[n + 1] += begin[n]
    kept = min(len(places), limits.places)
    sorted_places, sorted_lengths = np.empty(kept, np.int32), np.empty(kept, np.int32)
    for i in range(len(places)):
        n = limits.longest - lengths[i]
        if begin[n] < kept:
            sorted_places[begin[n]], sorted_lengths[begin[n]] = places[i], lengths[i]
        begin[n] += 1
    return sorted_places, sorted_lengths


def count_common_tokens(
    tokens: Int32s, start: int, place: int, text: Int32s, end: int, most: int
) -> tuple[int, int]:
    """Return how many tokens before a position equal the text's last tokens, and how they differ.

    The second result is the sign of the first difference, 0 if there is none.
    """
    for n in range(min(most, end)):
        here = tokens[place - n] if place - n >= start else END - 1
        if here != text[end - 1 - n]:
            return n, -1 if here < text[end - 1 - n] else 1
    return min(most, end), 0


def match_in_memory(memory: Outputs, text: Int32s, end: int, limits: Limits) -> Occurrences:
    """Return the positions in the memory at which the last tokens of a text occur.

    The longest matches come first, and of equally long ones those of later blocks.
    """
    tokens = memory.tokens
    order = memory.order
    most = limits.longest
    found = 0
    blocks = len(memory.blocks) - 1
    places, lengths = (
        np.empty(blocks * limits.places, np.int32),
        np.empty(blocks * limits.places, np.int32),
    )
    of_length, enough = (
        np.zeros(most + 1, np.int64),
        0,
    )  # number of matches by length; length with enough matches
    for block in range(blocks - 1, -1, -1):
        start = memory.blocks[block]
        first = memory.sorted_blocks[block]
        last = memory.sorted_blocks[block + 1]
        right, high = first, last
        while right < high:
            middle = (right + high) // 2
            if count_common_tokens(tokens, start, order[middle], text, end, most)[1] < 0:
                right = middle + 1
            else:
                high = middle
        left, taken = right - 1, 0
        above = (
            count_common_tokens(tokens, start, order[left], text, end, most)[0]
            if left >= first
            else 0
        )
        below = (
            count_common_tokens(tokens, start, order[right], text, end, most)[0]
            if right < last
            else 0
        )
        while (
            taken < limits.places and max(above, below) > enough
        ):  # matches get shorter with the distance from this position
            of_length[max(above, below)] += 1
            if below >= above:
                places[found], lengths[found] = order[right], below
                right += 1
                below = (
                    count_common_tokens(tokens, start, order[right], text, end, below)[0]
                    if right < last
                    else 0
                )
            else:
                places[found], lengths[found] = order[left], above
                left -= 1
                above = (
                    count_common_tokens(tokens, start, order[left], text, end, above)[0]
                    if left >= first
                    else 0
                )
            found, taken = found + 1, taken + 1
        longer = 0
        for n in range(most, enough, -1):
            longer += of_length[n]
            if longer >= limits.places:
                enough = n
                break
    return longest_first(places[:found], lengths[:found], limits)


def partition_by_next(tokens: Int32s, end: int, places: Int32s, ahead: int) -> int:
    """Sort positions by the token `ahead` places after them; return how many have no such token.

    Positions without such a token come first.
    """
    keys, none = np.empty(len(places), np.int64), 0
    for i, place in enumerate(places):
        token = tokens[place + ahead] if place + ahead < end else END
        none += token == END
        keys[i] = (np.int64(token) << 32) + place
    keys.sort()
    for i, key in enumerate(keys):
        places[i] = key & 0x7FFFFFFF
    return none


def build_tree(
    tokens: Int32s, end: int, places: Int32s, budget: int, depth: int, least: float
) -> tuple[Int32s, Floats, float]:
    """Return the tree of the most likely continuations after positions, the most likely first.

    Source: SuffixDecoding, section 4.

    Args:
        tokens: the tokens; only the first `end` are read.
        end: the number of tokens.
        places: the positions at which the pattern ends; the function sorts them.
        budget: the largest number of drafted tokens.
        depth: the largest depth.
        least: the smallest probability of a token along its path.

    Returns:
        [M, 2] tokens and their parents (−1 for the pattern), [M] their shares of the parent's
        continuations, and the score. The score is the sum of the probabilities along the paths,
        which is the expected number of correct tokens.
    """
    nodes = np.empty((budget, 2), np.int32)
    shares = np.empty(budget)
    score = 0.0
    pool = np.empty(
        (len(places), 6), np.int64
    )  # token, parent, first place, last + 1, depth, number; no place is in two
    values, its_share = (
        np.empty(len(places)),
        np.empty(len(places)),
    )  # the probability along the path
    node = -1
    begin = 0
    stop = len(places)
    ahead = 1
    value = 1.0
    waiting = 0
    pushed = 0
    while node + 1 < budget:
        at = (
            begin + partition_by_next(tokens, end, places[begin:stop], ahead)
            if ahead <= depth
            else stop
        )
        total = stop - at
        while at < stop:
            token, first = tokens[places[at] + ahead], at
            while at < stop and tokens[places[at] + ahead] == token:
                at += 1
            share = (at - first) / total
            if value * share >= least:
                pool[waiting, 0], pool[waiting, 1], pool[waiting, 2] = token, node, first
                pool[waiting, 3], pool[waiting, 4], pool[waiting, 5] = at, ahead, pushed
                values[waiting], its_share[waiting] = value * share, share
                waiting, pushed = waiting + 1, pushed + 1
        if waiting == 0:
            break
        best = 0
        for i in range(1, waiting):
            if values[i] > values[best] or (
                values[i] == values[best] and pool[i, 5] < pool[best, 5]
            ):
                best = i
        node += 1
        nodes[node, 0], nodes[node, 1], shares[node] = pool[best, 0], pool[best, 1], its_share[best]
        begin = pool[best, 2]
        stop = pool[best, 3]
        ahead = pool[best, 4] + 1
        value = values[best]
        score += value
        waiting -= 1
        values[best], its_share[best] = values[waiting], its_share[waiting]
        for column in range(6):
            pool[best, column] = pool[waiting, column]
    return nodes[: node + 1], shares[: node + 1], score


def select_best_draft(
    tokens: Int32s,
    end: int,
    found: Occurrences,
    limits: Limits,
    nodes: Int32s,
    shares: Floats,
    score: float,
) -> tuple[Int32s, Floats, float]:
    """Return the draft with the largest score among those for all lengths of the pattern.

    The given draft (`nodes`, `shares`, `score`) is compared as well, and wins ties. The score
    of n tokens is at most n. Patterns that are too short to exceed the best score are therefore
    skipped.
    """
    places, lengths = found
    count = len(places)
    first = count
    for i in range(count):
        if i + 1 < count and lengths[i + 1] == lengths[i]:
            continue
        pattern, first = lengths[i], i + 1  # the longest pattern that has just these occurrences
        budget = min(int(limits.factor * pattern + 1e-6), MAX_NODES)
        if budget <= score:
            break
        other = build_tree(tokens, end, places[:first].copy(), budget, limits.length, limits.least)
        if other[2] > score:
            nodes, shares, score = other
    return nodes, shares, score


@native_as("suffix_draft")
def draft(text: Int32s, end: int, memory: Outputs, limits: Limits) -> Draft:
    """Return the draft that continues a text.

    Drafts are computed for all lengths of its last tokens, from their occurrences in the text and
    in the memory. The draft with the largest score is returned. Among equal scores the longer
    pattern wins, and the text before the memory. Siblings are in descending order of q, among
    equals the lower token first.

    Args:
        text: the text; only its first `end` tokens are read.
        end: the number of tokens.
        memory: the outputs of earlier texts.
        limits: bounds of patterns and drafts.
    """
    none, shares = np.empty((0, 2), np.int32), np.empty(0)
    nodes, shares, score = select_best_draft(
        text, end, match_in_text(text, end, limits), limits, none, shares, 0.0
    )
    size = len(memory.tokens)
    nodes, shares, _ = select_best_draft(
        memory.tokens,
        size,
        match_in_memory(memory, text, end, limits),
        limits,
        nodes,
        shares,
        score,
    )
    return nodes, shares
