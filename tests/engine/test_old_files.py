"""What draftree wrote at commit df120e6 (tests/old, see make.sh there) still opens, and means what it meant."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftree import load
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.evaluation.result_rows import read_result
from draftree.evaluation.text_tables import result_table
from draftree.registry import build
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.tree import Tree

OLD = Path(__file__).parents[1] / "old"
DRAFTED = json.loads((OLD / "drafted.json").read_text())


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a copy of the folder: the files name each other as the commands did."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")


@pytest.mark.parametrize("name", DRAFTED)
def test_a_folder_drafts_what_it_drafted(name: str) -> None:
    target = Target.load("target")
    text = np.array(target.tokenizer.encode("2 3 4 5 6 7 8"))
    drafter = build("drafter", str(Path(name).absolute())).open(target)
    verified = target.prefill(target.new_cache(1, 8), [text[:-1]], drafter.needs)
    state = drafter.start([text[:-1]], text[-1:], verified.hidden_states)
    found, _ = drafter.expand(
        state, Tree.from_roots(np.arange(1), text[-1:]), np.arange(1), 3, Drawing()
    )
    there = np.isfinite(found.log_q[0])
    assert found.tokens[0][there].tolist() == DRAFTED[name]["tokens"]
    assert found.log_q[0][there] == pytest.approx(DRAFTED[name]["log_q"], abs=1e-4)


@pytest.mark.parametrize("name", DRAFTED)
def test_with_such_a_folder_the_text_is_the_target_s(name: str) -> None:
    engine = load(
        "target",
        drafter=Path(name),
        policy="static:paths=tree.json",
        costs=CostTable.load(Path("costs.json")),
    )
    with_, without = (
        load("target", drafter=d, policy="chain").complete("2 3 4 5", max_new_tokens=12)
        for d in (name, "pld")
    )
    assert engine.complete("2 3 4 5", max_new_tokens=12).tokens == with_.tokens == without.tokens


def test_costs_are_read() -> None:
    costs = CostTable.load(Path("costs.json")).at(50, 1)
    assert isinstance(costs, Costs)
    entry = json.loads(Path("costs.json").read_text())["entries"][0]
    assert (costs.draft[1], costs.target[128]) == (entry["draft"]["1"], entry["target"]["128"])


def test_a_result_is_read_and_begun_again(draftree: Callable[..., tuple[int, str, str]]) -> None:
    result = read_result(Path("result.json"))
    assert [row["drafter"] for row in result["rows"]] == ["plain", "edd", "edd", "rest", "rest"]
    assert [row["policy"] for row in result_table(result["rows"])][:2] == ["", "chain:length=3"]
    asked = "bench --suite texts.jsonl --target target --drafter edd --policy chain:length=3 --max-new-tokens 24 --limit 3"
    assert (
        draftree(*asked.split(), "--costs", "costs.json", "--out", "again.json", "--json")[0] == 0
    )
    again = read_result(Path("again.json"))
    for name in (
        "drafter",
        "policy",
        "acceptor",
        "acceptance_length",
        "nodes_per_step",
        "same_output",
    ):
        assert [row.get(name) for row in again["rows"]] == [
            row.get(name) for row in result["rows"][:2]
        ], name


@pytest.mark.parametrize("kind", ["rest", "aded"])
def test_a_datastore_is_shown(kind: str, draftree: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = draftree("datastore", "show", kind, "--json")
    assert status == 0
    assert (
        json.loads(out)["tokens"]
        == json.loads((OLD / kind / "config.json").read_text())["draftree"]["tokens"]
    )


@pytest.mark.parametrize("name", ["edd", "glide"])
def test_training_goes_on_from_a_checkpoint(
    name: str, draftree: Callable[..., tuple[int, str, str]]
) -> None:
    asked = f"train {name} --target target --data texts.jsonl --out more --init-from {name} --epochs 1 --batch-size 8"
    assert draftree(*asked.split())[0] == 0
    assert build("drafter", "more").open(Target.load("target"))
