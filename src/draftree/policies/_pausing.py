"""When a policy pauses drafting: measure whether steps with drafts gain anything in a batch.

A search of the texts, the drafter's commits and the policy itself take time in every step, even if
nothing is drafted. In a large batch this may be more than drafts gain. Such a batch is generated
without drafts for some steps, and is then tried again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from draftree.costs.cost_table import round_up_batch_size

FIRST_TRIAL = 256
"""Length of the first trial in steps times sequences.

After a trial, the mean profit decides whether drafting pauses. The first trial is long, because a
search finds little at the beginning of a text.
"""
TRIAL = 64
"""Length of the trials after a pause, in steps times sequences."""
MIN_TRIAL_STEPS = 4
"""Smallest number of steps of a trial."""
PROFIT_STEPS = 32
"""Number of recent steps over which the mean profit is taken."""
FIRST_PAUSE_STEPS, MAX_PAUSE_STEPS = 32, 64
"""Number of steps of the first pause, and of further ones if the trials between them fail.

In a batch of eight, drafting that never pays is then tried in one of nine steps.
"""


@dataclass(frozen=True)
class Trial:
    """Records whether drafting pays in batches of one size.

    Attributes:
        profit: mean profit of the steps with drafts: the tokens of each sequence that a step
            gained, minus those that plain decoding would have generated in the step's time.
        steps: number of steps with drafts since the last pause.
        left: number of steps until the end of the pause; 0 if drafting is not paused.
        pause: number of steps of the last pause; 0 if a trial has succeeded since.
    """

    profit: float = 0.0
    steps: int = 0
    left: int = 0
    pause: int = 0

    def after(self, rows: int, profit: float) -> "Trial":
        """Return the trial after a step of R sequences with drafts that had the given profit."""
        steps = self.steps + 1
        mean = self.profit + (profit - self.profit) / min(steps, PROFIT_STEPS)
        if steps < max((TRIAL if self.pause else FIRST_TRIAL) / rows, MIN_TRIAL_STEPS):
            return replace(self, profit=mean, steps=steps)
        if mean >= 0:
            return Trial(mean, steps)
        pause = min(2 * self.pause, MAX_PAUSE_STEPS) if self.pause else FIRST_PAUSE_STEPS
        return Trial(left=pause, pause=pause)


@dataclass(frozen=True)
class Trials:
    """Holds the trials of drafting by batch size.

    A single sequence is never paused: its next token may begin a copy of an earlier text, and the
    search for it takes little of a step.

    Attributes:
        by_size: the trial of each batch size, which is a power of two.
    """

    by_size: Mapping[int, Trial] = field(default_factory=dict)

    def paused(self, rows: int) -> bool:
        """Return whether the next step of R sequences runs without drafts."""
        return rows > 1 and self._at(rows).left > 0

    def after(self, rows: int, profit: float) -> "Trials":
        """Return the trials after a step of R sequences.

        Args:
            rows: R, the number of sequences.
            profit: the profit of the step; it is ignored if drafting was paused.
        """
        trial = self._at(rows)
        new = (
            replace(trial, left=trial.left - 1) if trial.left else trial.after(rows, float(profit))
        )
        return Trials({**self.by_size, round_up_batch_size(rows): new}) if rows > 1 else self

    def _at(self, rows: int) -> Trial:
        return self.by_size.get(round_up_batch_size(rows), Trial())
