"""Commands and options of other tools, and the command line of draftree that they stand for."""

import io
import sys
from pathlib import Path
from shlex import split
from typing import Any

import pytest
import typer

from draftree.aliases.flag_hints import (
    COMMAND_WORDS,
    FILE_WORDS,
    FLAG_HINTS,
    FLAG_WORDS,
    THREAD_WORDS,
    WITHOUT_VALUE,
    WRITING,
)
from draftree.cli import argv_translation
from draftree.cli.app import app
from draftree.errors import UserError

OPTIONS = {
    # what is typed after `draftree generate`, and what stands for it
    "demo -m x": "demo -m x",
    "--num-draft-tokens 4": "--policy chain:length=4",
    "--num-draft-tokens=4": "--policy chain:length=4",
    "--draft-max 8 -n 5": "--policy chain:length=8 -n 5",
    "--num-speculative-tokens 3 hi": "--policy chain:length=3 hi",
    "--prompt-lookup-num-tokens 6": "--drafter pld:length=6 --policy chain:length=6",
    "--prompt-lookup-max 4": "--drafter pld:ngram=4",
    """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""": "--drafter pld --policy chain:length=4",
    """--speculative-config '{"model": "org/eagle", "method": "eagle3"}'""": "--drafter org/eagle",
    "--speculative-config={}": None,
    "--cpu hi": "--device cpu hi",
    "--fp16 hi": "--dtype float16 hi",
    "--load-in-4bit hi": "--quantize int4 hi",
    "--load-in-4bit True hi": "--quantize int4 hi",
    "--load-in-4bit false hi": "hi",
    "--greedy hi": "--temperature 0 hi",
    "--do-sample hi": "--temperature 1.0 hi",
    "--do-sample true": "--temperature 1.0",
    "--do-sample false hi": "hi",
    "--do-sample -t 0.7": "-t 0.7",
    "--temp 0.7 --do-sample": "--temperature 0.7",
    "-no-cnv hi": "--raw hi",
    "--ignore-chat-template hi": "--raw hi",
    "--format json hi": """--json-schema '{"type":"object"}' hi""",
    "--json-mode": """--json-schema '{"type":"object"}'""",
    "-f words.txt -n 4": "--prompt 'two words' -n 4",
    "--system-prompt-file words.txt": "--system 'two words'",
    "-f nowhere.txt": None,
    "--enforce-eager hi": "--no-compile hi",
    "-y": "--force",
    "--num-beams 1 hi": "hi",
    "--num-beams=1 hi": "hi",
    "--tensor-parallel-size 1 hi": "hi",
    "--num-beams 4 hi": None,
    "--eos-token-id 2": "--stop-id 2",
    "--response-prefix So": "--beginning So",
    "-p -1 --top-k 3": "-p -1 --top-k 3",
    "-p --greedy": "-p --greedy",
    "--policy pct --num-draft-tokens 4": None,
    "--num-draft-tokens": None,
    "-t 0.7": "-t 0.7",
    "--dtype auto hi": "hi",
    "--dtype=auto hi": "hi",
    "-ngl 0 hi": "--device cpu hi",
    "-ngl 99 hi": None,
    "--num-return-sequences 1 hi": "hi",
    "--batch-size 1 hi": "hi",
    "--show-tree hi": "--show-trees hi",
    "--input-file words.txt": "--prompt 'two words'",
    "--no-chat hi": "--raw hi",
    "--benchmark hi": "--baseline hi",
    "-t 8": None,
}
NOTED = {
    # options that are left out with a note
    "--mlock hi": ("hi", "--mlock is not used: it is not needed"),
    "-c 4096 hi": ("hi", "-c is not used: the context is the model's own"),
    "--max-model-len=4096 hi": ("hi", "--max-model-len is not used: the context"),
    "--gpu-memory-utilization 0.9 hi": (
        "hi",
        "--gpu-memory-utilization is not used: memory is taken as it is needed",
    ),
    "-v hi": ("hi", "-v is not used: --profile says where the time goes"),
    "--verbose true hi": ("hi", "--verbose is not used"),
    "--jinja hi": ("hi", "the model's chat template is used"),
    "--no-warmup hi": ("hi", "not needed"),
    "--ubatch-size 512 hi": ("hi", "not needed"),
    "--keepalive 5m hi": ("hi", "nothing runs after the command"),
    "--stats hi": ("hi", "--profile says where the time goes"),
    "--chat hi": ("hi", "it is the default"),
    "--color hi": ("hi", "a terminal shows colours"),
    "--pad-token-id 0 hi": ("hi", "padded internally"),
}
COMMANDS = {
    # what is typed after `draftree`, with a prompt or a pipe, and what stands for it
    "run demo hi": "generate demo hi",
    "run demo": "generate demo",
    "run demo -cnv": "chat demo",
    "demo hi": "generate demo hi",
    "run demo 'Why is the sky blue?'": "generate demo 'Why is the sky blue?'",
    "-m demo -p 'Once upon a time' -n 32": "generate -m demo -p 'Once upon a time' -n 32",
    "demo -p hi": "generate demo -p hi",
    "-m demo -p hi -n 8": "generate -m demo -p hi -n 8",
    "-m demo -cnv": "chat -m demo",
    "'Why is it so?'": "generate 'Why is it so?'",
    "Qwen/Qwen3-8B hi": "generate Qwen/Qwen3-8B hi",
    "complete demo hi": "generate --raw demo hi",
    "llama-cli -m demo": "generate -m demo",
    "lookup demo hi": "generate --drafter pld demo hi",
    "interactive demo": "chat demo",
    "throughput --model demo": "bench --model demo",
    "verify demo": "doctor --lossless demo",
    "index --data x": "datastore build --data x",
    "models": "list",
    "version": "--version",
    "help": "--help",
    "help bench": "bench --help",
    "generate run": "generate run",
    "--version": "--version",
    "frobnicate": "frobnicate",
}


@pytest.fixture
def group() -> Any:
    return typer.main.get_command(app)


@pytest.fixture
def ctx(group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The context of `draftree generate`, in a folder with a file of words."""
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("two words\n")
    return typer.Context(
        group.commands["generate"],
        parent=typer.Context(group, info_name="draftree"),
        info_name="generate",
    )


@pytest.mark.parametrize("typed", OPTIONS)
def test_an_option_of_another_tool_is_ours(
    ctx: Any, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (ours := OPTIONS[typed]) is None:
        with pytest.raises(UserError):
            ctx.command.parse_args(ctx, split(typed))
    else:
        assert [new for new, _ in argv_translation.rewrite_arguments(ctx, split(typed))] == split(
            ours
        )
    assert capsys.readouterr().err == ""


def test_bench_and_train_have_their_own(group: Any) -> None:
    root = typer.Context(group, info_name="draftree")
    for command, typed, ours in (
        ("bench", "demo -r 2", "demo --repeats 2"),
        ("bench", "demo --iterations 3 --batch-size 4", "demo --repeats 3 --batch 4"),
        ("bench", "demo --dataset gsm8k", "demo --suite gsm8k"),
        ("train", "edd --dataset x", "edd --data x"),
        ("train", "edd --batch-size 4", "edd --batch-size 4"),
        ("serve", "demo -a name", "demo --model-name name"),
        (
            "serve",
            "smollm2 --port 8123 --max-model-len 1024 --served-model-name tiny",
            "smollm2 --port 8123 --model-name tiny",
        ),
        ("bench", "--model demo --output-json bench.json", "--target demo --out bench.json"),
    ):
        ctx = typer.Context(group.commands[command], parent=root, info_name=command)
        assert [new for new, _ in argv_translation.rewrite_arguments(ctx, split(typed))] == split(
            ours
        )


@pytest.mark.parametrize("typed", NOTED)
def test_an_option_that_changes_no_text_is_left_out_with_a_note(
    ctx: Any, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, note = NOTED[typed]
    assert [new for new, _ in argv_translation.rewrite_arguments(ctx, split(typed))] == split(ours)
    err = capsys.readouterr().err
    assert note in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_of_another_tool_is_ours(
    group: Any, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert argv_translation.command_line(
        split(typed), group.commands, {"--version", "--help", "-h"}
    ) == split(COMMANDS[typed])


def test_in_a_terminal_a_model_without_a_prompt_talks(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    )
    for typed, ours in (
        ("run demo", "chat demo"),
        ("demo", "chat demo"),
        ("-m demo", "chat -m demo"),
        ("run demo hi", "generate demo hi"),
        ("demo -p hi", "generate demo -p hi"),
        ("run demo --help", "generate demo --help"),
    ):
        assert argv_translation.command_line(split(typed), group.commands, {"--help"}) == split(
            ours
        )


def test_threads_are_set_before_torch_is_loaded(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [
        new for new, _ in argv_translation.rewrite_arguments(ctx, ["--threads", "2", "hi"])
    ] == ["hi"]
    assert argv_translation.os.environ["OMP_NUM_THREADS"] == "2"


def test_translated_commands_exist(group: Any) -> None:
    commands = {
        name: command.options[0] for name, command in group.commands.items() if name != "datastore"
    }
    for told in FLAG_WORDS.values():
        named = {part for part in told.split(" ") if part.startswith("--")}
        assert any(named <= own.keys() | {"--help"} for own in commands.values()), told
    for told in COMMAND_WORDS.values():
        name, *options = told.split(" ")
        assert (
            name == "--version"
            or name == "datastore"
            or {o for o in options if o.startswith("-")} <= commands[name].keys()
        )
    assert not {*COMMAND_WORDS, *WRITING} & group.commands.keys()
    assert {*FILE_WORDS} <= FLAG_WORDS.keys()
    assert not FLAG_WORDS.keys() & FLAG_HINTS.keys()
    assert not {*THREAD_WORDS} & {*FLAG_HINTS, *FLAG_WORDS}
    assert not WITHOUT_VALUE & FLAG_WORDS.keys()
