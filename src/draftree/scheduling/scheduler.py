"""The scheduler: admit requests, prefill their prompts, and decode them in one batch.

A step decodes all running sequences, frees the slots of those that have ended, and gives free slots
to waiting requests, first come first served. Prompts are read in chunks, so that running sequences
are not held up, and in the same pass where the target can do that (`reading`). Where the bound of
the KV cache is reached, the youngest sequence is preempted: it waits again, and its output becomes
part of its prompt. Every token depends only on the text before it (and, if sampled, on the noise of
its position). So the text continues as it would have done.
"""

import time
from bisect import insort
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, final

from draftree import loop
from draftree.batch import Rows
from draftree.errors import UserError
from draftree.loop import Parts, State
from draftree.request import Emitted, Request
from draftree.scheduling.engine_protocol import Host
from draftree.scheduling.handle import Entry, Handle, Status, Update
from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.prefill import PromptReader
from draftree.scheduling.prefix_cache import PrefixStore
from draftree.scheduling.running_batch import Batch
from draftree.text.completion import Reading

HEADROOM, SHARE = 16, 64
"""Cache tokens of each running sequence, at most this share of the bound, that stay free when
another one is admitted, so that none is preempted at once."""


@final
class Scheduler:
    """Runs the requests of an engine in one batch.

    `submit` and `cancel` may be called from other threads while a step runs.

    Args:
        host: the engine.
        lock: held during each step.
        options: the limits.
    """

    def __init__(
        self,
        host: Host,
        lock: AbstractContextManager[Any],
        options: SchedulerOptions = SchedulerOptions(),
    ) -> None:
        self.options = options
        self._host = host
        self._lock = lock
        self._mutex = Lock()
        self._bound = options.cache_tokens(host.target.decoder.context)
        self._count = 0
        self._handles: dict[
            int, Handle
        ] = {}  # of unfinished requests, by id; guarded by the mutex, as is the next one
        self._waiting: list[Entry] = []  # by id
        self._acting: list[Entry] = []
        self._updates: list[Update] = []
        self._batch, self._prefixes = (
            Batch(host, options, self._preempt),
            PrefixStore(options.prefix_block),
        )
        self._reader = PromptReader(self._batch, options, self._prefixes, self._act, self._take)

    @property
    def batch(self) -> tuple[Parts, Rows] | None:
        """Return the parts and the batch that run; None while nothing does."""
        return self._batch.opened

    @property
    def state(self) -> State:
        """Return the state of drafter and policy after the last step."""
        return self._batch.state

    @property
    def shared_passes(self) -> int:
        """Return the number of passes so far that verified nodes and read chunks of prompts."""
        return self._reader.shared

    @property
    def unfinished(self) -> int:
        """Return the number of requests that wait, are read or run."""
        return len(self._handles)

    @property
    def waiting(self) -> int:
        """Return the number of requests of which nothing is in the cache."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of sequences that are read or written."""
        return len(self._batch.entries)

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens in the KV cache.

        A prompt that is read in chunks counts in full.
        """
        return sum(map(self._held, self._batch.entries))

    def submit(self, request: Request, reading: Reading) -> Handle:
        """Let a request wait for its turn.

        Args:
            request: valid for the target.
            reading: turns its tokens into text.

        Raises:
            UserError: the cache cannot hold it.
        """
        most = self._most(request)
        if most > self._bound:
            told = f"{len(request.prompt)} tokens of prompt and {request.max_new_tokens} new ones need {most} cache tokens"
            raise UserError(f"{told}, allowed is at most max_cache_tokens, {self._bound}")
        with self._mutex:
            self._count += 1
            entry = Entry(self._count, request, reading, request)
            handle = self._handles[entry.id] = Handle(entry, self.step)
            self._waiting.append(entry)
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request; its slot is free after the next step.

        A request that has ended is left as it is.
        """
        with self._mutex:
            entry = handle.entry
            if self._handles.get(entry.id) is not handle:
                return
            entry.cancelled = True
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._end(entry, "cancelled")

    def step(self) -> list[Update]:
        """Run one step: decode all running sequences, and read from prompts of waiting ones.

        A processor or criterion that raises an exception ends its own request. The others are read
        again and go on.

        Returns:
            What each request has got; a request that ended without new tokens is among them.
        """
        if not self._handles:
            return []
        with self._lock:
            updates = self._updates = []
            self._act(list(self._batch.running.values()))
            try:
                self._drop_cancelled()
                self._make_room()
                if self._batch.running:
                    self._batch.shrink(bool(self._waiting))
                if self._batch.shares_passes:
                    self._admit()
                    self._advance()
                else:
                    self._decode()
                    self._admit()
                    if self._batch.reading:
                        self._reader.read_apart(whole=not self._recomputes)
                self._prefixes.shrink(
                    min(self.options.max_prefix_tokens, max(self._bound - self.cache_tokens, 0))
                )
            except BaseException as error:
                self._recover(error)
                if not isinstance(error, Exception):
                    raise
            self._updates = []
            self._act(())
            if not self._batch.entries:
                self._batch.close()
        return updates

    def _act(self, entries: Sequence[Entry]) -> None:
        """Note which requests take part in what is done next."""
        self._acting = list(entries)

    def _advance(self) -> None:
        """Write tokens of all running sequences, and read from prompts in the same pass."""
        if not self._batch.reading:
            self._decode()
            return
        opened = self._batch.seat()  # may move sequences to other rows, or let them be read again
        decoded = list(self._batch.running.values())
        self._bound_growth()
        self._reader.advance(*opened)
        for entry in decoded:
            entry.suspect = False

    def _decode(self) -> None:
        """Write tokens of all running sequences."""
        if self.batch is None or not self._batch.running:
            return
        parts, rows = self.batch
        acting = list(self._batch.running.values())
        self._act(acting)
        self._bound_growth()
        start = time.perf_counter()
        events, self._batch.state = loop.step(parts, rows, self._batch.state)
        self._take(events)
        self._reader.sizes.decoded(time.perf_counter() - start)
        for entry in acting:
            entry.suspect = False

    def _bound_growth(self) -> None:
        """Keep the trees of a step as small as the bound of the cache requires."""
        if self._recomputes and self.batch is not None and self._batch.running:
            free = self._bound - self.cache_tokens
            self.batch[1].growth = max(free // len(self._batch.running) - 1, 0)

    def _admit(self) -> None:
        """Take waiting requests in the order of their arrival, as many as the limits allow."""
        with self._mutex:
            suspects = [entry for entry in self._waiting if entry.suspect]
        if suspects:  # they run alone until a step of theirs has succeeded
            if any(entry.suspect for entry in self._batch.entries):
                return
            for entry in self._batch.entries:
                self._preempt(entry)
            self._begin(suspects[0])
            return
        while self._waiting and self.running < self.options.max_sequences:
            entry = self._waiting[0]
            headroom = self._headroom if self._recomputes else 0
            if self.cache_tokens + self._held(entry) + headroom > self._bound and self.running:
                return
            self._begin(entry)

    @property
    def _headroom(self) -> int:
        """Return the number of cache tokens that stay free when another sequence is admitted.

        Every running sequence writes a token in the same step.
        """
        return max(
            min(HEADROOM, self._bound // SHARE) * (self.running + 1), len(self._batch.running)
        )

    def _begin(self, entry: Entry) -> None:
        with self._mutex:
            if entry not in self._waiting:  # it has been cancelled a moment ago
                return
            self._waiting.remove(entry)
            entry.status = "reading"
            self._batch.reading.append(entry)
        entry.prompt = self._prefixes.begin(entry.request.prompt, self._host.target)
        if not entry.written:
            entry.cached = entry.read

    def _take(self, events: Sequence[Emitted]) -> None:
        """Note the tokens of a step, and free the slots of texts that have ended."""
        for event in events:
            entry = self._batch.running[event.row]
            self._updates.append(Update(self._handles[entry.id], entry.take(event), event))
        for event in events:
            if event.ending is not None:
                entry = self._batch.running[event.row]
                self._batch.leave(entry)
                with self._mutex:
                    self._end(entry, "finished")
        assert self.batch is not None
        stats = self.batch[1].stats
        stats.steps.clear()  # they would fill the memory
        stats.work.clear()

    def _drop_cancelled(self) -> None:
        for entry in self._batch.entries:
            if entry.cancelled:
                handle = self._handles[entry.id]
                self._batch.leave(entry)
                with self._mutex:
                    self._end(entry, "cancelled")
                self._updates.append(Update(handle, []))

    def _make_room(self) -> None:
        """Preempt the youngest sequences until the cache has room for a token of each other one."""
        while (
            self._recomputes
            and self.running > 1
            and self.cache_tokens + len(self._batch.running) > self._bound
        ):
            self._preempt(max(self._batch.entries, key=lambda entry: entry.id))

    def _preempt(self, entry: Entry) -> None:
        self._batch.leave(entry)
        entry.preemptions += 1
        self._requeue(entry)

    def _requeue(self, entry: Entry) -> None:
        entry.wait_again()
        with self._mutex:
            if entry.cancelled:
                self._end(entry, "cancelled")
            else:
                insort(self._waiting, entry, key=lambda each: each.id)

    def _end(self, entry: Entry, status: Status) -> None:
        """Note that nothing more comes for a request; the mutex is held."""
        entry.end(status)
        del self._handles[entry.id]

    def _recover(self, error: BaseException) -> None:
        """Give up a batch whose step was broken off, and let its requests wait to be read again.

        If one request alone took part in what raised the exception, it is the one that fails.
        Several take their turns alone until the culprit is known.
        """
        acting, self._acting = self._acting, []
        for entry in self._batch.drop():
            if acting == [entry] and isinstance(error, Exception):
                entry.error, handle = error, self._handles[entry.id]
                with self._mutex:
                    self._end(entry, "failed")
                self._updates.append(Update(handle, []))
            else:
                entry.suspect = entry.suspect or (entry in acting and isinstance(error, Exception))
                self._requeue(entry)

    @property
    def _recomputes(self) -> bool:
        """Return whether a text that is read again gets the same keys, values and states.

        They must equal those that it had when it was generated.
        """
        target = self._host.target
        return target.reuses_prefixes and not target.decoder.kept.clamped

    def forget(self) -> None:
        """Drop all prompts that are kept."""
        with self._lock:
            self._prefixes.shrink(0)

    def _held(self, entry: Entry) -> int:
        """Return the number of cache tokens of a request.

        They are those of its text with the root, or all that it may ever need.
        """
        if not self._recomputes:
            return self._most(entry.submitted)
        if entry.row >= 0 and self.batch is not None:
            return len(self.batch[1].committed[entry.row]) + 1
        return len(entry.request.prompt) + 1

    def _most(self, request: Request) -> int:
        """Return the number of cache tokens that a request may need at most."""
        context = self._host.target.decoder.context
        return min(len(request.prompt) + request.max_new_tokens, context + 1)
