"""Incremental detokenisation, and stop strings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftree.text.option_fields import REPLACEMENT_CHARACTER


def decode_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of token ids, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


class Decoded:
    """Decode tokens one by one to the same text as all of them decoded together.

    The text that a token adds depends on the tokens before it, for example at a word's space or a
    character's first bytes. The last few tokens are therefore decoded again with it, as in
    text-generation-inference and vLLM.

    Args:
        tokenizer: the target's tokenizer.

    Attributes:
        ids: the tokens so far.
        text: their text, without special tokens.
        sure: the number of characters at its start that no later token can change.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.text, self.sure = "", 0
        self._from, self._to = (
            0,
            0,
        )  # ids[_from:_to] are decoded again; their text ends where `sure` is
        self._again = ""

    def add(self, token: int) -> None:
        """Add a token and decode it."""
        self.ids.append(token)
        text = decode_tokens(self._tokenizer, self.ids[self._from :])
        if not text.startswith(self._again):
            if text.endswith(
                REPLACEMENT_CHARACTER
            ):  # byte tokens: while one character is incomplete, those right before it are unknown, too
                self.text = self.text[: self.sure] + REPLACEMENT_CHARACTER
                return
            self._from = self._to = self.sure = (
                0  # a decoder that changes what it has written; there is no short way
            )
            self._again, text = "", decode_tokens(self._tokenizer, self.ids)
        self.text = self.text[: self.sure] + text[len(self._again) :]
        if len(text) > len(self._again) and not text.endswith(REPLACEMENT_CHARACTER):
            self._from = self._to
            self._to = len(self.ids)
            self.sure = len(self.text)
            self._again = decode_tokens(self._tokenizer, self.ids[self._from :])


@dataclass(frozen=True)
class StopStrings:
    """Hold texts that end a response and are not part of it.

    Attributes:
        texts: texts that are searched in the response, also across tokens.
        ids: ids of stop texts that are special tokens; these have no text in the response.
    """

    texts: tuple[str, ...] = ()
    ids: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, given: Sequence[str]) -> Self:
        """Split the given texts into ordinary texts and special tokens of a tokenizer."""
        if not given:
            return cls()
        special = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        return cls(
            tuple(s for s in given if s not in special),
            {special[s]: s for s in given if s in special},
        )

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Return position and text of the stop text that ends first; of several, the longest.

        The result then does not depend on the number of characters in the last token.

        Args:
            text: the text to search.
            start: the index of the first character to search.
        """
        ends = [(at + len(s), at, s) for s in self.texts if (at := text.find(s, start)) >= 0]
        return min(ends)[1:] if ends else None

    def num_held_back(self, text: str) -> int:
        """Return the number of characters at a text's end that may be the start of a stop text."""
        return max(
            (
                k
                for s in self.texts
                for k in range(1, min(len(s), len(text) + 1))
                if text.endswith(s[:k])
            ),
            default=0,
        )


@final
class TextPieces:
    """Return a response's text in pieces, as soon as no later token can change or cut them.

    Args:
        tokenizer: the target's tokenizer.
        stops: the texts that end the response.

    Attributes:
        stop: the stop text that has occurred, if any.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: StopStrings = StopStrings()
    ) -> None:
        self._decoded = Decoded(tokenizer)
        self._stops = stops
        self._shown = 0
        self.stop: str | None = None

    @property
    def ids(self) -> list[int]:
        """Return the tokens so far."""
        return self._decoded.ids

    def add(self, token: int) -> str:
        """Add a token, and return the text that becomes final.

        It is empty if a character is incomplete or a stop text may have begun.
        """
        self._decoded.add(token)
        sure = self._decoded.text[: self._decoded.sure]
        piece = self._until(len(sure) - self._stops.num_held_back(sure))
        self.stop = self.stop or self._stops.ids.get(token)
        return piece

    def rest(self) -> str:
        """Return the text that was held back, at the end of the response."""
        return self._until(len(self._decoded.text))

    def _until(self, end: int) -> str:
        if (found := self._stops.find(self._decoded.text, self._shown)) is not None:
            end, self.stop = (
                found  # nothing of it has been shown, as all of its beginnings are held back
            )
        piece = self._decoded.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


@final
class StopTexts:
    """Stop once a stop text is in the response, without counting the end of the prompt.

    transformers' `StopStringCriteria` also counts a stop text that began in the prompt, and
    prepares a table over the whole vocabulary for every new set of texts. Otherwise the two agree.

    Args:
        tokenizer: the target's tokenizer.
        stops: the texts that end the response.
        start: number of ids before the response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: StopStrings, start: int) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._start = start
        self._pieces = TextPieces(tokenizer, stops)

    def __call__(self, ids: Tensor, scores: Any = None) -> bool:
        """Return whether the response contains a stop text."""
        response, known = ids[0, self._start :].tolist(), self._pieces.ids
        if response[: len(known)] != known:  # another text: decode it again
            self._pieces = TextPieces(self._tokenizer, self._stops)
        for token in response[len(self._pieces.ids) :]:
            self._pieces.add(token)
        return self._pieces.stop is not None
