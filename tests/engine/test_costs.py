"""What is known of seconds: the curves, the tables of them, where they are kept, how they are measured and drawn."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree import measure_costs
from draftree.cli import arguments, cost_charts
from draftree.costs.cost_table import (
    CostTable,
    estimate_seconds,
    estimate_target_seconds,
    round_up_batch_size,
)
from draftree.costs.step_costs import Costs, monotone
from draftree.drafters.pld import PLD
from draftree.errors import UserError
from draftree.metrics import Work
from draftree.target.target import Target
from draftree.testing import tiny_target
from draftree.utils import hardware
from draftree.utils.hardware import time_interleaved

CURVES = Costs({1: 0.5, 4: 2.0}, {1: 4.0, 2: 5.0, 8: 8.0}, commit=0.25)
SHORT = Costs({1: 1.0, 4: 4.0}, {1: 10.0, 4: 16.0}, commit=0.5, context=100)
LONG = Costs({1: 2.0, 4: 6.0}, {1: 20.0, 2: 22.0, 4: 30.0}, commit=1.5, context=500)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Learnt costs stay inside the test."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure_costs, "MEASURED_CONTEXTS", (128, 1024))
    return tmp_path / "cache"


def test_a_curve_is_linear_between_its_widths_and_beyond_them() -> None:
    assert [CURVES.target_seconds(n) for n in (1, 2, 5, 8)] == [4, 5, 6.5, 8]
    assert CURVES.target_seconds(10) == 9  # the last slope is 3 / 6 a token
    assert CURVES.target_seconds(0.5) == 4  # less than one token costs what one does
    assert CURVES.draft_seconds(2) == 1.0
    assert CURVES.draft_seconds(6) == 3.0
    assert CURVES.draft_seconds(0) == 0.0, "no draft step costs nothing"
    assert CURVES.targets(np.array([1.0, 3.0, 10.0])).tolist() == [4, 5.5, 9]
    assert CURVES.drafts(np.array([0.0, 1.0, 8.0])).tolist() == [0, 0.5, 4]
    assert CURVES.ratio == 0.125
    assert Costs({2: 0.5}, {2: 3.0}).target_seconds(100) == 3.0, "one width says nothing of others"


def test_a_step_costs_its_draft_steps_its_pass_and_a_commit() -> None:
    # sₐ(1) + sₐ(4) + sₜ(1 + 7) + commit
    assert CURVES.step(Work((1, 4), 8, 1, 0)) == 0.5 + 2.0 + 8.0 + 0.25
    assert CURVES.drafting(Work((1, 4), 8, 1, 0)) == 0.5 + 2.0 + 0.25
    assert CURVES.step(Work((), 1, 1, 0)) == 4.0 + 0.25, "a step that drafts nothing"
    assert replace(CURVES, find=3.0).step(Work((), 1, 1, 0, finds=2)) == 4.0 + 0.25 + 6.0
    table = CostTable(
        (replace(CURVES, find=3.0, context=100), replace(CURVES, find=5.0, context=200))
    )
    assert table.at(150, 1).find == 4.0
    # two rows: widths are of a row, so sₐ(2/2) + sₐ(5/2) + sₜ(10/2) = 0.5 + 1.25 + 6.5
    assert CURVES.step(Work((2, 5), 10, 2, 0)) == 0.5 + 1.25 + 6.5 + 0.25


def test_counted_work_is_the_sum_of_its_steps_at_their_contexts() -> None:
    table = CostTable((SHORT, LONG))
    work = [Work((1,), 4, 1, 100), Work((), 1, 1, 300), Work((1, 4), 4, 1, 500)]
    # 1 + 16 + .5; at 300 halfway: 15 + 1; 2 + 6 + 30 + 1.5
    assert estimate_seconds(table, work) == (17.5 + 16.0 + 39.5, 1.5 + 1.0 + 9.5)
    assert estimate_target_seconds(table, [Work((), 1, 1, 100), Work((), 2, 2, 300)]) == 10 + 15
    assert estimate_seconds(table, []) == (0, 0)


def test_contexts_are_mixed_in_proportion_and_held_outside() -> None:
    table = CostTable((LONG, SHORT))
    at = table.at(200, 1)  # a quarter of the way from 100 to 500
    assert at.target == pytest.approx({1: 12.5, 2: 0.75 * 12 + 0.25 * 22, 4: 19.5})
    assert at.draft == pytest.approx({1: 1.25, 4: 4.5})
    assert (at.commit, at.context, at.rows) == (0.75, 200, 1)
    assert table.at(7, 1) == table.at(100, 1) == SHORT
    assert table.at(500, 1) == table.at(9999, 1) == LONG
    assert table.at(200, 1) is at
    assert table.ratio == SHORT.ratio == 0.1
    assert SHORT.at(9999, 64) is SHORT


def test_the_nearest_number_of_rows_is_taken() -> None:
    entries = [replace(SHORT, rows=r, commit=float(r)) for r in (8, 1, 2)]
    table = CostTable(tuple(entries))
    assert [table.at(0, rows).rows for rows in (1, 2, 3, 4, 5, 6, 64)] == [1, 2, 2, 2, 8, 8, 8]
    assert [round_up_batch_size(rows) for rows in (1, 2, 3, 4, 5, 33, 64, 65, 1000)] == [
        1,
        2,
        4,
        4,
        8,
        64,
        64,
        64,
        64,
    ]


widths = st.dictionaries(st.integers(1, 64), st.floats(1e-6, 10), min_size=1, max_size=6)
rising = widths.map(lambda c: dict(zip(sorted(c), sorted(c.values()), strict=True)))


@given(rising, rising, rising, rising, st.integers(0, 700))
def test_no_mix_of_rising_curves_falls(a, b, c, d, context: int) -> None:
    mixed = CostTable((Costs(a, b, context=100), Costs(c, d, context=500))).at(context, 1)
    for curve in (mixed.drafts, mixed.targets):
        seconds = curve(np.arange(1, 200, dtype=np.float64))
        assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
        assert (seconds > 0).all()


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12))
def test_monotone_figures_rise_keep_their_mean_and_stay(seconds: list[float]) -> None:
    found = monotone(seconds)
    assert len(found) == len(seconds)
    assert (np.diff(found) >= 0).all()
    assert np.mean(found) == pytest.approx(np.mean(seconds))
    assert monotone(found) == pytest.approx(found)
    assert min(seconds) <= found[0] * (1 + 1e-12)
    if (np.diff(seconds) >= 0).all():
        assert found == seconds


def test_monotone_by_hand() -> None:
    assert monotone([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert monotone([4, 3, 2]) == [3, 3, 3]
    assert monotone([2, 4, 1]) == pytest.approx([2, 2.5, 2.5])


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = CostTable((SHORT, replace(LONG, rows=4)), {"device": "a", "date": "today"})
    path = tmp_path / "new" / "costs.json"
    table.save(path)
    assert CostTable.load(path) == table
    assert [p.name for p in path.parent.iterdir()] == ["costs.json"]
    assert arguments.fixed_costs(path) == table
    assert arguments.fixed_costs(None) is None


def test_a_file_by_hand_needs_only_the_curves(tmp_path: Path) -> None:
    path = tmp_path / "by_hand.json"
    path.write_text('{"entries": [{"draft": {"1": 0.001}, "target": {"1": 0.03, "64": 0.09}}]}')
    table = CostTable.load(path)
    assert table == CostTable((Costs({1: 0.001}, {1: 0.03, 64: 0.09}, 0.0, 0, 1),))
    assert table.at(4000, 16).target_seconds(1) == 0.03


ENTRY = {"draft": {"1": 1.0}, "target": {"1": 1.0}}
BAD = {
    "not JSON": ("{", "Expecting"),
    "not text": (b"\xff\xfe", "codec"),
    "an earlier format": (
        json.dumps(ENTRY | {"commit": 0.1}),
        "entries is missing, allowed is a list of",
    ),
    "a list": ("[1]", "holds [1], allowed is a JSON object"),
    "no entries": ('{"entries": []}', "no entries"),
    "no target": ('{"entries": [{"draft": {"1": 1}}]}', "entry 0: target is missing"),
    "an empty curve": (json.dumps({"entries": [ENTRY | {"draft": {}}]}), "'draft' is {}"),
    "no seconds": (json.dumps({"entries": [ENTRY | {"draft": {"1": 0}}]}), "above 0"),
    "not a number": (
        json.dumps({"entries": [ENTRY | {"target": {"1": math.nan}}]}),
        "target is {'1': nan}, allowed is",
    ),
    "endless": (
        json.dumps({"entries": [ENTRY | {"target": {"1": math.inf}}]}),
        "target is {'1': inf}, allowed is",
    ),
    "no width": (
        json.dumps({"entries": [ENTRY | {"target": {"0": 1}}]}),
        "widths and seconds above 0",
    ),
    "words": (json.dumps({"entries": [ENTRY | {"target": {"one": 1}}]}), "'one'"),
    "commit": (json.dumps({"entries": [ENTRY | {"commit": -1}]}), "commit is -1.0"),
    "context": (json.dumps({"entries": [ENTRY | {"context": -1}]}), "context is -1"),
    "rows": (json.dumps({"entries": [ENTRY | {"rows": 0}]}), "rows is 0"),
    "rows without end": (
        json.dumps({"entries": [ENTRY | {"rows": math.inf}]}),
        "rows is inf, allowed is a whole number",
    ),
    "about": (json.dumps({"entries": [ENTRY], "about": "x"}), "about is 'x', allowed is an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_none_of_costs_is_told_in_one_line(tmp_path: Path, case: str) -> None:
    written, told = BAD[case]
    path = tmp_path / "bad.json"
    path.write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.raises(UserError, match=r"bad\.json'") as error:
        CostTable.load(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_of_costs_is_told() -> None:
    with pytest.raises(UserError, match="No such file"):
        CostTable.load(Path("nowhere.json"))


def test_cost_files_are_for_all_drafters_or_one_for_each(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    tables = [CostTable((replace(SHORT, commit=float(i)),)) for i in range(3)]
    for table, path in zip(tables, paths, strict=True):
        table.save(path)
    assert arguments.costs_of_each([], ["a", "b"]) == {}
    assert arguments.costs_of_each(paths[:1], ["a", "b"]) == {"a": tables[0], "b": tables[0]}
    assert arguments.costs_of_each(paths[:2], ["a", "b", "a"]) == {"a": tables[0], "b": tables[1]}
    with pytest.raises(UserError, match="3 files of costs were given for 2 drafters"):
        arguments.costs_of_each(paths, ["a", "b"])


def test_curves_rise_and_large_batches_are_timed_at_fewer_widths(target: Target) -> None:
    (costs,) = measure_costs.measure(target, PLD().open(target), rows=2)
    for curve in (costs.draft, costs.target):
        assert (np.diff(list(curve.values())) >= 0).all()
    assert costs.commit > 0
    assert measure_costs.widths(1, "cpu") == ([1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 4, 8, 16, 32])
    assert measure_costs.widths(64, "cpu") == ([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
    assert measure_costs.widths(1, "cuda")[0][-1] == 512


def test_slow_works_are_timed_seldom_and_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = [0.0], list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(hardware, "ROUNDS_RANGE", (3, 25))
    times = {
        "fast": [0.2, *[0.001] * 99],
        "middle": [0.1] * 99,
        "slow": [2.0, 4.0, 3.0] + [9.0] * 99,
    }
    left = {name: iter(each) for name, each in times.items()}

    def work(name: str):
        def run() -> None:
            done.append(name)
            clock[0] += next(left[name])

        return run

    found = time_interleaved([work(n) for n in times], CPU, longest=3.15)
    # 1.05 s for each, after a warm-up of what is fast: 0.001 s 25 times at most, 0.1 s 10 times, 2
    # s 3 times at least
    assert [done.count(n) for n in times] == [1 + 25, 1 + 10, 3]
    assert found == pytest.approx([0.001, 0.1, 2.5])  # lower quartiles; of 2, 3, 4 it is 2.5
    places = [i / len(done) for i, name in enumerate(done) if name == "slow"]
    assert places[2] - places[1] > 0.3, "spread over the rounds"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = CostTable((SHORT, LONG, replace(SHORT, rows=4)), {"device": "a [b] machine"})
    for suffix in (".svg", ".png"):
        path = tmp_path / f"costs{suffix}"
        cost_charts.draw_costs(table, "a drafter", path)
        assert path.stat().st_size > 5000
    drawn = (tmp_path / "costs.svg").read_text()
    assert drawn.count("<!-- sₜ target pass, 100 tokens before -->") == 2, (
        "one for each number of rows"
    )
    assert "4 rows: draft step" in drawn


def test_a_picture_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'draftree\[plots\]'"):
        cost_charts.require_matplotlib()
