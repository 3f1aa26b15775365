"""Seconds of phases are exclusive, those of a step are all there, and a slow part is found where it lies."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import fresh
from draftree import Request
from draftree.acceptors.greedy import Greedy
from draftree.batch import SequenceBatch
from draftree.costs.step_costs import Costs
from draftree.engine import Engine
from draftree.evaluation import step_profile
from draftree.evaluation.step_profile import Ceilings, part_figures, per_token, profile_step
from draftree.metrics import Stats, Work, total
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import ForwardBatch
from draftree.models.kv_cache import SlotCache
from draftree.policies.chain import Chain
from draftree.target.target import Target
from draftree.testing import Always, tiny_target
from draftree.utils.profiler import in_phase, phase, record_phases
from folders import target_folder

SLOW = 0.01
COSTS = Costs({1: 1.0}, {1: 1.0})


@in_phase("inner")
def sleep(seconds: float = SLOW) -> None:
    time.sleep(seconds)


class Clock:
    """Stands still, but for calls of what it slows."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def slowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same, a second later."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.now += 1
            return function(*args, **kwargs)

        return call


def test_nested_phases_are_not_counted_twice() -> None:
    seconds: dict[str, float] = {}
    sleep()  # nobody records
    with record_phases(seconds):
        time.sleep(SLOW)  # in no phase
        with phase("outer"):
            sleep()
            time.sleep(2 * SLOW)
            with pytest.raises(ZeroDivisionError), phase("failing"):
                _ = 1 / 0
        sleep()
    sleep()
    assert set(seconds) == {"outer", "outer/inner", "outer/failing", "inner"}
    assert seconds["outer"] >= 2 * SLOW
    assert seconds["outer/inner"] >= SLOW
    assert sum(seconds.values()) >= 4 * SLOW > 4 * seconds["outer/failing"]


def written(target: Target) -> Stats:
    """The figures of a text of 24 tokens."""
    request = Request([5, 6, 7], 24)
    plan = Engine(target, Always([], 61), Chain(), costs=COSTS).plain([request]).tokens[0]
    return (
        Engine(target, Always([[5, 6, 7, *plan]], 61), Chain(), costs=COSTS)
        .write([request], reuse=False)
        .stats
    )


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_the_parts_of_a_step_are_all_of_its_time(target: Target) -> None:
    stats = written(target)
    found = {part.name: part for part in part_figures(stats)}
    assert set(found) == {
        "prompt", "draft bookkeeping", "growing", "packing, mask", "target pass", "p, accepting", "committing", "text", "other",
    }  # fmt: skip
    assert sum(part.share for part in found.values()) == pytest.approx(1)
    steps = len(stats.work) * sum(part.seconds for name, part in found.items() if name != "prompt")
    assert steps + found["prompt"].seconds == pytest.approx(stats.seconds)
    assert found["other"].share < 0.5
    assert total([stats, stats]).phases == {
        name: pytest.approx(2 * s) for name, s in stats.phases.items()
    }


@pytest.mark.parametrize(
    ("where", "name", "part"),
    [
        (Chain, "draft", "growing"),
        (Chain, "observe", "growing"),
        (Always, "expand", "draft bookkeeping"),
        (Always, "commit", "draft bookkeeping"),
        (Greedy, "accept", "p, accepting"),
        (SlotCache, "commit_tokens", "committing"),
        (SequenceBatch, "_find_ending", "text"),
        (ForwardBatch, "forest", "packing, mask"),
    ],
)
def test_a_slow_part_is_found(
    target: Target, monkeypatch: pytest.MonkeyPatch, where: type, name: str, part: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    own = getattr(where, name)
    monkeypatch.setattr(
        where, name, staticmethod(clock.slowed(own)) if where is ForwardBatch else clock.slowed(own)
    )
    found = {p.name: p.seconds for p in part_figures(written(target))}
    assert found.pop("prompt", 0) in (0, 1), "the prompt is fed and kept"
    found.pop("other", None)  # the prompt's token
    assert list(found) == [part]
    assert found[part] >= 0.5


def test_floors_are_of_what_a_pass_reads_or_does(target: Target) -> None:
    decoder = target.decoder
    table = decoder.model.get_input_embeddings().weight
    tied = table is decoder.model.get_output_embeddings().weight
    numbers = sum(p.numel() for p in decoder.model.parameters()) - (0 if tied else table.numel())
    keys = sum(s.heads * (s.key + s.value) for s in decoder.shapes)
    size = table.element_size()
    slow_memory, slow_arithmetic = Ceilings(1.0, 1e30), Ceilings(1e30, 1.0)
    assert slow_memory.floor(decoder, 8, 10) == pytest.approx((numbers + 10 * keys) * size)
    assert slow_arithmetic.floor(decoder, 8, 10) == pytest.approx(2 * numbers * 8)
    stats = Stats(1, work=[Work((), 4, 1, 9)], seconds=1.0, phases={"verify/model": 0.25})
    (one, other) = profile_step(target, stats)
    assert (one.name, one.seconds, one.share, other.name) == ("target pass", 0.25, 0.25, "other")
    assert one.floor is not None
    assert 0 < one.floor < 0.25


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 2), (torch.float32, 1), (torch.float64, 1)]
)
def test_the_faster_of_half_precision_and_float32_is_the_limit(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.5, 4.0, 2.0][: 1 + count]

    def time_each(works: list[Callable[[], torch.Tensor]], *_: Any) -> list[float]:
        assert len(works) == len(seconds)
        assert {work().dtype for work in works} >= {dtype, torch.float32}
        return seconds

    monkeypatch.setattr(step_profile, "time_interleaved", time_each)
    found = Ceilings.measure(CausalLM(fresh("llama").to(dtype)))
    assert found.operations == 2 * step_profile.RATE**3 / min(seconds[1:])
    assert found.bytes == 4 * step_profile.READ / 0.5


@pytest.fixture
def folder(tmp_path: Path, quick: None) -> Path:
    """Of a tiny target, for which costs are measured in a moment."""
    return target_folder(tmp_path / "target")


def test_the_command_line_tells_it(
    draftree: Callable[..., tuple[int, str, str]], folder: Path
) -> None:
    asked = (
        "generate",
        "5 apples",
        "--target",
        folder,
        "--max-new-tokens",
        6,
        "--drafter",
        "suffix",
        "--profile",
    )
    status, out, _ = draftree(*asked)
    assert (status, "target pass" in out, "floor" in out) == (0, True, True)
    found = json.loads(draftree(*asked, "--json")[1])["profile"]
    assert {"target pass", "growing"} <= {part["name"] for part in found}


def test_a_benchmark_draws_it(
    draftree: Callable[..., tuple[int, str, str]], folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    suite = tmp_path / "s.jsonl"
    out = tmp_path / "r.json"
    picture = tmp_path / "p.svg"
    suite.write_text('{"prompt": "2 + 3"}\n')
    asked = (
        "bench",
        "--target",
        folder,
        "--suite",
        suite,
        "--out",
        out,
        "--drafter",
        "suffix",
        "--max-new-tokens",
        5,
    )
    assert draftree(*asked, "--profile", tmp_path / "p.txt")[0] == 2
    assert not out.exists()
    assert draftree(*asked, "--profile", picture)[0] == 0
    assert "target pass" in picture.read_text()
    for row in json.loads(out.read_text())["rows"]:
        assert sum(per_token(row).values()) == pytest.approx(
            1e3 * row["seconds"] / row["new_tokens"]
        )
