"""`draftree bench --arrivals`: requests that arrive at random times, and the figures of a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from draftree.cli.app import main
from draftree.engine import Engine
from draftree.evaluation import arrivals
from draftree.evaluation.arrivals import Served, arrival_times, row, serve
from draftree.policies.chain import Chain
from draftree.registry import part
from draftree.request import Request
from draftree.scheduling.handle import RequestStats
from draftree.testing.fakes import tiny_target


def test_arrivals_are_a_poisson_process_by_their_seed() -> None:
    times = arrival_times(4000, 5.0, 1)
    assert times.tolist() == arrival_times(4000, 5.0, 1).tolist() != arrival_times(4000, 5.0, 2).tolist()
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() == pytest.approx(0.2, rel=0.06)


def test_figures_of_a_run_are_counted_from_its_times() -> None:
    def served(due: float, times: list[float], counts: list[int], accepted: int) -> Served:
        steps = len(times) - 1
        stats = RequestStats(3, sum(counts), steps, 4 * steps, accepted, 1, 0.0, 0.0, 0.0)
        return Served(cast(Any, SimpleNamespace(stats=stats)), due, times, counts)

    found = row([served(1.0, [1.5, 2.5, 3.1], [1, 2, 3], 3), served(2.0, [3.0], [1], 0)], 4.0)
    assert (found["requests"], found["new_tokens"], found["tokens_per_second"], found["preemptions"]) == (2, 7, 1.75, 2)
    assert found["time_to_first_token"]["median"] == 0.75
    assert found["time_between_tokens"]["median"] == pytest.approx(0.2), "0.5, 0.5, 0.2, 0.2, 0.2"
    assert found["time_between_updates"]["median"] == pytest.approx(0.8)
    assert (found["tokens_per_step"], found["nodes_per_step"]) == (2.5, 4.0)
    assert row([served(0.0, [1.0], [1], 0)], 1.0)["time_between_tokens"] is None


def test_requests_are_submitted_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    step = lambda engine: Engine.step(engine)
    monkeypatch.setattr(
        arrivals,
        "time",
        SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s)),
    )
    target = tiny_target()
    engine = Engine(target, part("drafter", "pld")().example(target), Chain())

    def timed() -> Any:
        clock.now += 0.5
        return step(engine)

    monkeypatch.setattr(engine, "step", timed)
    requests = [Request([5, 6, n], 4, number=n) for n in range(3)]
    done = list[int]()
    found, seconds = serve(engine, requests, np.array([0.2, 0.4, 30.0]), done.append)
    assert [one.times[0] for one in found] == pytest.approx([0.7, 1.2, 30.5])
    assert done[-1] == 3
    assert 30.5 <= seconds < 33
    assert [one.handle.result().tokens for one in found] == [engine.plain([r]).tokens[0] for r in requests]
    assert all(sum(one.counts) == 4 for one in found)


def test_the_command_saves_and_prints_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "r.json"
    prompts.write_text("def f(x):\nimport os\nclass A:\nfor i in\n")
    common = ["bench", "--arrivals", "200", "--suite", str(prompts), "--drafter", "pld", "--policy", "chain", "-n", "6"]

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*common, "--out", str(out), *more])
        return int(ended.value.code or 0), *capsys.readouterr()

    status, said, told = run("--json", "--max-sequences", "2", "-t", "0", "-t", "1")
    assert status == 0, told
    result = json.loads(said)
    assert result == json.loads(out.read_text())
    assert [(r["drafter"], r["policy"], r["temperature"], r["requests"]) for r in result["rows"]] == [
        ("pld", "chain", 0, 4), ("pld", "chain", 1, 4)
    ]  # fmt: skip
    assert result["provenance"]["arrivals"] == 200
    assert result["provenance"]["limits"]["max_sequences"] == 2
    status, said, told = run("--force")
    assert status == 0, told
    assert "first token" in said
    for more in (("--repeats", "2"), ("--all-turns",)):
        status, said, told = run("--force", *more)
        assert (status, said) == (2, "")
        assert "with --arrivals" in told
    assert run("--force", "--arrivals", "0")[0] == 2
