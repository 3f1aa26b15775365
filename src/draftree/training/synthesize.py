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

from draftree.data.decontamination import Excluded, normalised, questions
from draftree.data.prompts import encode, question
from draftree.data.readers import Messages, Skipped
from draftree.errors import UserError
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.training.answer_source import Asked, Author, Local, announce
from draftree.training.base import LOG
from draftree.training.distributed import Processes
from draftree.training.regenerate import digest
from draftree.utils.files import append, read_object, understood, write_text
from draftree.utils.progress import Tell, silent
from draftree.utils.validated_dataclass import check, knob

FILE = "questions.jsonl"
ABOUT = "questions.json"
PARTS = "questions.partial"
MARK = "draftree5question"
"""Stands for a user's message where a template is looked at; no template changes it."""
FEWEST = 0.05
"""Below this share of usable questions a target cannot make them up."""
ENOUGH = 64
"""Questions by which that is judged."""


@dataclass(frozen=True)
class Synthesis:
    """The way questions are made up.

    Attributes:
        count: how many are wanted, without those that are dropped.
        temperature: they are sampled at; 1 in the paper.
        top_p: mass of the likeliest tokens that they are sampled from.
        tokens: the longest question; one that has no end by then is dropped.
        system: a system message before the question, which can name a subject; by default the
            template's own, if it has one. Answers are written without it.
        seed: question number i depends on it and on i.
        rows: how many are written at a time.
    """

    count: int = knob(1000, least=1)
    temperature: float = knob(1.0, above=0)
    top_p: float = knob(0.99, above=0, most=1)
    tokens: int = knob(256, least=1)
    system: str | None = None
    seed: int = knob(0, least=0)
    rows: int = knob(32, least=1)

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        check(self, "synthesize ")


@dataclass(frozen=True)
class Opening:
    """The text that a chat template puts before a user's message, and its token ids.

    It also has the text that comes first after the message.
    """

    text: str
    ids: list[int]
    stop: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> Self:
        """Find them by rendering a chat with a mark instead of the message.

        Raises:
            UserError: there is no chat template, or it puts nothing before a user's message or
                after it.
        """
        if not tokenizer.chat_template:
            raise UserError(
                "the target's tokenizer has no chat template, so it cannot make up questions: use --data"
            )
        chat: Messages = [
            *([] if system is None else [{"role": "system", "content": system}]),
            *question(MARK),
        ]
        with understood("the target's chat template refuses this chat"):
            whole = str(
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            )
        before, mark, behind = whole.partition(MARK)
        ids = list(tokenizer(before, add_special_tokens=False)["input_ids"])
        if not mark or not ids or not behind.strip():
            raise UserError(
                "the target's chat template does not put something before and behind a user's message: use --data"
            )
        special = [t for t in _special(tokenizer) if behind.strip().startswith(t)]
        return cls(before, ids, max(special, key=len, default=behind.strip()))


def synthesize(
    target: Target,
    how: Synthesis,
    out: Path,
    processes: Processes,
    tell: Tell = silent,
    author: Author | None = None,
    beside: Sequence[Path] = (),
    excluded: Excluded = Excluded(),
    skipped: Skipped | None = None,
) -> Path:
    """Write questions that the target makes up; go on where an interrupted run stopped.

    Every process of a run calls it. Dropped questions are reported in a line, and by reason in
    `questions.json`.

    Args:
        target: makes up the questions.
        how: the options.
        out: the folder of the files that are written.
        processes: of the run.
        tell: receives the number of questions that this process has written.
        author: generates the questions; by default the target itself.
        beside: data whose questions are not wanted again.
        excluded: prompts that must not be among the questions.
        skipped: counts rows of `beside` that cannot be read, and leaves them out; without it the
            first one is an error.

    Returns:
        The path of the rows `{"messages"}`, each a question with an empty response, which
        `regenerate` fills in.

    Raises:
        UserError: the target has no chat template, or hardly any of its questions is usable.
    """
    author = author or Local(target, how.rows)
    with processes.agreed():
        opening = Opening.of(target.tokenizer, how.system)
        known = sorted(set(map(normalised, questions(beside, skipped))))
    drawn = {k: v for k, v in asdict(how).items() if k not in ("count", "rows")}
    drawn |= {"target": target.name, "author": author.name, "opening": opening.text}
    about = drawn | {
        "count": how.count,
        "beside": digest(known),
        "excluded": digest(sorted(excluded.runs)),
    }
    finished = False
    with suppress(UserError):
        finished = (
            about.items() <= read_object(out / ABOUT, "of questions").items()
            and (out / FILE).is_file()
        )
    if not finished:
        home = out / PARTS / digest(drawn)
        kept, report = _filled(target, how, opening, home, processes, tell, author, known, excluded)
        told = ", ".join(f"{n:,} {reason}" for reason, n in report["dropped"].items())
        LOG.info(
            "%s made up %s questions, dropped: %s",
            target.name,
            f"{report['made_up']:,}",
            told or "none",
        )
        with processes.agreed():
            if processes.main:
                chats = ([*question(text), {"role": "assistant", "content": ""}] for text in kept)
                write_text(
                    out / FILE, "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
                )
                write_text(out / ABOUT, json.dumps(about | report, indent=1) + "\n")
    if processes.main:
        shutil.rmtree(out / PARTS, ignore_errors=True)
    return out / FILE


def _filled(
    target: Target,
    how: Synthesis,
    opening: Opening,
    home: Path,
    processes: Processes,
    tell: Tell,
    author: Author,
    known: Sequence[str],
    excluded: Excluded,
) -> tuple[list[str], dict[str, Any]]:
    """Sample questions until enough of them are kept.

    The result depends on the numbers of the samples alone, not on the order of their generation.
    """
    bound, mine = min(how.count, ENOUGH), home / f"{processes.rank}.jsonl"
    home.mkdir(parents=True, exist_ok=True)
    sampling = Sampling(how.temperature, top_p=how.top_p, seed=how.seed)
    announce(
        author,
        "questions",
        math.ceil(max(how.count - len(_done(home)), 0) / processes.world),
        how.tokens,
    )
    while True:
        done = _done(home)
        processes.same(len(done), "the questions written so far")
        missing = [i for i in range(bound) if i not in done][processes.rank :: processes.world]
        with processes.agreed():
            waiting = deque(
                Asked(i, opening.text, opening.ids, how.tokens, sampling, (opening.stop,))
                for i in missing
            )
            for count, each in enumerate(author.write(waiting), 1):
                line = {"number": each.asked.number, "text": each.text, "ended": each.ended}
                append(mine, "\n" + json.dumps(line))  # after a line that was broken off
                tell(count, "making up questions", len(missing))
        with processes.agreed():
            done = _done(home)
            if not done.keys() >= set(range(bound)):
                raise UserError(
                    f"'{home}' lacks what other processes wrote: all machines must see the same folder"
                )
            kept, dropped = judged(
                [done[i] for i in range(bound)], how.count, target.tokenizer, known, excluded
            )
            if author.probes and missing and processes.main:
                _probe(target, author, kept)
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


def _probe(target: Target, author: Author, texts: Sequence[str]) -> None:
    """Let an author answer some questions, by which it is judged before it makes up more."""
    chats = [question(text) for text in texts[: author.probes]]
    for _ in author.write(
        deque(Asked(i, chat, encode(target.tokenizer, chat), 64) for i, chat in enumerate(chats))
    ):
        pass


def judged(
    drawn: Sequence[Mapping[str, Any]],
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[str] = (),
    excluded: Excluded = Excluded(),
) -> tuple[list[str], Counter[str]]:
    """Return the first usable questions, and how many were dropped before the last of them.

    The dropped ones are counted by reason.

    Args:
        drawn: each with its `text`, and whether it `ended`.
        count: how many are wanted.
        tokenizer: the target's; a question holds none of its special tokens.
        known: normalised questions that are not wanted again.
        excluded: prompts that must not come.
    """
    kept = list[str]()
    dropped = Counter[str]()
    seen = set(known)
    special = _special(tokenizer)
    for each in drawn:
        if len(kept) == count:
            break
        text, words = each["text"].strip(), normalised(each["text"])
        again = "duplicates" if words in seen else "excluded" if excluded.holds(text) else ""
        if reason := flaw(text, each["ended"], special) or again:
            dropped[reason] += 1
        else:
            kept.append(text)
            seen.add(words)
    return kept, dropped


RUN, LEAST = 12, 24
"""Characters in a row that a text seldom repeats, and of the shortest text that is judged by that.
"""


def flaw(text: str, ended: bool, special: Sequence[str] = ()) -> str:
    """Return the reason why a text is no question; nothing for one that is."""
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


def _done(home: Path) -> dict[int, Mapping[str, Any]]:
    """Return the questions written so far by all processes; an incomplete line does not count."""
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
