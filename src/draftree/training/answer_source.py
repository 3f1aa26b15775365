"""Sources of training answers: the local target, or a server of the same model."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from typing_extensions import override

from draftree.data.prompts import Content
from draftree.drafters.pld import PLD
from draftree.engine import plain_stream
from draftree.evaluation.time_estimate import batched_seconds
from draftree.request import Request
from draftree.sampling.params import GREEDY, Sampling
from draftree.target.target import Target
from draftree.text.stop_strings import StopStrings, StopTexts
from draftree.training.base import LOG
from draftree.utils.progress_callback import SILENT_SECONDS, duration

CHECKED_TOKENS = 64
"""Largest number of tokens of an answer that an author writes only to be checked."""


@dataclass(frozen=True)
class PendingPrompt:
    """Store a prompt that waits for its text.

    Attributes:
        number: number of the prompt, which with the seed of the sampling determines the random
            numbers.
        content: messages of a chat to answer, or text to continue.
        ids: token ids of the content.
        most: largest number of tokens in the text.
        sampling: sampling settings.
        stops: texts and special tokens that end the text, in addition to the target's end tokens;
            they are not part of the text.
    """

    number: int
    content: Content
    ids: list[int]
    most: int
    sampling: Sampling = GREEDY
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class GeneratedText:
    """Store the text for a prompt; `ended` is false if it was cut at its largest length."""

    asked: PendingPrompt
    text: str
    ended: bool


def log_estimate(author: "Author", what: str, texts: int, tokens: int) -> None:
    """Log an estimate of the time that an author takes for texts, if it is long.

    Args:
        author: author of the texts.
        what: name of the texts in the message.
        texts: number of texts.
        tokens: largest number of tokens in each text.
    """
    seconds = author.seconds(texts, tokens)
    if seconds is not None and seconds >= SILENT_SECONDS:
        LOG.info(
            "%s %s of at most %s tokens: at most about %s",
            f"{texts:,}",
            what,
            f"{tokens:,}",
            duration(seconds),
        )


class Author(ABC):
    """Define an author: an object that generates texts for prompts.

    Attributes:
        name: name that distinguishes the texts of different authors; empty for the local target.
    """

    name: str = ""

    @property
    def probes(self) -> int:
        """Return the number of greedy answers that are checked before this author is trusted.

        It is 0 once the author is trusted.
        """
        return 0

    def seconds(self, texts: int, tokens: int) -> float | None:
        """Return an upper estimate of the seconds for generating texts; None if it is unknown.

        Args:
            texts: number of texts.
            tokens: largest number of tokens of a text.
        """
        return None

    @abstractmethod
    def write(self, waiting: deque[PendingPrompt]) -> Iterator[GeneratedText]:
        """Take prompts from the left of a queue, and yield each text as soon as it is finished.

        Args:
            waiting: queue of prompts; the caller may add prompts between two texts.

        Raises:
            UserError: texts cannot be generated.
        """


def check_author(author: Author, prompts: Iterable[PendingPrompt]) -> None:
    """Let an author answer some prompts greedily, so that it is checked before it generates more.

    Raises:
        UserError: its answers differ from the target's.
    """
    asked = deque(
        replace(each, most=min(each.most, CHECKED_TOKENS), sampling=GREEDY)
        for each in islice(prompts, author.probes)
    )
    for _ in author.write(asked):
        pass


class Local(Author):
    """Generate texts with the local target.

    Args:
        target: target that generates the texts.
        rows: number of texts that are generated at the same time.
    """

    def __init__(self, target: Target, rows: int) -> None:
        self._target, self._rows = target, rows

    @override
    def seconds(self, texts: int, tokens: int) -> float:
        return (
            batched_seconds(self._target, PLD().open(self._target), texts, tokens, self._rows)
            if texts
            else 0.0
        )

    @override
    def write(self, waiting: deque[PendingPrompt]) -> Iterator[GeneratedText]:
        tokenizer, writing = self._target.tokenizer, dict[int, tuple[PendingPrompt, StopStrings]]()

        def requests() -> Iterator[Request | None]:
            while True:
                if not waiting:
                    yield None
                    continue
                asked = waiting.popleft()
                stops = StopStrings.of(tokenizer, asked.stops)
                writing[asked.number] = asked, stops
                request = Request(
                    asked.ids, asked.most, self._target.eos | stops.ids.keys(), asked.number
                )
                criteria = (StopTexts(tokenizer, stops, len(asked.ids)),) if stops.texts else ()
                yield replace(request, sampling=asked.sampling, criteria=criteria)

        for request, tokens in plain_stream(self._target, requests(), self._rows):
            asked, stops = writing.pop(request.number)
            text = str(tokenizer.decode([t for t in tokens if t not in request.eos]))
            found = stops.find(text)
            yield GeneratedText(
                asked,
                text if found is None else text[: found[0]],
                found is not None or tokens[-1] in request.eos,
            )
