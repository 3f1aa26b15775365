"""The command line: its JSON, its one-line errors, its exit status, and what it shows."""

import inspect
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file, save_file

from draftree import Request, Sampling, load
from draftree.cli import arguments, terminal
from draftree.cli.train import show, train
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode, question
from draftree.drafters.base import Recipe
from draftree.registry import part
from draftree.request import Emitted
from draftree.target.target import Target
from draftree.text.completion import Reading
from draftree.text.options import Options
from draftree.text.stop_strings import StopStrings, decode_tokens
from draftree.training import trainer
from draftree.training.trainer import Progress, TrainingPlan
from draftree.training.training_job import summarise
from draftree.tree import Tree
from folders import byte_tokenizer, target_folder

STATS = {"new_tokens", "steps", "acceptance_length", "alpha", "alpha_bound", "nodes_per_step", "depth_per_step",
         "draft_seconds", "verify_seconds", "seconds", "tokens_per_second", "acceptor", "draw", "lossy",
         "state_bytes"}  # fmt: skip

NOTHING = Tree.from_roots(np.array([0]), np.array([0])), np.zeros(0, np.int64)
"""A tree that a stream does not look at, and what was accepted of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured costs stay inside the test."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))


def test_generate_prints_one_json_object(draftree, folder: str) -> None:
    status, out, err = draftree("generate", "abcabcab", "--target", folder, "--drafter", "pld", "--policy", "chain:length=3",
                                "--max-new-tokens", "40", "--baseline", "--json")  # fmt: skip
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert set(found) == {"text", "token_ids", "ending", "stats", "baseline", "speedup"}
    assert set(found["stats"]) == STATS
    assert set(found["baseline"]) == {"seconds", "tokens_per_second", "same_output"}
    assert found["baseline"]["same_output"] is True
    assert found["stats"]["new_tokens"] == len(found["token_ids"])
    assert found["speedup"] == pytest.approx(
        found["stats"]["tokens_per_second"] / found["baseline"]["tokens_per_second"]
    )


def test_a_prompt_may_be_the_name_of_a_folder(
    draftree, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "abc").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ("--drafter", "pld", "--policy", "chain:length=3", "--max-new-tokens", "2")
    assert draftree("generate", "abc", "--target", folder, *words)[0] == 0


@pytest.mark.parametrize(
    ("name", "whole"), [("draftree.serving.app", True), ("draftree.target.target", False)]
)
def test_messages_of_the_server_are_printed_in_full(
    name: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    log, remarks = logging.getLogger(name), arguments.Remarks()
    log.addHandler(remarks)
    try:
        log.warning("a" * 1000)
        assert ("a" * 1000 in capsys.readouterr().err) == whole
        try:
            raise OSError("full")
        except OSError:
            log.exception("a step failed")
    finally:
        log.removeHandler(remarks)
    told = capsys.readouterr().err
    assert told.startswith("draftree: a step failed\nTraceback")
    assert told.endswith("OSError: full\n")


@pytest.mark.parametrize(("raw", "content"), [((), question("héllo")), (("--raw",), "héllo")])
def test_the_chat_template_is_applied_unless_raw(draftree, folder: str, raw, content) -> None:
    engine = load(folder, "pld", "chain")
    request = Request(encode(engine.tokenizer, content), 24, engine.eos)
    sampling = Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5)
    expected = engine.plain([request], sampling).tokens[0]
    _, out, _ = draftree("generate", "héllo", *raw, "--target", folder, "--drafter", "pld", "--policy", "vct:width=2",
                         "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5",
                         "--max-new-tokens", "24", "--json")  # fmt: skip
    found = json.loads(out)
    assert set(found) == {"text", "token_ids", "ending", "stats"}
    assert found["token_ids"] == expected
    assert found["text"] == decode_tokens(engine.tokenizer, expected)


def test_plain_text_goes_with_a_summary(
    draftree, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    status, out, err = draftree("generate", "-", "--target", folder, "--drafter", "pld", "--policy", "pct", "--baseline",
                                "--max-new-tokens", "12")  # fmt: skip
    assert (status, err) == (0, "")
    for word in (
        "tokens per pass (τ)",
        "12 tokens in",
        "tokens per second",
        "speed-up",
        "the same output",
    ):
        assert word in out


EVERY_OPTION = {
    "--typical-p": ("0.9", {"typical_p": 0.9}),
    "--repetition-penalty": ("1.5", {"repetition_penalty": 1.5}),
    "--frequency-penalty": ("0.5", {"frequency_penalty": 0.5}),
    "--presence-penalty": ("0.5", {"presence_penalty": 0.5}),
    "--no-repeat-ngram-size": ("2", {"no_repeat_ngram_size": 2}),
    "--bad-word": ("e", {"bad_words": ["e"]}),
    "--logit-bias": ("a=3.5", {"logit_bias": {"a": 3.5}}),
    "--suppress": ("40", {"suppress": [40]}),
    "--min-new-tokens": ("3", {"min_new_tokens": 3}),
    "--stop": ("!", {"stop": ["!"]}),
    "--json-schema": ('{"type": "boolean"}', {"json_schema": {"type": "boolean"}}),
    "--regex": ("[a-f]{4,9}", {"regex": "[a-f]{4,9}"}),
    "--max-time": ("1e6", {"max_time": 1e6}),
    "--logprobs": ("2", {"logprobs": 2}),
    "--ignore-eos": (None, {"ignore_eos": True}),
}


@pytest.mark.parametrize("option", EVERY_OPTION)
def test_an_option_of_generate_is_that_of_a_completion(draftree, folder: str, option: str) -> None:
    value, named = EVERY_OPTION[option]
    given = [option] if value is None else [option, value]
    status, out, err = draftree("generate", "abcab", "--target", folder, "--drafter", "pld", "--policy", "chain:length=3",
                                "--temperature", "0.9", "--seed", "3", "--max-new-tokens", "16", *given, "--baseline",
                                "--json")  # fmt: skip
    assert (status, err) == (0, "")
    found = json.loads(out)
    engine = load(folder, "pld", "chain:length=3")
    expected = engine.complete(
        question("abcab"), temperature=0.9, seed=3, max_new_tokens=16, **named
    )
    assert (found["token_ids"], found["text"], found["ending"]) == (
        expected.tokens,
        expected.text,
        expected.ending,
    )
    assert found["baseline"]["same_output"] is True
    assert ("logprobs" in found) == (option == "--logprobs")
    if option == "--logprobs":
        assert [one["id"] for one in found["logprobs"]] == found["token_ids"]
        assert [len(one["top"]) for one in found["logprobs"]] == [2] * len(found["token_ids"])


def test_options_of_a_completion_are_read_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    nothing = {"json_schema": None, "logit_bias": [], "stop": []}
    assert arguments.options(nothing) == Options(logit_bias={}, stop=[])
    given = {
        "json_schema": str(tmp_path / "schema.json"),
        "logit_bias": ["8=-inf", " a=b=2e-1", '"\\n"=3'],
    }
    read = arguments.options(nothing | given | {"target": "x", "top_k": 5})
    assert read.json_schema == '{"type": "null"}'
    assert read.logit_bias == {8: -np.inf, " a=b": 0.2, "\n": 3.0}
    assert read.top_k == 5


def test_a_text_that_time_ended_is_written_again_by_its_length() -> None:
    asked = Options(max_time=2.0, max_new_tokens=50, min_new_tokens=20)
    assert arguments.repeatable(asked, 7) == Options(max_new_tokens=7, min_new_tokens=7)
    assert arguments.repeatable(Options(max_new_tokens=50), 7) == Options(max_new_tokens=50)


PROMISES = {
    "typical": (
        "LOSSY: acceptor 'typical'",
        "keeps neither plain decoding's text nor its distribution",
    ),
    "rejection": (None, "'rejection' keeps its distribution, not its text"),
}


@pytest.mark.parametrize("acceptor", PROMISES)
def test_a_rule_that_promises_less_than_the_text_says_so(
    draftree, folder: str, acceptor: str
) -> None:
    warning, told = PROMISES[acceptor]
    parts = ("--drafter", "pld:ngram=1", "--policy", "chain:length=3", "--acceptor", acceptor)
    draws = ("--temperature", "0.3", "--seed", "1", "--max-new-tokens", "100")
    status, out, _ = draftree(
        "generate", "abcabcab", "--target", folder, *parts, *draws, "--baseline"
    )
    assert status == 0
    assert told in out
    assert "ANOTHER" not in out
    assert out.count("LOSSY") == (warning is not None)
    assert warning is None or warning in out


MISTAKES = {
    "no command": (
        [],
        "known are advise, bench, chat, costs, datastore, doctor, drafters, env, export, generate, list, push,",
    ),
    "unknown command": (["generat", "x"], "did you mean 'generate'"),
    "unknown option": (["generate", "x", "--polcy", "pct"], "--policy"),
    "no prompt": (["generate"], "prompt"),
    "empty prompt": (["generate", "", "--drafter", "pld"], "empty"),
    "not a number": (["generate", "x", "--seed", "one"], "; got 'one'; --help says what is allowed"),
    "out of a range": (["bench", "--suite", "demo", "--out", "x.json", "--limit", "0"], "; got '0'; --help says"),
    "none of the choices": (["generate", "x", "--dtype", "fp99"], "'fp99' is not one of 'float64', 'float32', "
                            "'bfloat16', 'float16'; --help says"),
    "logprobs without JSON": (["generate", "x", "--logprobs", "2"], "--logprobs was given, allowed only with --json"),
    "a list as schema": (["generate", "x", "--json-schema", "[1]"], "JSON schema '[1]' cannot be used: allowed is an object"),
    "empty regex": (["generate", "x", "--regex", ""], "regex is '', allowed is a pattern of at least one character"),
    "negative temperature": (["generate", "x", "--temperature", "-1", "--drafter", "pld"], "temperature is -1.0"),
    "no new tokens": (["generate", "x", "--max-new-tokens", "0", "--drafter", "pld"], "--max-new-tokens is 0"),
    "bias of nothing": (["generate", "x", "--logit-bias", "a"], "--logit-bias is 'a', allowed is TOKEN=BIAS"),
    "bias of digits in quotes": (["generate", "x", "--logit-bias", '"7"=1'], "digits are an id: give the id of the text '7'"),
    "bias without a number": (["generate", "x", "--logit-bias", "a=b"], "--logit-bias is 'a=b', allowed is TOKEN=BIAS"),
    "bias of two tokens": (["generate", "x", "--drafter", "pld", "--logit-bias", "ab=1"], "--logit-bias names 'ab'"),
    "no such token": (["generate", "x", "--drafter", "pld", "--suppress", "999"], "suppress names token id 999"),
    "no schema": (["generate", "x", "--json-schema", "none.json"], "'none.json', which is neither JSON nor a file"),
    "not a schema": (["generate", "x", "--json-schema", "file"], "is not JSON"),
    "not a regex": (["generate", "x", "--regex", "("], "regex '(' cannot be used"),
    "two constraints": (["generate", "x", "--regex", "a", "--json-schema", "{}"], "--json-schema and --regex are given"),
    "no time": (["generate", "x", "--max-time", "0"], "--max-time is 0.0, allowed is a finite number above 0"),
    "no stop": (["generate", "x", "--stop", ""], "stop is [''], allowed is texts of at least one character"),
    "unknown drafter": (["generate", "x", "--drafter", "pdl"], "did you mean 'pld'"),
    "unknown knob": (["generate", "x", "--drafter", "pld", "--policy", "pct:widht=3"], "did you mean 'width'"),
    "inexact": (["generate", "x", "--drafter", "pld", "--acceptor", "greedy", "--temperature", "1"], "greedy"),
    "no target": (["generate", "x", "--drafter", "pld", "--target", "./nowhere"], "nowhere"),
    "no device": (["generate", "x", "--drafter", "pld", "--device", "graphics"], "device is 'graphics'"),
    "no costs": (["generate", "x", "--drafter", "pld", "--costs", "none.json"], "none.json"),
    "no suite": (["bench", "--suite", "dmeo", "--out", "x.json", "--drafter", "pld"], "did you mean 'demo'"),
    "no category": (["bench", "--suite", "demo", "--category", "maths", "--out", "x.json"], "did you mean 'math'"),
    "a result that is there": (["bench", "--drafter", "pld", "--policy", "chain", "--out", "file"], "--force overwrites"),
    "out is a folder": (["bench", "--suite", "demo", "--out", ".", "--drafter", "pld", "--policy", "chain"], "folder"),
    "no picture": (["costs", "--drafter", "pld", "--plot", "x.gif"], "known are .pdf, .png, .svg"),
    "no rows": (["costs", "--drafter", "pld", "--rows", "0"], "--rows"),
    "costs for more drafters": (["bench", "--suite", "demo", "--drafter", "pld", "--out", "x.json", "--costs", "one.json",
                                 "--costs", "one.json"], "2 files of costs were given for 1 drafters"),
    "other costs": (["doctor", "--drafter", "pld", "--costs", "file"], "not a file of costs"),
    "out in a file": (["costs", "--drafter", "pld", "--out", "file/x.json"], "cannot be written"),
    "nothing to train": (["train", "pld", "--data", "file", "--out", "o"], "known are c2t, dflash, dspark, eagle, eagle3"),
    "no text": (["train", "edd", "--data", "binary.jsonl", "--out", "o"], "not UTF-8"),
    "no data": (["train", "edd", "--data", "none.jsonl", "--out", "o"], "none.jsonl"),
    "a checkpoint to train": (["train", "edd:checkpoint=o", "--data", "file", "--out", "o"], "checkpoint"),
    "out of range": (["train", "edd", "--data", "file", "--out", "o", "--lr", "0"], "lr is 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_one_line(
    draftree, folder: str, tmp_path: Path, monkeypatch, case: str
) -> None:
    args, told = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("some text")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    CostTable((Costs({1: 0.1}, {1: 1.0}),)).save(tmp_path / "one.json")
    if args and args[0] in ("generate", "bench", "costs", "train") and "--target" not in args:
        args = [*args, "--target", folder]
    status, out, err = draftree(*args)
    assert (status, out) == (2, "")
    assert err.startswith("draftree: ")
    assert err.count("\n") == 1
    assert told in err
    assert {p.name for p in tmp_path.iterdir()} == {"file", "binary.jsonl", "one.json"}


def test_a_broken_target_is_told_in_one_line(draftree, tmp_path: Path) -> None:
    (target_folder(tmp_path) / "model.safetensors").write_bytes(b"broken")
    status, out, err = draftree("generate", "x", "--target", str(tmp_path), "--drafter", "pld")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "model.safetensors" in err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("fc.weight"), "missing tensors: fc.weight"),
        (
            lambda t: t.update({"select_head.weight": torch.zeros(3)}),
            "foreign tensors: select_head.weight",
        ),
    ],
)
def test_a_broken_drafter_of_blocks_is_told_in_one_line(
    draftree, folder: str, tmp_path: Path, change, told: str
) -> None:
    part("drafter", "dspark")().fresh(Target.load(folder)).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    status, out, err = draftree("generate", "x", "--target", folder, "--drafter", str(tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_list_names_every_part_with_its_knobs(draftree) -> None:
    status, out, _ = draftree("list", "--json")
    found = json.loads(out)
    assert status == 0
    assert set(found) == {
        "models",
        "drafters",
        "policies",
        "acceptors",
        "suites",
        "formats",
        "machines",
    }
    assert found["policies"]["pct"]["knobs"] == {
        "width": 5,
        "max_depth": 10,
        "leaf_threshold": 0.01,
        "ratio": None,
        "gain": True,
        "own": 0.0,
    }
    assert {"edd", "vdm", "lm", "pld"} <= set(found["drafters"])
    status, out, _ = draftree("list")
    assert "leaf_threshold=0.01" in out


def test_costs_are_measured_explicitly_and_fixed_by_a_file(
    draftree, folder: str, tmp_path: Path
) -> None:
    fixed = tmp_path / "new" / "costs.json"
    ask = ("costs", "--target", folder, "--drafter", "pld")
    status, out, err = draftree(*ask, "--json", "--out", str(fixed))
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert set(found) == {"entries", "about", "ratio", "kept"}
    entry = found["entries"][0]
    names = {"draft", "target", "commit", "find", "catch_up", "overhead", "context", "rows"}
    assert set(entry) == names
    assert found["ratio"] == entry["draft"]["1"] / entry["target"]["1"]
    assert json.loads(fixed.read_text()) == {k: found[k] for k in ("entries", "about")}
    assert json.loads(Path(found["kept"]).read_text())["models"]["draft"]["timings"] > 0, (
        "what was learnt is corrected"
    )
    _, out, _ = draftree(*ask, "--json", "--rows", "2", "--rows", "3")
    assert {e["rows"] for e in json.loads(out)["entries"]} == {2, 4}
    status, out, _ = draftree(
        "generate",
        "x",
        "--target",
        folder,
        "--drafter",
        "pld",
        "--policy",
        "pct",
        "--costs",
        str(fixed),
    )
    assert status == 0


def test_costs_fit_a_terminal_and_a_picture(draftree, folder: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "costs.svg"
    ask = ("costs", "--target", folder, "--drafter", "pld", "--rows", "2", "--plot", str(picture))
    status, out, _ = draftree(*ask)
    assert status == 0
    assert "target pass" in picture.read_text()
    for word in (
        "pld for",
        ", 2 rows",
        "sₜ/sₜ(1)",
        "measured on",
        "corrected by them",
        "--out FILE",
    ):
        assert word in out
    shown = Console(file=io.StringIO(), width=80)
    both = [
        Costs({1: 0.001, 32: 0.02}, {1: 0.123456, 128: 12.3}, 0.001, context)
        for context in (128, 1020, 4096)
    ]
    terminal.show_costs(shown, "edd for demo", CostTable(tuple(both)))
    lines = shown.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    widest = next(line for line in lines if " 128 │ " in line)
    assert widest.replace("│", "").split() == ["128", "12300.00", "99.63", "12300.00", "99.63"]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Something to learn."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes " * 4},
            ]
        }
        for i in range(6)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_train_writes_a_drafter(draftree, folder: str, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    ask = (
        "train",
        "edd",
        "--target",
        folder,
        "--data",
        str(chats),
        "--out",
        str(out),
        "--batch-size",
        "2",
        "--set",
        "loss=ce",
    )
    status, said, _ = draftree(*ask, "--held-out", "0.2", "--json")
    found = json.loads(said)
    assert status == 0
    assert (found["step"], found["steps"]) == (2, 2)
    assert found["acceptance_length"] >= 1
    assert json.loads((out / "config.json").read_text())["draftree"]["loss"] == "ce"
    status, said, _ = draftree("generate", "1?", "--target", folder, "--drafter", str(out), "--baseline", "--json",
                               "--max-new-tokens", "12")  # fmt: skip
    assert json.loads(said)["baseline"]["same_output"] is True
    status, said, err = draftree(*ask)
    assert (status, said) == (2, "")
    assert "exists; --force overwrites it" in err


def test_an_interrupted_training_says_how_to_go_on(
    draftree, folder: str, chats: Path, tmp_path: Path, monkeypatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train", interrupted)
    status, out, err = draftree(
        "train", "vdm", "--target", folder, "--data", str(chats), "--out", str(tmp_path / "o")
    )
    assert (status, out) == (130, "")
    assert "the same command goes on" in err


@pytest.mark.parametrize(
    "case", ["uneven", "finished", "another run", "another drafter", "too few"]
)
def test_a_training_that_cannot_be_is_refused_before_the_target_is_read(
    case: str, draftree, folder: str, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    ask = [
        "train",
        "edd",
        "--target",
        folder,
        "--data",
        str(chats),
        "--out",
        str(out),
        "--cache-features",
    ]
    mistakes = {
        "uneven": (["--batch-size", "3", "--accumulate", "2", "--regenerate"], "--batch-size is 3"),
        "finished": (["--regenerate"], "exists; --force overwrites it"),
        "another run": (["--regenerate", "--lr", "1"], "an interrupted run with --lr 0.0001: "),
        "another drafter": (["--regenerate"], "an interrupted run with --drafter another: "),
        "too few": (["--held-out", "0.9"], "6 samples, of which 6 are held out"),
    }
    said = asdict(TrainingPlan(cache_features=True)) | {
        "target": folder,
        "drafter": "another",
        "init_from": None,
    }
    files = {"finished": ["config.json"], "another run": ["training.json", "training.pt"]}
    files["another drafter"] = files["another run"]
    out.mkdir()
    for name in files.get(case, []):
        (out / name).write_text(json.dumps(said | {"regenerated_tokens": 256}))
    more, told = mistakes[case]
    status, _, err = draftree(*ask, *more)
    assert status == 2
    assert told in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in out.iterdir()) == files.get(case, [])


def test_training_without_its_extra_says_what_to_install(draftree, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name in ("training_job", "trainer"):
        monkeypatch.delitem(sys.modules, f"draftree.training.{name}", raising=False)
        monkeypatch.delattr(f"draftree.training.{name}", raising=False)
    status, _, err = draftree("train", "edd", "--data", __file__, "--out", "o")
    assert status == 2
    assert "pip install 'draftree[train]'" in err


def test_training_options_leave_the_method_its_numbers() -> None:
    """What a method's paper has a number for is not set by an option's default; for the rest that is the plan's."""
    options, theirs = (
        inspect.signature(train).parameters,
        {f.name for f in fields(Recipe)} | {"stage"},
    )
    assert {options[name].default for name in theirs} == {None}
    rest = {k: v for k, v in vars(TrainingPlan()).items() if k not in theirs}
    assert {name: options[name].default for name in rest} == rest


def test_help_does_not_wait_for_torch() -> None:
    asked = "import draftree.cli.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_a_stream_shows_whole_characters_in_the_colour_of_their_origin() -> None:
    tokenizer, shown = byte_tokenizer(), io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=20)
    reading = Reading(tokenizer, StopStrings())
    text = "a long line with wörds, 😀\n  and  spaces "
    ids = encode(tokenizer, text)
    for i in range(0, len(ids), 3):
        part = ids[i : i + 3]
        terminal.show_tokens(
            console,
            reading([Emitted(0, part, ["drafted"] * (len(part) - 1) + ["bonus"], *NOTHING)]),
        )
        assert "\ufffd" not in shown.getvalue()
    assert "\x1b[32ma \x1b[0m\x1b[39ml\x1b[0m" in shown.getvalue()
    last = Emitted(0, encode(tokenizer, "é")[:1], ["prefill"], *NOTHING, ending="length")
    terminal.show_tokens(console, reading([last]))
    plain = "".join(part.split("m", 1)[-1] for part in shown.getvalue().split("\x1b["))
    assert plain == text + "\ufffd"


def test_a_stream_shows_no_stop_text() -> None:
    tokenizer, shown = byte_tokenizer(), io.StringIO()
    console, reading = Console(file=shown, width=80), Reading(tokenizer, StopStrings(("END",)))
    terminal.show_tokens(
        console,
        reading([Emitted(0, encode(tokenizer, "the E"), ["prefill", *["drafted"] * 4], *NOTHING)]),
    )
    assert shown.getvalue() == "the "
    last = Emitted(
        0, encode(tokenizer, "N END"), ["drafted"] * 4 + ["bonus"], *NOTHING, ending="stop"
    )
    terminal.show_tokens(console, reading([last]))
    assert shown.getvalue() == "the EN "


def test_names_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(terminal, "output", lambda: shown)
    monkeypatch.setattr(terminal, "errors", lambda: shown)
    shown.print(terminal.table("prompts [b]", [{"drafter": "runs/a[b]"}]))
    terminal.remark("features in runs/c[b]")
    show(summarise("edd", Progress(1, 1, 0.5)), Path("runs/d[b]"))
    said = shown.file.getvalue() + capsys.readouterr().err
    assert all(name in said for name in ("prompts [b]", "runs/a[b]", "runs/c[b]", "runs/d[b]"))


def test_a_bar_and_its_remark_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        terminal, "errors", lambda: Console(file=shown, force_terminal=True, width=80)
    )
    remark = "loss 3.638, held-out loss 3.643, overlap 0.066, acceptance length 1.000, by depth 0.50 0.40 0.30 0.20 0.10"
    with terminal.progress("train eagle3", None) as tell:
        tell(250, remark, 10_000)
    last = Text.from_ansi(shown.getvalue().replace("\r", "")).plain
    assert "train eagle3" in last
    assert "250/10000" in last
    assert remark in " ".join(last.split())


def test_a_prompt_is_rendered_by_the_template_or_taken_as_it_is() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(encode(tokenizer, question("hi"))) == "<|user|>hi<|assistant|>"
    assert tokenizer.decode(encode(tokenizer, "hi")) == "hi"
    assert tokenizer.decode(encode(byte_tokenizer(None), question("hi"))) == "hi"


def test_standard_input_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(arguments.UserError, match="UTF-8"):
        arguments.prompt_text("-")


def test_the_demo_is_exact(draftree) -> None:
    status, out, _ = draftree("generate", "Tom has 3 apples and buys 5. How many has he?", "--max-new-tokens", "32",
                              "--baseline", "--json")  # fmt: skip
    found = json.loads(out)
    assert status == 0
    assert found["baseline"]["same_output"] is True
    assert found["stats"]["acceptance_length"] > 1.2


def test_a_grammar_of_a_file_and_a_beginning(
    draftree: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.lark"
    rules.write_text('start: "It is " ("red" | "blue") " " /[0-9]{2}/')
    options = (
        "generate",
        "What is it?",
        "--drafter",
        "edd",
        "--policy",
        "chain",
        "--grammar",
        rules,
        "--baseline",
        "--json",
    )
    status, out, err = draftree(*options, "--beginning", "It is b")
    assert (status, err) == (0, "")
    said = json.loads(out)
    assert re.fullmatch(r"It is blue \d\d", said["text"])
    assert said["ending"] == "eos"
    assert said["baseline"]["same_output"]
    rules.write_text("start: (")
    assert draftree(*options)[0] == 2
    status, _, err = draftree(*options[:-3], tmp_path / "none.lark")
    assert (status, "none.lark" in err, err.count("\n")) == (2, True, 1)
