"""Several suites at once, the papers' wording of questions, and prompts drawn at random."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftree.data.prompts import question
from draftree.errors import UserError
from draftree.evaluation import suites
from draftree.evaluation.dataset_formats import DATASET_FORMATS, SPIDER
from draftree.evaluation.grid import choose_requests

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "humaneval": ({"task_id": "a", "prompt": "\ndef f():\n    pass\n", "entry_point": "f", "test": ""},
                  "Complete the code I provided.\n\ndef f():\n    pass\n"),
    "natural_questions": ({"question": "who sang it", "answer": ["x"]}, "Who sang it?"),
    "cnn_dm": ({"article": "A b.", "highlights": "", "id": "1"}, "Summarize: A b."),
    "spider": ({"db_id": "d", "query": "", "question": "How many?", "question_toks": []}, f"{SPIDER} How many?"),
    "codesearchnet_python": ({"repo": "r", "path": "p", "func_name": "f", "language": "python", "code": "", "docstring": "D."},
                             "Please generate code based on the following doc:\nD."),
}  # fmt: skip
"""By format a row, and what EAGLE's or GLIDE's evaluation asks of it."""


def file_of(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_a_question_is_worded_as_the_papers_word_it(name: str, tmp_path: Path) -> None:
    row, told = ROWS[name]
    path = file_of(tmp_path / "rows.jsonl", row)
    (official,) = suites.load(f"{name}:{path}", wording="official").prompts
    assert official.content == question(told)
    assert suites.load(f"{name}:{path}").prompts[0].content != official.content


def test_every_format_with_a_wording_of_its_own_is_tested() -> None:
    assert {name for name, known in DATASET_FORMATS.items() if known.official} == ROWS.keys()


def test_suites_are_joined_and_their_prompts_stay_apart(tmp_path: Path) -> None:
    one = file_of(tmp_path / "one.jsonl", {"question": "A"}, {"question": "B", "category": "c"})
    two = file_of(
        tmp_path / "two.jsonl", {"id": "x", "conversation": [{"role": "user", "content": "C"}]}
    )
    both = suites.join_suites([one, two])
    assert both.name == "one+two"
    assert [p.category for p in both.prompts] == ["one", "c", "two"]
    assert len({p.number for p in both.prompts}) == 3
    assert [p.content for p in both.prompts] == [question("A"), question("B"), question("C")]
    assert suites.join_suites([one]) == suites.load(one)
    with pytest.raises(UserError, match="two of them hold the same prompts"):
        suites.join_suites([one, one])


def test_prompts_are_drawn_by_the_seed() -> None:
    from draftree.engine import load

    engine, prompts = load("demo", "pld", "chain"), suites.load("demo").prompts
    take = lambda seed: [r.number for r in choose_requests(prompts, engine, 8, 4, shuffled=seed)[0]]
    first = [r.number for r in choose_requests(prompts, engine, 8, 4)[0]]
    assert first == sorted(first)
    assert take(1) == take(1) == sorted(take(1))
    assert len({tuple(take(seed)) for seed in range(6)} | {tuple(first)}) > 4


def test_the_command_takes_several(
    draftree: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    one = file_of(tmp_path / "one.jsonl", {"question": "A"})
    two = file_of(tmp_path / "two.jsonl", {"question": "B"})
    words = (
        "bench",
        "--suite",
        one,
        "--suite",
        two,
        "--pair",
        "pld chain",
        "-n",
        "4",
        "--shuffle",
        "--json",
        "--force",
    )
    status, out, _ = draftree(*words, "--out", str(tmp_path / "r.json"))
    said = json.loads(out)["provenance"]["suite"]
    assert (status, said["name"], said["shuffled"], said["prompts"]) == (
        0,
        "one+two",
        True,
        "plain",
    )
    status, _, err = draftree(
        "bench", "--suite", one, "--suite", "none", "--out", str(tmp_path / "n.json")
    )
    assert (status, "'none'" in err) == (2, True)


def test_tune_takes_several(draftree: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    one = file_of(tmp_path / "one.jsonl", {"question": "A"}, {"question": "B"}, {"question": "C"})
    two = file_of(tmp_path / "two.jsonl", {"question": "D"}, {"question": "E"}, {"question": "F"})
    suites = ("--suite", one, "--suite", two)
    words = ("--drafter", "vdm", "--policy", "chain", "--trials", "1", "--per-category", "2")
    words += ("--max-new-tokens", "6", "--machine", "h100-8b")
    status, out, err = draftree("tune", *words, *suites)
    assert status == 0, err
    assert "4 prompts" in out, "two of each suite, and not the first of all"


def test_top_p_truncates_what_is_sampled(
    draftree: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A recording is of one top-p, so two of them have texts of their own."""
    one = file_of(tmp_path / "one.jsonl", {"question": "How many apples are in two bags of six?"})
    words = ("replay", "--suite", one, "--pair", "pld chain", "-n", "12", "-t", "1", "--json")
    words += ("--recording", str(tmp_path / "of"), "--machine", "h100-8b", "--force")
    texts = dict[str, Any]()
    for top_p in ("1", "0.2"):
        status, out, err = draftree(*words, "--top-p", top_p, "--out", str(tmp_path / "r.json"))
        assert status == 0, err
        said = json.loads(out)
        assert said["provenance"].get("top_p", 1) == float(top_p)
        texts[top_p] = said["texts"]["1"]
    assert texts["1"] != texts["0.2"]
