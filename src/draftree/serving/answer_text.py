"""The text of one answer as it is generated, split into reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from draftree.request import Logprob
from draftree.serving.metrics import RequestFigures
from draftree.serving.reasoning import ReasoningSplitter
from draftree.serving.request_models import FunctionTool
from draftree.serving.tool_calls import (
    CallPiece,
    ForcedCall,
    ToolCall,
    find_mark,
    may_be_call,
    read_calls,
    without_calls,
)
from draftree.text.completion import Token
from draftree.viewer.token_text import Spellings

FinishReason = Literal["stop", "length", "tool_calls"]
MINUS_INFINITY = -9999.0
"""Number that represents a log-probability of −∞, which JSON cannot express. OpenAI's API uses the
same number."""


@dataclass(frozen=True)
class Delta:
    """Store an addition to a text: reasoning, content, pieces of tool calls, log-probabilities."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[Logprob, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything to send to the client."""
        return bool(self.reasoning or self.content or self.calls or self.logprobs)


@final
@dataclass
class AnswerText:
    """Build one text of an answer from the tokens of each step.

    Args:
        splitter: object that separates the model's reasoning from its answer.
        tools: functions that the model may call.
        forced: object that reads the forced tool call; None if the model may answer in words.

    Attributes:
        content: the answer in words so far.
        reasoning: the reasoning so far.
        calls: tool calls, once the text has ended. A forced call may be incomplete.
        logprobs: log-probabilities of all tokens so far, if requested.
        finish_reason: reason for the end of the text; None while it is generated.
        figures: figures of drafting for this text.
    """

    splitter: ReasoningSplitter
    tools: Sequence[FunctionTool] = ()
    forced: ForcedCall | None = None
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    figures: RequestFigures = field(default_factory=RequestFigures)
    _held: str = ""

    def add(self, tokens: Sequence[Token]) -> Delta:
        """Add the new tokens of a step, and return the resulting addition to the text."""
        pieces = [self.splitter.add(token.text) for token in tokens]
        ending = tokens[-1].ending if tokens else None
        if ending is not None:
            pieces.append(self.splitter.rest())
        reasoning = "".join(piece.reasoning for piece in pieces)
        words = self._held + "".join(piece.answer for piece in pieces)
        logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        self.logprobs += logprobs
        if self.forced is not None:
            gained, words = self.forced.add(words), ""
            if ending is not None and self.forced.name is not None:
                self.calls = (ToolCall(self.forced.name, self.forced.arguments),)
        else:
            gained, words = self._split_calls(words, ending is not None)
        if ending is not None:
            self.finish_reason = finish_reason(ending, self.calls)
        self.content += words
        self.reasoning += reasoning
        return Delta(reasoning, words, gained, logprobs)

    def _split_calls(self, words: str, ended: bool) -> tuple[tuple[CallPiece, ...], str]:
        """Return the tool calls and the words that can be sent now.

        Words that may be the beginning of a tool call are held back until the text ends. After
        other words, only a marked call is one.
        """
        if not self.tools:
            return (), words
        begun = 0 if not self.content and may_be_call(words) else find_mark(words)
        self._held = words[begun:]
        if not ended:
            return (), words[:begun]
        self.calls = tuple(read_calls(self._held, self.tools))
        if not self.calls:
            return (), words
        pieces = (CallPiece(i, call.name, call.arguments) for i, call in enumerate(self.calls))
        return tuple(pieces), words[:begun] + without_calls(self._held)


def finish_reason(ending: str, calls: Sequence[ToolCall]) -> FinishReason:
    """Return the reason for the end of a text by its name in OpenAI's API."""
    if ending in ("length", "context"):
        return "length"
    return "tool_calls" if calls else "stop"


def logprob_entries(spellings: Spellings, logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of `choices[].logprobs.content` in a chat's answer."""
    return [
        {
            **token_entry(spellings, one.token, one.logprob),
            "top_logprobs": [token_entry(spellings, *top) for top in one.top],
        }
        for one in logprobs
    ]


def token_entry(spellings: Spellings, token: int, logprob: float) -> dict[str, Any]:
    """Return a token with its bytes and its log-probability."""
    data = spellings.data(token)
    return {
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": max(logprob, MINUS_INFINITY),
    }


def legacy_logprobs(
    spellings: Spellings, logprobs: Sequence[Logprob], offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form that `/v1/completions` uses.

    Args:
        spellings: table of the bytes that each token stands for.
        logprobs: log-probabilities of consecutive tokens.
        offset: index of the first token's first character in the text.
    """
    texts = [spellings.data(one.token).decode(errors="replace") for one in logprobs]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    tops = [
        {
            spellings.data(token).decode(errors="replace"): max(logprob, MINUS_INFINITY)
            for token, logprob in one.top
        }
        for one in logprobs
    ]
    return {
        "tokens": texts,
        "token_logprobs": [max(one.logprob, MINUS_INFINITY) for one in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }
