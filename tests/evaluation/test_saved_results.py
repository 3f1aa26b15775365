"""Saved results: the work of the steps as it is coded, and results of the first format."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.errors import UserError
from draftree.evaluation import result_rows, step_codec
from draftree.metrics import Stats, Step, Work

ROOT = Path(__file__).parents[2]


def test_a_result_of_format_1_is_read() -> None:
    old = ROOT / "benchmarks" / "results" / "policies_edd.json"
    assert "format" not in json.loads(old.read_text())
    assert result_rows.read_result(old)["rows"]


Columns = st.lists(
    st.tuples(
        st.lists(st.integers(1, 5), max_size=3),
        st.integers(0, 4),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=12,
)


@given(prompts=st.lists(Columns, max_size=3), start=st.integers(1, 99))
def test_coded_work_is_the_work(prompts: list[Any], start: int) -> None:
    stats = []
    for prompt in prompts:
        context = start
        steps = []
        work = []
        for widths, nodes, accepted, paused in prompt:
            steps.append(Step(min(accepted, nodes), nodes, nodes))
            finds = len(widths) * accepted
            work.append(Work(tuple(widths), 1 + nodes, 1, context, finds, paused))
            context += steps[-1].accepted + 1
        stats.append(Stats(steps=steps, work=work))
    coded = json.loads(json.dumps(step_codec.encode(stats)))
    assert step_codec.decode_steps(coded, "a row") == [(s.steps, s.work) for s in stats]
    del coded["finds"], coded["paused"]  # as in older results
    assert step_codec.decode_steps(coded, "a row") == [
        (s.steps, [replace(w, finds=0, paused=False) for w in s.work]) for s in stats
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"fed": [3, 1]},
        {"shape": [0, 1, 2]},
        {"shape": [7, 2]},
        {"depth": [1, -2]},
        {"steps": [1]},
        {"finds": [2, 1]},
        {"paused": [1, 1]},
    ],
)
def test_a_broken_log_is_told(change: dict[str, list[int]]) -> None:
    log = step_codec.encode(
        [Stats(steps=[Step(1, 2, 2)] * 2, work=[Work((1,), 3, 1, 5), Work((1,), 3, 1, 7)])]
    )
    log |= change  # of two steps
    with pytest.raises(UserError):
        step_codec.decode_steps(log, "a row")
