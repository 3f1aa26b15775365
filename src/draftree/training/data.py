"""Texts to train on, tokenised, with the tokens that are to be learnt.

A JSONL row may be `{"text"}`, `{"messages": [{"role", "content"}]}`, ShareGPT's `{"conversations": [{"from", "value"}]}`
or GSM8K's `{"question", "answer"}`; any other file is plain text. Chats learn their responses only.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftree.errors import UserError
from draftree.tree import Bools, Ints

Messages = list[dict[str, str]]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Sample:
    """One text: tokens [T], and which of them are learnt [T]; the first never is."""

    tokens: Ints
    learn: Bools


def digest(samples: Sequence[Sample]) -> str:
    """A hash of what is learnt, so that a run does not go on with other data."""
    hashed = hashlib.sha256()
    for sample in samples:
        hashed.update(sample.tokens.tobytes() + sample.learn.tobytes())
    return hashed.hexdigest()[:16]


def rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a JSONL file, or a plain text as one row, each with where it stands.

    Raises:
        UserError: the file is missing or not text, or a line is not JSON.
    """
    if not path.exists():
        raise UserError(f"data '{path}' does not exist: a .jsonl file, a text file or a folder of them was expected")
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            yield from rows(file)
        return
    if path.suffix not in (".jsonl", ".json"):
        yield {"text": path.read_text(errors="replace")}, str(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 text: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also cut at U+2028, which JSON strings may hold
        if line.strip():
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where} is a JSON {type(row).__name__}, allowed is an object")
            yield row, where


def messages(row: dict[str, Any], where: str) -> Messages | None:
    """A row's chat, or None where it is plain text.

    Raises:
        UserError: the row is of no known form.
    """
    if isinstance(row.get("text"), str):
        return None
    try:
        if "messages" in row:
            return [{"role": ROLES[m["role"]], "content": m["content"]} for m in row["messages"]]
        if "conversations" in row:
            return [{"role": ROLES[m["from"]], "content": m["value"]} for m in row["conversations"]]
        if "question" in row and "answer" in row:  # <<48/2=24>> are GSM8K's notes to a calculator, not text
            answer = re.sub(r"<<[^>]*>>", "", row["answer"]).strip()
            return [{"role": "user", "content": row["question"].strip()}, {"role": "assistant", "content": answer}]
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: a message lacks or has an unknown {error}; roles are {', '.join(sorted(ROLES))}") from None
    raise UserError(
        f"{where} has the keys {', '.join(sorted(row))}; allowed are text, messages, conversations, question + answer"
    )


def chat_sample(tokenizer: PreTrainedTokenizerBase, chat: Messages) -> Sample:
    """A chat rendered by the tokenizer's template; learnt is what stands between each generation prompt and its end."""

    def render(part: Messages, prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt))

    text = render(chat, False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([a for a, _ in encoded["offset_mapping"]])
    learn = np.zeros(len(starts), np.bool_)
    for i, message in enumerate(chat):
        if message["role"] == "assistant":
            begin, end = len(render(chat[:i], True)), len(render(chat[: i + 1], False))
            learn |= (starts >= begin) & (starts < end)
    learn[:1] = False
    return Sample(np.array(encoded["input_ids"], np.int64), learn)


def read(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Sample]:
    """All samples of some files; texts are cut into windows of `max_tokens`, chats at their first `max_tokens`.

    Raises:
        UserError: there is nothing to learn, or a chat cannot be rendered.
    """
    samples: list[Sample] = []
    for path in paths:
        for row, where in rows(path):
            chat = messages(row, where)
            if chat is not None and not tokenizer.chat_template:
                raise UserError(f"{where} is a chat, but the target's tokenizer has no chat template; use rows of text")
            samples.extend(_samples(row, chat, tokenizer, max_tokens))
    if not samples:
        raise UserError(f"nothing to learn in {', '.join(map(str, paths))}: no text or response of at least 2 tokens")
    return samples


def _samples(
    row: dict[str, Any], chat: Messages | None, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Iterator[Sample]:
    if chat is not None:
        whole = chat_sample(tokenizer, chat)
        parts = [Sample(whole.tokens[:max_tokens], whole.learn[:max_tokens])]
    else:
        ids = np.array(tokenizer(row["text"], add_special_tokens=False)["input_ids"], np.int64)
        parts = [
            Sample(ids[i : i + max_tokens], np.arange(len(ids[i : i + max_tokens])) > 0) for i in range(0, len(ids), max_tokens)
        ]
    yield from (p for p in parts if p.learn.any())
