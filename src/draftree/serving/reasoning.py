"""Separate the reasoning of a model from its answer."""

from dataclasses import dataclass
from typing import final

OPEN, CLOSE = "<think>", "</think>"
END_OF_REASONING = f"\n{CLOSE}\n\n"
"""Text by which a prompt that opens the reasoning asks for an answer without it, as Qwen 3 does."""


@dataclass(frozen=True)
class Split:
    """Store a piece of generated text, divided into reasoning and answer."""

    reasoning: str = ""
    answer: str = ""


@final
class ReasoningSplitter:
    """Divide a generated text, piece by piece, into the model's reasoning and its answer.

    Args:
        inside: whether the prompt ends with the mark that opens the reasoning.
        enabled: whether the model marks its reasoning. If it does not, all text is the answer.
    """

    def __init__(self, inside: bool, enabled: bool = True) -> None:
        self._inside = inside
        self._enabled = enabled
        self._held = ""
        self._begun, self._trims = inside, False

    def add(self, piece: str) -> Split:
        """Add a piece of text, and return the text whose kind is now known."""
        if not self._enabled:
            return Split(answer=piece)
        self._held += piece
        return self._divide(last=False)

    def rest(self) -> Split:
        """Return the text that was held back, after the last piece was added."""
        return self._divide(last=True)

    def _divide(self, last: bool) -> Split:
        reasoning, answer = "", ""
        while self._held:
            if (
                not self._inside and not self._begun
            ):  # only the beginning of a text can open its reasoning
                text = self._held.lstrip()
                if text.startswith(OPEN):
                    self._inside = self._begun = True
                    self._held = text[len(OPEN) :]
                    continue
                if not last and OPEN.startswith(text):
                    break
                self._begun = True
            if not self._inside:
                text = self._held.lstrip("\n") if self._trims else self._held
                self._trims = self._trims and not text
                answer, self._held = answer + text, ""
                break
            before, mark, after = self._held.partition(CLOSE)
            if mark:
                reasoning = reasoning + before
                self._held = after
                self._inside = False
                self._trims = True
                continue
            kept = 0 if last else overlap(self._held, CLOSE)
            reasoning += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
            break
        return Split(reasoning, answer)


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that may begin a mark."""
    return next(
        (n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0
    )


def splitter(template: str | None, prompt: str) -> ReasoningSplitter:
    """Return the splitter for a chat template and a prompt that was rendered with it.

    The last characters of the prompt are enough.
    """
    enabled = template is not None and CLOSE in template
    return ReasoningSplitter(opens_reasoning(prompt), enabled)


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends with the mark that opens the reasoning."""
    return prompt.rstrip().endswith(OPEN)
