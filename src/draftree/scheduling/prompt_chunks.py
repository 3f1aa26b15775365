"""Choose how many prompt tokens a step reads, so that it ends in time."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import final

from draftree.scheduling.options import SchedulerOptions

LEAST, SHORT = 48, 32
"""Tokens that are read however long they take, as smaller passes take hardly less time; and those
of a prompt that is not cut, whatever else is read."""
LEAST_BESIDE = 16
"""Tokens that are read at least in the pass of running sequences, which takes less time with fewer.
"""
UNKNOWN = 64
"""Tokens that are read before any reading was timed."""
STEPS = 1.5
"""Decoding steps of the running sequences that a reading may last where the options set no bound.
"""
ALONE = 0.05
"""Seconds that a reading may last while nothing else runs: a request that comes meanwhile waits for
its end."""
LEAST_SHARE = 0.1
"""Of a step that also decodes, the share that the reading of a chunk is taken to have at least."""
MEMORY = 256
"""Tokens over which timings fade to 1/e."""


@final
class ChunkSizes:
    """Chooses how much to read in a step, from the seconds that earlier steps took.

    Args:
        options: the limits.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._decoding: deque[float] = deque(maxlen=16)
        self._tokens, self._seconds = 0.0, 0.0

    def decoded(self, seconds: float) -> None:
        """Note how long a decoding step took."""
        self._decoding.append(seconds)

    def read(self, tokens: int, seconds: float, beside: bool = False) -> None:
        """Note how long the reading of a chunk took.

        Args:
            tokens: of the chunk.
            seconds: of the pass.
            beside: whether the pass also was a decoding step. Its extra time compared with others
                is that of the chunk, and at least a tenth of all its time.
        """
        if beside and self._decoding:
            seconds = max(seconds - statistics.median(self._decoding), LEAST_SHARE * seconds)
        kept = math.exp(-tokens / MEMORY)
        self._tokens, self._seconds = kept * self._tokens + tokens, kept * self._seconds + seconds

    def budget(self, running: bool, beside: bool = False) -> int:
        """Return how many prompt tokens this step may read.

        Args:
            running: whether it decodes sequences, too.
            beside: whether it does so in the same pass.
        """
        most = self._options.max_batch_tokens
        least = min(LEAST_BESIDE if running and beside else LEAST, most)
        if not self._seconds:
            return min(UNKNOWN, most)
        decoding = statistics.median(self._decoding) if running and self._decoding else 0.0
        if self._options.max_step_seconds is not None:
            seconds = self._options.max_step_seconds - decoding
        else:
            seconds = STEPS * decoding or ALONE
        return max(least, min(int(seconds * self._tokens / self._seconds), most))


def shares(left: Mapping[int, int], budget: int) -> dict[int, int]:
    """Return how many tokens of each prompt are read, by its number.

    Half of the budget, and `SHORT` tokens at least, goes to the prompts with the fewest tokens
    left, so that short ones do not wait for long ones. The rest goes to the oldest, so that it ends
    whatever comes, and what that leaves to the others.

    Args:
        left: tokens that are left of each prompt, by numbers in the order of arrival.
        budget: tokens in all.
    """
    found = dict.fromkeys(left, 0)
    shortest = sorted(left, key=lambda number: left[number])
    short = max(budget - budget // 2, SHORT if budget > SHORT else 0)
    for numbers, most in ((shortest, short), ([min(left)], budget), (shortest, budget)):
        for number in numbers:
            more = max(min(left[number] - found[number], most, budget), 0)
            found[number] += more
            most, budget = most - more, budget - more
    return found
