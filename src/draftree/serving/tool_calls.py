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

from draftree.serving.reasoning import overlap
from draftree.serving.request_models import FunctionTool

MARK = "<tool_call>"
MARKED_CALL = re.compile(rf"{MARK}\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
"""Pattern for a tool call in the marks of Qwen, Hermes and SmolLM3, and the mark that opens it."""
FENCED_JSON = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)
CALL_BEGINNING = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'
)
"""Pattern for the beginning of a forced tool call, up to its arguments."""
LITERALS = {"const", "enum", "default", "examples"}
"""Keywords of JSON schema whose values are data, not schemas."""
MAPS_OF_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keywords of JSON schema whose values are schemas by any name."""
CALL_OPENINGS = (MARK, "<|python_tag|>", "```json", "```\n{", "{", "[")
"""Beginnings of texts that may be tool calls. A text with another beginning is streamed at once."""


@dataclass(frozen=True)
class ToolCall:
    """Store a tool call: the name of the function, and its arguments as JSON text."""

    name: str
    arguments: str


def call_schema(tools: Sequence[FunctionTool]) -> dict[str, Any]:
    """Return the JSON schema for a call of one of the given functions."""
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": move_references(
                    tool.parameters or {"type": "object"},
                    f"#{f'/anyOf/{i}' if len(tools) > 1 else ''}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return options[0] if len(options) == 1 else {"anyOf": options}


def move_references(schema: Any, root: str) -> Any:
    """Return a schema for another place in a document, with its references to its own parts.

    Args:
        schema: JSON schema, or a part of one.
        root: reference to the schema in the document, such as `#/properties/arguments`.
    """
    if isinstance(schema, list):
        return [move_references(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema

    def moved(key: str, part: Any) -> Any:
        if key == "$ref" and isinstance(part, str) and (part == "#" or part.startswith("#/")):
            return root + part[1:]
        if key in MAPS_OF_SCHEMAS and isinstance(part, dict):
            return {name: move_references(one, root) for name, one in part.items()}
        return part if key in LITERALS else move_references(part, root)

    return {key: moved(key, part) for key, part in schema.items()}


@dataclass(frozen=True)
class CallPiece:
    """Store a piece of a tool call that is being generated.

    Attributes:
        index: number of the tool call in the text.
        name: name of the function in the first piece of a call; None in later pieces.
        arguments: JSON text that is added to the arguments.
    """

    index: int
    name: str | None
    arguments: str


@final
class ForcedCall:
    """Read a forced tool call while it is generated: `{"name": …, "arguments": {…}}`.

    The text follows the schema of `call_schema`.

    Attributes:
        name: name of the function; None until it has been read.
        arguments: JSON text of the arguments so far.
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
        """Add text, and return the resulting addition to the call: one piece or none."""
        if self.name is not None:
            piece = self._arguments(text)
            return (CallPiece(0, None, piece),) if piece else ()
        self._head += text
        if (begun := CALL_BEGINNING.match(self._head)) is None:
            return ()
        self.name = str(json.loads(begun[1]))
        return (CallPiece(0, self.name, self._arguments(self._head[begun.end() :])),)

    def _arguments(self, text: str) -> str:
        """Return the part of a text that belongs to the arguments.

        The arguments end with their closing brace.
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
    """Return whether a text may be the beginning of a tool call."""
    begun = text.lstrip()
    return any(begun.startswith(opening) or opening.startswith(begun) for opening in CALL_OPENINGS)


def read_calls(text: str, tools: Sequence[FunctionTool]) -> list[ToolCall]:
    """Return the tool calls of which a text consists; empty if it is an answer in words."""
    known = {tool.name for tool in tools}
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if fenced := FENCED_JSON.match(body):
        body = fenced[1]
    pieces = MARKED_CALL.findall(body) or [body]
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


def find_mark(text: str) -> int:
    """Return the index at which a marked call begins or may begin; the text's length if nowhere."""
    before, mark, _ = text.partition(MARK)
    return len(before) if mark else len(text) - overlap(text, MARK)


def without_calls(text: str) -> str:
    """Return the words around the marked calls of a text; none if its calls have no marks."""
    return MARKED_CALL.sub("", text).strip() if MARK in text else ""


def read_call(value: Any, known: set[str]) -> ToolCall | None:
    """Return the tool call in a JSON value; None if it does not call a known function."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in known:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(name, arguments)
    return (
        ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        if isinstance(arguments, dict)
        else None
    )
