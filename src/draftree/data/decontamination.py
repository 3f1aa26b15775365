"""Remove prompts of an evaluation set from training data."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftree.data.readers import (
    Row,
    Skipped,
    is_completion_row,
    messages,
    read_rows,
    skip_unreadable,
)
from draftree.errors import UserError

QUESTION_KEYS = ("turns", "question", "prompt", "instruction")
"""Keys for the question in rows of benchmarks, which may have no answer."""
SHARED_WORDS = 13
"""Number of consecutive words that two prompts do not share by chance.

The number is from Brown et al. 2020, appendix C.
"""


def normalise_words(text: str) -> str:
    """Return the words of a text in lower case, without the punctuation between them."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def questions(paths: Iterable[Path], skipped: Skipped | None = None) -> Iterator[str]:
    """Yield all texts in data files, one by one, except answers.

    Args:
        paths: the data files.
        skipped: counts rows that cannot be read and are left out; if it is None, the first such
            row raises an error.
    """
    for row, where in (each for path in paths for each in read_rows(path, skipped)):
        texts: list[str] = []
        with skip_unreadable(skipped):
            texts = extract_questions(row, where)
        yield from texts


def extract_questions(row: Row, where: str) -> list[str]:
    """Return the texts of a data row that are not answers.

    These are the user messages of its chat or its text, and the texts under `QUESTION_KEYS` that
    are not part of them.

    Raises:
        UserError: the row has no known form.
    """
    values: list[Any] = [row[key] for key in QUESTION_KEYS if key in row]
    several = [text for value in values for text in (value if isinstance(value, list) else [value])]
    named = [text for text in several if isinstance(text, str)]
    try:
        chat = messages(row, where)
    except UserError:
        if not named:
            raise
        return named
    if chat is not None:
        learnt = [message["content"] for message in chat if message["role"] == "user"]
    else:
        learnt = [] if is_completion_row(row) else [row["text"]]
    return learnt + [text for text in named if not any(text.strip() in each for each in learnt)]


class Excluded:
    """Prompts that must not be used for training.

    Args:
        texts: the texts of the prompts.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.runs = frozenset(run for text in texts for run in _runs(text))

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "Excluded":
        """Return the prompts in data files or in an evaluation.

        Raises:
            UserError: a file cannot be read.
        """
        return cls(questions(paths))

    def holds(self, text: str) -> bool:
        """Return whether a text is one of the prompts, or shares 13 consecutive words with one.

        Case and punctuation are ignored.
        """
        return bool(self.runs) and any(run in self.runs for run in _runs(text))

    def num_excluded(self, paths: Iterable[Path], skipped: Skipped | None = None) -> int:
        """Return the number of data rows that contain one of the excluded prompts.

        Args:
            paths: the data files.
            skipped: counts rows that cannot be read; if it is None, the first such row raises an
                error.
        """
        count = 0
        for row, where in (each for path in paths for each in read_rows(path, skipped)):
            with skip_unreadable(skipped):
                count += not self.keeps(row, where)
        return count

    def keeps(self, row: Row, where: str) -> bool:
        """Return whether a data row contains none of the prompts."""
        return not self.runs or not any(map(self.holds, extract_questions(row, where)))


def _runs(text: str) -> Iterator[str]:
    words = normalise_words(text).split()
    for at in range(max(len(words) - SHARED_WORDS, 0) + 1):
        if run := " ".join(words[at : at + SHARED_WORDS]):
            yield run
