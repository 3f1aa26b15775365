"""The time limit of a training run."""

import time

from draftree.training.distributed import Processes


class Clock:
    """The share of a run's time that is over; the same in all of its processes.

    Args:
        bound: seconds that the run may take; 0 for any number.
        spent: those that were taken before it was interrupted.
        processes: of the run.
    """

    def __init__(self, bound: float, spent: float, processes: Processes) -> None:
        self._bound = bound
        self._spent = spent
        self._processes = processes
        self._begun = time.monotonic()
        self.share = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds that the run has taken."""
        return self._spent + time.monotonic() - self._begun

    @property
    def over(self) -> bool:
        """Return True if the time was over at the last look."""
        return self.share >= 1

    def look(self) -> None:
        """Check how much of the time is over."""
        if self._bound:
            self.share = max(self._processes.gathered(self.seconds)) / self._bound
