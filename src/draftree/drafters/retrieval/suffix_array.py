"""A suffix array over tokens, and the search for a context in it.

A corpus is one array of tokens, with a separator after each document. The separator is larger than
any token. So the occurrences of a pattern at the end of a document come last, and are cut off with
one comparison.

Shapes: T tokens of the corpus, C tokens of a context, M matches, L tokens of a continuation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.native import Array, native, native_as
from draftree.tree import Ints

SEPARATOR = 2**32 - 1
"""The token that follows every document."""
END = -1
"""Stands for places after the end of a document, and for the token of a trie's root."""


@dataclass(frozen=True)
class Corpus:
    """Tokens [T] and their suffix array.

    The suffix array contains all positions except those of separators, sorted by the text that
    begins there.
    """

    tokens: Array
    suffixes: Array


def join_documents(documents: list[Ints]) -> NDArray[np.uint32]:
    """Return one array of all documents' tokens, with a separator after each document."""
    parts = (part for document in documents for part in (document, [SEPARATOR]))
    return np.concatenate(list(parts), dtype=np.uint32, casting="unsafe")


def suffix_array(tokens: NDArray[np.uint32], vocab: int) -> Array:
    """Return the positions of all tokens except separators, sorted by the text that begins there.

    libdivsufsort sorts bytes. Tokens are therefore written as big-endian numbers with as many bytes
    as the vocabulary needs, so that the order of the bytes is that of the tokens. Of the sorted
    positions, those at which a token begins are kept.

    Args:
        tokens: [T] the tokens, including separators.
        vocab: number of token ids.
    """
    from pydivsufsort import divsufsort  # needed for building only, and not for searching

    width = max(1, (int(vocab).bit_length() + 7) // 8)
    places = divsufsort(
        np.minimum(tokens, vocab)
        .astype(">u4")
        .view(np.uint8)
        .reshape(-1, 4)[:, 4 - width :]
        .ravel()
    )
    places = places[places % width == 0] // width
    documents = int((tokens == SEPARATOR).sum())
    found: Array = places[: len(places) - documents].astype(
        np.uint32 if len(tokens) < SEPARATOR else np.int64
    )
    return found


def _before(tokens: Array, place: Any, query: Ints, whole: bool) -> bool:
    """Return whether the suffix at a position sorts before a query.

    If `whole` is true, suffixes that begin with the query and continue count as before, too.
    """
    for j in range(len(query)):
        if not 0 <= place + j < len(tokens):  # after the end, or in a broken file
            return True
        token = np.int64(tokens[place + j])
        if token != query[j]:
            return bool(token < query[j])
    after = place + len(query)
    return whole and (after >= len(tokens) or tokens[after] != SEPARATOR)


def _first(tokens: Array, suffixes: Array, query: Ints, whole: bool) -> int:
    """Return the index of the first suffix that does not sort before a query.

    If `whole` is true, suffixes that begin with the query and continue are skipped, too.
    """
    low, high = 0, len(suffixes)
    while low < high:
        middle = (low + high) // 2
        if _before(tokens, np.int64(suffixes[middle]), query, whole):
            low = middle + 1
        else:
            high = middle
    return low


@native_as("search_corpus")
def search(
    tokens: Array, suffixes: Array, context: Ints, longest: int, shortest: int
) -> tuple[int, int, int]:
    """Find the longest suffix of a context that occurs in the corpus with a token after it.

    If a suffix occurs, shorter suffixes occur too. The length is therefore found by bisection.

    Args:
        tokens: [T] the tokens of the corpus.
        suffixes: the suffix array of the corpus.
        context: [C] the context.
        longest: largest length of the suffix.
        shortest: smallest length of the suffix.

    Returns:
        The length of the suffix, and the begin and end of its range in the suffix array. The length
        is 0 if not even the shortest suffix occurs.
    """
    found = 0
    low = 0
    high = 0
    fewest, most = shortest, min(longest, len(context))
    while fewest <= most:
        n = (fewest + most) // 2
        query = context[len(context) - n :]
        at = _first(tokens, suffixes, query, False)
        if at < len(suffixes) and np.int64(suffixes[at]) + n == len(
            tokens
        ):  # a corpus without separators ends here
            at += 1
        if at < len(suffixes) and _before(tokens, np.int64(suffixes[at]), query, True):
            found = n
            low = at
            fewest = n + 1
        else:
            most = n - 1
    if found:
        high = max(low + 1, _first(tokens, suffixes, context[len(context) - found :], True))
    return found, low, high


@native
def continuations(
    tokens: Array, suffixes: Array, low: int, high: int, skip: int, length: int, most: int
) -> Ints:
    """Return the continuations [M, L] after positions, in order; −1 after the end of a document.

    If there are more than `most` positions, `most` evenly spread ones are used. REST uses the first
    ones, but these would all continue with the smallest tokens.

    Args:
        tokens: [T] the tokens of the corpus.
        suffixes: the suffix array of the corpus.
        low: the begin of a range of the suffix array.
        high: the end of the range.
        skip: the number of tokens that were matched.
        length: L, the number of tokens of a continuation.
        most: the largest number of positions.
    """
    count = min(high - low, most)
    rows = np.full((count, length), END, np.int64)
    for i in range(count):
        place = np.int64(suffixes[low + i * (high - low) // count]) + skip
        for j in range(length):
            if not 0 <= place + j < len(tokens) or tokens[place + j] == SEPARATOR:
                break
            rows[i, j] = tokens[place + j]
    return rows
