"""Reasoning and tool calls in texts, whole and in pieces; and a server that is asked to end."""

import json
import re
import signal
import subprocess
import sys
import threading
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.serving.answer_text import AnswerText
from draftree.serving.reasoning import ReasoningSplitter, splitter
from draftree.serving.request_models import FunctionTool
from draftree.serving.request_options import depth
from draftree.serving.tool_calls import ForcedCall, ToolCall, call_schema, may_be_call, read_calls
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


def test_a_signal_lets_running_requests_end() -> None:
    words = ["serve", "demo", "--port", "0", "--drafter", "suffix", "--policy", "chain"]
    program = [sys.executable, "-m", "draftree", *words]
    with subprocess.Popen(
        program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stderr is not None
        lines: list[str] = []
        while not (found := re.search(r"http://\S+:\d+", lines[-1] if lines else "")):
            lines.append(server.stderr.readline())
            assert server.poll() is None, lines
        body = {
            "prompt": "def main(",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            httpx.Client(base_url=found[0], timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as got,
        ):
            answer = got.iter_lines()
            begun = next(answer)
            server.send_signal(signal.SIGTERM)
            threading.Thread(target=server.stderr.read, daemon=True).start()
            rest = [line for line in answer if line]
        assert begun.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert server.wait(30) == 128 + signal.SIGTERM
