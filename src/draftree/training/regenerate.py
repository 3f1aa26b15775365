"""Sequence-level distillation: the target's own answers in the place of those in the data (Kim and Rush 2016, section 3.2).

A drafter is judged by what the target writes, so it learns most from text the target wrote. Of a chat every response is
written anew, one after the other, each behind those written before it. A plain text is cut into windows, of which the first
quarter is the prompt of what the target writes on. Decoding is greedy.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftree.boundary.files import append, read_object, write_text
from draftree.boundary.knobs import check, knob
from draftree.boundary.progress import Tell, silent
from draftree.data.prompts import Content, encode
from draftree.data.rows import Messages, Row, completes, messages, rows
from draftree.engine import plain
from draftree.errors import UserError
from draftree.models.target import Target
from draftree.request import Request
from draftree.training.processes import Processes

FILE, ABOUT, PARTS = "regenerated.jsonl", "regenerated.json", "regenerated.partial"


@dataclass(frozen=True)
class Regeneration:
    """The way answers are written.

    Attributes:
        tokens: the longest answer.
        batch: how many are written at a time.
        max_tokens: what is behind so many tokens of a chat is not learnt, and not written; texts are cut into such windows.
    """

    tokens: int = knob(256, least=1)
    batch: int = knob(32, least=1)
    max_tokens: int = knob(512, least=2)

    def __post_init__(self) -> None:
        check(self, "regenerate ")


def regenerate(
    target: Target,
    paths: Sequence[Path],
    out: Path,
    how: Regeneration,
    processes: Processes,
    tell: Tell = silent,
) -> Path:
    """Writes data whose answers are the target's; goes on where an interrupted run stopped.

    Every process of a run calls it, and writes a part; the main one puts the parts together.

    Args:
        target: answers.
        paths: of the data.
        out: the folder of the file that is written.
        how: answers are written.
        processes: of the run.
        tell: told how many answers this process has written.

    Returns:
        The path of the rows, `{"messages"}` and `{"prompt", "completion"}`, in the order of the data.

    Raises:
        UserError: the data cannot be read.
    """
    with processes.agreed():
        asked = list(prompts(paths, target.tokenizer, how.max_tokens))
    about = {**asdict(how), "target": target.name, "prompts": _digest(asked)}
    finished = False
    with suppress(UserError):
        finished = read_object(out / ABOUT, "of a finished regeneration") == about and (out / FILE).is_file()
    if not finished:
        parts = out / PARTS / _digest(about)
        done = _done(parts)
        processes.same(len(done), "the answers written so far")
        with processes.agreed():
            _write(target, asked, done, parts, how, processes, tell)
        with processes.agreed():
            if processes.main:
                _join(out, about, _done(parts), len(asked))
    if processes.main:
        shutil.rmtree(out / PARTS, ignore_errors=True)  # a run may have been killed before it came to this
    return out / FILE


def prompts(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, window: int) -> Iterator[Content]:
    """The target's prompts: chats up to their last response, and the first quarter of each window of a text."""
    for path in paths:
        for row, where in rows(path):
            chat = messages(row, where)
            if chat is None:
                yield from [row["prompt"]] if completes(row) else _beginnings(row["text"], tokenizer, window)
                continue
            if chat and not tokenizer.chat_template:
                raise UserError(f"{where} is a chat, but the target's tokenizer has no chat template; use rows of text")
            last = max((i for i, m in enumerate(chat) if m["role"] == "assistant"), default=0)
            if last:
                yield chat[: last + 1]


def _beginnings(text: str, tokenizer: PreTrainedTokenizerBase, window: int) -> Iterator[str]:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for at in range(0, len(offsets) - 1, window):
        whole = offsets[at : at + window]
        yield text[whole[0][0] : whole[(len(whole) - 1) // 4][1]]


def _write(
    target: Target,
    asked: Sequence[Content],
    done: dict[int, Row],
    parts: Path,
    how: Regeneration,
    processes: Processes,
    tell: Tell,
) -> None:
    # Rows of one batch should end at about the same time. Which these are does not depend on what is done, as the last bits
    # of a row's logits depend on the rows beside it.
    order = sorted(range(len(asked)), key=lambda i: len(json.dumps(asked[i])))
    every = [order[at : at + how.batch] for at in range(0, len(order), how.batch)]
    batches = [batch for batch in every if not done.keys() >= set(batch)][processes.rank :: processes.world]
    written, total = 0, sum(map(len, batches))
    parts.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        answers = zip(batch, _answers(target, [asked[i] for i in batch], how), strict=True)
        lines = [json.dumps({"number": i, "row": row}) + "\n" for i, row in answers]
        append(parts / f"{processes.rank}.jsonl", "\n" + "".join(lines))  # behind a line that was broken off
        written += len(batch)
        tell(written, "answering", total)


def _answers(target: Target, asked: Sequence[Content], how: Regeneration) -> list[Row]:
    """The rows of some prompts; an empty one where the target was asked nothing it could answer."""
    texts = {i: prompt for i, prompt in enumerate(asked) if isinstance(prompt, str)}
    chats = {i: prompt for i, prompt in enumerate(asked) if not isinstance(prompt, str)}
    ids = {i: list(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for i, text in texts.items()}
    found: dict[int, Row] = {i: {"messages": chat} for i, chat in _chats(target, chats, how).items()}
    found |= {i: {"prompt": texts[i], "completion": answer} for i, answer in _plain(target, ids, how).items()}
    return [found.get(i, {}) for i in range(len(asked))]


def _chats(target: Target, chats: dict[int, Messages], how: Regeneration) -> dict[int, Messages]:
    """Every response written anew, the first ones of all chats before the second ones; a chat ends where it is too long."""
    said: dict[int, Messages] = {i: [] for i in chats}
    rest = {i: list(chat) for i, chat in chats.items()}
    while rest:
        for i in rest:
            while rest[i][0]["role"] != "assistant":
                said[i].append(rest[i].pop(0))
        answers = _plain(target, {i: encode(target.tokenizer, said[i]) for i in rest}, how)
        for i, answer in answers.items():
            said[i].append({"role": "assistant", "content": answer})
        rest = {i: rest[i][1:] for i in answers if rest[i][1:]}
    answered = {i: max((n for n, m in enumerate(chat, 1) if m["role"] == "assistant"), default=0) for i, chat in said.items()}
    return {i: said[i][:n] for i, n in answered.items() if n}


def _plain(target: Target, asked: dict[int, list[int]], how: Regeneration) -> dict[int, str]:
    """The target's answers to the prompts of which something can be learnt."""
    longest = min(how.max_tokens, target.decoder.context)
    fit = {i: ids for i, ids in asked.items() if 0 < len(ids) < longest}
    if not fit:
        return {}
    requests = [Request(ids, min(how.tokens, longest - len(ids)), target.eos) for ids in fit.values()]
    answers = [[t for t in ids if t not in target.eos] for ids in plain(target, requests).tokens]
    return {i: str(target.tokenizer.decode(ids)) for i, ids in zip(fit, answers, strict=True)}


def _done(parts: Path) -> dict[int, Row]:
    """The rows written so far by all processes; a line that was broken off does not count."""
    found: dict[int, Row] = {}
    for path in sorted(parts.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, LookupError, RecursionError):
                said = json.loads(line)
                found[int(said["number"])] = dict(said["row"])
    return found


def _join(out: Path, about: dict[str, Any], done: dict[int, Row], count: int) -> None:
    if len(done) < count:
        raise UserError(f"'{out / PARTS}' lacks what other processes wrote: all machines must see the same folder")
    write_text(out / FILE, "".join(json.dumps(done[i]) + "\n" for i in sorted(done) if done[i]))
    write_text(out / ABOUT, json.dumps(about, indent=1) + "\n")


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
