"""Render the messages of a request by the chat template, with tools where it supports them."""

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftree.data.prompts import encode
from draftree.serving.errors import ApiError
from draftree.serving.request_models import ContentPart, InputItem, Message, Tool
from draftree.target.chat_templates import variables_of
from draftree.utils.files import as_user_error

TOOLS_MESSAGE = (
    "You can call these functions:\n{tools}\n"
    'To call one, answer with nothing but a JSON object: {{"name": "FUNCTION", "arguments": {{…}}}}'
)
"""System message that describes tools if the model's chat template does not support them."""


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Tool]
) -> list[int]:
    """Return the token ids of a chat according to the tokenizer's chat template.

    Raises:
        UserError: the chat template refuses the messages.
    """
    chat = [plain_message(message, place) for place, message in enumerate(messages)]
    described: list[Any] = [tool.model_dump(exclude_none=True) for tool in tools]
    with as_user_error("the target's chat template cannot be read"):
        template = (
            tokenizer.get_chat_template(tools=described or None) if tokenizer.chat_template else ""
        )
        if described and "tools" not in variables_of(template):
            chat = with_tools(chat, described)
            described = []
    if "tool_calls" not in template:
        chat = without_tool_calls(chat)
    if not described:
        return encode(tokenizer, chat)
    with as_user_error("the target's chat template refuses the messages"):
        encoded: Any = tokenizer.apply_chat_template(
            chat, tools=described, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])


def plain_message(message: Message, place: int) -> dict[str, Any]:
    """Return a message in the form that chat templates expect, with a text as its content.

    Raises:
        ApiError: a part of the content is not text, or the message has neither content nor a tool
            call.
    """
    where = f"messages.{place}.content"
    content = (
        message.content
        if isinstance(message.content, str)
        else join_texts(message.content or [], where)
    )
    calls = [
        {
            "id": c.id,
            "type": "function",
            "function": {"name": c.function.name, "arguments": arguments(c.function.arguments)},
        }
        for c in message.tool_calls or []
    ]
    if message.content is None and not calls:
        raise ApiError(
            400, f"{where} is missing; a message without tool calls needs a content", where
        )
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    if calls:
        plain["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def arguments(text: str) -> Any:
    """Return the arguments of a tool call as a dictionary, which chat templates expect.

    A text that is not a JSON object is returned unchanged.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def join_texts(parts: Sequence[ContentPart], where: str) -> str:
    """Return the joined texts of the parts of a message's content.

    Raises:
        ApiError: a part has no text.
    """
    texts = [part.text if part.text is not None else part.refusal for part in parts]
    if None in texts:
        raise ApiError(400, f"{where}.{texts.index(None)} has no text", where)
    return "".join(text for text in texts if text is not None)


def with_tools(chat: list[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a chat whose system message describes the tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    described = TOOLS_MESSAGE.format(tools=listed)
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{described}"}, *chat[1:]]
    return [{"role": "system", "content": described}, *chat]


def without_tool_calls(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat for a template without tool calls, which are then contents of messages.

    A call becomes JSON, as in `TOOLS_MESSAGE`. Results become messages of the user, one for all
    results in a row, because in many templates users and assistants must take turns.
    """
    found = list[dict[str, Any]]()
    for message in chat:
        role, content = message["role"], message["content"]
        if calls := [call["function"] for call in message.get("tool_calls", ())]:
            told = json.dumps(calls if len(calls) > 1 else calls[0], ensure_ascii=False)
            content = "\n".join(filter(None, (content, told)))
        if role == "tool":
            role = "user"
            if found and found[-1]["role"] == role:
                found[-1]["content"] += f"\n{content}"
                continue
        found.append({**message, "role": role, "content": content})
    return found


def messages_of_input(
    given: str | Sequence[InputItem], instructions: str | None
) -> list[dict[str, Any]]:
    """Convert the input of `/v1/responses` into chat messages, as in `ChatBody.messages`.

    Raises:
        ApiError: an item lacks a field that its type requires.
    """
    found: list[dict[str, Any]] = (
        [] if instructions is None else [{"role": "system", "content": instructions}]
    )
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for place, item in enumerate(given):
        where = f"input.{place}"
        if item.type == "function_call":
            call = require_fields(item, where, "call_id", "name", "arguments")
            function = {"name": call["name"], "arguments": call["arguments"]}
            tool_call = {"id": call["call_id"], "type": "function", "function": function}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(tool_call)
        elif item.type == "function_call_output":
            output = require_fields(item, where, "call_id", "output")
            found.append(
                {"role": "tool", "tool_call_id": output["call_id"], "content": output["output"]}
            )
        else:
            said = require_fields(item, where, "role", "content")
            content = (
                said["content"]
                if isinstance(said["content"], str)
                else join_texts(said["content"], f"{where}.content")
            )
            found.append({"role": said["role"], "content": content})
    if not found:
        raise ApiError(400, "input is empty, at least one message is needed", "input")
    return found


def require_fields(item: InputItem, where: str, *names: str) -> dict[str, Any]:
    """Return the named fields of an item, after checking that they are present.

    Raises:
        ApiError: a field is missing.
    """
    values = {name: getattr(item, name) for name in names}
    if missing := [name for name, value in values.items() if value is None]:
        raise ApiError(400, f"{where}.{missing[0]} is missing; a {item.type} needs it", where)
    return values
