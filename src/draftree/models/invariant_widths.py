"""Find batch widths at which an operation is batch invariant, and pad or split to them.

A library chooses its kernels by the width of a pass, and another kernel sums in another order. In
elementwise functions, the last entries of a tensor or of a thread's share are computed by other
code than the rest, unless they fill the processor's lanes. That shows in few entries, so for these
functions widths are chosen such that it cannot happen.

Shapes: n rows of a pass, D and E entries of a row before and after.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.utils.files import Entries
from draftree.utils.padding import pad_end

Made = Tensor | tuple[Tensor, ...]
"""The output of a layer: a tensor with one vector per input vector, or several such tensors.

A router returns several tensors: its scores and its choices.
"""
Rows = Callable[[Tensor], Any]
"""An operation on vectors [n, D]."""
MULTIPLES = (1, 2, 4, 8, 16, 32)
"""Candidates for the least width and for the multiple to which passes are padded."""
BLOCK_WIDTHS = (8, 16, 32)
"""Candidates for the width of blocks; passes are split into blocks if padding does not suffice."""
NARROW_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)
WIDE_WIDTHS = (96, 128, 256)
"""Widths that are compared with the narrow ones.

If a wide pass differs, passes are split into blocks of the largest narrow width.
"""
MIN_COMPARED_ENTRIES, HALF_FACTOR = 1024, 8
"""Number of output entries that are compared at each place of a pass.

In half precision they are `HALF_FACTOR` times as many: half a million entries at 64 places. In
bfloat16, sums of 32 numbers in another order differ about once in 25,000 entries, longer sums more
often (torch 2.13, AVX-512 BF16).
"""
LANES, MAX_SINGLE_THREAD_ENTRIES = 64, 32_768
"""Number of entries that the widest vectorised loop computes together.

`MAX_SINGLE_THREAD_ENTRIES` is the largest number of entries that torch computes with one thread.
"""


@dataclass(frozen=True)
class Widths:
    """Describe the pass widths (numbers of vectors) at which an operation is batch invariant.

    Attributes:
        least: narrower passes are padded to this width.
        multiple: the width of every pass is padded to a multiple of this number.
        most: wider passes are split into blocks of this width; None if every width is stable.
    """

    least: int = 1
    multiple: int = 1
    most: int | None = None

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Return the widths from a dictionary that `asdict` returned.

        Raises:
            UserError: a width is out of range.
        """
        entries = Entries(stored, "widths")
        least, multiple = (entries.get(name, int, 1, least=1) for name in ("least", "multiple"))
        most = entries.get("most", int | None, None, least=1)
        if max(least, multiple, most or 1) > MAX_SINGLE_THREAD_ENTRIES:
            raise UserError(
                f"widths are {least}, {multiple} and {most}, allowed are those up to {MAX_SINGLE_THREAD_ENTRIES}"
            )
        return cls(least, multiple, most)

    def padded_width(self, n: int) -> int:
        """Return the width at which a pass of width n is computed."""
        return -(-max(n, self.least) // self.multiple) * self.multiple

    def is_allowed(self, n: int) -> bool:
        """Return whether a pass of width n needs neither padding nor splitting."""
        return self.padded_width(n) == n and (self.most is None or n <= self.most)

    def apply(self, operation: Rows, rows: Tensor) -> Any:
        """Return the result of an operation on vectors [n, D], whose bits do not depend on n.

        The vectors are padded to a width, or split into parts of a width, at which the operation
        was found to be batch invariant.
        """
        if self.most is not None and len(rows) > self.most:
            return _concatenate([self.apply(operation, part) for part in rows.split(self.most)])
        more = self.padded_width(len(rows)) - len(rows)
        return _part(operation(pad_end(rows, 0, more)), 0, len(rows)) if more else operation(rows)


def _part(made: Made, at: int, n: int) -> Made:
    """Return `n` vectors of an output, from index `at` on; of a tuple, those of each tensor."""
    return (
        made[at : at + n] if isinstance(made, Tensor) else tuple(kind[at : at + n] for kind in made)
    )


def _concatenate(parts: Sequence[Any]) -> Made:
    return (
        torch.cat(list(parts))
        if isinstance(parts[0], Tensor)
        else tuple(map(torch.cat, zip(*parts, strict=True)))
    )


def _same_bits(one: Made, other: Made) -> bool:
    return all(
        map(torch.equal, *((made,) if isinstance(made, Tensor) else made for made in (one, other)))
    )


@torch.inference_mode()
def widths(
    operation: Rows,
    entries: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    at_best: Widths = Widths(),
) -> Widths | None:
    """Find widths with little padding at which an operation is batch invariant; None without any.

    Args:
        operation: a function of vectors [n, D] that computes each of them separately.
        entries: D, the width of a vector.
        dtype: the dtype of the vectors.
        device: the device of the vectors.
        at_best: known constraints: the multiple of all widths, and the largest width.
    """
    draw, last = np.random.default_rng(0), max(NARROW_WIDTHS)
    made = operation(torch.zeros(1, entries, dtype=dtype, device=device))
    few = (made if isinstance(made, Tensor) else made[0]).shape[-1]
    compared = MIN_COMPARED_ENTRIES * (HALF_FACTOR if dtype.itemsize == 2 else 1)
    drawn = [
        torch.from_numpy(draw.normal(size=(max(WIDE_WIDTHS), entries))).to(device, dtype)
        for _ in range(-(-compared // few))
    ]
    seen = [
        [
            (at, n, operation(rows[at : at + n]))
            for n in NARROW_WIDTHS
            for at in {0, min(5, last - n), last - n}
        ]
        for rows in drawn
    ]
    free = sorted(itertools.product(MULTIPLES, MULTIPLES), key=lambda pair: (max(pair), pair))
    tried = [
        Widths(least, math.lcm(multiple, at_best.multiple), at_best.most)
        for multiple, least in free
    ]
    alone = cache(
        lambda step: [
            _concatenate([operation(rows[at : at + step]) for at in range(0, last, step)])
            for rows in drawn
        ]
    )
    for found in (
        *tried,
        *(Widths(1, block, block) for block in BLOCK_WIDTHS if block % at_best.multiple == 0),
    ):
        pairs = list(zip(alone(found.padded_width(1)), seen, drawn, strict=True))
        if all(
            _same_bits(y, _part(one, at, n))
            for one, passes, _ in pairs
            for at, n, y in passes
            if found.is_allowed(n)
        ):
            wide = all(
                _same_bits(_part(operation(rows[:n]), 0, last), one)
                for one, _, rows in pairs
                for n in WIDE_WIDTHS
            )
            return found if wide or found.most else replace(found, most=last)
    return None


def find_elementwise_widths(entries: int) -> Widths:
    """Return the widths at which an elementwise function of [n, E] fills the SIMD lanes.

    They are narrow enough for one thread to do all the work.
    """
    multiple = LANES // math.gcd(LANES, entries)
    return Widths(1, multiple, max(MAX_SINGLE_THREAD_ENTRIES // entries // multiple, 1) * multiple)
