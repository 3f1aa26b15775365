"""Tool calls: the grammar that forces them, and their parsing.

A forced call (`tool_choice` `required`, or a named function) is written under a JSON schema, so its
arguments always parse, and the tokens that the schema leaves no choice about are drafted for free.
With `auto` the model may answer in words; a text that is a call, in the marks that models use, is
read as one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.serving.request_models import FunctionTool

MARKED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
"""A call as Qwen, Hermes and SmolLM3 mark it."""
FENCED = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)
BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
"""A forced call up to its arguments."""
OPENINGS = ("<tool_call>", "<|python_tag|>", "```json", "```\n{", "{", "[")
"""What a text begins with that may be a call; one that begins otherwise is streamed as it comes."""


@dataclass(frozen=True)
class Call:
    """Store a function that the model calls, with its arguments as JSON text."""

    name: str
    arguments: str


def call_schema(tools: Sequence[FunctionTool]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of some functions."""
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": tool.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return options[0] if len(options) == 1 else {"anyOf": options}


@dataclass(frozen=True)
class CallPiece:
    """Store a piece of a call that is being generated.

    Attributes:
        index: number of the call in the text.
        name: the function, in the first piece of a call; None in the others.
        arguments: JSON text that is added to the arguments.
    """

    index: int
    name: str | None
    arguments: str


@final
class ForcedCall:
    """Read a call as a grammar writes it by `call_schema`: `{"name": …, "arguments": {…}}`.

    Attributes:
        name: name of the function; None while it is not known.
        arguments: their JSON text so far.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._head = ""
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._ended = False

    def add(self, text: str) -> tuple[CallPiece, ...]:
        """Return what further text adds to the call: one piece or none."""
        if self.name is not None:
            piece = self._arguments(text)
            return (CallPiece(0, None, piece),) if piece else ()
        self._head += text
        if (begun := BEGUN.match(self._head)) is None:
            return ()
        self.name = str(json.loads(begun[1]))
        return (CallPiece(0, self.name, self._arguments(self._head[begun.end() :])),)

    def _arguments(self, text: str) -> str:
        """Return the part of a text that belongs to the arguments.

        They end with the brace that closes them.
        """
        found = ""
        for character in text:
            if self._ended:
                break
            found += character
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self._ended = self._depth == 0
        self.arguments += found
        return found


def may_be_call(text: str) -> bool:
    """Return whether a text, or what it may become, could be a call."""
    begun = text.lstrip()
    return any(begun.startswith(opening) or opening.startswith(begun) for opening in OPENINGS)


def read_calls(text: str, tools: Sequence[FunctionTool]) -> list[Call]:
    """Return the calls that a text consists of; none where it is an answer in words."""
    known = {tool.name for tool in tools}
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if fenced := FENCED.match(body):
        body = fenced[1]
    pieces = MARKED.findall(body) or [body]
    calls = []
    for piece in pieces:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            return []
        for one in value if isinstance(value, list) else [value]:
            call = read_call(one, known)
            if call is None:
                return []
            calls.append(call)
    return calls


def read_call(value: Any, known: set[str]) -> Call | None:
    """Return the call in a JSON value; None where it does not call a known function."""
    if not isinstance(value, dict) or value.get("name") not in known:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return (
        Call(value["name"], json.dumps(arguments, ensure_ascii=False))
        if isinstance(arguments, dict)
        else None
    )
