"""A corpus as documents of token ids, from text, JSONL rows, chats or source code.

A text or source file is one document; of a JSONL, JSON or parquet file each row is one, in the
forms that `training.data` knows. A chat is one document, both sides of it, as the target's template
renders it: that is what stands in the context when the target writes, so a match may begin in a
question and go on into its answer, and what was asked for is often repeated. Without a template
each message is a document, as in the datastores of REST and ADED.

Of a folder the files of known suffixes are read, at any depth. Hidden ones are left out, and what
is not UTF-8 text is left out and counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftree.data.readers import (
    READERS,
    Skipped,
    is_completion_row,
    list_visible_files,
    messages,
    read_rows,
    skip_unreadable,
)
from draftree.errors import UserError
from draftree.tree import Ints
from draftree.utils.files import as_user_error

SOURCES = frozenset(
    {
        ".bash",
        ".c",
        ".cc",
        ".clj",
        ".cpp",
        ".cs",
        ".css",
        ".cu",
        ".cuh",
        ".cxx",
        ".dart",
        ".el",
        ".erl",
        ".ex",
        ".exs",
        ".f90",
        ".go",
        ".groovy",
        ".h",
        ".hh",
        ".hpp",
        ".hs",
        ".html",
        ".hxx",
        ".java",
        ".jl",
        ".js",
        ".jsx",
        ".kt",
        ".kts",
        ".lisp",
        ".lua",
        ".m",
        ".ml",
        ".mli",
        ".mm",
        ".nim",
        ".php",
        ".pl",
        ".pm",
        ".proto",
        ".ps1",
        ".pxd",
        ".py",
        ".pyi",
        ".pyx",
        ".r",
        ".rb",
        ".rs",
        ".sc",
        ".scala",
        ".scm",
        ".sh",
        ".sql",
        ".swift",
        ".tex",
        ".tf",
        ".ts",
        ".tsx",
        ".v",
        ".vb",
        ".vhdl",
        ".vue",
        ".zig",
        ".zsh",
    }
)
"""Suffixes of source files in lower case; the case of a file's suffix is ignored."""
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
FOLDER_SUFFIXES = SOURCES | TEXT_SUFFIXES | {".jsonl", ".parquet"}
"""Suffixes of the files that are read in a folder.

`.json` is not among them, because such files contain settings more often than data.
"""
BATCH = 1_000_000
"""Number of characters that are tokenised together."""


@dataclass(frozen=True)
class File:
    """A file of the corpus.

    It also stores whether the file was named explicitly or found in a folder.
    """

    path: Path
    named: bool

    @property
    def bytes(self) -> int:
        """Return the size of the file in bytes."""
        return self.path.stat().st_size


def files(paths: Sequence[Path]) -> list[File]:
    """Return the files of a corpus; the files of a folder are in the order of their names.

    Raises:
        UserError: a path does not exist, or a folder has nothing to read.
    """
    found: list[File] = []
    for path in paths:
        if not path.exists():
            raise UserError(
                f"data '{path}' does not exist: a text, source, .jsonl, .json or .parquet file or a folder was expected"
            )
        inside = (
            [
                File(p, False)
                for p in list_visible_files(path)
                if p.suffix.lower() in FOLDER_SUFFIXES
            ]
            if path.is_dir()
            else [File(path, True)]
        )
        if not inside:
            raise UserError(
                f"folder '{path}' has no file to read: known are those that end in {', '.join(sorted(FOLDER_SUFFIXES))}"
            )
        found += inside
    return found


@dataclass
class Documents:
    """Read a corpus once, and count its documents, tokens and bytes.

    Attributes:
        files: the files of the corpus.
        tokenizer: the target's tokenizer.
        tell: receives the number of bytes read.
        skipped: counts data rows that cannot be read and are left out; without it the first one
            raises an error.
        documents: number of documents with at least one token.
        tokens: number of tokens of all documents.
        text_bytes: number of bytes of their text in UTF-8.
        undecodable: files of folders that are not UTF-8 text.
    """

    files: Sequence[File]
    tokenizer: PreTrainedTokenizerBase
    tell: Callable[[int], None] = lambda _: None
    skipped: Skipped | None = None
    documents: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    text_bytes: int = field(default=0, init=False)
    undecodable: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Ints]:
        """Yield the token ids of one document after another."""
        for batch in batches(self._texts()):
            found: Any = self.tokenizer(
                batch, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            for ids in found["input_ids"]:
                if ids:
                    self.documents += 1
                    self.tokens += len(ids)
                    yield np.array(ids, np.int64)

    def _texts(self) -> Iterator[str]:
        done = 0
        for file in self.files:
            before, size = self.text_bytes, file.bytes
            for text in self._of(file):
                # A single surrogate, which JSON may contain, has no UTF-8 and no tokens.
                encoded = text.encode(errors="replace")
                self.text_bytes += len(encoded)
                self.tell(done + min(self.text_bytes - before, size))
                yield encoded.decode()
            done += size
            self.tell(done)

    def _of(self, file: File) -> Iterator[str]:
        if file.path.suffix.lower() in READERS:
            for row, where in read_rows(file.path, self.skipped):
                found: list[str] = []
                with skip_unreadable(self.skipped):
                    found = texts(row, where, self.tokenizer)
                yield from found
        elif (text := decode_file(file.path)) is not None:
            yield text
        elif file.named:
            raise UserError(
                f"'{file.path}' is not UTF-8 text; allowed are text, source, .jsonl, .json and .parquet files"
            )
        else:
            self.undecodable += 1


def decode_file(path: Path) -> str | None:
    """Return the text of a file, or None if it is binary.

    A file is binary if it is not UTF-8 or has a zero byte in its first 8192 bytes, as in git.
    """
    whole = path.read_bytes()
    try:
        return None if b"\0" in whole[:8192] else whole.decode()
    except UnicodeDecodeError:
        return None


def texts(row: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the documents of a data row: a text, or a chat as the template renders it.

    Without a chat template each message of a chat is a document.

    Raises:
        UserError: the row has no known form, or the template refuses its chat.
    """
    chat = messages(row, where)
    if chat is None:
        return [row["prompt"] + row["completion"] if is_completion_row(row) else row["text"]]
    if not chat or not tokenizer.chat_template:
        return [message["content"] for message in chat]
    with as_user_error(f"{where}: the target's chat template refuses this chat"):
        return [str(tokenizer.apply_chat_template(chat, tokenize=False))]


def batches(found: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts with about a million characters each."""
    batch, size = list[str](), 0
    for text in found:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
