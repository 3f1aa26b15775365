"""The ancestors of each token of a pass, for layers with a recurrent state.

The state holds everything that is committed. After it, a token's path goes through scratch slots
alone, from its first ancestor to the token itself. Slots are topological: a token's parent comes
before it.

Shapes: R rows, n tokens a row in this pass, M scratch slots up to its last token, K columns of a
convolution.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from draftree.models.forward_batch import ForwardBatch
from draftree.tree import Bools, Ints


@dataclass(frozen=True)
class TreePaths:
    """Describe the tree paths of a forward batch for recurrent layers.

    Attributes:
        seen: [R, n, M] whether a slot is on a token's path; the path includes the token itself.
        parents: [R, M] the slot of the parent of each slot's token; −1 directly after the committed
            text.
        columns: [R, n] the slot of each token.
        widths: [R] number of tokens of each sequence; the rest is padding, which has no ancestors
            and no descendants.
        committed: [R] number of tokens in the state.
        whole: whether the batch is plain text, which is committed as a whole or not at all.
        device: the device of the tensors.
    """

    seen: Bools
    parents: Ints
    columns: Ints
    widths: Ints
    committed: Ints
    whole: bool
    device: torch.device

    @classmethod
    def of(
        cls, feed: ForwardBatch, committed: Ints, earlier: Self | None, device: torch.device
    ) -> Self:
        """Return the paths of a forward batch.

        Args:
            feed: the tokens.
            committed: [R] number of tokens in the states.
            earlier: the paths of the previous pass of the step, which describe earlier scratch
                slots.
            device: the device of the tensors.
        """
        rows, n = len(feed.counts), feed.width
        behind = feed.starts - committed
        columns = behind[:, None] + np.arange(n)
        seen = np.zeros((rows, n, int(columns.max()) + 1), np.bool_)
        for r, visible in enumerate(feed.visible):
            seen[r, : visible.shape[0], : visible.shape[1]] = visible
        row, token = np.indices((rows, n))
        seen[row, token, columns] = False
        parents = np.full((rows, seen.shape[2]), -1, np.int64)
        if earlier is not None:
            known = min(earlier.parents.shape[1], seen.shape[2])
            parents[:, :known] = earlier.parents[:, :known]
        latest = seen.shape[2] - 1 - seen[:, :, ::-1].argmax(2)
        parents[row, columns] = np.where(seen.any(2), latest, -1)
        seen[row, token, columns] = True
        widths = np.array([len(visible) for visible in feed.visible], np.int64)
        found = cls(seen, parents, columns, widths, committed.copy(), feed.whole, device)
        assert found._are_paths(), "a token sees two branches, of which a state can hold one"
        return found

    def _are_paths(self) -> bool:
        """Return whether each token sees exactly its parent's visible tokens and itself."""
        above = np.take_along_axis(self.parents, self.columns, 1)
        at = above - self.columns[:, :1]  # the parent's place in this pass
        inside = at >= 0
        rows = np.arange(len(at))[:, None]
        theirs = self.seen[rows, np.where(inside, at, 0)]
        mine = self.seen.copy()
        mine[rows, np.arange(at.shape[1]), self.columns] = False
        return bool((mine == theirs)[inside].all() and not mine[above < 0].any())

    @property
    def later(self) -> bool:
        """Return whether earlier passes of this step left tokens in scratch slots."""
        return bool(self.columns[:, 0].any())

    @property
    def slots(self) -> int:
        """Return M, the number of scratch slots of a sequence."""
        return int(self.seen.shape[2])

    @cached_property
    def mask(self) -> Tensor:
        """Return `seen` as a tensor on the device."""
        return torch.from_numpy(self.seen).to(self.device)

    @cached_property
    def at(self) -> Tensor:
        """Return `columns` as a tensor on the device."""
        return torch.from_numpy(self.columns).to(self.device)

    @cached_property
    def padding(self) -> Tensor:
        """Return a mask [R, n] on the device that is True at padding."""
        return torch.from_numpy(np.arange(self.seen.shape[1]) >= self.widths[:, None]).to(
            self.device
        )

    @property
    def is_ragged(self) -> bool:
        """Return whether any sequence has padding."""
        return bool((self.widths < self.seen.shape[1]).any())

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return, level by level, the sequences, slots and parents' slots of all slots' tokens.

        Tokens of earlier passes of the step are included.
        """
        depth = np.zeros_like(self.parents)
        for slot in range(self.slots):
            above = self.parents[:, slot]
            depth[:, slot] = np.where(
                above < 0, 0, np.take_along_axis(depth, np.maximum(above, 0)[:, None], 1)[:, 0] + 1
            )
        found = []
        for level in range(int(depth.max()) + 1):
            rows, slots = np.nonzero(depth == level)
            each = (rows, slots, self.parents[rows, slots])
            found.append(tuple(torch.from_numpy(a).to(self.device) for a in each))
        return [(rows, slots, parents) for rows, slots, parents in found]

    def windows(self, k: int) -> Tensor:
        """Return the last K columns on each token's path, as indices [K, R n].

        For each sequence, indices count its K committed columns first and then its M slots.
        """
        if k in self._windows:
            return self._windows[k]
        found = np.empty((k, *self.columns.shape), np.int64)
        begins = np.arange(len(self.columns))[:, None] * (k + self.slots) + k
        now = self.columns  # negative: so many committed columns back from the end, less one
        for back in range(k):
            found[k - 1 - back] = begins + now
            above = np.take_along_axis(self.parents, np.maximum(now, 0), 1)
            now = np.where(now >= 0, above, now - 1)
        return self._windows.setdefault(k, torch.from_numpy(found.reshape(k, -1)).to(self.device))

    @cached_property
    def _windows(self) -> dict[int, Tensor]:
        """Return the cached results of `windows`, by K."""
        return {}

    def place(self, old: Tensor | None, new: Tensor) -> Tensor:
        """Return values [R, H, M, c] of all M slots, from this pass and earlier ones.

        The values may be any quantity of c numbers for each token and head.

        Args:
            old: [R, H, …, c] the values from earlier passes; None if there are none.
            new: [R, H, n, c] the values of the n tokens of this pass.
        """
        if not self.later:
            return new
        rows, heads, n, width = new.shape
        out = new.new_zeros(rows, heads, self.slots, width)
        if old is not None:
            known = min(old.shape[2], self.slots)
            out[:, :, :known] = old[:, :, :known]
        return out.scatter(2, self.at[:, None, :, None].expand(rows, heads, n, width), new)
