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
from draftree.batch import SequenceBatch
from draftree.drafting.step import RECENT
from draftree.errors import UserError
from draftree.loop import Components, State
from draftree.metrics import Stats
from draftree.request import Emitted, Request
from draftree.scheduling.engine_protocol import Host
from draftree.scheduling.handle import Entry, Handle, Status, Update
from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.prefill import PromptReader
from draftree.scheduling.prefix_cache import PrefixStore
from draftree.scheduling.running_batch import RunningBatch
from draftree.text.completion import Reading

HEADROOM, SHARE = 16, 64
"""Numbers that set how many cache tokens stay free when a sequence is admitted, so that no sequence
is preempted right away: `HEADROOM` tokens for each running sequence, but at most the cache's bound
divided by `SHARE`."""


@final
class Scheduler:
    """Run the requests of an engine in one batch.

    `submit` and `cancel` may be called from other threads while a step runs.

    Args:
        host: the engine to which the scheduler belongs.
        lock: lock that is held during each step.
        options: limits of the batch, the cache and the step.
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
            RunningBatch(host, options, self._preempt),
            PrefixStore(options.prefix_block),
        )
        self._reader = PromptReader(self._batch, options, self._prefixes, self._act, self._take)

    @property
    def batch(self) -> tuple[Components, SequenceBatch] | None:
        """Return the engine's parts and the running batch, see `RunningBatch.opened`.

        The result is None while no sequence runs.
        """
        return self._batch.opened

    @property
    def state(self) -> State:
        """Return the states of drafter and policy after the last step."""
        return self._batch.state

    @property
    def shared_passes(self) -> int:
        """Return the number of passes so far that verified nodes and read chunks of prompts."""
        return self._reader.shared

    @property
    def num_unfinished(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._handles)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait and have no tokens in the cache."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of sequences in the batch: running, or with a prompt being read."""
        return len(self._batch.entries)

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens in the KV cache.

        A prompt that is read in chunks counts in full from its first chunk on.
        """
        return sum(map(self._reserved_tokens, self._batch.entries))

    def submit(self, request: Request, reading: Reading, figures: Stats) -> Handle:
        """Add a request to the queue, and return its handle.

        Args:
            request: a request that has been checked against the target.
            reading: function that turns the request's tokens into text.
            figures: acceptor, kind of draws and largest depth of the engine, and whether its
                acceptor is lossy.

        Raises:
            UserError: the request needs more tokens than the cache can hold.
        """
        most = self._most(request)
        if most > self._bound:
            told = f"{len(request.prompt)} tokens of prompt and {request.max_new_tokens} new ones need {most} cache tokens"
            raise UserError(f"{told}, allowed is at most max_cache_tokens, {self._bound}")
        with self._mutex:
            self._count += 1
            entry = Entry(self._count, request, reading, figures, request)
            handle = self._handles[entry.id] = Handle(entry, self.step)
            self._waiting.append(entry)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Cancel a request; its slot is freed in the next step.

        A request that has already ended is not changed.
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
        """Run one step: decode all running sequences, and read parts of waiting prompts.

        If a logits processor or stopping criterion raises an exception, only its own request fails.
        The prompts of the other requests are read again, and their texts continue.

        Returns:
            Updates of all requests that got tokens or ended in this step.
        """
        if not self._handles:
            return []
        with self._lock:
            updates = self._updates = []
            if not self._batch.entries and self._host.set_evaluation_mode():
                self._prefixes.shrink(0)  # the weights may have changed
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
        """Record which requests take part in the next operation, for the case that it fails."""
        self._acting = list(entries)

    def _advance(self) -> None:
        """Decode all running sequences, and read chunks of prompts in the same pass."""
        if not self._batch.reading:
            self._decode()
            return
        self._act(self._batch.entries)
        opened = self._batch.seat()  # may move sequences to other rows, or let them be read again
        decoded = list(self._batch.running.values())
        self._bound_growth()
        self._reader.advance(*opened)
        for entry in decoded:
            entry.suspect = False

    def _decode(self) -> None:
        """Decode all running sequences."""
        if self.batch is None or not self._batch.running:
            return
        parts, rows = self.batch
        acting = list(self._batch.running.values())
        self._act(acting)
        self._bound_growth()
        start = time.perf_counter()
        events, self._batch.state = loop.step(parts, rows, self._batch.state)
        self._take(events)
        self._reader.sizes.record_decode_step(time.perf_counter() - start)
        for entry in acting:
            entry.suspect = False

    def _bound_growth(self) -> None:
        """Limit the trees of this step so that accepted tokens fit the bound of the cache."""
        if self._recomputes and self.batch is not None and self._batch.running:
            free = self._bound - self.cache_tokens
            self.batch[1].growth = max(free // len(self._batch.running) - 1, 0)

    def _admit(self) -> None:
        """Admit waiting requests to the batch in the order of arrival, within the limits."""
        with self._mutex:
            suspects = [entry for entry in self._waiting if entry.suspect]
        if suspects:  # they run alone until a step of theirs has succeeded
            if any(entry.suspect for entry in self._batch.entries):
                return
            for entry in self._batch.entries:
                self._preempt(entry)
            self._begin(suspects[0])
            return
        while self.running < self.options.max_sequences:
            with self._mutex:
                if not self._waiting:
                    return
                entry = self._waiting[0]
            headroom = self._headroom if self._recomputes else 0
            if (
                self.cache_tokens + self._reserved_tokens(entry) + headroom > self._bound
                and self.running
            ):
                return
            self._begin(entry)

    @property
    def _headroom(self) -> int:
        """Return the number of cache tokens that stay free when another sequence is admitted.

        This number covers at least one token of each running sequence, which it writes in the same
        step.
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
        self._act([entry])
        entry.prompt = self._prefixes.begin(entry.request.prompt, self._host.target)
        if not entry.written:
            entry.cached = entry.num_read

    def _take(self, events: Sequence[Emitted]) -> None:
        """Record the tokens of a step, and free the slots of texts that have ended."""
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
        # All of them would fill the memory; the next tree is planned from the recent ones.
        del stats.steps[: -RECENT * max(self.running, 1)], stats.work[:-RECENT]

    def _drop_cancelled(self) -> None:
        for entry in self._batch.entries:
            if entry.cancelled:
                handle = self._handles[entry.id]
                self._batch.leave(entry)
                with self._mutex:
                    self._end(entry, "cancelled")
                self._updates.append(Update(handle, []))

    def _make_room(self) -> None:
        """Preempt the newest sequences until the cache has room for a token of each other."""
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
        """Set the final status of a request; the caller holds the mutex."""
        entry.end(status)
        del self._handles[entry.id]

    def _recover(self, error: BaseException) -> None:
        """Drop the batch after a step failed, and let its requests wait to be read again.

        If only one request took part in the operation that raised the exception, this request
        fails. If several took part, each of them runs alone until the faulty one is found.
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
        """Return whether reading a text again gives the same keys, values and states.

        Only then may sequences be preempted: their text must continue as if they had not been.
        """
        target = self._host.target
        return target.reuses_prefixes and not target.decoder.stored_shapes.clamped

    def forget(self) -> None:
        """Drop all prompts that are stored for later requests with the same beginning."""
        with self._lock:
            self._prefixes.shrink(0)

    def _reserved_tokens(self, entry: Entry) -> int:
        """Return the number of cache tokens that count for a request.

        If sequences can be preempted, it is the length of its text so far, including the root.
        Otherwise it is the largest number that the request may ever need.
        """
        if not self._recomputes:
            return self._most(entry.submitted)
        if entry.row >= 0 and self.batch is not None:
            return len(self.batch[1].committed[entry.row]) + 1
        return len(entry.request.prompt) + 1

    def _most(self, request: Request) -> int:
        """Return the largest number of cache tokens that a request may need."""
        context = self._host.target.decoder.context
        return min(len(request.prompt) + request.max_new_tokens, context + 1)
