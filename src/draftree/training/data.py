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

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftree.errors import UserError, shown
from draftree.files import understood
from draftree.tree import Bools, Ints

Messages = list[dict[str, str]]
Row = dict[str, Any]

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system"}  # fmt: skip
"""What senders of messages are called, and what templates call them."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a chat template marks what the model writes."""


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
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        if file.suffix in (".jsonl", ".parquet"):
            yield from READERS[file.suffix](file)
        elif not any(part.startswith(".") for part in file.relative_to(path).parts):
            begins = _beginning(file)
            if begins.strip() and b"\0" not in begins:
                yield from _text(file)


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


def completes(row: Row) -> bool:
    """Whether a row is text of which the completion is learnt."""
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def _message(role: str, content: Any, where: str) -> dict[str, str]:
    if not isinstance(content, str):
        raise UserError(f"{where}: a message holds {type(content).__name__}, allowed is text")
    return {"role": ROLES[role], "content": content}


def _openai(row: Row) -> list[tuple[str, Any]]:
    return [(m["role"], m["content"]) for m in row["messages"]]


def _sharegpt(row: Row) -> list[tuple[str, Any]]:
    return [(m["from"], m["value"]) for m in row["conversations"]]


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
    "messages": _openai,
    "conversations": _sharegpt,
    "data": _ultrachat,
    "question": _gsm8k,
}
"""The key each form of a chat is known by; `messages` before `data` and `question`, which may stand beside it."""


def chat_samples(tokenizer: PreTrainedTokenizerBase, chat: Messages) -> list[Sample]:
    """A chat as the template renders it, whose responses are learnt, each with what ends it.

    Which tokens these are, the template's own mask says where it has one (`{% generation %}`). Otherwise a response is
    what stands between the prompt for it and its end; where a template renders earlier responses otherwise than the last
    one (without its thoughts, say), the chat is a sample for each response, as the model reads it when it writes it.

    Raises:
        UserError: what a prompt is rendered as does not begin what the chat with its response is rendered as.
    """
    if GENERATION.search(str(tokenizer.get_chat_template())):
        return [_marked(tokenizer, chat)]

    def render(part: Messages, prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt))

    answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    spans = [(render(chat[:i], True), render(chat[: i + 1], False)) for i in answers]
    if not all(until.startswith(prompt) for prompt, until in spans):
        raise UserError("the chat template does not render a response behind its prompt, and has no {% generation %} mark")
    whole = render(chat, False)
    if all(whole.startswith(until) for _, until in spans):
        return [_between(tokenizer, whole, [(len(prompt), len(until)) for prompt, until in spans])]
    return [_between(tokenizer, until, [(len(prompt), len(until))]) for prompt, until in spans]


def _marked(tokenizer: PreTrainedTokenizerBase, chat: Messages) -> Sample:
    """A chat with the template's own mask."""
    offsets = {"return_offsets_mapping": True}
    encoded: Any = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=offsets
    )
    starts, mask = np.array([a for a, _ in encoded["offset_mapping"]]), np.array(encoded["assistant_masks"], np.bool_)
    # Of a last character that is spread over several tokens, transformers' mask has the first one only.
    return _sample(encoded["input_ids"], np.isin(starts, starts[mask]))


def _between(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
    """A text of which the tokens that begin inside some spans of characters are learnt."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([a for a, _ in encoded["offset_mapping"]])
    learn = np.zeros(len(starts), np.bool_)
    for begin, end in spans:
        learn |= (starts >= begin) & (starts < end)
    return _sample(encoded["input_ids"], learn)


def _sample(ids: Sequence[int], learn: Bools) -> Sample:
    learn[:1] = False
    return Sample(np.array(ids, np.int64), learn)


def read(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Sample]:
    """All samples of some files; texts are cut into windows of `max_tokens`, chats at their first `max_tokens`.

    Raises:
        UserError: there is nothing to learn, or a chat cannot be rendered.
    """
    samples = [s for path in paths for row, where in rows(path) for s in _samples(row, where, tokenizer, max_tokens)]
    if not samples:
        raise UserError(f"nothing to learn in {', '.join(map(str, paths))}: no text or response of at least 2 tokens")
    return samples


def _samples(row: Row, where: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[Sample]:
    chat = messages(row, where)
    if chat is not None and not tokenizer.chat_template:
        raise UserError(f"{where} is a chat, but the target's tokenizer has no chat template; use rows of text")
    try:
        with understood("the target's chat template refuses this chat" if chat else "the target's tokenizer refuses this text"):
            parts = _plain(row, tokenizer, max_tokens) if chat is None else chat_samples(tokenizer, chat) if chat else []
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for part in parts:
        cut = Sample(part.tokens[:max_tokens], part.learn[:max_tokens])
        if cut.learn.any():
            yield cut


def _plain(row: Row, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Sample]:
    if completes(row):
        text = row["prompt"] + row["completion"]
        return [_between(tokenizer, text, [(len(row["prompt"]), len(text))])]
    ids = np.array(tokenizer(row["text"], add_special_tokens=False)["input_ids"], np.int64)
    parts = [ids[i : i + max_tokens] for i in range(0, len(ids), max_tokens)]
    return [Sample(part, np.arange(len(part)) > 0) for part in parts]
