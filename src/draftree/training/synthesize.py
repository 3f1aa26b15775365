"""Let the target generate questions, to train without data (Magpie, Xu et al. 2024).

A chat model that is given nothing but what its template puts before a user's message writes a
message such as users write. These are sampled until their end of turn; broken ones, those that came
before and those of an evaluation are dropped.
"""

import json
import math
import shutil
import unicodedata
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from draftree.data.decontamination import Excluded, normalise_words, questions
from draftree.data.prompts import encode, question
from draftree.data.readers import Messages, Skipped
from draftree.errors import UserError
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.training.answer_source import (
    CHECKED_TOKENS,
    PendingPrompt,
    check_author,
    log_estimate,
)
from draftree.training.base import LOG
from draftree.training.generation_run import GenerationRun, hash_model
from draftree.training.regenerate import digest
from draftree.utils.files import append, as_user_error, read_object, write_text
from draftree.utils.validated_dataclass import check_fields, knob

QUESTIONS_FILE = "questions.jsonl"
METADATA_FILE = "questions.json"
PARTIAL_FILE = "questions.partial"
MARK = "draftree5question"
"""Placeholder for a user's message when a chat template is examined; templates leave it
unchanged."""
FEWEST = 0.05
"""Least share of usable questions; with fewer, the target is considered unable to make up
questions."""
ENOUGH = 64
"""Number of questions after which the share of usable ones is checked."""


@dataclass(frozen=True)
class Synthesis:
    """Set the options for questions that the target makes up.

    Attributes:
        count: number of questions to collect, not counting dropped ones.
        temperature: sampling temperature of the questions; 1 in the paper.
        top_p: probability mass of the likeliest tokens from which is sampled.
        tokens: largest number of tokens in a question; longer ones are dropped.
        system: system message before the question, which can name a subject; by default the chat
            template's own message, if any. Answers are generated without it.
        seed: seed that, together with a question's number, determines its random numbers.
        rows: number of questions that are generated at the same time.
    """

    count: int = knob(1000, least=1)
    temperature: float = knob(1.0, above=0)
    top_p: float = knob(0.99, above=0, most=1)
    tokens: int = knob(256, least=1)
    system: str | None = None
    seed: int = knob(0, least=0)
    rows: int = knob(32, least=1)

    def __post_init__(self) -> None:
        """Raise an error for a value that is not allowed."""
        check_fields(self, "synthesize ")


@dataclass(frozen=True)
class Opening:
    """Store the text that a chat template puts before a user's message, and its token ids.

    `stop` is the text that ends a message: the first text that the template puts after it.
    """

    text: str
    ids: list[int]
    stop: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> Self:
        """Find these texts by rendering a chat with a placeholder as the message.

        Raises:
            UserError: the tokenizer has no chat template, or the template puts no text before or
                after a user's message.
        """
        if not tokenizer.chat_template:
            raise UserError(
                "the target's tokenizer has no chat template, so it cannot generate questions: use --data"
            )
        chat: Messages = [
            *([] if system is None else [{"role": "system", "content": system}]),
            *question(MARK),
        ]
        with as_user_error("the target's chat template refuses this chat"):
            whole = str(
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            )
        before, mark, behind = whole.partition(MARK)
        ids = list(tokenizer(before, add_special_tokens=False)["input_ids"])
        if not mark or not ids or not behind.strip():
            raise UserError(
                "the target's chat template has no text before and after a user's message: use --data"
            )
        special = [t for t in _special(tokenizer) if behind.strip().startswith(t)]
        return cls(before, ids, max(special, key=len, default=behind.strip()))


def synthesize(
    target: Target,
    how: Synthesis,
    out: Path,
    run: GenerationRun,
    beside: Sequence[Path] = (),
    skipped: Skipped | None = None,
) -> Path:
    """Let the target make up questions, and write them to a file.

    An interrupted run is resumed.

    Every process of a run calls this function. The number of dropped questions is logged, and
    stored by reason in `questions.json`.

    Args:
        target: the target, which makes up the questions by default.
        how: options for the questions.
        out: folder in which the files are written.
        run: the processes of the run, and who generates the questions.
        beside: files of data whose questions must not be repeated.
        skipped: counter of unreadable rows in `beside`, which are left out. If it is None, an
            unreadable row raises an error.

    Returns:
        The path of the file of rows `{"messages"}`, each a question with an empty response, which
        `regenerate` fills in.

    Raises:
        UserError: the target has no chat template, or almost none of its questions is usable.
    """
    processes, author = run.processes, run.author_for(target, how.rows)
    with processes.share_errors():
        opening = Opening.of(target.tokenizer, how.system)
        known = sorted(set(map(normalise_words, questions(beside, skipped))))
    drawn = {k: v for k, v in asdict(how).items() if k not in ("count", "rows")}
    hashes = hash_model(target)
    drawn |= {"target": target.name, "author": author.name, "opening": opening.text, **hashes}
    about = drawn | {
        "count": how.count,
        "beside": digest(known),
        "excluded": digest(sorted(run.excluded.runs)),
    }
    finished = False
    with suppress(UserError):
        finished = (
            about.items() <= {**hashes, **read_object(out / METADATA_FILE, "of questions")}.items()
            and (out / QUESTIONS_FILE).is_file()
        )
    if not finished:
        home = out / PARTIAL_FILE / digest(drawn)
        kept, report = _sample_questions(target, how, opening, home, run, known)
        told = ", ".join(f"{n:,} {reason}" for reason, n in report["dropped"].items())
        LOG.info(
            "%s generated %s questions, dropped: %s",
            target.name,
            f"{report['made_up']:,}",
            told or "none",
        )
        with processes.share_errors():
            if processes.main:
                chats = ([*question(text), {"role": "assistant", "content": ""}] for text in kept)
                write_text(
                    out / QUESTIONS_FILE,
                    "".join(json.dumps({"messages": chat}) + "\n" for chat in chats),
                )
                write_text(out / METADATA_FILE, json.dumps(about | report, indent=1) + "\n")
    if processes.main:
        shutil.rmtree(out / PARTIAL_FILE, ignore_errors=True)
    return out / QUESTIONS_FILE


def _sample_questions(
    target: Target,
    how: Synthesis,
    opening: Opening,
    home: Path,
    run: GenerationRun,
    known: Sequence[str],
) -> tuple[list[str], dict[str, Any]]:
    """Sample questions until enough are usable; return them, and a report with counts.

    The result depends only on the numbers of the samples, not on the order in which they are
    generated.
    """
    processes, author = run.processes, run.author_for(target, how.rows)
    bound, mine = min(how.count, ENOUGH), home / f"{processes.rank}.jsonl"
    home.mkdir(parents=True, exist_ok=True)
    sampling = Sampling(how.temperature, top_p=how.top_p, seed=how.seed)
    log_estimate(
        author,
        "questions",
        math.ceil(max(how.count - len(_finished_questions(home)), 0) / processes.world),
        how.tokens,
    )
    while True:
        done = _finished_questions(home)
        processes.same(len(done), "the questions written so far")
        missing = [i for i in range(bound) if i not in done][processes.rank :: processes.world]
        with processes.share_errors():
            waiting = deque(
                PendingPrompt(i, opening.text, opening.ids, how.tokens, sampling, (opening.stop,))
                for i in missing
            )
            for count, each in enumerate(author.write(waiting), 1):
                line = {"number": each.asked.number, "text": each.text, "ended": each.ended}
                append(mine, "\n" + json.dumps(line))  # after a line that was broken off
                run.tell(count, "generating questions", len(missing))
        with processes.share_errors():
            done = _finished_questions(home)
            if not done.keys() >= set(range(bound)):
                raise UserError(
                    f"'{home}' lacks files of other processes: all machines must share the folder"
                )
            kept, dropped = select_questions(
                [done[i] for i in range(bound)], how.count, target.tokenizer, known, run.excluded
            )
            if author.probes and missing and processes.main:
                check_author(
                    author,
                    (
                        PendingPrompt(i, chat, encode(target.tokenizer, chat), CHECKED_TOKENS)
                        for i, chat in enumerate(map(question, kept))
                    ),
                )
            if bound >= ENOUGH and len(kept) < FEWEST * bound:
                reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.most_common())
                raise UserError(
                    f"of {bound} questions that '{target.name}' made up {len(kept)} can be used: {reasons}"
                )
        if len(kept) == how.count:
            made_up = len(kept) + dropped.total()
            return kept, {
                "made_up": made_up,
                "kept": len(kept),
                "dropped": dict(dropped.most_common()),
            }
        more = max(math.ceil((how.count - len(kept)) * bound / max(len(kept), 1)), 8)
        bound = min(bound + more, ENOUGH) if bound < ENOUGH else bound + more


def select_questions(
    drawn: Sequence[Mapping[str, Any]],
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[str] = (),
    excluded: Excluded = Excluded(),
) -> tuple[list[str], Counter[str]]:
    """Return the first `count` usable questions, and the number of dropped ones by reason.

    Only questions before the last usable one are counted.

    Args:
        drawn: sampled questions with the entries `text` and `ended`, which is true if the end of
            the message was generated.
        count: largest number of questions to return.
        tokenizer: tokenizer of the target, whose special tokens a question must not contain.
        known: normalised questions that must not be repeated.
        excluded: prompts that must not be among the questions.
    """
    kept = list[str]()
    dropped = Counter[str]()
    seen = set(known)
    special = _special(tokenizer)
    for each in drawn:
        if len(kept) == count:
            break
        text, words = each["text"].strip(), normalise_words(each["text"])
        again = "duplicates" if words in seen else "excluded" if excluded.holds(text) else ""
        if reason := find_flaw(text, each["ended"], special) or again:
            dropped[reason] += 1
        else:
            kept.append(text)
            seen.add(words)
    return kept, dropped


RUN, LEAST = 12, 24
"""Length in characters of the pieces whose repetition makes a text count as repetitive, and length
of the shortest text that is checked for it.
"""


def find_flaw(text: str, ended: bool, special: Sequence[str] = ()) -> str:
    """Return the reason why a text is not usable as a question; empty for a usable one."""
    if not ended:
        return "without an end"
    if not text:
        return "empty"
    if any(token in text for token in special):
        return "with special tokens"
    broken = any(
        unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs") and c not in "\n\r\t" for c in text
    )
    if broken or "\ufffd" in text or not any(map(str.isalpha, text)):
        return "no text"
    runs = [text[at : at + RUN] for at in range(len(text) - RUN + 1)]
    if len(text) >= LEAST and 2 * len(set(runs)) < len(runs):
        return "repetitive"
    return ""


def _special(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _finished_questions(home: Path) -> dict[int, Mapping[str, Any]]:
    """Return the questions that all processes have written so far, without incomplete lines."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in sorted(home.glob("*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, LookupError, RecursionError):
                said = json.loads(line)
                found[int(said["number"])] = {
                    "text": str(said["text"]),
                    "ended": bool(said["ended"]),
                }
    return found
