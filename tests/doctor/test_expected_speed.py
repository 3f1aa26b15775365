"""`draftree doctor --speed`: what to expect of a pairing on a device, from its figures alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import cost_estimate
from draftree.cost_estimate import cost_key, target_size
from draftree.costs.cost_model import Speed
from draftree.doctor import expected_speed
from draftree.doctor.expected_speed import examine
from draftree.drafters.eagle3 import EAGLE3
from draftree.models.graph_capture import Graphs
from draftree.testing import tiny_target
from draftree.testing.fakes import PassRecorder
from folders import target_folder

Command = Callable[..., tuple[int, str, str]]
SPEED = Speed(bandwidth=1e9, rate=1e9, overhead=1e-6)


@pytest.fixture(autouse=True)
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_estimate, "_LEARNERS", {})
    monkeypatch.setattr(cost_estimate, "machine_speed", lambda device, dtype: SPEED)


def test_figures_follow_from_the_device() -> None:
    target = tiny_target()
    drafter = EAGLE3().example(target)
    report, size = examine(target, drafter, "eagle2"), target_size(target.decoder)
    assert report.floor == size.bytes / SPEED.bandwidth
    assert report.ridge == pytest.approx(size.bytes / size.weights)  # both rates are 10⁹
    assert report.passes[1] >= report.floor
    assert report.passes[128] > 8 * report.passes[1] > 0
    assert report.timings == 0
    names = [shape.name for shape in report.shapes]
    assert names == ["chain of 1", "chain of 3", "chain of 5", "eagle2"]
    assert [shape.nodes for shape in report.shapes] == [2, 4, 6, 61]
    for shape in report.shapes:
        assert shape.even == pytest.approx(shape.seconds / report.passes[1])
        assert shape.seconds > report.passes[1]


def test_a_tree_counts_the_draft_steps_that_its_policy_takes() -> None:
    """eagle2 drafts one step below the root, and five more below the ten best nodes."""
    target = tiny_target()
    drafter = EAGLE3().example(target)
    costs = cost_estimate.learnt_costs(target, drafter).at(512, 1)
    *_, tree = examine(target, drafter, "eagle2:nodes=20").shapes
    drafts = costs.draft_seconds(1) + 5 * costs.draft_seconds(10)
    assert tree.seconds == pytest.approx(
        drafts + costs.target_seconds(21) + costs.commit + costs.catch_up + costs.overhead
    )
    static = examine(target, drafter, "eagle2:nodes=200,depth=2,width=3").shapes[-1]
    assert static.nodes == 1 + 3 + 9


def test_recorded_passes_start_fewer_operations() -> None:
    """Their costs are learnt apart from those of passes that run as they are."""
    eager, recorded = tiny_target(), tiny_target(capture=Graphs(PassRecorder()))
    sizes = [target_size(each.decoder) for each in (eager, recorded)]
    assert sizes[1].operations < sizes[0].operations / 2
    assert sizes[1].weights == sizes[0].weights
    assert cost_key(eager) != cost_key(recorded)
    assert examine(recorded, EAGLE3().example(recorded), "eagle2").recorded


@pytest.mark.parametrize("memory", [False, True])
def test_report_fits_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftree: Command, memory: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if memory:
        from draftree.doctor import expected_speed

        real = expected_speed.examine

        def on_gpu(*given: Any) -> Any:
            found = real(*given)
            object.__setattr__(found, "memory", (60_000_000_000, 80_000_000_000))
            return found

        monkeypatch.setattr(expected_speed, "examine", on_gpu)
    command = ("doctor", "--target", target_folder(tmp_path / "t"), "--drafter", "pld", "--speed")
    status, out, _ = draftree(*command)
    assert status == 0
    assert len(out.splitlines()) <= 40
    assert "estimates, as no step has run here yet" in " ".join(out.split())
    assert ("memory: 60.0 of 80.0 GB free" in out) == memory


def test_report_is_json_and_options_of_other_reports_are_refused(
    tmp_path: Path, draftree: Command
) -> None:
    command = ("doctor", "--target", target_folder(tmp_path / "t"), "--drafter", "pld", "--speed")
    status, out, _ = draftree(*command, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["bandwidth"] == SPEED.bandwidth
    assert found["passes"]["1"] > 0
    status, _, err = draftree(*command, "--lossless")
    assert (status, err.count("\n")) == (2, 1)
    assert "--lossless and --speed were given, allowed is one of them" in err
    status, _, err = draftree(*command, "--limit", "3")
    assert status == 2
    assert "--limit was given, allowed only without --speed" in err


def test_a_gpu_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = EAGLE3().example(target)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    monkeypatch.setattr(expected_speed, "machine", lambda device: {"device": "GPU"})
    known = cost_estimate.learnt_costs(target, drafter)
    monkeypatch.setattr(expected_speed, "learnt_costs", lambda target, drafter: known)
    assert examine(target, drafter, "eagle2").memory is None
    vars(target.decoder)["device"] = torch.device("cuda")
    assert examine(target, drafter, "eagle2").memory == (1, 2)
