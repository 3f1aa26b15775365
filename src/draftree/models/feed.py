"""The input of a forward pass: tokens, positions, and which tokens see which."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftree.tree import Bools, Ints


class Fed(ABC):
    """The tokens of one forward pass, wherever it is known what they are.

    Attributes:
        tokens: [R, n] ids; rows with fewer tokens are padded with anything.
        starts: [R] the slot of each row's first token.
        whole: whether this is plain text, see `Feed`.
    """

    tokens: Tensor
    starts: Ints
    whole: bool = False

    @abstractmethod
    def widened(self, width: int) -> "Fed":
        """The feed in a pass of `width` tokens a row; what pads it is read by nobody."""

    @abstractmethod
    def places(self, device: torch.device) -> Tensor:
        """[R, n] the positions of its tokens, on the device of the pass."""

    @abstractmethod
    def write_mask(self, mask: Tensor, committed: Ints) -> None:
        """Writes the additive mask of a feed for layers that see the whole text.

        Args:
            mask: [R, 1, n, S] to be written, where it lies; S at least as far as the feed's last token.
            committed: [R] tokens before it that all see.
        """

    @abstractmethod
    def hide_far(self, mask: Tensor, committed: Ints, window: int) -> None:
        """Hides in a mask that `write_mask` wrote what lies a window or more of positions before each token."""


@final
@dataclass(frozen=True)
class Feed(Fed):
    """The tokens of one forward pass, as the host knows them.

    Attributes:
        tokens: [R, n] ids; rows with fewer tokens are padded with anything.
        positions: [R, n] position ids.
        starts: [R] the slot of each row's first token.
        visible: for each row, [n_r, m_r] whether its token i sees scratch slot j, where scratch slot 0 is the first
            slot behind the row's committed ones and m_r = starts[r] + n_r − committed. Committed slots are seen by all.
        scratch_positions: for each row, [m_r] the positions of its scratch slots.
        reach: [R] the length of each row's text, where rotary frequencies change with it; a prompt read in parts has
            those of the whole from its first part on. By default a text ends with the last token fed.
        whole: whether this is plain text, of which each row's tokens are committed all or not at all. Layers that fold the
            text into a state then read it as the model reads a prompt; else they keep what each path needs, even of a chain.
    """

    tokens: Tensor
    positions: Ints
    starts: Ints
    visible: Sequence[Bools]
    scratch_positions: Sequence[Ints]
    reach: Ints | None = None
    whole: bool = False

    @classmethod
    def packed(
        cls,
        rows: Sequence[Ints],
        positions: Sequence[Ints],
        starts: Ints,
        visible: Sequence[Bools],
        scratch_positions: Sequence[Ints],
        device: torch.device,
    ) -> Self:
        """The feed of ragged rows: `rows[r]` holds the token ids of row r."""
        n = max(1, max(len(t) for t in rows))
        tokens, places = np.zeros((len(rows), n), np.int64), np.zeros((len(rows), n), np.int64)
        for r, (ids, at) in enumerate(zip(rows, positions, strict=True)):
            tokens[r, : len(ids)], places[r, : len(ids)] = ids, at
        return cls(torch.from_numpy(tokens).to(device), places, starts, visible, scratch_positions)

    @classmethod
    def chains(cls, rows: Sequence[Ints], starts: Ints, device: torch.device) -> Self:
        """The feed of plain text behind each row's committed tokens, as of a prompt; it is committed whole or not at all."""
        positions = [s + np.arange(len(t)) for s, t in zip(starts.tolist(), rows, strict=True)]
        visible = [np.tri(len(t), dtype=np.bool_) for t in rows]
        return replace(cls.packed(rows, positions, starts, visible, positions, device), whole=True)

    def widened(self, width: int) -> Self:
        more = width - self.tokens.shape[1]
        places = np.pad(self.positions, ((0, 0), (0, more)))
        return replace(self, tokens=pad(self.tokens, (0, more)), positions=places) if more else self

    def places(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.positions).to(device)

    def write_mask(self, mask: Tensor, committed: Ints) -> None:
        mask.fill_(torch.finfo(mask.dtype).min)
        for r, seen in enumerate(self.visible):
            length, (wide, deep) = int(committed[r]), seen.shape
            mask[r, 0, :, :length] = 0
            mask[r, 0, :wide, length : length + deep].masked_fill_(torch.from_numpy(seen).to(mask.device), 0)
            mask[r, 0, wide:] = 0  # padding sees something, lest it becomes NaN and, as a masked value, makes NaN of others

    def hide_far(self, mask: Tensor, committed: Ints, window: int) -> None:
        lowest = torch.finfo(mask.dtype).min
        for r, (seen, scratch) in enumerate(zip(self.visible, self.scratch_positions, strict=True)):
            length, wide = int(committed[r]), len(seen)
            if not wide:
                continue
            nearest = self.positions[r, :wide, None] - window + 1  # of the positions that each token sees
            low, high = (int(cut.clip(0, length)) for cut in (nearest.min(), nearest.max()))
            mask[r, 0, :wide, :low] = lowest
            for at, keys in ((low, np.arange(low, high)), (length, scratch)):  # where tokens differ: no more than they span
                far = torch.from_numpy(keys < nearest).to(mask.device)
                mask[r, 0, :wide, at : at + len(keys)].masked_fill_(far, lowest)


@final
@dataclass(frozen=True)
class DeviceFeed(Fed):
    """The tokens of one forward pass that are known on the device alone; the host knows how many there are.

    Attributes:
        tokens: [R, n] ids.
        positions: [R, n] position ids.
        starts: [R] the slot of each row's first token.
        visible: [R, n, m] whether token i sees scratch slot j.
        scratch_positions: [R, m] the positions of these slots.
        first: [R] the first of these slots; those before it are seen by all.
    """

    tokens: Tensor
    positions: Tensor
    starts: Ints
    visible: Tensor
    scratch_positions: Tensor
    first: Tensor

    def widened(self, width: int) -> "DeviceFeed":
        more = (0, width - self.tokens.shape[1])
        return replace(self, tokens=pad(self.tokens, more), positions=pad(self.positions, more))

    def places(self, device: torch.device) -> Tensor:
        return self.positions

    def write_mask(self, mask: Tensor, committed: Ints) -> None:
        wide, place = self.visible.shape[1], self._place(mask)
        own = place.clamp(0, self.visible.shape[2] - 1)[:, None].expand(-1, wide, -1)
        seen = self.visible.gather(2, own) & (place < self.visible.shape[2])[:, None] | (place < 0)[:, None]
        mask.zero_()  # padding sees all
        mask[:, 0, :wide].masked_fill_(~seen, torch.finfo(mask.dtype).min)

    def hide_far(self, mask: Tensor, committed: Ints, window: int) -> None:
        wide, place = self.visible.shape[1], self._place(mask)
        scratch = self.scratch_positions.gather(1, place.clamp(0, self.visible.shape[2] - 1))
        keys = torch.where(place < 0, torch.arange(mask.shape[-1], device=mask.device), scratch)
        far = keys[:, None] < self.positions[:, :wide, None] - window + 1
        mask[:, 0, :wide].masked_fill_(far, torch.finfo(mask.dtype).min)

    def _place(self, mask: Tensor) -> Tensor:
        """[R, S] which scratch slot each slot is; negative of those before them."""
        return torch.arange(mask.shape[-1], device=mask.device) - self.first[:, None]
