"""A vocabulary for grammars that is a mere list of byte strings."""

from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from draftree.sampling.grammar import Vocabulary


def byte_vocabulary(
    tokens: Sequence[bytes], eos: Iterable[int], vocab: int | None = None
) -> Vocabulary:
    """A vocabulary given as what each token writes.

    Args:
        tokens: each token's bytes; nothing for one that is never allowed. Those of `eos` do not
            matter.
        eos: ids that end a text, at least one.
        vocab: V, as many as there are tokens by default.
    """
    ends = frozenset(eos)
    silent = [i for i, t in enumerate(tokens) if not t or i in ends]
    return Vocabulary(
        LLTokenizer(TokenizerWrapper(ByteTable(tokens, min(ends), silent))),
        vocab or len(tokens),
        ends,
    )


class ByteTable:
    """What llguidance reads of a tokenizer that is a mere list of byte strings."""

    def __init__(self, tokens: Sequence[bytes], eos: int, silent: Sequence[int]) -> None:
        # A special token is one that no text writes; it needs a name of its own.
        self.tokens = [f"<silent {i}>".encode() if i in silent else t for i, t in enumerate(tokens)]
        self.special_token_ids = silent
        self.eos_token_id = eos
        self.bos_token_id = None
        self._written = sorted(
            (i for i in range(len(tokens)) if i not in silent), key=lambda i: -len(tokens[i])
        )

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest token at each place, this vocabulary's canonical spelling; EOS for a byte that it cannot write.

        Every byte must have its token: llguidance takes the text as spelled to its end.
        """
        rest, ids = text if isinstance(text, bytes) else text.encode(), list[int]()
        while rest:
            found = next((i for i in self._written if rest.startswith(self.tokens[i])), None)
            ids.append(self.eos_token_id if found is None else found)
            rest = rest[1 if found is None else len(self.tokens[found]) :]
        return ids
