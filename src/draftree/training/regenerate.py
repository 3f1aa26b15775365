"""Replace the answers in training data by the target's own (Kim and Rush 2016, section 3.2).

A drafter has to predict the target's output, so it learns most from text that the target generated.
In a chat every response is generated anew, in order, each with the new responses before it as its
context. A plain text is cut into windows. The first quarter of a window is the prompt, which the
target continues. Decoding is greedy, or a share of the answers is sampled.
"""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftree.data.decontamination import Excluded
from draftree.data.prompts import Content, encode
from draftree.data.readers import (
    CUT_KEY,
    Messages,
    Row,
    Skipped,
    is_completion_row,
    messages,
    prefix_errors,
    read_rows,
    skip_unreadable,
)
from draftree.data.samples import check_tokens
from draftree.errors import UserError
from draftree.sampling.params import GREEDY, Sampling
from draftree.target.target import Target
from draftree.training.answer_source import (
    Author,
    GeneratedText,
    PendingPrompt,
    check_author,
    log_estimate,
)
from draftree.training.generation_run import GenerationRun, hash_model
from draftree.utils.files import append, read_object, write_text
from draftree.utils.validated_dataclass import check_fields, knob

ANSWERS_FILE = "regenerated.jsonl"
METADATA_FILE = "regenerated.json"
PARTIAL_FILE = "regenerated.partial"


@dataclass(frozen=True)
class Regeneration:
    """Set the options for generating answers.

    Attributes:
        tokens: largest number of tokens in an answer.
        batch: number of answers that are generated at the same time.
        max_tokens: largest number of tokens of a chat for which answers are generated. Plain texts
            are cut into windows of this length.
        temperature: temperature of sampled answers; 0 for greedy ones.
        sampled: share of the prompts whose answers are sampled, if the temperature is above 0.
        seed: seed that, together with the prompt's number, determines whether an answer is sampled,
            and its random numbers.
    """

    tokens: int = knob(256, least=1)
    batch: int = knob(32, least=1)
    max_tokens: int = knob(512, least=2)
    temperature: float = knob(0.0, least=0)
    sampled: float = knob(1.0, least=0, most=1)
    seed: int = knob(0, least=0)

    def __post_init__(self) -> None:
        """Raise an error for a value that is not allowed."""
        check_fields(self, "regenerate ")

    @property
    def relevant_options(self) -> dict[str, Any]:
        """Return the options on which the answers depend, to store them with the answers.

        If all answers are greedy, the options of sampling are left out.
        """
        drawn = () if self.temperature and self.sampled else ("temperature", "sampled", "seed")
        return {name: value for name, value in asdict(self).items() if name not in drawn}

    def sampling(self, number: int) -> Sampling:
        """Return the sampling settings for the answer to the prompt with this number."""
        if (
            not self.temperature
            or np.random.default_rng([self.seed, 5, number]).random() >= self.sampled
        ):
            return GREEDY
        return Sampling(self.temperature, seed=self.seed)


def regenerate(
    target: Target,
    paths: Sequence[Path],
    out: Path,
    how: Regeneration,
    run: GenerationRun,
    skipped: Skipped | None = None,
) -> Path:
    """Replace the answers in training data by the target's own, and write them to a file.

    An interrupted run is resumed.

    Every process of a run calls this function and generates a part of the answers. The main process
    joins the parts. An answer equals the one that the target would give outside a batch, except
    where two tokens are almost equally likely: the rounding of logits depends on the other
    sequences in the batch, which differ between runs and after an interruption.

    Args:
        target: the target, which generates the answers by default.
        paths: files of the training data.
        out: folder in which the file is written.
        how: options for generating answers.
        run: the processes of the run, and who generates the answers.
        skipped: counter of unreadable rows, which are left out. If it is None, an unreadable row
            raises an error.

    Returns:
        The path of the new file. Its rows are `{"messages"}` and `{"prompt", "completion"}`, in the
        order of the data.

    Raises:
        UserError: the data cannot be read.
    """
    processes, author = run.processes, run.author_for(target, how.batch)
    with processes.share_errors():
        asked = list(
            read_prompts(
                paths, target.tokenizer, how.max_tokens, run.excluded, skipped, target.decoder.vocab
            )
        )
    hashes = hash_model(target)
    about = {**how.relevant_options, **hashes, "target": target.name, "prompts": digest(asked)} | (
        {"author": author.name} if author.name else {}
    )
    finished = False
    with suppress(UserError):
        finished = {
            **hashes,
            **read_object(out / METADATA_FILE, "of a finished regeneration"),
        } == about and (out / ANSWERS_FILE).is_file()
    if not finished:
        parts = out / PARTIAL_FILE / digest(about)
        done = _finished_rows(parts)
        processes.same(len(done), "the answers written so far")
        with processes.share_errors():
            missing = {i: asked[i] for i in range(len(asked)) if i not in done}
            _write(target, missing, parts, how, run)
        with processes.share_errors():
            if processes.main:
                _join(out, about, _finished_rows(parts), len(asked))
    if processes.main:
        shutil.rmtree(
            out / PARTIAL_FILE, ignore_errors=True
        )  # a run may have been killed before it came to this
    return out / ANSWERS_FILE


def read_prompts(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    excluded: Excluded = Excluded(),
    skipped: Skipped | None = None,
    vocab: int | None = None,
) -> Iterator[Content]:
    """Yield the prompts that the target has to answer.

    These are chats up to their last response, and the first quarter of each window of a plain text.

    Args:
        paths: files of the training data.
        tokenizer: tokenizer of the target.
        window: number of tokens in a window of a plain text.
        excluded: prompts to leave out.
        skipped: counter of unreadable rows, which are left out. If it is None, an unreadable row
            raises an error.
        vocab: number of rows in the target's embedding; all token ids must be smaller.

    Raises:
        UserError: a row cannot be read, or contains a token that the embedding does not have.
    """
    for row, where in (each for path in paths for each in read_rows(path, skipped)):
        asked: list[Content] = []
        with skip_unreadable(skipped):
            if excluded.keeps(row, where):
                found = list(_request_of(row, where, tokenizer, window))
                for each in found:
                    _check_prompt(each, where, tokenizer, vocab)
                asked = found
        yield from asked


def _request_of(
    row: Row, where: str, tokenizer: PreTrainedTokenizerBase, window: int
) -> Iterator[Content]:
    chat = messages(row, where)
    if chat is None:
        yield from (
            [row["prompt"]]
            if is_completion_row(row)
            else _beginnings(row["text"], tokenizer, window)
        )
        return
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"{where} is a chat, but the target's tokenizer has no chat template; use rows of text"
        )
    last = max((i for i, m in enumerate(chat) if m["role"] == "assistant"), default=0)
    if last:
        yield chat[: last + 1]


def _check_prompt(
    prompt: Content, where: str, tokenizer: PreTrainedTokenizerBase, vocab: int | None
) -> None:
    """Raise an error, with the file and the line, for a prompt that the target cannot read."""
    with prefix_errors(where):
        ids = _ids(tokenizer, prompt if isinstance(prompt, str) else prompt[:-1])
    check_tokens(np.array(ids, np.int64), where, tokenizer, vocab)


def _beginnings(text: str, tokenizer: PreTrainedTokenizerBase, window: int) -> Iterator[str]:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    for at in range(0, len(offsets) - 1, window):
        whole = offsets[at : at + window]
        yield text[whole[0][0] : whole[(len(whole) - 1) // 4][1]]


def _write(
    target: Target,
    asked: Mapping[int, Content],
    parts: Path,
    how: Regeneration,
    run: GenerationRun,
) -> None:
    processes, author = run.processes, run.author_for(target, how.batch)
    # Prompts that are read in one pass, and texts that are written side by side, should be of like
    # length.
    mine = sorted(asked, key=lambda i: (len(json.dumps(asked[i])), i))[
        processes.rank :: processes.world
    ]
    parts.mkdir(parents=True, exist_ok=True)
    log_estimate(author, "answers", sum(_count_responses(asked[i]) for i in mine), how.tokens)
    for count, (i, row) in enumerate(
        answer_rows(target, {i: asked[i] for i in mine}, how, author), 1
    ):
        append(
            parts / f"{processes.rank}.jsonl", "\n" + json.dumps({"number": i, "row": row})
        )  # after a broken line
        run.tell(count, "answering", len(mine))


def _count_responses(prompt: Content) -> int:
    """Return the number of answers to generate for a prompt.

    It is 1 for a plain text, and the number of responses for a chat.
    """
    return (
        1 if isinstance(prompt, str) else sum(message["role"] == "assistant" for message in prompt)
    )


def answer_rows(
    target: Target, asked: Mapping[int, Content], how: Regeneration, author: Author
) -> Iterator[tuple[int, Row]]:
    """Yield (number, row with answers) for numbered prompts, each as soon as it is finished.

    A row is empty if its prompt has no question that fits the limits.

    Args:
        target: target whose tokenizer and context length are used.
        asked: prompts by number.
        how: options for generating answers.
        author: object that generates the answers.
    """
    talks = {
        i: _regenerate_text(prompt) if isinstance(prompt, str) else _regenerate_chat(prompt)
        for i, prompt in asked.items()
    }
    longest, waiting = min(how.max_tokens, target.decoder.context), deque[PendingPrompt]()

    def next_row(
        number: int, said: GeneratedText | None, put: Callable[[PendingPrompt], None]
    ) -> Row | None:
        """Pass an answer to a prompt's talk, and queue the next text or chat of the talk.

        Texts and chats that do not fit the limits are skipped: the talk gets no answer to them.

        Args:
            number: the number of the prompt.
            said: the last answer; None at the start.
            put: adds an entry to the queue.

        Returns:
            The finished row if the talk has ended, else None.
        """
        try:
            content = talks[number].send(said)
            while not 0 < len(ids := _ids(target.tokenizer, content)) < longest:
                content = talks[number].send(None)
        except StopIteration as end:
            row: Row = end.value
            return row
        put(
            PendingPrompt(
                number, content, ids, min(how.tokens, longest - len(ids)), how.sampling(number)
            )
        )
        return None

    for number in asked:
        if (row := next_row(number, None, waiting.append)) is not None:
            yield number, row
    if author.probes and not all(each.sampling.greedy for each in waiting):
        check_author(author, waiting)
    for each in author.write(waiting):  # a chat that has begun is finished first
        if (row := next_row(each.asked.number, each, waiting.appendleft)) is not None:
            yield each.asked.number, row


def _ids(tokenizer: PreTrainedTokenizerBase, content: Content) -> list[int]:
    if isinstance(content, str):
        return list(tokenizer(content, add_special_tokens=False)["input_ids"])
    return encode(tokenizer, content)


Talk = Generator[Content, GeneratedText | None, Row]
"""Generator for one prompt. It yields the text or chat to answer, receives the answer or None if
there is no answer, and returns the finished row."""


def _regenerate_text(prompt: str) -> Talk:
    answer = yield prompt
    return {} if answer is None else {"prompt": prompt, "completion": answer.text}


def _regenerate_chat(chat: Messages) -> Talk:
    """Ask for a new version of every response of a chat, in order.

    The chat ends before the first response without an answer. The returned row records which
    responses reached the length limit.
    """
    said = Messages()
    answered = 0
    cut = list[int]()
    for message in chat:
        if message["role"] == "assistant":
            answer = yield said
            if answer is None:
                break
            said, answered = [*said, {"role": "assistant", "content": answer.text}], len(said) + 1
            cut += [] if answer.ended else [answered - 1]
        else:
            said = [*said, message]
    return {"messages": said[:answered], **({CUT_KEY: cut} if cut else {})} if answered else {}


def _finished_rows(parts: Path) -> dict[int, Row]:
    """Return the rows that all processes have written so far, by index of the row.

    Incomplete lines are ignored.
    """
    found: dict[int, Row] = {}
    for path in sorted(parts.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, LookupError, RecursionError):
                said = json.loads(line)
                found[int(said["number"])] = dict(said["row"])
    return found


def _join(out: Path, about: dict[str, Any], done: dict[int, Row], count: int) -> None:
    if len(done) < count:
        raise UserError(
            f"'{out / PARTIAL_FILE}' lacks files of other processes: all machines must share the folder"
        )
    write_text(
        out / ANSWERS_FILE, "".join(json.dumps(done[i]) + "\n" for i in sorted(done) if done[i])
    )
    write_text(out / METADATA_FILE, json.dumps(about, indent=1) + "\n")


def digest(what: Any) -> str:
    """Return a short hash of a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
