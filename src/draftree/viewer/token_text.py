"""Printable forms of tokens: visible white space, escaped control characters."""

import re
import unicodedata
from functools import cached_property

from rich.cells import cell_len, set_cell_size
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}
"""Unicode categories of characters that are invisible or move the characters around them."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Pattern of a SentencePiece token that stands for a single byte."""


LETTERS: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Byte that each letter in the tokens of a byte-level tokenizer (GPT-2) stands for."""


class Spellings:
    """Give the bytes and the readable text of each token id.

    Args:
        tokenizer: tokenizer of the target.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    @cached_property
    def special(self) -> frozenset[int]:
        """Return the ids of special tokens, which are not part of the text."""
        return frozenset(self._tokenizer.all_special_ids)

    def data(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which need not form whole characters."""
        if token not in self._known:
            self._known[token] = self._data(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """Return a token as readable text on one line, without invisible characters."""
        return show_bytes(self.data(token)) or f"#{token}"

    def _data(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):  # an id that pads the vocabulary
            return b""
        if token in self.special:
            return piece.encode()
        if found := BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        decoded = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        if all(c in LETTERS for c in piece):
            data = bytes(LETTERS[c] for c in piece)
            if data.decode(errors="replace") == decoded:  # else the letters stand for themselves
                return data
        # Alone, a SentencePiece token loses the space in front of it.
        return (
            " " if piece.startswith("▁") and not decoded.startswith(" ") else ""
        ).encode() + decoded.encode()


def show_bytes(data: bytes) -> str:
    """Return bytes as text on one line, with signs for white space, and ⟨hex⟩ for invalid bytes."""
    halves = data.decode(errors="surrogateescape")
    shown = re.sub(
        "[\udc80-\udcff]+",
        lambda m: f"⟨{m[0].encode(errors='surrogateescape').hex(' ').upper()}⟩",
        halves,
    )
    text = "".join(SIGNS.get(c, escape_character(c)) for c in shown)
    return f"◌{text}" if text and unicodedata.category(text[0]).startswith("M") else text


def mark_line_ends(text: str) -> str:
    """Return a text with marked line ends and escaped control characters."""
    return "".join(
        c if c in " \t" else "⏎\n" if c == "\n" else SIGNS.get(c, escape_character(c)) for c in text
    )


def escape_character(character: str) -> str:
    """Return a character, or its Python escape if it is invisible."""
    return ascii(character)[1:-1] if unicodedata.category(character) in HIDDEN else character


def cut_to_cells(text: str, cells: int) -> str:
    """Return a text, cut to a width of `cells` terminal cells."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


def percent(share: float) -> str:
    """Return a probability in whole percent as text, without the percent sign."""
    return "<1" if 0 < share < 0.005 else f"{100 * share:.0f}"
