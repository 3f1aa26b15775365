"""Suites, runs beside the baseline, the figures made of them, and the tables."""

import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from rich.console import Console

from draftree.cli import main
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation import report, suites
from draftree.evaluation.runner import Cell, Journal, Written, difference, product
from draftree.policies.chain import Chain
from draftree.stats import Stats, Step
from draftree.terminal import narrowed, table
from draftree.testing.fakes import tiny_target
from draftree.text import Request
from folders import target_folder

ROOT = Path(__file__).parent.parent
ROW = {"drafter", "policy", "temperature", "prompts", "new_tokens", "steps", "acceptance_length", "alpha", "nodes_per_step",
       "depth_per_step", "draft_seconds", "verify_seconds", "seconds", "tokens_per_second", "speedup", "same_output",
       "different_prompts", "repeated_ngrams", "intervals", "overlap", "cost_ratio"}  # fmt: skip
PROMPTS = [
    {"category": "a", "turns": ["first?", "second?"]},
    {"category": "a", "question": "how?", "answer": "so"},
    {"category": "b", "prompt": "abcabcabc"},
    {"category": "b", "prompt": "x" * 150},
    {"messages": [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "yes"}]},
    {"conversations": [{"from": "human", "value": "hm"}]},
    {"text": "raw"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)))
    return path


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args])
    return int(ended.value.code or 0)


def test_rows_are_chats_or_raw_text(prompts: Path) -> None:
    suite = suites.load(str(prompts))
    chat = lambda text: [{"role": "user", "content": text}]
    assert [p.content for p in suite.prompts] == [
        chat("first?"), chat("how?"), "abcabcabc", "x" * 150, chat("hm"), chat("hm"), "raw",
    ]  # fmt: skip
    assert [p.number for p in suite.select(["b"])] == [2, 3]
    assert suites.load("demo").categories == ("math", "code")


@pytest.mark.parametrize(
    ("row", "told"),
    [('{"id": 1}', "allowed is turns"), ('{"turns": []}', "'turns' is"), ('{"prompt": 3}', "'prompt' is '3'"),
     ("{", "not JSON"), ('{"messages": [{"role": "assistant", "content": "x"}]}', "no question"), ("", "no prompts")],
)  # fmt: skip
def test_a_row_that_is_no_prompt_is_told_with_its_line(tmp_path: Path, row: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(row)
    with pytest.raises(UserError, match=told):
        suites.load(str(path))


def test_bench_runs_the_whole_product(folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "r.json"
    status = run("--suite", str(prompts), "--target", folder, "--drafter", "pld", "--drafter", "pld:ngram=1",
                 "--policy", "chain", "--policy", "vct:width=2,depth=2", "--temperature", "0", "--temperature", "1",
                 "--max-new-tokens", "12", "--repeats", "2", "--out", str(out), "--json")  # fmt: skip
    said, told = capsys.readouterr()
    found = json.loads(said)
    assert status == 0
    assert found == json.loads(out.read_text())
    assert [p.name for p in out.parent.iterdir()] == ["r.json"]
    assert "too long for the target's context: 1" in told
    assert found["provenance"]["suite"]["skipped_too_long"] == 1
    assert {"commit", "versions", "hardware", "command", "seed", "date", "target", "costs"} <= set(found["provenance"])
    assert len(found["rows"]) == 2 * (1 + 2 * 2)
    for row in found["rows"]:
        assert set(row) == ROW
        assert row["same_output"]
        assert row["prompts"] == 6
        low, high = row["intervals"]["speedup"]
        assert low <= high
    plain = found["rows"][0]
    assert (plain["drafter"], plain["policy"], plain["speedup"], plain["acceptance_length"]) == ("plain", None, 1, 1)
    assert plain["new_tokens"] == plain["steps"] + plain["prompts"]
    assert plain["overlap"] is plain["cost_ratio"] is None
    own = {(r["drafter"], r["overlap"], r["cost_ratio"]) for r in found["rows"][1:]}
    assert {d for d, _, _ in own} == {"plain", "pld", "pld:ngram=1"}
    assert len(own) == 3  # a drafter's own figures do not depend on policy and temperature
    assert all(0 <= overlap <= 1 and ratio > 0 for d, overlap, ratio in own if d != "plain")


def test_an_interrupted_bench_goes_on(folder: str, prompts: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    from draftree.evaluation.runner import Bench

    out, whole, calls = tmp_path / "r.json", Bench.prompt, []

    def prompt(self: Bench, index: int) -> dict[Cell, Written]:
        calls.append(index)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, index)

    monkeypatch.setattr(Bench, "prompt", prompt)
    ask = ["--suite", str(prompts), "--target", folder, "--drafter", "pld", "--policy", "chain", "--max-new-tokens", "8",
           "--out", str(out)]  # fmt: skip
    assert run(*ask) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not out.exists()
    assert run(*ask) == 0
    assert calls == [0, 1, 2, 2, 3, 4, 5, 6]
    assert [p.name for p in tmp_path.glob("r.json*")] == ["r.json"]
    assert "speed-up" in capsys.readouterr().out


def test_a_prompt_that_cannot_fit_is_told(folder: str, prompts: Path, tmp_path: Path, capsys) -> None:
    ask = [
        "--suite",
        str(prompts),
        "--target",
        folder,
        "--drafter",
        "pld",
        "--policy",
        "chain",
        "--out",
        str(tmp_path / "r.json"),
    ]
    assert run(*ask, "--max-new-tokens", "400") == 2
    assert "too long" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def written(tokens: int, accepted: list[int], seconds: list[float]) -> Written:
    steps = [Step(a, 4, 4) for a in accepted]
    return Written(list(range(tokens)), [Stats(tokens, steps, 0.0, 0.0, s) for s in seconds])


def test_figures_are_of_one_repeat_and_seconds_means_of_all() -> None:
    cell = Cell("d", "p", 0.0)
    mine = [written(10, [3, 1], [1.0, 3.0]), written(20, [2, 2, 2], [2.0, 2.0])]
    plain = [written(10, [0] * 9, [4.0, 4.0]), written(20, [0] * 19, [8.0, 8.0])]
    row = report.row(cell, mine, plain, seed=0)
    assert (row["new_tokens"], row["steps"], row["seconds"]) == (30, 5, 4.0)
    assert row["acceptance_length"] == pytest.approx(15 / 5)
    assert row["speedup"] == pytest.approx(12 / 4)
    assert row["same_output"]
    bounds = row["intervals"]
    assert bounds["acceptance_length"] == [3.0, 3.0]
    assert bounds["speedup"] == [2.0, 4.0]
    mine[0].tokens[3] = 99
    row = report.row(cell, mine, plain, seed=0)
    assert (row["same_output"], row["different_prompts"]) == (False, 1)


def test_intervals_are_paired_and_seeded() -> None:
    rng = np.random.default_rng(0)
    plain = [written(10, [0] * 9, [s]) for s in rng.uniform(1, 9, 30)]
    half = [written(10, [1] * 5, [w.repeats[0].seconds / 2]) for w in plain]
    found = report.intervals(half, plain, 1)
    assert found["speedup"] == pytest.approx([2, 2])  # prompts differ ninefold, the pairs do not
    assert found == report.intervals(half, plain, 1)
    assert found["tokens_per_second"][0] < 2 * 10 / 5 < found["tokens_per_second"][1]


def test_a_journal_of_another_run_or_a_broken_line_is_not_read(tmp_path: Path) -> None:
    cells, path = product(["d"], ["p"], [0.0]), tmp_path / "j"
    done = {cell: written(3, [1], [0.5]) for cell in cells}
    journal = Journal(path, {"run": 1})
    assert journal.read(cells) == []
    journal.add(done)
    journal.add(done)
    path.write_text(path.read_text()[:-9])
    assert Journal(path, {"run": 1}).read(cells) == [done]
    assert Journal(path, {"run": 2}).read(cells) == []


def test_a_narrow_terminal_loses_the_last_columns() -> None:
    rows = [{"drafter": "pld", "τ [95 %]": "1.00 [1.00, 1.00]", "nodes/step": "3.2", "seconds": "1.00"}]
    keep = ("drafter", "τ [95 %]")
    assert narrowed(rows, 80, keep) == rows
    assert list(narrowed(rows, 47, keep)[0]) == ["drafter", "τ [95 %]", "nodes/step"]
    assert list(narrowed(rows, 10, keep)[0]) == ["drafter", "τ [95 %]"]


def test_the_speed_up_is_shown_in_80_columns() -> None:
    done = [written(3, [1], [0.5])] * 2
    shown = narrowed(report.shown([report.row(Cell("edd", "chain:length=5", 0.0), done, done, 0)]), 80, report.FIRST)
    console = Console(width=80, file=io.StringIO())
    console.print(table("", shown))
    for text in ("chain:length=5", "2.00 [2.00, 2.00]", "1.00 [1.00, 1.00]", "yes"):
        assert f" {text} " in console.file.getvalue()
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_table_is_written_from_its_result(tables: ModuleType, folder: str, prompts: Path, tmp_path: Path) -> None:
    run("--suite", str(prompts), "--target", folder, "--drafter", "pld", "--policy", "chain", "--max-new-tokens", "8",
        "--limit", "2", "--out", str(tmp_path / "short.json"))  # fmt: skip
    before = "a\n<!-- table:short -->\nold\n<!-- /table -->\n<!-- table:none -->\nkept\n<!-- /table -->\n"
    after = tables.refreshed(before, tmp_path)
    assert "| drafter | policy | τ [95 %] | nodes/step | depth/step | speed-up [95 %] | same output |" in after
    assert "| plain |  | 1.00 [1.00, 1.00] |" in after
    assert "old" not in after
    assert after.endswith("<!-- table:none -->\nkept\n<!-- /table -->\n")
    assert tables.refreshed(after, tmp_path) == after


def test_the_readme_says_what_the_saved_results_say(tables: ModuleType) -> None:
    if not list((ROOT / "benchmarks" / "results").glob("*.json")):
        pytest.skip("no results are saved yet")
    text = (ROOT / "README.md").read_text()
    assert tables.refreshed(text, ROOT / "benchmarks" / "results") == text


def test_a_difference_is_told_with_its_place_and_margin() -> None:
    target = tiny_target()
    request = Request([3, 1, 4], 6)
    plain = Engine(target, PLD().open(target), Chain()).plain([request]).tokens[0]
    wrong = [*plain[:2], (plain[2] + 1) % target.decoder.vocab, *plain[3:]]
    found = difference(target, request, wrong, plain)
    logits = target.decoder.model(torch.tensor([[3, 1, 4, *plain[:2]]])).logits[0, -1]
    second, best = logits.sort().values[-2:].tolist()
    assert found.token == 2
    assert found.margin == pytest.approx(best - second, abs=1e-5)
