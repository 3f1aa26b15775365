"""The search for knobs: what it tries, that it finds what is planted, goes on where it was, and keeps the default honestly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.engine import Engine, generate_plain
from draftree.errors import UserError
from draftree.evaluation.bootstrap import Ratio
from draftree.evaluation.policy_search import OptionSearch, SearchResult, Space, search_space, spec
from draftree.evaluation.trace_store import Recordings
from draftree.policies.base import Policy
from draftree.registry import build, names
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import Always, tiny_target

REQUESTS = [Request([3, 1, n], 14, number=n) for n in range(1, 17)]
COSTS = CostTable((Costs({1: 0.2}, {1: 1.0, 8: 1.2}),))


@pytest.fixture(scope="module")
def target() -> Target:
    found = tiny_target()
    found.tokenizer = Target.load("demo").tokenizer
    return found


def search(target: Target, folder: Path, policy: str) -> OptionSearch:
    plans = [
        [*r.prompt, *w]
        for r, w in zip(REQUESTS, generate_plain(target, REQUESTS).tokens, strict=True)
    ]
    drafter = Always(plans, 61)
    recordings = Recordings.open(folder / "of", target, [drafter.needs])
    recordings.record(REQUESTS)
    return OptionSearch(
        Engine(target, drafter, build("policy", policy), costs=COSTS), "always", policy, recordings
    )


def test_tried_values_follow_from_type_range_and_default() -> None:
    found = search_space(build("policy", "pct"))
    assert found["width"] == ("whole", 1, 20)
    assert found["gain"] == ("choice", [False, True], None)
    assert found["leaf_threshold"] == ("share", 0.01 / 16, 0.16)
    assert set(search_space(build("policy", "pct"), ["width"])) == {"width"}
    with pytest.raises(UserError, match="did you mean 'width'"):
        search_space(build("policy", "pct"), ["widht"])
    assert spec("pct", {"width": 3, "gain": False}) == "pct:width=3,gain=False"
    assert build("policy", "pct:width=3,gain=False").width == 3  # type: ignore[attr-defined]


def test_tried_values_are_allowed_ones() -> None:
    for name in names("policy"):
        policy = build("policy", name)
        for option, (kind, low, high) in search_space_or_none(policy).items():
            for value in (low, high) if kind != "choice" else low:
                build("policy", f"{name}:{option}={value}")


def search_space_or_none(policy: Policy) -> Space:
    """The values to try, none where a policy has no option that can be searched."""
    try:
        return search_space(policy)
    except UserError:
        return Space()


def test_a_search_at_another_temperature_is_another_search(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    cold = search(target, tmp_path, "chain")
    tried = search_space(build("policy", "chain"))
    found = {
        replace(cold, temperature=t)._study(REQUESTS, tried, tmp_path / "storage").study_name
        for t in (0.0, 1.0)
    }
    assert len(found) == 2


def test_a_search_for_other_weights_is_another_search(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    tried, weights = search_space(build("policy", "chain")), tmp_path / "model.safetensors"
    work, found = search(target, tmp_path, "chain"), set[str]()
    for text in ("first", "trained further"):
        weights.write_text(text)
        named = replace(work, drafter=f"edd:checkpoint={weights}")
        found.add(named._study(REQUESTS, tried, tmp_path / "storage").study_name)
    assert len(found) == 2


def test_a_longer_chain_is_found_where_every_draft_is_right_and_the_search_goes_on(
    target: Target, tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    work, calls = search(target, tmp_path, "chain:length=1"), list[int]()
    with pytest.raises(UserError, match="nothing to search"):
        work.run(REQUESTS, 3)
    work = search(target, tmp_path, "chain")
    first = work.run(REQUESTS, 4, tmp_path / "kept", tell=lambda done, *_: calls.append(done))
    assert calls == [0, 1, 2, 3, 4]
    found = work.run(REQUESTS, 10, tmp_path / "kept", tell=lambda done, *_: calls.append(done))
    assert calls[5:] == [4, *range(5, 11)], "what was tried is not tried again"
    assert found.policy != "chain"
    assert int(found.policy.rpartition("=")[2]) > 5
    assert found.better
    assert found.recommendation().startswith(f"Use --policy {found.policy}")
    best = {s: r["counted_speedup"] for s, r in found.judged.items()}
    assert found.beside.value == pytest.approx(best[found.policy] / best["chain"])
    assert found.judged["chain"]["prompts"] == found.searched["chain"]["prompts"] == 8
    assert first.trials == 4
    assert json.loads(json.dumps(found.as_json()))["keep_default"] is False


def test_the_default_is_kept_where_the_interval_includes_1() -> None:
    of = lambda low, high: SearchResult(
        "chain:length=6", "chain", {}, {}, Ratio(1.02, low, high, 0.5), 8
    )
    assert of(0.98, 1.05).recommendation().startswith("Keep the default")
    assert of(1.01, 1.05).recommendation().startswith("Use --policy chain:length=6")
    few = replace(of(1.01, 1.05), beside=Ratio(1.02, 1.01, 1.05, 1.0, few=True))
    assert not few.better
    assert few.recommendation().startswith("Keep the default: too few prompts")


@pytest.mark.parametrize("text", ["some text", '{"rows": []}', "[1]", "7"])
def test_a_file_that_optuna_did_not_write_stays_as_it_is(text: str, tmp_path: Path, capsys) -> None:
    pytest.importorskip("optuna")
    (file := tmp_path / "notes").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--policy", "chain", "--storage", str(file)])
    assert f"--storage is '{file}', allowed is" in (told := capsys.readouterr().err)
    assert told.count("\n") == 1
    assert file.read_text() == text


def test_a_journal_that_optuna_cannot_read_is_told(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "broken").write_text('{"op_code": 0}\n')
    with pytest.raises(UserError, match="cannot be used as --storage"):
        search(target, tmp_path, "chain").run(REQUESTS, 1, tmp_path / "broken")


def test_the_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    words = ["tune", "--drafter", "vdm", "--policy", "chain", "--limit", "4", "--max-new-tokens", "6", "--trials", "2",
             "--recording", tmp_path / "of", "--machine", "h100-8b", "--json"]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main(list(map(str, words)))
    said = json.loads(capsys.readouterr().out)
    assert said["simulated"]
    assert said["trials"] == 2
    assert said["default"] == "chain"
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--policy", "chain", "--knob", "width"])
    assert "unknown knob of policy" in capsys.readouterr().err
