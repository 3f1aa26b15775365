"""Texts to train on, tokenised, with the tokens that are to be learnt.

A row may be

{"text"}                                        plain text, as in SlimPajama (its `meta` is not read)
{"prompt", "completion"}                        text of which the completion is learnt
{"messages": [{"role", "content"}]}             a chat, as in UltraChat 200k
{"conversations": [{"from", "value"}]}          ShareGPT's chats
{"data": [question, answer, …]}                 UltraChat's chats
{"question", "answer"}                          GSM8K's

and stands in a JSONL file, in a JSON file as one list, or in a parquet file (which needs the package `datasets`). Any other
file is plain text; of a folder all text files are read. Chats learn their responses only.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

from draftree.boundary.files import understood
from draftree.errors import UserError, shown

Messages = list[dict[str, str]]
Row = dict[str, Any]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system"}  # fmt: skip
"""Names of senders in data, and their roles in templates."""


def rows(path: Path) -> Iterator[tuple[Row, str]]:
    """The rows of a file or of all files of a folder, each with where it stands.

    In a folder, only `.jsonl` and `.parquet` files hold rows, the others are texts; hidden, empty and binary ones are left out.

    Raises:
        UserError: the file is missing or not text, or a row is not a JSON object.
    """
    if not path.exists():
        raise UserError(f"data '{path}' does not exist: a .jsonl, .json, .parquet or text file or a folder was expected")
    if not path.is_dir():
        yield from READERS.get(path.suffix.lower(), _text)(path)
        return
    for file in seen(path):
        if file.suffix in (".jsonl", ".parquet"):
            yield from READERS[file.suffix](file)
        elif (begins := _beginning(file)).strip() and b"\0" not in begins:
            yield from _text(file)


def seen(folder: Path) -> list[Path]:
    """The files of a folder at any depth, in the order of their names, without hidden ones."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return sorted(p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _decoded(path: Path) -> str:
    with understood(f"'{path}' is not UTF-8 text"):
        return path.read_text("utf-8")


def _beginning(path: Path) -> bytes:
    """Enough of a file to tell whether it is text: as git sees it, a zero byte makes it binary."""
    with path.open("rb") as file:
        return file.read(8192)


def _text(path: Path) -> Iterator[tuple[Row, str]]:
    if b"\0" in _beginning(path):
        raise UserError(f"'{path}' is binary, allowed are .jsonl, .json, .parquet and text files")
    yield {"text": path.read_text(errors="replace")}, str(path)


def _json_lines(path: Path) -> Iterator[tuple[Row, str]]:
    for number, line in enumerate(_decoded(path).split("\n"), 1):  # splitlines would also cut at U+2028, which JSON may hold
        if line.strip():
            yield _object(_parsed(line, f"{path}:{number}"), f"{path}:{number}"), f"{path}:{number}"


def _json(path: Path) -> Iterator[tuple[Row, str]]:
    """One list of rows; or lines, under the other name."""
    text = _decoded(path)
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    for number, row in enumerate(_parsed(text, str(path)), 1):
        yield _object(row, f"{path}, row {number}"), f"{path}, row {number}"


def _parquet(path: Path) -> Iterator[tuple[Row, str]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        needs = f"the package '{error.name}': pip install 'draftree[parquet]'"
        raise UserError(f"'{path}' is parquet, which needs {needs}") from error
    with understood(f"cannot read '{path}'"):
        for number, row in enumerate(datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True), 1):
            yield {k: v for k, v in row.items() if v is not None}, f"{path}, row {number}"


READERS: dict[str, Callable[[Path], Iterator[tuple[Row, str]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}


def _parsed(text: str, where: str) -> Any:
    with understood(f"{where} is not JSON"):
        return json.loads(text)


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where} is a JSON {type(row).__name__}, allowed is an object")
    return row


def messages(row: Row, where: str) -> Messages | None:
    """A row's chat, or None where it is plain text.

    Answers in front of the first question are left out: no prompt asks for them (many of ShareGPT's chats were cut there).

    Raises:
        UserError: the row is of no known form.
    """
    if isinstance(row.get("text"), str) or completes(row):
        return None
    for key, read_as in CHATS.items():
        if key in row:
            try:
                chat = [_message(role, content, where) for role, content in read_as(row)]
                return list(dropwhile(lambda message: message["role"] == "assistant", chat))
            except KeyError as error:
                raise UserError(
                    f"{where}: a message lacks or has an unknown {error}; roles are {', '.join(sorted(ROLES))}"
                ) from None
            except TypeError:
                raise UserError(f"{where}: '{key}' is {shown(row[key])}, allowed is a list of messages") from None
    if "text" in row:
        raise UserError(f"{where}: 'text' is {shown(row['text'])}, allowed is text")
    raise UserError(
        f"{where} has the keys {', '.join(sorted(row))}; allowed are text, messages, conversations, data, question + answer, "
        "prompt + completion"
    )


CUT = "cut"
"""The key of a chat's row for the numbers of the messages, counted from 0, that were broken off."""


def completes(row: Row) -> bool:
    """True for a row of text of which the completion is learnt."""
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def _message(role: str, content: Any, where: str) -> dict[str, str]:
    if not isinstance(content, str):
        raise UserError(f"{where}: a message holds {type(content).__name__}, allowed is text")
    return {"role": ROLES[role], "content": content}


def _turns(key: str, role: str, content: str) -> Callable[[Row], list[tuple[str, Any]]]:
    return lambda row: [(message[role], message[content]) for message in row[key]]


def _ultrachat(row: Row) -> list[tuple[str, Any]]:
    if not isinstance(row["data"], list):
        raise TypeError
    return [("assistant" if i % 2 else "user", content) for i, content in enumerate(row["data"])]


def _gsm8k(row: Row) -> list[tuple[str, Any]]:
    question, answer = (text.strip() if isinstance(text, str) else text for text in (row["question"], row["answer"]))
    if isinstance(answer, str):
        answer = re.sub(r"<<[^>]*>>", "", answer).strip()  # <<48/2=24>> are notes to a calculator, not text
    return [("user", question), ("assistant", answer)]


CHATS: Mapping[str, Callable[[Row], list[tuple[str, Any]]]] = {
    "messages": _turns("messages", "role", "content"),
    "conversations": _turns("conversations", "from", "value"),
    "data": _ultrachat,
    "question": _gsm8k,
}
"""The key each form of a chat is known by; `messages` before `data` and `question`, which may stand beside it."""
