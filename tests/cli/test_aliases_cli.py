"""What users of other tools type first: each guess works, or its message says what to type; and the help of every command."""

import io
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from draftree.aliases import FLAG, INSTEAD, LOADING, OPTION
from draftree.aliases.hint_tables import LM_EVALUATION
from draftree.cli import option_checks, terminal, unknown_options
from draftree.cli.app import app
from draftree.cli.output_files import check_output, default_name
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.errors import UserError
from draftree.utils.validated_dataclass import PRESET

pytestmark = pytest.mark.usefixtures("one_demo")

Run = Callable[..., tuple[int, str, str]]
PLD = ("--drafter", "pld", "--policy", "chain:length=2")
WORKS = {
    "model and prompt": ("generate", "demo", "hi", *PLD, "-n", 4),
    "model, -p": ("generate", "demo", "-p", "hi", *PLD, "-n", 4),
    "-m, -p (llama.cpp)": ("generate", "-m", "demo", "-p", "hi", *PLD, "-n", "4"),
    "--model, --prompt (mlx_lm)": (
        "generate",
        "--model",
        "demo",
        "--prompt",
        "hi",
        *PLD,
        "--max-tokens",
        "4",
    ),
    "--model=": ("generate", "--model=demo", "--prompt=hi", *PLD, "--max-tokens=4"),
    "-hf (llama.cpp)": ("generate", "-hf", "demo", "-p", "hi", *PLD, "--n-predict", "4"),
    "the prompt alone": ("generate", "hi", *PLD, "--max-new-tokens", "4"),
    "-t": ("generate", "demo", "hi", *PLD, "-n", "4", "-t", "0.7"),
    "--temp": ("generate", "demo", "hi", *PLD, "-n", "4", "--temp", "0.7", "-s", "3"),
    "--stream": ("generate", "demo", "hi", *PLD, "-n", "4", "--stream"),
    "--system-prompt": ("generate", "demo", "hi", *PLD, "-n", "4", "--system-prompt", "Be brief."),
    "--stop-strings": ("generate", "demo", "hi", *PLD, "-n", "4", "--stop-strings", "x"),
    "--draft-model (mlx_lm)": (
        "generate",
        "demo",
        "hi",
        "--draft-model",
        "ngram",
        "--policy",
        "chain:length=2",
        "-n",
        "4",
    ),
    "-md (llama.cpp)": (
        "generate",
        "demo",
        "hi",
        "-md",
        "prompt_lookup",
        "--policy",
        "chain:length=2",
        "-n",
        "4",
    ),
    "--torch-dtype": ("generate", "demo", "hi", *PLD, "-n", "4", "--torch-dtype", "float32"),
    "run (ollama)": ("run", "demo", "hi", *PLD, "-n", "4"),
    "no command (llama.cpp)": (
        "-m",
        "demo",
        "-p",
        "hi",
        "-md",
        "pld",
        "--draft-max",
        "2",
        "-n",
        "4",
    ),
    "gen": ("gen", "demo", "hi", *PLD, "-n", "4"),
    "ls": ("ls",),
    "list policies": ("list", "policies"),
    "drafters MODEL": ("drafters", "meta-llama/Llama-3.1-8B-Instruct"),
    "drafters --for": ("drafters", "--for", "Qwen/Qwen3-8B"),
    "--repo-id": ("generate", "--repo-id", "demo", "-p", "hi", *PLD, "-n", "4"),
    "--max_new_tokens with underscores": (
        "generate",
        "demo",
        "hi",
        *PLD,
        "--max_new_tokens",
        "4",
        "--top_k",
        "5",
    ),
    "--dtype half (vLLM)": ("generate", "demo", "hi", *PLD, "-n", "4", "--dtype", "float"),
    "--predict, -r (llama.cpp)": ("generate", "demo", "hi", *PLD, "--predict", "4", "-r", "x"),
    "-j (llama.cpp)": ("generate", "demo", "hi", *PLD, "-n", "4", "-j", '{"type": "boolean"}'),
    "--prefill-response (mlx_lm)": (
        "generate",
        "demo",
        "hi",
        *PLD,
        "-n",
        "4",
        "--prefill-response",
        "Well",
    ),
    "--system-instruction (lm_eval)": (
        "generate",
        "demo",
        "hi",
        *PLD,
        "-n",
        "4",
        "--system-instruction",
        "Be brief.",
    ),
    "-n4": ("generate", "demo", "hi", *PLD, "-n4"),
    "--dev (llama.cpp)": ("generate", "demo", "hi", *PLD, "-n", "4", "-dev", "cpu"),
    "drafters -m": ("drafters", "-m", "demo"),
    "-h": ("generate", "-h"),
    "--version": ("--version",),
}
TOLD = {
    "serve (vLLM)": (("serve", "demo", "--host", "0.0.0.0"), "--api-key"),
    "server (mlx_lm)": (("server", "demo", "--host", "0.0.0.0"), "--api-key"),
    "chat (vLLM)": (("chat", "demo", "--max-tokens", "0"), "max-new-tokens"),
    "pull (ollama)": (("pull", "demo"), "hf download ID"),
    "eval": (("eval", "demo"), "draftree bench MODEL"),
    "quantize": (("quantize",), "--quantize int8"),
    "ps (ollama)": (("ps",), "nothing runs"),
    "create (ollama)": (("create", "x"), "draftree train"),
    "stop (ollama)": (("stop", "x"), "nothing runs"),
    "speculative (llama.cpp)": (("speculative",), "draftree generate MODEL -p"),
    "perplexity (llama.cpp)": (("perplexity",), f": run {LM_EVALUATION}\n"),
    "lm_eval": (("lm_eval",), f": run {LM_EVALUATION}\n"),
    "install": (("install",), "pip install . in its clone"),
    "tokenize (llama.cpp)": (("tokenize",), "AutoTokenizer"),
    "lora (mlx_lm)": (("lora",), "--adapter"),
    "fuse (mlx_lm)": (("fuse",), "--adapter"),
    "login (hf)": (("login",), "hf auth login"),
    "an unknown command": (("frobnicate",), "known are"),
    "-t as threads (llama.cpp)": (("generate", "demo", "hi", "-t", "8"), "--threads 8"),
    "--draft-min (llama.cpp)": (
        ("generate", "demo", "hi", "--draft-min", "1"),
        "--policy chain:length=5",
    ),
    "--draft-p-min (llama.cpp)": (
        ("generate", "demo", "hi", "--draft-p-min", "0.8"),
        "--policy pct:",
    ),
    "-ngld (llama.cpp)": (("generate", "demo", "hi", "-ngld", "99"), "--device"),
    "-b (llama.cpp)": (("generate", "demo", "hi", "-b", "99"), "draftree bench"),
    "-np (llama.cpp)": (("generate", "demo", "hi", "-np", "2"), "draftree bench"),
    "-fa (llama.cpp)": (("generate", "demo", "hi", "-fa"), "--attn-implementation"),
    "-ctk (llama.cpp)": (("generate", "demo", "hi", "-ctk", "q8_0"), "dtype of the model"),
    "--numa (llama.cpp)": (("generate", "demo", "hi", "--numa", "x"), "numactl"),
    "-sm (llama.cpp)": (("generate", "demo", "hi", "-sm", "row"), "one device"),
    "-e (llama.cpp)": (("generate", "demo", "hi", "-e"), "the shell writes escapes"),
    "--mirostat (llama.cpp)": (("generate", "demo", "hi", "--mirostat", "2"), "--min-p"),
    "--samplers (llama.cpp)": (("generate", "demo", "hi", "--samplers", "k"), "--top-k"),
    "--repeat-penalty (llama.cpp)": (
        ("generate", "demo", "hi", "--repeat-penalty", "1.1"),
        "--repetition-penalty",
    ),
    "--grammar-file (llama.cpp)": (
        ("generate", "demo", "hi", "--grammar-file", "g"),
        "--grammar FILE takes a Lark grammar",
    ),
    "-hff (llama.cpp)": (("generate", "demo", "hi", "-hff", "x.gguf"), ".gguf file as MODEL"),
    "-mu (llama.cpp)": (("generate", "demo", "hi", "-mu", "http://x"), "download the file"),
    "--log-disable (llama.cpp)": (("generate", "demo", "hi", "--log-disable"), "2>/dev/null"),
    "--prompt-cache (llama.cpp)": (
        ("generate", "demo", "hi", "--prompt-cache", "x"),
        "draftree chat",
    ),
    "-lcs (llama.cpp)": (
        ("generate", "demo", "hi", "--lookup-cache-static", "x"),
        "datastore build",
    ),
    "--think (ollama)": (("generate", "demo", "hi", "--think"), "chat template"),
    "-m as tokens (mlx_lm)": (("generate", "demo", "-p", "hi", "-m", "100"), "-n 100 bounds"),
    "-m as tokens, no model (mlx_lm)": (("generate", "-p", "hi", "-m", "100"), "-n 100 bounds"),
    "--kv-bits (mlx_lm)": (("generate", "demo", "hi", "--kv-bits", "8"), "dtype of the model"),
    "--extra-eos-token (mlx_lm)": (
        ("generate", "demo", "hi", "--extra-eos-token", "x"),
        "--stop TEXT",
    ),
    "--speculative-config (vLLM)": (
        ("generate", "demo", "hi", "--speculative-config", "{}"),
        "--drafter eagle3 --policy",
    ),
    "-tp (vLLM)": (("generate", "demo", "hi", "-tp", "2"), "one device"),
    "--kv-cache-dtype (vLLM)": (
        ("generate", "demo", "hi", "--kv-cache-dtype", "fp8"),
        "dtype of the model",
    ),
    "--quantization awq (vLLM)": (
        ("generate", "demo", "hi", "--quantize", "awq"),
        "load the model with transformers",
    ),
    "--dtype int8": (("generate", "demo", "hi", "--dtype=int8"), "--quantize int8"),
    "--download-dir (vLLM)": (("generate", "demo", "hi", "--download-dir", "x"), "HF_HOME"),
    "--api-key (vLLM)": (("generate", "demo", "hi", "--api-key", "x"), "draftree serve"),
    "--max-num-seqs (vLLM)": (("generate", "demo", "hi", "--max-num-seqs", "8"), "draftree bench"),
    "--tokenizer (vLLM)": (("generate", "demo", "hi", "--tokenizer", "x"), "the model's folder"),
    "bench throughput (vLLM)": (
        ("bench", "throughput", "--model", "demo"),
        "has no sub-commands, and 'throughput' was read",
    ),
    "bench latency (vLLM)": (("bench", "latency", "--model", "demo"), "type draftree bench demo"),
    "bench serve (vLLM)": (("bench", "serve", "-m", "demo"), "type draftree bench demo"),
    "two models, --model": (("bench", "demo", "--model", "smollm2"), "as --model 'smollm2'"),
    "export of a model (llama.cpp)": (
        ("export", "demo", "--format", "gguf", "--outfile", "F"),
        "writes drafters, not models, as draftree export eagle3; formats are speculators, eagle, vllm-",
    ),
    "export of a model by its name": (
        ("export", "demo"),
        "'demo' is a model, but draftree export writes drafters",
    ),
    "two unknown options": (
        ("generate", "demo", "hi", "--num-beams", "4", "--frobnicate", "--numa", "5"),
        "numactl binds",
    ),
    "unknown options, together": (
        ("generate", "demo", "--num-beams=4", "--frobnicate"),
        "; unknown option '--frobnicate'",
    ),
    "--input-len (vLLM)": (("bench", "demo", "--input-len", "128"), "--suite FILE"),
    "--request-rate (vLLM)": (("bench", "demo", "--request-rate", "4"), "one text at a time"),
    "--num-fewshot (lm_eval)": (
        ("bench", "demo", "--num-fewshot", "5"),
        f": {LM_EVALUATION} runs",
    ),
    "--gen-kwargs (lm_eval)": (
        ("generate", "demo", "hi", "--gen_kwargs", "temperature=0"),
        "--top-p, --max-new-tokens",
    ),
    "--model-args (lm_eval)": (("bench", "--model_args", "pretrained=demo"), "--dtype"),
    "--num-return-sequences (transformers)": (
        ("generate", "demo", "hi", "--num-return-sequences", "2"),
        "--seed",
    ),
    "--max-length (transformers)": (
        ("generate", "demo", "hi", "--max-length", "20"),
        "--max-new-tokens",
    ),
    "--streamer (transformers)": (("generate", "demo", "hi", "--streamer", "x"), "--stream"),
    "--use-auth-token (transformers)": (
        ("generate", "demo", "hi", "--use-auth-token", "x"),
        "hf auth login",
    ),
    "--early-stopping (transformers)": (
        ("generate", "demo", "hi", "--early-stopping"),
        "beam search",
    ),
    "--output-scores (transformers)": (
        ("generate", "demo", "hi", "--output-scores"),
        "--json --logprobs N",
    ),
    "--best-of (OpenAI)": (("generate", "demo", "hi", "--best-of", "2"), "--seed"),
    "--n (OpenAI)": (("generate", "demo", "hi", "--n-completions", "2"), "--seed"),
    "--response-format (OpenAI)": (
        ("generate", "demo", "hi", "--response-format", "json"),
        "--json-schema",
    ),
    "--speculative-eagle-topk (SGLang)": (
        ("generate", "demo", "hi", "--speculative-eagle-topk", "5"),
        "--policy eagle2",
    ),
    "a drafter as argument": (("bench", "demo", "edd"), "write --drafter edd"),
    "an output as argument": (("export", "eagle3", "out_dir"), "write --out out_dir"),
    "a kind that list does not have": (("list", "drafter"), "did you mean 'drafters'"),
    "an argument of env": (("env", "all"), "it takes none"),
    "-ngl (llama.cpp)": (("generate", "demo", "hi", "-ngl", "99"), "device"),
    "-i (llama.cpp)": (("generate", "demo", "-i"), "draftree chat"),
    "-f (llama.cpp)": (("generate", "demo", "-f", "x"), "-f is 'x', allowed is a file of text"),
    "--tensor-parallel-size": (
        ("generate", "demo", "hi", "--tensor-parallel-size", "2"),
        "one device",
    ),
    "--num-beams": (("generate", "demo", "hi", "--num-beams", "4"), "beam search is not offered"),
    "a misspelt option": (
        ("generate", "demo", "hi", "--temprature", "1"),
        "did you mean --temperature",
    ),
    "a misspelt alias": (
        ("generate", "demo", "hi", "--max-token", "1"),
        "did you mean --max-new-tokens",
    ),
    "an option that nothing is near": (
        ("generate", "demo", "hi", "--frobnicate"),
        "--help lists them",
    ),
    "a prompt without quotes": (("generate", "demo", "how", "many"), "put the prompt into quotes"),
    "two models": (("generate", "demo", "hi", "--target", "demo"), "given twice"),
    "two prompts": (("generate", "demo", "hi", "-p", "hi"), "given twice"),
    "a path that does not exist": (
        ("generate", "./nowhere", "hi"),
        "no folder or file './nowhere'",
    ),
    "a name that does not exist": (
        ("generate", "nosuch", "hi"),
        "there is no folder 'nosuch' here",
    ),
    "a drafter that does not exist": (
        ("generate", "demo", "hi", "--drafter", "nosuch"),
        "known are",
    ),
    "eagle2 as a drafter": (("generate", "demo", "hi", "--drafter", "eagle2"), "policy 'eagle2'"),
    "a draft model without a name": (
        ("generate", "demo", "hi", "--drafter", "draft_model"),
        "give the loaded model",
    ),
    "a range": (("generate", "demo", "hi", "--top-p", "3"), "--top-p is 3.0, allowed is"),
    "several ranges": (
        ("generate", "demo", "hi", "--top-p", "3", "--temperature", "-1", "-n", "0"),
        "--max-new-tokens is 0, allowed is a whole number of at least 1; --temperature is -1.0, allowed is",
    ),
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


def test_a_terminal_without_a_prompt_is_told_to_name_one(
    draftree: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    )
    status, _, err = draftree("generate", "demo")
    assert (status, err) == (
        2,
        "draftree: there is no prompt: draftree generate demo 'PROMPT', or a pipe into it\n",
    )


ALL = [
    (),
    ("datastore",),
    *(tuple(told.split()) for told, _ in unknown_options.commands(typer.main.get_command(app))),
]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ALL)
def test_a_help_fits(
    draftree: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], width: int
) -> None:
    """Every name is whole, no line is wider than the terminal, and all of it is two screens of fifty lines at most."""
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, _ = draftree(*command, "--help")
    lines = out.splitlines()
    assert status == 0
    if "--target" in out:
        assert "--target" in lines[lines.index("Options") + 1]
    if "--device" in out:
        assert out.index("\nLoading the model\n") > max(out.index("--help"), out.index("Options"))
    assert max(map(len, lines)) <= width
    assert len(lines) <= 100
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


def test_a_list_in_a_pipe_is_as_wide_as_a_page(
    draftree: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for command in (("list",), ("drafters",)):
        _, out, _ = draftree(*command)
        assert 80 < max(map(len, out.splitlines())) <= terminal.LIST_COLUMNS == 100


OFFLINE = {
    "a target": ("--target", "owner/nosuch"),
    "a drafter": ("demo", "--drafter", "owner/nosuch"),
    "a drafter's revision": ("demo", "--drafter", "owner/nosuch@main"),
    "a part of a drafter": ("demo", "--drafter", "suffix+owner/nosuch"),
    "a small model": ("demo", "--drafter", "lm:model=owner/nosuch"),
    "an adapter": ("demo", "--adapter", "owner/nosuch"),
}


@pytest.mark.parametrize("name", OFFLINE)
def test_hub_ids_without_a_copy_are_refused_offline(
    draftree: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from draftree.target import hub, target

    monkeypatch.setattr(hub, "is_hub_reachable", lambda: False)
    monkeypatch.setattr(target.Target, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    status, out, err = draftree("generate", "-p", "hi", *OFFLINE[name])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "'owner/nosuch" in err
    assert "its cache holds no copy" in err


FORECAST = {
    "doctor": (
        ("doctor", "demo", "--drafter", "pld"),
        "12 answers of 48 tokens, and their examination",
    ),
    "doctor --lossless": (("doctor", "demo", "--lossless", "--limit", 2), "2 texts in "),
    "costs": (("costs", "demo", "--drafter", "pld"), "timing draft steps and passes"),
    "bench": (
        ("bench", "demo", "--drafter", "pld", "--policy", "chain:length=2", "--limit", 2),
        "4 texts, 2 prompts in 2 ways",
    ),
}


@pytest.mark.parametrize("name", FORECAST)
def test_long_work_says_how_long_it_will_take_before_it_begins(
    draftree: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def stop(what: str, seconds: float) -> None:
        raise UserError(f"{what}: {seconds}")

    monkeypatch.setattr(terminal, "forecast", stop)
    args, told = FORECAST[name]
    status, out, err = draftree(*args)
    assert (status, out) == (2, "")
    assert f"draftree: {told}" in err
    assert float(err.split()[-1]) > 0


def test_a_training_says_how_long_it_will_take_before_it_begins(
    draftree: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from draftree.training import trainer, training_job

    def stop(*_: object) -> None:
        raise UserError("it begins")

    monkeypatch.setattr(trainer, "train", stop)
    monkeypatch.setattr(training_job, "training_seconds", lambda *_: 90.0)
    (tmp_path / "texts.jsonl").write_text(
        "".join(f'{{"text": "the text number {i} of some words"}}\n' for i in range(8))
    )
    status, _, err = draftree(
        "train", "medusa", "--data", tmp_path / "texts.jsonl", "--epochs", 2, "--held-out", 0.2
    )
    *_, said, _, last = err.splitlines()
    assert (status, last) == (2, "draftree: it begins")
    assert re.fullmatch(
        r"draftree: [\d,]+ samples of [\d,]+ tokens, 2 epochs: about .* estimated from the cost of passes",
        said,
    )


@pytest.mark.parametrize("slow", [90.0, 0.1])
def test_answers_and_questions_of_a_training_are_forecast(
    draftree: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: float
) -> None:
    from draftree.training import answer_source, trainer

    def stop(*_: object) -> None:
        raise UserError("it begins")

    asked = list[tuple[int, int]]()

    def seconds(self: object, texts: int, tokens: int) -> float:
        asked.append((texts, tokens))
        return slow

    monkeypatch.setattr(trainer, "train", stop)
    monkeypatch.setattr(answer_source.Local, "seconds", seconds)
    turn = '{"role": "user", "content": "How many legs have 2 dogs?"}, {"role": "assistant", "content": ""}'
    (tmp_path / "chats.jsonl").write_text(
        f'{{"messages": [{turn}]}}\n{{"messages": [{turn}, {turn}]}}\n'
    )
    given = (
        "--data",
        tmp_path / "chats.jsonl",
        "--regenerate",
        "--regenerate-tokens",
        4,
        "--epochs",
        1,
    )
    status, _, err = draftree("train", "medusa", *given)
    assert (status, asked) == (2, [(3, 4)])
    assert ("draftree: 3 answers of at most 4 tokens: at most about" in err) == (slow > 1)


def test_an_author_knows_how_long_texts_take() -> None:
    from draftree.target.target import Target
    from draftree.training.answer_source import Local

    author = Local(Target.load("demo"), rows=4)
    assert author.seconds(0, 16) == 0
    assert author.seconds(8, 32) > author.seconds(4, 16) > 0


def test_bench_says_what_it_read_and_what_its_columns_mean(draftree: Run, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    CostTable((Costs({1: 0.1}, {1: 1.0}),)).save(costs)
    (tmp_path / "notes.txt").write_text(
        "How many legs have 2 dogs?\n\nHow many legs have 3 dogs?\n"
    )
    asked = ("bench", "demo", "--suite", "notes.txt", "--drafter", "pld", "--costs", costs, "-n", 4)
    status, out, err = draftree(*asked)
    assert status == 0
    assert (
        "2 prompts: no categories (each line is a question; --whole takes the file as one prompt)"
        in err
    )
    for word in (
        "tokens",
        "speed-up",
        "tokens/pass (τ): tokens that one pass of the target yields; plain decoding has 1",
    ):
        assert word in out
    assert (tmp_path / "bench-demo-notes.json").exists()
    status, _, err = draftree(*asked, "--out", "notes.txt")
    assert (status, "--force overwrites it" in err) == (2, True)
    status, _, err = draftree(*asked, "--whole", "--force")
    assert status == 0
    assert "1 prompts: no categories (the file is one prompt, continued as it is)" in err


OUTPUTS = {
    "bench": ("bench", "demo", "--out", "there.json"),
    "replay": ("replay", "demo", "--out", "there.json"),
    "report": ("report", "result.json", "--out", "there.html"),
    "costs": ("costs", "demo", "--out", "there.json"),
    "a picture of costs": ("costs", "demo", "--plot", "there.svg"),
    "trees": ("generate", "demo", "hi", "--trees", "there.html"),
    "a profile": ("bench", "demo", "--profile", "there.svg"),
    "a card": ("push", "ours", "owner/name", "--license", "mit", "--dry-run"),
    "an export": ("export", "eagle3", "--out", "ours"),
    "a datastore": (
        "datastore",
        "build",
        "--kind",
        "rest",
        "--data",
        "result.json",
        "--out",
        "ours",
    ),
    "a drafter": ("train", "edd", "--data", "result.json", "--out", "ours"),
    "a static tree": (
        "train",
        "static",
        "--drafter",
        "edd",
        "--data",
        "result.json",
        "--out",
        "there.json",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_nothing_is_overwritten_without_consent(draftree: Run, tmp_path: Path, name: str) -> None:
    """Without a terminal an output that exists is refused; the line names both ways out, and nothing changes."""
    for path in (
        "there.json",
        "there.html",
        "there.svg",
        "result.json",
        "ours/config.json",
        "ours/model.safetensors",
        "ours/README.md",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = draftree(*OUTPUTS[name])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "exists; --force overwrites it, " in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("answer", "status"), [("y\n", True), ("n\n", False)])
def test_a_terminal_is_asked_before_a_file_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: bool
) -> None:
    there = tmp_path / "there.json"
    there.touch()
    monkeypatch.setattr(
        sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})(answer)
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    if status:
        assert check_output(there, False)
    else:
        with pytest.raises(UserError, match="was left as it is"):
            check_output(there, False)


@pytest.mark.parametrize(
    ("number", "status", "told"),
    [(None, 2, "was left as it is"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_question_without_an_answer_overwrites_nothing(
    draftree: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int | None,
    status: int,
    told: str,
) -> None:
    """Ctrl-D ends standard input, and Ctrl-C sends a signal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, *_: Any) -> str:
            if number is not None:
                signal.raise_signal(number)
            return ""

    (tmp_path / "there.html").write_text("kept")
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    found, _, err = draftree("generate", "demo", "hi", "--trees", "there.html")
    assert (found, err.splitlines()[1:]) == (status, [err.splitlines()[-1]])
    assert told in err
    assert (tmp_path / "there.html").read_text() == "kept"


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (
            ("bench", "meta-llama/Llama-3.1-8B", "data/Questions.jsonl"),
            "bench-llama-3-1-8b-questions",
        ),
        (("replay", "models/model.Q4_K.GGUF", "demo"), "replay-model-q4_k-demo"),
        (("edd", "runs/v0.2/"), "edd-v0-2"),
    ],
)
def test_names_of_models_are_whole_in_a_default_name(parts: tuple[str, ...], name: str) -> None:
    assert default_name(*parts) == name


@pytest.mark.parametrize(
    "args",
    [
        ("advise", "--drafter", "published"),
        ("bench", "--pair", "published yield"),
        ("replay", "--pair", "published chain:length=2 greedy"),
        ("train", "static", "--drafter", "published", "--data", "chats.jsonl"),
        ("train", "c2t", "--drafter", "published", "--data", "chats.jsonl"),
    ],
)
def test_a_published_drafter_is_found_wherever_a_drafter_is_named(
    draftree: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    from draftree.formats.known_checkpoints import find_published
    from draftree.target import hub

    (tmp_path / "chats.jsonl").write_text("{}")
    (tmp_path / "Qwen3-8B").mkdir()
    monkeypatch.setattr(hub, "is_hub_reachable", lambda: False)
    monkeypatch.setattr(hub, "find_in_cache", lambda *_: None)
    status, _, err = draftree(*args, "--target", "Qwen3-8B")
    assert status == 2
    assert f"'{find_published('Qwen3-8B')}' cannot be downloaded" in err


@pytest.mark.parametrize(
    "name", ["me/foo--bar", "me/a..b", "me/foo.", "me./foo", "me/x.git", "mé/x"]
)
def test_names_that_the_hub_refuses_are_no_hub_ids(draftree: Run, name: str) -> None:
    for words in (("--target", name), ("demo", "--drafter", name)):
        status, out, err = draftree("generate", "-p", "hi", *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "it is no hub id" in err


def test_a_folder_of_others_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="holds files that draftree did not write"):
        check_output(tmp_path, True, folder=True)
    assert not check_output(tmp_path / "new", False, folder=True)


PROSE = ("has", "have", "runs", "names", "reads", "writes", "forces", "gives")
"""Verbs that follow the library's name in a hint, where no command is meant."""
HOST = re.compile(r"in draftree ((?:datastore )?[a-z]+), ")
HAVING = re.compile(r"draftree .* ha(s|ve) it(, as --[a-z-]+)?")


def test_every_hint_names_what_works_where_it_is_shown() -> None:
    """For each word in the tables and each command: the options that its hint names are options of the command it names."""
    group: Any = typer.main.get_command(app)
    root, options = (
        typer.Context(group, info_name="draftree"),
        {told: c.options[0] for told, c in unknown_options.commands(group)},
    )
    words = {word: None for kind in (FLAG, OPTION, LOADING) for word in INSTEAD[kind]}
    hints = set[str]()
    for told, command in unknown_options.commands(group):
        for option in (
            f"--{word.replace('_', '-')}" if len(word) > 1 else f"-{word}" for word in words
        ):
            try:
                command.parse_args(
                    typer.Context(command, parent=root, info_name=told), [option, "1"]
                )
            except UserError as error:
                hint = (
                    str(error).partition(": ")[2] if str(error).startswith("unknown option") else ""
                )
            except (typer.TyperException, typer.Exit):  # the option is accepted
                continue
            if not hint or HAVING.fullmatch(hint):
                continue
            host = HOST.match(hint)
            named = unknown_options.named_options(
                hint.partition("in Python: ")[0][host.end() if host else 0 :]
            )
            assert named <= options[host[1] if host else told].keys(), (told, option, hint)
            hints.add(hint)
    assert len(hints) > 100
    for hint in hints:
        for at in re.finditer(r"draftree ((?:datastore )?[a-z]+)([^;,:`]*)", hint):
            assert at[1] in PROSE or at[1] in options, hint
            assert (
                at[1] in PROSE
                or unknown_options.NAMED_OPTION.findall(at[2]) <= list(options[at[1]])
                or " --" not in at[2]
            ), hint
        text, _, python = hint.partition("in Python: ")
        assert (
            python
            or "of Python" in text
            or not re.search(r"(?<![:\w,])[a-z_]+=|engine\.|load\(|completion\.", text)
        ), hint


def test_an_option_of_another_command_is_said_to_be_there(draftree: Run) -> None:
    for args, told in (
        (("bench", "demo", "--ignore-eos"), "draftree generate and chat have it"),
        (("bench", "demo", "--ignore-chat-template"), "in draftree generate, --raw"),
        (
            ("generate", "demo", "hi", "--tasks", "gsm8k"),
            "draftree bench, replay and tune have it, as --suite",
        ),
        (("list", "--model", "demo"), "others have it, as --target"),
    ):
        status, out, err = draftree(*args)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert told in err


def test_the_list_says_what_a_model_can_be(draftree: Run) -> None:
    out = draftree("list")[1]
    assert out.startswith("models")
    assert all(word in out for word in ("demo", "smollm2", "OWNER/NAME", "FOLDER", "FILE.gguf"))


def test_the_keys_that_are_read_from_source_are_those_of_the_parts() -> None:
    from draftree import registry

    for kind in option_checks.FOLDERS:
        for name in option_checks._files(kind):
            keys, whole = option_checks._knobs(kind, name)
            assert whole
            assert set(keys) - {PRESET} == set(registry.knobs(kind, name))
