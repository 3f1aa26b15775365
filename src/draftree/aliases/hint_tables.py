"""Build lookup tables from hints that are shared by several names."""

from collections.abc import Mapping
from typing import Any

LM_EVALUATION = "python -m draftree.evaluation.lm_evaluation --model draftree"
"""Command line of lm_eval with draftree as one of its models."""


def by_word(hints: Mapping[str, str]) -> dict[str, str]:
    """Return a table of hints by word.

    Args:
        hints: words for which each hint is given, separated by spaces; the hints are the keys.

    Raises:
        ValueError: a word is listed under two hints.
    """
    pairs = [(word, hint) for hint, words in hints.items() for word in words.split()]
    found = dict(pairs)
    if len(found) < len(pairs):
        words = sorted({word for word, _ in pairs if [w for w, _ in pairs].count(word) > 1})
        raise ValueError(f"these words have several hints: {', '.join(words)}")
    return found


def values_by_word(*groups: tuple[tuple[Any, ...], str]) -> dict[str, tuple[Any, ...]]:
    """Return a table of values by word.

    Args:
        groups: pairs of values and the words that get them, which are separated by spaces.
    """
    return {word: values for values, words in groups for word in words.split()}
