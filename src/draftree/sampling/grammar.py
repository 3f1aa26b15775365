"""Constrained decoding by a JSON schema, a regular expression or a context-free grammar.

A grammar is a logits processor like any other: p is the target's distribution restricted to the
tokens after which the text can still be completed. Its state is a function of the text alone, so it
is right at every node of a tree, in whatever order the nodes are visited. The parser is llguidance
(https://github.com/guidance-ai/llguidance).

Shapes: n ids of a text, V vocabulary.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self, final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typing_extensions import override

from draftree.errors import UnknownName, UserError, format_value
from draftree.tree import Bools
from draftree.utils.files import as_user_error
from draftree.utils.validated_dataclass import Knobs, unicode

MAX_CACHED_NODES = 512
"""Number of texts whose mask one request caches, at V / 8 bytes each; enough for a large tree."""
NO_TOKEN = "no token of the vocabulary writes what would have to come"
Spaces = Literal["line", "none", "any"]
SEPARATORS: dict[Spaces, dict[str, Any]] = {
    "line": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "none": {"whitespace_flexible": False},
    "any": {},
}
"""Layouts of JSON, in llguidance's notation."""


@dataclass(frozen=True)
class Grammar(Knobs):
    """A grammar that the whole response has to match.

    Create it by one of the class methods below, each of which accepts `canonical`. The grammar may
    force several bytes in a row, for example the key of an object. Several tokenisations of them
    are then possible. With `canonical` only the one that the tokenizer itself would write is
    allowed. Such a span is then known before the target has seen it, and is drafted at no cost.
    Without `canonical` every matching token is allowed, and p is the target's distribution
    restricted only by the grammar.

    Attributes:
        kind: `JSON schema`, `regex` or `lark`.
        given: the source from which it was made.
        source: the grammar in llguidance's dialect of Lark.
        canonical: whether forced spans must use the tokenizer's own tokenisation.

    Raises:
        UserError: the grammar is invalid, or uses something that llguidance does not support.
    """

    kind: str
    given: str
    source: str
    canonical: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        with as_user_error(f"{self.label} cannot be used"):
            wrong, messages = LLMatcher.validate_grammar_with_warnings(self.source)
        if wrong:
            raise UserError(f"{self.label} cannot be used: {_one_line(messages[0])}")

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], spaces: Spaces = "line", canonical: bool = True
    ) -> Self:
        """Return the grammar of JSON that a schema allows, with properties in the schema's order.

        Args:
            schema: JSON text or the object; keywords that llguidance does not know (`uniqueItems`,
                `not`) are refused.
            spaces: `line` for one space after each comma and colon, as in Python's `json.dumps`,
                which models know best; `none` for no spaces; `any` for any white space that JSON
                allows, which a weak model may continue without end.
            canonical: whether forced spans must use the tokenizer's own tokenisation.
        """
        with as_user_error(f"JSON schema {format_value(schema)} cannot be used: it is not JSON"):
            value = json.loads(schema) if isinstance(schema, str) else dict(schema)
            text = json.dumps(value)
            for key in _keys(value):
                if not isinstance(key, str):  # `dumps` would convert it
                    raise UserError(
                        f"JSON schema {format_value(schema)} cannot be used: it has the key {key}, allowed are texts"
                    )
        if not isinstance(value, dict | bool):
            raise UserError(
                f"JSON schema {format_value(text)} cannot be used: allowed is an object, true or false"
            )
        if not isinstance(spaces, str) or spaces not in SEPARATORS:
            raise UnknownName("white space of JSON", str(spaces), SEPARATORS)
        if SEPARATORS[spaces] and value is not False:
            value = {} if value is True else value
            options = value.get("x-guidance", {})
            value["x-guidance"] = (
                {**SEPARATORS[spaces], **options} if isinstance(options, dict) else options
            )
        return cls("JSON schema", text, f"start: %json {json.dumps(value)}", canonical)

    @classmethod
    def regex(cls, pattern: str, canonical: bool = True) -> Self:
        r"""Return the grammar of text that a regular expression matches as a whole.

        Args:
            pattern: a pattern in the syntax of Rust's regex crate: without look-around and
                backreferences; `\d` and `\w` match Unicode.
            canonical: whether forced spans must use the tokenizer's own tokenisation.
        """
        if not unicode(pattern):
            raise UserError(f"the pattern is {format_value(pattern)}, allowed is a text")
        made = json.loads(LLMatcher.grammar_from_regex(pattern))
        return cls("regex", pattern, made["grammars"][0]["lark_grammar"], canonical)

    @classmethod
    def lark(cls, text: str, canonical: bool = True) -> Self:
        """Return the grammar given in Lark's notation; texts are derived from its rule `start`.

        Args:
            text: a grammar in llguidance's dialect of Lark; special tokens are written as
                `<|name|>`.
            canonical: whether forced spans must use the tokenizer's own tokenisation.
        """
        return cls("lark", text, text, canonical)

    @property
    def label(self) -> str:
        """Return the grammar's name in error messages."""
        return f"{self.kind} {format_value(self.given)}"

    @property
    def matcher_source(self) -> str:
        """Return the source that is given to the matcher."""
        return (
            self.source if self.canonical else f'%llguidance {{"no_forcing": true}}\n{self.source}'
        )


@final
class Vocabulary:
    """Hold the bytes of each token, in the form that the matcher reads.

    Creating it takes up to a second for a large tokenizer.

    Args:
        tokens: llguidance's own table of tokens.
        vocab: V, the size of the model's vocabulary. Tokens that only the tokenizer or only the
            model has are never allowed.
        eos: ids of the tokens that end a text. They are allowed exactly where the text matches,
            whatever their bytes are.
    """

    def __init__(self, tokens: LLTokenizer, vocab: int, eos: frozenset[int]) -> None:
        self.tokens = tokens
        self.vocab = vocab
        self.eos = eos
        self.ends = np.array(sorted(eos), np.int64)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, vocab: int, eos: Iterable[int]) -> "Vocabulary":
        """Return the vocabulary of a tokenizer; it is cached as long as the tokenizer exists.

        Args:
            tokenizer: a fast tokenizer.
            vocab: V, the size of the model's vocabulary.
            eos: ids of the tokens that end a text; at least one of them must be among the
                tokenizer's tokens.

        Raises:
            UserError: the tokenizer is not a fast one, or has none of these ids.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(f"a grammar needs a fast tokenizer, got {type(tokenizer).__name__}")
        ends, size = frozenset(eos), len(tokenizer)
        if not ends:
            raise UserError("no EOS id is known, a grammar needs at least one to end the text")
        if not 0 <= min(ends) <= max(ends) < vocab:
            raise UserError(f"EOS ids are {sorted(ends)}, allowed are 0 … {vocab - 1}")
        made, key = _MADE.setdefault(tokenizer, {}), (size, vocab, ends)
        if key not in made:
            if not (known := sorted(e for e in ends if e < size)):
                raise UserError(
                    f"EOS ids are {sorted(ends)}, a grammar needs one among the tokenizer's {size} tokens"
                )
            try:
                made[key] = cls(from_tokenizer(tokenizer, eos_token=known), vocab, ends)
            except ValueError as error:
                raise UserError(
                    f"a grammar cannot read the tokenizer: {_one_line(str(error))}"
                ) from error
        return made[key]


_MADE: WeakKeyDictionary[
    PreTrainedTokenizerFast, dict[tuple[int, int, frozenset[int]], Vocabulary]
] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Node:
    """The tokens that are allowed after one text.

    Attributes:
        bits: the allowed tokens as packed bits; none after an EOS, and none if the text is not the
            beginning of a match.
        only: the allowed token, if there is exactly one.
        error: the reason if allowed tokens cannot be computed: no token of the vocabulary fits, or
            the parser reached a limit.
    """

    bits: NDArray[np.uint8] | None = None
    only: int | None = None
    error: str = ""


@final
class Constrained(LogitsProcessor):
    """Restrict one request's text to its grammar.

    After a text, the allowed tokens are those after which the text can still be completed. EOS ids
    are allowed exactly where the text matches. After an EOS, and after a drafted text outside the
    grammar, `allowed_tokens` and `forced_token` allow nothing. A call then leaves the EOS ids, so that p is
    defined there as well; the target never generates such a text.

    Args:
        grammar: the grammar of the response.
        vocabulary: the tokens.
        start: number of ids before the response, which are padding and prompt.

    Raises:
        UserError: no text of the grammar can begin with these tokens, or the grammar names unknown
            tokens.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, start: int) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._start = start
        self._fresh = LLMatcher(vocabulary.tokens, grammar.matcher_source, log_level=0)
        if self._fresh.is_error():
            raise UserError(f"{grammar.label} cannot be used: {_one_line(self._fresh.get_error())}")
        self._matcher, self._at = self._fresh.deep_copy(), list[int]()
        self._node = lru_cache(MAX_CACHED_NODES)(self._compute_node)
        if error := self._node(()).error:
            raise UserError(f"{grammar.label} cannot be used: at the beginning, {error}")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [1, V] with −∞ at tokens that the grammar forbids after ids [1, n].

        Raises:
            UserError: the shapes differ from these, the vocabulary lacks the required bytes, or the
                grammar exceeds the parser's limits.
        """
        expected = (1, self._vocabulary.vocab)
        if input_ids.shape[0] != 1 or tuple(scores.shape) != expected:
            got = f"{input_ids.shape[0]} texts with scores {tuple(scores.shape)}"
            raise UserError(f"got {got}, a grammar follows one text with scores {expected}")
        node = self._node(tuple(input_ids[0, self._start :].tolist()))
        if node.error:
            raise UserError(
                f"{self._grammar.label} cannot be followed after {input_ids.shape[1]} ids: {node.error}"
            )
        mask = self._unpack_mask(node)
        if node.bits is None:
            mask[self._vocabulary.ends] = True
        return scores.masked_fill(~torch.from_numpy(mask).to(scores.device), -torch.inf)

    def allowed_tokens(self, ids: Sequence[int]) -> Bools:
        """Return [V] True at the tokens that may come after a text.

        Args:
            ids: the whole text including padding and prompt, as for a processor.
        """
        return self._unpack_mask(self._node(tuple(ids[self._start :])))

    def forced_token(self, ids: Sequence[int]) -> int | None:
        """Return the token that must come after a text if exactly one is allowed, else None."""
        return self._node(tuple(ids[self._start :])).only

    def _unpack_mask(self, node: _Node) -> Bools:
        vocab = self._vocabulary.vocab
        return (
            np.zeros(vocab, np.bool_)
            if node.bits is None
            else np.unpackbits(node.bits, count=vocab).view(np.bool_)
        )

    def _compute_node(self, response: tuple[int, ...]) -> _Node:
        """Compute the tokens that are allowed after a response."""
        # The matcher never sees an EOS: it forgets to count one that comes where nothing else
        # could, and a rollback would then undo a token too many.
        fits = self._vocabulary.eos.isdisjoint(response) and self._move_matcher(list(response))
        accepting = fits and self._matcher.is_accepting()
        raw = self._matcher.compute_bitmask() if fits else b""
        if self._matcher.is_error():  # the mask is then that of a finished text
            return self._error_node()
        if not fits:
            return _Node()
        mask = np.zeros(self._vocabulary.vocab, np.bool_)
        have = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")[: len(mask)]
        mask[: len(have)] = have
        mask[self._vocabulary.ends] = accepting
        found = np.flatnonzero(mask)
        only = int(found[0]) if len(found) == 1 else None
        if not found.size or (
            only is not None and not accepting and self._matcher.validate_tokens([only]) == 0
        ):
            return _Node(error=NO_TOKEN)  # these bytes exist only as the unknown token
        return _Node(np.packbits(mask), only)

    def _error_node(self) -> _Node:
        """Return a node with the matcher's error, and replace the matcher by a new one.

        A matcher cannot be used after an error.
        """
        error = _one_line(self._matcher.get_error())
        self._matcher, self._at = self._fresh.deep_copy(), []
        return _Node(error=NO_TOKEN if error.startswith("NoExtension") else error)

    def _move_matcher(self, response: list[int]) -> bool:
        """Move the matcher to the end of a response, and return whether all of its tokens match.

        Otherwise the matcher stops after the last matching token.
        """
        common = _common(self._at, response)
        if common < len(self._at) and not self._matcher.rollback(len(self._at) - common):
            self._matcher, common = self._fresh.deep_copy(), 0
        rest, size = response[common:], self._vocabulary.tokens.vocab_size
        fit = next(
            (i for i, t in enumerate(rest) if t >= size), len(rest)
        )  # an unknown id is a permanent error
        consumed = self._matcher.try_consume_tokens(rest[:fit]) if fit else 0
        self._at = response[: common + consumed]
        return len(self._at) == len(response)


def _common(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    if a == b[: len(a)]:  # mostly the new text continues the last one
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _keys(value: Any) -> Iterator[Any]:
    """Yield all keys of an object and of the objects nested in it."""
    if isinstance(value, dict):
        yield from value
    for inner in (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    ):
        yield from _keys(inner)


def _one_line(message: str) -> str:
    """Return the line of llguidance's message that describes the error.

    It is the first line, or for a regular expression the one that begins with "error".
    """
    lines = message.strip().splitlines() or ["unknown error"]
    error = next((line for line in lines if line.startswith("error: ")), lines[0])
    return error.removeprefix("error: ").removeprefix("at 1(8): failed to compile JSON schema: ")
