"""The running batch of the scheduler: slots, drafter and policy states, and its size."""

from collections.abc import Callable
from typing import final

import numpy as np

from draftree import loop
from draftree.batch import SequenceBatch
from draftree.loop import Components, State
from draftree.request import Emitted
from draftree.scheduling.engine_protocol import Host
from draftree.scheduling.handle import Entry
from draftree.scheduling.options import SchedulerOptions

IDLE_STEPS = 4
"""Number of steps with too many free slots and without waiting requests after which the batch is
made smaller."""


@final
class RunningBatch:
    """Manage the slots of running sequences and of prompts that are being read.

    Args:
        host: engine to which the batch belongs.
        options: limits of the scheduler.
        preempt: function that removes a request from the batch, so that it is read again later; it
            is called if sequences cannot be moved to other slots.

    Attributes:
        opened: the engine's parts (target, drafter, policy, acceptor and costs) and the sequences
            of the batch; None while no batch exists.
        state: states of drafter and policy after the last step.
        running: running requests by slot.
        reading: requests whose prompts are being read.
        movable: whether the drafter can move sequences to other slots; true until an attempt has
            failed.
    """

    def __init__(
        self, host: Host, options: SchedulerOptions, preempt: Callable[[Entry], None]
    ) -> None:
        self._host = host
        self._options = options
        self._preempt = preempt
        self.opened: tuple[Components, SequenceBatch] | None = None
        self.state = State()
        self.running: dict[int, Entry] = {}
        self.reading: list[Entry] = []
        self.movable = True
        self._spare_steps = 0

    @property
    def entries(self) -> list[Entry]:
        """Return the running requests and those whose prompts are being read."""
        return [*self.running.values(), *self.reading]

    @property
    def shares_passes(self) -> bool:
        """Return whether chunks of prompts are read in the passes of running sequences.

        By default this is true if the target packs passes. A padded pass would compute as many
        tokens for every sequence as the longest chunk has.
        """
        target, asked = self._host.target, self._options.share_passes
        return target.reads_beside and (target.packs if asked is None else asked)

    def open(self, count: int) -> tuple[Components, SequenceBatch]:
        """Return the engine's parts (see `opened`), and a batch with at least `count` slots.

        The batch is created or enlarged if necessary.

        A padded pass also computes free slots, so a batch begins with no more slots than it needs.
        If passes are recorded as CUDA graphs, it has `max_sequences` slots from the start.
        """
        if self.opened is None:
            parts, self.state = self._host.scheduled_parts()
            cache = parts.target.new_cache(count, 64)
            if cache.ladder.few or not self.movable:
                cache = parts.target.new_cache(self._options.max_sequences, 64)
            self.opened = parts, SequenceBatch(cache, calls=self._host.calls)
        if self.opened[1].cache.rows < count:
            self.resize(count)
        assert self.opened is not None
        return self.opened

    def seat(self) -> tuple[Components, SequenceBatch]:
        """Give a slot to each prompt that is being read, and return the parts and the batch.

        The part of a prompt that was read into its own cache is copied to the slot. Cache memory
        for the longest prompt is reserved at once, because growing the cache copies all of it.
        """
        parts, rows = self.open(len(self.running) + len(self.reading))
        rows.cache.reserve(max(len(entry.request.prompt) for entry in self.reading) + 1)
        for entry in self.reading:
            if entry.prompt.row >= 0:
                continue
            row = int(rows.free[0])
            if entry.prompt.cache is not None:
                rows.cache.replace_sequences(np.array([row]), entry.prompt.cache)
                entry.prompt.cache = None
            rows.seat(row, entry.request)
            entry.prompt.row = row
        return parts, rows

    def join(self, entry: Entry, event: Emitted) -> None:
        """Change a request from reading to running after its prompt was read."""
        self.reading.remove(entry)
        entry.row, entry.status = event.row, "running"
        self.running[event.row] = entry
        entry.forget_prompt()
        assert self.opened is not None
        self._host.calls = max(self._host.calls, self.opened[1].num_admitted)

    def resize(self, count: int) -> None:
        """Move all sequences to a batch with `count` slots.

        If the drafter cannot move its state, all requests are preempted and read again.
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
        else:
            self.state = loop.catch_up(parts, rows, self.state)
        moved = (
            loop.select(parts, rows, chosen, self.state)
            if self.running
            else (rows.select(chosen), self.state)
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
        """Make the batch smaller after it has had too many free slots for `IDLE_STEPS` steps.

        One free slot is too many if the target's passes are padded, and compute free slots, too. If
        they are packed, a quarter of the slots is, because drafters may still compute them. The
        batch keeps its size while requests wait or prompts are being read.
        """
        assert self.opened is not None
        rows = self.opened[1]
        slots = rows.cache.rows
        most = 3 * slots // 4 if self._host.target.packs else slots - 1
        spare = len(self.running) <= most and not (waiting or self.reading)
        self._spare_steps = self._spare_steps + 1 if spare else 0
        if self._spare_steps >= IDLE_STEPS and self.movable and not rows.cache.ladder.few:
            self.resize(len(self.running))

    def leave(self, entry: Entry) -> None:
        """Remove a request from the batch, and free its slot."""
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
        """Drop the batch when no sequence runs.

        The memory of drafter and policy is kept by the engine.
        """
        if self.opened is None:
            return
        self._host.remember(self.state)
        if not self.opened[1].cache.ladder.few:  # recorded passes belong to the cache
            self.opened, self.state = None, State()

    def drop(self) -> list[Entry]:
        """Drop the batch after a step failed, and return its requests by number."""
        entries = sorted(self.entries, key=lambda entry: entry.id)
        self.opened = None
        self.running = {}
        self.reading = []
        return entries
