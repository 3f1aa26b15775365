"""The thread that owns the model: it starts, advances and cancels generations.

Requests come from the tasks of the server, and what is written goes back to them through queues.
Texts that must not share what a drafter remembers (other API keys), or that are drafted otherwise,
are written by engines of their own over the same target; the engines take turns, one step each.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from draftree.engine import Engine
from draftree.errors import DraftreeError, cut
from draftree.request import Emitted, Request
from draftree.serving.errors import ApiError
from draftree.serving.metrics import Metrics, RequestFigures
from draftree.target.target import Target
from draftree.text.completion import Token
from draftree.text.stop_strings import Stops
from draftree.utils.hardware import return_memory
from draftree.viewer.html import drawn
from draftree.viewer.trace import Watch

LOG = logging.getLogger(__name__)
IDLE = 1.0
"""Seconds without a request after which memory that is free goes back to the system."""
MANY = 16
"""Engines that are kept; the one that was used longest ago goes first."""


@dataclass(frozen=True)
class Speculative:
    """Define how texts are drafted, and whose they are; texts that agree in this share an engine.

    Attributes:
        owner: owner of the key; memories of drafters and cached prefixes are separate for each.
        drafter: a spec.
        policy: a spec.
        plain: whether nothing is drafted.
    """

    owner: str
    drafter: str
    policy: str
    plain: bool = False


@dataclass(frozen=True)
class Work:
    """Describe the work of one request.

    Attributes:
        requests: one for each text.
        stops: the stop texts.
        speculative: how the texts are drafted.
        trees: whether updates include the tree of each step.
    """

    requests: Sequence[Request]
    stops: Stops
    speculative: Speculative
    trees: bool = False


@dataclass(frozen=True)
class TextUpdate:
    """Store what a step adds to one of a request's texts.

    Attributes:
        index: number of the text.
        tokens: the new tokens, with their text.
        tree: the step's tree, drawn, if requested.
    """

    index: int
    tokens: list[Token]
    tree: dict[str, Any] | None = None


@final
class Job:
    """Represent a running request; the worker's thread posts updates for the server's loop.

    Args:
        work: the work of the request.
        cancel: ends the job.
    """

    def __init__(self, work: Work, cancel: Callable[["Job"], None]) -> None:
        self.work, self.figures = work, [RequestFigures(len(r.prompt)) for r in work.requests]
        self._loop, self._cancel = asyncio.get_running_loop(), cancel
        self._queue: asyncio.Queue[TextUpdate | ApiError] = asyncio.Queue()

    def post(self, update: TextUpdate | ApiError) -> None:
        """Hand an update over, from the worker's thread."""
        with suppress(RuntimeError):  # the loop has ended, and with it whoever would read this
            self._loop.call_soon_threadsafe(self._queue.put_nowait, update)

    async def updates(self) -> AsyncGenerator[TextUpdate, None]:
        """Yield the updates of all texts until the last one has ended.

        Leaving the iterator early cancels the job.

        Raises:
            ApiError: the server failed.
        """
        left = len(self.work.requests)
        try:
            while left:
                update = await self._queue.get()
                if isinstance(update, ApiError):
                    raise update
                left -= bool(update.tokens) and update.tokens[-1].ending is not None
                yield update
        finally:
            if left:
                self._cancel(self)


@dataclass
class Text:
    """Hold one text that an engine generates."""

    job: Job
    index: int
    watch: Watch | None
    since: float
    started: bool = False


@dataclass
class Lane:
    """Hold an engine and the texts that it generates, by the engine's handles."""

    engine: Engine
    texts: dict[Any, Text] = field(default_factory=dict)


@final
class Worker:
    """Run the engines in a thread of its own.

    Args:
        target: the model that all engines share.
        engine_for: makes the engine for texts with the same speculative options.
        metrics: counts every step.
        most_waiting: largest number of texts that may wait; further requests are refused.
    """

    def __init__(
        self,
        target: Target,
        engine_for: Callable[[Speculative], Engine],
        metrics: Metrics,
        most_waiting: int,
    ) -> None:
        self._tokenizer, self._context = target.tokenizer, target.decoder.context
        self._engine_for = engine_for
        self._metrics = metrics
        self._most = most_waiting
        self._lanes: dict[Speculative, Lane] = {}
        self._commands: deque[tuple[str, Job]] = deque()
        self._wake = threading.Condition()
        self._waiting = 0
        self._draining = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="draftree worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    @property
    def lanes(self) -> tuple[Speculative, ...]:
        """Return the speculative options that have engines, the most recently used last."""
        return tuple(self._lanes)

    @property
    def draining(self) -> bool:
        """Return whether no further request is accepted."""
        return self._draining

    @property
    def busy(self) -> bool:
        """Return whether any text is being generated or waits."""
        with self._wake:
            return bool(self._commands) or any(lane.texts for lane in self._lanes.values())

    def submit(self, work: Work) -> Job:
        """Accept a request; its texts start when there is a free slot.

        Raises:
            ApiError: too many wait, or the server is about to end.
        """
        job = Job(work, self.cancel)
        with self._wake:
            if self._draining:
                raise ApiError(
                    503,
                    "the server is about to end, and takes no further request",
                    headers={"retry-after": "5"},
                )
            if self._waiting and self._waiting + len(work.requests) > self._most:
                self._metrics.refused.inc()
                told = f"{self._waiting} texts wait, allowed are {self._most}; try again later"
                raise ApiError(429, told, code="queue_full", headers={"retry-after": "1"})
            self._waiting += len(work.requests)
            self._commands.append(("submit", job))
            self._wake.notify()
        return job

    def cancel(self, job: Job) -> None:
        """End a request; its slots are free after the current step."""
        with self._wake:
            self._commands.append(("cancel", job))
            self._wake.notify()

    def drain(self) -> None:
        """Accept no further request; running ones continue."""
        with self._wake:
            self._draining = True
            self._wake.notify()

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread after the current step; running requests get an error."""
        with self._wake:
            self._draining = self._stopped = True
            self._wake.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # without this thread nobody would ever be answered
            LOG.exception("the worker has failed")
        with self._wake:
            self._draining = self._stopped = True
            commands, self._commands = self._commands, deque()
        ended = ApiError(503, "the server has ended")
        for _, job in commands:
            job.post(ended)
        for lane in self._lanes.values():
            self._fail(lane, ended)

    def _serve(self) -> None:
        """Advance all engines until the server ends."""
        while True:
            self._await_work()
            with self._wake:
                if self._stopped:
                    return
                commands, self._commands = self._commands, deque()
            for kind, job in commands:
                self._submit(job) if kind == "submit" else self._drop(job)
            for key, lane in list(self._lanes.items()):
                if lane.texts:
                    self._step(key, lane)
            self._count()

    def _await_work(self) -> None:
        """Wait until there is work; after a while without any, return free memory to the system."""
        work = lambda: bool(
            self._commands or self._stopped or any(lane.texts for lane in self._lanes.values())
        )
        with self._wake:
            if self._wake.wait_for(work, IDLE):
                return
        return_memory()
        with self._wake:
            self._wake.wait_for(work)

    def _submit(self, job: Job) -> None:
        """Hand a request's texts to their engine."""
        now = time.monotonic()
        try:
            lane = self._lane(job.work.speculative)
            for index, request in enumerate(job.work.requests):
                text = Text(job, index, self._watch(job), now)
                lane.texts[lane.engine.submit(request, stops=job.work.stops)] = text
        except DraftreeError as error:
            self._drop(job)
            job.post(ApiError(400, cut(str(error))))
        except Exception as error:  # the server continues after any failure
            LOG.exception("a request could not be started")
            self._drop(job)
            job.post(ApiError(500, f"the server failed: {type(error).__name__}"))

    def _watch(self, job: Job) -> Watch | None:
        return Watch(self._tokenizer) if job.work.trees else None

    def _lane(self, key: Speculative) -> Lane:
        """Return the engine for texts with the same speculative options.

        If there are too many engines, the idle one that was used least recently is dropped.
        """
        lane = self._lanes.pop(key, None)
        if lane is None:
            lane = Lane(self._engine_for(key))
            idle = [other for other, one in self._lanes.items() if not one.texts]
            if len(self._lanes) >= MANY and idle:
                del self._lanes[idle[0]]
        self._lanes[key] = lane
        return lane

    def _drop(self, job: Job) -> None:
        """Cancel what is left of a request."""
        lane = self._lanes.get(job.work.speculative)
        if lane is None:
            return
        for handle in [handle for handle, text in lane.texts.items() if text.job is job]:
            lane.engine.cancel(handle)
            del lane.texts[handle]
            self._metrics.finished.labels("abort").inc()

    def _step(self, key: Speculative, lane: Lane) -> None:
        """Advance all texts of an engine by one step, and post their updates."""
        try:
            events = lane.engine.step()
        except Exception as error:  # an engine that has failed is not used again; the others go on
            LOG.exception("a step failed")
            told = (
                cut(str(error))
                if isinstance(error, DraftreeError)
                else f"the server failed: {type(error).__name__}"
            )
            self._fail(lane, ApiError(500, told))
            self._lanes.pop(key, None)
            return
        for event in events:
            text = lane.texts.get(event.handle)
            if text is None:
                continue
            if event.emitted is None:  # its grammar or a processor has failed; the others go on
                text.job.post(ApiError(400, cut(str(event.handle.error))))
                self._drop(text.job)
                continue
            if not text.started:
                text.job.figures[text.index].cached_tokens = event.handle.cached_tokens
            self._tell(text, event.emitted, event.tokens)
            if event.emitted.ending is not None:
                del lane.texts[event.handle]
                self._metrics.finished.labels(event.emitted.ending).inc()

    def _tell(self, text: Text, emitted: Emitted, tokens: list[Token]) -> None:
        """Count and post what is added to a text."""
        now, figures = time.monotonic(), text.job.figures[text.index]
        first, text.started = not text.started, True
        self._metrics.count_tokens(now - text.since, len(tokens), first)
        figures.new_tokens += len(tokens)
        text.since = now
        if emitted.step is not None:
            figures.steps.append(emitted.step)
            self._metrics.count_step(emitted.step)
        elif first:
            self._metrics.count_prompt(figures)
        tree = None if text.watch is None else drawn(text.watch.note(emitted))
        text.job.post(TextUpdate(text.index, tokens, tree))

    def _fail(self, lane: Lane, error: ApiError) -> None:
        """Tell all requests of an engine that it has failed."""
        for job in {text.job for text in lane.texts.values()}:
            job.post(error)
        lane.texts.clear()

    def _count(self) -> None:
        """Count the texts that run and wait."""
        texts = [text for lane in self._lanes.values() for text in lane.texts.values()]
        running = sum(text.started for text in texts)
        with self._wake:
            queued = sum(len(job.work.requests) for kind, job in self._commands if kind == "submit")
            self._waiting = len(texts) - running + queued
            self._metrics.waiting.set(self._waiting)
        self._metrics.running.set(running)
        context = self._context
        used = [lane.engine.scheduler for lane in self._lanes.values() if lane.texts]
        bound = sum(scheduler.options.cache_tokens(context) for scheduler in used)
        self._metrics.cache.set(
            sum(scheduler.cache_tokens for scheduler in used) / bound if bound else 0.0
        )
