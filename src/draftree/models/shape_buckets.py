"""Sizes of passes: exact ones, or a few sizes to pad to, so that few graphs are captured."""

from dataclasses import dataclass

SLOTS = 256
"""Number of slots by which a cache of fixed capacity grows."""


@dataclass(frozen=True)
class ShapeBuckets:
    """Choose the sizes of passes and caches.

    Attributes:
        few: whether a pass is padded to a power of two of tokens and sees all slots of its cache,
            so that few sizes occur.
    """

    few: bool = False

    def width(self, tokens: int) -> int:
        """Return the padded number of tokens per sequence in a pass over `tokens` of them."""
        return 1 << (tokens - 1).bit_length() if self.few else tokens

    def capacity(self, slots: int) -> int:
        """Return the capacity of a cache that needs at least `slots` slots."""
        return -(-slots // SLOTS) * SLOTS if self.few else slots
