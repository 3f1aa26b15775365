"""Scripts that were commands: the names that are left, and outputs and mistakes as of commands."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import draftree as package
from draftree.evaluation import result_rows
from scripts import run_script

Run = Callable[..., tuple[int, str, str]]
MOVED = {"recount": "recount", "analyse": "analyse", "tables": "paper_tables"}


@pytest.mark.parametrize(
    "words", ["{}", "{} --help", "help {}", "{} r.json --out out.json --force"]
)
@pytest.mark.parametrize("name", [*MOVED, "card"])
def test_an_old_name_says_where_it_is_now(
    draftree: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = draftree(*words.format(name).split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    where = f"python benchmarks/{MOVED[name]}.py" if name in MOVED else "draftree push FOLDER"
    assert where in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*MOVED, "card"])
def test_in_python_too(name: str) -> None:
    with pytest.raises(AttributeError, match=r"python benchmarks/|draftree push"):
        getattr(package, name)


ASKED = {
    "recount": ("LATER", "--machine", "h100-8b", "--out", "there.json"),
    "paper_tables": ("--result", "LATER", "--out", "there.json"),
    "analyse": ("demo", "--result", "LATER", "--pictures", "pictures"),
}


@pytest.mark.parametrize("name", ASKED)
def test_nothing_is_overwritten_without_consent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("there.json", "pictures/reliability.png", "LATER"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("{}")
    assert run_script(name, *ASKED[name]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "exists; --force overwrites it, " in said.err
    assert {p.read_text() for p in tmp_path.rglob("*") if p.is_file()} == {"{}"}


@pytest.mark.parametrize("name", ASKED)
def test_another_version_is_one_line_and_status_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib")
    later = {"format": result_rows.FORMAT + 1, "rows": [], "provenance": {}}
    (tmp_path / "LATER").write_text(json.dumps(later))
    assert run_script(name, *ASKED[name]) == 2
    said = capsys.readouterr().err
    assert f"of format {result_rows.FORMAT + 1}, allowed is 1 … {result_rows.FORMAT}" in said
    assert said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["LATER"]


@pytest.mark.parametrize("name", ASKED)
def test_a_script_has_the_help_and_the_hints_of_a_command(name: str, capsys) -> None:
    assert run_script(name, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: python benchmarks/")
    assert "--json" in shown
    assert run_script(name, *ASKED[name], "--jsn") == 2
    assert "unknown option '--jsn', did you mean --json?" in capsys.readouterr().err
    if name != "recount":
        assert "--chat-template" in shown
        assert "--system" in shown
        assert run_script(name, "--drafter", "nosuch") == 2
        assert "unknown drafter 'nosuch'" in capsys.readouterr().err


def test_a_suite_of_several_files_is_analysed(tmp_path: Path, capsys) -> None:
    for name, letters in (("one", "ABC"), ("two", "DEF")):
        rows = [{"question": letter} for letter in letters]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suites = ("--suite", tmp_path / "one.jsonl", "--suite", tmp_path / "two.jsonl")
    words = ("--drafter", "vdm", *suites, "--max-new-tokens", "6", "--json")
    assert run_script("analyse", *words) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["suite"], said["texts"]) == ("one+two", 6)
