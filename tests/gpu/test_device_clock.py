"""Seconds of draft steps and passes that a device took: read after the step's one wait, and learnt as they are."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import draftree.drafting.step
import draftree.loop
from draftree.batch import SequenceBatch
from draftree.costs.cost_model import PassShape, Size, Speed
from draftree.costs.online_costs import Learner, OnlineCosts
from draftree.costs.step_costs import Costs
from draftree.costs.step_timings import DraftStep, StepTimes
from draftree.drafters.lm import language_model
from draftree.loop import Components, State, admit, step
from draftree.models.graph_capture import EagerCapture, Graphs
from draftree.registry import build
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.testing.conformance import COSTS
from draftree.testing.fakes import PassRecorder, tiny_target
from draftree.utils.device_clock import EventClock, HostClock, clock_of

PASS, FIRST = 11.0, 2.0
"""Seconds of the target's pass, and of the first draft step; each further one takes a second more.
"""


class Event:
    """A CUDA event of a device whose work takes given times: it can be read once the host has waited for it.

    Attributes:
        recorded: of this step, in their order.
    """

    recorded: ClassVar[list["Event"]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.complete = False

    def record(self) -> None:
        self.place = len(self.recorded)
        self.recorded.append(self)

    def synchronize(self) -> None:
        raise AssertionError("a wait that is not needed")

    query = synchronize

    def elapsed_time(self, later: "Event") -> float:
        assert self.complete, "an event that is not complete"
        assert later.complete, "an event that is not complete"
        assert later.place == self.place + 1, "work between two marks that follow each other"
        whole = later.place == len(self.recorded) - 1
        return 1e3 * (PASS if whole else FIRST + self.place)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with events; the host's own clock stands still. How many events each wait has made complete."""
    waits = list[int]()
    copied = Tensor.cpu

    def cpu(tensor: Tensor, *args: Any, **how: Any) -> Tensor:
        new = [event for event in Event.recorded if not event.complete]
        for event in new:
            event.complete = True
        waits.append(len(new))
        return copied(tensor, *args, **how)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(draftree.drafting.step, "clock_of", lambda device: EventClock())
    still = SimpleNamespace(perf_counter=lambda: 5.0)
    for module in (draftree.loop, draftree.drafting.step):
        monkeypatch.setattr(module, "time", still)
    Event.recorded = []
    return waits


class Noted:
    """Costs that note the timings of steps."""

    def __init__(self, costs: Costs = COSTS) -> None:
        self._costs, self.seen = costs, list[StepTimes]()

    def at(self, context: int, rows: int) -> Costs:
        return self._costs

    def needs_plain_step(self) -> bool:
        return False

    def observe(self, step: StepTimes) -> None:
        self.seen.append(step)


def steps(
    policy: str, costs: Any, count: int, sampling: Sampling = Sampling()
) -> Iterator[SequenceBatch]:
    """Steps of a target that is its own drafter, on what stands for a GPU."""
    target = tiny_target(context=96, capture=Graphs(PassRecorder()))
    rows = SequenceBatch(target.new_cache(1, 96))
    rule = build("acceptor", "greedy" if sampling.greedy else "match")
    parts = Components(target, language_model(target, target), build("policy", policy), rule, costs)
    _, state = admit(parts, rows, [Request([7, 18, 29], 90, sampling=sampling)], State())
    for _ in range(count):
        Event.recorded = []
        _, state = step(parts, rows, state)
        yield rows


@pytest.mark.parametrize(
    "policy", ["eagle2:depth=4,width=3,nodes=9", "chain:length=3", "yield:width=3"]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_steps_have_the_seconds_of_the_device(
    policy: str, sampling: Sampling, device: list[int]
) -> None:
    costs = Noted(Costs({1: 0.01}, {1: 1.0, 64: 1.1}))
    for rows in steps(policy, costs, 5, sampling):
        fed, timed = rows.stats.work[-1].frontiers, costs.seen[-1]
        assert len(fed) > 1
        assert timed.drafts == tuple(DraftStep(count, FIRST + i) for i, count in enumerate(fed))
        assert timed.target == PASS
        layers = len(Event.recorded) - 2
        assert [count for count in device if count] == [layers + 2], (
            "all events were complete at the one wait"
        )
        assert layers >= len(fed), "layers of padding are no draft steps"
        device.clear()
    assert rows.stats.verify_seconds == 5 * PASS


def test_costs_that_are_learnt_are_the_devices(device: list[int]) -> None:
    sizes = {
        name: Size(weights=1e6, bytes=2e8)
        for name in ("draft", "commit", "find", "overhead", "target")
    }
    learner = Learner(None, {}, sizes, lambda: Speed(bandwidth=1e10, rate=1e11, overhead=0.0))
    costs, wrong = OnlineCosts(learner, learner), learner.models["draft"].seconds(PassShape(3, 64))
    *_, rows = steps("eagle2:depth=4,width=3,nodes=9", costs, 15)
    fed = rows.stats.work[-1].frontiers
    assert fed == (1, 3, 3, 3)
    draft, target = learner.models["draft"], learner.models["target"]
    assert wrong < 0.1
    assert draft.seconds(PassShape(1, 64, first=True)) == pytest.approx(FIRST, rel=0.1)
    assert draft.seconds(PassShape(3, 64)) == pytest.approx(FIRST + 2, rel=0.2), (
        "between those of the three layers"
    )
    assert target.seconds(PassShape(10, 64)) == pytest.approx(PASS, rel=0.05)


def test_steps_that_record_passes_teach_nothing(device: list[int]) -> None:
    costs = Noted()
    list(steps("eagle2:depth=4,width=3,nodes=9", costs, 5))
    told = [timed.recorded for timed in costs.seen]
    assert told[0], "all kinds are new"
    assert not told[-1]
    sizes = {name: Size(seconds=1.0) for name in ("target", "draft", "commit", "find", "overhead")}
    learner = Learner(None, {}, sizes, lambda: Speed(bandwidth=1e10, rate=1e11, overhead=0.0))
    learning = OnlineCosts(learner, learner)
    for recorded, learnt in (
        (True, 0),
        (True, 0),
        (False, 0),
        (False, 1),
    ):  # the first in a process is left out
        learning.observe(StepTimes(64, 1, 4, 3.0, seconds=3.0, recorded=recorded))
        assert learner.models["target"].correction.timings == learnt


def test_recordings_of_a_drafter_count_with_the_targets() -> None:
    graphs = Graphs(PassRecorder())
    other = graphs.of(torch.nn.Linear(1, 1))
    work = lambda given: (given["x"] + 1,)
    other.run("a kind", {"x": torch.zeros(1)}, work)
    other.run("a kind", {"x": torch.zeros(1)}, work)
    graphs.run("a kind", {"x": torch.zeros(1)}, work)
    assert graphs.recordings == other.recordings == 2
    assert EagerCapture().recordings == 0


def test_a_cpu_has_done_its_work_when_a_call_returns() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    first, last = clock.mark(), clock.mark()
    assert np.isclose(clock.seconds(first, last), last - first)
    assert isinstance(clock_of(torch.device("cuda:0")), EventClock)
