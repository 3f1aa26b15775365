"""Sources of training answers: the local target, or a server of the same model."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from typing_extensions import override

from draftree.data.prompts import Content
from draftree.drafters.pld import PLD
from draftree.engine import plain_stream
from draftree.evaluation.time_estimate import written_seconds
from draftree.request import Request
from draftree.sampling.params import GREEDY, Sampling
from draftree.target.target import Target
from draftree.text.stop_strings import Stops, StopTexts
from draftree.training.base import LOG
from draftree.utils.progress import PATIENCE, duration


@dataclass(frozen=True)
class Asked:
    """A prompt that waits for its text.

    Attributes:
        number: the number of the prompt; with the sampling's seed it determines the random numbers.
        content: a chat to be answered, or text to be continued.
        ids: the content as token ids.
        most: the maximum number of tokens of the text.
        sampling: how tokens are chosen.
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
class Written:
    """The text that was written for a prompt, and whether it came to its end."""

    asked: Asked
    text: str
    ended: bool


def announce(author: "Author", what: str, texts: int, tokens: int) -> None:
    """Log how long an author takes for texts, where that is long.

    Args:
        author: writes them.
        what: they are.
        texts: how many.
        tokens: of each, at most.
    """
    seconds = author.seconds(texts, tokens)
    if seconds is not None and seconds >= PATIENCE:
        LOG.info(
            "%s %s of at most %s tokens: at most about %s",
            f"{texts:,}",
            what,
            f"{tokens:,}",
            duration(seconds),
        )


class Author(ABC):
    """Writes texts for prompts.

    Attributes:
        name: by which texts of one author are told from those of another; the target itself has
            none.
    """

    name: str = ""

    @property
    def probes(self) -> int:
        """Return the number of greedy answers to check before this author is trusted.

        It is 0 once the author is trusted.
        """
        return 0

    def seconds(self, texts: int, tokens: int) -> float | None:
        """Return the most seconds that texts of these tokens take; None where it is not known."""
        return None

    @abstractmethod
    def write(self, waiting: deque[Asked]) -> Iterator[Written]:
        """Take prompts from the left of a queue, and give each with its text as soon as that ends.

        Args:
            waiting: may be added to between two texts.

        Raises:
            UserError: nothing can be written.
        """


class Local(Author):
    """The local target.

    Args:
        target: writes.
        rows: how many texts at a time.
    """

    def __init__(self, target: Target, rows: int) -> None:
        self._target, self._rows = target, rows

    @override
    def seconds(self, texts: int, tokens: int) -> float:
        return (
            written_seconds(self._target, PLD().open(self._target), texts, tokens, self._rows)
            if texts
            else 0.0
        )

    @override
    def write(self, waiting: deque[Asked]) -> Iterator[Written]:
        tokenizer, writing = self._target.tokenizer, dict[int, tuple[Asked, Stops]]()

        def requests() -> Iterator[Request | None]:
            while True:
                if not waiting:
                    yield None
                    continue
                asked = waiting.popleft()
                stops = Stops.of(tokenizer, asked.stops)
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
            yield Written(
                asked,
                text if found is None else text[: found[0]],
                found is not None or tokens[-1] in request.eos,
            )
