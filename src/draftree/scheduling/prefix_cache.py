"""A prefix cache: blocks of prompt tokens with their KV cache, shared between requests.

A block is found by its tokens and all those before it. It holds the target's keys and values of its
tokens, and the hidden states that the drafter reads, so that any drafter starts as if the whole
prompt had been read. Blocks that no other block continues are dropped first, the one that was used
longest ago before the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.models.kv_cache import Pages, SlotCache
from draftree.scheduling.handle import PartialPrompt
from draftree.target.target import HiddenStates, Target


@dataclass(eq=False)
class PromptBlock:
    """Store the target's keys, values and hidden states of one block of prompt tokens.

    Attributes:
        parent: the preceding block of the prompt; None for the first block.
        tokens: token ids of the block.
        pages: keys and values of the block's tokens.
        hidden: hidden states [tokens, D] by layer, for the layers that the drafter reads.
        children: number of stored blocks that follow this one.
        used: time of the last use, as a count of calls.
    """

    parent: "PromptBlock | None"
    tokens: tuple[int, ...]
    pages: Pages
    hidden: dict[int, Tensor]
    children: int = 0
    used: int = 0


@final
class PrefixStore:
    """Store the full blocks of prompts that were read, for later requests with the same prefix.

    Args:
        size: number of tokens in a block.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: dict[
            tuple[int, tuple[int, ...]], PromptBlock
        ] = {}  # by the parent's identity and the tokens
        self._clock = count(1)

    @property
    def tokens(self) -> int:
        """Return the number of stored tokens."""
        return self._size * len(self._blocks)

    def find(self, prompt: Sequence[int]) -> list[PromptBlock]:
        """Return the stored blocks with which a prompt begins, in order.

        The last token of the prompt is never included, because the target has to compute its
        logits.
        """
        found: list[PromptBlock] = []
        parent, now = None, next(self._clock)
        for start in range(0, len(prompt) - self._size, self._size):
            block = self._blocks.get((id(parent), tuple(prompt[start : start + self._size])))
            if block is None:
                break
            block.used = now
            found.append(block)
            parent = block
        return found

    def begin(self, prompt: Sequence[int], target: Target) -> PartialPrompt:
        """Return the stored beginning of a prompt as a partly read prompt with its own cache.

        If no block matches, it is empty.
        """
        blocks = self.find(prompt)
        if not blocks:
            return PartialPrompt()
        cache = target.new_cache(1, len(prompt))
        for place, block in enumerate(blocks):
            cache.paste(0, place * self._size, block.pages)
        tokens = np.array(prompt[: len(blocks) * self._size], np.int64)
        hidden = {
            layer: torch.cat([block.hidden[layer] for block in blocks])
            for layer in blocks[0].hidden
        }
        hidden_states = HiddenStates(
            hidden, np.zeros_like(tokens), np.arange(len(tokens)), tokens, cache
        )
        return PartialPrompt(cache, [hidden_states], len(tokens))

    def store(
        self, prompt: Sequence[int], cache: SlotCache, row: int, hidden_states: HiddenStates
    ) -> None:
        """Store all full blocks of a prompt that has been read.

        Args:
            prompt: token ids of the prompt.
            cache: cache that contains the prompt's keys and values.
            row: slot of the prompt in the cache.
            hidden_states: hidden states of all tokens of the prompt; entries of other slots are
                ignored.
        """
        parent, now = None, next(self._clock)
        mine = np.flatnonzero(hidden_states.rows == row)
        for start in range(0, len(prompt) - self._size + 1, self._size):
            stop = start + self._size
            tokens = tuple(prompt[start:stop])
            block = self._blocks.get((id(parent), tokens))
            if block is None:
                hidden = {
                    layer: h.clone()
                    for layer, h in hidden_states.take(mine[start:stop]).hidden.items()
                }
                block = PromptBlock(parent, tokens, cache.copy_slots(row, start, stop), hidden)
                self._blocks[id(parent), tokens] = block
                if parent is not None:
                    parent.children += 1
            block.used = now
            parent = block

    def shrink(self, tokens: int) -> None:
        """Drop blocks until at most `tokens` tokens are stored."""
        while self.tokens > tokens:
            leaves = (block for block in self._blocks.values() if not block.children)
            oldest = min(leaves, key=lambda block: block.used)
            del self._blocks[id(oldest.parent), oldest.tokens]
            if oldest.parent is not None:
                oldest.parent.children -= 1
