"""Prompt suites: a shipped one by name, or a file.

A row of a file with `turns`, `question`, `messages` or `conversations` is a chat; one with `prompt`
or `text` is raw text. Each may have a `category`. Each line of a file `.txt` is a question; any
other text file is one raw text. A benchmark's own file is named with its format, see
`dataset_formats.py`.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path
from typing import Any

from draftree.data.prompts import Content, question
from draftree.data.readers import CHATS, READERS, Row, messages, read_rows
from draftree.errors import UnknownName, UserError, format_value
from draftree.evaluation.dataset_formats import DATASET_FORMATS, Wording, read_row
from draftree.utils.files import as_user_error

SUITES_FOLDER = Path(__file__).parent / "prompts"
SUITE_STRIDE = 1 << 20
"""Difference between the numbers of corresponding prompts in two suites that are joined."""


@dataclass(frozen=True)
class SuitePrompt:
    """Store one prompt of a suite.

    Attributes:
        number: number of the prompt in its file, which determines the random draws of its text.
        content: raw text, or the messages of a chat.
        category: category of the prompt; empty for none.
        later: later questions of the conversation, in order.
    """

    number: int
    content: Content
    category: str
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """Store the prompts of one file or of several joined files.

    Attributes:
        name: name of the suite, or of its file.
        sha256: SHA-256 hash of the file's bytes, in hexadecimal.
        prompts: prompts in the order of the file.
        rule: sentence that describes how a text file was split into prompts; empty for other files.
    """

    name: str
    sha256: str
    prompts: tuple[SuitePrompt, ...]
    rule: str = ""

    @property
    def categories(self) -> tuple[str, ...]:
        """Return all categories, in the order of the file."""
        return tuple(dict.fromkeys(p.category for p in self.prompts))

    @property
    def summary(self) -> str:
        """Return the suite's description in one line."""
        return f"{len(self.prompts)} prompts: {', '.join(c for c in self.categories if c) or 'no categories'}"

    def select(self, categories: Sequence[str]) -> list[SuitePrompt]:
        """Return the prompts of the given categories; without a category, return all prompts.

        Raises:
            UnknownName: no prompt has one of these categories.
        """
        for name in categories:
            if name not in self.categories:
                raise UnknownName(f"category of suite '{self.name}'", name, self.categories)
        return [p for p in self.prompts if not categories or p.category in categories]


def suite_names() -> tuple[str, ...]:
    """Return the names of the shipped suites, one for each file."""
    return tuple(sorted(p.stem for p in SUITES_FOLDER.glob("*.jsonl")))


def join_suites(several: Sequence[str], whole: bool = False, wording: Wording = "plain") -> Suite:
    """Return the prompts of several suites as one suite.

    A prompt without a category gets the name of its suite.

    Args:
        several: names of suites or files as for `load`, at least one.
        whole: see `load`.
        wording: see `load`.

    Raises:
        UserError: a suite cannot be read, or two suites contain the same prompts.
    """
    found = [load(name, whole, wording) for name in several]
    if len(found) == 1:
        return found[0]
    if len({suite.sha256 for suite in found}) < len(found):
        raise UserError(
            f"--suite is given {', '.join(several)}: two of them hold the same prompts, allowed are different ones"
        )
    prompts = [
        replace(p, number=p.number + i * SUITE_STRIDE, category=p.category or suite.name)
        for i, suite in enumerate(found)
        for p in suite.prompts
    ]
    digest = hashlib.sha256("".join(suite.sha256 for suite in found).encode()).hexdigest()
    rules = dict.fromkeys(suite.rule for suite in found if suite.rule)
    return Suite("+".join(suite.name for suite in found), digest, tuple(prompts), "; ".join(rules))


def load(name: str, whole: bool = False, wording: Wording = "plain") -> Suite:
    """Return a shipped suite, a suite from a file, or a benchmark's own file.

    A benchmark's own file is named `FORMAT:FILE`. `FORMAT` alone stands for the data set on the
    hub.

    Args:
        name: name of a suite, a file, or a benchmark.
        whole: whether a text file is one prompt. By default each line of a file `.txt` is a
            question.
        wording: wording of a benchmark's questions. `official` takes the wording of the papers' own
            evaluations where it differs.

    Raises:
        UserError: there is no suite or file with this name, or one of its rows is not a prompt.
    """
    benchmark, _, file = name.partition(":")
    path = SUITES_FOLDER / f"{name}.jsonl" if name in suite_names() else Path(name)
    if benchmark in DATASET_FORMATS and not isfile(path):
        return _benchmark(benchmark, file, wording)
    if not isfile(path):
        raise UnknownName("suite or file of prompts", name, (*suite_names(), *DATASET_FORMATS))
    with as_user_error(f"cannot read suite '{name}'"):
        data = path.read_bytes()
        found, rule = _read_suite_file(path, whole)
        prompts = tuple(
            SuitePrompt(i, content(row, where), str(row.get("category", "")), later_questions(row))
            for i, (row, where) in enumerate(found)
        )
    if not prompts:
        raise UserError(f"suite '{name}' holds no prompts: it has no rows")
    return Suite(path.stem, hashlib.sha256(data).hexdigest(), prompts, rule)


def _read_suite_file(path: Path, whole: bool) -> tuple[list[tuple[Row, str]], str]:
    """Return the rows of a file, and a sentence on how a text file was split into rows."""
    if path.suffix.lower() in READERS:
        return list(read_rows(path)), ""
    if whole or path.suffix.lower() != ".txt":
        return list(read_rows(path)), "the file is one prompt, continued as it is"
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    asked = [
        ({"question": line.strip()}, f"{path}:{number}") for number, line in lines if line.strip()
    ]
    return asked, "each line is a question; --whole takes the file as one prompt"


def _benchmark(name: str, file: str, wording: Wording) -> Suite:
    """Read a benchmark's rows from its own file, or from the hub if `file` is empty."""
    if file and not isfile(file):
        raise UserError(f"suite '{name}:{file}': there is no file '{file}'")
    digest, prompts = hashlib.sha256(), []
    with as_user_error(f"cannot read suite '{name}'"):
        for i, (row, where) in enumerate(read_rows(Path(file)) if file else _hub(name)):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            of = read_row(name, row, where, wording)
            first, *after = of.questions
            prompts.append(
                SuitePrompt(i, first if of.raw else question(first), of.category, tuple(after))
            )
    if not prompts:
        raise UserError(f"suite '{name}:{file}' holds no prompts: it has no rows")
    return Suite(name, digest.hexdigest(), tuple(prompts))


def _hub(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a benchmark's data set on the hub, each with its place for messages."""
    if (hub := DATASET_FORMATS[name].hub) is None:
        raise UserError(
            f"suite '{name}' is read from a file alone: {name}:FILE, as of {DATASET_FORMATS[name].page}"
        )
    try:
        datasets: Any = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        told = f"name its file, {name}:FILE, or pip install 'draftree[parquet]'"
        raise UserError(
            f"suite '{name}' from the hub needs the package '{error.name}': {told}"
        ) from error
    for i, row in enumerate(datasets.load_dataset(hub[0], hub[1], split=hub[2]), 1):
        yield row, f"{hub[0]}, row {i}"


def later_questions(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the questions after the first one of a row with `turns`; empty for other rows."""
    turns = row.get("turns")
    return tuple(t for t in turns[1:] if isinstance(t, str)) if isinstance(turns, list) else ()


def content(row: dict[str, Any], where: str) -> Content:
    """Return the prompt of a row: raw text, or the messages of a chat.

    Raises:
        UserError: the row has no key that contains a prompt, or the prompt has the wrong type.
    """
    for key, first in (("turns", True), ("question", False), ("prompt", False)):
        if key in row:
            text = row[key][0] if first and isinstance(row[key], list) and row[key] else row[key]
            if not isinstance(text, str) or not text:
                raise UserError(
                    f"{where}: '{key}' is {format_value(text)}, allowed is {'a list of ' if first else ''}text"
                )
            return text if key == "prompt" else question(text)
    if not row.keys() & {"text", *CHATS}:
        allowed = "turns, question, messages, conversations, prompt or text"
        raise UserError(
            f"{where} has the keys {', '.join(sorted(row)) or '(none)'}; allowed is {allowed}"
        )
    chat = messages(row, where)
    if chat is None:
        return str(row["text"])
    while (
        chat and chat[-1]["role"] == "assistant"
    ):  # a training chat ends with the answer; here the target generates it
        chat = chat[:-1]
    if not chat:
        raise UserError(f"{where}: the chat holds no question")
    return chat
