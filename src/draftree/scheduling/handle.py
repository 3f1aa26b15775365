"""The handle of a submitted request: its state, its output and its figures."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, final

from draftree.metrics import Stats, Step
from draftree.models.kv_cache import SlotCache
from draftree.request import Emitted, Request
from draftree.target.target import Taps
from draftree.text.completion import Completion, Reading, Token

FEW = 16
"""Tokens of a prompt, read in several chunks, that are left for the step in which it joins the
batch."""
Status = Literal["waiting", "reading", "running", "finished", "cancelled", "failed"]
"""The status of a request; `reading` means that a part of its prompt has been read."""


@dataclass(frozen=True)
class RequestStats:
    """The figures of one request, until now or until its end.

    Attributes:
        prompt_tokens: tokens of the prompt.
        tokens: tokens generated.
        steps: verifications that it took part in; the token after the prompt takes none.
        drafted: drafted nodes that the target verified.
        accepted: those of them that were accepted.
        preemptions: how often it made room for others and was read again later.
        waited: seconds from the submission until its prompt was first read from; None before.
        first_token: seconds from the submission to the first token; None before.
        seconds: seconds from the submission to the end, or until now.
        cached_tokens: tokens of the prompt that were read with an earlier request's.
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
        """Return τ = (accepted + steps) / steps; 1.00 is plain decoding."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0


@dataclass
class PartialPrompt:
    """What has been read of a prompt.

    Attributes:
        cache: a cache of one sequence with the tokens read; None where the batch holds them.
        taps: the hidden states that the drafter needs.
        read: the number of tokens read.
        row: the slot of the batch in which it is read; −1 for none.
    """

    cache: SlotCache | None = None
    taps: list[Taps] = field(default_factory=list)
    read: int = 0
    row: int = -1

    @property
    def rest(self) -> float:
        """Return how many tokens may be read in the step that joins its cache to the batch.

        Joining copies what was read. A long prompt has few tokens left for that step, so that it
        takes no longer than others.
        """
        return FEW if len(self.taps) > 1 else math.inf


@dataclass(eq=False)
class Entry:
    """What the scheduler knows of a request.

    Attributes:
        id: its number, in the order of submission.
        submitted: the request.
        reading: turns its tokens into text.
        request: what is left of it: after a preemption its prompt ends with what was written.
        status: the status of the request.
        cancelled: whether it is to be cancelled.
        suspect: whether a step with it has failed, so that it has to run alone.
        row: its place in the batch; −1 where it has none.
        prompt: what has been read of its prompt.
        error: what a step raised that it took part in alone.
        written: its tokens.
        steps: its verifications.
        preemptions: how often it was preempted.
        cached: tokens of its prompt that were read with another's.
        moments: when it was submitted, begun, first written and ended, by `time.perf_counter`.
    """

    id: int
    submitted: Request
    reading: Reading
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
    def ended(self) -> bool:
        """Return whether nothing more comes."""
        return self.status in ("finished", "cancelled", "failed")

    @property
    def read(self) -> int:
        """Return the number of tokens that have been read of a prompt that is read in chunks."""
        return self.prompt.read

    def forget_prompt(self) -> None:
        """Let what has been read of its prompt go: the batch has it, or nobody needs it."""
        self.prompt = PartialPrompt()

    def mark(self, moment: str) -> None:
        """Note the time of a moment, unless it has been before."""
        self.moments.setdefault(moment, time.perf_counter())

    def end(self, status: Status) -> None:
        """Note that nothing more comes."""
        self.mark("ended")
        self.row, self.status = -1, status
        self.forget_prompt()

    def wait_again(self) -> None:
        """Note that its slot was taken away; its output becomes part of the prompt."""
        new, first = self.written, self.submitted
        self.request = replace(
            first, prompt=(*first.prompt, *new), max_new_tokens=first.max_new_tokens - len(new)
        )
        self.row, self.status = -1, "waiting"
        self.forget_prompt()

    def take(self, event: Emitted) -> list[Token]:
        """Return the tokens of a step, and note them and what the step has cost."""
        if event.step is not None:
            self.steps.append(event.step)
        elif self.written:  # read again: the drafter took no part, as at any bonus token
            event = replace(event, origins=["bonus"])
        self.mark("first")
        self.written += event.tokens
        return self.reading([event])


@dataclass(frozen=True)
class Update:
    """What a step has brought to one request.

    Attributes:
        handle: of the request.
        tokens: new ones, with their text.
        emitted: the same as the loop tells it, with the verified tree of the whole batch; the
            request's own nodes are `emitted.tree.of_row(emitted.row)`. None where the request was
            cancelled or has failed.
    """

    handle: "Handle"
    tokens: list[Token]
    emitted: Emitted | None = None


@final
class Handle:
    """A submitted request.

    `tokens` and `result` run the engine's steps themselves while the request is unfinished, so that
    a script needs no loop of its own. Where a worker thread calls `Engine.step`, `poll` only looks
    at what has come.

    Args:
        entry: what the scheduler knows of the request.
        step: runs one step of the scheduler.
    """

    def __init__(self, entry: Entry, step: Callable[[], object]) -> None:
        self.entry = entry
        self._step = step
        self._polled = 0

    def __repr__(self) -> str:
        """Return its number, status and length."""
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
        """Return the number of tokens of its prompt that were read with an earlier request's."""
        return self.entry.cached

    @property
    def finished(self) -> bool:
        """Return whether nothing more comes: the text has ended, was cancelled, or has failed."""
        return self.entry.ended

    @property
    def error(self) -> BaseException | None:
        """Return what a processor or criterion of a failed request raised; None otherwise."""
        return self.entry.error

    def poll(self) -> list[Token]:
        """Return the tokens that have come since the last call, without waiting; for one reader."""
        known = self.entry.reading.tokens
        end = len(known)
        new = known[self._polled : end]
        self._polled = end
        return new

    def tokens(self) -> Iterator[Token]:
        """Yield what `poll` returns, to the end of the text.

        Raises:
            Exception: what a processor or criterion of the request raised.
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
        """Return the whole text once it has ended; of a cancelled request what was written.

        Raises:
            Exception: what a processor or criterion of the request raised.
        """
        while not self.finished:
            self._step()
        if self.error is not None:
            raise self.error
        entry = self.entry
        stats = Stats(
            new_tokens=len(entry.written), steps=list(entry.steps), seconds=self.stats.seconds
        )
        return entry.reading.completion(stats)

    @property
    def stats(self) -> RequestStats:
        """Return the figures of the request."""
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
