"""The text of one answer as it is generated, split into reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from draftree.request import Logprob
from draftree.serving.metrics import RequestFigures
from draftree.serving.reasoning import ReasoningSplitter
from draftree.serving.request_models import FunctionTool
from draftree.serving.tool_calls import Call, CallPiece, ForcedCall, may_be_call, read_calls
from draftree.text.completion import Token
from draftree.viewer.token_text import Spellings

FinishReason = Literal["stop", "length", "tool_calls"]
IMPOSSIBLE = -9999.0
"""Stands for a log-probability of −∞, which JSON cannot write; OpenAI's API has the same number."""


@dataclass(frozen=True)
class Delta:
    """Hold what is added to a text: reasoning, content, pieces of tool calls, log-probabilities."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[Logprob, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self.reasoning or self.content or self.calls or self.logprobs)


@final
@dataclass
class AnswerText:
    """Build one text of an answer.

    Args:
        splitter: divides reasoning from the answer.
        tools: functions that the model may call.
        forced: reads the call that the text has to be; None where words are allowed.

    Attributes:
        content: the final words so far.
        reasoning: the reasoning so far.
        calls: the tool calls, once the text has ended; a forced one may be cut.
        logprobs: of all tokens so far, if requested.
        finish_reason: why the text ended; None while it is generated.
        figures: figures of its drafting.
    """

    splitter: ReasoningSplitter
    tools: Sequence[FunctionTool] = ()
    forced: ForcedCall | None = None
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    figures: RequestFigures = field(default_factory=RequestFigures)
    _held: str = ""

    def add(self, tokens: Sequence[Token]) -> Delta:
        """Return what new tokens add to the text, which ends with the last of them."""
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
                self.calls = (Call(self.forced.name, self.forced.arguments),)
        else:
            gained, words = self._told(words, ending is not None)
        if ending is not None:
            self.finish_reason = finish_reason(ending, self.calls)
        self.content += words
        self.reasoning += reasoning
        return Delta(reasoning, words, gained, logprobs)

    def _told(self, words: str, ended: bool) -> tuple[tuple[CallPiece, ...], str]:
        """Return the calls and the words that are final.

        Words that may be a call are held back until the text ends.
        """
        open_ = bool(self.tools) and not self.content
        if not ended and open_ and may_be_call(words):
            self._held = words
            return (), ""
        self._held = ""
        if ended and open_:
            self.calls = tuple(read_calls(words, self.tools))
        if not self.calls:
            return (), words
        return tuple(
            CallPiece(place, call.name, call.arguments) for place, call in enumerate(self.calls)
        ), ""


def finish_reason(ending: str, calls: Sequence[Call]) -> FinishReason:
    """Return why a text ended, by OpenAI's names."""
    if ending in ("length", "context"):
        return "length"
    return "tool_calls" if calls else "stop"


def logprob_entries(spellings: Spellings, logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """Return log-probabilities as `choices[].logprobs.content` of a chat has them."""
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
        "logprob": max(logprob, IMPOSSIBLE),
    }


def legacy_logprobs(
    spellings: Spellings, logprobs: Sequence[Logprob], offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities as `/v1/completions` has them.

    Args:
        spellings: the texts of tokens.
        logprobs: of consecutive tokens.
        offset: index of the first of them in the text.
    """
    texts = [spellings.data(one.token).decode(errors="replace") for one in logprobs]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    tops = [
        {
            spellings.data(token).decode(errors="replace"): max(logprob, IMPOSSIBLE)
            for token, logprob in one.top
        }
        for one in logprobs
    ]
    return {
        "tokens": texts,
        "token_logprobs": [max(one.logprob, IMPOSSIBLE) for one in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }
