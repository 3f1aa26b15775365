"""Reasoning and tool calls in texts, whole and in pieces; and a server that is asked to end."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.serving.answer_text import AnswerText
from draftree.serving.completion_responses import tool_call
from draftree.serving.metrics import RequestFigures
from draftree.serving.prompts import chat_ids, messages_of_input
from draftree.serving.reasoning import ReasoningSplitter, splitter
from draftree.serving.request_models import (
    FunctionTool,
    InputItem,
    Message,
    ResponsesBody,
    Tool,
)
from draftree.serving.request_options import depth
from draftree.serving.responses_api import ResponsesAnswer, chat_body
from draftree.serving.state import Prepared
from draftree.serving.tool_calls import ForcedCall, ToolCall, call_schema, may_be_call, read_calls
from draftree.serving.worker import TextUpdate
from draftree.target.target import tokenizer_of
from draftree.text.completion import Token

TOOLS = [FunctionTool(name="look"), FunctionTool(name="go", parameters={"type": "object"})]


def split(text: str, cuts: list[int], inside: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a text that comes in pieces."""
    parts = ReasoningSplitter(inside)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    found = [parts.add(text[a:b]) for a, b in pairwise(ends)]
    found.append(parts.rest())
    return "".join(one.reasoning for one in found), "".join(one.answer for one in found)


@given(cuts=st.lists(st.integers(0, 60)))
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>so</think>\n\n42", "so", "42"),
        (" \n<think>a < b </th</think>42", "a < b </th", "42"),
        ("42 <think>late</think>", "", "42 <think>late</think>"),
        ("<think>never closed", "never closed", ""),
        ("<thin", "", "<thin"),
        ("", "", ""),
    ],
)
def test_reasoning_is_divided_wherever_a_text_is_cut(
    text: str, reasoning: str, answer: str, cuts: list[int]
) -> None:
    assert split(text, cuts) == (reasoning, answer)


@given(cuts=st.lists(st.integers(0, 40)))
def test_a_prompt_may_have_opened_the_reasoning(cuts: list[int]) -> None:
    assert split("so</think>42", cuts, inside=True) == ("so", "42")


def test_templates_without_marks_have_no_reasoning() -> None:
    assert splitter("{{ messages }}", "x").add("<think>a").answer == "<think>a"
    assert splitter("… '</think>' …", "assistant\n<think>\n").add("a").reasoning == "a"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "look", "arguments": {"at": 1}}', ["look"]),
        (
            '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "look"}</tool_call>',
            ["go", "look"],
        ),
        ('<|python_tag|>{"name": "go", "parameters": {"x": 2}}', ["go"]),
        ('```json\n[{"name": "go", "arguments": "{}"}]\n```', ["go"]),
        ('{"name": "fly", "arguments": {}}', []),
        ("I would look.", []),
        ('{"name": "look", "argu', []),
        ("[" * 100_000, []),
        ('{"name": {"first": "Ada"}}', []),
        ('[{"name": ["look"], "arguments": {}}]', []),
    ],
)
def test_calls_are_read(text: str, names: list[str]) -> None:
    calls = read_calls(text, TOOLS)
    assert [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert not names or all(may_be_call(text[:n]) for n in range(len(text)))


def test_the_schema_of_a_call_names_every_tool() -> None:
    assert [one["properties"]["name"]["const"] for one in call_schema(TOOLS)["anyOf"]] == [
        "look",
        "go",
    ]
    assert call_schema(TOOLS[:1])["properties"]["name"]["const"] == "look"


def pieces(text: AnswerText, written: str) -> list[str]:
    """What is streamed of a text, a character a token."""
    last = len(written) - 1
    return [
        text.add([Token(0, c, "bonus", ending="eos" if i == last else None)]).content
        for i, c in enumerate(written)
    ]


def test_words_are_streamed_although_there_are_tools() -> None:
    text = AnswerText(splitter(None, ""), TOOLS)
    assert pieces(text, "Let me see.")[:4] == ["L", "e", "t", " "]
    assert (text.finish_reason, text.calls) == ("stop", ())


def test_a_call_is_not_streamed_as_words() -> None:
    text = AnswerText(splitter(None, ""), TOOLS)
    assert "".join(pieces(text, '{"name": "go", "arguments": {}}')) == ""
    assert (text.finish_reason, [call.name for call in text.calls]) == ("tool_calls", ["go"])


@pytest.mark.parametrize("arguments", ['{"a": "}\\"{", "b": [{}]}', "{}", '{"city":"Oslo"}'])
@pytest.mark.parametrize("cut", [0, 2])
def test_a_forced_call_is_streamed_in_pieces(arguments: str, cut: int) -> None:
    text, written = (
        AnswerText(splitter(None, ""), TOOLS, ForcedCall()),
        f'{{"name": "go", "arguments": {arguments}}}',
    )
    shown = written[: len(written) - cut]
    gained = [
        text.add(
            [
                Token(
                    0, c, "bonus", ending=None if i < len(shown) - 1 else "length" if cut else "eos"
                )
            ]
        )
        for i, c in enumerate(shown)
    ]
    found = [piece for delta in gained for piece in delta.calls]
    assert [piece.name for piece in found] == ["go", *(None for _ in found[1:])]
    told = "".join(piece.arguments for piece in found)
    assert told == arguments[: len(arguments) - max(cut - 1, 0)]
    assert text.calls == (ToolCall("go", told),)
    assert (text.finish_reason, text.content) == ("length" if cut else "tool_calls", "")


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "content"),
    [
        (f"Let me see <here>.\n{CALL}", "Let me see <here>.\n"),
        (f"{CALL}\nOne moment.", "One moment."),
        (f"Now{CALL} then.", "Nowthen."),
        (CALL, ""),
    ],
)
def test_a_marked_call_may_stand_beside_words(written: str, content: str) -> None:
    text = AnswerText(splitter(None, ""), TOOLS)
    told = pieces(text, written)
    assert "".join(told) == text.content == content
    assert [call.name for call in text.calls] == ["look"]
    assert text.finish_reason == "tool_calls"
    assert written[:3] != "Let" or told[:3] == ["L", "e", "t"]


@pytest.mark.parametrize("written", ["See <tool_call", "See <tool_call>{", "a < b <t"])
def test_words_with_a_mark_but_no_call_are_all_sent(written: str) -> None:
    text = AnswerText(splitter(None, ""), TOOLS)
    assert "".join(pieces(text, written)) == written
    assert text.finish_reason == "stop"


def test_words_beside_a_call_are_an_item_of_their_own() -> None:
    async def updates() -> AsyncIterator[TextUpdate]:
        for word, ending in (("Let me see.", None), (CALL, "eos")):
            yield TextUpdate(0, [Token(0, word, "bonus", ending=ending)])

    async def read() -> list[dict[str, Any]]:
        body = ResponsesBody(input="Look")
        state: Any = SimpleNamespace(options=SimpleNamespace(model_name="m"))
        job: Any = SimpleNamespace(updates=updates, figures=[RequestFigures(1)])
        work: Any = None
        prepared = Prepared(work, [AnswerText(splitter(None, ""), TOOLS)], 1)
        answer = ResponsesAnswer(state, body, chat_body(body), prepared, job)
        return [json.loads(data) async for data in answer.stream()]

    events = asyncio.run(read())
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", output[1]["call_id"])
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [(event["output_index"], event["item"]) for event in done] == [*enumerate(output)]


def test_calls_of_one_answer_are_one_message() -> None:
    calls = [
        InputItem(type="function_call", call_id=name, name=name, arguments="{}")
        for name in ("look", "go")
    ]
    results = [InputItem(type="function_call_output", call_id="look", output="a wall")]
    words = InputItem(role="assistant", content="Let me see.")
    for before in ([], [words]):
        chat = messages_of_input(
            [InputItem(role="user", content="?"), *before, *calls, *results], None
        )
        assert [message["role"] for message in chat] == ["user", "assistant", "tool"]
        assert [call["id"] for call in chat[1]["tool_calls"]] == ["look", "go"]
        assert chat[1]["content"] == ("Let me see." if before else None)


def test_ids_of_calls_are_those_that_mistral_takes() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", tool_call(ToolCall("go", "{}"))["id"])


MESSAGES = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
"""The beginning of a chat template; `{% endfor %}` ends it."""
CALLED = [
    Message(role="user", content="?"),
    Message.model_validate(
        {
            "role": "assistant",
            "tool_calls": [
                {"id": name, "function": {"name": name, "arguments": '{"at": 1}'}}
                for name in ("look", "go")
            ],
        }
    ),
    Message(role="tool", tool_call_id="look", content="a wall"),
    Message(role="tool", tool_call_id="go", content="done"),
]


def read_chat(template: str, tools: list[FunctionTool]) -> str:
    """The text of `CALLED` by a chat template."""
    tokenizer = tokenizer_of("demo")
    tokenizer.chat_template = template
    described = [Tool(type="function", function=tool) for tool in tools]
    return str(tokenizer.decode(chat_ids(tokenizer, CALLED, described)))


@pytest.mark.parametrize("tools", ["", "{{ m['tools'] }}"])
def test_a_template_without_tools_reads_tools_calls_and_results(tools: str) -> None:
    """Phi-4-mini's template reads only the tools of a message."""
    text = read_chat(f"{MESSAGES}{tools}{{% endfor %}}", TOOLS)
    system, _, rest = text.partition("[user]")
    assert '{"name": "look"}' in system
    call = '{{"name": "{}", "arguments": {{"at": 1}}}}'.format
    assert rest == f"?[assistant][{call('look')}, {call('go')}][user]a wall\ndone"
    assert [one.name for one in read_calls(rest[12 : rest.index("[user]")], TOOLS)] == [
        "look",
        "go",
    ]


def test_a_template_with_tools_is_given_them() -> None:
    template = f"{{{{ tools | length }}}}{MESSAGES}{{{{ m['tool_calls'] | length }}}}{{% endfor %}}"
    assert read_chat(template, TOOLS) == "2[user]?0[assistant]2[tool]a wall0[tool]done0"


def test_references_lead_to_the_same_parts_of_a_schema() -> None:
    schema = {
        "$defs": {"City": {"type": "string", "default": {"$ref": "#/data"}}},
        "properties": {"at": {"$ref": "#/$defs/City"}, "default": {"items": {"$ref": "#"}}},
        "anyOf": [{"$ref": "https://example.org/other#/x"}, {"$ref": "#/$defs/City"}],
    }
    tools = [FunctionTool(name=name, parameters=schema) for name in ("look", "go")]
    for several in (tools[:1], tools):
        whole = call_schema(several)
        for i, option in enumerate(whole.get("anyOf", [whole])):
            moved = option["properties"]["arguments"]
            root = (
                f"#/anyOf/{i}/properties/arguments"
                if len(several) > 1
                else "#/properties/arguments"
            )
            assert moved["properties"]["at"] == {"$ref": f"{root}/$defs/City"}
            assert moved["properties"]["default"]["items"] == {"$ref": root}
            assert moved["$defs"] == schema["$defs"]
            assert moved["anyOf"][0] == {"$ref": "https://example.org/other#/x"}
            assert moved["anyOf"][1] == {"$ref": f"{root}/$defs/City"}


def test_text_that_only_looks_like_a_call_is_an_answer() -> None:
    text = AnswerText(splitter(None, ""), TOOLS)
    assert "".join(pieces(text, '{"sum": 3}')) == '{"sum": 3}'
    assert (text.finish_reason, text.calls) == ("stop", ())


def test_depth_is_measured_no_further_than_needed() -> None:
    assert [depth(value, 9) for value in (1, {}, {"a": 1}, {"a": [1]}, [[[]]])] == [0, 0, 1, 2, 2]
    deep: object = 1
    for _ in range(50_000):
        deep = [deep]
    assert depth(deep, 9) == 10


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command `serve`, and return its process and its address."""
    words = ["serve", "demo", "--port", "0", "--drafter", "suffix", "--policy", "chain", *options]
    program = [sys.executable, "-m", "draftree", *words]
    with subprocess.Popen(
        program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stderr is not None
        lines: list[str] = []
        while not (found := re.search(r"http://\S+:\d+", lines[-1] if lines else "")):
            lines.append(server.stderr.readline())
            assert server.poll() is None, lines
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield server, found[0]


def test_a_request_that_does_not_end_in_time_is_answered() -> None:
    body = {"prompt": "def main(", "max_tokens": 900, "n": 8, "ignore_eos": True}
    with started("--drain-seconds", "0") as (server, url), httpx.Client(base_url=url) as client:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.post, "/v1/completions", json=body, timeout=60)
            while not re.search(r"^num_requests_running [1-9]", client.get("/metrics").text, re.M):
                assert not asked.done()
            server.send_signal(signal.SIGTERM)
        assert asked.result().status_code == 503
        assert asked.result().json()["error"]["message"] == "the server has ended"
        assert server.wait(30) == 128 + signal.SIGTERM


def test_a_signal_lets_running_requests_end() -> None:
    with started() as (server, url):
        body = {
            "prompt": "def main(",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as got,
        ):
            answer = got.iter_lines()
            begun = next(answer)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in answer if line]
        assert begun.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert server.wait(30) == 128 + signal.SIGTERM
