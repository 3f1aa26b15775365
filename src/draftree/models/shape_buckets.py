"""Sizes of passes: exact ones, or a few sizes to pad to, so that few graphs are captured."""

from dataclasses import dataclass

SLOTS = 256
"""Slots that a cache of fixed capacity grows by."""


@dataclass(frozen=True)
class Ladder:
    """Choose the sizes of passes.

    Attributes:
        few: whether a pass is padded to the next power of two of tokens, and sees all slots of its
            cache.
    """

    few: bool = False

    def width(self, tokens: int) -> int:
        """Return the tokens per row of a pass that has to hold `tokens`."""
        return 1 << (tokens - 1).bit_length() if self.few else tokens

    def capacity(self, slots: int) -> int:
        """Return the slots of a cache that has to hold `slots`."""
        return -(-slots // SLOTS) * SLOTS if self.few else slots
