"""The handle of a submitted request: its state, its output and its figures."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, final

from draftree.metrics import Stats, Step
from draftree.models.kv_cache import SlotCache
from draftree.request import Emitted, Request
from draftree.target.target import HiddenStates
from draftree.text.completion import Completion, Reading, Token

MAX_REMAINING_TOKENS = 16
"""Largest number of prompt tokens that may be left for the step in which a prompt that was read in
several chunks joins the batch."""
Status = Literal["waiting", "reading", "running", "finished", "cancelled", "failed"]
"""Status of a request. In the status `reading`, its prompt is being read."""


@dataclass(frozen=True)
class RequestStats:
    """Store the figures of one request, until now or until its end.

    Attributes:
        prompt_tokens: number of tokens in the prompt.
        tokens: number of generated tokens.
        steps: number of steps that verified a tree of the request. The first token needs no such
            step.
        drafted: number of drafted nodes that the target verified.
        accepted: number of drafted nodes that were accepted.
        preemptions: number of times that the request lost its slot to others and was read again
            later.
        waited: seconds from the submission to the first reading of its prompt; None before that.
        first_token: seconds from the submission to the first token; None before that.
        seconds: seconds from the submission to the end, or until now.
        cached_tokens: number of prompt tokens that were taken from the prefix cache.
    """

    prompt_tokens: int
    tokens: int
    steps: int
    drafted: int
    accepted: int
    preemptions: int
    waited: float | None
    first_token: float | None
    seconds: float
    cached_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Return the acceptance length τ = (accepted + steps) / steps; plain decoding has 1."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0


@dataclass
class PartialPrompt:
    """Store the part of a prompt that has been read.

    Attributes:
        cache: cache of one sequence with the tokens that have been read; None if they are in the
            batch's cache.
        hidden_states: hidden states that the drafter needs, one entry for each chunk.
        read: number of tokens that have been read.
        row: slot of the batch in which the prompt is read; −1 for none.
    """

    cache: SlotCache | None = None
    hidden_states: list[HiddenStates] = field(default_factory=list)
    read: int = 0
    row: int = -1

    @property
    def rest(self) -> float:
        """Return the largest number of unread tokens with which the prompt may join the batch.

        The step in which it joins reads these tokens, and copies the cache of the tokens that were
        read before. If the prompt was read in several chunks, the number is `MAX_REMAINING_TOKENS`,
        so that this step takes no longer than other steps. Otherwise it is infinite.
        """
        return MAX_REMAINING_TOKENS if len(self.hidden_states) > 1 else math.inf


@dataclass(eq=False)
class Entry:
    """Store the scheduler's state of a request.

    Attributes:
        id: number of the request, in the order of submission.
        submitted: the request as it was submitted.
        reading: function that turns the request's tokens into text.
        figures: acceptor, kind of draws and largest depth of the engine, and whether its acceptor is
            lossy.
        request: the request that is still to be run. After a preemption, its prompt includes the
            tokens generated so far.
        status: current status of the request.
        cancelled: whether the request will be cancelled in the next step.
        suspect: whether a step with this request has failed, so that it has to run alone.
        row: slot of the request in the batch; −1 for none.
        prompt: the part of its prompt that has been read.
        error: exception that was raised by an operation on this request alone; None otherwise.
        written: generated tokens.
        steps: numbers of drafted and accepted nodes of each step that verified a tree of the
            request.
        preemptions: number of preemptions.
        cached: number of prompt tokens that were taken from the prefix cache.
        moments: times by `time.perf_counter` at which the request was `submitted`, `begun` (its
            prompt was first read), `first` (its first token was generated) and `ended`.
    """

    id: int
    submitted: Request
    reading: Reading
    figures: Stats
    request: Request
    status: Status = "waiting"
    cancelled: bool = False
    suspect: bool = False
    row: int = -1
    prompt: PartialPrompt = field(default_factory=PartialPrompt)
    error: BaseException | None = None
    written: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0
    moments: dict[str, float] = field(default_factory=lambda: {"submitted": time.perf_counter()})

    @property
    def has_ended(self) -> bool:
        """Return whether the request has finished, was cancelled or has failed."""
        return self.status in ("finished", "cancelled", "failed")

    @property
    def num_read(self) -> int:
        """Return the number of prompt tokens that have been read in chunks."""
        return self.prompt.read

    def forget_prompt(self) -> None:
        """Drop the part of the prompt that was read: the batch has it, or it is not needed."""
        self.prompt = PartialPrompt()

    def mark(self, moment: str) -> None:
        """Record the current time for a moment, unless the moment has a time already."""
        self.moments.setdefault(moment, time.perf_counter())

    def end(self, status: Status) -> None:
        """Set the final status, and free the slot and the prompt."""
        self.mark("ended")
        self.row, self.status = -1, status
        self.forget_prompt()

    def wait_again(self) -> None:
        """Return to the queue after a preemption; generated tokens become part of the prompt."""
        new, first = self.written, self.submitted
        self.request = replace(
            first, prompt=(*first.prompt, *new), max_new_tokens=first.max_new_tokens - len(new)
        )
        self.row, self.status = -1, "waiting"
        self.forget_prompt()

    def take(self, event: Emitted) -> list[Token]:
        """Record the tokens and figures of a step, and return the tokens with their text."""
        if event.step is not None:
            self.steps.append(event.step)
        elif self.written:  # read again: the drafter took no part, as at any bonus token
            event = replace(event, origins=["bonus"])
        self.mark("first")
        self.written += event.tokens
        return self.reading([event])


@dataclass(frozen=True)
class Update:
    """Store the result of a step for one request.

    Attributes:
        handle: handle of the request.
        tokens: new tokens with their text.
        emitted: the decoding loop's record of the same tokens, with the verified tree of the whole
            batch. The nodes of this request are `emitted.tree.of_row(emitted.row)`. It is None if
            the request was cancelled or has failed.
    """

    handle: "Handle"
    tokens: list[Token]
    emitted: Emitted | None = None


@final
class Handle:
    """Give access to a submitted request: its tokens, status and figures.

    `tokens` and `result` run the engine's steps themselves while the request is unfinished, so that
    a script needs no loop of its own. If a worker thread calls `Engine.step`, use `poll`, which
    never runs a step.

    Args:
        entry: the scheduler's state of the request.
        step: function that runs one step of the scheduler.
    """

    def __init__(self, entry: Entry, step: Callable[[], object]) -> None:
        self.entry = entry
        self._step = step
        self._polled = 0

    def __repr__(self) -> str:
        """Return a text with the request's number, status and number of generated tokens."""
        return f"Handle({self.id}, {self.status}, {len(self.entry.written)} tokens)"

    @property
    def id(self) -> int:
        """Return the number of the request, in the order of submission."""
        return self.entry.id

    @property
    def request(self) -> Request:
        """Return the request, as it was submitted."""
        return self.entry.submitted

    @property
    def status(self) -> Status:
        """Return the status of the request."""
        return self.entry.status

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens that were taken from the prefix cache."""
        return self.entry.cached

    @property
    def finished(self) -> bool:
        """Return whether the request has ended: finished, cancelled or failed."""
        return self.entry.has_ended

    @property
    def error(self) -> BaseException | None:
        """Return the exception that made the request fail; None otherwise."""
        return self.entry.error

    @property
    def stop(self) -> str | None:
        """Return the stop text that has ended the response; None for another end, or none yet."""
        return self.entry.reading.stop

    @property
    def separator(self) -> str:
        """Return the space that the response has only after the prompt, or an empty text."""
        return self.entry.reading.separator

    def poll(self) -> list[Token]:
        """Return the tokens that are new since the last call, without waiting.

        Only one reader may call this method.
        """
        known = self.entry.reading.tokens
        end = len(known)
        new = known[self._polled : end]
        self._polled = end
        return new

    def tokens(self) -> Iterator[Token]:
        """Yield each token as it is generated, until the request has ended.

        Raises:
            Exception: the exception that made the request fail.
        """
        finished = False
        while not finished:
            finished = self.finished
            yield from self.poll()
            if not finished:
                self._step()
        if self.error is not None:
            raise self.error

    def result(self) -> Completion:
        """Wait for the end of the request, and return its text.

        The text of a cancelled request is incomplete.

        Raises:
            Exception: the exception that made the request fail.
        """
        while not self.finished:
            self._step()
        if self.error is not None:
            raise self.error
        entry = self.entry
        stats = replace(
            entry.figures,
            new_tokens=len(entry.written),
            steps=list(entry.steps),
            seconds=self.stats.seconds,
            lossy=entry.figures.lossy and bool(entry.steps),
        )
        return entry.reading.completion(stats)

    @property
    def stats(self) -> RequestStats:
        """Return the figures of the request until now, or until its end."""
        entry, start = self.entry, self.entry.moments["submitted"]
        at = {moment: time - start for moment, time in entry.moments.items()}
        steps = list(entry.steps)
        return RequestStats(
            prompt_tokens=len(entry.submitted.prompt),
            tokens=len(entry.written),
            steps=len(steps),
            drafted=sum(step.nodes for step in steps),
            accepted=sum(step.accepted for step in steps),
            preemptions=entry.preemptions,
            waited=at.get("begun"),
            first_token=at.get("first"),
            seconds=at.get("ended", time.perf_counter() - start),
            cached_tokens=entry.cached,
        )
