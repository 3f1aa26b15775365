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
from draftree.evaluation.arrivals import (
    ServedRequest,
    arrival_times,
    figures_of_run,
    serve_arrivals,
)
from draftree.evaluation.plain_decoding import plain_engine
from draftree.policies.chain import Chain
from draftree.registry import part
from draftree.request import Request
from draftree.scheduling.handle import RequestStats
from draftree.scheduling.options import SchedulerOptions
from draftree.testing.fakes import tiny_target


def test_arrivals_are_a_poisson_process_by_their_seed() -> None:
    times = arrival_times(4000, 5.0, 1)
    assert (
        times.tolist()
        == arrival_times(4000, 5.0, 1).tolist()
        != arrival_times(4000, 5.0, 2).tolist()
    )
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() == pytest.approx(0.2, rel=0.06)


def test_figures_of_a_run_are_counted_from_its_times() -> None:
    def served(due: float, times: list[float], counts: list[int], accepted: int) -> ServedRequest:
        steps = len(times) - 1
        stats = RequestStats(3, sum(counts), steps, 4 * steps, accepted, 1, 0.0, 0.0, 0.0)
        return ServedRequest(cast(Any, SimpleNamespace(stats=stats)), due, times, counts)

    found = figures_of_run(
        [served(1.0, [1.5, 2.5, 3.1], [1, 2, 3], 3), served(2.0, [3.0], [1], 0)], 4.0
    )
    assert (
        found["requests"],
        found["new_tokens"],
        found["tokens_per_second"],
        found["preemptions"],
    ) == (2, 7, 1.75, 2)
    assert found["time_to_first_token"]["median"] == 0.75
    assert found["time_between_tokens"]["median"] == pytest.approx(0.2), "0.5, 0.5, 0.2, 0.2, 0.2"
    assert found["time_between_updates"]["median"] == pytest.approx(0.8)
    assert (found["tokens_per_step"], found["nodes_per_step"]) == (2.5, 4.0)
    assert figures_of_run([served(0.0, [1.0], [1], 0)], 1.0)["time_between_tokens"] is None


def test_requests_are_submitted_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    step = lambda engine: Engine.step(engine)
    monkeypatch.setattr(
        arrivals,
        "time",
        SimpleNamespace(
            perf_counter=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s)
        ),
    )
    target = tiny_target()
    engine = Engine(target, part("drafter", "pld")().example(target), Chain())

    def timed() -> Any:
        clock.now += 0.5
        return step(engine)

    monkeypatch.setattr(engine, "step", timed)
    requests = [Request([5, 6, n], 4, number=n) for n in range(3)]
    done = list[int]()
    found, seconds = serve_arrivals(engine, requests, np.array([0.2, 0.4, 30.0]), done.append)
    assert [one.times[0] for one in found] == pytest.approx([0.7, 1.2, 30.5])
    assert done[-1] == 3
    assert 30.5 <= seconds < 33
    assert [one.handle.result().tokens for one in found] == [
        engine.plain([r]).tokens[0] for r in requests
    ]
    assert all(sum(one.counts) == 4 for one in found)


def test_the_command_saves_and_prints_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "r.json"
    prompts.write_text("def f(x):\nimport os\nclass A:\nfor i in\n")
    common = [
        "bench",
        "--arrivals",
        "200",
        "--suite",
        str(prompts),
        "--drafter",
        "pld",
        "--policy",
        "chain",
        "-n",
        "6",
    ]

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*common, "--out", str(out), *more])
        return int(ended.value.code or 0), *capsys.readouterr()

    status, said, told = run("--json", "--max-sequences", "2", "-t", "0", "-t", "1")
    assert status == 0, told
    result = json.loads(said)
    assert result == json.loads(out.read_text())
    assert [(r["drafter"], r["policy"], r["temperature"], r["requests"]) for r in result["rows"]] == [
        (None, None, 0, 4), ("pld", "chain", 0, 4), (None, None, 1, 4), ("pld", "chain", 1, 4)
    ]  # fmt: skip
    assert result["provenance"]["arrivals"] == 200
    assert result["provenance"]["limits"]["max_sequences"] == 2
    status, said, told = run("--force")
    assert status == 0, told
    assert "first token" in said
    for more in (("--repeats", "2"), ("--all-turns",), ("--batch", "2")):
        status, said, told = run("--force", *more)
        assert (status, said) == (2, "")
        assert "with --arrivals" in told
    assert run("--force", "--arrivals", "0")[0] == 2


def test_plain_decoding_writes_the_same_texts_in_the_scheduler() -> None:
    target = tiny_target()
    engine = plain_engine(target)
    requests = [Request([5, 6, n], 3 + n, number=n) for n in range(4)]
    found, _ = serve_arrivals(engine, requests, np.zeros(4))
    assert [one.handle.result().tokens for one in found] == [
        engine.plain([r]).tokens[0] for r in requests
    ]
    assert all(
        one.handle.stats.drafted == 0 and one.handle.stats.steps == 2 + n
        for n, one in enumerate(found)
    )


def test_engines_take_turns_with_batches() -> None:
    target = tiny_target()
    engines = {
        "plain": plain_engine(target),
        "pld": Engine(target, part("drafter", "pld")().example(target), Chain()),
    }
    requests = {name: [Request([5, 6, n], 4, number=n) for n in range(5)] for name in engines}
    turns = [(name, [r.number for r in batch]) for name, batch in arrivals._alternate(requests, 2)]
    assert turns == [("plain", [0, 1]), ("pld", [0, 1]), ("pld", [2, 3]), ("plain", [2, 3])]
    done = list[int]()
    found = arrivals.measure_batches(engines, requests, 2, SchedulerOptions(), done.append)
    assert done == [2, 4, 6, 8]
    for figures in found.values():
        assert (figures["requests"], figures["new_tokens"], len(figures["seconds_of_batches"])) == (
            4,
            16,
            2,
        )
        assert figures["seconds"] == pytest.approx(sum(figures["seconds_of_batches"]))
    assert found["plain"]["tokens_per_step"] == 1.0
    assert engines["pld"].scheduler.options.max_sequences == 2


def test_a_batch_size_does_not_remember_the_answers_of_another() -> None:
    target = tiny_target(context=64)
    suffix = part("drafter", "suffix")().open(target)
    engines = {"suffix": Engine(target, suffix, Chain())}
    requests = {"suffix": [Request([5, 6, n], 24, number=n) for n in range(4)]}
    first, again = (
        arrivals.measure_batches(engines, requests, 2, SchedulerOptions())["suffix"]
        for _ in range(2)
    )
    assert engines["suffix"].carried is not None
    assert again["tokens_per_step"] == first["tokens_per_step"]


def test_no_prompt_is_in_a_cache_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, served = tiny_target(context=64), list[ServedRequest]()
    monkeypatch.setattr(arrivals, "figures_of_run", lambda found, _: served.extend(found) or {})
    engine = Engine(target, part("drafter", "suffix")().open(target), Chain())
    requests = [Request([n, *range(1, 41)], 4, number=n) for n in range(4)]
    arrivals.measure_batches({"suffix": engine}, {"suffix": requests}, 2, SchedulerOptions())
    arrivals.measure_arrivals(engine, requests, np.zeros(4), SchedulerOptions())
    assert [one.handle.cached_tokens for one in served] == [0] * 8


def test_the_command_measures_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "r.json"
    prompts.write_text("def f(x):\nimport os\nclass A:\nfor i in\n")
    common = [
        "bench",
        "--suite",
        str(prompts),
        "--drafter",
        "pld",
        "--policy",
        "chain",
        "-n",
        "6",
        "--out",
        str(out),
    ]

    def run(*more: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*common, *more])
        return int(ended.value.code or 0), *capsys.readouterr()

    status, said, told = run("--json", "--batch", "1", "--batch", "3")
    assert status == 0, told
    rows = json.loads(said)["rows"]
    assert [(r["batch"], r["drafter"], r["requests"]) for r in rows] == [
        (1, None, 4), (1, "pld", 4), (3, None, 3), (3, "pld", 3)
    ]  # fmt: skip
    assert [r["speedup"] for r in rows if r["drafter"] is None] == [1.0, 1.0]
    assert rows[3]["speedup"] == pytest.approx(
        rows[3]["tokens_per_second"] / rows[2]["tokens_per_second"]
    )
    status, said, told = run("--force", "--batch", "2")
    assert (status, "plain" in said, "speedup" in said) == (0, True, True), told
    both = ("-t", "1", "--acceptor", "match", "--acceptor", "rejection")
    status, said, told = run("--force", "--batch", "2", "--json", *both)
    assert status == 0, told
    assert [r["rule"] for r in json.loads(said)["rows"]] == [None, "match", "rejection"]
    status, said, told = run("--force", "--batch", "2", *both)
    assert "rejection" in said
    for more, named in ((("--batch", "5"), "number of prompts, 4"), (("--batch", "2", "--repeats", "2"), "with --batch"),
                        (("--batch", "2", "--max-sequences", "4"), "with --batch"), (("--batch", "0"), "--batch")):  # fmt: skip
        status, said, told = run("--force", *more)
        assert (status, said) == (2, "")
        assert named in told
