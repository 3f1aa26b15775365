"""Costs learnt from running steps, shared by the engines of a process and stored on disk.

No user waits for a measurement: the first steps use the estimate of `cost_model.py`, and each step
that runs corrects it. Corrections are written once a minute and when the process ends. Several
processes may use one file: a writer fuses its corrections with those in the file.
"""

import atexit
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import final

import numpy as np

from draftree.costs.cost_model import Correction, CostModel, PassShape, Size, Speed, curve_points
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs, monotone
from draftree.costs.step_timings import StepTimes
from draftree.errors import UserError
from draftree.tree import Floats
from draftree.utils.files import as_user_error, lock_output, read_object, write_text

LOOKUPS = ("commit", "find", "overhead")
"""Names of the learnt costs that do not depend on the number of tokens."""
TABLE_CONTEXTS = (128, 1024)
"""Context lengths for which a table of costs is made."""
WRITE_INTERVAL_SECONDS = 60.0
"""Least number of seconds between two writes of the file."""
CONTEXT_STEP = 64
"""Contexts are rounded to multiples of this number, so that curves are computed less often."""
FULL_LEARNING_TIMINGS, LEARNING_INTERVAL = 200, 4
"""Number of timings after which only every `LEARNING_INTERVAL`-th step is learnt from.

Unexpected steps are always learnt from.
"""
FULL_REFRESH_TIMINGS = 32
"""Number of first timings of a model after each of which its curves are computed again."""
REFRESH_INTERVAL = 8
"""Number of later timings after which the curves are computed again.

Computing them takes half a millisecond, and a single timing changes them only a little. Costs that
do not depend on the number of tokens are computed again together with the curves.
"""
UNEXPECTED_LOG_RATIO = 0.2
"""Deviation of a step's log seconds from which on the step is always learnt from."""
EXPLORATION_SHARE, INITIAL_EXPLORATION_BUDGET, MAX_EXPLORATION_BUDGET = 0.01, 2.0, 8.0
"""Share of the time that exploring steps may lose.

`INITIAL_EXPLORATION_BUDGET` and `MAX_EXPLORATION_BUDGET` are the initial and the largest loss that
is allowed at a time, in passes over a single token.
"""
EXPLORATION_INTERVAL = 4
"""At most one step in this number explores; the others give the rate without exploring."""
OPTIMISM, MIN_UNCERTAIN_STD = 1.0, 0.25
"""Number of standard deviations by which exploring steps assume passes to be faster.

`MIN_UNCERTAIN_STD` is the standard deviation from which on exploring is worthwhile.
"""
RATE_DECAY = 1 / 64
"""Weight of one step in the running rate of tokens per second."""
STALE_AFTER_STEPS = 32
"""Number of steps without a draft step after which the costs of draft steps may be outdated.

So may be those of plain passes after so many steps with drafts.
"""


@final
class Learner:
    """Hold the cost models of one file by name; the engines of a process share them.

    Args:
        path: the file of the corrections; None to keep them only in memory.
        about: the key of the file: hardware, model and versions.
        sizes: the size of each kind of pass.
        speed: returns the speed of the machine; called only if no file contains it.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, str],
        sizes: Mapping[str, Size],
        speed: Callable[[], Speed],
    ) -> None:
        self.path, self.about = path, about
        self._stamp, stored = self._read()
        known, corrections = (speed(), {}) if stored is None else stored
        self.speed, prior = known, Correction.prior()
        self.models = {
            name: CostModel(size, known, corrections.get(name, prior))
            for name, size in sizes.items()
        }
        self._warm = set[str]()
        self._written = time.monotonic()
        self.version = 0
        if path is not None:
            atexit.register(self.save)

    def learn(self, name: str, place: PassShape, seconds: float, measured: bool = False) -> None:
        """Correct one model by one timing.

        The first timing of a step in a process is ignored, because it includes initial work.
        """
        if name not in self._warm and not measured:
            self._warm.add(name)
            return
        before = self.models[name].correction.timings
        self.models[name] = self.models[name].learn(place, seconds, measured)
        timings = self.models[name].correction.timings
        if timings > before and (
            measured
            or (
                name not in LOOKUPS
                and (timings <= FULL_REFRESH_TIMINGS or timings % REFRESH_INTERVAL == 0)
            )
        ):
            self.version += 1

    def save_sometimes(self) -> None:
        """Write the corrections, at most once in `WRITE_INTERVAL_SECONDS` seconds."""
        if time.monotonic() - self._written > WRITE_INTERVAL_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the corrections, combined with corrections that another process has written.

        If the folder is not writable, nothing is saved and the next process learns the costs again.
        """
        self._written = time.monotonic()
        if self.path is None or not any(model.correction.timings for model in self.models.values()):
            return
        with suppress(OSError, UserError), lock_output(self.path, wait=True):
            corrections = {name: model.correction for name, model in self.models.items()}
            stamp, stored = self._read()
            if stamp != self._stamp and stored is not None and stored[0] == self.speed:
                corrections = {
                    n: c.fuse(stored[1][n]) if n in stored[1] else c for n, c in corrections.items()
                }
                self.models = {
                    n: replace(m, correction=corrections[n]) for n, m in self.models.items()
                }
                self.version += 1
            models = {name: correction.as_json() for name, correction in corrections.items()}
            write_text(
                self.path,
                json.dumps(
                    {"about": dict(self.about), "speed": asdict(self.speed), "models": models}
                ),
            )
            self._stamp = self.path.stat().st_mtime_ns

    def _read(self) -> tuple[int, tuple[Speed, dict[str, Correction]] | None]:
        """Return the file's modification time, and a pair of its speed and corrections by name.

        The second result is None if there is no file or it cannot be read.
        """
        if self.path is None or not self.path.is_file():
            return 0, None
        with suppress(UserError), as_user_error(f"'{self.path}' is not a file of costs"):
            stamp, file = self.path.stat().st_mtime_ns, read_object(self.path, "a file of costs")
            corrections = {name: Correction.of(stored) for name, stored in file["models"].items()}
            return stamp, (Speed.of(file["speed"]), corrections)
        return 0, None


def round_up(context: int) -> int:
    """Return a context rounded up to a length for which costs are computed."""
    return -(-context // CONTEXT_STEP) * CONTEXT_STEP


@final
class OnlineCosts:
    """The costs of a target with a drafter, learnt from steps in use.

    Some steps explore while the curves are uncertain: they assume that passes are faster than
    expected. If no draft step was timed for a while, exploring steps assume that draft steps take
    at most their estimate, corrected in the same way as the target's passes. Otherwise costs that
    were learnt under another load could stop all drafting, and no timing would ever correct them.
    The loss of exploring steps relative to the running rate of tokens per second is limited to a
    hundredth of the time.

    Args:
        target: the learner with the model "target".
        drafter: the learner with the models "draft", "commit", "find" and "overhead".
    """

    def __init__(self, target: Learner, drafter: Learner) -> None:
        self.target, self.drafter = target, drafter
        self._known: dict[tuple[int, int, bool, bool], Costs] = {}
        self._version = (-1, -1)
        self._allowed, self._token = INITIAL_EXPLORATION_BUDGET, 0.0
        self._exploring = False
        self._steps = 0
        self._undrafted, self._without_plain = STALE_AFTER_STEPS, 0
        self._runs_plain = self._confirming = False
        self._gained, self._spent = 0.0, 0.0

    def at(self, context: int, rows: int) -> Costs:
        """Return the costs of a step.

        Args:
            context: number of tokens in the KV cache of the longest sequence.
            rows: the number of sequences.
        """
        context = round_up(context)
        expected, stale = self._costs(context, rows), self._undrafted >= STALE_AFTER_STEPS
        self._token = expected.token
        if self._runs_plain:
            self._runs_plain, self._exploring = False, True
            return expected
        self._exploring = self._may_explore and (stale or self._uncertain(context, rows))
        return self._costs(context, rows, True, stale) if self._exploring else expected

    def expected(self, context: int, rows: int) -> Costs:
        """Return the expected costs of a step that explores nothing; arguments as for `at`."""
        return self._costs(round_up(context), rows)

    def needs_plain_step(self) -> bool:
        """Return whether the next step is to run without drafts, so that its pass is timed.

        This is so if drafts were verified in all of the last `STALE_AFTER_STEPS` steps. Their
        passes do not tell how long a pass without drafts takes at present, and so not what drafting
        gains. Such a step is an exploring step. It is repeated, up to twice, if its time is an
        outlier, which has to be confirmed.
        """
        due = self._without_plain >= STALE_AFTER_STEPS
        self._runs_plain = self._confirming or (due and self._may_explore)
        return self._runs_plain

    @property
    def _may_explore(self) -> bool:
        turn = self._steps % EXPLORATION_INTERVAL == EXPLORATION_INTERVAL - 1
        return turn and self._allowed > 1

    def observe(self, step: StepTimes) -> None:
        """Learn from the timings of a finished step."""
        if step.recorded:
            return
        drafts = self.drafter.models["draft"].correction.timings
        outliers = self.target.models["target"].correction.outliers
        self._learn(step)
        learnt = self.drafter.models["draft"].correction.timings > drafts
        self._undrafted = 0 if learnt else self._undrafted + 1
        if step.beside:
            return
        plain = step.tokens == step.sequences
        counted = self.target.models["target"].correction.outliers
        self._confirming = plain and self._exploring and counted not in (0, outliers)
        self._without_plain = 0 if plain else self._without_plain + 1

    def _learn(self, step: StepTimes) -> None:
        self._steps += 1
        context = round_up(step.context)
        if not step.beside:
            self._account(step)
            model = self.target.models["target"]
            known = model.correction.timings > FULL_LEARNING_TIMINGS and not self._confirming
            if known and self._steps % LEARNING_INTERVAL:
                expected = self._costs(context, step.sequences).target_seconds(
                    step.tokens / step.sequences
                )
                if abs(np.log(step.target / expected)) < UNEXPECTED_LOG_RATIO:
                    return
            self.target.learn(
                "target", PassShape(step.tokens, context, step.sequences), step.target
            )
        learn = self.drafter.learn
        for i, draft in enumerate(step.drafts):
            if i or not step.prompt_read:
                learn(
                    "draft",
                    PassShape(draft.tokens, context, step.sequences, first=i == 0),
                    draft.seconds,
                )
        constants = {
            "commit": step.commit,
            "find": step.find / max(step.finds, 1),
            "overhead": step.overhead,
        }
        for name, seconds in constants.items():
            known = self.drafter.models[name].correction.timings > FULL_LEARNING_TIMINGS
            if seconds > 0 and not (known and self._steps % LEARNING_INTERVAL):
                learn(name, PassShape(1, context, step.sequences), seconds)
        self.target.save_sometimes()
        self.drafter.save_sometimes()

    def table(self) -> CostTable:
        """Return the expected costs of one sequence at two context lengths.

        They are for plans and records.
        """
        about = {
            **self.target.about,
            **self.drafter.about,
            "learnt": str(self.target.models["target"].correction.timings),
        }
        return CostTable(tuple(self._costs(context, 1) for context in TABLE_CONTEXTS), about)

    @property
    def is_reliable(self) -> bool:
        """Return whether the curves are known well enough for planning.

        They are checked at up to 32 tokens of one sequence.
        """
        places = tuple(PassShape(n, TABLE_CONTEXTS[0]) for n in (1, 2, 4, 8, 16, 32))
        models = self.target.models["target"], self.drafter.models["draft"]
        return all(model.correction.deviation(places).max() < MIN_UNCERTAIN_STD for model in models)

    def teach(self, table: CostTable) -> None:
        """Learn from explicitly measured costs."""
        for entry in table.entries:
            rows, context = entry.rows, entry.context
            for learner, name, curve in (
                (self.target, "target", entry.target),
                (self.drafter, "draft", entry.draft),
            ):
                for width, seconds in curve.items():
                    learner.learn(
                        name, PassShape(width * rows, context, rows), seconds, measured=True
                    )
            first = PassShape(rows, context, rows, first=True)
            self.drafter.learn(
                "draft", first, entry.draft_seconds(1) + entry.catch_up, measured=True
            )
            constants = {name: getattr(entry, name) for name in LOOKUPS}
            for name, seconds in constants.items():
                if seconds > 0:
                    self.drafter.learn(name, PassShape(1, context, rows), seconds, measured=True)
        self._undrafted = 0
        self.target.save()
        self.drafter.save()

    def _account(self, step: StepTimes) -> None:
        """Update the time budget for exploration after a step.

        Every step adds the share `EXPLORATION_SHARE` of its time. An exploring step also takes away
        the time by which it was slower than the running mean time per generated token. The other
        steps update that mean. The budget is counted in passes over one token of each sequence.
        """
        if not self._token or step.seconds <= 0:
            return
        lost = 0.0
        if self._exploring and self._gained:
            lost = step.seconds - step.gained * self._spent / self._gained
        else:
            self._gained += step.gained - RATE_DECAY * self._gained
            self._spent += step.seconds - RATE_DECAY * self._spent
        self._allowed = min(
            self._allowed + (EXPLORATION_SHARE * step.seconds - lost) / self._token,
            MAX_EXPLORATION_BUDGET,
        )

    def _uncertain(self, context: int, rows: int) -> bool:
        """Return whether the time of passes over up to 32 tokens of each sequence is uncertain."""
        at = tuple(PassShape(n * rows, context, rows) for n in (2, 4, 8, 16, 32))
        return bool(self.target.models["target"].correction.deviation(at).max() > MIN_UNCERTAIN_STD)

    def _costs(
        self, context: int, rows: int, exploring: bool = False, stale: bool = False
    ) -> Costs:
        if self._version != (version := (self.target.version, self.drafter.version)):
            self._known, self._version = {}, version
        key = context, rows, exploring, stale
        if key not in self._known:
            self._known[key] = self._compute(context, rows, OPTIMISM if exploring else 0.0, stale)
        return self._known[key]

    def _draft_estimates(self, tokens: Sequence[float], context: int, rows: int) -> Floats:
        """Return the estimated seconds [W] of draft steps, corrected like the target's passes.

        Both estimates use the same probe of the machine. A probe on a busy machine may be wrong by
        orders of magnitude. If draft steps then seem slow, none is run, and no timing would correct
        their estimate.
        """
        drafter, target = self.drafter.models["draft"], self.target.models["target"]
        estimates = drafter.size.estimates(drafter.speed, np.array(tokens), context, rows)
        if self.drafter.speed != self.target.speed:
            return estimates
        places = tuple(PassShape(n, context, rows) for n in tokens)
        return np.asarray(estimates * np.exp(target.correction.at(places)))

    def _compute(self, context: int, rows: int, optimism: float, stale: bool) -> Costs:
        tokens = curve_points(rows)
        curves = [
            learner.models[name].curve(tokens, context, rows, optimism=optimism)
            for learner, name in ((self.target, "target"), (self.drafter, "draft"))
        ]
        drafter = self.drafter.models["draft"]
        first = float(
            drafter.curve((float(rows),), context, rows, first=True, optimism=optimism)[0]
        )
        if stale or not drafter.correction.timings:
            estimates = self._draft_estimates(tokens, context, rows)
            if drafter.correction.timings:
                estimates = np.minimum(curves[1], estimates)
            curves[1] = estimates
            first = min(first, float(estimates[tokens.index(float(rows))]))
        target, draft = (
            dict(zip([n / rows for n in tokens], monotone(curve.tolist()), strict=True))
            for curve in curves
        )
        constants = {
            name: self.drafter.models[name].seconds(PassShape(1, context, rows)) for name in LOOKUPS
        }
        catch_up = max(first - draft[1], 0.0)
        return Costs(draft, target, context=context, rows=rows, catch_up=catch_up, **constants)
