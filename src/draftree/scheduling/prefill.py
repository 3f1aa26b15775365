"""Prefill prompts in chunks, in passes of their own or in the passes of running sequences.

One pass over the nodes of running sequences and a chunk of a prompt reads the weights once, and
computes what both need. Where a pass would be padded, or layers keep a state, each chunk is read in
a pass of its own, into a cache of its own, which is copied to the batch with the last tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import numpy as np
from torch import Tensor

from draftree import loop
from draftree.batch import SequenceBatch
from draftree.loop import Components
from draftree.models.forward_batch import Chunk
from draftree.request import Emitted
from draftree.scheduling.handle import Entry
from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.prefix_cache import PrefixStore
from draftree.scheduling.prompt_chunks import ChunkSizes, shares
from draftree.scheduling.running_batch import RunningBatch
from draftree.target.target import HiddenStates, Read, Target
from draftree.utils.hardware import time_work

Act = Callable[[Sequence[Entry]], None]
"""Function that is called with the requests that take part in the next operation."""
Take = Callable[[Sequence[Emitted]], None]
"""Function that is called with the new tokens of a step."""


@final
class PromptReader:
    """Read the prompts of waiting requests in chunks, and let them join the batch.

    Args:
        batch: batch that the requests join.
        options: limits of the scheduler.
        prefixes: prefix cache in which prompts are stored after they were read.
        act: function that is called with the requests that take part in the next operation.
        take: function that is called with new tokens.

    Attributes:
        sizes: object that chooses the sizes of chunks.
        shared: number of passes that read chunks and verified nodes of running sequences.
    """

    def __init__(
        self,
        batch: RunningBatch,
        options: SchedulerOptions,
        prefixes: PrefixStore,
        act: Act,
        take: Take,
    ) -> None:
        self._batch = batch
        self._options = options
        self._prefixes = prefixes
        self._act = act
        self._take = take
        self.sizes, self.shared = ChunkSizes(options), 0

    def advance(self, parts: Components, rows: SequenceBatch) -> None:
        """Verify the trees of running sequences, and read chunks of prompts in the same pass.

        Choose the first output token after each prompt that is then complete.

        Args:
            parts: target, drafter, policy, acceptor and costs.
            rows: the batch, in which each prompt that is being read already has a slot.
        """
        batch, start = self._batch, time.perf_counter()
        chunks = self._chunks()
        mine = {
            chunk.sequence: entry
            for entry in batch.reading
            for chunk in chunks
            if entry.prompt.row == chunk.sequence
        }
        for entry in mine.values():
            entry.mark("begun")
        self._act([*batch.running.values(), *mine.values()])
        running = bool(batch.running)
        if running:
            events, batch.state, read = loop.step_and_read(parts, rows, batch.state, chunks)
            self.shared += 1
            self._take(events)
        else:
            read = loop.read_chunks(parts, rows, chunks)
        if read is not None:
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            self.sizes.record_chunk(tokens, time.perf_counter() - start, beside=running)
            self._note(mine, chunks, read)
            self._begin(
                parts, rows, [mine[chunk.sequence] for chunk in chunks if chunk.ends], read.logits
            )

    def _chunks(self) -> list[Chunk]:
        """Return the chunks of prompts that this step reads, in the order of their slots."""
        batch = self._batch
        left = {entry.id: len(entry.request.prompt) - entry.num_read for entry in batch.reading}
        share = shares(left, self.sizes.budget(bool(batch.running), beside=True))
        found = []
        for entry in sorted(batch.reading, key=lambda entry: entry.prompt.row):
            if count := share[entry.id]:
                tokens = np.array(
                    entry.request.prompt[entry.num_read : entry.num_read + count], np.int64
                )
                found.append(Chunk(entry.prompt.row, tokens, count == left[entry.id]))
        return found

    def _note(self, mine: dict[int, Entry], chunks: Sequence[Chunk], read: Read) -> None:
        """Record the hidden states and the number of tokens that were read of each prompt."""
        first = 0
        for chunk in chunks:
            count, prompt = len(chunk.tokens), mine[chunk.sequence].prompt
            prompt.hidden_states.append(read.hidden_states.take(np.arange(first, first + count)))
            prompt.read += count
            first += count

    def _begin(
        self, parts: Components, rows: SequenceBatch, entries: Sequence[Entry], logits: Tensor
    ) -> None:
        """Choose the first tokens of prompts that have been read completely."""
        if not entries:
            return
        self._act(entries)
        hidden_states = []
        for entry in entries:
            row = entry.prompt.row
            hidden_states += [
                replace(t, rows=np.full(len(t.rows), row), cache=rows.cache)
                for t in entry.prompt.hidden_states
            ]
        begun, joined = (
            np.array([entry.prompt.row for entry in entries], np.int64),
            HiddenStates.concatenate(hidden_states),
        )
        events, self._batch.state = loop.begin(
            parts, rows, begun, logits, joined, self._batch.state
        )
        self._join(parts.target, rows, entries, events, joined)

    def _join(
        self,
        target: Target,
        rows: SequenceBatch,
        entries: Sequence[Entry],
        events: Sequence[Emitted],
        hidden_states: HiddenStates,
    ) -> None:
        for entry, event in zip(entries, events, strict=True):
            self._batch.join(entry, event)
            # A recurrent state would be needed for each block.
            if rows.cache.states is None and target.reuses_prefixes:
                prompt = entry.request.prompt[: self._options.max_prefix_tokens]
                self._prefixes.store(prompt, rows.cache, event.row, hidden_states)
        self._take(events)

    def read_apart(self, whole: bool) -> None:
        """Read chunks of prompts in separate passes, as many tokens as a step has time for.

        Args:
            whole: whether each prompt is read in one pass, because reading it in parts would change
                the results.
        """
        batch = self._batch
        left = {entry.id: len(entry.request.prompt) - entry.num_read for entry in batch.reading}
        share = left if whole else shares(left, self.sizes.budget(bool(batch.running)))
        unread = [e for e in batch.reading if not e.num_read and share[e.id] == left[e.id]]
        if unread:
            self._finish_apart(unread)
        for entry in list(batch.reading):
            if entry.num_read and share[entry.id] == left[entry.id] <= entry.prompt.rest:
                self._finish_apart([entry])
            elif share[entry.id]:
                self._read_apart(entry, min(share[entry.id], left[entry.id] - 1))

    def _read_apart(self, entry: Entry, count: int) -> None:
        """Read the next `count` tokens of a prompt, but not its last one, into its own cache."""
        self._act([entry])
        entry.mark("begun")
        (parts, _), prompt = self._batch.open(1), entry.prompt
        if prompt.cache is None:
            prompt.cache = parts.target.new_cache(1, len(entry.request.prompt))
        text = [np.array(entry.request.prompt[: prompt.read + count], np.int64)]
        cache, needs = prompt.cache, parts.drafter.needs
        work = lambda: prompt.hidden_states.append(
            parts.target.prefill(cache, text, needs).hidden_states
        )
        self.sizes.record_chunk(count, time_work(work, parts.target.decoder.device))
        prompt.read += count

    def _finish_apart(self, entries: Sequence[Entry]) -> None:
        """Read the remaining tokens of prompts into free slots, and choose their first tokens.

        If there are several prompts, none of their tokens have been read before.
        """
        self._act(entries)
        parts, rows = self._batch.open(len(self._batch.running) + len(entries))
        read = []
        for entry in entries:
            entry.mark("begun")
            if entry.prompt.cache is not None:
                row = rows.free[:1]
                rows.cache.replace_sequences(row, entry.prompt.cache)
                read = [
                    replace(t, rows=np.full(len(t.rows), row[0]), cache=rows.cache)
                    for t in entry.prompt.hidden_states
                ]
        requests = [entry.request for entry in entries]
        begun, events, hidden_states = loop.prefill(
            parts.target, parts.acceptor, parts.drafter.needs, rows, requests
        )
        hidden_states = HiddenStates.concatenate([*read, hidden_states])
        self._batch.state = loop.start(parts, rows, begun, hidden_states, self._batch.state)
        self._join(parts.target, rows, entries, events, hidden_states)
