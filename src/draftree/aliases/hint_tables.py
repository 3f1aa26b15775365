"""Build lookup tables from hints that are shared by several names."""

from collections.abc import Mapping
from typing import Any


def by_word(hints: Mapping[str, str]) -> dict[str, str]:
    """Return the hint of every word.

    Args:
        hints: for each hint, the words it answers, separated by spaces.

    Raises:
        ValueError: a word has two hints.
    """
    pairs = [(word, hint) for hint, words in hints.items() for word in words.split()]
    found = dict(pairs)
    if len(found) < len(pairs):
        words = sorted({word for word, _ in pairs if [w for w, _ in pairs].count(word) > 1})
        raise ValueError(f"these words have several hints: {', '.join(words)}")
    return found


def values_by_word(*groups: tuple[tuple[Any, ...], str]) -> dict[str, tuple[Any, ...]]:
    """Return the values of every word.

    Args:
        groups: values, and the words that have them, separated by spaces.
    """
    return {word: values for values, words in groups for word in words.split()}
