"""Match rows of tokens to requests by their text: vLLM passes a proposer no request ids.

Shapes: R slots of the batch, S slots of the drafter's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftree.tree import Ints

LOOKUP_TOKENS = 24
"""Number of last tokens by which, together with the length, a text is looked up. The whole text is
compared afterwards.
"""


@dataclass(frozen=True)
class RequestStep:
    """Store the tokens of one request after a step of vLLM.

    Attributes:
        text: all token ids of the request; the last one is not in the KV cache yet.
        new: number of tokens that the step has added.
        rest: the token ids after the text in vLLM's row. Drafted tokens that were verified and not
            accepted are still there.
    """

    text: Ints
    new: int
    rest: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def before(self) -> Ints:
        """Return the token ids before the step."""
        return self.text[: len(self.text) - self.new]

    def has_verified(self, chain: Ints) -> bool:
        """Return whether the step has verified a whole chain, as far as the row shows it.

        vLLM drops drafted tokens that a grammar or its token budget does not allow.
        """
        rejected = chain[self.new :]  # the token before them is overwritten by the target's own
        return bool(np.array_equal(self.rest[: len(rejected)], rejected))


class Slots:
    """Store the texts of the requests at the last call, by slot.

    A request is recognised because its text begins with the text that it had at the last call. Two
    requests with equal texts are interchangeable.
    """

    def __init__(self) -> None:
        self.texts: list[Ints | None] = []

    @property
    def live(self) -> list[int]:
        """Return the slots in use."""
        return [slot for slot, text in enumerate(self.texts) if text is not None]

    def match(self, rows: Sequence[RequestStep]) -> list[int | None]:
        """Return the slot of each request; None for a request that is new.

        A request is new if it was not in the batch at the last call.
        """
        if len(rows) == len(self.texts) and all(
            text is not None
            and len(text) == len(row.text) - row.new
            and bool((text == row.text[: len(text)]).all())
            for text, row in zip(self.texts, rows, strict=True)
        ):
            return list(range(len(rows)))
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

    def match_after_gap(
        self, rows: Sequence[RequestStep], slots: Sequence[int | None]
    ) -> list[int | None]:
        """Return the slots, with those of requests that got tokens between the calls, too.

        vLLM does not call the proposer while a request of the batch is near the end of its context.

        Args:
            rows: requests of the batch.
            slots: slots that `match` has found.
        """
        left, found = set(self.live).difference(slots), list(slots)
        for i in [i for i, slot in enumerate(slots) if slot is None]:
            begun = [slot for slot in left if _begins(rows[i].before, self._text(slot))]
            if begun:
                same = max(begun, key=lambda slot: len(self._text(slot)))
                found[i] = same
                left.remove(same)
        return found

    def _text(self, slot: int) -> Ints:
        text = self.texts[slot]
        assert text is not None
        return text


def _begins(text: Ints, start: Ints) -> bool:
    """Return whether a text begins with a shorter one."""
    count = len(start)
    return (
        count < len(text)
        and bool(text[count - 1] == start[-1])
        and bool(np.array_equal(text[:count], start))
    )


def _key(text: Ints) -> tuple[int, bytes]:
    return len(text), text[-LOOKUP_TOKENS:].tobytes()
