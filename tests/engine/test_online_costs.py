"""Costs that are learnt from running steps: the model, its files, exploring, and that no text depends on them."""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from draftree import cost_estimate, measure_costs
from draftree.cost_estimate import cost_key, draft_size, learnt_costs, target_size
from draftree.costs import cost_model, machine_probe, online_costs
from draftree.costs.cost_model import Correction, CostModel, PassShape, Size, Speed
from draftree.costs.cost_table import CostTable
from draftree.costs.online_costs import Learner, OnlineCosts
from draftree.costs.step_costs import Costs
from draftree.costs.step_timings import DraftStep, StepTimes
from draftree.drafters.edd import EDD
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.evaluation.bench import with_fixed_costs
from draftree.measure_costs import reliable_costs
from draftree.policies.yield_ import Yield
from draftree.request import Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing import tiny_target
from draftree.testing.conformance import RandomCosts
from selection import one_in

SPEED = Speed(bandwidth=1e10, rate=1e11, overhead=0.0)
BOUND, FLAT = Size(weights=1e8, bytes=2e7), Size(weights=1e6, bytes=2e8)
"""A pass that multiplies most of the time, so that each token costs the same; and one that reads,
so that tokens are free."""
WIDTHS = np.arange(1, 17)
Curve = Callable[[float], float]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Learnt costs stay inside the test."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def model(size: Size = FLAT) -> CostModel:
    return CostModel(size, SPEED, Correction.prior())


def taught(
    start: CostModel, true: Curve, steps: int, seed: int = 0, noise: float = 0.05
) -> CostModel:
    """Return a model after steps over 1 to 16 tokens, timed with noise."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        n = int(rng.choice(WIDTHS))
        start = start.learn(PassShape(n), true(n) * math.exp(noise * rng.normal()))
    return start


def apart(found: CostModel, true: Curve) -> float:
    """Return the largest relative error of a curve that must not fall, over 1 to 16 tokens."""
    curve = online_costs.monotone(found.curve(tuple(map(float, WIDTHS)), 0, 1).tolist())
    return float(np.abs(np.array(curve) / [true(n) for n in WIDTHS] - 1).max())


WRONG: dict[str, tuple[Size, Curve]] = {
    "four times too fast": (FLAT, lambda n: 4 * FLAT.estimate(SPEED, PassShape(n))),
    "four times too slow": (FLAT, lambda n: FLAT.estimate(SPEED, PassShape(n)) / 4),
    "a slope that is not there": (BOUND, lambda n: 8e-3 * (1 + 0.25 * (n - 1) / 15)),
    "four times too flat": (FLAT, lambda n: 0.02 * (1 + 3 * (n - 1) / 15)),
    "stairs": (FLAT, lambda n: 0.02 * (1 + 0.6 * ((n - 1) // 8))),
}


@pytest.mark.parametrize("case", [case for case in WRONG if case != "stairs"])
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_estimate_is_corrected_within_fifty_steps(case: str, seed: int) -> None:
    size, true = WRONG[case]
    assert apart(model(size), true) > 0.3, "it was wrong"
    assert apart(taught(model(size), true, 50, seed), true) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_curve_with_a_step_is_learnt(seed: int) -> None:
    size, true = WRONG["stairs"]
    assert apart(taught(model(size), true, 150, seed), true) < 0.1


def test_one_slow_step_moves_no_curve() -> None:
    true = lambda n: 0.02 + 0.001 * n
    before = taught(model(), true, 100)
    widths = tuple(map(float, cost_model.CURVE_WIDTHS))
    after = before.learn(PassShape(4), 50 * true(4))
    moved = np.abs(after.curve(widths, 0, 1) / before.curve(widths, 0, 1) - 1)
    assert moved.max() < 0.05
    calm = taught(after, true, 20, seed=1)
    assert apart(calm, true) < 0.1


def test_a_doubled_load_is_followed_within_a_hundred_steps() -> None:
    true = lambda n: 0.02 + 0.001 * n
    doubled = lambda n: 2 * true(n)
    after = taught(taught(model(), true, 300), doubled, 100, seed=1)
    assert apart(after, doubled) < 0.1
    beyond = after.seconds(PassShape(64)) / taught(model(), true, 300).seconds(PassShape(64))
    assert beyond == pytest.approx(2, rel=0.15), "widths that were not timed meanwhile follow too"


def test_contexts_and_batches_are_learnt_apart_from_widths() -> None:
    found, rng = model(), np.random.default_rng(0)
    true = lambda n, context, rows: 0.01 * (1 + n / 16) * (1 + context / 4096) * rows**0.2
    for _ in range(400):
        n = int(rng.choice(WIDTHS))
        context = int(rng.choice([64, 256, 1024, 4096]))
        rows = int(rng.choice([1, 2, 4]))
        found = found.learn(
            PassShape(n * rows, context, rows),
            true(n * rows, context, rows) * math.exp(0.05 * rng.normal()),
        )
    for place in (PassShape(8, 1024, 1), PassShape(8, 64, 4), PassShape(4, 4096, 2)):
        assert found.seconds(place) == pytest.approx(true(*place[:3]), rel=0.15)


VALUES = [0.8**i * 0.9 for i in range(1, 33)]
"""Acceptance probabilities of the best nodes of a tree, which a simulated step chooses from."""


@pytest.mark.parametrize("case", WRONG)
def test_wrong_estimates_cost_little_time(case: str, home: Path) -> None:
    size, true = WRONG[case]
    draft = 0.002  # seconds of the single draft step

    def tokens_per_second(costs: Callable[[int], float], n: int) -> float:
        return (1 + sum(VALUES[:n])) / (draft * (n > 0) + costs(1 + n))

    best = max(tokens_per_second(true, n) for n in range(33))
    learner = Learner(None, {}, {"target": size}, lambda: SPEED)
    drafter = Learner(
        None,
        {},
        {name: Size(seconds=draft) for name in ("draft", "commit", "find", "overhead")},
        lambda: SPEED,
    )
    costs = OnlineCosts(learner, drafter)
    rng = np.random.default_rng(0)
    spent = 0.0
    gained = 0.0
    for _ in range(500):
        believed = costs.at(0, 1)
        n = max(range(33), key=lambda n: tokens_per_second(believed.target_seconds, n))
        seconds = true(1 + n) * math.exp(0.05 * rng.normal())
        written = 1 + sum(VALUES[:n])
        spent, gained = spent + draft * (n > 0) + true(1 + n), gained + written
        drafts = (DraftStep(1, draft),) * (n > 0)
        costs.observe(
            StepTimes(
                0,
                1,
                1 + n,
                seconds,
                drafts,
                seconds=seconds + draft * (n > 0),
                gained=round(written),
            )
        )
    assert spent <= 1.03 * gained / best


@pytest.mark.parametrize("reloaded", [False, True])
def test_drafting_that_no_longer_pays_ends(reloaded: bool) -> None:
    """Wide passes took as long as narrow ones; then narrow ones take half of it, and wide ones more."""
    draft = 0.001
    before = lambda n: 0.02
    after = lambda n: 0.01 * (1 + (n - 1) / 4)
    learner = Learner(None, {}, {"target": FLAT}, lambda: SPEED)
    sizes = dict.fromkeys(("draft", "commit", "find", "overhead"), Size(seconds=draft))
    costs = OnlineCosts(learner, Learner(None, {}, sizes, lambda: SPEED))
    rng = np.random.default_rng(0)

    def seconds_per_token(curve: Curve, n: int) -> float:
        return (draft * (n > 0) + curve(1 + n)) / (1 + sum(VALUES[:n]))

    def run(true: Curve, steps: int) -> float:
        """Return the seconds of some steps divided by those of the best ones."""
        spent = best = 0.0
        for _ in range(steps):
            plain = costs.needs_plain_step()
            believed = costs.at(0, 1)
            sizes = range(1 if plain else 17)
            n = min(sizes, key=lambda n: seconds_per_token(believed.target_seconds, n))
            seconds = true(1 + n) * math.exp(0.05 * rng.normal())
            written = 1 + sum(VALUES[:n])
            spent += draft * (n > 0) + true(1 + n)
            best += written * min(seconds_per_token(true, n) for n in range(17))
            drafts = (DraftStep(1, draft),) * (n > 0)
            whole = seconds + draft * (n > 0)
            step = StepTimes(0, 1, 1 + n, seconds, drafts, seconds=whole, gained=round(written))
            costs.observe(step)
        return spent / best

    assert run(before, 1000) < 1.02
    if reloaded:
        target = learner.models["target"]
        stored = Correction.of(target.correction.as_json())
        learner.models["target"] = replace(target, correction=stored)
    assert run(after, 200) < 1.3
    assert run(after, 400) < 1.03


def test_exploring_stops_where_all_is_known_and_loses_little() -> None:
    learner = Learner(None, {}, {"target": FLAT}, lambda: SPEED)
    drafter = Learner(
        None, {}, dict.fromkeys(("draft", "commit", "find", "overhead"), FLAT), lambda: SPEED
    )
    costs = OnlineCosts(learner, drafter)
    expected, optimistic = costs.at(0, 1), [costs.at(0, 1)]
    for _ in range(online_costs.EXPLORATION_INTERVAL):
        costs.observe(StepTimes(0, 1, 1, 0.02, seconds=0.02))
        optimistic.append(costs.at(0, 1))
    assert min(c.target_seconds(32) for c in optimistic) < 0.8 * expected.target_seconds(32), (
        "uncertain widths are tried"
    )
    table = CostTable(
        (
            Costs(
                dict.fromkeys((1, 2, 4, 8, 16, 32), 0.001),
                {n: 0.02 + 0.001 * n for n in (1, 2, 4, 8, 16, 32)},
                context=128,
            ),
        )
    )
    for _ in range(4):
        costs.teach(table)
    seen = set()
    for _ in range(2 * online_costs.EXPLORATION_INTERVAL):
        costs.observe(StepTimes(100, 1, 1, 0.021, seconds=0.021))
        seen.add(round(costs.at(100, 1).target_seconds(32), 6))
        assert not costs._exploring
    assert costs.is_reliable


def test_draft_steps_that_were_timed_under_a_load_are_tried_again_once_it_is_gone() -> None:
    """Where they seem too slow nothing is drafted, so that nothing would tell that they no longer are."""
    learner = Learner(None, {}, {"target": FLAT}, lambda: SPEED)
    sizes = dict.fromkeys(("draft", "commit", "find", "overhead"), Size(seconds=1e-3))
    drafter = Learner(None, {}, sizes, lambda: SPEED)
    token = 0.02
    true = 1e-3
    slow = CostTable(
        (Costs({1: 100 * true}, dict.fromkeys((1, 2, 4, 8, 16, 32), token), context=128),)
    )
    for _ in range(4):
        OnlineCosts(learner, drafter).teach(slow)
    costs, drafted = OnlineCosts(learner, drafter), 0
    for _ in range(10 * online_costs.EXPLORATION_INTERVAL):
        pays = costs.at(128, 1).draft_seconds(1) < token / 2
        drafts, seconds = (DraftStep(1, true),) * pays, token + true * pays
        costs.observe(StepTimes(128, 1, 1 + pays, token, drafts, seconds=seconds, gained=1 + pays))
        drafted += pays
    assert costs.at(128, 1).draft_seconds(1) < 2 * true
    assert drafted > 5 * online_costs.EXPLORATION_INTERVAL


@pytest.mark.parametrize("factor", [1e-4, 1, 1e4])
def test_draft_steps_that_were_never_timed_are_estimated_as_the_targets_passes_were_corrected(
    factor: float,
) -> None:
    """A probe of a busy machine may be wrong by orders of magnitude, for the target and for the drafter."""
    probed = replace(SPEED, bandwidth=SPEED.bandwidth / factor, rate=SPEED.rate / factor)
    learner = Learner(None, {}, {"target": FLAT}, lambda: probed)
    sizes = dict.fromkeys(("draft", "commit", "find", "overhead"), Size(weights=1e5, bytes=2e7))
    drafter, true = (
        Learner(None, {}, sizes, lambda: probed),
        sizes["draft"].estimate(SPEED, PassShape(1)),
    )
    costs = OnlineCosts(learner, drafter)
    token = FLAT.estimate(SPEED, PassShape(1))
    for _ in range(50):
        costs.observe(StepTimes(128, 1, 1, token, seconds=token, gained=1))
    assert 0.8 < costs.at(128, 1).draft_seconds(1) / true < 1.25
    assert costs.at(128, 1).catch_up < 0.25 * true


@pytest.mark.parametrize("factor", [1, 4, 50])
def test_draft_steps_that_are_slow_are_tried_for_a_hundredth_of_the_time(factor: float) -> None:
    learner = Learner(None, {}, {"target": FLAT}, lambda: SPEED)
    sizes = dict.fromkeys(("draft", "commit", "find", "overhead"), Size(seconds=1e-3))
    drafter, token = Learner(None, {}, sizes, lambda: SPEED), 0.02
    costs = OnlineCosts(learner, drafter)
    lost = 0.0
    steps = 4000
    costs.teach(
        CostTable(
            (Costs({1: factor * token}, dict.fromkeys((1, 2, 4, 8, 16, 32), token), context=128),)
        )
    )
    for _ in range(steps):
        pays = costs.at(128, 1).draft_seconds(1) < token / 2
        drafts, seconds = (DraftStep(1, factor * token),) * pays, token * (1 + factor * pays)
        costs.observe(StepTimes(128, 1, 1, token, drafts, seconds=seconds, gained=1))
        lost += factor * token * pays
    assert (
        lost
        <= (online_costs.EXPLORATION_SHARE * steps + online_costs.MAX_EXPLORATION_BUDGET + factor)
        * token
        * 1.02
    )


def learner(path: Path, size: Size = FLAT) -> Learner:
    return Learner(path, {"device": "a"}, {"target": size}, lambda: SPEED)


def test_learnt_costs_are_kept_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    first = learner(path)
    for _ in range(20):
        first.learn("target", PassShape(4), 0.05)
    first.save()
    second = Learner(
        path, {}, {"target": FLAT}, lambda: pytest.fail("the machine was probed again")
    )
    assert second.models["target"].seconds(PassShape(4)) == pytest.approx(0.05, rel=0.02)
    assert second.models["target"].correction.timings == 19, (
        "the first timing of a process is left out"
    )
    assert json.loads(path.read_text())["about"] == {"device": "a"}


def test_processes_that_share_a_file_keep_what_both_have_learnt(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    one, other = learner(path), learner(path)
    for _ in range(30):
        one.learn("target", PassShape(1), 0.04)
        other.learn("target", PassShape(16), 0.08)
    one.save()
    other.save()
    for each in (other, one, other, one, one):
        each.save()
        both = learner(path).models["target"]
        assert both.seconds(PassShape(1)) == pytest.approx(0.04, rel=0.1)
        assert both.seconds(PassShape(16)) == pytest.approx(0.08, rel=0.1)


def test_an_exchange_without_new_timings_makes_nothing_more_certain(tmp_path: Path) -> None:
    path, places = tmp_path / "costs.json", (PassShape(1), PassShape(4), PassShape(16))
    one, other = learner(path), learner(path)
    for each in (one, other):
        each.learn("target", PassShape(1), 0.04)
        each.learn("target", PassShape(1), 0.04)
        each.save()
    before = learner(path).models["target"].correction.deviation(places)
    for each in (one, other) * 5:
        each.save()
    after = learner(path).models["target"].correction.deviation(places)
    assert (after >= 0.9 * before).all()


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    several = [learner(path) for _ in range(4)]
    for each in several:
        for _ in range(3):
            each.learn("target", PassShape(1), 0.04)
    threads = [threading.Thread(target=each.save) for each in several for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert learner(path).models["target"].correction.timings == 2
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


BROKEN = [
    "{",
    "[]",
    "{}",
    '{"speed": {}, "models": {}}',
    '{"speed": 1, "models": {"target": {"mean": [1]}}}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    found = learner(path)
    assert found.models["target"].correction.timings == 0
    found.learn("target", PassShape(1), 0.03)
    found.learn("target", PassShape(1), 0.03)
    found.save()
    assert learner(path).models["target"].correction.timings == 1


def test_a_home_that_cannot_be_written_to_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    found = learner(tmp_path / "file" / "costs.json")
    for _ in range(2):
        found.learn("target", PassShape(1), 0.03)
    found.save()
    assert found.models["target"].correction.timings == 1


def test_costs_are_written_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, path = [0.0], tmp_path / "costs.json"
    monkeypatch.setattr(online_costs.time, "monotonic", lambda: now[0])
    found = learner(path)
    for second in (1, 59, 61):
        now[0] = second
        found.learn("target", PassShape(1), 0.03)
        found.save_sometimes()
        assert path.exists() == (second > 60)


def test_a_probe_takes_less_than_half_a_second_and_is_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_probe._probe.cache_clear()
    found = machine_probe.machine_speed(torch.device("cpu"), torch.float32)
    assert found.bandwidth > 1e8
    assert found.rate > 1e8
    assert 0 < found.overhead < 1e-3
    machine_probe._probe.cache_clear()
    monkeypatch.setattr(
        machine_probe, "probe", lambda device, dtype: pytest.fail("it was probed again")
    )
    assert machine_probe.machine_speed(torch.device("cpu"), torch.float32) == found
    machine_probe._probe.cache_clear()


@pytest.mark.parametrize("slow", [torch.bfloat16, torch.float32])
def test_the_rate_of_half_precision_is_that_of_the_faster_dtype(
    slow: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_round(work: Callable[[], Any], device: torch.device) -> float:
        result = work()
        if not isinstance(result, torch.Tensor) or result.ndim < 2:
            return 1e-3
        return len(result) ** 3 / (1e9 if result.dtype is slow else 1e11)

    monkeypatch.setattr(machine_probe, "_time_fastest_round", time_round)
    device = torch.device("cpu")
    assert machine_probe.probe(device, torch.bfloat16).rate == pytest.approx(1e11)
    wanted = 1e9 if slow is torch.float32 else 1e11
    assert machine_probe.probe(device, torch.float32).rate == pytest.approx(wanted)


def test_a_probe_of_a_busy_machine_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(machine_probe.HOST.assumed, rate=1e-4 * machine_probe.HOST.assumed.rate)
    machine_probe._probe.cache_clear()
    monkeypatch.setattr(machine_probe, "probe", lambda device, dtype: slow)
    assert machine_probe.machine_speed(torch.device("cpu"), torch.float32) == slow
    machine_probe._probe.cache_clear()
    monkeypatch.setattr(machine_probe, "probe", lambda device, dtype: machine_probe.HOST.assumed)
    assert (
        machine_probe.machine_speed(torch.device("cpu"), torch.float32)
        == machine_probe.HOST.assumed
    )
    machine_probe._probe.cache_clear()


def test_a_machine_that_cannot_be_probed_is_assumed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device, dtype: torch.dtype) -> Speed:
        raise RuntimeError("out of memory")

    machine_probe._probe.cache_clear()
    monkeypatch.setattr(machine_probe, "probe", fail)
    assert (
        machine_probe.machine_speed(torch.device("cpu"), torch.float64)
        == machine_probe.HOST.assumed
    )
    assert (
        machine_probe.select_workload(torch.device("cuda")).assumed
        == machine_probe.ACCELERATOR.assumed
    )
    machine_probe._probe.cache_clear()


class PretendedGPU(TorchFunctionMode):
    """A GPU by its figures: tensors that are made on `cuda` hold no values, and what is done with them takes its time.

    Args:
        speed: what it does in a second.
        setup: seconds that the first operation of a kind takes besides.
        cache: bytes that are read at no cost, as if they were in its cache.
    """

    def __init__(self, speed: Speed, setup: float = 0.3, cache: int = 50 << 20) -> None:
        super().__init__()
        self.speed = speed
        self.setup = setup
        self.cache = cache
        self.seconds, self.seen = 0.0, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if torch.device(given.get("device") or "cpu").type == "cuda":
            given["device"] = "meta"
        found = func(*args, **given)
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_meta]
        if tensors and isinstance(found, torch.Tensor):
            name = func.__name__
            read = max(sum(t.nbytes for t in tensors) - self.cache, 0)
            product = tensors[0].shape[0] ** 3 if "matmul" in name else 0
            self.seconds += self.speed.overhead + max(
                read / self.speed.bandwidth, product / self.speed.rate
            )
            self.seconds += 0 if name in self.seen else self.setup
            self.seen.add(name)
        return found

    def timed(self, work: Callable[[], Any], device: torch.device) -> float:
        before = self.seconds
        work()
        return self.seconds - before


@pytest.mark.parametrize(
    "speed",
    [Speed(3.0e12, 400e12, 5e-6), Speed(0.9e12, 80e12, 10e-6), Speed(0.1e12, 3e12, 20e-6)],
    ids=["h100", "4090", "m3"],
)
def test_a_gpu_is_probed_by_works_that_take_longer_than_their_launch(
    home: Path, monkeypatch: pytest.MonkeyPatch, speed: Speed
) -> None:
    """Its libraries take longer to set up than all works together, and its cache holds what a CPU's does not."""
    gpu = PretendedGPU(speed)
    monkeypatch.setattr(machine_probe, "time_work", gpu.timed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with gpu:
        found = machine_probe.probe(torch.device("cuda"), torch.bfloat16)
    assert found.bandwidth == pytest.approx(speed.bandwidth, rel=0.25)
    assert found.rate == pytest.approx(speed.rate, rel=0.25)
    assert found.overhead == pytest.approx(speed.overhead, rel=0.01)


def test_the_probe_is_of_the_device_that_the_target_will_be_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []
    monkeypatch.setattr(machine_probe, "_full_name", lambda device: f"{device}:0")
    monkeypatch.setattr(
        machine_probe,
        "probe",
        lambda device, dtype: probed.append(str(device)) or Speed(1.0, 1.0, 1.0),
    )
    monkeypatch.setattr(machine_probe, "machine", lambda device: {"device": str(device)})
    for there in (True, False):
        machine_probe._probe.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        machine_probe.start_probe(None, torch.float32)
        machine_probe.machine_speed(torch.device("cuda" if there else "cpu"), torch.float32)
    assert probed == ["cuda:0", "cpu:0"]
    machine_probe._probe.cache_clear()


def test_sizes_count_the_weights_of_a_pass(target: Target) -> None:
    decoder = target.decoder
    found = target_size(decoder)
    linear = sum(
        m.weight.numel() for m in decoder.model.modules() if isinstance(m, torch.nn.Linear)
    )
    assert found.weights == linear
    assert found.bytes == linear * decoder.dtype.itemsize
    assert draft_size(PLD().open(target), decoder) == cost_estimate.LOOKUP_SIZE
    edd = draft_size(EDD().example(target), decoder)
    assert 0 < edd.weights < 2 * found.weights


def test_experts_are_read_as_far_as_tokens_are_routed_to_them() -> None:
    size = Size(expert_bytes=8e9, experts=8, routed=2)
    one, many = (size.estimate(SPEED, PassShape(n)) for n in (1, 64))
    assert one == pytest.approx(2e9 / SPEED.bandwidth)
    assert many == pytest.approx(8e9 / SPEED.bandwidth, rel=1e-6)


def test_engines_of_one_process_share_what_they_learn(target: Target) -> None:
    one, other = (Engine(target, PLD().open(target), Yield()) for _ in range(2))
    one.write([Request([1, 2, 1, 2, 1], 12)])
    costs = other.step_costs
    assert isinstance(costs, OnlineCosts)
    assert costs.target.models["target"].correction.timings > 0
    assert {
        "device",
        "threads",
        "torch",
        "dtype",
        "attention",
        "target",
        "parameters",
        "draftree",
    } <= set(cost_key(target))


def test_nothing_is_measured_before_a_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("draftree.measure_costs.measure", "draftree.utils.hardware.time_interleaved"):
        monkeypatch.setattr(place, lambda *args, **kwargs: pytest.fail("costs were measured"))
    engine = Engine(target, PLD().open(target), Yield())
    for batch in (1, 2, 3, 5):
        assert len(engine.write([Request([1, 2, 1], 4)] * batch).tokens) == batch


def test_fixed_costs_stay_what_they_are(target: Target) -> None:
    fixed = Costs({1: 0.1}, {1: 1.0})
    engine = Engine(target, PLD().open(target), Yield(), costs=fixed)
    engine.write([Request([1, 2, 1, 2, 1], 12)])
    assert engine.step_costs is fixed


def test_costs_to_count_by_are_measured_where_too_little_is_known(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, told = PLD().open(target), list[str]()
    first = reliable_costs(target, drafter, lambda done, remark="", of=None: told.append(remark))
    assert told
    assert learnt_costs(target, drafter).is_reliable
    told.clear()
    again = reliable_costs(target, drafter, lambda done, remark="", of=None: told.append(remark))
    assert not told
    assert again.entries == first.entries


def test_all_drafters_are_counted_by_one_cost_curve_of_the_target(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is measured with the target, and what the last one taught of its passes counts for the first, too."""
    drafters = {"pld": PLD().open(target), "edd": EDD().example(target)}
    engines = {
        (name, "yield"): Engine(target, drafter, Yield()) for name, drafter in drafters.items()
    }
    speeds = iter((1.0, 5.0))

    def measured(target: Target, drafter: object, *args: object) -> tuple[Costs, ...]:
        each = next(speeds) * 1e-3
        return tuple(
            Costs({1: 1e-4, 32: 2e-4}, {n: each * (8 + n) for n in (1, 2, 4, 8, 16, 32)}, 1e-5, c)
            for c in (128, 1024)
        )

    monkeypatch.setattr(measure_costs, "measure", measured)
    tables = {d: e.costs for (d, _), e in with_fixed_costs(engines).items()}
    assert next(speeds, None) is None, "both were measured"
    assert [e.target for e in tables["pld"].entries] == [e.target for e in tables["edd"].entries]


@pytest.fixture
def random_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Engine, "step_costs", property(lambda engine: RandomCosts(engine.calls + 1))
    )


@pytest.mark.usefixtures("random_costs")
@pytest.mark.parametrize(
    ("drafter", "policy", "temperature"),
    one_in(2, [PLD(), EDD()], ["yield", "pct", "opttree"], [0.0, 1.0]),
)
def test_no_text_depends_on_costs(
    target: Target, drafter: PLD | EDD, policy: str, temperature: float
) -> None:
    from draftree.registry import build

    opened = drafter.example(target) if isinstance(drafter, EDD) else drafter.open(target)
    engine = Engine(target, opened, build("policy", policy))
    prompts = [[1, 2, 3, 1, 2], [4, 5], [7, 7, 7, 7]]
    requests = [
        replace(Request(p, 14), sampling=Sampling(temperature=temperature, seed=3)) for p in prompts
    ]
    plain = engine.plain(requests).tokens
    for _ in range(4):
        assert engine.write(requests, reuse=False).tokens == plain


def test_a_table_has_what_was_learnt_up_to_now(target: Target) -> None:
    costs = learnt_costs(target, PLD().open(target))
    before = costs.table().entries[0].target[1]
    costs.teach(CostTable((Costs({1: 0.001}, {1: 3 * before}, context=128),)))
    assert costs.table().entries[0].target[1] == pytest.approx(3 * before, rel=0.05)


def test_costs_read_from_disk_are_the_same(target: Target) -> None:
    drafter = PLD().open(target)
    first = reliable_costs(target, drafter)
    cost_estimate._LEARNERS.clear()  # as in another process
    assert reliable_costs(target, drafter) == first
