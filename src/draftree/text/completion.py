"""Generate text from text: completions, chats and streams, also for asyncio.

Every call goes through the engine's lock step by step, so that any number of threads and tasks may
share an engine; their texts are then written in turns.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from math import isfinite
from typing import Any, ClassVar, TypeVar, final

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from draftree.aliases import RESULT, TOKEN
from draftree.batch import EngineMethods
from draftree.data.prompts import Prompt, Prompts, ids_of, prompts_of
from draftree.errors import HintingText, UserError, format_value
from draftree.metrics import Stats
from draftree.request import Emitted, Ending, Logprob, Origin
from draftree.text.options import Options
from draftree.text.stop_strings import StopStrings, TextPieces

T = TypeVar("T")
MARKS: dict[Origin, str] = {
    "drafted": "background: rgba(46, 160, 67, 0.25); border-radius: 2px",
    "forced": "background: rgba(187, 128, 9, 0.3); border-radius: 2px",
}
"""CSS styles of text in a notebook by origin; readable on light and dark pages."""
ORIGIN_NAMES: dict[Origin, str] = {
    "drafted": "drafted and accepted",
    "forced": "the only token allowed",
}


def figures(stats: Stats) -> str:
    """Return the two main figures of a run as text: tokens per second, and tokens per pass (τ)."""
    return (
        f"{stats.tokens_per_second:.1f} tokens/s, {stats.acceptance_length:.2f} tokens per pass (τ)"
    )


@dataclass(frozen=True)
class Token(HintingText):
    """Store a token of a stream.

    Attributes:
        id: the token id.
        text: the text that this token adds to the response. It is empty while a character is
            incomplete or a stop text may have begun; a later token then adds the delayed text.
        origin: the source of the token: the prefill, an accepted draft, the only token that a
            grammar allowed (`forced`), or a choice of the target.
        logprob: its log-probabilities, if requested.
        ending: the reason if the text ends with this token.
    """

    kind_of_name: ClassVar[str] = TOKEN

    id: int
    text: str
    origin: Origin
    logprob: Logprob | None = None
    ending: Ending | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text


@dataclass(frozen=True, repr=False)
class Completion(HintingText):
    """Store a finished text.

    `str` returns the text. A notebook shows it coloured by origin, with the speed.

    Attributes:
        text: the response, without special tokens and without the stop text that ended it.
        tokens: all generated ids, including an EOS and the ids of a stop text.
        origins: the origin of each token.
        logprobs: the log-probabilities of each token, if requested.
        ending: the reason for its end; a `max_time` counts as `stop`.
        stop: the stop text that ended it.
        stats: figures of the run, over all texts that were generated together.
        pieces: the text that each token added.
        prompt_ids: the ids of the prompt.
        prompt: the text of the prompt; for a chat, as rendered by the template.
        separator: a space if the tokenizer drops the one with which the response begins.
    """

    kind_of_name: ClassVar[str] = RESULT
    no_items: ClassVar[str] = "a Completion is one text: completion.text[…] is a part of it"

    text: str
    tokens: list[int]
    origins: list[Origin]
    logprobs: list[Logprob]
    ending: Ending
    stop: str | None
    stats: Stats
    pieces: list[str] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    prompt: str = ""
    separator: str = ""

    @property
    def full_text(self) -> str:
        """Return prompt and response as one text."""
        return self.prompt + self.separator + self.text

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __repr__(self) -> str:
        """Return the shortened text and the main figures."""
        told = f"{len(self.tokens)} tokens, ending={self.ending!r}, {figures(self.stats)}"
        return f"Completion({format_value(self.text)}, {told})"

    def _repr_html_(self) -> str:
        """Return the text as HTML for a notebook, coloured by origin, and the speed."""
        pieces = (
            [*self.pieces, self.text[sum(map(len, self.pieces)) :]] if self.pieces else [self.text]
        )
        styles = [*(MARKS.get(origin) for origin in self.origins), None]
        spans = []
        for style, run in groupby(zip(pieces, styles, strict=False), lambda piece: piece[1]):
            text = escape("".join(piece for piece, _ in run))
            spans.append(text if style is None else f'<span style="{style}">{text}</span>')
        marks = [
            f'<span style="{MARKS[origin]}">{ORIGIN_NAMES[origin]}</span>'
            for origin in ORIGIN_NAMES
            if origin in self.origins
        ]
        legend = " · ".join([*marks, "chosen by the target", figures(self.stats)])
        return (
            f'<div class="tex2jax_ignore mathjax_ignore"><div style="white-space: pre-wrap">{"".join(spans)}</div>'
            f'<div style="margin-top: 0.6em; font-size: 85%; opacity: 0.75">{legend}</div></div>'
        )

    def logprobs_as_json(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """Return the log-probabilities under the names that the command line uses.

        The log-probability of an impossible token is None.
        """

        def one(token: int, logprob: float) -> dict[str, Any]:
            text = str(tokenizer.decode([token]))
            return {"id": token, "text": text, "logprob": logprob if isfinite(logprob) else None}

        return [
            one(found.token, found.logprob) | {"top": [one(*best) for best in found.top]}
            for found in self.logprobs
        ]


def whole_text(written: Any, echo: bool, stop: bool) -> Any:
    """Return completions with the prompt or the stop text added to the text, if requested."""
    if not echo and not stop:
        return written
    if isinstance(written, list):
        return [whole_text(one, echo, stop) for one in written]
    text = (written.full_text if echo else written.text) + (written.stop or "") * stop
    return replace(written, text=text, pieces=[])


@final
class Reading:
    """Convert the steps of a call for one sequence to tokens with their text.

    Args:
        tokenizer: the target's tokenizer; without one, tokens have no text.
        stops: the texts that end the response.
        prompt: the number of ids before the response.

    Attributes:
        tokens: the tokens so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stops: StopStrings,
        prompt: Sequence[int] = (),
    ) -> None:
        self._pieces = None if tokenizer is None else TextPieces(tokenizer, stops)
        self._tokenizer, self._prompt = tokenizer, prompt
        self.tokens: list[Token] = []

    @property
    def stop(self) -> str | None:
        """Return the stop text that has ended the response; None for another end, or none yet."""
        return None if self._pieces is None else self._pieces.stop

    def __call__(self, events: Sequence[Emitted]) -> list[Token]:
        """Return the tokens of a step, with their text."""
        new = []
        for event in events:
            last = len(event.tokens) - 1
            for i, (token, origin) in enumerate(zip(event.tokens, event.origins, strict=True)):
                ending = event.ending if i == last else None
                piece = "" if self._pieces is None else self._pieces.add(token)
                if self._pieces is not None and ending is not None:
                    piece += self._pieces.rest()
                new.append(
                    Token(
                        token, piece, origin, event.logprobs[i] if event.logprobs else None, ending
                    )
                )
        self.tokens += new
        return new

    def completion(self, stats: Stats) -> Completion:
        """Return the completion after the last token.

        An unfinished text ends by `length`.
        """
        ending: Ending = next((t.ending for t in self.tokens if t.ending is not None), "length")
        rest = "" if self._pieces is None else self._pieces.rest()
        return Completion(
            "".join(t.text for t in self.tokens) + rest,
            [t.id for t in self.tokens],
            [t.origin for t in self.tokens],
            [t.logprob for t in self.tokens if t.logprob is not None],
            ending,
            self.stop if ending == "stop" else None,
            stats,
            [t.text for t in self.tokens],
            [*self._prompt],
            "" if self._tokenizer is None else self._decode([*self._prompt]),
            self.separator,
        )

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def separator(self) -> str:
        """Return the space that the response has only after the prompt, or an empty text."""
        if self._tokenizer is None or not self.tokens:
            return ""
        before, first = [*self._prompt[-4:]], [self.tokens[0].id]
        spaced = f"{self._decode(before)} {self._decode(first)}"
        return " " if self._decode(before + first) == spaced else ""


@final
class Writing:
    """Generate one text, or a batch of texts, step by step.

    Args:
        engine: generates the text.
        prompt: the prompt or a list of prompts.
        options: the options of the completion.
        alone: whether only one text is allowed.

    Raises:
        UserError: the request is not supported.
    """

    def __init__(
        self, engine: EngineMethods, prompt: Prompt | Prompts, options: Options, alone: bool = False
    ) -> None:
        batch = prompts_of(prompt)
        if alone and batch is not None:
            raise UserError(
                f"there is a list of {len(batch)} prompts, allowed is one: `complete` takes several"
            )
        if alone and options.n > 1:
            raise UserError(
                f"n is {options.n}, allowed is 1 here: a stream or a conversation has one text"
            )
        tokenizer = engine.tokenizer
        self._batch = batch is not None
        self._each = options.n
        ids = (
            [ids_of(tokenizer, prompt)] if batch is None else [ids_of(tokenizer, p) for p in batch]
        )
        # A request's number decides its noise: one seed has one text, and the texts of one prompt
        # differ.
        requests = [
            options.request(engine.target, row, number)
            for row in ids
            for number in range(options.n)
        ]
        self._first = requests[0].prompt
        self._readings = [
            Reading(tokenizer, options.stops(tokenizer), request.prompt) for request in requests
        ]
        self._rows, steps = engine.begin(requests)
        self._steps = engine.time_steps(steps, self._rows)

    def step(self) -> list[Token] | None:
        """Return the next tokens, or None at the end."""
        if (events := next(self._steps, None)) is None:
            return None
        return [token for event in events for token in self._readings[event.row]([event])]

    def tokens(self) -> Iterator[Token]:
        """Yield all tokens; closing the iterator early ends the generation."""
        with closing(self):
            while (new := self.step()) is not None:
                yield from new

    def finish(self, streamer: BaseStreamer | None = None) -> Any:
        """Generate the rest, and return `result`.

        A streamer of transformers receives the prompt, each token and the end.

        Raises:
            UserError: the argument is not a streamer.
        """
        if streamer is None:
            while self.step() is not None:
                pass
            return self.result
        if not isinstance(streamer, BaseStreamer):
            raise UserError(
                f"streamer is {format_value(streamer)}, allowed is one of transformers' streamers, or None"
            )
        streamer.put(torch.tensor([self._first]))
        for token in self.tokens():
            streamer.put(torch.tensor([token.id]))
        streamer.end()
        return self.result

    @property
    def result(self) -> Any:
        """Return the completion so far.

        For `n` above 1 it is a list of n completions. For a list of prompts it is a list with the
        result of each.
        """
        completions = [reading.completion(self._rows.stats) for reading in self._readings]
        each = [completions[i : i + self._each] for i in range(0, len(completions), self._each)]
        of_prompts = [found if self._each > 1 else found[0] for found in each]
        return of_prompts if self._batch else of_prompts[0]

    def close(self) -> None:
        """Stop the generation; a later call with the same beginning can reuse the caches."""
        self._steps.close()


async def complete(
    engine: EngineMethods, prompt: Prompt | Prompts, options: Options, alone: bool = False
) -> Any:
    """Return a completion; each step runs in a worker thread.

    If the task is cancelled, generation stops after the current step.
    """
    writing = await in_thread(lambda: Writing(engine, prompt, options, alone))
    with closing(writing):
        while await in_thread(writing.step) is not None:
            pass
    return writing.result


async def stream(
    engine: EngineMethods, prompt: Prompt, options: Options
) -> AsyncGenerator[Token, None]:
    """Yield the tokens of a text, each step in a worker thread."""
    writing = await in_thread(lambda: Writing(engine, prompt, options, alone=True))
    with closing(writing):
        while (new := await in_thread(writing.step)) is not None:
            for token in new:
                yield token


async def in_thread(work: Callable[[], T]) -> T:
    """Run a function in a worker thread.

    If the task is cancelled meanwhile, it first waits for the function, because a step cannot be
    interrupted.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(
                asyncio.CancelledError
            ):  # cancelled again, it is as good as cancelled once
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved
        raise
