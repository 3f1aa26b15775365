"""The entropy of distributions over their likeliest tokens, as machine code.

Shapes: F distributions, V tokens.
"""

import math
from typing import Any

import numpy as np

from draftree.kernels.compiled import Array, compiled
from draftree.kernels.lanes import COLUMNS, LANES, weighed
from draftree.kernels.tiles import BYTES

NEGLIGIBLE = np.float32(87)
"""Probabilities below e⁻⁸⁷ are no normal numbers of float32, and are taken for this."""
INFINITE, ALL = 0x7F800000, np.int32(0x7FFFFFFF)
"""The bits of infinity, and more than those of any number."""


@compiled
def _largest_of(bits: Array, top: int) -> tuple[Any, int]:
    """Below which bits the `top` least of positive numbers [V] lie, without those equal to the last, and how many that are.

    Counts are halved and interpolated by turns, as counting is done sixteen numbers at a time and sorting is not.
    """
    count: Any
    low, high, below, above, halving = np.int64(-1), np.int64(INFINITE), 0, len(bits), True
    while high - low > 1:
        middle = low + (high - low) // 2
        if not halving:
            middle = min(max(low + np.int64((high - low) * ((top - below) / (above - below))), low + 1), high - 1)
        halving, edge, count = not halving, np.int32(middle), np.int32(0)  # of 32 bits, as what is compared
        for i in range(len(bits)):
            count += np.int32(bits[i] <= edge)
        if count == top:
            return np.int32(middle + 1), top
        if count > top:
            high, above = middle, int(count)
        else:
            low, below = middle, int(count)
    return np.int32(high), below


@compiled
def entropies(sizes: Array, bits: Array, top: int) -> Array:
    """[F] entropy in nats, Σ −q log q over the `top` likeliest tokens of each distribution.

    Args:
        sizes: [F, V] −log q, as float32.
        bits: the same, as int32: their order is that of the numbers.
        top: how many tokens.
    """
    rows, width = sizes.shape
    found, weights = np.empty(rows), np.full(-(-width // COLUMNS) * COLUMNS, -NEGLIGIBLE)
    place = weights.ctypes.data
    for f in range(rows):
        limit, fewer = _largest_of(bits[f], top) if top < width else (ALL, top)
        for i in range(width):
            weights[i] = -min(sizes[f, i], NEGLIGIBLE)
        for b in range(len(weights) // COLUMNS):
            weighed(place + b * BYTES, np.float32(0))
        sums = np.zeros(LANES)
        for begin in range(0, width - LANES + 1, LANES):
            for j in range(LANES):
                i = begin + j
                sums[j] += min(sizes[f, i], NEGLIGIBLE) * weights[i] if bits[f, i] < limit else np.float32(0)
        for i in range(width - width % LANES, width):
            sums[0] += min(sizes[f, i], NEGLIGIBLE) * weights[i] if bits[f, i] < limit else np.float32(0)
        total = sums.sum()
        if fewer < top:  # the rest are all alike
            edge = np.float64(np.array([limit], np.int32).view(np.float32)[0])
            total += (top - fewer) * edge * math.exp(-edge) if edge < NEGLIGIBLE else 0.0
        found[f] = total
    return found
