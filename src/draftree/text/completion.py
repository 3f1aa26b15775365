"""Text in, text out: completions, chats, streams of tokens with their text, and the same for asyncio.

Every call goes through the engine's lock step by step, so that any number of threads and tasks may share an engine; their
texts are then written in turns.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar, final

from transformers import PreTrainedTokenizerBase

from draftree.data.prompts import Prompt, Prompts, ids_of, prompts_of
from draftree.errors import UserError
from draftree.request import Emitted, Ending, Logprob, Origin
from draftree.rows import Writer
from draftree.stats import Stats
from draftree.text.options import Options
from draftree.text.stops import Pieces, Stops

T = TypeVar("T")


@dataclass(frozen=True)
class Token:
    """A token of a stream.

    Attributes:
        id: the token.
        text: what the response's text gains now that it has come: nothing while a character is incomplete or a stop text may
            have begun, and then more than the token's own.
        origin: how it came: from the prefill, drafted and accepted, or chosen by the target.
        logprob: how likely it was, where that was asked for.
        ending: why the text ends with it, if it does.
    """

    id: int
    text: str
    origin: Origin
    logprob: Logprob | None = None
    ending: Ending | None = None


@dataclass(frozen=True)
class Completion:
    """A finished text.

    Attributes:
        text: the response, without special tokens and without the stop text that ended it.
        tokens: all ids that were written, an EOS and those of a stop text among them.
        origins: how each of them came.
        logprobs: how likely each was, where that was asked for.
        ending: why it ended; a `max_time` counts as `stop`.
        stop: the stop text that ended it.
        stats: the run's figures, of all texts that were written together.
    """

    text: str
    tokens: list[int]
    origins: list[Origin]
    logprobs: list[Logprob]
    ending: Ending
    stop: str | None
    stats: Stats

    def logprobs_as_json(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """The log-probabilities by the names of the command line; None for a token that cannot come."""

        def one(token: int, logprob: float) -> dict[str, Any]:
            text = str(tokenizer.decode([token]))
            return {"id": token, "text": text, "logprob": logprob if isfinite(logprob) else None}

        return [one(found.token, found.logprob) | {"top": [one(*best) for best in found.top]} for found in self.logprobs]


@final
class Reading:
    """Turns the steps of a call for one row into tokens with their text.

    Args:
        tokenizer: the target's.
        stops: what ends the response.

    Attributes:
        tokens: those so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Stops) -> None:
        self._pieces = Pieces(tokenizer, stops)
        self.tokens: list[Token] = []

    def __call__(self, events: Sequence[Emitted]) -> list[Token]:
        """The tokens of a step."""
        new = []
        for event in events:
            last = len(event.tokens) - 1
            for i, (token, origin) in enumerate(zip(event.tokens, event.origins, strict=True)):
                piece, ending = self._pieces.add(token), event.ending if i == last else None
                if ending is not None:
                    piece += self._pieces.rest()
                new.append(Token(token, piece, origin, event.logprobs[i] if event.logprobs else None, ending))
        self.tokens += new
        return new

    def completion(self, stats: Stats) -> Completion:
        """The completion, when nothing more comes; a text that was left unfinished counts as cut by its length."""
        ending: Ending = next((t.ending for t in self.tokens if t.ending is not None), "length")
        return Completion(
            "".join(t.text for t in self.tokens) + self._pieces.rest(),
            [t.id for t in self.tokens],
            [t.origin for t in self.tokens],
            [t.logprob for t in self.tokens if t.logprob is not None],
            ending,
            self._pieces.stop if ending == "stop" else None,
            stats,
        )


@final
class Writing:
    """One text, or a batch of them, in the middle of being written.

    Args:
        engine: writes it.
        prompt: what to continue or to answer, or a list of such.
        options: what is asked.
        alone: whether there must be one text only.

    Raises:
        UserError: the request cannot be served.
    """

    def __init__(self, engine: Writer, prompt: Prompt | Prompts, options: Options, alone: bool = False) -> None:
        batch = prompts_of(prompt)
        if alone and batch is not None:
            raise UserError(f"there is a list of {len(batch)} prompts, allowed is one: `complete` takes several")
        tokenizer, self._batch = engine.tokenizer, batch is not None
        ids = [ids_of(tokenizer, prompt)] if batch is None else [ids_of(tokenizer, p) for p in batch]
        requests = [options.request(engine.target, row) for row in ids]  # of one number: one seed has one text
        self._readings = [Reading(tokenizer, options.stops(tokenizer)) for _ in requests]
        self._rows, steps = engine.begin(requests)
        self._steps = engine.timed(steps, self._rows)

    def step(self) -> list[Token] | None:
        """The next tokens; None when there are no more."""
        if (events := next(self._steps, None)) is None:
            return None
        return [token for event in events for token in self._readings[event.row]([event])]

    def tokens(self) -> Iterator[Token]:
        """All tokens; whoever closes it early ends the writing."""
        with closing(self):
            while (new := self.step()) is not None:
                yield from new

    def finish(self) -> Any:
        """Writes the rest and returns `result`."""
        while self.step() is not None:
            pass
        return self.result

    @property
    def result(self) -> Completion | list[Completion]:
        """The completion so far: of a list of prompts a list."""
        completions = [reading.completion(self._rows.stats) for reading in self._readings]
        return completions if self._batch else completions[0]

    def close(self) -> None:
        """Ends the writing; the caches keep the text for a later call that begins with it."""
        self._steps.close()


async def complete(engine: Writer, prompt: Prompt | Prompts, options: Options) -> Any:
    """A completion, each step in a worker thread; a task that is cancelled ends the writing after the step at hand."""
    writing = await in_thread(lambda: Writing(engine, prompt, options))
    with closing(writing):
        while await in_thread(writing.step) is not None:
            pass
    return writing.result


async def stream(engine: Writer, prompt: Prompt, options: Options) -> AsyncGenerator[Token, None]:
    """The tokens of a text, each step in a worker thread."""
    writing = await in_thread(lambda: Writing(engine, prompt, options, alone=True))
    with closing(writing):
        while (new := await in_thread(writing.step)) is not None:
            for token in new:
                yield token


async def in_thread(work: Callable[[], T]) -> T:
    """Runs work in a worker thread; a task that is cancelled meanwhile waits for it, as a step cannot be broken off."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # cancelled again, it is as good as cancelled once
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody asks for it any more
        raise
