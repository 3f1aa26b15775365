"""What is told where standard error is no terminal: where work is, every so often, by a clock of the tests'."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from draftree.cli import terminal
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.evaluation import time_estimate
from draftree.evaluation.compare import Comparison
from draftree.metrics import Stats, Step
from draftree.request import Request


class Fake(terminal.Clock):
    """A clock that is set forward; what is to be done meanwhile is done in between."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.seconds

    @contextmanager
    def beating(self, beat: Callable[[], None], known: Callable[[], bool] = bool) -> Iterator[None]:
        self.due = [(self.seconds + terminal.FIRST_PROGRESS_SECONDS, beat)]
        yield
        self.due = []

    def forward(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.due and self.due[0][0] <= end:
            self.seconds, beat = self.due.pop()
            beat()
            self.due = [(self.seconds + terminal.PROGRESS_SECONDS, beat)]
        self.seconds = end


@pytest.fixture
def clock(silent: None, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(terminal, "CLOCK", fake)
    return fake


def test_a_line_every_thirty_seconds_with_the_time_left(
    clock: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress("train edd", None) as tell:
        for step in range(1, 101):
            clock.forward(1)
            tell(step, f"loss {step}", 4000)
    assert capsys.readouterr().err.splitlines() == [
        "draftree: train edd: 1 of 4,000, loss 1",
        "draftree: train edd: 31 of 4,000, about 66 min left, loss 31",
        "draftree: train edd: 61 of 4,000, about 66 min left, loss 61",
        "draftree: train edd: 91 of 4,000, about 65 min left, loss 91",
    ]


def test_forecasts_are_for_long_work(silent: None, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.forecast("3 texts", 1.9)
    terminal.forecast("300 texts", 190.0)
    assert capsys.readouterr().err == "draftree: 300 texts: at most about 3 min\n"


def test_seconds_are_those_of_the_learnt_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = None
    table = CostTable((Costs({1: 0.5, 32: 1.6}, {1: 1.0, 4: 2.0, 128: 6.4}),))
    monkeypatch.setattr(time_estimate, "learnt_costs", lambda *_: table)
    assert time_estimate.batched_seconds(target, target, 3, 10) == pytest.approx(30.0)
    assert time_estimate.batched_seconds(target, target, 12, 10, 4) == pytest.approx(60.0)
    assert time_estimate.plain_seconds(
        target, target, [Request([1], 10), Request([1], 5)]
    ) == pytest.approx(15.0)
    assert time_estimate.training_seconds(target, target, 100, 2.0, False) == pytest.approx(
        100 * 2 * (0.05 + 0.15)
    )
    assert time_estimate.training_seconds(target, target, 100, 2.0, True) == pytest.approx(
        100 * (0.05 + 2 * 0.15)
    )
    assert time_estimate.timed_seconds(target, target, [1], 4.0) == pytest.approx(
        4 + 2 * time_estimate.TIMED_PASSES * 6.4
    )


@pytest.mark.parametrize(("nodes", "said"), [(0, True), (1, True), (2, False)])
def test_a_summary_says_that_almost_nothing_was_drafted(
    silent: None, nodes: int, said: bool
) -> None:
    """Twenty steps with as many nodes in all: below one node in ten steps there was almost nothing."""
    stats, written = (
        Stats(20, [Step(0, int(step < nodes), 1) for step in range(20)], seconds=1.0),
        StringIO(),
    )
    terminal.show_summary(Console(file=written, width=400), Comparison([1], stats), False, True)
    assert ("almost nothing was drafted" in written.getvalue()) == said


def test_steps_that_take_minutes_are_told_of_too(
    clock: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress("bench", 10) as tell:
        for prompt in (1, 2):
            clock.forward(60)
            tell(prompt)
        clock.forward(10)
    told = ["bench: 0 of 10"] * 2 + ["bench: 1 of 10"] * 2 + ["bench: 2 of 10, about 8 min left"]
    assert capsys.readouterr().err.splitlines() == [f"draftree: {line}" for line in told]


def test_a_run_that_goes_on_is_not_taken_to_be_fast(
    clock: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress("train edd", 1000) as tell:
        for step in range(900, 932):
            clock.forward(1)
            tell(step)
    assert "about 70 s left" in capsys.readouterr().err.splitlines()[-1]


def test_short_work_is_silent(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.busy("loading"), terminal.progress("bench", 3) as tell:
        clock.forward(1.9)
        tell(3)
    assert capsys.readouterr().err == ""


def test_long_work_is_reported(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.busy("loading") as say:
        clock.forward(3)
        say(0, "timing [1] of 2")
        clock.forward(130)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "draftree: loading … (2 s so far)",
        "draftree: timing [1] of 2 … (32 s so far)",
    ]
    assert lines[-1] == "draftree: timing [1] of 2 … (2 min so far)"
    assert len(lines) == 5


def test_a_terminal_has_its_bar_alone(
    clock: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal.progress("bench", 3) as tell:
        clock.forward(100)
        tell(2)
    told = capsys.readouterr().err
    assert "2/3" in told
    assert "draftree:" not in told


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99, "99 s"), (100, "2 min"), (10_700, "178 min"), (11_000, "3 h 3 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_the_real_clock_beats_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "FIRST_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(terminal, "PROGRESS_SECONDS", 0.01)
    beats, enough = list[float](), threading.Event()

    def beat() -> None:
        beats.append(time.monotonic())
        if len(beats) == 3:
            enough.set()

    with terminal.Clock().beating(beat):
        assert enough.wait(30)
    count = len(beats)
    time.sleep(0.05)
    assert len(beats) == count
