"""Benchmarks' own formats: rows made in each are asked as they should be, those of another are refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree.cli.app import main
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation import suites
from draftree.evaluation.bench import Bench
from draftree.evaluation.dataset_formats import DATASET_FORMATS, WITHHELD
from draftree.evaluation.grid import QUESTION_STRIDE, conversations, product
from draftree.evaluation.resume import Journal
from draftree.registry import build
from draftree.request import Request
from draftree.target.target import Target
from suite_rows import ROWS, TURNS

ASKED = {
    "humaneval": "def add(a, b):\n", "gsm8k": "Two and two?", "natural_questions": "who wrote it?", "alpaca": "Name a colour.",
    "finance_alpaca": "Name a bond.\n\nLong", "cnn_dm": "Summarize the following article.\n\nIt rained.",
    "spider": "Write a SQL query for the database 'shop': How many?", "spec_bench": "Who wrote it?",
    "codesearchnet_python": "Write the Python function `add`, whose docstring is:\n\nAdds.",
}  # fmt: skip
NEAREST = {
    "mt_bench": "spec_bench", "spec_bench": "math500", "speed_bench": "mt_bench", "humaneval": "codesearchnet_python",
    "gsm8k": "natural_questions", "natural_questions": "gsm8k", "alpaca": "finance_alpaca", "finance_alpaca": "alpaca",
    "cnn_dm": "alpaca", "spider": "natural_questions", "codesearchnet_python": "humaneval", "math500": "spec_bench",
    "aime": "speed_bench", "mbpp": "humaneval", "livecodebench": "gsm8k", "arena_hard": "mt_bench",
}  # fmt: skip


def file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("name", DATASET_FORMATS)
def test_a_row_of_a_format_is_asked_and_another_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    suite = suites.load(f"{name}:{file(tmp_path, ROWS[name])}")
    (prompt,) = suite.prompts
    wanted = ASKED.get(name, "Add 2 and 3.")
    assert prompt.content == (
        wanted if name == "humaneval" else [{"role": "user", "content": wanted}]
    )
    assert prompt.later == (("And 4?",) if ROWS[name].get("turns") == TURNS["turns"] else ())
    assert suite.name == name
    assert DATASET_FORMATS[name].page.startswith("https://")
    other = NEAREST[name]
    with pytest.raises(
        UserError,
        match=rf"rows.jsonl:2 is not in the format of {name}: .*it reads as .*\b{other}\b",
    ):
        suites.load(f"{name}:{file(tmp_path, ROWS[name], ROWS[other])}")


def test_categories_are_the_benchmarks_own(tmp_path: Path) -> None:
    rows = [ROWS["spec_bench"], ROWS["mt_bench"]]
    assert suites.load(f"spec_bench:{file(tmp_path, *rows)}").categories == ("rag", "mt_bench")
    assert suites.load(f"mt_bench:{file(tmp_path, rows[1])}").categories == ("writing",)


@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("gsm8k", {"question": "How many?"}, "it has no 'answer'"),
        ("gsm8k", {"question": "", "answer": "#### 4"}, "the question is empty"),
        ("speed_bench", ROWS["speed_bench"] | {"turns": [WITHHELD]}, "holds no text yet"),
        (
            "codesearchnet_python",
            ROWS["codesearchnet_python"] | {"language": "go"},
            "its values are others",
        ),
        ("mt_bench", ROWS["mt_bench"] | {"turns": []}, "its values are others"),
        ("gsm8k", None, "holds no prompts"),
    ],
)
def test_malformed_rows_end_with_one_line_and_status_2(
    name: str, row: Any, told: str, tmp_path: Path, capsys
) -> None:
    path = file(tmp_path, *([row] if row else []))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--suite", f"{name}:{path}", "--out", str(tmp_path / "r.json")])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in said
    assert said.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_set_without_a_file_needs_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="read from a file alone: speed_bench:FILE"):
        suites.load("speed_bench")
    with pytest.raises(UserError, match="there is no file 'nowhere'"):
        suites.load("gsm8k:nowhere")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package 'datasets'"):
        suites.load("gsm8k")


def test_later_questions_keep_the_cache_and_write_what_a_fresh_one_writes(tmp_path: Path) -> None:
    target = Target.load("demo")
    engine = Engine(
        target,
        build("drafter", "pld").open(target),
        build("policy", "chain"),
        costs=Costs({1: 0.1}, {1: 1.0, 8: 1.5}),
    )
    prompts = suites.load(f"mt_bench:{file(tmp_path, ROWS['mt_bench'])}").prompts
    first = Request(encode(target.tokenizer, prompts[0].content), 8, engine.eos, 0)
    requests = conversations(engine, prompts, [first])
    assert [r.number for r in requests] == [0, QUESTION_STRIDE]
    read = list[int]()
    target.decoder.model.register_forward_pre_hook(
        lambda _, __, how: read.append(how["input_ids"].shape[-1]), with_kwargs=True
    )
    cells = product([("pld", "chain", None)], [0.0])
    done = Bench(cells, {("pld", "chain"): engine}, requests).run(Journal(tmp_path / "j", {}))
    shared = len(first.prompt) + 1
    assert max(read[read.index(shared - 1) + 1 :]) <= len(requests[1].prompt) - shared, (
        "what came before is not read again"
    )
    for request, written in zip(requests, done, strict=True):
        fresh = engine.plain([request]).tokens[0]
        assert [w.tokens for w in written.values()] == [fresh, fresh]
    assert np.sum([w.stats.new_tokens for w in done[1].values()]) > 0
