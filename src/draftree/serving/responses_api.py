"""Responses of `/v1/responses`. The server stores no conversations."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from typing_extensions import override

from draftree.serving.answer_text import AnswerText
from draftree.serving.completion_responses import Answer, new_call_id, new_id, to_json_line
from draftree.serving.errors import ApiError
from draftree.serving.prompts import messages_of_input
from draftree.serving.request_models import ChatBody, ChosenTool, ResponsesBody, TextFormat
from draftree.serving.state import Prepared, ServerState
from draftree.serving.worker import Job


def chat_body(body: ResponsesBody) -> ChatBody:
    """Convert a request of `/v1/responses` into the body of a chat request.

    Raises:
        ApiError: an item of the input lacks a field that its type requires.
    """
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages_of_input(body.input, body.instructions),
        "max_tokens": body.max_output_tokens,
        "metrics": body.metrics,
    }
    for name in ("temperature", "top_p", "speculative"):
        chat[name] = getattr(body, name)
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})}
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, ChosenTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    else:
        chat["tool_choice"] = body.tool_choice
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = response_format(body.text.format)
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(
            400, f"input: {first['msg']} at {'.'.join(map(str, first['loc']))}", "input"
        ) from error


def response_format(form: TextFormat) -> dict[str, Any]:
    """Convert the answer's format into the field `response_format` of a chat request."""
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.json_schema}}


class ResponsesAnswer(Answer):
    """Build the answer to a request of `/v1/responses`: a message, tool calls, or both.

    Args:
        state: shared state of the server.
        asked: body of the request.
        body: the same request as the body of a chat request.
        prepared: the prepared request with its text.
        job: job that generates the text.
    """

    kind = "resp"
    names_events = True

    def __init__(
        self, state: ServerState, asked: ResponsesBody, body: ChatBody, prepared: Prepared, job: Job
    ) -> None:
        super().__init__(state, body, prepared, job)
        self.asked = asked
        self.message_id = new_id("msg")
        self._number = 0
        self._call_ids: list[tuple[str, str]] = []

    @override
    async def finish(self) -> dict[str, Any]:
        async with aclosing(self.job.updates()) as updates:
            async for update in updates:
                self.take(update)
        return self.response(self.status)

    @property
    def status(self) -> str:
        """Return the status of the finished response."""
        return "incomplete" if self.texts[0].finish_reason == "length" else "completed"

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield the data of a streamed response's events, each as JSON on one line."""
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))
        text, opened = self.texts[0], False
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        async with aclosing(self.job.updates()) as updates:
            async for update in updates:
                delta = self.take(update)
                if not delta.content:
                    continue
                if not opened:
                    opened = True
                    item = self._message("", "in_progress") | {"content": []}
                    yield self._event("response.output_item.added", item=item, output_index=0)
                    yield self._event("response.content_part.added", part=self._part(""), **place)
                yield self._event(
                    "response.output_text.delta", delta=delta.content, logprobs=[], **place
                )
        if opened:
            yield self._event("response.output_text.done", text=text.content, logprobs=[], **place)
            yield self._event("response.content_part.done", part=self._part(text.content), **place)
            yield self._event(
                "response.output_item.done",
                item=self._message(text.content, self.status),
                output_index=0,
            )
        for index, call in enumerate(self._calls(text), start=int(opened)):
            begun = {**call, "arguments": "", "status": "in_progress"}
            item = {"item_id": call["id"], "output_index": index}
            yield self._event("response.output_item.added", item=begun, output_index=index)
            yield self._event(
                "response.function_call_arguments.delta", delta=call["arguments"], **item
            )
            yield self._event(
                "response.function_call_arguments.done",
                arguments=call["arguments"],
                name=call["name"],
                **item,
            )
            yield self._event("response.output_item.done", item=call, output_index=index)
        yield self._event(f"response.{self.status}", response=self.response(self.status))

    def _event(self, kind: str, **values: Any) -> str:
        number, self._number = self._number, self._number + 1
        return to_json_line({"type": kind, "sequence_number": number, **values})

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part(text)],
        }

    def _calls(self, text: AnswerText) -> list[dict[str, Any]]:
        """Return the tool calls as items of the output; repeated calls return the same ids."""
        while len(self._call_ids) < len(text.calls):
            self._call_ids.append((new_id("fc"), new_call_id()))
        return [
            {
                "type": "function_call",
                "id": number,
                "call_id": call_id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for call, (number, call_id) in zip(text.calls, self._call_ids, strict=True)
        ]

    def response(self, status: str) -> dict[str, Any]:
        """Return the response object with the given status, as far as it has been generated."""
        text, done = self.texts[0], status in ("completed", "incomplete")
        output: list[dict[str, Any]] = []
        if done:
            output = self._calls(text)
            if text.content or not output:
                output = [self._message(text.content, status), *output]
        usage = self.usage()
        asked = self.asked.model_dump(
            include={
                "metadata",
                "instructions",
                "max_output_tokens",
                "temperature",
                "top_p",
                "user",
            }
        )
        tools = [
            {"strict": None, "parameters": None, **tool.model_dump()}
            for tool in self.asked.tools or []
        ]
        choice = self.asked.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if done else None,
            "status": status,
            "model": self.state.options.model_name,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            **asked,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "tool_choice": choice.model_dump()
            if isinstance(choice, ChosenTool)
            else choice or "auto",
            "tools": tools,
            "truncation": "disabled",
            "usage": response_usage(usage) if done else None,
            **(self.metrics() if done else {}),
        }


def response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert the field `usage` of a chat answer into that of `/v1/responses`."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
