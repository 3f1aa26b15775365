"""The time limit of a training run."""

import time

from draftree.training.distributed import Processes


class Clock:
    """Measure the share of a run's time limit that has passed, equal in all processes.

    Args:
        bound: time limit of the run in seconds; 0 for none.
        spent: seconds that the run took before it was interrupted.
        processes: processes of the run.
    """

    def __init__(self, bound: float, spent: float, processes: Processes) -> None:
        self._bound = bound
        self._spent = spent
        self._processes = processes
        self._begun = time.monotonic()
        self.share = spent / bound if bound else 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds that the run has taken, including those before an interruption."""
        return self._spent + time.monotonic() - self._begun

    @property
    def over(self) -> bool:
        """Return whether the time limit had been reached at the last call of `look`."""
        return self.share >= 1

    def look(self) -> None:
        """Update the share of the time limit that has passed."""
        if self._bound:
            self.share = max(self._processes.gather(self.seconds)) / self._bound
