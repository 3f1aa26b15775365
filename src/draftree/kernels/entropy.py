"""Entropy of distributions over their likeliest tokens.

Shapes: F distributions, V tokens.
"""

import math

import numpy as np

from draftree.native import Array, native

MAX_EXPONENT = np.float32(87)
"""Largest −log q that is used; below e⁻⁸⁷, probabilities are not normal numbers of float32."""
VECTOR_FLOATS = 16
"""Number of float32 values in the widest vector.

Each column is summed separately, so that all instruction sets give the same bits.
"""
POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def exponential(x: Array) -> Array:
    """Return exp(−x) in float32 for x from 0 to 87.

    The result is a power of two times a polynomial of the remainder (Cephes' `expf`).
    """
    power = np.rint(x * np.float32(-1.44269504))
    r = (-x - power * np.float32(0.693359375)) + power * np.float32(2.12194440e-4)
    p = np.full_like(r, POLYNOMIAL[0])
    for factor in POLYNOMIAL[1:]:
        p = p * r + np.float32(factor)
    p = (p * (r * r) + r) + np.float32(1)
    scale: Array = ((power.astype(np.int32) + 127) << 23).view(np.float32)
    return p * scale


@native
def entropies(log_q: Array, top: int) -> Array:
    """Return entropies [F] in nats, Σ −q log q over each distribution's `top` likeliest tokens.

    Args:
        log_q: [F, V] log probabilities in float32.
        top: the number of tokens.
    """
    found, width = np.empty(len(log_q)), log_q.shape[1]
    for f, sizes in enumerate(np.abs(log_q)):
        edge = np.float32(0)
        if top < width:
            edge = np.fmin(np.partition(sizes, top - 1)[top - 1], np.float32(np.inf))
            kept = sizes[sizes <= edge]
            if len(kept) > top or edge == np.inf:  # others are equal to the last one
                kept = sizes[sizes < edge]
        else:
            kept = sizes
        kept = np.where(kept < MAX_EXPONENT, kept, MAX_EXPONENT)
        padded = np.full(-(-len(kept) // VECTOR_FLOATS) * VECTOR_FLOATS, MAX_EXPONENT)
        padded[: len(kept)] = kept
        products = (padded * exponential(padded)).reshape(-1, VECTOR_FLOATS).astype(np.float64)
        sums = np.cumsum(np.vstack([np.zeros(VECTOR_FLOATS), products]), axis=0)[-1]
        total = np.cumsum(np.append(0.0, sums))[-1]
        if len(kept) < top < width:  # the others are all equal
            total += (
                (top - len(kept)) * float(edge) * math.exp(-edge) if edge < MAX_EXPONENT else 0.0
            )
        found[f] = total
    return found
