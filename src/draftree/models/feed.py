"""The input of a forward pass: tokens, positions, and which tokens see which."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftree.kernels.laying import hide
from draftree.tree import Bools, Ints


@dataclass(frozen=True)
class Feed:
    """The tokens of one forward pass.

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
    kind = None

    @property
    def width(self) -> int:
        """n, the tokens of a row, padding among them."""
        return self.tokens.shape[1]

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
        if len(rows) == 1 and len(rows[0]):
            one = torch.from_numpy(rows[0][None])
            return cls(one if device.type == "cpu" else one.to(device), positions[0][None], starts, visible, scratch_positions)
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
        """The feed in a pass of `width` tokens a row; what pads it is read by nobody."""
        more = width - self.tokens.shape[1]
        places = np.pad(self.positions, ((0, 0), (0, more)))
        return replace(self, tokens=pad(self.tokens, (0, more)), positions=places) if more else self


Laid = tuple[Tensor, Tensor, Tensor, Tensor]
"""Ids [R, n]; the positions of scratch slots [R, m], the last n being the tokens' own; whether token i sees scratch slot j,
[R, n, m]; the first of these slots [R, 1]: those before it are seen by all."""


@dataclass(frozen=True)
class DeviceFeed:
    """The tokens of one forward pass that are known on the device alone; the host knows how many there are, and where they lie.

    Attributes:
        count: n, tokens a row.
        width: those of the pass, padded.
        starts: [R] the slot of each row's first token.
        given: what the tokens are made of, by name.
        kind: what else they are made of.
        make: the tokens, of what is given.
    """

    whole = False
    count: int
    width: int
    starts: Ints
    given: Mapping[str, Tensor]
    kind: Hashable
    make: Callable[[Mapping[str, Tensor]], Laid]

    def widened(self, width: int) -> Self:
        """The feed in a pass of `width` tokens a row; what pads it is read by nobody."""
        return replace(self, width=width)

    def laid(self, given: Mapping[str, Tensor], slots: int, dtype: torch.dtype, window: int | None) -> dict[str, Tensor]:
        """Tokens, positions, slots and additive masks [R, 1, width, S] of a pass that sees so many slots, by name."""
        ids, places, visible, first = self.make(given)
        deep, more = visible.shape[2], (0, self.width - self.count)
        slot = torch.arange(slots, device=ids.device)
        place = slot - first  # [R, S] which scratch slot each slot is; negative of those before them
        inside = place.clamp(0, deep - 1)
        seen = visible.gather(2, inside[:, None].expand(-1, self.count, -1)) & (place < deep)[:, None] | (place < 0)[:, None]
        masks, positions = {"full": seen}, places[:, -self.count :]
        if window is not None:
            keys = torch.where(place < 0, slot, places.gather(1, inside))
            masks["sliding"] = seen & (keys[:, None] > positions[..., None] - window)
        hidden = {name: pad(~each, (0, 0, *more))[:, None] for name, each in masks.items()}  # padding sees all
        nothing, lowest = torch.zeros((), dtype=dtype, device=ids.device), torch.finfo(dtype).min
        return {
            "tokens": pad(ids, more), "positions": pad(positions, more),
            "slots": first + deep - self.count + torch.arange(self.width, device=ids.device),
            **{name: nothing.masked_fill(each, lowest) for name, each in hidden.items()},
        }  # fmt: skip


def write_mask(mask: Tensor, feed: Feed, committed: Ints) -> Tensor:
    """Writes the additive mask of a feed for layers that see the whole text; returns it.

    Args:
        mask: [R, 1, n, S] to be written, where it lies; S at least as far as the feed's last token.
        feed: of n tokens a row.
        committed: [R] tokens before it that all see.
    """
    mask.fill_(torch.finfo(mask.dtype).min)
    for r, seen in enumerate(feed.visible):
        length, (wide, deep) = int(committed[r]), seen.shape
        mask[r, 0, :, :length] = 0
        mask[r, 0, :wide, length : length + deep].masked_fill_(torch.from_numpy(seen).to(mask.device), 0)
        mask[r, 0, wide:] = 0  # padding sees something, lest it becomes NaN and, as a masked value, makes NaN of others
    return mask


def write_mask_here(mask: Tensor, feed: Feed, committed: Ints) -> Tensor:
    """The same for a mask that lies on the host, by a call of machine code for each row."""
    kind, lowest = _bits(mask.dtype)
    bits = mask.view(kind).numpy()
    for r, seen in enumerate(feed.visible):
        hide(bits[r, 0], seen, int(committed[r]), lowest)
    return mask


@cache
def _bits(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """A whole number's dtype of the same size, and the bits of the least number as one."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return kind, int(torch.tensor([torch.finfo(dtype).min], dtype=dtype).view(kind).numpy()[0])


def hide_far(mask: Tensor, feed: Feed, committed: Ints, window: int) -> Tensor:
    """Hides in a mask that `write_mask` wrote what lies a window or more of positions before each token; returns it."""
    lowest = torch.finfo(mask.dtype).min
    for r, (seen, scratch) in enumerate(zip(feed.visible, feed.scratch_positions, strict=True)):
        length, wide = int(committed[r]), len(seen)
        if not wide:
            continue
        nearest = feed.positions[r, :wide, None] - window + 1  # of the positions that each token sees
        low, high = (int(cut.clip(0, length)) for cut in (nearest.min(), nearest.max()))
        mask[r, 0, :wide, :low] = lowest
        for at, keys in ((low, np.arange(low, high)), (length, scratch)):  # where tokens differ: no more than they span
            far = torch.from_numpy(keys < nearest).to(mask.device)
            mask[r, 0, :wide, at : at + len(keys)].masked_fill_(far, lowest)
    return mask
