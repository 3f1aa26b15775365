"""Convert a request's fields to completion options, and check them against the server's limits."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftree.sampling.grammar import Grammar
from draftree.serving.errors import ApiError
from draftree.serving.options import Limits
from draftree.serving.request_models import (
    ChatBody,
    CompletionBody,
    FunctionTool,
    NamedTool,
    ResponseFormat,
    Sampled,
)
from draftree.serving.tool_calls import call_schema
from draftree.text.options import Options

COMPLETION_TOKENS = 16
"""Default of `max_tokens` for `/v1/completions`, as in OpenAI's API."""


def sampling_options(body: Sampled, limits: Limits, max_tokens: int, has_room: int) -> Options:
    """Return the generation options that the fields of a request describe.

    Args:
        body: body of the request.
        limits: the server's limits for a request.
        max_tokens: requested number of new tokens.
        has_room: number of tokens left in the target's context after the prompt.

    Raises:
        ApiError: a value exceeds its limit.
        UserError: two values contradict each other.
    """
    check_limit("n", body.n or 1, limits.choices)
    check_limit("max_tokens", max_tokens, limits.new_tokens)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    check_limit("stop", len(stops), limits.stops, "texts")
    check_limit("logit_bias", len(body.logit_bias or {}), limits.biases, "entries")
    given: dict[str, Any] = {
        "max_new_tokens": min(max_tokens, max(has_room, 1)),
        "n": body.n or 1,
        "temperature": 1.0 if body.temperature is None else float(body.temperature),
        "top_k": max(body.top_k or 0, 0),
        "seed": secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        "stop": [text for text in stops if text],
        "logit_bias": biases(body.logit_bias),
        "min_new_tokens": body.min_tokens,
        "max_time": limits.request_seconds,
    }
    for name in (
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "ignore_eos",
    ):
        given[name] = getattr(body, name)
    return Options.of(None, {name: value for name, value in given.items() if value is not None})


def chat_options(body: ChatBody, limits: Limits, has_room: int) -> Options:
    """Return the generation options of a chat request.

    They include sampling, log-probabilities, and the grammar that the answer must follow.

    Raises:
        ApiError: a value exceeds its limit, or two fields contradict each other.
        UserError: a JSON schema is not supported.
    """
    asked = body.max_completion_tokens or body.max_tokens
    options = sampling_options(
        body, limits, asked or min(limits.new_tokens, max(has_room, 1)), has_room
    )
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs is given, allowed only with logprobs: true", "top_logprobs"
        )
    if body.logprobs:
        options = replace(options, logprobs=body.top_logprobs or 0)
    if (grammar := answer_grammar(body, limits)) is not None:
        options = replace(options, grammar=grammar)
    return options


def completion_options(body: CompletionBody, limits: Limits, has_room: int) -> Options:
    """Return the generation options of a completion request.

    Raises:
        ApiError: a value exceeds its limit, or a field is not supported.
    """
    for name, harmless in (("suffix", (None, "")), ("best_of", (None, body.n or 1))):
        if getattr(body, name) not in harmless:
            raise ApiError(400, f"{name} is not supported, allowed is to leave it out", name)
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400, "logprobs and echo are given, allowed is one: prompts get no logprobs", "logprobs"
        )
    options = sampling_options(body, limits, body.max_tokens or COMPLETION_TOKENS, has_room)
    return options if body.logprobs is None else replace(options, logprobs=body.logprobs)


def biases(given: Mapping[str, float] | None) -> dict[int | str, float] | None:
    """Return the entries of `logit_bias` by token id.

    Raises:
        ApiError: a key is not a token id.
    """
    if given is None:
        return None
    if wrong := [key for key in given if not key.isdecimal() or len(key) > 9]:
        raise ApiError(
            400, f"logit_bias has the key {wrong[0][:40]!r}, allowed are token ids", "logit_bias"
        )
    return {int(key): float(value) for key, value in given.items()}


def answer_grammar(body: ChatBody, limits: Limits) -> Grammar | None:
    """Return the grammar that a chat's answer must follow; None if there is no constraint.

    The grammar describes a forced tool call, or the format in `response_format`.

    Raises:
        ApiError: `tool_choice` names an unknown tool, or a JSON schema is too large.
        UserError: a JSON schema is not supported.
    """
    forced = forced_tools(body, limits)
    if forced:
        return Grammar.json_schema(call_schema(forced))
    form = body.response_format
    return None if form is None else format_grammar(form, limits)


def forced_tools(body: ChatBody, limits: Limits) -> list[FunctionTool]:
    """Return the functions of which the model must call one; empty if it may answer in words.

    Raises:
        ApiError: there are too many tools, a tool's schema is too large, or `tool_choice` names an
            unknown tool.
    """
    tools = [tool.function for tool in body.tools or []]
    check_limit("tools", len(tools), limits.tools)
    for place, tool in enumerate(tools):
        check_schema(tool.parameters, limits, f"tools.{place}.function.parameters")
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return []
    if not tools:
        raise ApiError(400, "tool_choice is given, but there are no tools", "tool_choice")
    if not isinstance(choice, NamedTool):
        return tools
    chosen = [tool for tool in tools if tool.name == choice.function.name]
    if not chosen:
        names = ", ".join(tool.name for tool in tools)
        raise ApiError(
            400, f"tool_choice names {choice.function.name!r}, the tools are {names}", "tool_choice"
        )
    return chosen


def format_grammar(form: ResponseFormat, limits: Limits) -> Grammar | None:
    """Return the grammar for a response format; None for text.

    Raises:
        ApiError: the JSON schema is missing or too large.
        UserError: the JSON schema is not supported.
    """
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar.json_schema({"type": "object"})
    where = "response_format.json_schema.schema"
    schema = None if form.json_schema is None else form.json_schema.json_schema
    if schema is None:
        raise ApiError(400, f"{where} is missing; the type json_schema needs it", where)
    check_schema(schema, limits, where)
    return Grammar.json_schema(json.dumps(schema))


def check_limit(name: str, value: int, most: int, what: str = "") -> None:
    """Raise an `ApiError` if a value exceeds its limit; `what` is the unit for the message."""
    if value > most:
        raise ApiError(
            400,
            f"{name} is {value}{f' {what}' if what else ''}, allowed are at most {most}",
            name,
            "above_limit",
        )


def check_schema(schema: Any, limits: Limits, where: str) -> None:
    """Raise an `ApiError` if a JSON schema is too large or nested too deeply."""
    if depth(schema, limits.schema_depth) > limits.schema_depth:
        raise ApiError(
            400, f"{where} is nested deeper than {limits.schema_depth} levels", where, "above_limit"
        )
    size = len(json.dumps(schema))
    if size > limits.schema_bytes:
        raise ApiError(
            400,
            f"{where} has {size} bytes, allowed are {limits.schema_bytes}",
            where,
            "above_limit",
        )


def depth(value: Any, most: int) -> int:
    """Return the nesting depth of a JSON value; the search ends at depth `most` + 1."""
    level, found = [value], 0
    while level and found <= most:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += one.values()
            elif isinstance(one, Sequence) and not isinstance(one, str):
                inner += one
        level, found = inner, found + bool(inner)
    return found
