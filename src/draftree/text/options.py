"""Everything that one may ask of a completion, and the request it stands for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Any, Self

from transformers import (
    LogitsProcessor,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from draftree.boundary.arguments import COUNT, FLAG, Rule, check, optional, real, several, text, unicode, whole
from draftree.errors import UnknownName, UserError
from draftree.models.target import Target
from draftree.request import Criterion, Request
from draftree.sampling.grammar import Constrained, Grammar, Vocabulary
from draftree.sampling.processors import ForcedBeginning, FrequencyPenalty, PresencePenalty
from draftree.sampling.settings import RULES as SETTINGS
from draftree.sampling.settings import Sampling
from draftree.text.stops import UNKNOWN, Stops, StopTexts

Forced = Callable[[Sequence[int]], int | None]


def _named(value: Any) -> bool:
    return text(value) or whole(value)


def _stop(value: Any) -> bool:
    return text(value) and UNKNOWN not in value  # a character that is incomplete would look like it


def _stops(value: Any) -> bool:
    return several(value, _stop) or _stop(value) or (isinstance(value, str) and not value)


def _bias(value: Any) -> bool:
    return real(value) or (isinstance(value, float) and value == -inf)


def _biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_named(k) and _bias(v) for k, v in value.items())


def _schema(value: Any) -> bool:
    return unicode(value) or isinstance(value, Mapping)


NUMBER: Rule = "a finite number", real

RULES: dict[str, Rule] = {
    "max_new_tokens": ("a whole number of at least 1", lambda v: whole(v, 1)),
    **SETTINGS,
    "repetition_penalty": ("a finite number above 0", lambda v: real(v) and v > 0),
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "no_repeat_ngram_size": COUNT,
    "logit_bias": ("ids or texts of one token, each with a finite number or -inf", optional(_biases)),
    "suppress": ("ids of at least 0", lambda v: several(v, whole)),
    "bad_words": ("texts of at least one character", lambda v: unicode(v) or several(v, text)),
    "min_new_tokens": COUNT,
    "stop": ("texts of at least one character, U+FFFD none of them", _stops),
    "json_schema": ("JSON text, or the object it stands for", optional(_schema)),
    "regex": ("a pattern of at least one character", optional(text)),
    "grammar": ("a Grammar (Grammar.lark, Grammar.regex, …)", optional(lambda v: isinstance(v, Grammar))),
    "beginning": ("a text, or ids of at least 0", lambda v: unicode(v) or several(v, whole)),
    "max_time": ("seconds above 0", optional(lambda v: real(v) and v > 0)),
    "logprobs": ("none or a whole number of at least 0", optional(whole)),
    "ignore_eos": FLAG,
}
"""What an option may be, in words and as a test."""


@dataclass(frozen=True)
class Options:
    """What is asked of a completion; what is not named is as plain greedy decoding has it.

    Attributes:
        max_new_tokens: how many tokens may be written.
        temperature: 0 for greedy decoding, else a divisor of the logits.
        top_k: how many of the likeliest tokens are kept; 0 keeps all.
        top_p: the least mass of likeliest tokens that is kept; 1 keeps all.
        min_p: the least probability kept, relative to the likeliest token's; 0 keeps all.
        typical_p: the least mass of the most typical tokens that is kept; 1 keeps all.
        seed: of everything that is drawn.
        repetition_penalty: divides the logits above 0 of tokens that stand in prompt or response, and multiplies those
            below; 1 leaves them.
        frequency_penalty: is taken from a token's logit for every time it stands in the response.
        presence_penalty: is taken from the logit of every token that stands in the response.
        no_repeat_ngram_size: no n-gram of tokens stands twice in prompt and response; 0 allows it.
        logit_bias: is added to the logits of tokens, each named by its id or by a text that is one token.
        suppress: ids that are never written.
        bad_words: texts that are never written, in the tokens that the tokenizer writes them with, at the beginning and
            behind a space.
        min_new_tokens: how many tokens are written before one may end the text.
        stop: texts that end the response where they first stand in it, across tokens, and are no part of its text. One that is
            a special token is found by its id.
        json_schema: what JSON the response must be, as text or as the object it stands for.
        regex: what the whole response must match.
        grammar: the same for any other grammar.
        beginning: what the response begins with, as text or as ids.
        max_time: seconds after which nothing more is written, counted from the request.
        logprobs: how many of the likeliest tokens' log-probabilities are told beside each token's own; None tells none.
        ignore_eos: whether EOS ends nothing.

    Raises:
        UserError: a value is out of its range, or values exclude each other.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int | str, float] | None = None
    suppress: Sequence[int] = ()
    bad_words: str | Sequence[str] = ()
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: Grammar | None = None
    beginning: str | Sequence[int] = ""
    max_time: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check(self, RULES)
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, allowed is at most max_new_tokens, {self.max_new_tokens}"
            )
        if len(given := self._constraints) > 1:
            raise UserError(f"{' and '.join(given)} are given, allowed is one of json_schema, regex, grammar")
        if given and self.ignore_eos:
            raise UserError(f"ignore_eos is given with {given[0]}, but EOS is what ends a constrained response")
        self.constraint  # noqa: B018 - made once, and a mistake in it is told now

    @classmethod
    def of(cls, base: Self | None, given: Mapping[str, Any]) -> Self:
        """Options by name, beyond those of a base.

        Raises:
            UnknownName: there is no such option.
        """
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownName("option", name, known)
        return cls(**given) if base is None else replace(base, **given)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(float(self.temperature), self.top_k, self.top_p, self.min_p, self.typical_p, self.seed)

    @property
    def _constraints(self) -> list[str]:
        return [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]

    @cached_property
    def constraint(self) -> Grammar | None:
        """What the response must be, whichever way it was given."""
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema)
        return self.grammar if self.regex is None else Grammar.regex(self.regex)

    def stops(self, tokenizer: PreTrainedTokenizerBase) -> Stops:
        """The stop texts for a tokenizer."""
        return Stops.of(tokenizer, _texts(self.stop))

    def request(self, target: Target, prompt: Sequence[int], number: int = 0, before: Sequence[int] = ()) -> Request:
        """The request for a prompt; the time of `max_time` begins with it.

        Args:
            target: that will write.
            prompt: its ids.
            number: decides the noise, together with the seed.
            before: padding in front of the prompt that processors and criteria are shown.

        Raises:
            UserError: a token does not exist, or the target has no tokenizer where a text must be read.
        """
        start = len(before) + len(prompt)
        steps = tuple(self._processors(target, start, len(before)))
        rules: list[Forced] = [s.forced for s in steps if isinstance(s, ForcedBeginning | Constrained)]
        return Request(
            prompt,
            self.max_new_tokens,
            frozenset() if self.ignore_eos else target.eos,
            number,
            steps,
            guides=steps,  # all of them are functions of the text alone
            forced=_first(rules) if rules else None,
            criteria=tuple(self._criteria(target, start)),
            before=before,
            logprobs=self.logprobs,
            sampling=self.sampling,
        )

    def _processors(self, target: Target, start: int, padding: int) -> Iterator[LogitsProcessor]:
        """In transformers' order; what it lacks comes where it puts a caller's own, and the grammar has the last word."""
        vocab, device = target.decoder.vocab, str(target.decoder.device)
        eos = [] if self.ignore_eos else sorted(target.eos)
        if self.logit_bias:
            biases = {_token(target, key): float(bias) for key, bias in self.logit_bias.items()}
            yield SequenceBiasLogitsProcessor([[[_known("logit_bias", i, vocab)], bias] for i, bias in biases.items()])
        if self.repetition_penalty != 1:
            yield RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty), padding or None)
        if self.no_repeat_ngram_size:
            yield NoRepeatNGramLogitsProcessor(int(self.no_repeat_ngram_size))
        if banned := [ids for ids in _spellings(target, _texts(self.bad_words)) if ids not in [[e] for e in eos]]:
            yield NoBadWordsLogitsProcessor(banned, eos or None)
        if self.min_new_tokens and eos:
            yield MinNewTokensLengthLogitsProcessor(start, int(self.min_new_tokens), eos, device)
        if len(self.suppress):
            yield SuppressTokensLogitsProcessor([_known("suppress", int(i), vocab) for i in self.suppress], device)
        if self.frequency_penalty:
            yield FrequencyPenalty(float(self.frequency_penalty), start)
        if self.presence_penalty:
            yield PresencePenalty(float(self.presence_penalty), start)
        if len(self.beginning):
            ids = _ids(target, self.beginning) if isinstance(self.beginning, str) else list(self.beginning)
            yield ForcedBeginning([_known("beginning", int(i), vocab) for i in ids], start)
        if self.constraint is not None:
            yield Constrained(self.constraint, Vocabulary.of(target.tokenizer, vocab, target.eos), start)

    def _criteria(self, target: Target, start: int) -> Iterator[Criterion]:
        if self.stop:
            yield StopTexts(target.tokenizer, self.stops(target.tokenizer), start)
        if self.max_time is not None:
            yield MaxTimeCriteria(float(self.max_time))


def _first(rules: Sequence[Forced]) -> Forced:
    """What the first of some rules forces that forces anything."""
    return lambda ids: next((token for rule in rules if (token := rule(ids)) is not None), None)


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Texts of which one may be given by itself; none where it is empty."""
    return ((given,) if given else ()) if isinstance(given, str) else tuple(given)


def _ids(target: Target, text: str) -> list[int]:
    """The tokens of a text by itself."""
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _token(target: Target, key: int | str) -> int:
    """The id of a token that may be named by its text."""
    if not isinstance(key, str):
        return int(key)
    ids = _ids(target, key)
    if len(ids) != 1:
        raise UserError(f"logit_bias names {key!r}, which is {len(ids)} tokens {ids}; allowed is a text of one, or an id")
    return ids[0]


def _known(option: str, token: int, vocab: int) -> int:
    if token >= vocab:
        raise UserError(f"{option} names token id {token}, allowed are 0 … {vocab - 1}")
    return token


def _spellings(target: Target, words: Sequence[str]) -> list[list[int]]:
    """Each word as the tokenizer writes it at the beginning of a text and behind a space."""
    found = [_ids(target, spelled) for word in words for spelled in (word, f" {word}")]
    return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]
