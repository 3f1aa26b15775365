"""Other clients of the server: one call each of curl, LangChain and `llm`, skipped where they are not installed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftree
from draftree.engine import Engine
from serving import Running, served

QUESTION = "How many legs do three cats have?"
CURL = shutil.which("curl")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return draftree.load("demo", "suffix", "chain")


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with served(engine, "suffix", "chain") as running:
        yield running


@pytest.mark.skipif(CURL is None, reason="needs curl")
def test_curl(server: Running, engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0}
    words = [
        str(CURL),
        "--silent",
        "--fail",
        "--max-time",
        "60",
        "--header",
        "content-type: application/json",
    ]
    words += ["--data", json.dumps(body), f"{server.url}/v1/chat/completions"]
    got = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert got["choices"][0]["message"]["content"] == engine.chat(QUESTION, max_new_tokens=8).text
    streamed = subprocess.run(
        [*words[:-2], json.dumps(body | {"stream": True}), words[-1]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert streamed.endswith("data: [DONE]\n\n")


def test_langchain(server: Running, engine: Engine) -> None:
    found = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    model = found.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", model="draftree", temperature=0, max_tokens=8
    )
    text = engine.chat(QUESTION, max_new_tokens=8).text
    assert model.invoke(QUESTION).content == text
    assert "".join(str(piece.content) for piece in model.stream(QUESTION)) == text


def test_llm(server: Running, engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="pip install llm")
    entry = f"- model_id: mine\n  model_name: draftree\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry, "utf-8")
    words = [
        sys.executable,
        "-m",
        "llm",
        "--model",
        "mine",
        "--option",
        "temperature",
        "0",
        "--option",
        "max_tokens",
        "8",
    ]
    environment = os.environ | {
        "LLM_USER_PATH": str(tmp_path),
        "OPENAI_API_KEY": "unused",
        "LLM_LOAD_PLUGINS": "",
    }
    done = subprocess.run(
        [*words, QUESTION],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.stdout.removesuffix("\n") == engine.chat(QUESTION, max_new_tokens=8).text, (
        done.stderr
    )
