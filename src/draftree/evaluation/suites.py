"""Prompts to measure on: a shipped suite by name, or a file.

A row of a file with `turns` (the first is asked), `question`, `messages` or `conversations` is a chat; one with
`prompt` or `text` is raw text. `category` may stand beside either. A file that is not JSONL is one raw text.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

from draftree.boundary.files import understood
from draftree.data.prompts import Content, question
from draftree.data.rows import messages, rows
from draftree.errors import UnknownName, UserError, shown

FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt: its number in its file (which fixes the draws made for it), what is asked, and its category."""

    number: int
    content: Content
    category: str


@dataclass(frozen=True)
class Suite:
    """The prompts of a file, and the hash of its bytes."""

    name: str
    sha256: str
    prompts: tuple[SuitePrompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """All categories, in the order of the file."""
        return tuple(dict.fromkeys(p.category for p in self.prompts))

    @property
    def summary(self) -> str:
        """The suite in one line."""
        return f"{len(self.prompts)} prompts: {', '.join(c for c in self.categories if c) or 'no categories'}"

    def select(self, categories: Sequence[str]) -> list[SuitePrompt]:
        """The prompts of some categories; of all where none is named.

        Raises:
            UnknownName: no prompt is of such a category.
        """
        for name in categories:
            if name not in self.categories:
                raise UnknownName(f"category of suite '{self.name}'", name, self.categories)
        return [p for p in self.prompts if not categories or p.category in categories]


def names() -> tuple[str, ...]:
    """The shipped suites: one for each file."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.jsonl")))


def load(name: str) -> Suite:
    """A shipped suite, or the one in a file.

    Raises:
        UserError: there is no such suite or file, or a row of it is not a prompt.
    """
    path = FOLDER / f"{name}.jsonl" if name in names() else Path(name)
    if not isfile(path):
        raise UnknownName("suite (a file, or the name of a shipped one)", name, names())
    with understood(f"cannot read suite '{name}'"):
        data = path.read_bytes()
        prompts = tuple(
            SuitePrompt(i, content(row, where), str(row.get("category", ""))) for i, (row, where) in enumerate(rows(path))
        )
    if not prompts:
        raise UserError(f"suite '{name}' holds no prompts: it has no rows")
    return Suite(path.stem, hashlib.sha256(data).hexdigest(), prompts)


def content(row: dict[str, Any], where: str) -> Content:
    """The prompt of a row.

    Raises:
        UserError: the row has no key of a prompt, or its value is of another type.
    """
    for key, first in (("turns", True), ("question", False), ("prompt", False)):
        if key in row:
            text = row[key][0] if first and isinstance(row[key], list) and row[key] else row[key]
            if not isinstance(text, str) or not text:
                raise UserError(f"{where}: '{key}' is {shown(text)}, allowed is {'a list of ' if first else ''}text")
            return text if key == "prompt" else question(text)
    if not row.keys() & {"text", "messages", "conversations"}:
        allowed = "turns, question, messages, conversations, prompt or text"
        raise UserError(f"{where} has the keys {', '.join(sorted(row)) or '(none)'}; allowed is {allowed}")
    chat = messages(row, where)
    if chat is None:
        return str(row["text"])
    while chat and chat[-1]["role"] == "assistant":  # a chat to learn from ends with the answer; here it is asked for
        chat = chat[:-1]
    if not chat:
        raise UserError(f"{where}: the chat holds no question")
    return chat
