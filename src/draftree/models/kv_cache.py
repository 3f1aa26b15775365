"""A KV cache with explicit slots: committed tokens first, then scratch slots of a step.

Shapes: R sequences, H key-value heads, S slots, L layers. Slots [0, length) of a sequence are
committed. Later slots are scratch memory of the current step; the mask hides them from every later
step. Layers with a recurrent state keep the same contract in another way (`recurrent/`).
"""

import copy
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from draftree.kernels.cache_slots import move_slots, next_slots
from draftree.models.accelerate_dispatch import move_to_device
from draftree.models.forward_batch import ForwardBatch, hide_far, write_mask, write_masks
from draftree.models.recurrent.recurrences import Stash
from draftree.models.recurrent.state_cache import Final, Pass, States
from draftree.models.shape_buckets import ShapeBuckets
from draftree.tree import Ints
from draftree.utils.hardware import to_device

Pages = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of n tokens, one pair for each distinct layer shape.

Each tensor is [L, H, n, width], where L counts the layers of that shape.
"""
ALIGNMENT = 64
"""Bytes of a cache line of the processor, at which tensors begin."""


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's keys and values for one token.

    Attributes:
        heads: number of key-value heads; 0 if the layer stores none.
        key: the width of a key; 0 if the layer stores no keys.
        value: the width of a value; 0 if the layer stores no values.
        device: the layer's device; None for the device of the cache.
    """

    heads: int
    key: int
    value: int
    device: torch.device | None = None


class SlotCache:
    """Preallocated keys and values of all layers.

    Layers of one shape share one tensor, so that a commit moves the slots of all of them at once.

    Args:
        shapes: the shape of each layer's keys and values.
        rows: R, the number of sequences.
        dtype: the dtype of keys and values.
        device: the device of the tensors; a layer's own device takes precedence.
        states: the recurrent states; None if no layer has one.
        ladder: the sizes to which passes are padded.

    Attributes:
        lengths: [R] number of committed tokens of each sequence; their positions are 0 … length −
            1.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        states: States | None = None,
        ladder: ShapeBuckets = ShapeBuckets(),
    ) -> None:
        self.shapes = tuple(shapes)
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self.states = states
        self.lengths: Ints = np.zeros(rows, np.int64)
        self.ladder, self._masks = ladder, dict[bool, Tensor]()
        self._more = dict[int, int]()
        kinds = list(dict.fromkeys(self.shapes))
        self._place = [
            (kinds.index(s), [i for i, t in enumerate(self.shapes) if t == s].index(layer))
            for layer, s in enumerate(self.shapes)
        ]
        self._groups = [
            tuple(
                self._zeros(self.shapes.count(s), s.heads, 0, width, s.device or device)
                for width in (s.key, s.value)
            )
            for s in kinds
        ]
        self._stored = self._on_host()

    def _on_host(self) -> list[NDArray[np.uint8]]:
        """Return NumPy views of the bytes of keys and values, one for each tensor.

        The list is empty if a tensor is not on a CPU.
        """
        tensors = list(itertools.chain.from_iterable(self._groups))
        if any(t.device.type != "cpu" for t in tensors):
            return []
        return [t.view(torch.uint8).numpy() for t in tensors]

    def _zeros(
        self, layers: int, heads: int, slots: int, width: int, device: torch.device
    ) -> Tensor:
        # Zeros, not empty memory: a masked slot still multiplies a weight of 0, and 0 · NaN is NaN.
        shape = (layers, self.rows, heads, slots, width)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        # `torch.zeros` writes all of the memory. The system's own zeros take memory when they are
        # first used, and most slots of a cache are not used for long.
        size = math.prod(shape) * self.dtype.itemsize
        memory = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + size].view(self.dtype).view(shape)

    @property
    def capacity(self) -> int:
        """Return the number of slots of each sequence."""
        return int(self._groups[0][0].shape[3]) if self._groups else 0

    @property
    def place(self) -> Hashable:
        """Return a key that identifies the tensors; it changes when the cache grows."""
        tensors = itertools.chain.from_iterable(self._groups)
        return tuple((t.data_ptr(), t.shape) for t in tensors), self.dtype

    @property
    def state_bytes(self) -> int:
        """Return the bytes of recurrent states and their snapshots; 0 if no layer has a state."""
        return 0 if self.states is None else self.states.bytes

    def reserve(self, slots: int) -> None:
        """Increase the capacity to at least `slots` slots for each sequence, and keep the contents.

        The capacity grows by at least half, so that it grows rarely.
        """
        if slots <= self.capacity:
            return
        grown = self.ladder.capacity(max(slots, self.capacity * 3 // 2))
        for i, pair in enumerate(self._groups):
            new = tuple(
                self._zeros(t.shape[0], t.shape[2], grown, t.shape[4], t.device) for t in pair
            )
            for old, fresh in zip(pair, new, strict=True):
                fresh[:, :, :, : old.shape[3]] = old
            self._groups[i] = (new[0], new[1])
        self._stored = self._on_host()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [R, H, S, width] of one layer, as views."""
        group, place = self._place[index]
        keys, values = self._groups[group]
        return keys[place], values[place]

    def more(self, index: int) -> int:
        """Return how many of the following layers come right after this one in the same tensor."""
        if index not in self._more:
            group, place = self._place[index]
            behind = itertools.takewhile(
                lambda pair: pair[1] == (group, place + 1 + pair[0]),
                enumerate(self._place[index + 1 :]),
            )
            self._more[index] = sum(1 for _ in behind)
        return self._more[index]

    def shift_layers(self, by: int) -> "SlotCache":
        """Return a view in which layer i has the keys and values of layer i + `by`.

        Layer i keeps its own keys and values if layer i + `by` has another shape. Indices beyond
        the first or last layer stand for that layer.
        """
        view, top = copy.copy(self), len(self.shapes) - 1
        others = [min(max(layer + by, 0), top) for layer in range(top + 1)]
        same = [
            self.shapes[other] == shape for other, shape in zip(others, self.shapes, strict=True)
        ]
        view._place = [
            self._place[o if s else i] for i, (o, s) in enumerate(zip(others, same, strict=True))
        ]
        view._more = {}
        return view

    def writer(self, starts: Ints, n: int, at: Pass | None = None) -> "Writer":
        """Return the transformers cache of one forward pass of n tokens for each sequence.

        Args:
            starts: [R] the slot of each sequence's first token in the pass.
            n: the number of tokens of each sequence.
            at: the pass that stores the recurrent states; None if no layer has one.
        """
        return Writer(self, starts, n, self._end(int(starts.max()) + n), at)

    def mask(self, batch: ForwardBatch, window: int | None = None) -> Tensor:
        """Return the additive mask [R, 1, n, S] of a padded pass.

        The mask of a draft tree reuses the memory of the previous mask with the same kind of
        window. It is valid until the next such call. The mask of a prompt has memory of its own.

        Args:
            batch: the tokens of the pass.
            window: number of positions that a token sees; all by default.
        """
        shape = self.rows, 1, batch.width, self._end(int(batch.starts.max()) + batch.width)
        full = self._mask_memory(math.prod(shape), batch.whole, window is None).view(shape)
        masks = list(full[:, 0])
        # Recorded passes use the code path of a GPU on any device.
        if self.device.type == "cpu" and not self.ladder.few:
            write_masks(masks, batch, self.lengths)
        else:
            write_mask(full, batch, self.lengths)
        if window is not None:
            hide_far(masks, batch, self.lengths, window)
        return full

    def packed_masks(self, batch: ForwardBatch, window: int | None = None) -> Tensor:
        """Return the additive masks [n_r, S_r] of all sequences, joined in one flat tensor.

        Args:
            batch: the tokens; each sequence sees the slots up to its last token.
            window: number of positions that a token sees; all by default.
        """
        shapes = list(zip(batch.counts.tolist(), batch.ends.tolist(), strict=True))
        sizes = [n * slots for n, slots in shapes]
        memory = self._mask_memory(sum(sizes), batch.whole, window is None)
        parts = zip(memory.split(sizes), shapes, strict=True)
        masks = [part.view(shape) for part, shape in parts]
        write_masks(masks, batch, self.lengths)
        if window is not None:
            hide_far(masks, batch, self.lengths, window)
        return memory

    def _mask_memory(self, size: int, whole: bool, full: bool) -> Tensor:
        memory = self._masks.get(full)
        if whole or memory is None or len(memory) < size:
            # The memory must be writable outside of inference mode, too.
            with torch.inference_mode(False):
                memory = torch.empty(size, dtype=self.dtype, device=self.device)
        if not whole:
            self._masks[full] = memory
        return memory[:size]

    def _end(self, used: int) -> int:
        """Return the number of slots that a pass sees, after reserving `used` slots.

        This is `used`, or the whole capacity if passes run at few fixed sizes.
        """
        self.reserve(used)
        return self.capacity if self.ladder.few else used

    def keep(self, row: int, slots: Ints) -> None:
        """Commit scratch slots after the committed tokens of a sequence.

        Args:
            row: the sequence.
            slots: [A] the slots, in the order in which they are committed.
        """
        self.commit_tokens(np.full(len(slots), row), np.ascontiguousarray(slots, np.int64))

    def commit_tokens(self, rows: Ints, slots: Ints) -> None:
        """Commit slots of several sequences after their committed tokens, all at once.

        Args:
            rows: [A] the sequence of each slot; the slots of one sequence are adjacent.
            slots: [A] in the order in which they are committed; none of them was committed before.
        """
        if self.states is not None:
            for row in np.unique(rows).tolist():
                start = int(self.lengths[row])
                self.states.keep(row, start, slots[rows == row] - start)
        places, self.lengths = next_slots(rows, self.lengths)
        if self._stored:
            for stored in self._stored:
                move_slots(stored, rows, slots, places)
        elif not np.array_equal(slots, places):
            self._move(rows, slots, places)

    def _move(self, rows: Ints, old: Ints, new: Ints) -> None:
        """Copy slots [A] of sequences on a device; all of them are read before any is written."""
        if self.rows == 1:  # the general path takes three times as long
            at, first = to_device(old, self.device), int(new[0])
            for t in itertools.chain.from_iterable(self._groups):
                t[:, 0, :, first : first + len(old)] = t[:, 0].index_select(2, at.to(t.device))
            return
        apart = old != new  # the root and often nodes after it are in their places already
        rows = rows[apart]
        old = old[apart]
        new = new[apart]
        each, source, to = (to_device(i, self.device) for i in (rows, old, new))
        for t in itertools.chain.from_iterable(self._groups):
            i, j, k = (x.to(t.device) for x in (each, source, to))
            t[:, i, :, k] = t[:, i, :, j]

    def insert(self, layer: int, rows: Ints, slots: Ints, keys: Tensor, values: Tensor) -> None:
        """Commit keys and values [H, T, width] that were computed outside this cache.

        Token t is stored in `slots[t]` of `rows[t]`. The slots of each sequence begin where its
        committed tokens end.
        """
        self.reserve(int(slots.max()) + 1)
        for stored, new in zip(self.layer(layer), (keys, values), strict=True):
            if not new.numel():  # values of width 0, where a cache stores features alone
                continue
            if self.rows == 1:
                stored[0, :, int(slots[0]) : int(slots[-1]) + 1] = new
            else:
                at = to_device(rows, stored.device), slice(None), to_device(slots, stored.device)
                stored[at] = new.transpose(0, 1)
        np.maximum.at(self.lengths, rows, slots + 1)

    def copy_sequences(self, rows: Ints, spare: int = 0) -> "SlotCache":
        """Return a copy of the committed tokens of selected sequences.

        Args:
            rows: the sequences; −1 stands for an empty one.
            spare: the number of further tokens that each sequence of the copy has space for.
        """
        states = None if self.states is None else self.states.copy_sequences(rows)
        part = SlotCache(self.shapes, len(rows), self.dtype, self.device, states, self.ladder)
        there = np.flatnonzero(rows >= 0)
        part.lengths[there] = self.lengths[rows[there]]
        part.reserve(int(part.lengths.max()) + spare)
        if there.size:
            part._copy(self, there, rows[there])
        return part

    def replace_sequences(self, rows: Ints, part: "SlotCache") -> None:
        """Replace some sequences by the sequences of another cache; all others stay unchanged.

        Args:
            rows: [K] the sequences that are replaced.
            part: a cache of K sequences.
        """
        self.reserve(int(part.lengths.max()))
        self._copy(part, rows, np.arange(len(rows)))
        if self.states is not None and part.states is not None:
            self.states.replace_sequences(rows, part.states)
        self.lengths[rows] = part.lengths

    @torch.inference_mode()
    def copy_slots(self, row: int, start: int, stop: int) -> Pages:
        """Return a copy of a sequence's keys and values in slots `start` to `stop` − 1."""
        return tuple(
            (keys[:, row, :, start:stop].clone(), values[:, row, :, start:stop].clone())
            for keys, values in self._groups
        )

    @torch.inference_mode()
    def paste(self, row: int, start: int, pages: Pages) -> None:
        """Commit copied keys and values from slot `start` on.

        The committed tokens must end at that slot. Recurrent states are not copied.
        """
        stop = start + (pages[0][0].shape[2] if pages else 0)
        self.reserve(stop)
        for mine, theirs in zip(self._groups, pages, strict=True):
            for new, old in zip(mine, theirs, strict=True):
                new[:, row, :, start:stop] = old
        self.lengths[row] = stop

    @torch.inference_mode()
    def _copy(self, other: "SlotCache", to: Ints, rows: Ints) -> None:
        for into, row in zip(to.tolist(), rows.tolist(), strict=True):
            slots = int(other.lengths[row])
            if not slots:
                continue
            # Slices: an index tensor takes ten times as long on a CPU.
            for mine, theirs in zip(self._groups, other._groups, strict=True):
                for new, old in zip(mine, theirs, strict=True):
                    new[:, into, :, :slots] = old[:, row, :, :slots]

    def truncate(self, lengths: Ints) -> Ints:
        """Discard all but the first `lengths[r]` committed tokens of each sequence.

        A recurrent state can only return to a snapshot. A sequence with such a state may therefore
        keep fewer tokens than requested.

        Returns:
            [R] the number of tokens that each sequence keeps.
        """
        left = np.minimum(self.lengths, lengths)
        if self.states is not None:
            for row in np.flatnonzero(left < self.lengths).tolist():
                left[row] = self.states.back(row, int(left[row]))
        self.lengths = left
        return left.copy()

    def mark(self) -> None:
        """Take a snapshot of the recurrent states, to which `truncate` can return later.

        Without recurrent states, `truncate` can return to any length.
        """
        if self.states is not None:
            self.states.mark(self.lengths)

    @property
    def reusable(self) -> Ints:
        """Return [R] the number of leading tokens that a later prompt can reuse."""
        clamped = self.states is not None and self.states.clamped
        return (
            np.minimum(self.lengths, self.states.read)
            if self.states is not None and clamped
            else self.lengths
        )


@dataclass(frozen=True)
class KVView:
    """The memory of one layer's keys and values in a forward pass.

    Attributes:
        keys: [R, H, S, width] the keys.
        values: [R, H, S, width] the values.
        starts: [R] the slot of each sequence's first token; 0 by default.
        slots: number of slots that the pass sees.
        more: number of following layers stored at a constant stride.
        of_keys: stride from this layer's keys to the next layer's keys, in elements.
        of_values: stride from this layer's values to the next layer's values, in elements.
    """

    keys: Tensor
    values: Tensor
    starts: Ints | None
    slots: int
    more: int = 0
    of_keys: int = 0
    of_values: int = 0


class Writer(Cache):
    """Give one forward pass of a transformers model access to a `SlotCache`.

    Each layer stores the keys and values of the pass's tokens. It gets them back together with the
    keys and values of all earlier tokens.

    Args:
        cache: the cache that is written to.
        starts: [R] the slot of each sequence's first token in the pass.
        n: the number of tokens of each sequence.
        end: the number of slots that the pass sees.
        at: the pass that stores the recurrent states; None if no layer has one.

    Attributes:
        end: the number of slots that the pass sees.
    """

    def __init__(
        self, cache: SlotCache, starts: Ints, n: int, end: int, at: Pass | None = None
    ) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self.end = end
        self._pass = at
        self._starts = starts
        self._stop = int(starts[0]) + n
        self._uniform = bool((starts == starts[0]).all())
        self._start, self._n = int(starts[0]), n
        self._slots: Tensor | None = None
        if cache.ladder.few or not self._uniform:
            self._uniform, self._rows = (
                False,
                torch.arange(cache.rows, device=cache.device)[:, None],
            )

    def at(self, slots: Tensor) -> Self:
        """Set the tensor of slots [R, n] to write to, and return the writer itself."""
        self._slots = slots
        self._rows = torch.arange(len(slots), device=slots.device)[
            :, None
        ]  # a recorded pass uses only its own memory
        return self

    @property
    def slots(self) -> Tensor:
        """Return the slots [R, n] of the tokens, as a tensor on the cache's device.

        They are needed if sizes are padded or if the sequences have different lengths.
        """
        if self._slots is None:  # a caller that knows them already avoids the copy
            self._slots = to_device(self._starts[:, None] + np.arange(self._n), self._cache.device)
        return self._slots

    def within(self, layer: int) -> "KVView | None":
        """Return a view of the memory of a layer's keys and values in this pass.

        Return None if passes are padded to a few sizes, as recorded passes are (see
        `ShapeBuckets`).
        """
        if self._cache.ladder.few:
            return None
        (keys, values), more = self._cache.layer(layer), self._cache.more(layer)
        others = self._cache.layer(layer + 1) if more else (keys, values)
        apart = [
            (b.data_ptr() - a.data_ptr()) // a.element_size()
            for a, b in zip((keys, values), others, strict=True)
        ]
        return KVView(keys, values, self._starts, self.end, more, apart[0], apart[1])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [R, H, n, width] of a layer, and return all that the pass sees.

        Returns:
            Keys and values [R, H, end, width].
        """
        keys, values = self._cache.layer(layer_idx)
        if self._uniform:
            keys[:, :, self._start : self._stop] = key_states
            values[:, :, self._start : self._stop] = value_states
        else:
            rows, slots = (move_to_device(i, keys.device) for i in (self._rows, self.slots))
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of slots before this pass.

        Models read it only if they are given no positions.
        """
        return self._start

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the model calls `update_conv_state` even for a single token.

        Otherwise the model would write to a state itself.
        """

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the model does not write to a state itself; see `get_conv_state`."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = 0) -> bool:
        """Return True, so that no model treats the pass as the beginning of a text."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, because the inputs of convolutions are needed until a commit."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Store a convolution's input, and return the inputs of earlier tokens followed by it.

        The input is [R, C, n], for R sequences, C channels and n tokens.
        """
        assert self._pass is not None
        return self._pass.enter((layer_idx, state_idx), conv_states)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Any:
        """Store a layer's new state for the commit, and return it.

        transformers' layers call this method. The state comes from draftree's functions for
        recurrent layers, and is therefore not a plain tensor.

        Args:
            recurrent_states: the new state.
            layer_idx: index of the layer.
            state_idx: index of the state within the layer.
        """
        assert self._pass is not None
        assert isinstance(recurrent_states, Stash | Final)
        self._pass.leave((layer_idx, state_idx), recurrent_states)
        return recurrent_states
