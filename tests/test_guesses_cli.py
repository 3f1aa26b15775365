"""What users of other tools type first: each guess works, or its message says what to type; and the help of every command."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from draftree.cli.app import app
from draftree.costs.curves import Costs, CostTable

Run = Callable[..., tuple[int, str, str]]
PLD = ("--drafter", "pld", "--policy", "chain:length=2")
WORKS = {
    "model and prompt": ("generate", "demo", "hi", *PLD, "-n", 4),
    "model, -p": ("generate", "demo", "-p", "hi", *PLD, "-n", 4),
    "-m, -p (llama.cpp)": ("generate", "-m", "demo", "-p", "hi", *PLD, "-n", "4"),
    "--model, --prompt (mlx_lm)": ("generate", "--model", "demo", "--prompt", "hi", *PLD, "--max-tokens", "4"),
    "--model=": ("generate", "--model=demo", "--prompt=hi", *PLD, "--max-tokens=4"),
    "-hf (llama.cpp)": ("generate", "-hf", "demo", "-p", "hi", *PLD, "--n-predict", "4"),
    "the prompt alone": ("generate", "hi", *PLD, "--max-new-tokens", "4"),
    "-t": ("generate", "demo", "hi", *PLD, "-n", "4", "-t", "0.7"),
    "--temp": ("generate", "demo", "hi", *PLD, "-n", "4", "--temp", "0.7", "-s", "3"),
    "--stream": ("generate", "demo", "hi", *PLD, "-n", "4", "--stream"),
    "--system-prompt": ("generate", "demo", "hi", *PLD, "-n", "4", "--system-prompt", "Be brief."),
    "--stop-strings": ("generate", "demo", "hi", *PLD, "-n", "4", "--stop-strings", "x"),
    "--draft-model (mlx_lm)": ("generate", "demo", "hi", "--draft-model", "ngram", "--policy", "chain:length=2", "-n", "4"),
    "-md (llama.cpp)": ("generate", "demo", "hi", "-md", "prompt_lookup", "--policy", "chain:length=2", "-n", "4"),
    "--torch-dtype": ("generate", "demo", "hi", *PLD, "-n", "4", "--torch-dtype", "float32"),
    "gen": ("gen", "demo", "hi", *PLD, "-n", "4"),
    "ls": ("ls",),
    "drafters MODEL": ("drafters", "meta-llama/Llama-3.1-8B-Instruct"),
    "drafters --for": ("drafters", "--for", "Qwen/Qwen3-8B"),
    "-h": ("generate", "-h"),
    "--version": ("--version",),
}
TOLD = {
    "run (ollama)": (("run", "demo"), "draftree generate MODEL -p"),
    "serve (vLLM)": (("serve", "demo"), "there is no server"),
    "chat (vLLM)": (("chat",), "draftree generate MODEL -p"),
    "pull (ollama)": (("pull", "demo"), "hf download ID"),
    "eval": (("eval", "demo"), "draftree bench MODEL"),
    "version": (("version",), "draftree --version"),
    "help": (("help",), "draftree --help"),
    "quantize": (("quantize",), "--quantize int8"),
    "an unknown command": (("frobnicate",), "known are"),
    "-t as threads (llama.cpp)": (("generate", "demo", "hi", "-t", "8"), "OMP_NUM_THREADS=8"),
    "-ngl (llama.cpp)": (("generate", "demo", "hi", "-ngl", "99"), "device"),
    "-c (llama.cpp)": (("generate", "demo", "hi", "-c", "4096"), "context"),
    "-i (llama.cpp)": (("generate", "demo", "-i"), "engine.conversation()"),
    "-f (llama.cpp)": (("generate", "demo", "-f", "x"), "MODEL < FILE"),
    "--tensor-parallel-size": (("generate", "demo", "hi", "--tensor-parallel-size", "2"), "one device"),
    "--num-beams": (("generate", "demo", "hi", "--num-beams", "4"), "beam search is not offered"),
    "--do-sample": (("generate", "demo", "hi", "--do-sample"), "temperature=1.0"),
    "--verbose": (("generate", "demo", "hi", "--verbose"), "--profile"),
    "a misspelt option": (("generate", "demo", "hi", "--temprature", "1"), "did you mean --temperature"),
    "a misspelt alias": (("generate", "demo", "hi", "--max-token", "1"), "did you mean --max-new-tokens"),
    "an option that nothing is near": (("generate", "demo", "hi", "--frobnicate"), "--help lists them"),
    "a prompt without quotes": (("generate", "demo", "how", "many"), "put the prompt into quotes"),
    "two models": (("generate", "demo", "hi", "--target", "demo"), "given twice"),
    "two prompts": (("generate", "demo", "hi", "-p", "hi"), "given twice"),
    "a path that does not exist": (("generate", "./nowhere", "hi"), "no folder or file './nowhere'"),
    "a name that does not exist": (("generate", "nosuch", "hi"), "there is no folder 'nosuch' here"),
    "a drafter that does not exist": (("generate", "demo", "hi", "--drafter", "nosuch"), "known are"),
    "eagle2 as a drafter": (("generate", "demo", "hi", "--drafter", "eagle2"), "policy 'eagle2'"),
    "a draft model without a name": (("generate", "demo", "hi", "--drafter", "draft_model"), "give the loaded model"),
    "a range": (("generate", "demo", "hi", "--top-p", "3"), "top_p is 3.0, allowed is"),
    "a range of a spec": (("bench", "demo", "--policy", "pct:width=0"), "width is 0, allowed is"),
    "a suite that does not exist": (("bench", "demo", "--suite", "nosuch"), "known are"),
    "--tasks (lm_eval)": (("bench", "demo", "--tasks", "nosuch"), "unknown suite"),
    "--num-prompts (vLLM)": (("bench", "demo", "--num-prompts", "0"), "--limit"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and no measurement of costs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", WORKS)
def test_a_guess_works(draftree: Run, name: str) -> None:
    status, out, err = draftree(*WORKS[name])
    assert (status, err) == (0, "")
    assert out.strip()


@pytest.mark.parametrize("name", TOLD)
def test_a_guess_is_told_what_to_type(draftree: Run, name: str) -> None:
    args, told = TOLD[name]
    status, out, err = draftree(*args)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_pipe_is_the_prompt(draftree: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in (("demo",), ("-m", "demo"), ("--target", "demo", "-")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        status, out, err = draftree("generate", *args, *PLD, "-n", 4, "--json")
        assert (status, err) == (0, "")
        assert '"text"' in out


def test_a_terminal_without_a_prompt_is_told_to_name_one(draftree: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    status, _, err = draftree("generate", "demo")
    assert (status, err) == (2, "draftree: there is no prompt: draftree generate demo 'PROMPT', or a pipe into it\n")


def commands(group: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [before] if before else []
    for name, command in group.commands.items():
        found += commands(command, (*before, name)) if hasattr(command, "commands") else [(*before, name)]
    return found


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", [(), *commands(typer.main.get_command(app))])
def test_a_help_fits(draftree: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], width: int) -> None:
    """Every name is whole, no line is wider than the terminal, and all of it is two screens of sixty lines at most."""
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, _ = draftree(*command, "--help")
    lines = out.splitlines()
    assert status == 0
    assert max(map(len, lines)) <= width
    assert len(lines) <= 120
    assert "…" not in "".join(line.split("  ")[1] for line in lines if line.startswith("  -"))
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    for option in group.params:
        assert all(flag in out for flag in getattr(option, "opts", ()) if flag.startswith("-"))


def test_tables_are_as_wide_as_the_terminal(draftree: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command in (("list",), ("drafters",)):
        _, out, _ = draftree(*command)
        assert max(map(len, out.splitlines())) <= 60


def test_bench_says_what_it_read_and_what_its_columns_mean(draftree: Run, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    CostTable((Costs({1: 0.1}, {1: 1.0}),)).save(costs)
    (tmp_path / "notes.txt").write_text("How many legs have 2 dogs?\n\nHow many legs have 3 dogs?\n")
    asked = ("bench", "demo", "--suite", "notes.txt", "--drafter", "pld", "--costs", costs, "-n", 4)
    status, out, err = draftree(*asked)
    assert status == 0
    assert "2 prompts: no categories (each line is a question; --whole takes the file as one prompt)" in err
    for word in ("tokens", "speed-up", "tokens/pass (τ): tokens that one pass of the target yields; plain decoding has 1"):
        assert word in out
    assert (tmp_path / "bench-demo-notes.json").exists()
    status, _, err = draftree(*asked, "--out", "notes.txt")
    assert (status, "--force overwrites it" in err) == (2, True)
    status, _, err = draftree(*asked, "--whole")
    assert status == 0
    assert "1 prompts: no categories (the file is one prompt, continued as it is)" in err


def test_an_option_before_the_command_names_the_command(draftree) -> None:
    status, _, err = draftree("-m", "demo", "-p", "Hello")
    assert status == 2
    assert "draftree generate MODEL -p 'PROMPT'" in err
