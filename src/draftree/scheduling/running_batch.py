"""The running batch of the scheduler: slots, drafter and policy states, and its size."""

from collections.abc import Callable
from typing import final

import numpy as np

from draftree import loop
from draftree.batch import Rows
from draftree.loop import Parts, State
from draftree.request import Emitted
from draftree.scheduling.engine_protocol import Host
from draftree.scheduling.handle import Entry
from draftree.scheduling.options import SchedulerOptions

PATIENCE = 4
"""The batch becomes smaller after this many steps with free slots and no waiting request."""


@final
class Batch:
    """The sequences that run together, and the prompts that are read for them.

    Args:
        host: the engine.
        options: the limits of the scheduler.
        preempt: takes a running request out, so that it is read again; called where slots cannot be
            moved.

    Attributes:
        opened: the parts and the batch that run; None while nothing does.
        state: of drafter and policy after the last step.
        running: the running requests, by slot.
        reading: requests whose prompts are read.
        movable: whether the drafter can move sequences to other slots, as far as is known.
    """

    def __init__(
        self, host: Host, options: SchedulerOptions, preempt: Callable[[Entry], None]
    ) -> None:
        self._host = host
        self._options = options
        self._preempt = preempt
        self.opened: tuple[Parts, Rows] | None = None
        self.state = State()
        self.running: dict[int, Entry] = {}
        self.reading: list[Entry] = []
        self.movable = True
        self._spare_steps, self._admitted = 0, 0

    @property
    def entries(self) -> list[Entry]:
        """Return the requests that are written or read."""
        return [*self.running.values(), *self.reading]

    @property
    def shares_passes(self) -> bool:
        """Return whether chunks of prompts are read in the passes of running sequences.

        By default they are where passes are packed: a padded one would compute as many tokens for
        every sequence.
        """
        target, asked = self._host.target, self._options.share_passes
        return target.reads_beside and (target.packs if asked is None else asked)

    def open(self, count: int) -> tuple[Parts, Rows]:
        """Return the parts and a batch with at least `count` slots.

        The batch is created if there is none.

        Passes compute free rows, too, so that a batch has no more of them than it needs, unless
        passes are recorded.
        """
        if self.opened is None:
            parts, self.state = self._host.scheduled_parts()
            cache = parts.target.new_cache(count, 64)
            if cache.ladder.few or not self.movable:
                cache = parts.target.new_cache(self._options.max_sequences, 64)
            self.opened = parts, Rows(cache, calls=self._admitted)
        if self.opened[1].cache.rows < count:
            self.resize(count)
        assert self.opened is not None
        return self.opened

    def seat(self) -> tuple[Parts, Rows]:
        """Give each prompt that is read a slot of the batch; return parts and batch.

        What is known of its beginning is copied there. Slots for all of it are reserved at once, as
        growing copies them all.
        """
        parts, rows = self.open(len(self.running) + len(self.reading))
        rows.cache.reserve(max(len(entry.request.prompt) for entry in self.reading) + 1)
        for entry in self.reading:
            if entry.prompt.row >= 0:
                continue
            row = int(rows.free[0])
            if entry.prompt.cache is not None:
                rows.cache.put(np.array([row]), entry.prompt.cache)
                entry.prompt.cache = None
            rows.seat(row, entry.request)
            entry.prompt.row = row
        return parts, rows

    def join(self, entry: Entry, event: Emitted) -> None:
        """Note that a request whose prompt was read is written from now on."""
        self.reading.remove(entry)
        entry.row, entry.status = event.row, "running"
        self.running[event.row] = entry
        entry.forget_prompt()
        assert self.opened is not None
        self._admitted = self.opened[1].admitted

    def resize(self, count: int) -> None:
        """Move all sequences to a batch with `count` slots.

        If the drafter cannot move them, they are read again.
        """
        assert self.opened is not None
        parts, rows = self.opened
        seated = {entry.prompt.row: entry for entry in self.reading if entry.prompt.row >= 0}
        old = sorted([*self.running, *seated])
        self._spare_steps = 0
        chosen = np.array(old + [-1] * (count - len(old)), np.int64)
        if (
            not self.running
        ):  # the drafter has no sequences, and begins anew with what it has learnt
            self._host.remember(self.state)
            parts, self.state = self._host.scheduled_parts()
        moved = (
            loop.select(parts, rows, chosen, self.state)
            if self.running
            else (rows.selected(chosen), self.state)
        )
        if moved is None:
            for entry in [*self.running.values(), *seated.values()]:
                self._preempt(entry)
            self._host.remember(self.state)
            self.opened, self.movable = None, False
            self.open(count)
            return
        new, self.state = moved
        self.opened = parts, new
        running, self.running = self.running, {}
        for row, before in enumerate(old):
            if before in seated:
                seated[before].prompt.row = row
            else:
                self.running[row] = running[before]
                self.running[row].row = row

    def shrink(self, waiting: bool) -> None:
        """Make the batch smaller once it has had free slots for some steps.

        It stays as it is while a request waits for them.
        """
        assert self.opened is not None
        rows = self.opened[1]
        spare = len(self.running) < rows.cache.rows and not (waiting or self.reading)
        self._spare_steps = self._spare_steps + 1 if spare else 0
        if self._spare_steps >= PATIENCE and self.movable and not rows.cache.ladder.few:
            self.resize(len(self.running))

    def leave(self, entry: Entry) -> None:
        """Take a request out, or what has been read of its prompt away."""
        if entry in self.reading:
            self.reading.remove(entry)
            if entry.prompt.row >= 0:
                assert self.opened is not None
                self.opened[1].leave(entry.prompt.row)
            return
        assert self.opened is not None
        del self.running[entry.row]
        self.state = loop.release(*self.opened, entry.row, self.state)

    def close(self) -> None:
        """Free the batch while nothing runs.

        The drafter and the policy keep what they have learnt.
        """
        if self.opened is None:
            return
        self._host.remember(self.state)
        if not self.opened[1].cache.ladder.few:  # recorded passes belong to the cache
            self.opened, self.state = None, State()

    def drop(self) -> list[Entry]:
        """Give up a batch whose step was broken off; return its requests in their order."""
        entries = sorted(self.entries, key=lambda entry: entry.id)
        self.opened = None
        self.running = {}
        self.reading = []
        return entries
