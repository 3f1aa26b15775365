"""The scheduler: requests wait, are read, run together in one batch, and leave it, at any step.

A step decodes all running sequences with `loop.step`, frees the slots of those that have ended, and gives free slots to
waiting requests, first come first served. Prompts are read in chunks, so that running sequences are not held up. Where the
bound of the KV cache is reached, the youngest sequence makes room: it waits again, and what it has written becomes part of
its prompt. As every token follows from the text before it (and, sampled, from the noise of its position), the text goes on
as it would have done.
"""

import time
from bisect import insort
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Lock
from typing import Any, final

import numpy as np

from draftree import loop
from draftree.boundary.machine import timed
from draftree.errors import UserError
from draftree.loop import Parts, State
from draftree.models.target import Taps
from draftree.request import Emitted, Request
from draftree.rows import Rows
from draftree.scheduling.chunks import ChunkSizes, shares
from draftree.scheduling.handle import Entry, Handle, PartialPrompt, Status, Update
from draftree.scheduling.host import Host
from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.prefixes import PrefixStore
from draftree.text.completion import Reading

HEADROOM, SHARE = 16, 64
"""Cache tokens of each running sequence, at most this share of the bound, that stay free when another one is admitted, so that
none is preempted at once."""
PATIENCE = 4
"""Steps with free rows and nothing that waits after which the batch becomes smaller."""


@final
class Scheduler:
    """Runs the requests of an engine in one batch.

    `submit` and `cancel` may be called from other threads while a step runs.

    Args:
        host: the engine.
        lock: held during each step.
        options: the limits.

    Attributes:
        batch: the parts and the rows that run; None while nothing does.
        state: of drafter and policy after the last step.
    """

    def __init__(self, host: Host, lock: AbstractContextManager[Any], options: SchedulerOptions = SchedulerOptions()) -> None:
        self.options = options
        self._host, self._lock, self._mutex = host, lock, Lock()
        self._bound = options.cache_tokens(host.target.decoder.context)
        self._count, self._admitted = 0, 0
        self._handles: dict[int, Handle] = {}  # of unfinished requests, by id; guarded by the mutex, as is the next one
        self._waiting: list[Entry] = []  # by id
        self._partial: list[Entry] = []
        self._running: dict[int, Entry] = {}  # by row
        self._acting: list[Entry] = []
        self.batch: tuple[Parts, Rows] | None = None
        self.state = State()
        self._spare_steps, self._movable = 0, True
        self._prefixes, self._chunks = PrefixStore(options.prefix_block), ChunkSizes(options)

    @property
    def unfinished(self) -> int:
        """The number of requests that wait, are read or run."""
        return len(self._handles)

    @property
    def waiting(self) -> int:
        """The number of requests of which nothing is in the cache."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of sequences that are read or written."""
        return len(self._running) + len(self._partial)

    @property
    def cache_tokens(self) -> int:
        """Tokens in the KV cache; a prompt that is read in chunks counts in full."""
        return sum(map(self._held, [*self._running.values(), *self._partial]))

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
        """End a request; its slot is free after the next step. One that has ended is left as it is."""
        with self._mutex:
            entry = handle.entry
            if self._handles.get(entry.id) is not handle:
                return
            entry.cancelled = True
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._end(entry, "cancelled")

    def step(self) -> list[Update]:
        """Run one step: decode all running sequences, then read from prompts of waiting ones.

        A processor or criterion that raises an exception ends its own request. The others are read again and go on.

        Returns:
            What each request has got; a request that ended without new tokens is among them.
        """
        updates: list[Update] = []
        if not self._handles:
            return updates
        with self._lock:
            self._acting = list(self._running.values())
            try:
                self._drop_cancelled(updates)
                self._make_room()
                if self._running:
                    self._shrink()
                    self._decode(updates)
                self._admit()
                if self._partial:
                    self._read(updates)
                self._prefixes.shrink(min(self.options.max_prefix_tokens, max(self._bound - self.cache_tokens, 0)))
            except BaseException as error:
                self._recover(error, updates)
                if not isinstance(error, Exception):
                    raise
            self._acting = []
            if not self._running and not self._partial:
                self._close()
        return updates

    def _decode(self, updates: list[Update]) -> None:
        """Write tokens of all running sequences."""
        assert self.batch is not None
        parts, rows = self.batch
        self._acting = list(self._running.values())
        if self._recomputes:
            rows.growth = max((self._bound - self.cache_tokens) // len(self._running) - 1, 0)
        start = time.perf_counter()
        events, self.state = loop.step(parts, rows, self.state)
        self._take(events, updates)
        self._chunks.decoded(time.perf_counter() - start)
        for entry in self._acting:
            entry.suspect = False

    def _admit(self) -> None:
        """Take waiting requests in the order of their arrival, as many as the limits allow."""
        with self._mutex:
            suspects = [entry for entry in self._waiting if entry.suspect]
        if suspects:  # they run alone until a step of theirs has succeeded
            if any(entry.suspect for entry in [*self._running.values(), *self._partial]):
                return
            for entry in [*self._running.values(), *self._partial]:
                self._preempt(entry)
            self._begin(suspects[0])
            return
        while self._waiting and self.running < self.options.max_sequences:
            entry = self._waiting[0]
            headroom = min(HEADROOM, self._bound // SHARE) * (self.running + 1) if self._recomputes else 0
            if self.cache_tokens + self._held(entry) + headroom > self._bound and self.running:
                return
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        with self._mutex:
            if entry not in self._waiting:  # it has been cancelled a moment ago
                return
            self._waiting.remove(entry)
            entry.status = "reading"
            self._partial.append(entry)
        entry.partial = self._prefixes.begin(entry.request.prompt, self._host.target)
        if not entry.written:
            entry.cached = entry.read

    def _read(self, updates: list[Update]) -> None:
        """Read from prompts, as many tokens as a step has time for."""
        left = {entry.id: len(entry.request.prompt) - entry.read for entry in self._partial}
        share = shares(left, self._chunks.budget(bool(self._running))) if self._recomputes else left
        whole = [e for e in self._partial if e.partial is None and share[e.id] == left[e.id]]
        if whole:
            self._join(whole, updates)
        for entry in list(self._partial):
            if entry.partial is not None and share[entry.id] == left[entry.id] <= entry.partial.rest:
                self._join([entry], updates)
            elif share[entry.id]:
                self._read_chunk(entry, min(share[entry.id], left[entry.id] - 1))

    def _read_chunk(self, entry: Entry, count: int) -> None:
        """Read so many tokens of a prompt, its last one not among them, into a cache of its own."""
        self._acting = [entry]
        entry.mark("begun")
        parts, _ = self._opened(1)
        if entry.partial is None:
            entry.partial = PartialPrompt(parts.target.new_cache(1, len(entry.request.prompt)))
        text = [np.array(entry.request.prompt[: entry.read + count], np.int64)]
        cache, taps, needs = entry.partial.cache, entry.partial.taps, parts.drafter.needs
        work = lambda: taps.append(parts.target.prefill(cache, text, needs).taps)
        self._chunks.read(count, timed(work, parts.target.decoder.device))

    def _join(self, entries: Sequence[Entry], updates: list[Update]) -> None:
        """Read the rest of prompts into free slots and choose the first token of each; several must be unread."""
        self._acting = list(entries)
        parts, rows = self._opened(len(self._running) + len(entries))
        read = []
        for entry in entries:
            entry.mark("begun")
            if entry.partial is not None:
                row = rows.free[:1]
                rows.cache.put(row, entry.partial.cache)
                read = [replace(t, rows=np.full(len(t.rows), row[0]), cache=rows.cache) for t in entry.partial.taps]
        requests = [entry.request for entry in entries]
        begun, events, taps = loop.prefill(parts.target, parts.acceptor, parts.drafter.needs, rows, requests)
        taps = Taps.joined([*read, taps])
        self.state = loop.start(parts, rows, begun, taps, self.state)
        self._admitted = rows.admitted
        for entry, event in zip(entries, events, strict=True):
            self._partial.remove(entry)
            entry.row, entry.partial, entry.status = event.row, None, "running"
            self._running[event.row] = entry
            if self._recomputes and rows.cache.states is None:  # a state would be needed for each block
                prompt = entry.request.prompt[: self.options.max_prefix_tokens]
                self._prefixes.store(prompt, rows.cache, event.row, taps)
        self._take(events, updates)

    def _take(self, events: Sequence[Emitted], updates: list[Update]) -> None:
        """Note the tokens of a step, and free the slots of texts that have ended."""
        for event in events:
            entry = self._running[event.row]
            updates.append(Update(self._handles[entry.id], entry.take(event), event))
        for event in events:
            if event.ending is not None:
                entry = self._running[event.row]
                self._leave(entry)
                with self._mutex:
                    self._end(entry, "finished")
        assert self.batch is not None
        stats = self.batch[1].stats
        stats.steps.clear()  # they would fill the memory
        stats.work.clear()

    def _drop_cancelled(self, updates: list[Update]) -> None:
        for entry in [*self._running.values(), *self._partial]:
            if entry.cancelled:
                handle = self._handles[entry.id]
                self._leave(entry)
                with self._mutex:
                    self._end(entry, "cancelled")
                updates.append(Update(handle, []))

    def _make_room(self) -> None:
        """Preempt the youngest sequences until the cache has room for a token of every other one."""
        while self._recomputes and self.running > 1 and self.cache_tokens + len(self._running) > self._bound:
            self._preempt(max([*self._running.values(), *self._partial], key=lambda entry: entry.id))

    def _preempt(self, entry: Entry) -> None:
        self._leave(entry)
        entry.preemptions += 1
        self._requeue(entry)

    def _requeue(self, entry: Entry) -> None:
        entry.wait_again()
        with self._mutex:
            if entry.cancelled:
                self._end(entry, "cancelled")
            else:
                insort(self._waiting, entry, key=lambda each: each.id)

    def _leave(self, entry: Entry) -> None:
        """Take a request out of the batch, or what has been read of its prompt away."""
        if entry in self._partial:
            self._partial.remove(entry)
            return
        assert self.batch is not None
        del self._running[entry.row]
        self.state = loop.release(*self.batch, entry.row, self.state)

    def _end(self, entry: Entry, status: Status) -> None:
        """Note that nothing more comes for a request; the mutex is held."""
        entry.end(status)
        del self._handles[entry.id]

    def _recover(self, error: BaseException, updates: list[Update]) -> None:
        """Give up a batch whose step was broken off, and let its requests wait to be read again.

        If one request alone took part in what raised the exception, it is the one that fails. Several take their turns alone
        until the culprit is known.
        """
        acting, self._acting = self._acting, []
        entries = sorted([*self._running.values(), *self._partial], key=lambda entry: entry.id)
        self.batch, self._running, self._partial = None, {}, []
        for entry in entries:
            if acting == [entry] and isinstance(error, Exception):
                entry.error, handle = error, self._handles[entry.id]
                with self._mutex:
                    self._end(entry, "failed")
                updates.append(Update(handle, []))
            else:
                entry.suspect = entry.suspect or (entry in acting and isinstance(error, Exception))
                self._requeue(entry)

    def _opened(self, count: int) -> tuple[Parts, Rows]:
        """Return the parts and the rows of the batch, with at least `count` rows; it is begun where there is none.

        Passes compute free rows, too, so that a batch has no more of them than it needs, unless passes are recorded.
        """
        if self.batch is None:
            parts, self.state = self._host.scheduled_parts()
            cache = parts.target.new_cache(count, 64)
            if cache.ladder.few or not self._movable:
                cache = parts.target.new_cache(self.options.max_sequences, 64)
            self.batch = parts, Rows(cache, calls=self._admitted)
        if self.batch[1].cache.rows < count:
            self._resize(count)
        assert self.batch is not None
        return self.batch

    def _resize(self, count: int) -> None:
        """Move the running sequences to a batch with `count` rows; where the drafter cannot move them, they are read again."""
        assert self.batch is not None
        (parts, rows), old = self.batch, sorted(self._running)
        self._spare_steps = 0
        chosen = np.array(old + [-1] * (count - len(old)), np.int64)
        moved = loop.select(parts, rows, chosen, self.state)
        if moved is None:
            for entry in list(self._running.values()):
                self._preempt(entry)
            self._host.remember(self.state)
            self.batch, self._movable = None, False
            self._opened(count)
            return
        new, self.state = moved
        self.batch = parts, new
        self._running = {row: self._running[before] for row, before in enumerate(old)}
        for row, entry in self._running.items():
            entry.row = row

    def _shrink(self) -> None:
        """Make the batch smaller once it has had free rows for some steps."""
        assert self.batch is not None
        rows = self.batch[1]
        spare = len(self._running) < rows.cache.rows and not (self._waiting or self._partial)
        self._spare_steps = self._spare_steps + 1 if spare else 0
        if self._spare_steps >= PATIENCE and self._movable and not rows.cache.ladder.few:
            self._resize(len(self._running))

    def _close(self) -> None:
        """Give the batch up while nothing runs; the drafter and the policy keep what they have learnt."""
        if self.batch is None:
            return
        self._host.remember(self.state)
        if not self.batch[1].cache.ladder.few:  # recorded passes belong to the cache
            self.batch, self.state = None, State()

    @property
    def _recomputes(self) -> bool:
        """Whether a text that is read again has the keys, values and states that it had when it was written."""
        target = self._host.target
        return target.reuses_prefixes and not target.decoder.kept.clamped

    def forget(self) -> None:
        """Drop all prompts that are kept."""
        with self._lock:
            self._prefixes.shrink(0)

    def _held(self, entry: Entry) -> int:
        """Cache tokens of a request: those of its text with the root, or all that it may ever need."""
        if not self._recomputes:
            return self._most(entry.submitted)
        if entry.row >= 0 and self.batch is not None:
            return len(self.batch[1].committed[entry.row]) + 1
        return len(entry.request.prompt) + 1

    def _most(self, request: Request) -> int:
        """Cache tokens that a request may need at most."""
        context = self._host.target.decoder.context
        return min(len(request.prompt) + request.max_new_tokens, context + 1)
