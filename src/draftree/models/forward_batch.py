"""The inputs of a forward pass: tokens, positions, and the attention mask."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from draftree.kernels.pass_layout import hide
from draftree.tree import Bools, Ints
from draftree.utils.hardware import to_device


@dataclass(frozen=True)
class Chunk:
    """Hold a part of a prompt that is read in the same pass as the draft trees of other sequences.

    Attributes:
        sequence: the slot of its sequence in the batch.
        tokens: [n] ids, which follow the committed tokens of that sequence.
        ends: whether this is the last part of the prompt, so that logits after its last token are
            needed.
    """

    sequence: int
    tokens: Ints
    ends: bool


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one forward pass: all sequences, one after the other, without padding.

    Shapes: R sequences, N tokens of all of them, n of the longest.

    Attributes:
        tokens: [N] ids.
        positions: [N] position ids.
        counts: [R] the tokens of each sequence.
        starts: [R] the slot of each sequence's first token.
        visible: for each sequence r a matrix [n_r, m_r]: whether its token i sees scratch slot j.
            n_r is its number of tokens. Scratch slot 0 is the first slot after the committed slots,
            which all tokens see, and m_r = starts[r] + n_r − committed.
        scratch_positions: for each sequence r an array [m_r]: the positions of its scratch slots.
        reach: [R] the length of each text, for models whose rotary frequencies depend on it. For a
            prompt that is read in parts, it is the length of the whole prompt. By default a text
            ends with its last token in this batch.
        whole: whether this is plain text rather than draft trees. A sequence's tokens are then
            committed either all or not at all, and layers with a recurrent state read them as the
            model reads a prompt. Otherwise these layers store an update for each token, even in a
            chain.
        least: the least number of tokens to which a padded pass pads each sequence.
    """

    tokens: Tensor
    positions: Ints
    counts: Ints
    starts: Ints
    visible: Sequence[Bools]
    scratch_positions: Sequence[Ints]
    reach: Ints | None = None
    whole: bool = False
    least: int = 1
    kind = None

    @classmethod
    def from_sequences(
        cls,
        ids: Sequence[Ints],
        positions: Sequence[Ints],
        starts: Ints,
        visible: Sequence[Bools],
        scratch_positions: Sequence[Ints],
        device: torch.device,
    ) -> Self:
        """Return the batch of sequences whose tokens are given as one array for each sequence.

        Args:
            ids: `ids[r]` holds the tokens of sequence r.
            positions: `positions[r]` holds their positions.
            starts: [R] the slot of each sequence's first token.
            visible: whether token i sees scratch slot j; see the attribute.
            scratch_positions: the positions of scratch slots; see the attribute.
            device: the device of the token ids.
        """
        counts = np.array([len(each) for each in ids], np.int64)
        one = len(ids) == 1
        tokens = to_device(ids[0] if one else np.concatenate(ids), device)
        places = positions[0] if one else np.concatenate(positions)
        return cls(tokens, places, counts, starts, visible, scratch_positions)

    @classmethod
    def forest(
        cls,
        ids: Ints,
        positions: Ints,
        counts: Ints,
        starts: Ints,
        seen: Bools,
        device: torch.device,
    ) -> Self:
        """Return the batch of draft trees, each after the committed tokens of its sequence.

        Args:
            ids: [N] the tokens of all trees.
            positions: [N] their positions.
            counts: [R] the number of nodes of each tree.
            starts: [R] the slot of each tree's root.
            seen: the visibility matrices [n_r, n_r] of all trees, flattened one after another; see
                `kernels.pass_layout.pack_trees`.
            device: the device of the token ids.
        """
        visible = list[Bools]()
        scratch = list[Ints]()
        first = 0
        corner = 0
        for n in counts.tolist():
            visible.append(seen[corner : corner + n * n].reshape(n, n))
            scratch.append(positions[first : first + n])
            first, corner = first + n, corner + n * n
        return cls(to_device(ids, device), positions, counts, starts, visible, scratch)

    @classmethod
    def chains(cls, ids: Sequence[Ints], starts: Ints, device: torch.device) -> Self:
        """Return the batch of plain text after the committed tokens of each sequence.

        All of its tokens are committed later, or none.

        Args:
            ids: `ids[r]` holds the tokens of sequence r.
            starts: [R] the slot of each sequence's first token.
            device: the device of the token ids.
        """
        positions = [s + np.arange(len(t)) for s, t in zip(starts.tolist(), ids, strict=True)]
        visible = [np.tri(len(t), dtype=np.bool_) for t in ids]
        batch = cls.from_sequences(ids, positions, starts, visible, positions, device)
        return replace(batch, whole=True)

    def beside(self, chunks: Sequence[Chunk]) -> tuple[Self, Ints]:
        """Return the batch with chunks of prompts, and the new index [N] of each present token.

        Args:
            chunks: parts of prompts of sequences that have no tokens in this batch. Each token sees
                all earlier tokens of its own sequence.
        """
        counts, visible = self.counts.copy(), list(self.visible)
        scratch = list(self.scratch_positions)
        for chunk in chunks:
            sequence, count = chunk.sequence, len(chunk.tokens)
            counts[sequence] = count
            visible[sequence] = np.tri(count, dtype=np.bool_)
            scratch[sequence] = self.starts[sequence] + np.arange(count)
        sequences, inside = self.places
        firsts = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
        own = firsts[sequences] + inside
        tokens, positions = np.empty((2, int(firsts[-1])), np.int64)
        tokens[own], positions[own] = self.tokens.cpu().numpy(), self.positions
        for chunk in chunks:
            at = slice(firsts[chunk.sequence], firsts[chunk.sequence + 1])
            tokens[at], positions[at] = chunk.tokens, scratch[chunk.sequence]
        placed = to_device(tokens, self.tokens.device)
        batch = type(self)(placed, positions, counts, self.starts, visible, scratch)
        return batch, own

    @property
    def width(self) -> int:
        """Return n, the number of tokens of each sequence in a padded pass."""
        return max(self.least, int(self.counts.max()))

    @property
    def ends(self) -> Ints:
        """Return [R] the slot after each sequence's last token."""
        return self.starts + self.counts

    @cached_property
    def firsts(self) -> Ints:
        """Return [R + 1] the index of each sequence's first token; the last entry is N."""
        return np.concatenate((np.zeros(1, np.int64), self.counts.cumsum()))

    @cached_property
    def places(self) -> tuple[Ints, Ints]:
        """Return each token's sequence [N], and its index [N] among that sequence's tokens."""
        sequences = np.repeat(np.arange(len(self.counts)), self.counts)
        return sequences, np.arange(len(sequences)) - self.firsts[sequences]

    def of(self, sequence: int) -> slice:
        """Return the slice of a sequence's tokens."""
        return slice(int(self.firsts[sequence]), int(self.firsts[sequence + 1]))

    @property
    def full(self) -> bool:
        """Return whether all sequences have the padded width, so that no padding is needed."""
        return len(self.positions) == len(self.counts) * self.width

    @cached_property
    def padded_tokens(self) -> Tensor:
        """Return the token ids, padded with zeros to n tokens for each of R sequences, [R, n]."""
        return self.pad(self.tokens)

    @cached_property
    def padded_positions(self) -> Ints:
        """Return the position ids, padded with zeros to n for each of R sequences, [R, n]."""
        if self.full:
            return self.positions.reshape(len(self.counts), -1)
        padded = np.zeros((len(self.counts), self.width), np.int64)
        padded[self.places] = self.positions
        return padded

    def pad(self, values: Tensor) -> Tensor:
        """Pad values [N, …] of N tokens with zeros to n values for each of R sequences."""
        if self.full:
            return values.view(len(self.counts), self.width, *values.shape[1:])
        padded = values.new_zeros(len(self.counts), self.width, *values.shape[1:])
        padded[tuple(to_device(i, values.device) for i in self.places)] = values
        return padded

    def unpad(self, values: Tensor) -> Tensor:
        """Remove the padding of values [R, n, …], and return the values of the N tokens [N, …]."""
        if len(self.counts) == 1:
            return values[0, : len(self.positions)]
        if self.full and values.shape[1] == self.width:  # a recorded pass may be wider
            return values.flatten(0, 1)
        return values[tuple(to_device(i, values.device) for i in self.places)]

    def with_width(self, width: int) -> Self:
        """Return the batch with a padded width of at least `width` tokens for each sequence."""
        return self if width <= self.width else replace(self, least=width)


@dataclass(frozen=True)
class DeviceBatch(ABC):
    """Hold the tokens of one forward pass whose ids are known only on the device.

    The host knows the number of tokens and their slots. `target/device_tree.py` has such batches.

    Attributes:
        width: the number of tokens of each sequence with padding.
        starts: [R] the slot of each sequence's first token.
        given: the tensors from which the tokens are computed, by name.
        kind: a hashable key. Batches with equal keys compute their tokens from `given` in the same
            way, so that a recorded pass of one can be replayed for the other.
    """

    whole = False
    width: int
    starts: Ints
    given: Mapping[str, Tensor]
    kind: Hashable

    def with_width(self, width: int) -> Self:
        """Return the batch padded to `width` tokens for each sequence; padding is never read."""
        return replace(self, width=width)

    @abstractmethod
    def inputs(
        self, given: Mapping[str, Tensor], slots: int, dtype: torch.dtype, window: int | None
    ) -> dict[str, Tensor]:
        """Return the tokens, positions, slots and masks of a pass, by name.

        The masks are additive, with the shape [R, 1, width, slots].

        Args:
            given: the named tensors of the pass, which include those of the batch's `given`.
            slots: number of cache slots that the pass sees.
            dtype: the dtype of the masks.
            window: number of positions that sliding-window layers see; None if no layer has a
                window.
        """


def write_mask(mask: Tensor, batch: ForwardBatch, committed: Ints) -> Tensor:
    """Write the additive mask of a padded pass, for layers with full attention, and return it.

    Args:
        mask: [R, 1, n, S] the memory to write to; S covers at least the batch's last token.
        batch: the batch of n tokens for each sequence.
        committed: [R] number of committed tokens, which all tokens see.
    """
    mask.fill_(torch.finfo(mask.dtype).min)
    for r, seen in enumerate(batch.visible):
        length, (wide, deep) = int(committed[r]), seen.shape
        mask[r, 0, :, :length] = 0
        shown = to_device(seen, mask.device)
        mask[r, 0, :wide, length : length + deep].masked_fill_(shown, 0)
        mask[r, 0, wide:] = 0  # a fully masked token would give NaN
    return mask


def write_masks(masks: Sequence[Tensor], batch: ForwardBatch, committed: Ints) -> None:
    """Write the additive mask of each sequence, in place and in host memory.

    Args:
        masks: the mask of each sequence. Its rows are tokens of the pass, its columns cache slots;
            it may be larger than necessary.
        batch: the tokens of the pass.
        committed: the number of committed tokens of each sequence.
    """
    for r, (mask, seen) in enumerate(zip(masks, batch.visible, strict=True)):
        kind, lowest = _bits(mask.dtype)
        hide(mask.view(kind).numpy(), seen, int(committed[r]), lowest)


@cache
def _bits(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the integer dtype of the same size, and the lowest number's bits as an integer."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return kind, int(torch.tensor([torch.finfo(dtype).min], dtype=dtype).view(kind).numpy()[0])


def hide_far(masks: Sequence[Tensor], batch: ForwardBatch, committed: Ints, window: int) -> None:
    """Hide from each token the positions that are `window` or more before it, in place.

    Args:
        masks: [n, S] the additive mask of each sequence, which is changed.
        batch: the tokens of the pass.
        committed: the number of committed tokens of each sequence.
        window: the number of positions that a token sees, itself included.
    """
    for r, (mask, scratch) in enumerate(zip(masks, batch.scratch_positions, strict=True)):
        length, positions = int(committed[r]), batch.positions[batch.of(r)]
        if not len(positions):
            continue
        lowest = torch.finfo(mask.dtype).min
        wide, nearest = len(positions), positions[:, None] - window + 1  # that each token sees
        low, high = (int(cut.clip(0, length)) for cut in (nearest.min(), nearest.max()))
        mask[:wide, :low] = lowest
        # Only here do the tokens of the batch differ.
        for at, keys in ((low, np.arange(low, high)), (length, scratch)):
            far = to_device(keys < nearest, mask.device)
            mask[:wide, at : at + len(keys)].masked_fill_(far, lowest)
