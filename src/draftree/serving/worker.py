"""The thread that owns the model: it starts, advances and cancels generations.

Requests come from the tasks of the server, and what is written goes back to them through queues.
Texts that must not share what a drafter remembers (other API keys), or that are drafted otherwise,
are written by engines of their own over the same target; the engines take turns, one step each.
"""

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

from draftree.engine import Engine
from draftree.errors import DraftreeError, UserError, cut
from draftree.request import Emitted, Request
from draftree.serving.errors import ApiError, failure
from draftree.serving.metrics import Metrics, RequestFigures
from draftree.target.target import Target
from draftree.text.completion import Token
from draftree.text.stop_strings import StopStrings
from draftree.utils.hardware import return_memory
from draftree.viewer.html import step_as_lists
from draftree.viewer.trace import Watch

LOG = logging.getLogger(__name__)
IDLE_SECONDS = 1.0
"""Seconds without a request after which the process returns free memory to the system."""
MAX_ENGINES = 16
"""Largest number of engines that are kept. An idle engine is dropped if there are more, the least
recently used first."""


@dataclass(frozen=True)
class Speculative:
    """Describe how texts are drafted and who owns them.

    Texts with equal values share an engine.

    Attributes:
        owner: name for the owner of the API key. Owners share neither drafters' memories nor cached
            prefixes.
        drafter: spec of the drafter.
        policy: spec of the policy.
        plain: whether texts are generated without drafts.
    """

    owner: str
    drafter: str
    policy: str
    plain: bool = False


@dataclass(frozen=True)
class Work:
    """Describe the texts to generate for one request of a client.

    Attributes:
        requests: requests to the engine, one for each text.
        stops: stop texts of the request.
        speculative: how the texts are drafted, and the owner of the API key.
        trees: whether updates include the draft tree of each step.
        continues: whether each text continues its prompt, and so begins with the space that the
            tokenizer drops from a text of its own.
    """

    requests: Sequence[Request]
    stops: StopStrings
    speculative: Speculative
    trees: bool = False
    continues: bool = False


@dataclass(frozen=True)
class TextUpdate:
    """Store the result of a step for one text of a request.

    Attributes:
        index: number of the text within the request.
        tokens: new tokens with their text.
        tree: the step's draft tree with coordinates for drawing; None if it was not requested.
    """

    index: int
    tokens: list[Token]
    tree: dict[str, Any] | None = None


@final
class Job:
    """Carry the updates of a request from the worker's thread to the server's event loop.

    Args:
        work: description of the texts to generate.
        cancel: function that cancels the job.
    """

    def __init__(self, work: Work, cancel: Callable[["Job"], None]) -> None:
        self.work, self.figures = work, [RequestFigures(len(r.prompt)) for r in work.requests]
        self._loop, self._cancel = asyncio.get_running_loop(), cancel
        self._left = len(work.requests)  # unfinished texts
        self._queue: asyncio.Queue[TextUpdate | ApiError] = asyncio.Queue()

    def post(self, update: TextUpdate | ApiError) -> None:
        """Pass an update or an error to the event loop; called by the worker's thread."""
        with suppress(RuntimeError):  # the loop has ended, and with it whoever would read this
            self._loop.call_soon_threadsafe(self._queue.put_nowait, update)

    async def updates(self) -> AsyncGenerator[TextUpdate, None]:
        """Yield the updates of all texts until the last one has ended.

        Leaving the iterator early cancels the job.

        Raises:
            ApiError: the server failed.
        """
        try:
            while self._left:
                update = await self._queue.get()
                if isinstance(update, ApiError):
                    raise update
                self._left -= bool(update.tokens) and update.tokens[-1].ending is not None
                yield update
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the job if any of its texts is unfinished."""
        if self._left:
            self._left = 0
            self._cancel(self)


@dataclass
class TextState:
    """Store the state of one text that an engine generates."""

    job: Job
    index: int
    watch: Watch | None
    since: float
    started: bool = False


@dataclass
class Lane:
    """Store an engine, and a map from handles to the texts that the engine generates."""

    engine: Engine
    texts: dict[Any, TextState] = field(default_factory=dict)

    @property
    def needs_step(self) -> bool:
        """Return whether the engine has a text to generate, or a cancelled one to free."""
        return self.engine.scheduler.num_unfinished > 0


@final
class Worker:
    """Run all engines in a separate thread.

    Args:
        target: target that all engines share.
        engine_for: function that creates an engine for given speculative options.
        metrics: metrics to which every step is added.
        most_waiting: largest number of texts that may wait; requests beyond it are refused.
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
        self._dropped = False  # whether an engine was dropped since the last garbage collection
        self._draining = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="draftree worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the thread runs, or has not been started yet."""
        return self._thread.ident is None or self._thread.is_alive()

    @property
    def lanes(self) -> tuple[Speculative, ...]:
        """Return the speculative options for which engines exist, the most recently used last."""
        return tuple(self._lanes)

    @property
    def draining(self) -> bool:
        """Return whether the worker refuses new requests because the server is shutting down."""
        return self._draining

    @property
    def busy(self) -> bool:
        """Return whether any text waits or is being generated."""
        with self._wake:
            return bool(self._commands) or any(lane.texts for lane in self._lanes.values())

    def submit(self, work: Work) -> Job:
        """Accept a request, and return its job; its texts start when slots are free.

        Raises:
            ApiError: too many texts wait, or the server is shutting down.
        """
        job = Job(work, self.cancel)
        with self._wake:
            if self._draining:
                raise ApiError(
                    503,
                    "the server is shutting down, and accepts no further requests",
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
        """Cancel a request; its slots are freed after the current step."""
        with self._wake:
            self._commands.append(("cancel", job))
            self._wake.notify()

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones continue."""
        with self._wake:
            self._draining = True
            self._wake.notify()

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread after the current step, and wait for it; unfinished requests get an error.

        `seconds` limits the wait.
        """
        with self._wake:
            self._draining = self._stopped = True
            self._wake.notify()
        if self._thread.ident is not None:  # else the model is not warm yet
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
        """Run steps of all engines until the server ends."""
        while True:
            self._await_work()
            with self._wake:
                if self._stopped:
                    return
                commands, self._commands = self._commands, deque()
            for kind, job in commands:
                self._submit(job) if kind == "submit" else self._drop(job)
            self._step_all()
            self._count()

    def _step_all(self) -> None:
        """Run one step of each engine."""
        for key, lane in list(self._lanes.items()):
            if lane.needs_step:
                self._step(key, lane)

    def _await_work(self) -> None:
        """Wait for work; return free memory to the system after `IDLE_SECONDS` without work."""
        work = lambda: bool(
            self._commands or self._stopped or any(one.needs_step for one in self._lanes.values())
        )
        with self._wake:
            if self._wake.wait_for(work, IDLE_SECONDS):
                return
        if self._dropped:
            self._dropped = False
            gc.collect()  # engines are parts of reference cycles
        return_memory()
        with self._wake:
            self._wake.wait_for(work)

    def _submit(self, job: Job) -> None:
        """Submit the texts of a request to the engine for its speculative options."""
        now = time.monotonic()
        try:
            lane = self._lane(job.work.speculative)
            for index, request in enumerate(job.work.requests):
                text = TextState(job, index, self._watch(job), now)
                lane.texts[lane.engine.submit(request, stops=job.work.stops)] = text
        except DraftreeError as error:
            self._drop(job)
            job.post(ApiError(400, cut(str(error))))
        except Exception as error:  # the server continues after any failure
            LOG.exception("a request could not be started")
            self._drop(job)
            job.post(failure(error))

    def _watch(self, job: Job) -> Watch | None:
        return Watch(self._tokenizer) if job.work.trees else None

    def _lane(self, key: Speculative) -> Lane:
        """Return the engine for the given speculative options; it is created if necessary.

        If there are `MAX_ENGINES` engines already, the least recently used idle engine is dropped.
        """
        lane = self._lanes.pop(key, None)
        if lane is None:
            lane = Lane(self._engine_for(key))
            idle = [other for other, one in self._lanes.items() if not one.texts]
            if len(self._lanes) >= MAX_ENGINES and idle:
                self._lanes.pop(idle[0]).engine.forget()
                self._dropped = True
        self._lanes[key] = lane
        return lane

    def _drop(self, job: Job) -> None:
        """Cancel the unfinished texts of a request."""
        lane = self._lanes.get(job.work.speculative)
        if lane is None:
            return
        for handle in [handle for handle, text in lane.texts.items() if text.job is job]:
            lane.engine.cancel(handle)
            del lane.texts[handle]
            self._metrics.finished.labels("abort").inc()

    def _step(self, key: Speculative, lane: Lane) -> None:
        """Run one step of an engine, and post the updates of its texts."""
        try:
            events = lane.engine.step()
        except Exception as error:  # an engine that has failed is not used again; the others go on
            LOG.exception("a step failed")
            self._fail(lane, failure(error))
            self._lanes.pop(key, None)
            self._dropped = True
            return
        for event in events:
            text = lane.texts.get(event.handle)
            if text is None:
                continue
            if event.emitted is None:  # its grammar or a processor has failed; the others go on
                cause = event.handle.error
                if isinstance(cause, UserError):
                    text.job.post(ApiError(400, cut(str(cause))))
                else:
                    LOG.error("a request failed", exc_info=cause)
                    text.job.post(failure(cause))
                self._drop(text.job)
                continue
            ending, tokens = event.emitted.ending, event.tokens
            if not text.started:
                text.job.figures[text.index].cached_tokens = event.handle.cached_tokens
                if text.job.work.continues:
                    start = event.handle.separator + tokens[0].text
                    tokens = [replace(tokens[0], text=start), *tokens[1:]]
            if ending == "stop" and event.handle.stop is None:  # the time limit has passed
                ending, tokens = "length", [*tokens[:-1], replace(tokens[-1], ending="length")]
            self._tell(text, event.emitted, tokens)
            if ending is not None:
                del lane.texts[event.handle]
                self._metrics.finished.labels(ending).inc()

    def _tell(self, text: TextState, emitted: Emitted, tokens: list[Token]) -> None:
        """Count the new tokens of a text, and post them as an update."""
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
        tree = None if text.watch is None else step_as_lists(text.watch.note(emitted))
        text.job.post(TextUpdate(text.index, tokens, tree))

    def _fail(self, lane: Lane, error: ApiError) -> None:
        """Post an error to all requests of an engine that has failed."""
        for job in {text.job for text in lane.texts.values()}:
            job.post(error)
        lane.texts.clear()

    def _count(self) -> None:
        """Update the metrics of running and waiting texts, and of the KV cache."""
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
