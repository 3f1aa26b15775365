"""What is told where standard error is no terminal: where work is, every so often, by a clock of the tests'."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from draftree.cli import terminal


class Fake(terminal.Clock):
    """A clock that is set forward; what is to be done meanwhile is done in between."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.seconds

    @contextmanager
    def beating(self, beat: Callable[[], None], known: Callable[[], bool] = bool) -> Iterator[None]:
        self.due = [(self.seconds + terminal.FIRST, beat)]
        yield
        self.due = []

    def forward(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.due and self.due[0][0] <= end:
            self.seconds, beat = self.due.pop()
            beat()
            self.due = [(self.seconds + terminal.EVERY, beat)]
        self.seconds = end


@pytest.fixture
def clock(silent: None, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(terminal, "CLOCK", fake)
    return fake


def test_a_line_every_thirty_seconds_with_the_time_left(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_steps_that_take_minutes_are_told_of_too(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("bench", 10) as tell:
        for prompt in (1, 2):
            clock.forward(60)
            tell(prompt)
        clock.forward(10)
    told = ["bench: 0 of 10"] * 2 + ["bench: 1 of 10"] * 2 + ["bench: 2 of 10, about 8 min left"]
    assert capsys.readouterr().err.splitlines() == [f"draftree: {line}" for line in told]


def test_a_run_that_goes_on_is_not_taken_to_be_fast(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("train edd", 1000) as tell:
        for step in range(900, 932):
            clock.forward(1)
            tell(step)
    assert "about 70 s left" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_short_is_silent(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.busy("loading"), terminal.progress("bench", 3) as tell:
        clock.forward(1.9)
        tell(3)
    assert capsys.readouterr().err == ""


def test_what_is_waited_for_is_told(clock: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.busy("loading") as say:
        clock.forward(3)
        say(0, "timing [1] of 2")
        clock.forward(130)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["draftree: loading … (2 s so far)", "draftree: timing [1] of 2 … (32 s so far)"]
    assert lines[-1] == "draftree: timing [1] of 2 … (2 min so far)"
    assert len(lines) == 5


def test_a_terminal_has_its_bar_alone(clock: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal.progress("bench", 3) as tell:
        clock.forward(100)
        tell(2)
    told = capsys.readouterr().err
    assert "2/3" in told
    assert "draftree:" not in told


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99, "99 s"), (100, "2 min"), (10_700, "178 min"), (11_000, "3 h 3 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_the_real_clock_beats_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "FIRST", 0.01)
    monkeypatch.setattr(terminal, "EVERY", 0.01)
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
