"""Counter-based random numbers and their Gumbel noise, with the same bits on every device.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") needs products of
32 bits alone, so that the 64-bit integers of any library can compute it. The logarithm is that of
`log_exp.py`.

`philox` and `gumbel_of` take NumPy arrays and PyTorch tensors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.kernels.log_exp import MANTISSA, log
from draftree.native import Array, native

WORD = 0xFFFFFFFF
"""The mask of a 32-bit word."""
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
"""Constants that are added to the two words of the key after each round."""
ROUNDS = 10

ONE = 0x3FF0000000000000
"""The bit pattern of 1.0."""


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Return a tuple of four random 32-bit words for each counter.

    Args:
        counter: four words: integers, or arrays of uint64 or (in PyTorch) int64.
        key: two words of the same type.
    """
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        low, high = (
            a * MULTIPLIERS[0],
            c * MULTIPLIERS[1],
        )  # all 64 bits, whether one is a sign or not
        a, b = ((high >> 32) & WORD) ^ b ^ k, high & WORD
        c, d = ((low >> 32) & WORD) ^ d ^ m, low & WORD
        k, m = (k + KEY_STEPS[0]) & WORD, (m + KEY_STEPS[1]) & WORD
    return a, b, c, d


def gumbel_of(low: Any, high: Any) -> Any:
    """Return the Gumbel noise −log(−log u) of pairs of random words, which are int64.

    u is an odd multiple of 2⁻⁵³, so that neither u nor 1 − u is 0. The noise is between −3.61 and
    36.74.
    """
    fraction = (high << (MANTISSA - 32)) | (low >> (64 - MANTISSA))
    floats = torch.float64 if isinstance(fraction, Tensor) else np.float64
    u = ((fraction | ONE).view(floats) - 1.0) + 2.0**-53
    return -log(-log(u))


@native
def gumbel(place: Array, count: int) -> Array:
    """Return the Gumbel noise [count] for all tokens at a place.

    Args:
        place: [5] uint32: two words of the key and three of the counter. The counter's first word
            is not among them; it counts pairs of tokens.
        count: number of tokens.
    """
    first, second, *others = place.tolist()
    counter = np.arange((count + 1) // 2, dtype=np.uint64)
    a, b, c, d = philox((counter, *(np.uint64(word) for word in others)), (first, second))
    a, b, c, d = (word.astype(np.int64) for word in (a, b, c, d))
    noise: Array = np.stack((gumbel_of(a, b), gumbel_of(c, d)), axis=1).reshape(-1)[:count]
    return noise


def gumbel_on_device(places: Tensor, count: int) -> Tensor:
    """Return the Gumbel noise […, count] at places as float64 on their device, without a sync.

    Args:
        places: […, 5] int64, see `gumbel`.
        count: number of tokens.
    """
    first, second, *others = (word[..., None] for word in places.unbind(-1))
    counter = torch.arange((count + 1) // 2, device=places.device).expand(*places.shape[:-1], -1)
    a, b, c, d = philox((counter, *others), (first, second))
    return torch.stack((gumbel_of(a, b), gumbel_of(c, d)), dim=-1).flatten(-2)[..., :count]
