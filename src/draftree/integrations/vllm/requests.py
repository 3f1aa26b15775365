"""Match rows of tokens to requests by their text: vLLM passes a proposer no request ids.

Shapes: R slots of the batch, S slots of the drafter's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.tree import Ints

TAIL = 24
"""Last tokens of a text that it is looked up by, with its length; the whole text is compared then.
"""


@dataclass(frozen=True)
class Row:
    """One request of the batch after a step.

    Attributes:
        text: all its tokens, the last one not yet in the KV cache.
        new: how many of them the step has added.
    """

    text: Ints
    new: int

    @property
    def before(self) -> Ints:
        """Return the text as it was before the step."""
        return self.text[: len(self.text) - self.new]


class Slots:
    """The texts of the requests that are known, by slot.

    A request that was in the batch at the last call has the text that it had then, followed by what
    is new. Two requests of equal texts cannot be told apart, and need not be.
    """

    def __init__(self) -> None:
        self.texts: list[Ints | None] = []

    @property
    def live(self) -> list[int]:
        """Return the slots in use."""
        return [slot for slot, text in enumerate(self.texts) if text is not None]

    def match(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the slot of each request.

        Return None for one that was not in the batch at the last call.
        """
        known: dict[tuple[int, bytes], list[int]] = {}
        for slot in reversed(self.live):
            known.setdefault(_key(self._text(slot)), []).append(slot)
        found: list[int | None] = []
        for row in rows:
            before = row.before
            alike = known.get(_key(before), [])
            same = next(
                (slot for slot in reversed(alike) if np.array_equal(self._text(slot), before)), None
            )
            if same is not None:
                alike.remove(same)
            found.append(same)
        return found

    def _text(self, slot: int) -> Ints:
        text = self.texts[slot]
        assert text is not None
        return text


def _key(text: Ints) -> tuple[int, bytes]:
    return len(text), text[-TAIL:].tobytes()
