"""Read training texts from JSONL, JSON, parquet and text files, and tokenise them.

A row is one of

    {"text"}                                 plain text, as in SlimPajama (`meta` is ignored)
    {"prompt", "completion"}                 text of which the completion is learnt
    {"messages": [{"role", "content"}]}      a chat, as in UltraChat 200k, or a bare list of messages
    {"conversations": [{"from", "value"}]}   a chat in the format of ShareGPT
    {"data": [question, answer, …]}          a chat in the format of UltraChat
    {"instruction", "input", "output"}       Alpaca's format, and other pairs of question and answer

in a JSONL file, in a JSON file with one list, or in a parquet file (which needs the package
`datasets`). Any other file is plain text. Of a folder all text files are read. Only the responses
of a chat are learnt. A row with a chat or a pair is read as the chat, even if it also has a text.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any

from draftree.errors import UserError, format_value
from draftree.utils.files import as_user_error

Messages = list[dict[str, Any]]
Row = dict[str, Any]
CHATS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog")
"""Possible keys for the list of a chat's messages."""
ROLE_NAMES = ("role", "from", "speaker", "author", "sender")
"""Possible keys for a message's sender."""
CONTENT_NAMES = ("content", "value", "text", "message", "body")
"""Possible keys for a message's text."""
SYSTEM_NAMES = ("system", "system_prompt", "system_message")
"""Possible keys for a system prompt outside the list of messages."""
CALLS = ("tool_calls", "function_call")
"""Keys of a message's tool calls in templates; a message with tool calls may have no text."""
QUESTIONS = ("instruction", "question", "query", "prompt", "problem")
ANSWERS = ("output", "answer", "response", "completion", "solution", "chosen")
"""Possible keys for the answer in rows with one question and one answer.

`QUESTIONS` has those for the question.
"""
ALPACA_INPUT_KEY = "input"
"""The key of Alpaca's second input field, which completes the instruction."""
ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names of senders in data, and their roles in templates."""


@dataclass
class Skipped:
    """Count the rows that cannot be read and are left out.

    Attributes:
        count: the number of these rows.
        first: the errors of the first rows, each with its file and line.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def note(self, error: UserError) -> None:
        """Count a row, and record its error if it is one of the first."""
        self.count += 1
        if len(self.first) < MAX_NAMED_ROWS:
            self.first.append(str(error))

    def __str__(self) -> str:
        """Return a line with the number of rows that were left out, and the first errors."""
        more = f"; and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"{self.count:,} rows cannot be read and are left out: {'; '.join(self.first)}{more}"


MAX_NAMED_ROWS = 3
"""Number of rows whose errors are recorded."""


@contextmanager
def skip_unreadable(skipped: Skipped | None) -> Iterator[None]:
    """Count a row that cannot be read inside the context, instead of raising its error.

    If `skipped` is None, the error is raised.
    """
    try:
        yield
    except UserError as error:
        if skipped is None:
            raise
        skipped.note(error)


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Add the location of a row to the start of an error's message."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def read_rows(path: Path, skipped: Skipped | None = None) -> Iterator[tuple[Row, str]]:
    """Yield the data rows of a file, or of all files of a folder, each with its location.

    In a folder, only `.jsonl` and `.parquet` files contain rows, and the others are texts. Hidden,
    empty and binary files are left out.

    Args:
        path: the file or folder.
        skipped: counts rows that are not JSON and are left out; without it the first one raises an
            error.

    Raises:
        UserError: the file is missing or not text, or a row is not a JSON object.
    """
    if not path.exists():
        raise UserError(
            f"data '{path}' does not exist: a .jsonl, .json, .parquet or text file or a folder was expected"
        )
    if not path.is_dir():
        yield from READERS.get(path.suffix.lower(), _text_file)(path, skipped)
        return
    for file in list_visible_files(path):
        if file.suffix in (".jsonl", ".parquet"):
            yield from READERS[file.suffix](file, skipped)
        elif (begins := _beginning(file)).strip() and b"\0" not in begins:
            yield from _text_file(file, skipped)


def list_visible_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by name, without hidden ones."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return sorted(
        p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)
    )


def _read_text(path: Path) -> str:
    with as_user_error(f"'{path}' is not UTF-8 text"):
        return path.read_text("utf-8")


def _beginning(path: Path) -> bytes:
    """Return enough bytes of a file to tell whether it is text.

    A zero byte means a binary file, as in git.
    """
    with path.open("rb") as file:
        return file.read(8192)


def _text_file(path: Path, _skipped: Skipped | None) -> Iterator[tuple[Row, str]]:
    if b"\0" in _beginning(path):
        raise UserError(f"'{path}' is binary, allowed are .jsonl, .json, .parquet and text files")
    yield {"text": path.read_text(errors="replace")}, str(path)


def _json_lines(path: Path, skipped: Skipped | None) -> Iterator[tuple[Row, str]]:
    for number, line in enumerate(
        _read_text(path).split("\n"), 1
    ):  # splitlines would also split at U+2028
        if line.strip():
            row = None
            with skip_unreadable(skipped):
                row = _object(_parse_json(line, f"{path}:{number}"), f"{path}:{number}")
            if row is not None:
                yield row, f"{path}:{number}"


def _json(path: Path, skipped: Skipped | None) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a JSON list, or the single row of a chat's messages.

    A `.json` file with one JSON object per line is read line by line.
    """
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        yield from _json_lines(path, skipped)
        return
    found = _parse_json(text, str(path))
    if _is_chat(found):
        yield {CHATS[0]: found}, str(path)
        return
    for number, each in enumerate(found, 1):
        row = None
        with skip_unreadable(skipped):
            row = _object(each, f"{path}, row {number}")
        if row is not None:
            yield row, f"{path}, row {number}"


def _parquet(path: Path, _skipped: Skipped | None) -> Iterator[tuple[Row, str]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        needs = f"the package '{error.name}': pip install 'draftree[parquet]'"
        raise UserError(f"'{path}' is parquet, which needs {needs}") from error
    with as_user_error(f"cannot read '{path}'"):
        for number, row in enumerate(
            datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True), 1
        ):
            yield {k: v for k, v in row.items() if v is not None}, f"{path}, row {number}"


READERS: dict[str, Callable[[Path, Skipped | None], Iterator[tuple[Row, str]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}


def _parse_json(text: str, where: str) -> Any:
    with as_user_error(f"{where} is not JSON"):
        return json.loads(text)


def _object(row: Any, where: str) -> Row:
    if _is_chat(row):
        return {CHATS[0]: row}
    if not isinstance(row, dict):
        raise UserError(f"{where} is a JSON {type(row).__name__}, allowed is an object")
    return row


def _is_chat(value: Any) -> bool:
    """Return whether a value is a bare list of chat messages.

    Each message needs a sender, and a text or tool calls.
    """
    said = (*CONTENT_NAMES, *CALLS)
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and _first_value(m, ROLE_NAMES) and _first_value(m, said)
            for m in value
        )
    )


def _first_value(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of several keys that an object has, or None."""
    return next((name for name in names if name in values), None)


def messages(row: Row, where: str) -> Messages | None:
    """Return the chat of a data row, or None if it is plain text.

    Answers before the first question are dropped, because they belong to no prompt (many chats of
    ShareGPT were cut there).

    Raises:
        UserError: the row has no known form.
    """
    if is_completion_row(row) or (isinstance(row.get("text"), str) and not _has_chat(row)):
        return None
    chat = _read_messages(row, where)
    if chat is None:
        if "text" in row:
            raise UserError(f"{where}: 'text' is {format_value(row['text'])}, allowed is text")
        raise UserError(
            f"{where} has the keys {', '.join(sorted(row))}; allowed are text, {', '.join(CHATS)}, data, or one of "
            f"{', '.join(QUESTIONS)} with one of {', '.join(ANSWERS)}"
        )
    chat = list(dropwhile(lambda message: message["role"] == "assistant", chat))
    name = _first_value(row, SYSTEM_NAMES)
    if name and isinstance(row[name], str) and row[name] and chat and chat[0]["role"] != "system":
        return [{"role": "system", "content": row[name]}, *chat]
    return chat


def _has_chat(row: Row) -> bool:
    """Return whether a row has a list of messages, or a question with its answer."""
    pair = (_first_value(row, QUESTIONS), _first_value(row, ANSWERS))
    return any(row.get(name) and isinstance(row[name], list) for name in (*CHATS, "data")) or all(
        name is not None and row[name] and isinstance(row[name], str | list) for name in pair
    )


def _read_messages(row: Row, where: str) -> Messages | None:
    """Return the messages of a row in any of the known forms; None if it has none.

    Raises:
        UserError: a message cannot be read.
    """
    asks, answers = _first_value(row, QUESTIONS), _first_value(row, ANSWERS)
    if (name := _first_value(row, CHATS)) is not None:
        return _turns(row[name], name, where)
    if "data" in row:
        if not isinstance(row["data"], list):
            raise UserError(
                f"{where}: 'data' is {format_value(row['data'])}, allowed is a list of messages"
            )
        turns = enumerate(row["data"])
        return [
            {"role": "assistant" if i % 2 else "user", "content": _content(text, where)}
            for i, text in turns
        ]
    if asks is None or answers is None:
        return None
    if isinstance(row[asks], list) or isinstance(
        row[answers], list
    ):  # both are messages, as in TRL
        return [*_turns(row[asks], asks, where), *_turns(row[answers], answers, where)]
    question, answer = (_content(row[name], where).strip() for name in (asks, answers))
    if isinstance(row.get(ALPACA_INPUT_KEY), str) and row[ALPACA_INPUT_KEY]:
        question += f"\n\n{row[ALPACA_INPUT_KEY]}"
    if (asks, answers) == ("question", "answer"):
        answer = re.sub(
            r"<<[^>]*>>", "", answer
        ).strip()  # GSM8K's <<48/2=24>> are notes to a calculator, not text
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _turns(value: Any, name: str, where: str) -> Messages:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(
            f"{where}: '{name}' is {format_value(value)}, allowed is a list of messages"
        )
    return [_message(message, where) for message in value]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    sender, text = _first_value(message, ROLE_NAMES), _first_value(message, CONTENT_NAMES)
    role = None if sender is None else message[sender]
    if not isinstance(role, str) or role.lower() not in ROLES:
        lacks = "lacks a sender" if sender is None else f"has an unknown {format_value(role)}"
        raise UserError(f"{where}: a message {lacks}; roles are {', '.join(sorted(ROLES))}")
    calls = {name: message[name] for name in CALLS if message.get(name)}
    if text is None and not calls:
        raise UserError(
            f"{where}: a message lacks a text, allowed names are {', '.join(CONTENT_NAMES)}"
        )
    content = None if text is None else message[text]
    return {
        "role": ROLES[role.lower()],
        "content": "" if calls and content is None else _content(content, where),
        **calls,
    }


def _content(content: Any, where: str) -> str:
    """Return the text of a message, which may consist of parts.

    Raises:
        UserError: it is not a text, or a part is of another type.
    """
    parts = content if isinstance(content, list) and content else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else None
            got = f"a part of type {format_value(kind)}" if kind else type(part).__name__
            raise UserError(f"{where}: a message holds {got}, allowed is text")
    return "".join(str(text) for text in texts)


CUT_KEY = "cut"
"""The key of a chat's row for the numbers of its truncated messages, counted from 0."""


def is_completion_row(row: Row) -> bool:
    """Return whether a row has a prompt and a completion, and only the completion is a target."""
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)
