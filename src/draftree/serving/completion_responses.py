"""Responses of `/v1/chat/completions` and `/v1/completions`, streamed or not."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from typing_extensions import override

from draftree.serving.answer_text import AnswerText, Delta, legacy_logprobs, logprob_entries
from draftree.serving.metrics import RequestFigures, merge_figures
from draftree.serving.request_models import Metrics, Sampled
from draftree.serving.state import Prepared, ServerState
from draftree.serving.tool_calls import CallPiece, ToolCall
from draftree.serving.worker import Job, TextUpdate

DONE_EVENT = "[DONE]"
"""Data of the last event of a streamed answer."""


def new_id(kind: str) -> str:
    """Return a new random id that begins with `kind`, such as `chatcmpl-…`."""
    return f"{kind}-{secrets.token_hex(12)}"


def new_call_id() -> str:
    """Return a new random id of a tool call: nine letters and digits, as Mistral's templates ask."""
    return secrets.token_hex(5)[:9]


class Answer:
    """Build the answer to a chat request while its texts are generated.

    Args:
        state: shared state of the server.
        body: body of the request.
        prepared: the prepared request with its texts.
        job: job that generates the texts.
    """

    kind = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"
    names_events = False

    def __init__(self, state: ServerState, body: Sampled, prepared: Prepared, job: Job) -> None:
        self.state = state
        self.body = body
        self.prepared = prepared
        self.job = job
        self.id = new_id(self.kind)
        self.created = int(time.time())
        self.start = time.monotonic()
        self.first: float | None = None

    @property
    def texts(self) -> list[AnswerText]:
        """Return the texts of the answer, as far as they have been generated."""
        return self.prepared.texts

    def take(self, update: TextUpdate) -> Delta:
        """Add an update to its text, and return the difference to send to the client."""
        if self.first is None:
            self.first = time.monotonic() - self.start
        text = self.texts[update.index]
        text.figures = self.job.figures[update.index]
        return text.add(update.tokens)

    async def finish(self) -> dict[str, Any]:
        """Wait for all texts, and return the complete answer."""
        async with aclosing(self.job.updates()) as updates:
            async for update in updates:
                self.take(update)
        return self.head(self.whole) | {
            "choices": [self.choice(index, text) for index, text in enumerate(self.texts)],
            "usage": self.usage(),
            **self.metrics(),
        }

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield the data of a streamed answer's events, each as JSON on one line."""
        options = self.body.stream_options
        for event in self.opening():
            yield to_json_line(event)
        async with aclosing(self.job.updates()) as updates:
            async for update in updates:
                text = self.texts[update.index]
                delta = self.take(update)
                more: dict[str, Any] = (
                    {} if update.tree is None else {"tree": tree_for_page(update)}
                )
                if options is not None and options.continuous_usage_stats:
                    more["usage"] = self.usage()
                if delta or "tree" in more or text.finish_reason:
                    yield to_json_line(self.chunk(update.index, delta, text, more))
        if options is not None and options.include_usage:
            yield to_json_line(
                self.head(self.piece) | {"choices": [], "usage": self.usage()} | self.metrics()
            )
        elif self.metrics_level not in (None, "none"):
            yield to_json_line(self.head(self.piece) | {"choices": []} | self.metrics())
        yield DONE_EVENT

    @property
    def metrics_level(self) -> Metrics | None:
        """Return the requested amount of drafting metrics; None for the default."""
        return self.body.metrics

    def head(self, kind: str) -> dict[str, Any]:
        """Return the first fields of an answer or a piece of one: id, kind, time and model."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.state.options.model_name,
        }

    def usage(self) -> dict[str, Any]:
        """Return the field `usage`: the numbers of prompt, cached and generated tokens."""
        written = sum(figures.new_tokens for figures in self.job.figures)
        prompt = self.prepared.prompt_tokens
        each = len(self.job.figures) // self.prepared.prompts  # the texts of a prompt
        cached = sum(figures.cached_tokens for figures in self.job.figures[::each])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """Return the field `metrics` with the requested figures; by default a summary."""
        if self.metrics_level == "none":
            return {}
        figures = merge_figures(self.job.figures)
        return {
            "metrics": request_metrics(
                figures, time.monotonic() - self.start, self.first or 0.0, self.metrics_level
            )
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the first pieces of a streamed answer, which contain the role of each message."""
        delta = {"role": "assistant", "content": ""}
        return [
            self.head(self.piece)
            | {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}
            for index in range(len(self.texts))
        ]

    def choice(self, index: int, text: AnswerText) -> dict[str, Any]:
        """Return the entry of `choices` for one text of a complete answer."""
        message: dict[str, Any] = {"role": "assistant", "content": text.content, "refusal": None}
        if text.calls:
            message["content"] = text.content or None
            message["tool_calls"] = [tool_call(call) for call in text.calls]
        if text.reasoning:
            message["reasoning_content"] = text.reasoning
        entries = logprob_entries(self.state.spellings, text.logprobs) if text.logprobs else None
        logprobs = None if entries is None else {"content": entries, "refusal": None}
        return {
            "index": index,
            "message": message,
            "finish_reason": text.finish_reason,
            "logprobs": logprobs,
        }

    def chunk(
        self, index: int, delta: Delta, text: AnswerText, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the data of one event of a streamed answer, which adds `delta` to one text.

        Args:
            index: the index of the text in the answer.
            delta: the addition to the text.
            text: the text so far.
            more: other fields of the event, by name.
        """
        told: dict[str, Any] = {}
        if delta.content:
            told["content"] = delta.content
        if delta.reasoning:
            told["reasoning_content"] = delta.reasoning
        if delta.calls:
            told["tool_calls"] = [call_piece(piece) for piece in delta.calls]
        choice: dict[str, Any] = {
            "index": index,
            "delta": told,
            "finish_reason": text.finish_reason,
        }
        if delta.logprobs:
            choice["logprobs"] = {
                "content": logprob_entries(self.state.spellings, delta.logprobs),
                "refusal": None,
            }
        return self.head(self.piece) | {"choices": [choice], **more}


class CompletionAnswer(Answer):
    """Build the answer to a request of `/v1/completions` while its texts are generated."""

    kind = "cmpl"
    whole = piece = "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        """Return the first pieces of a streamed answer: the prompts, if `echo` was requested."""
        return [
            self.head(self.piece)
            | {
                "choices": [
                    {"index": index, "text": prompt, "finish_reason": None, "logprobs": None}
                ]
            }
            for index, prompt in enumerate(self._prompts)
            if prompt
        ]

    @property
    def _prompts(self) -> list[str]:
        """Return the prompt to put before each text; empty without `echo`."""
        prompts = self.prepared.echoed or [""]
        each = len(self.texts) // len(prompts)
        return [prompt for prompt in prompts for _ in range(each)]

    @override
    def choice(self, index: int, text: AnswerText) -> dict[str, Any]:
        prompt = self._prompts[index]
        logprobs = legacy_logprobs(self.state.spellings, text.logprobs) if text.logprobs else None
        return {
            "index": index,
            "text": prompt + text.content,
            "finish_reason": text.finish_reason,
            "logprobs": logprobs,
        }

    @override
    def chunk(
        self, index: int, delta: Delta, text: AnswerText, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        offset = len(text.content) - len(delta.content)
        logprobs = (
            legacy_logprobs(self.state.spellings, delta.logprobs, offset)
            if delta.logprobs
            else None
        )
        choice = {
            "index": index,
            "text": delta.content,
            "finish_reason": text.finish_reason,
            "logprobs": logprobs,
        }
        return self.head(self.piece) | {"choices": [choice], **more}


def tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in the form of OpenAI's API, with a new id."""
    return {
        "id": new_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_piece(piece: CallPiece) -> dict[str, Any]:
    """Return a piece of a streamed tool call.

    Only the first piece of a call has an id and the name of the function.
    """
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index} | tool_call(ToolCall(piece.name, piece.arguments))


def request_metrics(
    figures: RequestFigures, seconds: float, first: float, level: Metrics | None
) -> dict[str, Any]:
    """Return the field `metrics` of an answer: its times, and the figures of its drafts.

    Args:
        figures: the counts of the request.
        seconds: seconds since the request arrived.
        first: seconds from the arrival to the first token.
        level: the detail that the client asked for.
    """
    return {
        "speculative_decoding": figures.as_json(level in ("detailed", "trees")),
        "time_to_first_token_seconds": round(first, 6),
        "seconds": round(seconds, 6),
        "tokens_per_second": round(figures.new_tokens / seconds, 3) if seconds else 0.0,
    }


def tree_for_page(update: TextUpdate) -> dict[str, Any]:
    """Return a step's draft tree and its new tokens in the form that the playground page draws."""
    tokens: Sequence[dict[str, Any]] = [
        {"text": token.text, "origin": token.origin} for token in update.tokens
    ]
    return {**(update.tree or {}), "tokens": tokens}


def to_json_line(event: Mapping[str, Any]) -> str:
    """Return an event as JSON on one line."""
    return json.dumps(event, allow_nan=False, separators=(",", ":"))
