"""The cache of recurrent states: committed state, per-token terms of scratch slots, snapshots.

The committed part is a base of fixed size: the last K columns that a convolution read, and the
state. The scratch part is a stash with an entry for each slot, as keys and values have; committing
slots applies their entries to the base. A base cannot be cut, so truncation returns to a snapshot.

Shapes: R rows, n tokens of a pass, C channels of a convolution, K its width, M scratch slots, H
heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from draftree.models.forward_batch import ForwardBatch
from draftree.models.recurrent.recurrences import Stash
from draftree.models.recurrent.token_ancestors import TreePaths
from draftree.tree import Ints

Key = tuple[int, int]
"""A recurrent state: the index of its layer, and its number in that layer."""
SNAPSHOTS, BYTES = 6, 2**30
"""Largest number of snapshots of a sequence, and largest total of their bytes.

The oldest snapshots are discarded first.
"""


@dataclass(frozen=True)
class StateShape:
    """Describe the shape of one recurrent state of a layer.

    Attributes:
        channels: C, the channels of the convolution.
        kernel: K, the width of the convolution.
        state: the shape of one sequence's state; None if the layer is only a convolution.
        dtype: the dtype of the state: float32, or that of the model if it is wider.
    """

    channels: int
    kernel: int
    state: tuple[int, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Final:
    """Hold the states [R, …] after a forward batch that is committed as a whole."""

    last: Tensor

    def to(self, *_: object) -> "Final":
        """Return the object itself; some models cast all values that they hand to their cache."""
        return self


@dataclass(frozen=True)
class Snapshot:
    """Hold the states of a sequence after its first `length` tokens."""

    length: int
    bases: tuple[Tensor, ...]


@dataclass
class Scratch:
    """Hold what the passes of a step stored for tokens that are not committed yet.

    Attributes:
        paths: the tree paths of the latest pass.
        columns: the inputs [R, M, C] of each state's convolution.
        made: for each state a `Stash` with the updates of each token, or the `Final` states after a
            batch that is committed as a whole.
    """

    paths: TreePaths
    columns: dict[Key, Tensor] = field(default_factory=dict)
    made: dict[Key, Stash | Final] = field(default_factory=dict)


class States:
    """Hold the recurrent states of R sequences.

    Args:
        shapes: the shape of each state.
        rows: R, the number of sequences.
        dtype: the dtype of the convolutions' inputs.
        device: the device of the tensors.
        clamped: whether the model bounds Δ, the step size of the recurrence, in a prompt but not
            in decoding.

    Attributes:
        read: [R] the number of leading tokens of each sequence that were read as a prompt is:
            in text order and not as a tree.
    """

    def __init__(
        self,
        shapes: Mapping[Key, StateShape],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        clamped: bool = False,
    ) -> None:
        self.shapes = dict(shapes)
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self.clamped = clamped
        self.tails, self.bases = dict[Key, Tensor](), dict[Key, Tensor]()
        for key, shape in self.shapes.items():
            self.tails[key] = torch.zeros(
                rows, shape.kernel, shape.channels, dtype=dtype, device=device
            )
            if shape.state is not None:
                self.bases[key] = torch.zeros(rows, *shape.state, dtype=shape.dtype, device=device)
        self.read = np.zeros(rows, np.int64)
        self._snapshots: list[list[Snapshot]] = [[] for _ in range(rows)]
        self._scratch: Scratch | None = None

    @property
    def _all(self) -> list[Tensor]:
        return [*self.tails.values(), *self.bases.values()]

    @property
    def bytes_of_row(self) -> int:
        """Return the bytes of one sequence's states, which is also the size of a snapshot."""
        return sum(t.nbytes for t in self._all) // self.rows

    @property
    def bytes(self) -> int:
        """Return the bytes of all states and snapshots."""
        return self.bytes_of_row * (self.rows + sum(map(len, self._snapshots)))

    @property
    def bytes_of_slot(self) -> int:
        """Return the bytes that the latest tree pass stored for each token."""
        if self._scratch is None:
            return 0
        stashes = [made for made in self._scratch.made.values() if isinstance(made, Stash)]
        parts = [
            *self._scratch.columns.values(),
            *(part for stash in stashes for part in stash.parts.values()),
        ]
        return sum(t.nbytes for t in parts) // (self.rows * self._scratch.paths.slots)

    def begin(self, feed: ForwardBatch, committed: Ints) -> "Pass":
        """Begin a pass, and return the object by which layers read and store their states.

        The scratch states of earlier passes are dropped, unless this pass continues them, so that
        its tokens start after scratch slots.

        Args:
            feed: the tokens, their slots and their visibility.
            committed: [R] number of committed tokens of each sequence.
        """
        before = self._scratch
        later = bool((feed.starts > committed).any())
        paths = TreePaths.of(
            feed, committed, before.paths if later and before else None, self.device
        )
        assert not (paths.whole and paths.later), (
            "a text that is kept whole lies right behind the committed tokens"
        )
        self._scratch = Scratch(paths)
        return Pass(self, self._scratch, before if later else None)

    @torch.inference_mode()
    def keep(self, row: int, start: int, slots: Ints) -> None:
        """Update the state of a sequence by a path of scratch slots.

        Args:
            row: the sequence.
            start: the number of committed tokens of the sequence.
            slots: the path, counted from the first scratch slot.
        """
        assert self._scratch is not None
        assert self._scratch.paths.committed[row] == start, "the stash is of another text"
        if not len(slots):
            return
        paths, path = self._scratch.paths, torch.from_numpy(slots).to(self.device)
        assert not paths.whole or len(slots) == paths.widths[row], (
            "a text that is read whole is kept whole"
        )
        for key, columns in self._scratch.columns.items():
            tail = self.tails[key]
            mine = columns[row].index_select(0, path[-tail.shape[1] :])
            tail[row] = torch.cat((tail[row, len(mine) :], mine))
        for key, made in self._scratch.made.items():
            base = self.bases[key]
            if isinstance(made, Final):
                base[row] = made.last[row]
            else:
                made.move(base[row], row, path)
        if paths.whole and self.read[row] == paths.committed[row]:
            self.read[row] += len(slots)

    @torch.inference_mode()
    def mark(self, lengths: Ints) -> None:
        """Take a snapshot of each sequence's states, unless one of the same length exists.

        `back` can return to it.
        """
        for row, length in enumerate(lengths.tolist()):
            mine = self._snapshots[row]
            if length and not (mine and mine[-1].length == length):
                mine.append(Snapshot(length, tuple(t[row].clone() for t in self._all)))
                del mine[:-SNAPSHOTS]
        while self.bytes_of_row * sum(map(len, self._snapshots)) > BYTES:
            max(self._snapshots, key=len).pop(0)

    @torch.inference_mode()
    def back(self, row: int, length: int) -> int:
        """Restore a sequence's latest snapshot of at most `length` tokens, and return its length.

        Without such a snapshot the states are reset to the beginning of the text, and 0 is
        returned.
        """
        mine = [s for s in self._snapshots[row] if s.length <= length]
        self._snapshots[row] = mine
        for i, tensor in enumerate(self._all):
            tensor[row] = mine[-1].bases[i] if mine else 0
        reached = mine[-1].length if mine else 0
        self.read[row] = min(self.read[row], reached)
        return reached

    def copy_sequences(self, rows: Ints) -> Self:
        """Return a copy of some sequences' states and snapshots; −1 stands for an empty one."""
        part = type(self)(self.shapes, len(rows), self.dtype, self.device, self.clamped)
        there = np.flatnonzero(rows >= 0)
        part._copy(self, there, rows[there])
        return part

    def replace_sequences(self, rows: Ints, part: Self) -> None:
        """Replace the states of some sequences by the states of another object's sequences."""
        self._copy(part, rows, np.arange(len(rows)))

    @torch.inference_mode()
    def _copy(self, other: Self, to: Ints, rows: Ints) -> None:
        into, taken = (torch.from_numpy(each).to(self.device) for each in (to, rows))
        for mine, theirs in zip(self._all, other._all, strict=True):
            mine[into] = theirs[taken]
        self.read[to] = other.read[rows]
        for new, old in zip(to.tolist(), rows.tolist(), strict=True):
            self._snapshots[new] = list(other._snapshots[old])


class Pass:
    """Give recurrent layers access to their states during one forward pass.

    Args:
        states: the states of the sequences.
        scratch: receives the tensors that the pass stores.
        before: the tensors that earlier passes of the step stored; None in the first pass.

    Attributes:
        paths: the tree paths of the pass.
    """

    def __init__(self, states: States, scratch: Scratch, before: Scratch | None) -> None:
        self.paths = scratch.paths
        self._states = states
        self._scratch = scratch
        self._before = before
        self._key: Key = (-1, 0)

    def enter(self, key: Key, columns: Tensor) -> Tensor:
        """Store the input [R, C, n] of a layer's convolution, and return it after earlier columns.

        The earlier columns are the last inputs of the committed tokens and the inputs of earlier
        slots. Until the next layer enters, the recurrent functions read and write the state of this
        one.
        """
        self._key, paths = key, self.paths
        old = None if self._before is None else self._before.columns[key][:, None]
        placed = paths.place(old, columns[:, None].mT)[:, 0]
        self._scratch.columns[key] = placed
        return torch.cat((self._states.tails[key], placed), 1).mT

    @property
    def state(self) -> Tensor:
        """Return the committed state [R, …] of the layer whose `enter` was called last."""
        return self._states.bases[self._key]

    @property
    def stashed_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that earlier passes of the step stashed for that layer, by name."""
        made = None if self._before is None else self._before.made[self._key]
        return made.parts if isinstance(made, Stash) else {}

    def leave(self, key: Key, made: Stash | Final) -> None:
        """Store the update of a layer's state by the tokens of the pass."""
        self._scratch.made[key] = made
