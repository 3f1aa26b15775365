"""Choose how many prompt tokens a step reads, so that it ends in time."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import final

from draftree.scheduling.options import SchedulerOptions

LEAST, SHORT = 48, 32
"""Least number of tokens that a separate reading pass reads, because smaller passes are hardly
faster; and number of tokens that the shortest prompts get in every step, so that they need not be
split."""
LEAST_BESIDE = 16
"""Least number of prompt tokens in a pass that also decodes. It is smaller than `LEAST`, because
such a pass gets faster with fewer tokens.
"""
DEFAULT_CHUNK = 64
"""Number of tokens to read while no reading has been timed yet."""
MAX_STEP_FACTOR = 1.5
"""Time limit for reading prompts in a step, in durations of a decoding step, if the options set no
limit.
"""
MAX_IDLE_SECONDS = 0.05
"""Time limit in seconds for reading prompts while no sequence is decoded. Requests that arrive
during a step have to wait for its end."""
LEAST_SHARE = 0.1
"""Least share of the time of a pass that also decodes which is attributed to reading the chunk."""
DECAY_TOKENS = 256
"""Number of read tokens after which the weight of an earlier timing has fallen to 1/e."""


@final
class ChunkSizes:
    """Choose how many prompt tokens a step reads, based on the times of earlier steps.

    Args:
        options: limits of the scheduler.
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._decoding: deque[float] = deque(maxlen=16)
        self._tokens, self._seconds = 0.0, 0.0

    def record_decode_step(self, seconds: float) -> None:
        """Record the seconds of a step that only decoded."""
        self._decoding.append(seconds)

    def record_chunk(self, tokens: int, seconds: float, beside: bool = False) -> None:
        """Record the seconds of a pass that read a chunk.

        Args:
            tokens: number of tokens in the chunk.
            seconds: seconds that the pass took.
            beside: whether the pass also decoded. Then the time of the chunk is the time beyond the
                median of decoding steps, and at least `LEAST_SHARE` of the pass.
        """
        if beside and self._decoding:
            seconds = max(seconds - statistics.median(self._decoding), LEAST_SHARE * seconds)
        kept = math.exp(-tokens / DECAY_TOKENS)
        self._tokens, self._seconds = kept * self._tokens + tokens, kept * self._seconds + seconds

    def budget(self, running: bool, beside: bool = False) -> int:
        """Return the number of prompt tokens that this step may read.

        Args:
            running: whether the step also decodes sequences.
            beside: whether it decodes them in the same pass.
        """
        most = self._options.max_batch_tokens
        least = min(LEAST_BESIDE if running and beside else LEAST, most)
        if not self._seconds:
            return min(DEFAULT_CHUNK, most)
        decoding = statistics.median(self._decoding) if running and self._decoding else 0.0
        if self._options.max_step_seconds is not None:
            seconds = self._options.max_step_seconds - decoding
        else:
            seconds = MAX_STEP_FACTOR * decoding or MAX_IDLE_SECONDS
        return max(least, min(int(seconds * self._tokens / self._seconds), most))


def shares(left: Mapping[int, int], budget: int) -> dict[int, int]:
    """Divide a number of tokens among prompts, and return each prompt's share by its number.

    Half of the budget, and at least `SHORT` tokens, goes to the prompts with the fewest unread
    tokens, so that short prompts do not wait for long ones. The rest goes to the oldest prompt, so
    that it is certain to end. Tokens that it does not need go to the other prompts, the shortest
    first.

    Args:
        left: number of unread tokens of each prompt; the keys number the prompts in the order of
            arrival.
        budget: number of tokens to divide.
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
